"""What replicas exchange, in the simulated step."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from fxpipe.schedule.bound import lower_bound
from fxpipe.schedule.bucket_use import Asks, per_use
from fxpipe.schedule.check import check_costs
from fxpipe.schedule.costs import Costs, Exchange, StageCost, chain
from fxpipe.schedule.engine.order import Order
from fxpipe.schedule.ops import OpKind, parse_ops
from fxpipe.schedule.problem import Problem, per_rank
from fxpipe.schedule.search.auto import search
from fxpipe.schedule.search.build import build, schedule_of
from fxpipe.schedule.search.local_search import improve
from fxpipe.schedule.search.pool import find
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.schedule.simulation.timeline import Timeline
from fxpipe.strict import Mismatch


def step(
    *exchanges: Exchange, family: str = "1f1b", microbatches: int = 2, stages_per_rank: int = 1
) -> Timeline:
    """Of two ranks whose F, B and W take a second each; 1F1B with two microbatches takes 9."""
    costs = chain([StageCost(1.0, 1.0, 1.0)] * 2 * stages_per_rank)
    options = {"ranks": 2, "microbatches": microbatches, "stages_per_rank": stages_per_rank}
    schedule = build(family, costs=costs, **options)
    return simulate(schedule, replace(costs, exchanges=exchanges))


def spans(timeline: Timeline) -> list[list[tuple[str, int, float, float]]]:
    return [[tuple(span) for span in own] for own in timeline.exchanges]


def test_without_replicas_nothing_is_exchanged():
    assert spans(step()) == [[], []]
    assert step().seconds == 9.0


def test_a_sum_begins_behind_the_last_gradient_of_its_stage():
    timeline = step(Exchange(3.0), Exchange(3.0))
    assert spans(timeline) == [[("sum", 0, 9.0, 12.0)], [("sum", 1, 7.0, 10.0)]]
    assert (timeline.seconds, timeline.exposed_exchange) == (12.0, 3.0)


def test_a_sum_that_ends_before_the_last_op_costs_nothing():
    timeline = step(Exchange(0.0), Exchange(2.0))
    assert (timeline.seconds, timeline.exposed_exchange) == (9.0, 0.0)


@pytest.mark.parametrize(("chunks", "shape"), [(1, "plain"), (2, "plain"), (2, "v")])
def test_a_search_times_orders_as_the_simulator_does(chunks, shape):
    random = Random(chunks)
    costs = chain([StageCost(1.0, 1.1, 0.9)] * 4 * chunks, seconds=0.1)
    for most in (1.0, 4.0, 16.0):
        exchanges = [Exchange(random.uniform(0, most), random.uniform(0, most)) for _ in costs.stages]
        problem = Problem(4, 6, chunks, shape, replace(costs, exchanges=tuple(exchanges)), per_rank(None, 4))
        (found,) = find([replace(problem, costs=costs)], effort=0.01)
        order = Order(problem.arrays, found.order.op_ids)
        for own in (order, improve(problem, order, 1_000_000)):
            timeline = simulate(problem.schedule("", own.ops), problem.costs)
            assert own.run().makespan == pytest.approx(timeline.seconds)
            assert problem.bound <= timeline.seconds * (1 + 1e-9)


def test_auto_sees_what_replicas_sum():
    """On each rank one of the two stages is summed while the other still runs."""
    costs = chain([StageCost(0.5, 0.5, 0.5)] * 8, seconds=0.05)
    problem = Problem(4, 8, 2, "plain", costs, per_rank(None, 4))
    with_sums = replace(problem, costs=replace(costs, exchanges=(Exchange(5.0),) * 8))
    without, found = (search([each], effort=0.1) for each in (problem, with_sums))
    assert found.seconds < 1.02 * with_sums.bound
    assert simulate(without.schedule, with_sums.costs).seconds > 1.05 * found.seconds


def test_a_stage_waits_for_its_parameters():
    """Those of all stages are asked for at the start."""
    timeline = step(Exchange(0.0, 0.5), Exchange(0.0, 4.0))
    assert spans(timeline) == [[("gather", 0, 0.0, 0.5)], [("gather", 1, 0.0, 4.0)]]
    assert [own[0].start for own in timeline.spans] == [0.5, 4.0]
    assert timeline.seconds == 9.0 + 3.0


def test_one_exchange_at_a_time():
    """The two stages of a rank are gathered one after the other, and so summed."""
    timeline = step(*[Exchange(2.0, 0.25)] * 4, family="interleaved", stages_per_rank=2)
    for own in timeline.exchanges:
        assert [span.what for span in own] == ["gather", "gather", "sum", "sum"]
        assert all(a.end <= b.start for a, b in pairwise(own))
        assert [span.stage for span in own[:2]] == [span.stage for span in own[:1:-1]]


def test_each_use_is_gathered_ahead_of_its_op():
    """While the op ahead of it runs."""
    each = Exchange(0.5, 0.5, per_use=True)
    timeline = step(each, each, each, each, family="interleaved", microbatches=4, stages_per_rank=2)
    own = timeline.exchanges[0]
    assert sum(span.what == "gather" for span in own) > 2
    starts = {span.op: span.start for span in timeline.spans[0]}
    assert max(span.end for span in own if span.what == "gather") <= max(starts.values())
    assert (
        timeline.seconds
        < step(
            *[replace(each, gather=4.0)] * 4, family="interleaved", microbatches=4, stages_per_rank=2
        ).seconds
    )


def test_uses_with_one_op_between_them_are_one():
    ops = parse_ops("F0.0 F1.0 F0.1 F1.1 F1.2 B0.0 W0.0 W1.0 W1.1 W0.1")
    use = per_use(
        ops,
        lambda op: op.stage == 0 and op.kind is not OpKind.W,
        lambda op: op.stage == 0 and op.kind is OpKind.W,
        ops[-1],
    )
    assert [(str(a), str(b)) for a, b in use.spans] == [("F0.0", "F0.1"), ("B0.0", "B0.0")]
    assert list(map(str, use.sums)) == ["W0.0", "W0.1"]
    assert use.frees


def test_what_is_needed_is_asked_for_before_the_stage_ahead():
    ops = parse_ops("F0.0 F0.1 F0.2 F1.0 F1.1 F1.2 BW1.2 BW1.1 BW1.0 BW0.2 BW0.1 BW0.0")

    def asked(stage):
        use = per_use(ops, lambda op: op.stage == stage, lambda op: op.kind is OpKind.BW, ops[-1])
        return [tuple(map(str, pair)) for pair in Asks(ops).of(use)]

    assert asked(0) == [("F1.0", "BW0.2")]
    assert asked(1) == [("F0.0", "F1.0")]


def test_what_was_freed_is_asked_for_behind_that():
    """W needs no parameters: they are freed between two B of one stage."""
    ops = parse_ops("F0.0 F0.1 B0.0 W0.0 W0.1 B0.1")
    use = per_use(ops, lambda op: op.kind is not OpKind.W, lambda op: op.kind is OpKind.W, ops[-1])
    assert [str(last) for _, last in use.spans] == ["B0.0", "B0.1"]
    assert [tuple(map(str, pair)) for pair in Asks(ops).of(use)] == [("W0.0", "B0.1")]


def test_a_part_has_the_time_of_the_part_ahead_to_come():
    """So gathers that take less than that cost nothing but the first and the last exchange."""
    costs = replace(chain([StageCost(1.0, 1.0, 1.0)] * 4), exchanges=(Exchange(1.0, 2.9, per_use=True),) * 4)
    problem = Problem(1, 3, 1, "plain", costs, per_rank(None, 1), parts=(4,))
    timeline = simulate(schedule_of("gpipe", problem), costs)
    assert timeline.seconds == 2.9 + problem.work + 1.0
    assert sum(span.what == "gather" for span in timeline.exchanges[0]) == 7


def test_a_stage_without_gradients_is_not_summed():
    never = per_use(ops := parse_ops("F0.0 F0.1"), lambda op: True, lambda op: False, ops[-1])
    assert [str(op) for op in never.sums] == ["F0.1"]
    assert never.spans == ((ops[0], ops[1]),)


def test_costs_have_an_exchange_of_each_stage_or_none():

    costs = Costs((StageCost(1.0, 1.0, 1.0),) * 2, (), exchanges=(Exchange(1.0),))
    with pytest.raises(Mismatch, match="exchanges is 1 and must be one of each stage, or none"):
        check_costs(costs)


def test_the_lower_bound_knows_gathers_and_sums():
    """Of a rank alone: what stands before its first op and behind its last one."""
    costs = Costs((StageCost(1.0, 1.0, 1.0),), (), exchanges=(Exchange(3.0, 0.5),))
    assert lower_bound(costs, (0,), 4) == 0.5 + 12 + 3
    assert lower_bound(costs.of_ops, (0,), 4) == 12
    assert Problem(1, 4, 1, "plain", costs, per_rank(None, 1)).bound == 15.5


@pytest.mark.parametrize("family", ["1f1b", "gpipe", "zb-h1", "interleaved", "zb-v"])
@pytest.mark.parametrize("per_use", [False, True])
def test_no_schedule_beats_the_lower_bound(family, per_use):
    stages = 2 if family in ("interleaved", "zb-v") else 1
    for seconds in (0.25, 2.0, 30.0):
        exchanges = [Exchange(seconds * (1 + k), seconds / (1 + k), per_use) for k in range(2 * stages)]
        timeline = step(*exchanges, family=family, microbatches=4, stages_per_rank=stages)
        assert timeline.lower_bound <= timeline.seconds * (1 + 1e-12)
        without = replace(timeline, costs=timeline.costs.of_ops)
        assert timeline.lower_bound > without.lower_bound
