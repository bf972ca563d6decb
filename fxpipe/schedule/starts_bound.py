"""A lower bound on the time of a step by when its ops can start at all, whatever their order.

Microbatches are of some *kinds*.  A *count* u says how many of each; E_s[u] is when u_c of each kind c have
ended section s, for the first time.  U are those that have: the first u_c of each kind, and the *last* of
them is of some kind c.  Whatever order a schedule runs them in, the last starts s at a time

1. t ≥ E_s[u - c]: the others have ended s, as one rank runs all ops of s, one at a time.
2. t ≥ E_q[u] + delay, for a section q that s needs: all of U have ended q before.  Of these the last to end q
   may be of any kind, which then runs s before t: if that and its delay are less than that of c, they count.
3. t ≥ head + work: all sections of the rank that lead to s have been run for U, and s for all but the last;
   none earlier than ``head``.
4. Where s is F of a stage b, and a stage a of that rank is on its way (F_a before F_b before B_a), the last
   holds ``own`` bytes there, and of the others in U some, x of each kind, hold theirs from F_a to B_a, and y
   from B_a to W_a, so that own + x · saved + y · saved for W ≤ limit.  All of the others but x have ended
   B_a, and all but x + y have ended W_a: t is at least the least, over all such x and y, of the later one of
   E_Ba[u - c - x] and E_Wa[u - c - x - y].  Of the x and y only those count to which nothing can be added.

So E_s[u] ≥ the least, over kinds c, of the most that these say, plus the seconds of s.  All of them go from
smaller to larger counts, or along the needs, so one sweep finds it.

5. T ≥ t + work + tail, as what had not started s before the last one runs s and what follows on the same
   rank behind t; ``tail`` is the shortest way from there to the end.  The counts at the starts of s are a
   path from none to all, one more at each: T is at least the least, over all paths, of the most on it.

A kind of microbatches that differ stands for all: each inequality stays true with the least seconds, delays
and bytes of its members.  Of the work in 3 and 5, that of as many members as have the least is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, log, prod
from typing import NamedTuple

import numpy as np

from fxpipe.schedule.dependencies import SECTIONS_PER_STAGE
from fxpipe.schedule.engine.starts_kernel import held_at_most, longest_of_starts
from fxpipe.schedule.engine.tables import Floats, Ints
from fxpipe.schedule.step_paths import StepPaths

_ROUNDING = 1e-9
_COUNTS = 512  # at most, of which the memory that is held compares all pairs


class _Tables(NamedTuple):
    """What the sweep reads, of each kind and section; ``before`` and ``after``: for each number of the kind,
    the work of as many, and of the rest.  Rule 4: of F the rows of ``wait_for``, the B it waits for, and of
    them for each kind of the last one the rows of ``held``, pairs of counts.  ``of``, ``step``: see the
    kernel."""

    order: Ints
    of: Ints
    step: Ints
    seconds: Floats
    head: Floats
    lead: Floats
    before: Floats
    after: Floats
    tail: Floats
    need_at: Ints
    need_of: Ints
    delay: Floats
    wait_at: Ints
    wait_for: Ints
    held_at: Ints
    held: Ints


def by_starts(steps: Sequence[tuple[StepPaths, int]], limits: Sequence[float] = ()) -> float:
    """The bound for microbatches of these steps, so many of each; infinite where one does not fit.

    limits: of each rank; none by default.
    """
    tables = _tables(_kinds(steps), limits)
    size = len(tables.order) * len(tables.of)
    return float(longest_of_starts(tables, np.zeros(size), np.full(size * tables.of.shape[1], inf)))


_Kind = list[tuple[StepPaths, int]]


def _number(kind: _Kind) -> int:
    return sum(number for _, number in kind)


def _kinds(steps: Sequence[tuple[StepPaths, int]]) -> list[_Kind]:
    """The microbatches with those of about the same work in one kind, so that the counts are few."""

    def work(kind: _Kind) -> float:
        return sum(kind[0][0].seconds)

    def loss(a: _Kind, b: _Kind) -> float:
        """The work that is lost where these are of one kind, for the counts that are saved."""
        m, n = _number(a), _number(b)
        return n * (work(b) - work(a)) / log((m + 1) * (n + 1) / (m + n + 1))

    kinds = sorted(([step] for step in steps), key=work)
    while len(kinds) > 1 and prod(1 + _number(kind) for kind in kinds) > _COUNTS:
        at = min(range(len(kinds) - 1), key=lambda k: loss(kinds[k], kinds[k + 1]))
        kinds[at : at + 2] = [kinds[at] + kinds[at + 1]]
    return kinds


def _tables(kinds: Sequence[_Kind], limits: Sequence[float]) -> _Tables:
    one = kinds[0][0][0]
    sections = range(len(one.seconds))
    waits = [[dict(step.waits[s]) for kind in kinds for step, _ in kind] for s in sections]
    sources = [sorted(set.intersection(*map(set, each))) for each in waits]
    needs = [(s, q) for s in sections for q in sources[s]]
    leads, follows = _around(one, sources)
    numbers = np.array([*map(_number, kinds)], np.int64)
    of = np.indices(tuple(numbers + 1)).reshape(len(kinds), -1).T.copy()
    step_of = np.array([prod(numbers[k + 1 :] + 1) for k in range(len(kinds))], np.int64)

    def least(of_step: Callable[[StepPaths], Sequence[float]]) -> Floats:
        """Of each kind the least of its members."""
        return np.array([np.min([of_step(step) for step, _ in kind], axis=0) for kind in kinds], np.float64)

    def sums(along: Sequence[Sequence[int]]) -> Floats:
        """By section and kind the work along these sections of the k that have the least, for each k."""
        summed = np.zeros((len(sections), len(kinds), max(numbers) + 1))
        for k, kind in enumerate(kinds):
            rows = [[sum(step.seconds[q] for q in way) for way in along] for step, _ in kind]
            each = np.sort(np.repeat(rows, [number for _, number in kind], axis=0), axis=0)
            summed[:, k, 1 : len(each) + 1] = each.cumsum(axis=0).T
        return summed

    seconds, after = least(lambda step: step.seconds), sums(follows)
    delay = least(lambda step: [dict(step.waits[s])[q] for s, q in needs])
    for k, n in enumerate(numbers):
        after[:, k, : n + 1] = after[:, k, n::-1]
    return _Tables(
        np.array(one.order, np.int64),
        of,
        step_of,
        seconds,
        least(lambda step: [min(step.head[q] for q in way) for way in leads]),
        least(lambda step: [sum(step.seconds[q] for q in way if q != s) for s, way in enumerate(leads)]),
        sums(leads),
        after,
        least(lambda step: [min(step.tail[q] for q in way) for way in follows]),
        np.cumsum([0, *map(len, sources)]),
        np.array([q for _, q in needs], np.int64),
        np.minimum(delay, (delay + seconds[:, [s for s, _ in needs]]).min(axis=0)),
        *_waits(kinds, of, leads, follows, limits),
    )


def _around(one: StepPaths, sources: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Of each section those on its rank that lead to it, and those that follow, with it."""
    users: list[list[int]] = [[] for _ in sources]
    for section, needs in enumerate(sources):
        for source in needs:
            users[source].append(section)
    both = []
    for order, along in ((one.order, sources), (one.order[::-1], users)):
        reached: list[set[int]] = [set() for _ in sources]
        for s in order:
            reached[s] = {s}.union(*(reached[q] for q in along[s]))
        both.append([[q for q in those if one.rank[q] == one.rank[s]] for s, those in enumerate(reached)])
    return both[0], both[1]


def _waits(
    kinds: Sequence[_Kind],
    of: Ints,
    leads: Sequence[Sequence[int]],
    follows: Sequence[Sequence[int]],
    limits: Sequence[float],
) -> tuple[Ints, Ints, Ints, Ints]:
    """The tables of rule 4."""
    ranks = kinds[0][0][0].rank
    wait_at, wait_for, held_at = [0], list[int](), list[list[tuple[int, int]]]()
    held, known = [np.empty((0, 2), np.int64)], dict[tuple[float, ...], tuple[int, int]]()

    def rows(saved: list[float], for_weight: list[float], room: float, kind: int) -> tuple[int, int]:
        """Where ``held`` has the pairs of counts for a last one of this kind."""
        key = (*saved, *for_weight, room, kind)
        if key not in known:
            most = of[-1] - (np.arange(len(kinds)) == kind)
            pairs = np.empty((len(of) ** 2, 2), np.int64)
            number = held_at_most(of, most, np.array(saved), np.array(for_weight), room, pairs)
            begin = sum(map(len, held))
            held.append(pairs[:number].copy())
            known[key] = begin, begin + number
        return known[key]

    for s, rank in enumerate(ranks):
        if s % SECTIONS_PER_STAGE == 0 and limits and limits[rank] < inf:
            on_way = [q for q in leads[s] if q % SECTIONS_PER_STAGE == 0 and q + 1 in follows[s]]
            saved, for_weight = (
                {
                    q: [min(getattr(step.stages[q // 3], name) for step, _ in kind) for kind in kinds]
                    for q in on_way
                }
                for name in ("saved_activations", "saved_for_weight")
            )
            own = zip(*saved.values(), strict=True)
            rooms = [limits[rank] * (1 + _ROUNDING) - sum(bytes) for bytes in own]
            for q in on_way:
                wait_for.append(q + 1)
                held_at.append([rows(saved[q], for_weight[q], room, k) for k, room in enumerate(rooms)])
        wait_at.append(len(wait_for))
    return (
        np.array(wait_at, np.int64),
        np.array(wait_for, np.int64),
        np.array(held_at, np.int64).reshape(-1, len(kinds), 2),
        np.concatenate(held),
    )
