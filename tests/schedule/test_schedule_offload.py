"""Activations away between F and B: what links carry, what memory is left, and what is refused."""

import json
from dataclasses import replace
from itertools import pairwise
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fxpipe.cli.command import main
from fxpipe.errors import ScheduleError
from fxpipe.schedule.candidate import SearchResult
from fxpipe.schedule.costs import Costs, Edge, StageCost, chain
from fxpipe.schedule.offload.planner import (
    FULL,
    HALF,
    OffloadPlan,
    _Planner,
    offload,
    offload_within,
    with_link,
)
from fxpipe.schedule.ops import PHASES, Color, Direction, Phase, Transfer
from fxpipe.schedule.problem import Problem, per_rank
from fxpipe.schedule.search.auto import search
from fxpipe.schedule.search.build import build, schedule_of
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.schedule.simulation.timeline import Timeline

pytestmark = pytest.mark.slow


def timeline(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int,
    k: float,
    sharing: int = 1,
    kept: float = 1.0,
    **options,
) -> Timeline:
    stage = StageCost(1 / chunks, 1 / chunks, 1 / chunks, 1 / chunks, kept / chunks)
    costs = chain([stage] * (ranks * chunks))
    schedule = build(
        name, ranks=ranks, microbatches=microbatches, costs=costs, stages_per_rank=chunks, **options
    )
    return simulate(schedule, with_link(costs, k, sharing))


def check(plan: OffloadPlan, before: Timeline) -> None:
    """Nothing waits, a link carries one transfer at a time each way, memory is freed and taken again."""
    found, placement = plan.timeline, before.schedule.placement
    assert found.seconds == pytest.approx(before.seconds)
    # The planner allows a wait of 1e-9 of the step for each offload and each reload, and sums round.
    assert max(found.stalled) <= 2.002e-9 * max(1, plan.moved) * found.seconds
    assert found.costs.link is not None
    sharing, ranks = found.costs.link.ranks, range(before.schedule.ranks)
    for first in ranks[::sharing]:
        for direction in Direction:
            taken = sorted(
                (start, end)
                for rank in ranks[first : first + sharing]
                for t, start, end in found.transfers[rank]
                if t.direction is direction
            )
            assert all(one[1] <= other[0] + 1e-9 for one, other in pairwise(taken))
    for rank in ranks:
        spans = {
            (op.stage, phase, op.microbatch): (start, end)
            for op, start, end in found.spans[rank]
            for phase in PHASES[op.kind]
        }
        times = {
            (t.direction, t.stage, t.microbatch, t.user): (start, end)
            for t, start, end in found.transfers[rank]
        }
        assert len(times) == len(found.transfers[rank])
        for (direction, stage, microbatch, user), (start, end) in times.items():
            assert placement[stage] == rank
            cost = found.costs.stages[stage]
            size = cost.offloadable if user is Phase.B else cost.offloadable_for_weight
            assert end - start == pytest.approx(found.costs.link.seconds * size)
            if direction is Direction.OUT:
                assert start >= spans[stage, Phase.F, microbatch][1] - 1e-9
            else:
                assert start >= times[Direction.OUT, stage, microbatch, user][1] - 1e-9
                assert end <= spans[stage, user, microbatch][0] + 1e-9
        assert min((live for _, live in found.memory[rank]), default=0.0) >= -1e-9
        assert found.memory[rank][-1][1] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("k", [0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5])
def test_half_and_all_of_gis(k):
    """The marks of issue and paper, for 8 ranks, 32 microbatches, 4 stages a rank in groups of 8."""
    found = timeline("gis", 8, 32, 4, k, group=8)
    half, full = (offload(found, share) for share in (HALF, FULL))
    for plan in (half, full):
        check(plan, found)
        assert max(plan.timeline.peak_memory) < max(found.peak_memory)
    if k <= 0.5:
        assert max(half.timeline.peak_memory) <= 4
    if k <= 0.3:
        assert max(full.timeline.peak_memory) <= 1
    assert half.asked == 512
    assert full.asked == 1024
    assert full.timeline.moved == full.moved / 4
    if k == 1.5:  # the link carries two thirds of the time's work at most
        assert full.moved < 0.67 * full.asked


@pytest.mark.in_ci("0.1")
@pytest.mark.parametrize("k", [0.1, 0.3])
def test_a_quarter_is_left_of_many_chunks_with_half_of_them_away(k):
    """2503.01328's figure, for 8 ranks with 16 stages each: in groups it is a half."""
    grouped, found = (timeline(name, 8, 32, 16, k) for name in ("gis", "staggered"))
    half = offload(found, HALF)
    check(half, found)
    assert half.timeline.moved == half.asked / 16 == 128
    assert max(half.timeline.peak_memory) <= 0.25 * max(found.peak_memory)
    assert max(half.timeline.peak_memory) <= 0.3 * max(grouped.peak_memory)
    assert max(offload(grouped, HALF).timeline.peak_memory) == 0.5 * max(grouped.peak_memory)
    assert found.seconds <= 1.025 * grouped.seconds


def test_neighbours_take_turns_on_a_link():
    alone, shared = (timeline("gis", 8, 32, 4, 0.4, sharing, group=8) for sharing in (1, 2))
    plans = [offload(found, FULL) for found in (alone, shared)]
    check(plans[1], shared)
    peaks = [max(found.timeline.peak_memory) for found in plans]
    assert peaks[0] < peaks[1] < max(alone.peak_memory)


def test_a_limit_moves_as_little_as_it_takes():
    found = timeline("interleaved", 8, 32, 4, 0.3)
    plans = [offload_within(found, [limit] * 8) for limit in (20, 6, 3)]
    assert all(max(plan.timeline.peak_memory) <= limit for plan, limit in zip(plans, (20, 6, 3), strict=True))
    assert plans[0].moved == 0 < plans[1].moved < plans[2].moved
    with pytest.raises(
        ScheduleError, match=r"memory limit of 0\.1; the smallest that it can keep .* is 0\.75"
    ):
        offload_within(found, [0.1] * 8)


def test_each_rank_has_its_own_limit():
    found = timeline("1f1b", 4, 16, 1, 0.2)
    plan = offload_within(found, [2, 3, 2, 1])
    check(plan, found)
    assert [peak <= limit for peak, limit in zip(plan.timeline.peak_memory, (2, 3, 2, 1), strict=True)] == [
        True
    ] * 4
    assert not plan.timeline.transfers[1]
    assert plan.timeline.transfers[0]


@pytest.mark.variation
def test_the_search_offloads_where_the_limit_costs_time_otherwise():
    """Over a fast link a third of 1F1B's memory is enough to be as fast as with all of it."""

    def found(limit: float, offload: str | None) -> SearchResult:
        choices = []
        for chunks, placement in ((1, "plain"), (2, "plain"), (2, "v")):
            stage = StageCost(*(1 / chunks,) * 4, 0.5 / chunks)
            costs = with_link(chain([stage] * (4 * chunks)), 0.1)
            choices.append(Problem(4, 16, chunks, placement, costs, (limit,) * 4, offload=offload))
        return search(choices, effort=0.5)

    best, with_none, with_some = found(9, "auto"), found(1.5, None), found(1.5, "auto")
    assert best.timeline.moved == with_none.timeline.moved == 0 < with_some.timeline.moved
    assert with_some.timeline.seconds <= best.timeline.seconds < 0.8 * with_none.timeline.seconds
    assert max(with_some.timeline.peak_memory) <= 1.5
    assert all(t.offloaded for t in with_some.tried if t.seconds is not None)
    without = [t for t in with_some.tried if "not searched" in t.why]
    assert {(t.stages_per_rank, t.placement) for t in without} == {(1, "plain"), (2, "plain"), (2, "v")}


@settings(max_examples=30, deadline=None)
@example("interleaved", 1, 1, 1e-9, 1.0, 0.0, 1)
@example("interleaved", 1, 3, 1e-8, 1.0, 0.5, 1)
@example("interleaved", 1, 5, 1e-8, 1.0, 0.0, 1)
@given(
    st.sampled_from(["1f1b", "zb-h1", "interleaved", "gis", "staggered", "gpipe", "1f1b-v", "dualpipe-v"]),
    st.integers(1, 5),
    st.integers(1, 12),
    st.floats(0, 2),
    st.floats(0, 1),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(1, 3),
)
def test_any_schedule_any_share(name, ranks, microbatches, k, share, kept, sharing):
    chunks = 1 if name in ("1f1b", "zb-h1", "gpipe") else 2
    found = timeline(name, ranks, microbatches, chunks, k, sharing, kept)
    plan = offload(found, share)
    check(plan, found)
    assert plan.moved <= plan.asked
    for less, most in zip(plan.timeline.peak_memory, found.peak_memory, strict=True):
        assert less <= most + 1e-9


@pytest.mark.parametrize(("ranks", "link", "moved"), [(1, 0.7, 2), (2, 0.7, 6), (2, 1.3, 3)])
def test_what_was_dropped_is_tried_again(ranks, link, moved):
    """Half of the late activations are dropped at once; of six microbatches, one or two of these fit."""
    before = timeline("gpipe", ranks, 6, 1, link)
    plan = offload(before, FULL)
    check(plan, before)
    assert plan.moved == moved


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(["1f1b", "interleaved", "gpipe", "dualpipe-v"]),
    st.integers(1, 4),
    st.integers(1, 9),
    st.floats(0.1, 2),
    st.floats(0, 1),
    st.integers(1, 3),
)
def test_a_second_try_carries_no_less(name, ranks, microbatches, k, share, sharing):
    before = timeline(name, ranks, microbatches, 1 if name in ("1f1b", "gpipe") else 2, k, sharing)
    with mock.patch.object(_Planner, "_with_more", lambda self, on_time, others: on_time):
        without = offload(before, share)
    plan = offload(before, share)
    assert without.asked == plan.asked
    assert without.moved <= plan.moved
    assert plan.timeline.seconds <= without.timeline.seconds * (1 + 1e-9)


def test_a_slower_link_stalls_what_was_planned_for_a_faster_one():
    found = timeline("1f1b", 2, 6, 1, 0.2)
    plan = offload(found, FULL)
    assert plan.moved
    slow = simulate(plan.timeline.schedule, with_link(found.costs, 3.0))
    assert slow.seconds > found.seconds
    assert sum(slow.stalled) > 0


def test_what_cannot_be_offloaded():
    found = timeline("1f1b", 2, 4, 1, 1.0)
    with pytest.raises(ScheduleError, match=r"share to offload is 1\.5"):
        offload(found, 1.5)
    with pytest.raises(ScheduleError, match="nothing can be offloaded: the costs have no link"):
        offload(simulate(found.schedule, replace(found.costs, link=None)), FULL)
    schedule = offload(timeline("1f1b", 2, 4, 1, 0.1), FULL).timeline.schedule
    with pytest.raises(ScheduleError, match="has transfers, but the costs have no link"):
        simulate(schedule, replace(found.costs, link=None))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out, back: (out,), r"offload W0\.0 has no reload"),
        (lambda out, back: (out, back, out), r"has offload W0\.0 twice"),
        (lambda out, back: (replace(out, user=Phase.F), back), r"the user of offload F0\.0 must be B or W"),
        (
            lambda out, back: (replace(out, begin=0), back),
            r"offload W0\.0 from op 0 to 1 .* between ops 0 and 2",
        ),
        (
            lambda out, back: (out, replace(back, end=3)),
            r"reload W0\.0 from op 1 to 3 of the rank must lie",
        ),
    ],
)
def test_transfers_that_cannot_be(change, message):
    found = timeline("1f1b", 2, 2, 1, 0.1)
    schedule = replace(
        found.schedule,
        transfers=change(
            Transfer(Direction.OUT, 0, 0, Phase.W, 1, 1), Transfer(Direction.IN, 0, 0, Phase.W, 1, 2)
        ),
    )
    with pytest.raises(ScheduleError, match=message):
        simulate(schedule, found.costs)


TIMES = (
    "--schedule gis --ranks 8 --microbatches 32 --stages-per-rank 4 --forward 1 --backward-input 1 "
    "--backward-weight 1"
)


def test_the_command_line(capsys):
    assert main([*f"simulate {TIMES} --offload-time 0.3 --offload po-h --json".split()]) == 0
    found = json.loads(capsys.readouterr().out)
    assert max(found["peak_memory"]) == 4
    assert found["offload"]["moved"] == found["offload"]["asked"] == 512
    assert main([*f"simulate {TIMES} --offload-time 0.3 --offload auto --memory-limit 2".split()]) == 0
    assert "peak memory 8 -> 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--offload-time -1", "-1 must be finite and not negative"),
        ("--offload po-h", "--offload needs --offload-time"),
        ("--offload-time 1 --offload 2", "2 must be from 0 to 1"),
        ("--offload-time 1 --offload auto", "--offload auto needs --memory-limit"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    assert main([*f"simulate {TIMES} {arguments}".split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("name", "ranks"), [("dualpipe-v", 2), ("dualpipe-v", 3), ("1f1b-v", 3)])
def test_what_an_op_makes_and_what_the_next_one_takes_are_live_together(name, ranks):
    """The stages of a rank hand each other 2, live from the end of one op to the start of another; offloading
    next to nothing leaves the peaks as they are."""
    stages = 2 * ranks
    costs = chain([StageCost(1, 1, 1, 1, 0.5, offloadable=1e-6)] * stages, 0.0)
    pairs = [(stage, stages - 1 - stage) for stage in range(ranks)]
    handed = [Edge(Color(a, Phase.F), Color(b, Phase.F), 2.0) for a, b in pairs]
    handed += [Edge(Color(b, Phase.B), Color(a, Phase.B), 2.0) for a, b in pairs]
    costs = with_link(Costs(costs.stages, (*costs.edges, *handed)), 1e-9)
    without = simulate(build(name, ranks=ranks, microbatches=4, costs=costs), costs)
    moved = offload(without, FULL).timeline
    assert all(moved.transfers)
    assert moved.peak_memory == pytest.approx(without.peak_memory, abs=1e-4)


def test_staggered_holds_less_on_a_slow_link():
    """Early chunks that ran ahead would wait for the link, where they take memory."""
    costs = chain([StageCost(1 / 8, 1 / 8, 1 / 8, 1 / 8, 1 / 16)] * 64, 0.0025)
    peaks = []
    for k in (0.1, 0.5):
        linked = with_link(costs, k)
        problem = Problem(8, 24, 8, "plain", linked, per_rank(None, 8))
        timeline = simulate(schedule_of("staggered", problem), linked)
        peaks.append(max(offload(timeline, 0.5).timeline.peak_memory))
    assert peaks == [2.5, 3.25]
