"""Proven optima, against enumeration, formulas and what is published."""

import re
import sys
from contextlib import suppress
from functools import cache
from itertools import product

import pytest

from benchmarks.exact_block import exact_block
from fxpipe.errors import DeadlockError, FxpipeError, ScheduleError
from fxpipe.schedule.costs import Costs, Edge, StageCost, chain
from fxpipe.schedule.exact.order import exact
from fxpipe.schedule.ops import Color, Op, OpKind, Phase, Schedule
from fxpipe.schedule.placement import place
from fxpipe.schedule.search.build import build
from fxpipe.schedule.simulation.simulator import simulate

pytestmark = pytest.mark.slow

pytest.importorskip("ortools")

UNEVEN = chain([StageCost(2, 1, 3, 1, 0.5), StageCost(1, 3, 1, 1, 0.25)], seconds=0.5)
HEAVY_END = chain([StageCost(1, 1, 1, 1, 0.5), StageCost(1, 3, 3, 1, 0.25)], seconds=0.5)


def orders(stage: int, microbatches: int, begun=(0, 0, 0)):
    """All orders of one stage's F, B and W."""
    if begun == (microbatches,) * 3:
        yield ()
    for i, kind in enumerate((OpKind.F, OpKind.B, OpKind.W)):
        if begun[i] < (microbatches if i == 0 else begun[i - 1]):
            after = tuple(count + (j == i) for j, count in enumerate(begun))
            for rest in orders(stage, microbatches, after):
                yield (Op(kind, stage, begun[i]), *rest)


@cache
def all_timelines(costs, microbatches):
    timelines = []
    for order in product(*(orders(stage, microbatches) for stage in range(2))):
        with suppress(DeadlockError):
            timelines.append(simulate(Schedule("any", (0, 1), microbatches, order), costs))
    return timelines


@pytest.mark.in_ci(
    "costs0-makespan-1.5",
    "costs0-makespan-1",
    "costs0-span-None",
    "costs0-span-1",
    "costs1-makespan-1.5",
    "costs1-makespan-1",
    "costs1-span-None",
    "costs1-span-2",
)
@pytest.mark.parametrize("limit", [None, 2, 1.5, 1])
@pytest.mark.parametrize("objective", ["makespan", "span"])
@pytest.mark.parametrize("costs", [UNEVEN, HEAVY_END])
def test_the_best_of_all_orders(limit, objective, costs):
    fitting = [t for t in all_timelines(costs, 3) if limit is None or max(t.peak_memory) <= limit]
    best = min(t.seconds if objective == "makespan" else t.span for t in fitting)
    found = exact(costs, (0, 1), 3, memory_limit=limit, objective=objective)
    assert found.proven
    assert found.value == pytest.approx(best)
    assert found.bound == pytest.approx(best)
    assert limit is None or max(found.timeline.peak_memory) <= limit


def test_span_and_makespan_differ():
    assert exact(HEAVY_END, (0, 1), 3, objective="span").value == 21
    assert exact(HEAVY_END, (0, 1), 3).value == 22.5


def test_a_limit_for_each_rank():
    free, bound = exact(UNEVEN, (0, 1), 3), exact(UNEVEN, (0, 1), 3, memory_limit=(3, 1))
    assert free.value < bound.value
    assert bound.timeline.peak_memory[1] == 1


def test_zb_h1_is_the_best_within_its_memory():
    costs = chain([StageCost(10, 12, 6, 1, 1)] * 4, seconds=1)
    start = build("zb-h1", ranks=4, microbatches=6, costs=costs)
    found = exact(costs, start.placement, 6, memory_limit=4, start=start)
    assert (found.value, found.bound, found.proven) == (228, 228, True)
    assert found.schedule.name == "exact"
    # Zero bubble with memory for it: (p-1)(F+Tc) before and after is all that the span does not need.
    assert exact(costs, start.placement, 6, objective="span").value == 210


def test_two_stages_a_rank():
    costs = chain([StageCost(1, 1, 1, 0.5, 0.5)] * 6)
    found = exact(costs, place("v", 3, 2), 4, memory_limit=2.5)
    assert (found.value, found.proven) == (27, True)
    assert max(found.timeline.peak_memory) == 2.5


def test_values_held_within_a_rank_count():
    plain = chain([StageCost(1, 1, 1, 1)] * 4)
    turn = Edge(Color(1, Phase.F), Color(2, Phase.F), bytes=10)
    costs = Costs(plain.stages, tuple(turn if e.source == turn.source else e for e in plain.edges))
    assert max(exact(costs, (0, 1, 1, 0), 2, memory_limit=11).timeline.peak_memory) <= 11
    with pytest.raises(ScheduleError, match="keeps the memory limit 10"):
        exact(costs, (0, 1, 1, 0), 2, memory_limit=10)


def test_times_without_a_common_measure():
    costs = chain([StageCost(1, 2**0.5, 3**0.5, 1, 1)] * 2, seconds=0.1)
    best = min(t.seconds for t in all_timelines(costs, 2))
    found = exact(costs, (0, 1), 2)
    assert found.bound <= best <= found.value
    assert found.value == pytest.approx(best, rel=1e-4)
    assert found.proven


def test_a_limit_below_one_microbatch():
    with pytest.raises(
        ScheduleError, match=re.escape("no schedule of this placement keeps the memory limit 0.9")
    ):
        exact(UNEVEN, (0, 1), 2, memory_limit=0.9)


# -- blocks ------------------------------------------------------------------------------------------------


def v_costs(ranks, forward, backward, weight, kept, seconds=0.0):
    return chain([StageCost(forward, backward, weight, 0.5, kept / 2)] * 2 * ranks, seconds)


@pytest.mark.parametrize(
    ("ranks", "times", "kept", "mean", "peak"),
    [
        (4, (1, 1, 1), 1, 1.8333, 2),
        (4, (15, 15, 10), 0.43, 2.5947, 2.93),
        (8, (1, 1, 1), 0.43, 3.12, 3.43),
    ],
)
def test_blocks_without_bubble(ranks, times, kept, mean, peak):
    block = exact_block(v_costs(ranks, *times, kept), place("v", ranks, 2))
    assert block.proven
    assert block.period == 2 * sum(times)
    assert max(block.mean_memory) == pytest.approx(mean, abs=1e-4)
    assert block.bound == pytest.approx(max(block.mean_memory))
    assert max(block.peak_memory) == pytest.approx(peak)


def test_a_block_repeats():
    """Ranks' ops do not overlap modulo the period; what an op needs has ended and arrived."""
    costs, placement = v_costs(3, 1.1, 1.2, 0.7, 0.5, seconds=0.1), place("v", 3, 2)
    block = exact_block(costs, placement, period=6.2)
    lengths = (1.1, 1.2, 0.7)
    for rank in range(3):
        begun = sorted(
            (start % 6.2, length)
            for stage, home in enumerate(placement)
            if home == rank
            for start, length in zip(block.starts[stage], lengths, strict=True)
        )
        ends = [start + length for start, length in begun]
        assert all(end <= start + 1e-9 for end, (start, _) in zip(ends, begun[1:], strict=False))
        assert ends[-1] <= begun[0][0] + 6.2 + 1e-9
    for stage in range(5):
        delay = 0.1 if placement[stage] != placement[stage + 1] else 0
        here, there = block.starts[stage], block.starts[stage + 1]
        assert here[0] + 1.1 + delay <= there[0] + 1e-9
        assert there[1] + 1.2 + delay <= here[1] + 1e-9
        assert here[1] + 1.2 <= here[2] + 1e-9


def test_a_longer_period_needs_less():
    costs, placement = v_costs(4, 15, 15, 10, 0.43), place("v", 4, 2)
    means = [max(exact_block(costs, placement, period=period).mean_memory) for period in (80, 92, 120)]
    assert means == sorted(means, reverse=True)
    assert means[0] > means[2]
    with pytest.raises(ScheduleError, match="a period of 79 is shorter than the busiest rank's work of 80"):
        exact_block(costs, placement, period=79)


def test_without_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(FxpipeError, match=re.escape("pip install 'fxpipe[solver]'")):
        exact(UNEVEN, (0, 1), 2)
    with pytest.raises(FxpipeError, match=re.escape("pip install 'fxpipe[solver]'")):
        exact_block(UNEVEN, (0, 1))
