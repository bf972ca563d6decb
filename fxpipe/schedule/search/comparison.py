"""The candidates of a search, completed with vocabulary stages and transfers, and the best of them."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from fxpipe.errors import LimitError, ScheduleError
from fxpipe.schedule.candidate import Candidate, SearchResult
from fxpipe.schedule.candidate_row import Tried
from fxpipe.schedule.offload.planner import with_offload
from fxpipe.schedule.ops import RankOps
from fxpipe.schedule.problem import Problem
from fxpipe.schedule.search.less_memory import with_less_memory
from fxpipe.schedule.search.pool import anneal_all, anneal_each
from fxpipe.schedule.search.vocabulary_passes import best_of, insertions, ops_of
from fxpipe.schedule.simulation.simulator import simulate


class Comparison:
    """The candidates so far, and the best of them.

    ``smallest``: the smallest limit that a schedule kept with as much offload as possible.
    ``smallest_built``: those that orders built by rule can keep, with their problems.  ``inserted``: the
    candidates with vocabulary stages, each with its orders of all stages.
    """

    def __init__(self) -> None:
        self.best: SearchResult | None = None
        self.smallest = inf
        self.smallest_built: list[tuple[float, Problem]] = []
        self.tried: dict[tuple[Problem, str], Tried] = {}
        self.inserted: list[tuple[Candidate, list[Candidate]]] = []

    def is_beaten(self, least: float) -> bool:
        """Whether the best schedule is faster than one that takes ``least`` seconds or more."""
        return self.best is not None and least > self.best.key[0] * (1 + 1e-9)

    def leave_out(
        self, problem: Problem, family: str, why: str | ScheduleError, offloads: bool = False
    ) -> None:
        """Note why a candidate has no schedule.  offloads: whether transfers were tried."""
        needs = why.smallest if isinstance(why, LimitError) else None
        setting = problem.setting._asdict()
        self.tried[problem, family] = Tried(
            family, **setting, peak_memory=needs, offloads=offloads, why=str(why)
        )

    def leave_out_beaten(self, problem: Problem, family: str, what: str, least: float) -> None:
        """Note that another candidate is faster than this one can be.  what: was not done for that reason;
        least: the seconds that it takes at least."""
        assert self.best is not None, "there is something to compare with"
        time = self.best.problem.text.units.time
        why = f"{what} {time(least)} or more, and another takes {time(self.best.key[0])}"
        self.tried[problem, family] = Tried(family, **problem.setting._asdict(), least=least, why=why)

    def complete(self, candidate: Candidate) -> None:
        """Add the schedule with vocabulary stages, and with transfers if it is not beaten by then."""
        if candidate.problem.vocabulary is None:
            self._add(candidate, candidate.order.ops)
            return
        try:
            orders = insertions(candidate.problem, candidate.family, candidate.order)
        except ScheduleError as error:
            self.leave_out(candidate.problem, candidate.family, error)
        else:
            self.inserted.append((candidate, orders))
            self._add(candidate, ops_of(best_of(orders)))

    def anneal(self, effort: float | None, seed: int) -> None:
        """Anneal the orders with vocabulary stages together.  Orders that need offload to keep a limit are
        annealed one by one, since transfers can change which is fastest.
        """
        together, alone = list[list[Candidate]](), list[Candidate]()
        for candidate, orders in self.inserted:
            if candidate.problem.offload is None or not candidate.problem.is_limited:
                together.append(orders)
            # What is beaten by an estimate from below cannot win.
            elif not self.is_beaten(candidate.seconds):
                alone += orders
        # Each of its orders has a problem of its own, with its limits, so the problem is its name.
        best = {one.problem: one for _, orders in self.inserted for one in orders}

        def now(orders: Iterable[Candidate]) -> list[Candidate]:
            return [best[one.problem] for one in orders]

        if together:
            annealed = anneal_all([one for orders in together for one in orders], effort, seed)
            best.update((one.problem, one) for one in annealed)
            # The pool has no work for an order that needs less memory than one at the bound.
            alone += min(together, key=lambda orders: min(one.seconds for one in now(orders)))
        best.update((one.problem, one) for one in anneal_each(now(alone), seed))
        finished = [(candidate, best_of(now(orders))) for candidate, orders in self.inserted]
        fastest = min((one for _, one in finished), key=lambda one: one.seconds)
        for candidate, one in finished:
            if one is fastest and candidate.problem.offload is None:  # else transfers make room
                one = with_less_memory(one, seed)
            self._add(candidate, ops_of(one))

    def _add(self, candidate: Candidate, ops: RankOps) -> None:
        """Compare a candidate's order ``ops`` of all stages with the best so far, or note why it has none."""
        problem, family = candidate.problem, candidate.family
        # An annealed order that fails does not take the row of the one that it came from.
        is_new = (problem, family) not in self.tried
        try:
            result = SearchResult(problem, simulate(problem.schedule(family, ops), problem.costs))
            if problem.offload is not None:
                # Transfers never make a step faster, so the plan for them can be left out.
                if self.is_beaten(least := result.key[0]):
                    if is_new:
                        self.leave_out_beaten(problem, family, "not offloaded: it takes", least)
                    return
                moved = with_offload(result.timeline, problem.offload, problem.limits, problem.text)
                result = SearchResult(problem, moved)
        except ScheduleError as error:
            if isinstance(error, LimitError):
                self.smallest = min(self.smallest, error.smallest)
            if is_new:
                self.leave_out(problem, family, error, offloads=problem.offload is not None)
            return
        self.tried[problem, family] = row_of(result)
        self.best = result if self.best is None else min(self.best, result, key=lambda one: one.key)


def row_of(result: SearchResult) -> Tried:
    """A candidate as the plan has it."""
    timeline = result.timeline
    return Tried(
        timeline.schedule.name,
        **result.problem.setting._asdict(),
        seconds=timeline.seconds,
        span_bubble=timeline.span_bubble,
        peak_memory=max(timeline.peak_memory),
        offloaded=timeline.moved,
        period=result.period,
    )
