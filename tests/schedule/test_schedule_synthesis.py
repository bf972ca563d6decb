"""Synthesis: repeated blocks, list scheduling, recipes, local search; marks of the papers at equal memory."""

from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from math import inf
from random import Random

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.schedule import synthesis
from fxpipe.schedule.blocks import find_block, flow
from fxpipe.schedule.costs import Costs, StageCost, chain
from fxpipe.schedule.dispatch import dispatch
from fxpipe.schedule.families import build
from fxpipe.schedule.goal import Goal
from fxpipe.schedule.improve import improve
from fxpipe.schedule.kernel import run_ops
from fxpipe.schedule.ops import order_text, parse_order
from fxpipe.schedule.placement import place
from fxpipe.schedule.problem import Problem, per_rank
from fxpipe.schedule.rungs import Rung, at_rung, rungs
from fxpipe.schedule.search import Setting, search
from fxpipe.schedule.shop import Shop, decode, encode, peaks, run, shop
from fxpipe.schedule.simulator import simulate
from fxpipe.schedule.stretch import stretched

pytestmark = pytest.mark.slow


def even_costs(ranks: int, chunks: int, times=(1.0, 1.0, 1.0), comm: float = 0.0, kept: float = 0.5) -> Costs:
    """Times of a rank; memory in microbatches of a rank, of which W needs ``kept``."""
    forward, backward, weight = (time / chunks for time in times)
    return chain([StageCost(forward, backward, weight, 1 / chunks, kept / chunks)] * (chunks * ranks), comm)


def v_costs(ranks: int, **costs) -> Costs:
    return even_costs(ranks, 2, **costs)


def v_shop(ranks: int, **costs) -> Shop:
    return shop(v_costs(ranks, **costs), place("v", ranks, 2))


LARGE = {"times": (29.718, 29.444, 19.927), "comm": 0.527, "kept": 16 / 37}  # 6.2B of 2401.10241


def test_a_lone_microbatch_flows_down_and_up():
    times = flow(shop(chain([StageCost(1, 2, 3), StageCost(4, 5, 6)], seconds=0.5), (0, 1)))
    assert times == (0, 11, 13, 1.5, 5.5, 10.5)


def overlaps(flat: Shop, period: float, start: tuple[float, ...]) -> bool:
    """Do two ops of a rank overlap modulo the period?"""
    for own in flat.own:
        sections = [3 * stage + kind for stage in own for kind in range(3)]
        slots = sorted((start[s] % period, flat.seconds[s]) for s in sections)
        slots.append((slots[0][0] + period, 0.0))
        if any(one + seconds > other + 1e-6 for (one, seconds), (other, _) in pairwise(slots)):
            return True
    return False


@pytest.mark.parametrize("stretch", [1.0, 1.05, 1.2])
def test_a_block_repeats_without_overlap_and_in_the_order_of_what_it_needs(stretch):
    flat = v_shop(8, **LARGE)
    block = find_block(flat, stretch * flat.period, (0.0,) * 4)
    assert not overlaps(flat, block.period, block.start)
    for section, sources in enumerate(flat.needs):
        for source, delay in sources:
            assert block.start[section] >= block.start[source] + flat.seconds[source] + delay - 1e-6


def test_a_block_holds_little():
    """F = B = W on 8 ranks: 2.83 microbatches between F and B on any rank and no bubble; V-Min holds more."""
    flat = v_shop(8)
    block = find_block(flat, flat.period, (0.0,) * 4)
    held = [
        sum(block.start[3 * s + 1] + flat.seconds[3 * s + 1] - block.start[3 * s] for s in own) / 2
        for own in flat.own
    ]
    assert max(held) / block.period == pytest.approx(17 / 6)


def test_no_block_where_the_work_does_not_fit_the_period():
    flat = v_shop(2)
    assert find_block(flat, 0.9 * flat.period, (0.0,) * 4) is None


def test_dispatch_follows_due_dates_and_memory():
    flat = shop(chain([StageCost(1, 1, 1, 1, 1)] * 2), (0, 1))
    due = [*range(9), *range(9)]
    early = dispatch(flat, 3, due, (inf, inf), (0, 0, 0))
    first = order_text(decode(flat, early, 3)).splitlines()[0]
    assert first == "F0.0 F0.1 F0.2 B0.0 B0.1 B0.2 W0.0 W0.1 W0.2"
    narrow = dispatch(flat, 3, due, (2, 1), (0, 0, 0))
    assert peaks(flat, narrow, 3) == [2, 1]
    with pytest.raises(ScheduleError, match=r"rank 1 has a memory limit of 0\.5, but one microbatch takes 1"):
        dispatch(flat, 3, due, (2, 0.5), (0, 0, 0))


@pytest.mark.parametrize("limit", [1.0, 1.3, 2.0])
def test_dispatch_ends_however_little_memory_there_is_and_whatever_is_due(limit):
    """The later chunk due last: without a place kept for it the first chunk would fill the memory."""
    flat, m = v_shop(4), 6
    for sign in (1, -1):
        due = [float(sign * section) for section in range(flat.sections) for _ in range(m)]
        for patience in ((0, 0, 0), (1, 1, 1), (3, 3, 3)):
            coded = dispatch(flat, m, due, (limit,) * 4, patience)
            assert sorted(coded) == list(range(flat.sections * m))
            assert max(peaks(flat, coded, m)) <= limit * (1 + 1e-9)
            assert run(flat, coded, m) is not None


def test_run_agrees_with_the_simulator():
    costs = v_costs(4, **LARGE)
    schedule = build("zb-v", ranks=4, microbatches=6, costs=costs, effort=0.01)
    flat, timeline = shop(costs, schedule.placement), simulate(schedule, costs)
    coded = encode(schedule.order, 6)
    done = run(flat, coded, 6)
    assert done.span == pytest.approx(timeline.span)
    assert done.makespan == pytest.approx(timeline.seconds)
    assert peaks(flat, coded, 6) == pytest.approx(list(timeline.peak_memory))
    assert decode(flat, coded, 6) == schedule.order


def test_what_did_not_change_need_not_run_again():
    costs = v_costs(4, **LARGE)
    schedule = build("zb-v", ranks=4, microbatches=8, costs=costs, effort=0.01)
    flat, random = shop(costs, schedule.placement), Random(3)
    old = encode(schedule.order, 8)
    known = run(flat, old, 8)
    compared = 0
    for _ in range(200):
        new = old.copy()
        its = flat.ops_of(random.randrange(4), new, 8)
        at = random.randrange(len(its) - 1)
        since = known.end[its[at]] - flat.seconds[its[at] // 8]
        its[at : at + 2] = its[at : at + 2][::-1].copy()
        fresh, again = run(flat, new, 8), deepcopy(known)
        runs = run_ops(flat.tables(8), new, 8, since, again.end, again.cause, again.first, again.free)
        assert runs == (fresh is not None)
        if fresh is None:
            continue
        compared += 1
        for name in ("end", "first", "free"):
            assert (getattr(again, name) == getattr(fresh, name)).all()
    assert compared > 50


def test_a_stretched_order_is_whole_and_keeps_the_limits():
    problem = Problem("zb", 4, 12, 2, "v", v_costs(4, **LARGE), (3.0,) * 4)
    short = encode(build("v-half", ranks=4, microbatches=12, costs=problem.costs, effort=0.05).order, 12)
    longer = replace(problem, microbatches=31)
    found = list(stretched(short, 12, longer))
    assert len(found) > 10
    ops = [
        sorted(31 * s + j for stage in own for s in range(3 * stage, 3 * stage + 3) for j in range(31))
        for own in longer.shop.own
    ]
    for coded in found:
        assert [sorted(longer.shop.ops_of(rank, coded, 31)) for rank in range(4)] == ops
        assert max(peaks(longer.shop, coded, 31)) <= 3 * (1 + 1e-9)
        assert run(longer.shop, coded, 31) is not None


def test_a_steady_order_is_stretched_without_loss():
    costs = v_costs(4)
    problem = Problem("zb", 4, 16, 2, "v", costs, (4.0,) * 4)
    short = encode(build("zb-v", ranks=4, microbatches=16, costs=costs).order, 16)
    assert run(problem.shop, short, 16).span == pytest.approx(16 * problem.shop.period)
    longer = replace(problem, microbatches=40)
    spans = [run(longer.shop, coded, 40).span for coded in stretched(short, 16, longer)]
    assert min(spans) == pytest.approx(40 * problem.shop.period)


def test_orders_that_block_each_other_do_not_run():
    flat = shop(chain([StageCost(1, 1, 1)] * 2), (0, 1))
    order = parse_order("F0.0 B0.0 F0.1 B0.1 W0.0 W0.1\nF1.0 F1.1 B1.0 B1.1 W1.0 W1.1")
    assert run(flat, encode(order, 2), 2) is None


def test_improvement_moves_a_weight_gradient_off_the_critical_path():
    costs = chain([StageCost(1, 1, 1, 1, 1)] * 2)
    problem = Problem("hand", 2, 2, 1, "plain", costs, (inf, inf))
    slow = parse_order("F0.0 F0.1 B0.0 W0.0 B0.1 W0.1\nF1.0 B1.0 W1.0 F1.1 B1.1 W1.1")
    goal = Goal.of(problem, "makespan")
    better = improve(problem.shop, encode(slow, 2), 2, problem.limits, goal, 200)
    assert problem.worth(encode(slow, 2))[2] == 8
    assert problem.worth(better)[2] == 7


# Bubbles of the published schedulers on the same times, at the same peak memory.
@pytest.mark.parametrize(
    ("name", "limit", "costs", "mark"),
    [
        ("v-min", 4, {}, 0.1378),
        ("v-half", 5, {}, 0.1056),
        ("zb-v", 8, {}, 1e-9),
        ("v-min", 4, LARGE, 0.2400),
        ("v-half", 5, LARGE, 0.1447),
        ("v-half", 6, LARGE, 0.1132),
        ("zb-v", 8, LARGE, 0.0404),
    ],
)
def test_span_bubble_under_a_limit_is_at_most_what_is_published(name, limit, costs, mark):
    table = v_costs(8, **costs)
    schedule = build(name, ranks=8, microbatches=24, costs=table, memory_limit=limit)
    timeline = simulate(schedule, table)
    assert max(timeline.peak_memory) <= limit * (1 + 1e-9)
    assert timeline.span_bubble <= mark


@pytest.mark.parametrize(("limit", "mark"), [(4, 0.2400), (5, 0.1440), (6, 0.1110)])
def test_auto_under_a_limit_is_at_most_what_is_published(limit, mark):
    """At 5 and 6 it takes four stages a rank."""
    kinds = ((1, "plain"), (2, "plain"), (2, "v"), (4, "plain"), (4, "v"))
    settings = [Setting(chunks, name, even_costs(8, chunks, **LARGE)) for chunks, name in kinds]
    found = search(settings, ranks=8, microbatches=24, memory_limit=limit, objective="span")
    assert max(found.timeline.peak_memory) <= limit * (1 + 1e-9)
    assert found.timeline.span_bubble <= mark


def test_the_same_input_gives_the_same_schedule():
    costs = v_costs(4, **LARGE)
    make = {"ranks": 4, "microbatches": 6, "costs": costs, "memory_limit": 2.3, "effort": 0.05}
    assert build("v-half", **make) == build("v-half", **make)


def test_any_limit_down_to_one_microbatch():
    costs = v_costs(4, **LARGE)
    bubbles = []
    for limit in (1.0, 1.37, 2.0, 2.71, 4.0):
        schedule = build("zb-v", ranks=4, microbatches=8, costs=costs, memory_limit=limit, effort=0.05)
        timeline = simulate(schedule, costs)
        assert max(timeline.peak_memory) <= limit * (1 + 1e-9)
        bubbles.append(timeline.span_bubble)
    assert bubbles == sorted(bubbles, reverse=True)


def test_rungs_do_not_depend_on_the_limit_above():
    problem = Problem("zb", 8, 24, 2, "v", v_costs(8, **LARGE), (6.3,) * 8)
    found = [rung.memory for rung in rungs([problem])]
    assert found == pytest.approx([1 + k / 4 for k in range(23)])
    on_one = replace(problem, limits=(6.25,) * 8)
    assert [rung.memory for rung in rungs([on_one])] == found[:-1]
    free = [rung.memory for rung in rungs([replace(problem, limits=(inf,) * 8)])]
    assert free[: len(found)] == found
    assert free[-10:] == [*range(8, 17), inf]


def test_rungs_of_many_ranks_lie_closer_where_there_is_little_memory():
    """An M_B apart from p/4 on; what lies closer gets less of the effort."""
    problem = Problem("zb", 32, 256, 1, "plain", even_costs(32, 1, **LARGE), (inf,) * 32)
    found = rungs([problem])
    low = [1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, *range(4, 33), *range(36, 68, 4), inf]
    assert [rung.memory for rung in found] == low
    assert [rung.share for rung in found[:6]] == [1, 0.25, 0.25, 0.25, 0.25, 0.5]
    assert {rung.share for rung in found[9:]} == {1}


def test_rungs_of_ranks_with_limits_of_their_own_rise_together():
    stages = [StageCost(1, 1, 1, 1, 1), StageCost(1, 1, 1, 4, 4)]
    problem = Problem("zb", 2, 8, 1, "plain", chain(stages), (3, 6.5))
    found = rungs([problem])
    assert [rung.memory for rung in found] == [4, 5, 6, 7]
    assert [at_rung(problem, rung) for rung in found[:3]] == [
        pytest.approx((memory * 3 / 6.5, memory)) for memory in (4, 5, 6)
    ]
    free = replace(problem, limits=(3, inf))
    assert at_rung(free, Rung(2)) == (2, inf)
    assert at_rung(free, Rung(inf)) == (inf, inf)


def test_rungs_of_several_problems_are_the_same_and_have_room_for_each():
    less, more = (
        Problem("zb", 2, 8, 1, "plain", chain([StageCost(1, 1, 1, saved)] * 2), (2.0, 2.0))
        for saved in (1.0, 1.1)
    )
    assert [rung.memory for rung in rungs([less, more])] == [1, 1.1, 1.25, 1.5, 1.75, 2]
    assert rungs([more, less]) == rungs([less, more])


def test_rungs_where_nothing_is_saved():
    problem = Problem("zb", 2, 8, 1, "plain", chain([StageCost(1, 2, 1)] * 2), (3.0, 3.0))
    assert rungs([problem]) == (Rung(0), Rung(inf))
    assert at_rung(problem, Rung(0)) == (0, 0)
    assert at_rung(problem.within(2), Rung(0)) == (0, 0)
    costs = chain([StageCost(1, 2, 1), StageCost(1, 1, 2)], 0.1)
    spans = [
        simulate(
            build("zb", ranks=2, microbatches=8, costs=costs, memory_limit=limit, effort=0.01), costs
        ).span
        for limit in (None, 3.0)
    ]
    assert spans[0] == spans[1]


ANY = sorted([*(1 + k / 4 for k in range(13)), *(Random(5).uniform(1, 4.2) for _ in range(12))])


@pytest.mark.parametrize(("name", "placement"), [("v-half", "v"), ("zb", "plain")])
@pytest.mark.parametrize("kind", ["short", "long", "large"])
def test_more_memory_never_costs_time(name, placement, kind, monkeypatch):
    """A short search has bad luck at times: what it found under a lower limit then counts."""
    if kind == "large":
        monkeypatch.setattr(synthesis, "_LARGE", 100)
    costs = even_costs(4, 2 if placement == "v" else 1, **LARGE)
    make = {"ranks": 4, "microbatches": 8 if kind == "short" else 24, "costs": costs, "effort": 0.004}
    spans = []
    for limit in ANY:
        timeline = simulate(build(name, memory_limit=limit, **make), costs)
        assert max(timeline.peak_memory) <= limit * (1 + 1e-9)
        spans.append(timeline.span)
    assert all(more <= less * (1 + 1e-9) for less, more in pairwise(spans))
    assert spans[-1] < spans[0]


def test_more_memory_never_costs_time_with_uneven_stages():
    times = (1.0, 1.3, 0.9, 1.1)
    costs = chain([StageCost(t, 1.1 * t, 0.7 * t, t, 0.4 * t) for t in times], 0.05)
    make = {"ranks": 4, "microbatches": 8, "costs": costs, "effort": 0.004}
    spans = [simulate(build("zb", memory_limit=1.3 * limit, **make), costs).span for limit in ANY]
    assert all(more <= less * (1 + 1e-9) for less, more in pairwise(spans))


@pytest.mark.parametrize("objective", ["span", "makespan"])
def test_more_memory_never_costs_auto_time(objective):
    """Also where a microbatch takes more in one setting than in the other."""
    costs = {
        v: chain([StageCost(1 / v, 1 / v, 0.7 / v, saved / v, 0.4 / v)] * (4 * v), 0.01)
        for v, saved in ((1, 1.1), (2, 1.0))
    }
    settings = [Setting(1, "plain", costs[1]), Setting(2, "v", costs[2])]
    found = []
    for limit in (1, 1.07, 1.2, 1.5, 1.9, 2, 2.2, 2.25, 2.6, 3):
        choice = search(settings, ranks=4, microbatches=6, memory_limit=limit, objective=objective)
        assert max(choice.timeline.peak_memory) <= limit * (1 + 1e-9)
        found.append(choice.timeline.span if objective == "span" else choice.timeline.seconds)
    assert all(more <= less * (1 + 1e-9) for less, more in pairwise(found))
    assert found[-1] < found[0]


@pytest.mark.parametrize(("name", "limit"), [("zb-h1", None), ("zb-v", None), ("v-half", 3), ("gis", None)])
@pytest.mark.parametrize("heavy", [0, 3])
def test_uneven_costs_are_no_worse_than_the_schedule_for_their_mean(name, limit, heavy):
    homes = place("plain" if name in ("zb-h1", "gis") else "v", 4, 1 if name == "zb-h1" else 2)
    times = [1.3 if rank == heavy else 1.0 for rank in homes]
    costs = chain([StageCost(t, t, 0.7 * t, 0.5, 0.25) for t in times], 0.05)
    mean = sum(times) / len(times)
    even = chain([StageCost(mean, mean, 0.7 * mean, 0.5, 0.25)] * len(homes), 0.05)
    make = {"ranks": 4, "microbatches": 8, "memory_limit": limit, "effort": 0.02}
    ours = simulate(build(name, costs=costs, **make), costs)
    assert ours.span <= simulate(build(name, costs=even, **make), costs).span * (1 + 1e-9)


@pytest.mark.parametrize("placement", ["plain", "v"])
@pytest.mark.parametrize("chunks", [3, 4])
def test_more_than_two_stages_a_rank_under_a_tight_limit(chunks, placement):
    """A microbatch must find room in all stages of a rank at a time, or the ranks block each other."""
    stage = StageCost(15 / chunks, 15 / chunks, 10 / chunks, 1 / chunks, 0.43 / chunks)
    costs = chain([stage] * (3 * chunks), 0.5)
    for limit in (1.0, 1.5, 2.0):
        schedule = build(
            "zb",
            ranks=3,
            microbatches=7,
            costs=costs,
            stages_per_rank=chunks,
            placement=placement,
            memory_limit=limit,
            effort=0.02,
        )
        assert max(simulate(schedule, costs).peak_memory) <= limit * (1 + 1e-9)


def test_limits_per_rank():
    assert per_rank(None, 2) == (inf, inf)
    assert per_rank(3, 2) == (3, 3)
    assert per_rank((1.5, 2), 2) == (1.5, 2)
    costs = v_costs(2)
    schedule = build("zb-v", ranks=2, microbatches=6, costs=costs, memory_limit=(2, 1.25), effort=0.05)
    peak = simulate(schedule, costs).peak_memory
    assert peak[0] <= 2
    assert peak[1] <= 1.25
