"""Orders of microbatches with costs of their own."""

from dataclasses import replace
from itertools import pairwise
from math import inf

import numpy as np
import pytest

from fxpipe.cost.batch_order import own_limits
from fxpipe.schedule import starts_bound
from fxpipe.schedule.bound import lower_bound
from fxpipe.schedule.bound_of_each import lower_bound_of_each
from fxpipe.schedule.check import check
from fxpipe.schedule.costs import Costs, StageCost, chain
from fxpipe.schedule.ops import Color, OpKind, Schedule
from fxpipe.schedule.placement import place
from fxpipe.schedule.search.build import build
from fxpipe.schedule.search.uneven import TooLarge, Uneven
from fxpipe.schedule.simulation.simulator import simulate

RANKS, LONGEST = 4, 100
WORK = 30_000


def costs_of(length: int, stages: int = RANKS) -> Costs:
    seconds = 1e-3 * (length + length**2 / LONGEST)
    stage = StageCost(seconds, 1.2 * seconds, 0.8 * seconds, 10.0 * length, 4.0 * length)
    return chain([stage] * stages, seconds=1e-3 + 1e-5 * length, bytes=length)


def drawn(number: int, seed: int = 0) -> list[int]:
    random = np.random.default_rng(seed)
    return [int(x) for x in np.clip(random.lognormal(3, 1, number), 4, LONGEST)]


def problem(lengths: list[int], limit: float, shape: str = "plain", **options: object) -> Uneven:
    stages = 2 * RANKS if shape == "v" else RANKS
    costs = {length: costs_of(length, stages) for length in lengths}
    placement = place(shape, RANKS, stages // RANKS)
    return Uneven(tuple(costs[n] for n in lengths), placement, (limit,) * RANKS, **options)


def static(name: str, microbatches: int, limit: float, stages_per_rank: int = 1) -> Schedule:
    return build(
        name,
        ranks=RANKS,
        microbatches=microbatches,
        costs=costs_of(LONGEST, RANKS * stages_per_rank),
        stages_per_rank=stages_per_rank,
        placement="v" if stages_per_rank > 1 else "plain",
        memory_limit=limit,
    )


@pytest.mark.in_ci("0-plain", "1-plain", "2-plain")
@pytest.mark.parametrize("shape", ["plain", "v"])
@pytest.mark.parametrize("seed", range(3))
def test_an_order_is_whole_within_limits_and_never_slower(shape, seed):
    chunks = 2 if shape == "v" else 1
    lengths, limit = [*drawn(11, seed), LONGEST], 3 * chunks * 10.0 * LONGEST
    uneven, before = problem(lengths, limit, shape), static("zb", 12, limit, chunks)
    ops = uneven.best(WORK)
    check(Schedule("found", uneven.placement, len(lengths), ops))
    assert max(uneven.peaks(ops)) <= limit * (1 + 1e-9)
    assert uneven.bound <= uneven.times(ops).makespan <= uneven.times(before.order).makespan
    assert uneven.best(WORK) == ops  # on any machine, as the work is counted


def test_long_microbatches_amidst_short_ones_no_longer_hold_up_the_others():
    """The order for equal microbatches pairs a long F with a short B on the next rank."""
    lengths, limit = [8, 10, 100, 9, 12, 70, 8, 9, 11, 90, 10, 8], 3 * 10.0 * LONGEST
    uneven, before = problem(lengths, limit), static("zb", 12, limit)
    found = uneven.times(uneven.best()).makespan
    assert found < 0.7 * uneven.times(before.order).makespan
    assert found < 1.07 * uneven.bound  # by climbs alone 1.09


def test_any_number_of_microbatches():
    for number in (1, 2, 7):
        uneven = problem(drawn(number), 3 * 10.0 * LONGEST)
        check(Schedule("found", uneven.placement, number, uneven.best(work=WORK)))


def test_of_equal_microbatches_the_order_is_as_fast_as_for_equal_ones():
    before = static("zb", 8, 5 * 10.0 * LONGEST)
    uneven = problem([LONGEST] * 8, 5 * 10.0 * LONGEST)
    timeline = simulate(before, costs_of(1), uneven.costs)
    expected = simulate(before, uneven.costs[0])
    assert timeline.seconds == pytest.approx(expected.seconds)
    assert timeline.peak_memory == pytest.approx(expected.peak_memory)
    assert timeline.spans[1][3].start == pytest.approx(expected.spans[1][3].start)
    assert lower_bound_of_each(uneven.costs, uneven.placement) == pytest.approx(
        lower_bound(uneven.costs[0], uneven.placement, 8)
    )
    assert uneven.times(uneven.best()).makespan <= expected.seconds * (1 + 1e-9)


def test_the_bound_knows_when_each_microbatch_can_come():
    """A short one comes first, and the last rank waits for the next."""
    short, long = costs_of(4), costs_of(100)
    bound = lower_bound_of_each([short, *[long] * 5], tuple(range(RANKS)))
    stage, message = long.stages[0], long.edges[0].seconds
    way = 3 * (stage.forward + message)
    work = 5 * (stage.forward + stage.backward + stage.weight)
    assert bound >= way + work
    orders = problem([4, *[100] * 5], 1e9)
    assert bound <= orders.times(orders.best()).makespan


def test_the_bound_knows_what_a_long_one_leaves_behind():
    """Others come before it, and it waits for their F, or behind it, and their B and W follow."""
    short, long = (chain([StageCost(n, n, n)] * RANKS) for n in (1, 10))
    bound = lower_bound_of_each([long, *[short] * 6], tuple(range(RANKS)))
    assert bound == 2 * RANKS * 10 + 10 + 6
    # A message of the long one lets one rank run a short one that came behind it, for nothing.
    slow = chain(long.stages, seconds=2.5)
    assert lower_bound_of_each([slow, *[short] * 6], tuple(range(RANKS))) == 2 * RANKS * 10 + 10 + 6 * 2.5


def test_the_bound_knows_memory():
    """Of one microbatch at a time, none begins before the one before it has ended its B; then W follows."""
    stages = [StageCost(n, n, n, 1.0) for n in (4, 4)]
    costs = [chain(stages)] * 5
    assert lower_bound_of_each(costs, (0, 1), (1.0, 1.0)) == 5 * 16 + 4
    assert lower_bound_of_each(costs, (0, 1)) < 5 * 16


def test_the_bound_knows_how_many_of_which_length_are_on_their_way():
    """A long one leaves no room, and two short ones have a round of 9 and end a forward apart."""
    short, long = (chain([StageCost(n, n, n, n, n)] * RANKS) for n in (1, 2))
    placement, limits = tuple(range(RANKS)), (2.0,) * RANKS
    assert lower_bound_of_each([long] * 3, placement, limits) == 3 * 18
    assert lower_bound_of_each([short] * 6, placement, limits) == 3 * 9 + 2
    both = [*[long] * 3, *[short] * 6]
    assert lower_bound_of_each(both, placement, limits) == 3 * 18 + 3 * 9
    # Of all in one kind, the least work of each number of them still counts.
    mixed = [costs_of(n) for n in range(10, 40)]
    assert lower_bound_of_each(mixed, placement, (1e3,) * RANKS) >= lower_bound_of_each(mixed, placement)


@pytest.mark.parametrize("counts", [512, 6])
def test_no_order_that_is_found_beats_the_bound(counts, monkeypatch):
    """Of stages and microbatches that all differ, each of a kind of its own or not."""
    monkeypatch.setattr(starts_bound, "_COUNTS", counts)
    random, tight = np.random.default_rng(counts), 0
    for _ in range(60):
        placement = ((0, 1, 2), (0, 1, 1, 0), (0, 1, 0, 1), (0,))[random.integers(4)]
        each = []
        for n in random.choice([1, 2, 5, 9], random.integers(1, 7)):
            times = n * random.choice([0.5, 1, 2], (len(placement), 3))
            kept = random.choice([0, 0.4, 1, 1.5])
            stages = [StageCost(*time, n, kept * n) for time in times.tolist()]
            each.append(chain(stages, seconds=random.choice([0, 3])))
        free = Uneven(tuple(each), placement, (inf,) * (1 + max(placement)))
        uneven = replace(free, limits=tuple(x * random.choice([1, 1.3, 2, inf]) for x in free.least))
        found = uneven.times(uneven.best(WORK)).makespan
        assert uneven.bound <= found * (1 + 1e-9)
        tight += uneven.bound >= found * (1 - 1e-9)
    assert tight > 20


@pytest.mark.in_ci("0", "2", "4", "6")
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_no_order_beats_the_bound(seed):
    """The best one of few microbatches, by CP-SAT."""
    pytest.importorskip("ortools")
    from fxpipe.schedule.exact.order import exact

    random = np.random.default_rng(seed)
    placement = ((0, 1, 2), (0, 1, 1, 0))[seed % 2]
    stages, each = len(placement), []
    for n in (1, 8, int(random.integers(2, 12))):
        times = [n * random.choice([0.5, 1, 2], 3) for _ in range(stages)]
        each.append(chain([StageCost(*time, n, 0.5 * n) for time in times], seconds=random.choice([0, 3])))
    limit = 1.5 * max(map(max, (Uneven((c,), placement, ()).least for c in each)))
    limits = (limit,) * (1 + max(placement))
    # As one microbatch that runs through the stages of all.
    joined = [
        replace(edge, source=_shifted(edge.source, k * stages), target=_shifted(edge.target, k * stages))
        for k, costs in enumerate(each)
        for edge in costs.edges
    ]
    of_all = Costs(tuple(stage for costs in each for stage in costs.stages), tuple(joined))
    best = exact(of_all, placement * 3, 1, memory_limit=limit, seconds=20)
    assert lower_bound_of_each(each, placement, limits) <= best.value * (1 + 1e-9)


def _shifted(color: Color, stages: int) -> Color:
    return Color(color.stage + stages, color.phase)


def test_memory_of_a_timeline_is_that_of_each_microbatch():
    uneven = problem([10, 100, 30], 3 * 10.0 * LONGEST)
    ops = uneven.best(work=WORK)
    timeline = simulate(Schedule("found", uneven.placement, 3, ops), costs_of(LONGEST), uneven.costs)
    assert timeline.seconds == pytest.approx(uneven.times(ops).makespan)
    assert timeline.peak_memory == pytest.approx(uneven.peaks(ops))
    # The last rank waits for each microbatch, whose message takes as long as its own length needs.
    assert timeline.exposed_communication[3] == pytest.approx(3e-3 + 1e-5 * (10 + 100 + 30))
    assert timeline.lower_bound <= timeline.seconds


def test_stages_that_join_b_and_w_keep_it():
    uneven = problem(drawn(6), 3 * 10.0 * LONGEST, joined=frozenset({1, 2}))
    ops = uneven.best(work=WORK)
    check(Schedule("found", uneven.placement, 6, ops))
    kinds = [{op.kind for op in rank_ops} for rank_ops in ops]
    assert kinds[0] == kinds[3] == {OpKind.F, OpKind.B, OpKind.W}
    assert kinds[1] == kinds[2] == {OpKind.F, OpKind.BW}


def test_microbatches_that_change_buffers_come_in_their_order():
    uneven = problem(drawn(8, seed=5), 3 * 10.0 * LONGEST, in_order=True)
    for rank_ops in uneven.best(work=WORK):
        forwards = [op.microbatch for op in rank_ops if op.kind is OpKind.F]
        assert all(a < b for a, b in pairwise(forwards))


def test_a_limit_below_one_microbatch():
    with pytest.raises(
        TooLarge, match="microbatch 1 alone needs 1000 B for activations on rank 0, and the l"
    ):
        problem([10, 100, 20], 9.0 * LONGEST).best()


def test_without_a_limit_each_microbatch_fits():
    """Of an order that recomputes, W needs more than F leaves."""
    schedule, costs = static("zb", 4, 4000.0), chain([StageCost(1, 1, 1, 10.0, 40.0)] * RANKS, 0.0)
    assert own_limits(schedule, costs, (5.0, 50.0, 5.0, 40.0)) == (40.0, 50.0, 40.0, 40.0)
