"""What the report says of candidates that a memory limit has left out."""

from dataclasses import replace

import pytest
from zoo import CASES, Shape, compiled

from fxpipe.plan.artifact import Plan
from fxpipe.schedule.candidate_row import Tried
from fxpipe.schedule.search.build import build
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.viz.report.data import report_data
from fxpipe.viz.report.misfits import Beyond, beyond_limit

RANKS, MICROBATCHES = 2, 6


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A plan whose limit is what its own schedule needs."""
    case = CASES["tied_head"]
    plan = compiled(case, case.build(), MICROBATCHES, Shape(RANKS, "1f1b", check=False)).plan
    limit = max(plan.prediction.peak_memory)
    return replace(plan, limits=(limit,) * RANKS, memory_limit="1GiB")


def left_out(name: str, stages: int = 1, **more: object) -> Tried:
    return Tried(name, stages, "plain", peak_memory=1e9, why="does not fit", **more)


def test_what_does_not_fit_is_simulated_without_the_limit(plan):
    tried = (left_out("gpipe"), left_out("zb-h2"), Tried("1f1b", 1, "plain", 1.0, 0.1, 1.0))
    found = beyond_limit(replace(plan, tried=tried))
    assert found.keys() == {0, 1}
    for number, name in enumerate(("gpipe", "zb-h2")):
        schedule = build(name, ranks=RANKS, microbatches=MICROBATCHES, costs=plan.costs)
        timeline = simulate(schedule, plan.costs)
        peak = max(timeline.peak_memory)
        assert found[number] == Beyond(timeline.seconds, peak, peak - plan.limits[0])
    assert found[1].seconds < simulate(plan.ordered, plan.costs).seconds


@pytest.mark.parametrize(
    "tried",
    [
        left_out("zb"),  # searched
        left_out("gpipe", stages=2),  # other stages, of which no costs are known
        left_out("gpipe", recompute="full"),
        left_out("gpipe", barriers=1),
        left_out("gpipe", head_chunks=2),
        left_out("1f1b"),  # fits
    ],
)
def test_what_is_not_known_is_left_out(plan, tried):
    assert beyond_limit(replace(plan, tried=(tried,))) == {}


@pytest.mark.parametrize("shape", [{"vocab_parallel": True}, {"offload": 0.5}], ids=["vocabulary", "offload"])
def test_a_split_vocabulary_and_offload_stay(shape):
    case = CASES["tied_head"]
    made = compiled(case, case.build(), MICROBATCHES, Shape(RANKS, "1f1b", check=False, **shape)).plan
    tried = left_out("gpipe", barriers=0 if made.vocabulary is None else made.vocabulary.barriers)
    limit = max(made.prediction.peak_memory)
    found = beyond_limit(replace(made, limits=(limit,) * RANKS, memory_limit="1GiB", tried=(tried,)))[0]
    assert found.more == found.peak_memory - limit > 0
    whole = build(
        "gpipe", ranks=RANKS, microbatches=MICROBATCHES, costs=made.costs, vocabulary=made.vocabulary
    )
    timeline = simulate(whole, made.costs)
    if made.transfers:  # half of what it holds is not there
        assert 0.4 < found.peak_memory / max(timeline.peak_memory) < 0.8
    else:
        assert found == Beyond(timeline.seconds, max(timeline.peak_memory), found.more)


def test_without_a_limit_nothing_lacks_memory(plan):
    assert beyond_limit(replace(plan, limits=(), tried=(left_out("gpipe"),))) == {}


def test_the_report_has_both(plan):
    limited = replace(plan, tried=(left_out("gpipe"), left_out("zb")))
    data = report_data(limited, ("",) * RANKS, None)
    beyond = [candidate["beyond"] for candidate in data["candidates"]]
    assert beyond[0]["more"] == beyond[0]["peak_memory"] - plan.limits[0] > 0
    assert beyond[1] is None
    assert data["head"]["limit"] == plan.limits[0]
