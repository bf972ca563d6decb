"""Why ops begin when they do, clocks on one axis, memory by kind: on schedules followed by hand."""

from dataclasses import replace
from itertools import accumulate

import pytest

from fxpipe.schedule.costs import Costs, Edge, Exchange, StageCost, chain
from fxpipe.schedule.offload.planner import offload, with_link
from fxpipe.schedule.ops import Color, Direction, Phase, Schedule, Transfer, parse_order
from fxpipe.schedule.search.build import build
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.schedule.simulation.timeline import Span
from fxpipe.viz.clocks import aligned
from fxpipe.viz.memory_kinds import MemoryKind, changes
from fxpipe.viz.waits import Cause, IdleWait, Passed, measured_waits, passed, waits

F, B, W = Phase.F, Phase.B, Phase.W
TWO = chain([StageCost(1, 1, 1, 4, 2)] * 2, seconds=0.5, bytes=8)


def timeline_of(order: str, costs: Costs = TWO, placement=(0, 1), microbatches=2, **options):
    return simulate(Schedule("by hand", placement, microbatches, parse_order(order), **options), costs)


@pytest.fixture(scope="module")
def one_f_one_b():
    """rank 0: F0 0–1, F1 1–2, BW0 5–7, BW1 8–10
    rank 1: F0 1.5–2.5, BW0 2.5–4.5, F1 4.5–5.5, BW1 5.5–7.5"""
    return timeline_of("F0.0 F0.1 BW0.0 BW0.1\nF1.0 BW1.0 F1.1 BW1.1")


def test_the_cause_of_each_begin(one_f_one_b):
    rank, message = Cause.RANK, Cause.MESSAGE
    assert waits(one_f_one_b) == (
        (
            IdleWait(rank, 0, -1, 0, 0),
            IdleWait(rank, 0, 0, 1, 1),
            IdleWait(message, 1, 1, made=4.5, over=5),
            IdleWait(message, 1, 3, made=7.5, over=8),
        ),
        (
            IdleWait(message, 0, 0, made=1, over=1.5),
            IdleWait(rank, 1, 0, 2.5, 2.5),
            IdleWait(rank, 1, 1, 4.5, 4.5),
            IdleWait(rank, 1, 2, 5.5, 5.5),
        ),
    )


def test_causes_in_a_measured_step(one_f_one_b):
    """The time of messages is not known there: they count from the end of the op that sends them."""
    first, second = one_f_one_b.spans
    late = [Span(op, start + 1, end + 1) for op, start, end in second]
    found = measured_waits(one_f_one_b, [first, late])
    assert found[1][0] == IdleWait(Cause.MESSAGE, 0, 0, made=1, over=1)
    assert found[0][2] == IdleWait(Cause.MESSAGE, 1, 1, made=5.5, over=5.5)
    assert found[0][1].cause == Cause.RANK


def test_a_wait_for_a_transfer():
    costs = with_link(chain([StageCost(1, 1, 1, 4, 0)] * 2, seconds=0.0), 3.0)
    out, back = Transfer(Direction.OUT, 0, 0, B, 1, 2), Transfer(Direction.IN, 0, 0, B, 2, 2)
    order = "F0.0 F0.1 B0.0 B0.1 W0.0 W0.1\nF1.0 B1.0 F1.1 B1.1 W1.0 W1.1"
    found = timeline_of(order, costs, transfers=(out, back))
    wait = waits(found)[0][2]
    assert (wait.cause, wait.transfer) == (Cause.TRANSFER, back)
    assert wait.over == found.spans[0][2].start == found.transfers[0][1].end


def test_a_wait_for_other_replicas():
    costs = replace(TWO, exchanges=(Exchange(1.0, 3.0), Exchange(1.0, 3.0)))
    found = timeline_of("F0.0 F0.1 BW0.0 BW0.1\nF1.0 BW1.0 F1.1 BW1.1", costs)
    assert waits(found)[0][0] == IdleWait(Cause.EXCHANGE, 0, -1, 3.0, 3.0)


def test_an_op_that_could_have_filled_the_gap():
    """Rank 0 waits for B1.1 though W0.0 is ready from 4 on, and needs nothing that is not there."""
    found = timeline_of(
        "F0.0 F0.1 B0.0 B0.1 W0.0 W0.1\nF1.0 B1.0 F1.1 B1.1 W1.0 W1.1",
        chain([StageCost(1, 1, 1, 4, 2)] * 2, 0.5),
    )
    gap = found.spans[0][3].start - found.spans[0][2].end
    assert gap == 1.0
    assert passed(found)[0][3] == Passed(position=4, ready=found.spans[0][2].end, live=4 + 2)
    assert 2 not in passed(found)[0], "before B0.0 nothing else is ready"


def test_memory_is_why_an_op_that_was_ready_stands_later():
    order = "F0.0 F0.1 BW0.0 F0.2 BW0.1 BW0.2\nF1.0 BW1.0 F1.1 BW1.1 F1.2 BW1.2"
    found = timeline_of(order, microbatches=3)
    peak = found.peak_memory[0]
    assert passed(found)[0][2] == Passed(position=3, ready=0.0, live=12.0)
    assert peak == 8.0


@pytest.mark.parametrize("shift", [0.0, 1000.0, -1000.0])
def test_clocks_are_aligned(shift):
    costs = chain([StageCost(1, 1, 1)] * 4, seconds=0.25)
    found = simulate(build("1f1b", ranks=4, microbatches=6, costs=costs), costs)
    shifted = [
        [Span(op, start + shift * rank, end + shift * rank) for op, start, end in own]
        for rank, own in enumerate(found.spans)
    ]
    spans = aligned(found, shifted)
    start = {span.op: span.start for own in spans for span in own}
    for own, planned in zip(spans, found.spans, strict=True):
        assert [span.end - span.start for span in own] == pytest.approx([s.end - s.start for s in planned])
    for stage in range(3):
        for m in range(6):
            names = {str(op): time for op, time in start.items()}
            assert names[f"F{stage}.{m}"] < names[f"F{stage + 1}.{m}"]
            assert names[f"BW{stage + 1}.{m}"] < names[f"BW{stage}.{m}"]
    if not shift:
        assert spans == found.spans


def levels(found, kinds):
    """Per rank, time -> memory of these kinds from then on."""
    result = []
    for own in changes(found):
        kept = [change for change in own if change.kind in kinds]
        sums = accumulate(change.bytes for change in kept)
        result.append({change.time: level for change, level in zip(kept, sums, strict=True)})
    return result


SIMULATED = {MemoryKind.SAVED, MemoryKind.FOR_WEIGHT, MemoryKind.HANDED}


@pytest.mark.parametrize("family", ["1f1b", "zb-h1", "dualpipe-v", "offloaded"])
def test_kinds_of_memory_add_up_to_the_simulated(family):
    costs = chain([StageCost(1, 1, 0.5, 4, 3)] * 8, seconds=0.1, bytes=1)
    name, ranks = ("zb-h1", 8) if family == "offloaded" else (family, 4 if family == "dualpipe-v" else 8)
    found = simulate(build(name, ranks=ranks, microbatches=10, costs=costs), costs)
    if family == "offloaded":
        linked = with_link(costs, 0.2)
        found = offload(simulate(found.schedule, linked), 1.0).timeline
        assert found.moved > 0
    for own, simulated in zip(levels(found, SIMULATED), found.memory, strict=True):
        expected = dict(simulated)  # the last level at a time
        assert own.keys() <= expected.keys()
        assert [own[time] for time in own] == pytest.approx([expected[time] for time in own])
    for kind in MemoryKind:
        assert all(level > -1e-9 for own in levels(found, {kind}) for level in own.values()), kind
        assert all(abs([*own.values()][-1]) < 1e-9 for own in levels(found, {kind}) if own), kind


def test_messages_that_wait_for_their_op(one_f_one_b):
    """F0.1 arrives on rank 1 at 2.5, and F1.1 begins at 4.5."""
    received = [c for c in changes(one_f_one_b)[1] if c.kind is MemoryKind.RECEIVED]
    assert [(c.time, c.stage, c.bytes) for c in received] == [(2.5, 1, 8), (4.5, 1, -8)]


def test_values_for_a_stage_of_the_rank():
    edge = Edge(Color(0, F), Color(1, F), bytes=8)
    back = Edge(Color(1, B), Color(0, B), bytes=8)
    costs = Costs((StageCost(1, 1, 1, 4, 2),) * 2, (edge, back))
    found = timeline_of("F0.0 F0.1 F1.0 BW1.0 BW0.0 F1.1 BW1.1 BW0.1", costs, placement=(0, 0))
    handed = [c for c in changes(found)[0] if c.kind is MemoryKind.HANDED]
    assert [(c.time, c.bytes) for c in handed[:3]] == [(1, 8), (2, -8), (2, 8)]
