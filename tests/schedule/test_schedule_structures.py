"""Schedules for stages of any structure: branches, ops that have nothing to do, values that W alone needs."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.ir.verify import may_feed
from fxpipe.schedule.costs import Costs, Edge, StageCost
from fxpipe.schedule.families.registry import FAMILIES
from fxpipe.schedule.lowering.deadlock import prove
from fxpipe.schedule.lowering.lower import levels, lower
from fxpipe.schedule.ops import Color, Phase, Schedule
from fxpipe.schedule.problem import Problem
from fxpipe.schedule.search.build import build
from fxpipe.schedule.simulation.simulator import simulate

pytestmark = pytest.mark.slow

TIMES = st.sampled_from([0.0, 0.0, 0.5, 1.0, 1.75])
BYTES = st.sampled_from([0.0, 0.5, 1.0])
SEARCHED = tuple(name for name, family in FAMILIES.items() if family.is_searched)
ALL = tuple(
    (name, v) for name, family in FAMILIES.items() for v in (1, 2) if v in family.chunks_in(family.placement)
)


@st.composite
def structures(draw, stages: int) -> Costs:
    """Any edges that the graph may have between stages, any op may be empty, W may be all that holds memory,
    and messages between machines take longer or not."""
    costs = []
    for _ in range(stages):
        forward, backward, weight = draw(TIMES), draw(TIMES), draw(TIMES)
        costs.append(StageCost(forward, backward, weight, draw(BYTES), draw(BYTES)))
    ends = [Color(stage, phase) for stage in range(stages) for phase in Phase]
    allowed = [(a, b) for a, b in product(ends, ends) if a.stage != b.stage and may_feed(a, b)]
    chosen = draw(st.lists(st.sampled_from(allowed), max_size=3 * stages, unique=True)) if allowed else []
    inter = st.none() | TIMES
    edges = [Edge(a, b, draw(st.sampled_from([0.0, 0.25])), draw(TIMES), draw(inter)) for a, b in chosen]
    return Costs(tuple(costs), tuple(edges), ranks_per_machine=draw(st.sampled_from([None, 1, 2])))


@st.composite
def problems(draw, families) -> tuple[str, int, int, int, Costs]:
    name, chunks = draw(st.sampled_from(families))
    ranks, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    return name, chunks, ranks, microbatches, draw(structures(ranks * chunks))


def made(name: str, chunks: int, ranks: int, microbatches: int, costs: Costs, limit=None) -> Schedule:
    return build(
        name,
        ranks=ranks,
        microbatches=microbatches,
        costs=costs,
        stages_per_rank=chunks,
        placement=FAMILIES[name].placement,
        memory_limit=limit,
        effort=0.01,
    )


def needed(name: str, chunks: int, ranks: int, microbatches: int, costs: Costs) -> float:
    """What one microbatch takes on the rank that needs the most."""
    shape = FAMILIES[name].placement
    problem = Problem(ranks, microbatches, chunks, shape, costs, (float("inf"),) * ranks)
    return max(problem.arrays.smallest_limits)


@settings(max_examples=50, deadline=None)
@given(problems(ALL))
def test_every_family_runs_and_is_lowered(problem):
    schedule, costs = made(*problem), problem[-1]
    timeline = simulate(schedule, costs)
    assert timeline.seconds >= timeline.lower_bound - 1e-9 * (1 + timeline.seconds)
    assert all(not steps or abs(steps[-1][1]) < 1e-9 for steps in timeline.memory)
    prove(lower(schedule, costs.edges), schedule.placement)
    assert len(levels(schedule, costs.edges)) == sum(map(len, schedule.order))


@settings(max_examples=25, deadline=None)
@given(problems(ALL))
def test_links_of_machines_are_times_of_edges(problem):
    """Schedules, bounds and simulations are those of edges that each take the time of their own link."""
    *rest, costs = problem
    schedule = made(*problem)
    edges = [
        replace(edge, seconds=costs.message_seconds(edge, schedule.placement), inter_seconds=None)
        for edge in costs.edges
    ]
    flat = replace(costs, edges=tuple(edges), ranks_per_machine=None)
    assert made(*rest, flat) == schedule
    one, other = simulate(schedule, costs), simulate(schedule, flat)
    assert one.spans == other.spans
    assert one.lower_bound == other.lower_bound
    assert one.exposed_communication == other.exposed_communication


@settings(max_examples=50, deadline=None)
@given(problems(tuple((name, v) for name, v in ALL if name in SEARCHED)), st.floats(0, 4))
def test_searched_families_keep_any_limit_that_holds_one_microbatch(problem, more):
    costs = problem[-1]
    limit = needed(*problem) + more or 1.0
    schedule = made(*problem, limit=limit)
    timeline = simulate(schedule, costs)
    assert max(timeline.peak_memory) <= limit * (1 + 1e-9)
    prove(lower(schedule, costs.edges), schedule.placement)
