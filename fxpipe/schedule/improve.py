"""Local search on an order: ops move along the critical path, the memory limits kept."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from random import Random

from fxpipe.schedule.goal import Goal
from fxpipe.schedule.shop import Coded, Shop, peak, run

_REACH = 8  # ops that a move may pass
_MEMORY = 50  # moves after which a value must have been beaten (late acceptance, Burke and Bykov)


def improve(
    shop: Shop,
    coded: Coded,
    microbatches: int,
    limits: Sequence[float],
    goal: Goal,
    tries: int,
) -> Coded:
    """The best order of so many tries.  On every stage the ops of a kind keep their order."""
    search = _Climb(shop, coded, microbatches, limits, goal)
    for _ in range(tries):
        if goal.is_met(search.best) or not search.step():
            break
    return search.best_order


class _Climb:
    def __init__(
        self, shop: Shop, coded: Coded, microbatches: int, limits: Sequence[float], goal: Goal
    ) -> None:
        self.shop, self.microbatches, self.limits, self.goal = shop, microbatches, limits, goal
        self.random = Random(0)
        self.order = [list(ops) for ops in coded]
        first = run(shop, self.order, microbatches)
        assert first is not None, "the order to improve cannot progress"
        self.run = first
        self.value = self.best = goal.value(first)
        self.best_order = [list(ops) for ops in coded]
        self.past = [self.value] * _MEMORY
        self.count = 0
        self.arcs = self._critical()

    def _critical(self) -> list[tuple[int, int]]:
        """Ops that wait for the one before them on their rank alone, on the way to the worst rank's end."""
        done, rank = self.run, self.shop.rank
        m, order = self.microbatches, self.order
        spans = [last - first for last, first in zip(done.free, done.first, strict=True)]
        worst = max(spans)
        at = self.random.choice([r for r, span in enumerate(spans) if span >= worst * (1 - 1e-9)])
        value, arcs = order[at][-1], []
        while (before := done.cause[value]) >= 0:
            if rank[before // m] == rank[value // m]:
                arcs.append((before, value))
            value = before
        return arcs

    def step(self) -> bool:
        """One try; False where no op on the critical path waits for another of its rank."""
        self.count += 1
        if not self.arcs:
            return False
        old = self._move(*self.random.choice(self.arcs))
        if not old:
            return True
        done = run(self.shop, self.order, self.microbatches, self.run, self._first_change(old))
        value = self.goal.value(done) if done is not None else None
        slot = self.count % _MEMORY
        if value is None or done is None or (value > self.value and value > self.past[slot]):
            for rank, ops in old.items():
                self.order[rank] = ops
        else:
            self.run, self.value = done, value
            self.arcs = self._critical()
            if value < self.best * (1 - 1e-12):
                self.best, self.best_order = value, [list(ops) for ops in self.order]
        self.past[slot] = self.value
        return True

    def _first_change(self, old: dict[int, list[int]]) -> float:
        """When the first op began whose place another one has now."""
        found = inf
        for rank, ops in old.items():
            value = next(was for was, now in zip(ops, self.order[rank], strict=True) if was != now)
            found = min(found, self.run.end[value] - self.shop.seconds[value // self.microbatches])
        return found

    def _move(self, before: int, after: int) -> dict[int, list[int]]:
        """Puts one of the two behind or before a few others, at times on several ranks in a row.

        The orders that the ranks had; empty where nothing can be moved so.
        """
        m, random = self.microbatches, self.random
        home = self.shop.rank[before // m]
        if random.random() < 0.6:
            op, by = before, 1 + random.choice((0, random.randrange(_REACH)))
        else:
            op, by = after, -1 - random.randrange(_REACH)
        section, microbatch = divmod(op, m)
        chunk = self.shop.own[home].index(section // 3)
        ranks = [home]
        if random.random() < 0.4:
            other = home + random.choice((-1, 1)) * random.randrange(1, self.shop.ranks + 1)
            ranks = list(range(min(home, other), max(home, other) + 1))
        old: dict[int, list[int]] = {}
        for rank in ranks:
            if not 0 <= rank < self.shop.ranks or chunk >= len(self.shop.own[rank]):
                continue
            its = (3 * self.shop.own[rank][chunk] + section % 3) * m + microbatch
            new = self._shifted(self.order[rank], its, by)
            if new is not None and peak(self.shop, new, m) <= self.limits[rank] * (1 + 1e-9):
                old[rank], self.order[rank] = self.order[rank], new
        return old

    def _shifted(self, ops: list[int], op: int, by: int) -> list[int] | None:
        """The op so many places later; None where it may not pass the ops between."""
        m, source = self.microbatches, ops.index(op)
        target = max(0, min(len(ops) - 1, source + by))
        section, microbatch = divmod(op, m)
        low, high = sorted((source, target))
        for value in ops[low : high + 1]:
            other, its = divmod(value, m)
            if value != op and (other == section or (other // 3 == section // 3 and its == microbatch)):
                return None
        if source == target:
            return None
        new = ops[:source] + ops[source + 1 :]
        new.insert(target, op)
        return new
