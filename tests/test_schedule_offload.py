"""Activations away between F and B: what links carry, what memory is left, and what is refused."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.cli.command import main
from fxpipe.errors import ScheduleError
from fxpipe.graph import Phase
from fxpipe.schedule.costs import StageCost, chain
from fxpipe.schedule.families import build
from fxpipe.schedule.offload import FULL, HALF, Direction, Offload, offload, offload_within, one_way
from fxpipe.schedule.ops import OpKind
from fxpipe.schedule.simulator import simulate
from fxpipe.schedule.timeline import Timeline


def timeline(name: str, ranks: int, microbatches: int, chunks: int, kept: float = 1.0, **options) -> Timeline:
    stage = StageCost(1 / chunks, 1 / chunks, 1 / chunks, 1 / chunks, kept / chunks)
    costs = chain([stage] * (ranks * chunks))
    schedule = build(
        name, ranks=ranks, microbatches=microbatches, costs=costs, stages_per_rank=chunks, **options
    )
    return simulate(schedule, costs)


def check(plan: Offload, k: float, ranks_per_link: int = 1) -> None:
    """Every transfer lies where it may, and a link carries one at a time in each direction."""
    ranks = range(plan.timeline.schedule.ranks)
    for first in ranks[::ranks_per_link]:
        for direction in Direction:
            taken = sorted(
                (t.start, t.end)
                for rank in ranks[first : first + ranks_per_link]
                for t in plan.transfers[rank]
                if t.direction is direction
            )
            assert all(one[1] <= other[0] + 1e-9 for one, other in pairwise(taken))
    for rank in ranks:
        spans = {
            (op.kind, op.stage, op.microbatch): (start, end) for op, start, end in plan.timeline.spans[rank]
        }
        away: dict[tuple[int, int, Phase], float] = {}
        for t in plan.transfers[rank]:
            assert t.end - t.start == pytest.approx(one_way(plan.timeline, k)(t.stage, t.user))
            key = t.stage, t.microbatch
            last = OpKind.F if t.user is Phase.B else OpKind.B
            if t.direction is Direction.OUT:
                assert t.start >= spans[last, *key][1] - 1e-9
                away[*key, t.user] = t.end
            else:
                user = OpKind(t.user) if (OpKind(t.user), *key) in spans else OpKind.BW
                assert t.end <= spans[user, *key][0] + 1e-9
                assert t.start >= away.get((*key, t.user), away.get((*key, Phase.B), float("inf"))) - 1e-9
        assert min((live for _, live in plan.memory[rank]), default=0.0) >= -1e-9
        assert plan.memory[rank][-1][1] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("k", [0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5])
def test_half_and_all_of_gis(k):
    """The marks of issue and paper, for 8 ranks, 32 microbatches, 4 stages a rank in groups of 8."""
    found = timeline("gis", 8, 32, 4, group=8)
    half, full = (offload(found, one_way(found, k), share) for share in (HALF, FULL))
    for plan in (half, full):
        check(plan, k)
        assert max(plan.peak_memory) < max(found.peak_memory)
    if k <= 0.5:
        assert max(half.peak_memory) <= 4
    if k <= 0.3:
        assert max(full.peak_memory) <= 1
    assert half.asked == 512
    assert full.asked == 1024
    if k == 1.5:  # the link carries two thirds of the time's work at most
        assert full.moved < 0.67 * full.asked


def test_neighbours_take_turns_on_a_link():
    found = timeline("gis", 8, 32, 4, group=8)
    alone, shared = (offload(found, one_way(found, 0.4), FULL, n) for n in (1, 2))
    check(shared, 0.4, 2)
    assert max(alone.peak_memory) < max(shared.peak_memory) < max(found.peak_memory)


def test_a_limit_moves_as_little_as_it_takes():
    found = timeline("interleaved", 8, 32, 4)
    plans = [offload_within(found, one_way(found, 0.3), limit) for limit in (20, 6, 3)]
    assert [max(plan.peak_memory) <= limit for plan, limit in zip(plans, (20, 6, 3), strict=True)] == [
        True
    ] * 3
    assert plans[0].moved == 0 < plans[1].moved < plans[2].moved
    with pytest.raises(
        ScheduleError, match=r"memory limit of 0\.1; the smallest that it can keep .* is 0\.5"
    ):
        offload_within(found, one_way(found, 0.3), 0.1)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["1f1b", "zb-h1", "interleaved", "gis", "gpipe", "1f1b-v", "dualpipe-v"]),
    st.integers(1, 5),
    st.integers(1, 12),
    st.floats(0, 2),
    st.floats(0, 1),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(1, 3),
)
def test_any_schedule_any_share(name, ranks, microbatches, k, share, kept, ranks_per_link):
    chunks = 1 if name in ("1f1b", "zb-h1", "gpipe") else 2
    found = timeline(name, ranks, microbatches, chunks, kept)
    plan = offload(found, one_way(found, k), share, ranks_per_link)
    check(plan, k, ranks_per_link)
    assert plan.moved <= plan.asked
    for less, most in zip(plan.peak_memory, found.peak_memory, strict=True):
        assert less <= most + 1e-9


def test_a_share_above_one():
    found = timeline("1f1b", 2, 4, 1)
    with pytest.raises(ScheduleError, match=r"share to offload is 1\.5"):
        offload(found, one_way(found, 1), 1.5)


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
    try:
        code = main([*f"simulate {TIMES} {arguments}".split()])
    except SystemExit as error:
        code = error.code
    assert code
    assert message in capsys.readouterr().err
