"""Of orders that are equally fast, a search gives one that needs little memory."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.schedule.candidate import SearchResult
from fxpipe.schedule.check import check
from fxpipe.schedule.costs import Costs, StageCost, Update, chain
from fxpipe.schedule.problem import Problem, per_rank
from fxpipe.schedule.search.build import build
from fxpipe.schedule.search.less_memory import with_less_memory
from fxpipe.schedule.search.pool import find
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.schedule.stages import Vocabulary
from fxpipe.schedule.vocabulary_costs import with_output_shards


def even(stages: int, chunks: int = 1) -> Costs:
    return chain([StageCost(1 / chunks, 1 / chunks, 1 / chunks, 1 / chunks, 0.5 / chunks)] * stages, 0.05)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "chunks", "most"),
    [(2, 16, 1, 4), (4, 32, 1, 10), (8, 64, 1, 22), (4, 16, 2, 6)],
)
def test_a_search_without_a_limit_holds_few_microbatches(ranks, microbatches, chunks, most):
    """``most``: the activations of so many, at which a search under limits is as fast first."""
    costs, shape = even(ranks * chunks, chunks), "v" if chunks > 1 else "plain"
    (found,) = find(
        [Problem(ranks, microbatches, chunks, shape, costs, per_rank(None, ranks), objective="span")]
    )
    given = {"ranks": ranks, "microbatches": microbatches, "stages_per_rank": chunks, "placement": shape}
    schedule = build("zb", costs=costs, **given)
    check(schedule)
    timeline = simulate(schedule, costs)
    assert timeline.span <= found.seconds * (1 + 1e-9)
    assert max(timeline.peak_memory) <= most < 0.7 * found.peak


def test_vocabulary_stages_hold_few_microbatches():
    costs = with_output_shards(even(4), 4, 0.5, 1, 0.05)
    given = {"ranks": 4, "microbatches": 24, "costs": costs, "vocabulary": Vocabulary(0, 4, 1)}
    found = simulate(build("zb", **given), costs)
    limited = simulate(build("zb", memory_limit=0.75 * max(found.peak_memory), **given), costs)
    assert found.span <= limited.span
    assert max(found.peak_memory) < 11


@pytest.mark.parametrize(
    ("shape", "microbatches", "times", "update"),
    [
        ("plain", 9, [(3, 0, 1), (2, 1, 1), (0.5, 1, 0), (0.5, 3, 3)], Update((0.5, 3), (0.0,) * 2)),
        (
            "v",
            6,
            [(2, 1, 2), (1, 1, 1), (0.5, 0, 3), (0.5, 3, 1), (0, 0, 3), (1, 2, 0)],
            Update((0, 3, 1), (0.0,) * 3, 2),
        ),
        (
            "v",
            4,
            [(1, 2, 0), (0.5, 1, 1), (0, 1, 3), (1, 3, 2), (1, 0, 3), (1, 1, 3)],
            Update((2, 1, 0), (0.0,) * 3, 1),
        ),
    ],
)
def test_an_order_with_less_memory_and_a_longer_period_is_not_taken(shape, microbatches, times, update):
    """Its span is as short, but many of its steps, one behind the other, take longer."""
    ranks = len(update.seconds)
    costs = replace(chain([StageCost(*each, 1.0, 0.5) for each in times], 0.1), update=update)
    problem = Problem(ranks, microbatches, 2, shape, costs, per_rank(None, ranks), objective="period")
    (one,) = find([problem], effort=0.005)

    def period(candidate):
        schedule = problem.schedule("zb", candidate.order.ops)
        return SearchResult(problem, simulate(schedule, costs)).seconds

    assert period(with_less_memory(one)) <= period(one) * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_no_order_gets_slower_or_larger(data):
    chunks, shape = data.draw(st.sampled_from([(1, "plain"), (2, "plain"), (2, "v")]))
    ranks, microbatches = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    times = st.floats(0, 4).map(lambda time: round(time, 2))
    stages = [StageCost(*(data.draw(times) for _ in range(3)), 1.0, 0.5) for _ in range(ranks * chunks)]
    costs = chain(stages, data.draw(times))
    objective = data.draw(st.sampled_from(["span", "makespan", "period"]))
    if objective == "period":
        costs = replace(costs, update=Update(tuple(data.draw(times) for _ in range(ranks)), (0.0,) * ranks))
    limit = data.draw(st.none() | st.floats(chunks, chunks + 6))
    problem = Problem(ranks, microbatches, chunks, shape, costs, per_rank(limit, ranks), objective=objective)
    (one,) = find([problem], effort=0.01)
    less = with_less_memory(one)
    assert less.problem is problem
    assert less.peak == max(less.order.peaks()) <= one.peak
    assert less.order.fits(problem.limits)

    def completed(candidate):
        schedule = problem.schedule("zb", candidate.order.ops)
        check(schedule)
        return SearchResult(problem, simulate(schedule, costs))

    before, after = completed(one), completed(less)
    if objective == "span":
        assert after.timeline.span <= before.timeline.span * (1 + 1e-9)
    else:
        assert after.seconds <= before.seconds * (1 + 1e-9)
