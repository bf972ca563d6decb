"""The candidates of a search, completed with vocabulary stages and transfers, and the best of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from fxpipe.errors import LimitError, ScheduleError
from fxpipe.schedule.candidate import Candidate
from fxpipe.schedule.offload.planner import with_offload
from fxpipe.schedule.ops import Order, Schedule
from fxpipe.schedule.search.goal import Objective
from fxpipe.schedule.search.pool import Task, anneal_all, anneal_each
from fxpipe.schedule.search.vocabulary_passes import weavings, woven
from fxpipe.schedule.search.ways import Setting, Way
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.schedule.simulation.timeline import Timeline


@dataclass(frozen=True, eq=False)
class Draft:
    """An order of the model's own stages."""

    family: str
    way: Way
    order: Order
    least: float


@dataclass(frozen=True)
class Entry:
    """A complete schedule; the least ``key`` is the best."""

    key: tuple[float, float, float, float]
    way: Way
    timeline: Timeline


class Results:
    """The candidates so far, and the best of them.

    ``smallest``: the smallest limit that a schedule kept with as much offload as possible.  ``woven``: the
    drafts with vocabulary stages, with their orders of all stages.
    """

    def __init__(self, objective: Objective) -> None:
        self.objective: Objective = objective
        self.best: Entry | None = None
        self.smallest = inf
        self.tried: dict[tuple[Way, str], Candidate] = {}
        self.woven: dict[Draft, list[Task]] = {}

    def is_beaten(self, least: float) -> bool:
        """Whether the best schedule is faster than one that takes ``least`` seconds or more."""
        return self.best is not None and least > self.best.key[0] * (1 + 1e-9)

    def leave_out(self, way: Way, family: str, why: str) -> None:
        self.tried[way, family] = _candidate(family, way.setting, why)

    def complete(self, draft: Draft) -> None:
        """Add the draft's schedule with vocabulary stages, and with transfers if it is not beaten by then."""
        way, vocabulary = draft.way, draft.way.setting.vocabulary
        if vocabulary is None:
            self._add(draft, draft.order)
            return
        costs, limits = way.setting.costs, way.limits_without_offload
        try:
            tasks = weavings(way.problem, draft.order, costs, vocabulary, limits, self.objective)
        except ScheduleError as error:
            self.leave_out(way, draft.family, str(error))
        else:
            self.woven[draft] = tasks
            self._add(draft, woven(tasks, vocabulary))

    def anneal(self, effort: float | None, seed: int) -> None:
        """Anneal the orders with vocabulary stages: all in one pool, but for those that offload to keep a
        limit, since one of them that is slow without the transfers may be the fastest with them.
        """
        together, alone = list[list[Task]](), list[Task]()
        for draft, tasks in self.woven.items():
            if not draft.way.offloads_to_fit:
                together.append(tasks)
            elif not self.is_beaten(draft.least):
                alone += tasks
        if together:
            anneal_all([task for tasks in together for task in tasks], effort, seed)
            # The pool has no work for an order that needs less memory than one at the bound.
            alone += min(together, key=lambda tasks: min(task.seconds for task in tasks))
        anneal_each(alone, seed)
        for draft, tasks in self.woven.items():
            vocabulary = draft.way.setting.vocabulary
            assert vocabulary is not None, "stages are woven into its order"
            self._add(draft, woven(tasks, vocabulary))

    def _add(self, draft: Draft, order: Order) -> None:
        """``order``: of all stages."""
        try:
            entry = self._entry(draft, order)
        except ScheduleError as error:
            if isinstance(error, LimitError):
                self.smallest = min(self.smallest, error.smallest)
            if (draft.way, draft.family) not in self.tried:
                self.leave_out(draft.way, draft.family, str(error))
            return
        self.tried[draft.way, draft.family] = _tried(entry)
        self.best = entry if self.best is None else min(self.best, entry, key=lambda entry: entry.key)

    def _entry(self, draft: Draft, order: Order) -> Entry:
        way, setting = draft.way, draft.way.setting
        schedule = Schedule(draft.family, way.placement, way.problem.microbatches, order, setting.vocabulary)
        timeline = simulate(schedule, setting.costs)
        if way.offload is not None:
            if self.is_beaten(least := _key(timeline, self.objective)[0]):
                raise ScheduleError(f"not offloaded: {self.compared(least)}")
            timeline = with_offload(timeline, way.offload, way.limits)
        return Entry(_key(timeline, self.objective), way, timeline)

    def compared(self, least: float) -> str:
        assert self.best is not None, "there is something to compare with"
        return f"it takes {least:g} or more, and another takes {self.best.key[0]:g}"


def _key(timeline: Timeline, objective: Objective) -> tuple[float, float, float, float]:
    """What is compared: the objective first."""
    seconds, span, peak = (
        float(f"{x:.9g}") for x in (timeline.seconds, timeline.span, max(timeline.peak_memory))
    )
    moved = timeline.moved
    return (seconds, moved, peak, span) if objective == "makespan" else (span, seconds, moved, peak)


def _tried(entry: Entry) -> Candidate:
    timeline = entry.timeline
    return replace(
        _candidate(timeline.schedule.name, entry.way.setting),
        seconds=timeline.seconds,
        span_bubble=timeline.span_bubble,
        peak_memory=max(timeline.peak_memory),
        offloaded=timeline.moved,
    )


def _candidate(name: str, setting: Setting, why: str = "") -> Candidate:
    barriers = 0 if setting.vocabulary is None else setting.vocabulary.barriers
    shape = setting.stages_per_rank, setting.placement
    return Candidate(name, *shape, barriers=barriers, recompute=setting.recompute, why=why)
