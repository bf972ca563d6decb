"""Stages in parts: orders of families as those of parts, and exchanges between parts hidden by other ops."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.schedule.costs import Costs, Edge, Exchange, StageCost
from fxpipe.schedule.families.registry import FAMILIES
from fxpipe.schedule.ops import Color, Phase, Schedule, order_text, parse_order
from fxpipe.schedule.parts import joined_costs, ops_of_parts, placement_of_parts
from fxpipe.schedule.problem import Problem, per_rank
from fxpipe.schedule.search.auto import search
from fxpipe.schedule.search.build import schedule_of
from fxpipe.schedule.simulation.simulator import simulate


def costs_of(parts: tuple[int, ...], exchange: float, message: float = 0.0, bytes: float = 0.1) -> Costs:
    """F, B and W of 1 on each part, which holds 1 and for W 0.5; an exchange between the parts of a stage."""
    stage_of = placement_of_parts(range(len(parts)), parts)
    edges = []
    for s in range(len(stage_of) - 1):
        seconds = (0.0, exchange) if stage_of[s] == stage_of[s + 1] else (message, 0.0)
        for source, target, phase in ((s, s + 1, Phase.F), (s + 1, s, Phase.B)):
            ends = Color(source, phase), Color(target, phase)
            edges.append(Edge(*ends, bytes, seconds[0], exchange=seconds[1]))
    return Costs((StageCost(1, 1, 1, 1, 0.5),) * len(stage_of), tuple(edges))


def problem(ranks: int, microbatches: int, parts: tuple[int, ...], shape: str = "plain", **more) -> Problem:
    exchange, limit = more.get("exchange", 0.0), more.get("limit")
    costs = costs_of(parts, exchange, more.get("message", 0.0))
    chunks = len(parts) // ranks
    return Problem(ranks, microbatches, chunks, shape, costs, per_rank(limit, ranks), parts=parts)


def test_parts_are_on_the_rank_of_their_stage():
    assert placement_of_parts((0, 1, 1, 0), (2, 1, 3, 1)) == (0, 0, 1, 1, 1, 1, 0)
    assert problem(2, 1, (2, 1, 3, 1), "v").placement == (0, 0, 1, 1, 1, 1, 0)


def test_the_costs_of_joined_parts():
    costs = replace(
        costs_of((2, 3), 0.5, message=4.0),
        exchanges=tuple(Exchange(k, 10 * k, per_use=True) for k in range(1, 6)),
    )
    joined = joined_costs(costs, (2, 3))
    # What one part hands to the next is there once at a time.
    assert joined.stages == (StageCost(2, 2, 2, 2.1, 1), StageCost(3, 3, 3, 3.1, 1.5))
    between = [(e.source.stage, e.target.stage, e.source.phase, e.seconds, e.exchange) for e in joined.edges]
    assert between == [(0, 1, "F", 4.0, 0.0), (1, 0, "B", 4.0, 0.0)]
    assert joined.exchanges == (Exchange(3, 30, True), Exchange(12, 120, True))


def test_joined_messages_take_the_longest_between_machines_too():
    """A message without seconds of its own between machines takes those within one there."""
    ends = [(Color(source, Phase.F), Color(target, Phase.F)) for source, target in ((0, 2), (1, 3))]
    for times in ([(5.0, None), (1.0, 2.0)], [(1.0, 2.0), (5.0, None)]):
        edges = tuple(Edge(*each, 8.0, *seconds) for each, seconds in zip(ends, times, strict=True))
        (joined,) = joined_costs(Costs((StageCost(1, 1, 1),) * 4, edges), (2, 2)).edges
        assert (joined.bytes, joined.seconds, joined.inter_seconds) == (16.0, 5.0, 5.0)


def test_an_op_is_those_of_its_parts():
    ops = parse_order("F0.0 BW0.0\nF1.0 B1.0 W1.0")
    whole = order_text(ops_of_parts(ops, (2, 3), costs_of((2, 3), 0.0)))
    assert whole == "F0.0 F1.0 BW1.0 BW0.0\nF2.0 F3.0 F4.0 B4.0 B3.0 B2.0 W4.0 W3.0 W2.0"
    # W runs while the gradient is exchanged.
    apart = order_text(ops_of_parts(ops, (2, 3), costs_of((2, 3), 0.5)))
    assert apart.splitlines()[0] == "F0.0 F1.0 B1.0 W1.0 B0.0 W0.0"


def test_lanes_exchange_one_value_after_the_other():
    order = parse_order("F0.0 F0.1 F1.0 F1.1 BW1.0 BW1.1 BW0.0 BW0.1")
    schedule = Schedule("by hand", (0, 0), 2, order)
    timeline = simulate(schedule, costs_of((2,), 2.5))
    starts = {str(span.op): span.start for span in timeline.spans[0]}
    # The second exchange waits for the first, from 2 to 3.5.
    assert (starts["F1.0"], starts["F1.1"]) == (3.5, 6.0)
    assert (starts["BW1.0"], starts["BW1.1"], starts["BW0.0"], starts["BW0.1"]) == (7.0, 9.0, 11.5, 14.0)
    assert timeline.seconds == 16.0


@pytest.mark.parametrize("seed", range(4))
def test_every_family_has_an_order_of_parts(seed):
    random = Random(seed)
    for family in FAMILIES.values():
        if family.is_searched:
            continue
        ranks, chunks, shape = random.randint(1, 4), family.stages_per_rank, family.placement
        parts = tuple(random.randint(1, 3) for _ in range(ranks * chunks))
        of = problem(ranks, random.randint(2, 6), parts, shape, exchange=random.choice([0.0, 0.7]))
        timeline = simulate(schedule_of(family.name, of), of.costs)
        assert timeline.seconds >= of.bound * (1 - 1e-9)
        if not any(edge.exchange for edge in of.costs.edges) and not (family.by_stage and ranks == 1):
            whole = simulate(schedule_of(family.name, of.joined), of.joined.costs)
            assert timeline.seconds <= whole.seconds * (1 + 1e-9)


def test_on_one_rank_gpipe_runs_part_by_part():
    """So parameters that replicas divide are gathered once for all microbatches."""
    (ops,) = schedule_of("gpipe", problem(1, 2, (2,))).order
    assert order_text((ops,)) == "F0.0 F0.1 F1.0 F1.1 BW1.0 BW1.1 BW0.0 BW0.1"


def test_on_one_rank_gpipe_has_the_largest_groups_within_the_limit():
    of = problem(1, 7, (4,), limit=4 * 3 + 0.5)
    (ops,) = schedule_of("gpipe", of).order
    assert order_text((ops[:4],)) == "F0.0 F0.1 F0.2 F1.0"
    assert order_text((ops[-2:],)) == "BW1.6 BW0.6"
    alone = problem(1, 2, (2,), limit=2.2)
    assert order_text(schedule_of("gpipe", alone).order) == "F0.0 F1.0 BW1.0 BW0.0 F0.1 F1.1 BW1.1 BW0.1"
    with pytest.raises(ScheduleError, match="schedule gpipe needs"):
        schedule_of("gpipe", problem(1, 2, (2,), limit=1.9))


@pytest.mark.in_ci("plain-parts0")
@pytest.mark.parametrize(("shape", "parts"), [("plain", (6,) * 4), ("v", (3,) * 8)])
def test_exchanges_are_hidden_where_there_is_work(shape, parts):
    """What is exposed: beyond the bound, in which the first and the last microbatch wait for theirs."""
    of = problem(4, 12, parts, shape, exchange=1.0, message=0.1)
    exposed = simulate(schedule_of("zb-h1", of), of.costs).seconds - of.joined.bound
    hidden = search([of], effort=2.0).seconds - of.bound
    assert hidden < 0.12 * exposed


@pytest.mark.parametrize("limit", [24.5, 32.0])
def test_a_search_of_parts_keeps_the_limit(limit):
    of = problem(4, 8, (6,) * 4, limit=limit, exchange=0.5)
    found = search([of], effort=0.5)
    assert max(found.timeline.peak_memory) <= limit * (1 + 1e-9)
    assert {row.parts for row in found.tried} == {6}
