"""``auto``: what is tried, what is chosen, and what is said where nothing fits."""

from dataclasses import replace

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.schedule.candidate import SearchResult
from fxpipe.schedule.check import check
from fxpipe.schedule.costs import Costs, StageCost, chain
from fxpipe.schedule.families.registry import FAMILIES
from fxpipe.schedule.placement import place
from fxpipe.schedule.problem import Limit, Problem, Setting, per_rank
from fxpipe.schedule.search.auto import search
from fxpipe.schedule.search.fastest import fastest, stages_and_placements
from fxpipe.schedule.stages import Vocabulary
from fxpipe.schedule.vocabulary_costs import with_output_shards

pytestmark = pytest.mark.slow


def costs(ranks: int, chunks: int, times=(1.0, 1.0, 1.0), kept: float = 0.5) -> Costs:
    forward, backward, weight = (time / chunks for time in times)
    return chain([StageCost(forward, backward, weight, 1 / chunks, kept / chunks)] * (ranks * chunks), 0.05)


def problems(ranks: int, microbatches: int, limit: Limit = None, **options) -> list[Problem]:
    kinds = ((1, "plain"), (2, "plain"), (2, "v"))
    limits = per_rank(limit, ranks)
    return [Problem(ranks, microbatches, v, shape, costs(ranks, v, **options), limits) for v, shape in kinds]


def test_the_stages_and_placements_of_auto():
    assert stages_and_placements("auto", 1) == ((1, "plain"),)
    assert stages_and_placements("auto", 2) == ((2, "plain"), (2, "v"))
    assert stages_and_placements("auto", placement="v") == ((1, "v"), (2, "v"), (4, "v"))


def test_the_fastest_of_what_was_tried_or_better():
    found = search(problems(4, 6))
    check(found.schedule)
    tried = {(t.schedule, t.stages_per_rank, t.placement): t for t in found.tried}
    searched = {family.name for family in FAMILIES.values() if family.is_searched} - {"zb"}
    for_offload = {family.name for family in FAMILIES.values() if family.for_offload}
    assert {name for name, _, _ in tried} == FAMILIES.keys() - searched - for_offload
    assert {name for (name, _, _), candidate in tried.items() if candidate.why} <= {"zb"}
    assert found.timeline.seconds <= min(t.seconds for t in found.tried if t.seconds)
    problem = found.problem
    assert found.schedule.placement == place(problem.shape, 4, problem.stages_per_rank)


def test_the_objective():
    """The ranks may start one after the other without a cost to the span. The work of a rank is 6 · 3."""
    span = search([replace(p, objective="span") for p in problems(4, 6)]).timeline
    makespan = search(problems(4, 6)).timeline
    assert 18 <= span.span < makespan.span
    assert makespan.seconds <= span.seconds


def split(barriers: int, **options) -> list[Problem]:
    return [
        replace(
            problem,
            costs=with_output_shards(problem.costs, 4, 0.5, barriers, 0.05, saved=0.25),
            vocabulary=Vocabulary(output_shards=4, barriers=barriers),
        )
        for problem in problems(4, 8, **options)
    ]


def check_left_out(asked: list[Problem], found: SearchResult, why: str) -> None:
    """Some candidates were left out for this reason, and none of them is faster than what was found."""
    left = [candidate for candidate in found.tried if why in candidate.why]
    assert left
    by_setting = {problem.setting: problem for problem in asked}
    for row in left:
        problem = by_setting[Setting(*(getattr(row, name) for name in Setting._fields))]
        alone = fastest(row.schedule, [problem])
        assert found.timeline.seconds <= alone.timeline.seconds * (1 + 1e-9)


@pytest.mark.in_ci("2")
@pytest.mark.parametrize("barriers", [1, 2])
def test_what_is_not_completed_is_no_faster(barriers):
    """Orders get their vocabulary stages only while they can still be the fastest by estimate."""
    asked = split(barriers)
    check_left_out(asked, search(asked), "not completed")


def test_what_is_not_built_is_no_faster():
    """Vocabulary stages are added in the settings whose bound the best does not reach; here, of those with a
    third more work in F, in none."""
    slower = [replace(problem, recompute="full") for problem in split(1, times=(1.0, 2.0, 1.0))]
    asked = [*split(1), *slower]
    found = search(asked)
    check_left_out(asked, found, "not built")
    assert {c.why.partition(":")[0] for c in found.tried if c.recompute} == {"not built", "not searched"}


def test_what_is_not_searched_is_no_faster():
    slower = [replace(problem, recompute="full") for problem in problems(4, 8, times=(1.0, 2.0, 1.0))]
    asked = [*problems(4, 8), *slower]
    found = search(asked)
    check_left_out(asked, found, "not searched")
    searched = [c for c in found.tried if c.schedule == "zb" and c.seconds]
    assert searched
    assert not any(candidate.recompute for candidate in searched)


def test_what_does_not_fit_is_left_out():
    found = search(problems(4, 6, 2.5))
    assert max(found.timeline.peak_memory) <= 2.5
    left_out = {t.schedule: t.why for t in found.tried if t.why}
    assert "needs 6 of memory on rank 0, and the limit is 2.5" in left_out["gpipe"]
    assert all(t.seconds is None for t in found.tried if t.why)


def test_a_family_is_tried_only_in_placements_that_it_has():
    found = search([Problem(2, 2, 4, "v", costs(2, 4), per_rank(None, 2))], effort=0.01)
    assert {row.schedule for row in found.tried} == {"gpipe", "zb"}


def test_each_problem_has_its_own_limit():
    found = search([problems(4, 6)[0], *problems(4, 6, 0.5)[1:]])
    assert found.problem.setting == Setting(1, "plain", 0, "")


def test_nothing_fits():
    with pytest.raises(
        ScheduleError, match=r"limit of 0\.5; the smallest that one can keep is 1, .* offload"
    ):
        search(problems(4, 6, 0.5))
    with pytest.raises(ScheduleError, match="nothing to search"):
        search([])


def test_below_the_fixed_orders_of_torch():
    """F, B, W = 1, 1.2, 0.6 on 8 ranks, 16 microbatches: 1.094 m(F+B+W) for ZBVZeroBubble there."""
    costs, limits = chain([StageCost(0.5, 0.6, 0.3, 0.5, 0.5)] * 16), per_rank(None, 8)
    found = search([Problem(8, 16, 2, shape, costs, limits) for shape in ("plain", "v")])
    work = 16 * 2.8
    assert found.timeline.seconds < 1.094 * work
    assert found.timeline.span < 1.094 * work


def test_where_one_problem_is_as_good_as_can_be_the_others_still_get_an_order():
    table = {v: chain([StageCost(1 / v, 1 / v, 1 / v, 1 / v, 0.5 / v)] * (4 * v)) for v in (1, 2, 4)}
    kinds = ((2, "v"), (1, "plain"), (4, "plain"))
    choice = search([Problem(4, 12, v, shape, table[v], (4.3,) * 4, objective="span") for v, shape in kinds])
    assert choice.timeline.span_bubble == pytest.approx(0)
    found = {tried.stages_per_rank: tried for tried in choice.tried if tried.schedule == "zb"}
    assert found.keys() == {1, 2, 4}
    assert all(tried.peak_memory <= 4.3 for tried in found.values())
