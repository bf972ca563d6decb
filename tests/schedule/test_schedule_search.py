"""``auto``: what is tried, what is chosen, and what is said where nothing fits."""

from dataclasses import replace

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.schedule.check import check
from fxpipe.schedule.costs import Costs, StageCost, chain
from fxpipe.schedule.families.registry import FAMILIES
from fxpipe.schedule.placement import place
from fxpipe.schedule.search.auto import SearchResult, Setting, search
from fxpipe.schedule.search.fastest import fastest
from fxpipe.schedule.stages import Vocabulary
from fxpipe.schedule.vocabulary_costs import with_output_shards

pytestmark = pytest.mark.slow


def costs(ranks: int, chunks: int, times=(1.0, 1.0, 1.0), kept: float = 0.5) -> Costs:
    forward, backward, weight = (time / chunks for time in times)
    return chain([StageCost(forward, backward, weight, 1 / chunks, kept / chunks)] * (ranks * chunks), 0.05)


def settings(ranks: int, **options) -> list[Setting]:
    kinds = ((1, "plain"), (2, "plain"), (2, "v"))
    return [Setting(v, placement, costs(ranks, v, **options)) for v, placement in kinds]


def test_the_fastest_of_what_was_tried_or_better():
    found = search(settings(4), ranks=4, microbatches=6)
    check(found.schedule)
    tried = {(t.schedule, t.stages_per_rank, t.placement): t for t in found.tried}
    searched = {family.name for family in FAMILIES.values() if family.is_searched} - {"zb"}
    for_offload = {family.name for family in FAMILIES.values() if family.for_offload}
    assert {name for name, _, _ in tried} == FAMILIES.keys() - searched - for_offload
    assert {name for (name, _, _), candidate in tried.items() if candidate.why} <= {"zb"}
    assert found.timeline.seconds <= min(t.seconds for t in found.tried if t.seconds)
    setting = found.setting
    assert found.schedule.placement == place(setting.placement, 4, setting.stages_per_rank)


def test_the_objective():
    """The ranks may start one after the other without a cost to the span. The work of a rank is 6 · 3."""
    span = search(settings(4), ranks=4, microbatches=6, objective="span").timeline
    makespan = search(settings(4), ranks=4, microbatches=6, objective="makespan").timeline
    assert 18 <= span.span < makespan.span
    assert makespan.seconds <= span.seconds


def split(ranks: int, barriers: int, **options) -> list[Setting]:
    return [
        replace(
            setting,
            costs=with_output_shards(setting.costs, ranks, 0.5, barriers, 0.05, saved=0.25),
            vocabulary=Vocabulary(output_shards=ranks, barriers=barriers),
        )
        for setting in settings(ranks, **options)
    ]


def check_left_out(asked: list[Setting], found: SearchResult, why: str, microbatches: int) -> None:
    """Some candidates were left out for this reason, and none of them is faster than what was found."""
    left = [candidate for candidate in found.tried if why in candidate.why]
    assert left
    by_kind = {(s.stages_per_rank, s.placement, s.recompute): s for s in asked}
    for candidate in left:
        setting = by_kind[candidate.stages_per_rank, candidate.placement, candidate.recompute]
        ranks = len(setting.costs.stages) // setting.stages_per_rank
        if setting.vocabulary is not None:
            ranks = setting.vocabulary.output_shards
        alone = fastest(candidate.schedule, [setting], ranks=ranks, microbatches=microbatches)
        assert found.timeline.seconds <= alone.timeline.seconds * (1 + 1e-9)


@pytest.mark.parametrize("barriers", [1, 2])
def test_what_is_not_completed_is_no_faster(barriers):
    """Orders get their vocabulary stages only while they can still be the fastest by estimate."""
    asked = split(4, barriers)
    check_left_out(asked, search(asked, ranks=4, microbatches=8), "not completed", 8)


def test_what_is_not_built_is_no_faster():
    """Vocabulary stages are added in the settings whose bound the best does not reach; here, of those with a
    third more work in F, in none."""
    slower = [replace(s, recompute="full") for s in split(4, 1, times=(1.0, 2.0, 1.0))]
    asked = [*split(4, 1), *slower]
    found = search(asked, ranks=4, microbatches=8)
    check_left_out(asked, found, "not built", 8)
    assert {c.why.partition(":")[0] for c in found.tried if c.recompute} == {"not built", "not searched"}


def test_what_is_not_searched_is_no_faster():
    asked = [*settings(4), *(replace(s, recompute="full") for s in settings(4, times=(1.0, 2.0, 1.0)))]
    found = search(asked, ranks=4, microbatches=8)
    check_left_out(asked, found, "not searched", 8)
    searched = [c for c in found.tried if c.schedule == "zb" and c.seconds]
    assert searched
    assert not any(candidate.recompute for candidate in searched)


def test_what_does_not_fit_is_left_out():
    found = search(settings(4), ranks=4, microbatches=6, memory_limit=2.5)
    assert max(found.timeline.peak_memory) <= 2.5
    left_out = {t.schedule: t.why for t in found.tried if t.why}
    assert "needs 6 of memory on rank 0, and the limit is 2.5" in left_out["gpipe"]
    assert all(t.seconds is None for t in found.tried if t.why)


def test_each_setting_has_its_own_limit():
    kinds = settings(4)
    small = [Setting(s.stages_per_rank, s.placement, s.costs, 0.5) for s in kinds[1:]]
    found = search([kinds[0], *small], ranks=4, microbatches=6)
    assert found.setting is kinds[0]


def test_nothing_fits():
    with pytest.raises(
        ScheduleError, match=r"limit of 0\.5; the smallest that one can keep is 1, .* offload"
    ):
        search(settings(4), ranks=4, microbatches=6, memory_limit=0.5)
    with pytest.raises(ScheduleError, match="nothing to search"):
        search([], ranks=4, microbatches=6)


def test_below_the_fixed_orders_of_torch():
    """F, B, W = 1, 1.2, 0.6 on 8 ranks, 16 microbatches: 1.094 m(F+B+W) for ZBVZeroBubble there."""
    kinds = [Setting(2, name, chain([StageCost(0.5, 0.6, 0.3, 0.5, 0.5)] * 16)) for name in ("plain", "v")]
    found = search(kinds, ranks=8, microbatches=16)
    work = 16 * 2.8
    assert found.timeline.seconds < 1.094 * work
    assert found.timeline.span < 1.094 * work


def test_where_one_setting_is_as_good_as_can_be_the_others_still_get_an_order():
    table = {v: chain([StageCost(1 / v, 1 / v, 1 / v, 1 / v, 0.5 / v)] * (4 * v)) for v in (1, 2, 4)}
    settings = [Setting(2, "v", table[2]), Setting(1, "plain", table[1]), Setting(4, "plain", table[4])]
    choice = search(settings, ranks=4, microbatches=12, memory_limit=4.3, objective="span")
    assert choice.timeline.span_bubble == pytest.approx(0)
    found = {tried.stages_per_rank: tried for tried in choice.tried if tried.schedule == "zb"}
    assert found.keys() == {1, 2, 4}
    assert all(tried.peak_memory <= 4.3 for tried in found.values())
