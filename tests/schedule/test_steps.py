"""Steps one behind the other: updates, the chain of verdicts, and the time a step once they repeat."""

from dataclasses import replace
from operator import add
from random import Random

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.schedule.costs import Costs, Exchange, Link, StageCost, Update, chain
from fxpipe.schedule.families.registry import FAMILIES
from fxpipe.schedule.offload.planner import offload, with_link
from fxpipe.schedule.ops import VALIDATIONS, Direction, Phase, Schedule, Transfer, parse_order
from fxpipe.schedule.problem import Problem, per_rank
from fxpipe.schedule.search.build import build
from fxpipe.schedule.search.fastest import fastest
from fxpipe.schedule.search.pool import judged
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.schedule.simulation.steps import Steps, simulate_steps
from fxpipe.schedule.stages import Vocabulary
from fxpipe.schedule.vocabulary_costs import with_output_shards

ONE = Schedule("hand", (0, 1), 1, parse_order("F0.0 B0.0 W0.0\nF1.0 B1.0 W1.0"))
LAST_ENDS_LAST = chain([StageCost(1.0, 1.0, 0.0), StageCost(1.0, 1.0, 2.0)])
"""Rank 0 runs from 0 to 4, and rank 1 from 1 to 5."""


def updating(costs: Costs, *seconds: float, message: float = 0.0) -> Costs:
    return replace(costs, update=Update(seconds, (), message))


def updates(steps: Steps, step: int) -> list[tuple[float, float]]:
    return [tuple(update) for update in steps.steps[step].updates]


def test_a_rank_updates_behind_its_own_ops():
    """The next F of rank 0 runs while rank 1 still computes."""
    steps = simulate_steps(ONE, updating(LAST_ENDS_LAST, 0.5, 0.25, message=0.125), "post")
    assert updates(steps, 0) == [(4.0, 4.5), (5.0, 5.25)]
    second = steps.steps[1]
    assert [own[0].start for own in second.timeline.spans] == [4.5, 5.5]
    # The verdict is there at 5.125 and 5; B could start at 7.5 on rank 0, and at 6.5 on rank 1.
    assert second.verdicts == ((7.5, 7.5), (6.5, 6.5))
    assert steps.period == 4.0 + 0.5  # of rank 0: its span and its update
    assert steps.longest == steps.period


def test_a_barrier_waits_for_all_ranks():
    steps = simulate_steps(ONE, updating(LAST_ENDS_LAST, 0.5, 0.25, message=0.125), "barrier")
    assert updates(steps, 0) == [(5.125, 5.625), (5.0, 5.25)]
    assert steps.steps[1].verdicts == (None, None)
    assert steps.period == 5.0 + 0.125 + 0.5  # the makespan, the message to rank 0, its update


def test_the_first_op_that_is_no_warm_up_waits_for_the_verdict():
    """Rank 1's B waits for a slow message of rank 0, whose B follows it."""
    steps = simulate_steps(ONE, updating(LAST_ENDS_LAST, 0.5, 0.25, message=3.0), "post", steps=3)
    assert updates(steps, 0) == [(4.0, 4.5), (5.0, 5.25)]
    assert steps.steps[1].timeline.spans[1][0].end == 6.5  # the warm-up does not wait
    assert steps.steps[1].verdicts == (
        (8.0, 8.0),
        (6.5, 7.0),
    )  # of rank 0 it is there at 5 + 3, as its B can start
    assert updates(steps, 1) == [(9.0, 9.5), (10.0, 10.25)]
    assert steps.steps[2].verdicts == ((13.0, 13.0), (11.5, 12.0))
    assert steps.waits == (0.0, 0.5)
    assert steps.period == 3.0 + 1.0 + 1.0  # the message, B1, B0


def test_messages_between_machines_take_their_own_time():
    costs = updating(LAST_ENDS_LAST, 0.5, 0.25)
    costs = replace(costs, ranks_per_machine=1, update=replace(costs.update, inter_message=3.0))
    assert simulate_steps(ONE, costs, "post").period == 5.0
    assert simulate_steps(ONE, replace(costs, ranks_per_machine=2), "post").period == 4.5


def test_replicas_sum_gradients_before_the_update_and_gather_parameters_after_it():
    costs = replace(updating(LAST_ENDS_LAST, 0.5, 0.25), exchanges=(Exchange(2.0, 0.25), Exchange(0.5)))
    steps = simulate_steps(ONE, costs, "post")
    # Rank 0's first F waits for its parameters: all ops are later by 0.25 than without replicas.
    assert updates(steps, 0) == [(4.25 + 2.0, 6.75), (5.25 + 0.5, 6.0)]
    assert steps.steps[1].timeline.spans[0][0].start == 6.75 + 0.25
    assert steps.period == 4.0 + 0.25 + 2.0 + 0.5


def test_a_shared_link_carries_what_is_left_of_the_step_before():
    """Rank 1's offload takes from 2 to 6; that of rank 0 in the next step could start at 5.625."""
    pairs = zip(LAST_ENDS_LAST.stages, (0.125, 4.0), strict=True)
    costs = chain([replace(stage, offloadable_for_weight=size) for stage, size in pairs])
    transfers = [Transfer(Direction.OUT, stage, 0, Phase.W, 1, 2) for stage in (0, 1)]
    transfers += [Transfer(Direction.IN, stage, 0, Phase.W, 2, 2) for stage in (0, 1)]
    schedule = replace(ONE, transfers=tuple(transfers))
    costs = updating(replace(costs, link=Link(1.0, ranks=2)), 0.5, 0.25)
    first, second = simulate_steps(schedule, costs, "post", steps=2).steps[:2]
    assert [moved[1:] for moved in first.timeline.transfers[1]] == [(2.0, 6.0), (6.0, 10.0)]
    assert second.timeline.spans[0][0].end == 4.125 + 0.5 + 1.0
    assert second.timeline.transfers[0][0].start == 6.0


def test_a_rank_without_ops_waits_for_the_verdict_before_its_update():
    schedule = Schedule("hand", (1,), 1, ((), *parse_order("F0.0 B0.0 W0.0")))
    costs = updating(chain([StageCost(1.0, 1.0, 1.0)]), 0.5, 0.25, message=0.125)
    steps = simulate_steps(schedule, costs, "post", steps=2)
    assert [updates(steps, step)[0] for step in (0, 1)] == [(0.0, 0.5), (3.125, 3.625)]
    assert steps.period == 3.0 + 0.25


def test_copies_take_time_with_post_validation_alone():
    costs = updating(LAST_ENDS_LAST, 0.5, 0.25)
    costs = replace(costs, update=replace(costs.update, copies=(0.125, 1.0)))
    steps = simulate_steps(ONE, costs, "post")
    assert updates(steps, 0) == [(4.0, 4.625), (5.0, 6.25)]
    assert steps.period == 4.0 + 0.25 + 1.0  # now rank 1's
    assert updates(simulate_steps(ONE, costs, "barrier"), 0) == [(5.0, 5.5), (5.0, 5.25)]


def test_the_number_of_updates_is_that_of_the_ranks():
    with pytest.raises(ScheduleError, match="updates of 3 ranks, and schedule hand has 2"):
        simulate_steps(ONE, updating(LAST_ENDS_LAST, 1.0, 1.0, 1.0))


def drawn(name: str, ranks: int, microbatches: int, seed: int) -> tuple[Schedule, Costs]:
    """A family on uneven costs."""
    random, family = Random(seed), FAMILIES[name]
    stages = [
        StageCost(*(random.uniform(0.5, 1.5) for _ in range(3)), 1.0, 0.5)
        for _ in range(ranks * family.stages_per_rank)
    ]
    costs = chain(stages, 0.1)
    schedule = build(name, ranks=ranks, microbatches=microbatches, costs=costs, effort=0.01)
    return schedule, updating(costs, *(random.uniform(0, 2) for _ in range(ranks)), message=0.05)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name):
    schedule, costs = drawn(name, 4, 6, seed=1)
    check(schedule, costs)


def check(schedule: Schedule, costs: Costs) -> None:
    periods = {}
    for validation in VALIDATIONS:
        steps = simulate_steps(schedule, costs, validation)
        assert steps.steps[0].timeline == simulate(schedule, costs)
        assert steps.period >= steps.longest - 1e-9
        for own, rank_updates in zip(
            zip(*(step.timeline.spans for step in steps.steps), strict=True),
            zip(*(step.updates for step in steps.steps), strict=True),
            strict=True,
        ):
            for spans, update in zip(own, rank_updates, strict=True):
                assert spans[-1].end <= update.start
            for update, spans in zip(rank_updates, own[1:], strict=False):
                assert update.end <= spans[0].start
        # Once steps repeat, so do all after them, each 12th however many are in a cycle (of 1 to 4 ranks).
        many = simulate_steps(schedule, costs, validation, steps=len(steps.steps) + 12)
        later = many.steps[-1].updates[0].end - many.steps[-13].updates[0].end
        assert later == pytest.approx(12 * steps.period)
        periods[validation] = steps.period
    assert periods["post"] <= periods["barrier"] + 1e-9


@pytest.mark.parametrize("barriers", [1, 2])
def test_vocabulary_stages_and_offload(barriers):
    model = chain([StageCost(1.0, 1.0, 1.0, 1.0, 0.5, 0.8, 0.4)] * 8, 0.05)
    costs = updating(with_output_shards(model, 4, 1.0, barriers, 0.05), 0.5, 0.5, 0.5, 1.0, message=0.05)
    vocabulary = Vocabulary(0, 4, barriers)
    schedule = build("zb-h1", ranks=4, microbatches=6, costs=costs, stages_per_rank=2, vocabulary=vocabulary)
    check(schedule, costs)
    moved = offload(replace(simulate(schedule, costs), costs=with_link(costs, 0.5)), 0.5)
    assert moved.moved
    check(moved.timeline.schedule, moved.timeline.costs)


def test_a_search_for_the_period_counts_updates():
    """That of the last rank takes long: its span must be the shortest.  The makespan does not tell."""
    costs = chain([StageCost(1.0, 1.1, 0.7, 1.0, 0.5)] * 4, 0.05)
    costs = updating(costs, 0.5, 0.5, 0.5, 3.0, message=0.02)
    periods = {}
    for objective in ("makespan", "span", "period"):
        problem = Problem(4, 8, 1, "plain", costs, per_rank(5.0, 4), objective=objective)
        found = fastest("auto", [problem], effort=0.1)
        periods[objective] = simulate_steps(found.schedule, costs, "post").period
        (row,) = [row for row in found.tried if row.schedule == found.schedule.name]
        assert row.period == (periods["period"] if objective == "period" else None)
        assert row.compared == (periods["period"] if objective == "period" else found.timeline.seconds)
    assert periods["period"] < periods["span"] < periods["makespan"]


def test_an_order_is_judged_by_its_spans_with_updates():
    schedule, costs = drawn("zb-h2", 4, 6, seed=2)
    problem = Problem(4, 6, 1, "plain", costs, per_rank(None, 4), objective="period")
    timeline = simulate(schedule, costs)
    spans = [own[-1].end - own[0].start for own in timeline.spans]
    longest = max(map(add, spans, costs.update.seconds))
    assert max(spans) < longest < max(spans) + max(costs.update.seconds)
    assert judged(problem, "zb-h2", problem.order(schedule.order)).seconds == pytest.approx(longest)
    work = [6 * costs.stages[rank].total + costs.update.seconds[rank] for rank in range(4)]
    assert problem.bound == pytest.approx(max(work))


def test_steps_that_repeat_late(monkeypatch):
    """Two circles of ranks that wait for each other are about as long.  Cut short, the mean is the answer."""
    schedule, costs = drawn("zb-h2", 3, 4, seed=0)
    costs = replace(costs, update=replace(costs.update, message=5.0))
    exact = simulate_steps(schedule, costs, "post")
    assert len(exact.steps) == 28
    check(schedule, costs)
    monkeypatch.setattr("fxpipe.schedule.simulation.steps._MOST", 12)
    cut = simulate_steps(schedule, costs, "post")
    assert len(cut.steps) == 12
    assert cut.period != exact.period
    assert cut.period == pytest.approx(exact.period, rel=0.01)
