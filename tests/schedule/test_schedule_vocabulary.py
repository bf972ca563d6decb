"""The microbatches in flight and the time of schedules with vocabulary stages, by the rules of 2411.05288."""

import pytest
from marks import with_variations

from fxpipe.schedule.costs import Costs, StageCost, chain
from fxpipe.schedule.ops import Schedule, order_text, parse_order
from fxpipe.schedule.search.build import build
from fxpipe.schedule.search.vocabulary_passes import fused
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.schedule.simulation.timeline import Timeline
from fxpipe.schedule.stages import Vocabulary
from fxpipe.schedule.vocabulary_costs import with_output_shards
from tests.schedule.test_schedule_properties import with_lookups

pytestmark = pytest.mark.slow

PERIOD = 4.0  # of a microbatch on a rank: F, B, W and its part of the output layer, of 1 each


def spread(
    name: str, ranks: int, microbatches: int, barriers: int, stages: int = 1, shape: str = "plain"
) -> Timeline:
    """The timeline of a family; memory is the number of microbatches between F and B."""
    part = 1 / stages
    model = chain([StageCost(part, part, part, saved_activations=part)] * (ranks * stages))
    costs = with_output_shards(model, ranks, 1.0, barriers, 0.0)
    return timeline(name, ranks, microbatches, costs, Vocabulary(0, ranks, barriers), stages, shape)


def timeline(
    name: str, ranks: int, microbatches: int, costs: Costs, vocabulary: Vocabulary, stages: int, shape: str
) -> Timeline:
    schedule: Schedule = build(
        name,
        ranks=ranks,
        microbatches=microbatches,
        costs=costs,
        stages_per_rank=stages,
        placement=shape,
        vocabulary=vocabulary,
    )
    return simulate(schedule, costs)


IN_FLIGHT = {  # on rank r of p, without vocabulary stages
    "gpipe": lambda p, r, m: m,
    "1f1b": lambda p, r, m: min(m, p - r),
    "zb-h1": lambda p, r, m: min(m, p - r),  # W holds nothing here
    "zb-h2": lambda p, r, m: min(m, 2 * (p - r) - 1),
}


@pytest.mark.in_ci(
    "gpipe-2-12-1",
    "gpipe-2-12-2",
    "1f1b-2-12-1",
    "1f1b-2-12-2",
    "zb-h1-2-12-1",
    "zb-h1-2-12-2",
    "zb-h2-2-12-1",
    "zb-h2-2-12-2",
)
@pytest.mark.parametrize("barriers", [1, 2])
@pytest.mark.parametrize("microbatches", with_variations([4, 12], [4]))
@pytest.mark.parametrize("ranks", with_variations([2, 4, 8], [4]))
@pytest.mark.parametrize("name", IN_FLIGHT)
def test_one_microbatch_more_for_each_barrier_hides_it(name, ranks, microbatches, barriers):
    """A barrier delays the backward by one period at most, while the rank computes on the microbatch more."""
    found = spread(name, ranks, microbatches, barriers)
    for rank, peak in enumerate(found.peak_memory):
        assert peak <= min(microbatches, IN_FLIGHT[name](ranks, rank, microbatches) + barriers)
    fill = (ranks - 1) * (1 + 1 + 1)  # until the last rank has its first F, and from its last B to the end
    assert found.span <= microbatches * PERIOD + fill + barriers * PERIOD


@pytest.mark.parametrize("barriers", [1, 2])
@pytest.mark.parametrize(
    ("name", "ranks", "stages", "shape", "in_flight"),
    [
        ("zb-h2", 2, 1, "plain", 2 * 2 - 1),
        ("interleaved", 2, 2, "plain", (2 + 2 * 2 - 1) / 2),  # its warm-up, in stages, of two a microbatch
        ("zb-h1", 2, 2, "v", 2),
        ("zb-h1", 4, 2, "v", 4),
    ],
)
def test_no_microbatch_more_without_a_gain(name, ranks, stages, shape, in_flight, barriers):
    """The microbatches that the family holds anyway suffice for a span without a bubble."""
    microbatches = 12
    found = spread(name, ranks, microbatches, barriers, stages, shape)
    assert found.span == pytest.approx(microbatches * PERIOD)
    assert max(found.peak_memory) == in_flight


@pytest.mark.parametrize("barriers", [1, 2])
def test_an_embedding_shard_holds_two_microbatches_at_most(barriers):
    """Rank 0 has the stage that uses the embeddings.  Each takes 0.1 of its memory, and 0.1 of its time."""
    ranks, microbatches = 4, 12
    model = chain([StageCost(0.5, 0.5, 0.5, saved_activations=0.5)] * (2 * ranks))
    costs = with_lookups(with_output_shards(model, ranks, 1.0, barriers, 0.0), ranks, 0.0, ranks, ranks)
    found = timeline("zb-h1", ranks, microbatches, costs, Vocabulary(ranks, ranks, barriers), 2, "v")
    assert found.peak_memory[0] <= ranks + 2 * 0.1 + 1e-9
    assert max(found.peak_memory[1:]) <= ranks
    assert found.span < (microbatches + 1) * (PERIOD + 0.1)


def test_all_backwards_of_an_embedding_shard_are_ops_of_one_kind():
    """At the place of B: W is empty."""

    def text(order: str, shards: int) -> str:
        return order_text(fused(parse_order(order), shards))

    assert text("B0.0 W0.0 B1.0 B0.1 W0.1 W1.0\nB2.0 W2.0", 2) == "BW0.0 BW1.0 BW0.1\nB2.0 W2.0"
    assert text("B0.0 F1.0 W0.0 BW0.1 F2.0 BW2.0", 1) == "BW0.0 F1.0 BW0.1 F2.0 BW2.0"
