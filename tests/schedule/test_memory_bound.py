"""The bound that knows the memory limit: below every schedule, and near the best of tight ones."""

import random
import re
from itertools import pairwise
from math import inf

import pytest
from marks import slow_except

from fxpipe.errors import ScheduleError
from fxpipe.schedule.bound import lower_bound
from fxpipe.schedule.costs import Costs, Edge, Link, StageCost, chain
from fxpipe.schedule.engine.dispatch import dispatch
from fxpipe.schedule.memory_bound import lower_bound_within
from fxpipe.schedule.ops import Color, Op, OpKind, Phase, Schedule
from fxpipe.schedule.problem import Problem
from fxpipe.schedule.search.build import build
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.schedule.units import PLAIN
from fxpipe.viz.gap import gap_texts

EVEN = StageCost(1, 1, 1, 1, 1)


def bound(limit, ranks=4, microbatches=16, stage=EVEN, seconds=0.0):
    return lower_bound_within(
        chain([stage] * ranks, seconds), tuple(range(ranks)), microbatches, [limit] * ranks
    )


def random_problem(rng: random.Random) -> Problem:
    """With edges within a rank, branches, uneven stages and limits from what just fits."""

    def stage():
        saved = rng.choice([1, 2, 0.1 + 4 * rng.random()])
        kept = rng.choice([0, saved, saved * rng.random(), 1.3 * saved])
        times = (rng.choice([1, 2 * rng.random()]) for _ in range(3))
        return StageCost(*times, saved, kept)

    ranks, chunks, microbatches = rng.randint(1, 4), rng.choice([1, 1, 2, 3]), rng.randint(1, 9)
    even, one = rng.random() < 0.4, stage()
    stages = [one if even else stage() for _ in range(ranks * chunks)]
    costs = chain(stages, rng.choice([0, 0.3, 1.5]), rng.choice([0, 0.2, 5.0]))
    if len(stages) > 2 and rng.random() < 0.4:
        branch = Edge(Color(0, Phase.F), Color(len(stages) - 1, Phase.F), 0.3, 0.2)
        costs = Costs(costs.stages, (*costs.edges, branch))
    free = Problem(ranks, microbatches, chunks, rng.choice(["plain", "v"]), costs, (inf,) * ranks)
    least = free.arrays.smallest_limits
    return free.limited(tuple(x * (1 + rng.choice([0, 0, 0.1, 0.5, 1, 2])) for x in least))


@pytest.mark.in_ci("1")
@pytest.mark.parametrize("seed", slow_except(range(4), 0))
def test_no_schedule_is_faster(seed):
    """Of orders by random due dates, within the limit of each rank; microbatches in any order."""
    rng, compared, tight = random.Random(seed), 0, 0
    while compared < 600:
        problem = random_problem(rng)
        least = lower_bound_within(problem.costs, problem.placement, problem.microbatches, problem.limits)
        for _ in range(6):
            spread = rng.choice([0.5, 2.0, 100.0])
            due = [k % problem.microbatches + spread * rng.random() for k in range(problem.ops)]
            try:
                order = dispatch(problem.arrays, due, problem.limits, (rng.random(),) * 3)
            except ScheduleError:
                continue
            if order.run() is None:
                continue
            found = simulate(problem.schedule("any", order.ops), problem.costs)
            if all(a <= b * (1 + 1e-9) for a, b in zip(found.peak_memory, problem.limits, strict=True)):
                compared += 1
                assert found.seconds >= least * (1 - 1e-9), problem
                tight += found.seconds <= least * (1 + 1e-9)
    assert tight > 100


def orders(microbatches, begun=(0, 0, 0)):
    """All orders of one stage's F, B and W, microbatch by microbatch."""
    if begun == (microbatches,) * 3:
        yield ()
    for i, kind in enumerate((OpKind.F, OpKind.B, OpKind.W)):
        if begun[i] < (microbatches if i == 0 else begun[i - 1]):
            after = tuple(count + (j == i) for j, count in enumerate(begun))
            for rest in orders(microbatches, after):
                yield (kind, begun[i]), *rest


@pytest.mark.parametrize(("limit", "tightest"), [(1, 1.0), (1.4, 1.0), (2, 1.0), (3, 1.0)])
def test_all_orders_of_one_rank(limit, tightest):
    """On one rank the bound is the best of all orders: nothing waits."""
    costs = chain([StageCost(2, 1, 3, 1, 0.5)])
    times = [
        timeline.seconds
        for order in orders(3)
        for timeline in [simulate(Schedule("x", (0,), 3, (tuple(Op(k, 0, j) for k, j in order),)), costs)]
        if timeline.peak_memory[0] <= limit
    ]
    assert min(times) == pytest.approx(tightest * lower_bound_within(costs, (0,), 3, [limit]))


def test_one_microbatch_at_a_time():
    """Each takes four forwards, four backwards and the weight gradient of the first rank."""
    assert bound(1) == 16 * 9
    timeline = simulate(
        build("zb", ranks=4, microbatches=16, costs=chain([EVEN] * 4), memory_limit=1), chain([EVEN] * 4)
    )
    assert timeline.seconds == 144


def test_two_and_three_microbatches():
    """Two: eight rounds of 9, the second half starts a forward later, and ends with B and W of its rank."""
    assert bound(2) == 8 * 9 + 2
    assert bound(3) == 54
    assert bound(2.9) == bound(2)  # a part of a microbatch is of no use
    assert bound(2, seconds=0.5) == 8 * (9 + 6 * 0.5) + 2


def test_more_memory_never_raises_it():
    bounds = [bound(limit, ranks=8, microbatches=24) for limit in (1, 2, 3, 4, 6, 8, 12, inf)]
    assert all(a >= b for a, b in pairwise(bounds))
    assert bounds[-1] == lower_bound(chain([EVEN] * 8), tuple(range(8)), 24)


def test_what_does_not_fit():
    assert bound(0.9) == inf


def test_what_weights_need_counts():
    """With 0.4 of a microbatch held for W, none fits beside another one's activations in 1.3."""
    assert bound(1.3, stage=StageCost(1, 1, 1, 1, 0.4)) == 144
    assert bound(1.5, stage=StageCost(1, 1, 1, 1, 0.4)) < 144


def test_two_stages_of_a_rank_share_its_memory():
    """In a V, the first rank's second stage holds its bytes while the first holds its own."""
    half = StageCost(0.5, 0.5, 0.5, 0.5, 0.5)
    placement = (0, 1, 2, 3, 3, 2, 1, 0)
    found = lower_bound_within(chain([half] * 8), placement, 16, [1] * 4)
    alone = 16 * 0.5 * 8 / 1  # of the first stage by itself
    assert found > 1.25 * alone


def test_offloaded_bytes_leave_the_limit():
    costs = chain([StageCost(1, 1, 1, 1, 1, 0.5, 0.25)] * 4)
    within = lower_bound_within(costs, (0, 1, 2, 3), 16, [1] * 4)
    linked = Costs(costs.stages, costs.edges, Link(0.1))
    assert within == 144
    assert lower_bound_within(linked, (0, 1, 2, 3), 16, [1] * 4) < 0.6 * within


def test_the_gap_as_a_sentence():
    costs = chain([EVEN] * 4)

    def texts(name, limit):
        made = build(name, ranks=4, microbatches=16, costs=costs, memory_limit=limit)
        return gap_texts(simulate(made, costs), None if limit is None else [limit] * 4, PLAIN)

    assert texts("zb", 1) == (
        "time 144, lower bound 144 within the memory limit, 51 with any",
        "only more memory can gain, at most 64.6%",
    )
    assert texts("zb-h1", 4) == (
        "time 51, lower bound 51 within the memory limit",
        "no schedule of these stages is faster",
    )
    assert texts("1f1b", None) == (
        "time 57, lower bound 51 within its own peak memory",
        "a longer search or more memory can gain at most 10.5%",
    )
    bounds, gains = texts("zb", 3)
    assert bounds.endswith("lower bound 54 within the memory limit, 51 with any")
    assert re.fullmatch(r"a longer search can gain at most \d\.\d%, more memory at most 1\d\.\d%", gains)
