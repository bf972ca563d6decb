"""List scheduling, and due dates drawn for it, compiled by numba.

Ops and sections are numbers as in :mod:`fxpipe.schedule.engine.arrays`.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import numpy as np

from fxpipe.schedule.engine.compiled import compiled
from fxpipe.schedule.engine.tables import Floats, Ints


class Timetable(NamedTuple):
    """The numbers from which the due dates of a problem follow: see :mod:`fxpipe.schedule.search.due_dates`.

    Per section: when it starts if there is one microbatch alone, and on which step of its way, of ``steps``.
    Per rank: its limit.
    """

    alone: Floats
    step: Ints
    steps: int
    unit: float  # a mean op's seconds
    period: float  # the least
    limits: Floats


WAITS = 4  # the first numbers of a point: a wait in each quarter of the way
SLOW, WEIGHT, HEAD, TAIL, HEAD_PACE, TAIL_PACE, LATE, B, W = range(WAITS, 13)
NUMBERS = W + 1


@compiled
def draw_ops(t, table, m, points):
    """An order per point, by list scheduling with its due dates."""
    due, orders = np.empty(len(t.section)), np.empty((len(points), len(t.section)), np.int64)
    # An F always waits for ops that are due earlier: what it computes too soon only takes memory.
    lookahead = np.array((1.001, 0.0, 0.0))
    for k in range(len(points)):
        x = points[k]
        _write_due_dates(table, m, x, due)
        # At 0 a rank never idles while it could compute, at 1 it lets nothing wait: the best is in between.
        lookahead[1], lookahead[2] = 0.7 * x[B], 0.7 * x[W]
        dispatch_ops(t, m, due, table.limits, lookahead, orders[k])
    return orders


@compiled
def _write_due_dates(table, m, x, due):
    """Writes the due date of every op: the way of a lone microbatch, slowed and repeated."""
    ranks, sections, steps = len(table.limits), len(table.alone), table.steps
    # Squared, so that most draws are close to the least period, where the fast orders are.
    period = table.period * (1 + 0.25 * x[SLOW] ** 2)
    # The pace: microbatches at the head and at the tail may come faster one after the other.
    begins, begin = np.empty(m), 0.0
    for j in range(m):
        pace = 1.0
        if j < int(x[HEAD] * ranks):
            pace = 0.25 + 0.75 * x[HEAD_PACE]
        if j >= m - int(x[TAIL] * ranks):
            pace = 0.25 + 0.75 * x[TAIL_PACE]
        begin += pace * period if j else 0.0
        begins[j] = begin
    # The way of a microbatch: each quarter of it may be slower.
    waits, wait = np.empty(steps), 0.0
    for step in range(steps):
        wait += 1.5 * _half(x[step * WAITS // steps]) ** 2 * table.unit
        waits[step] = wait
    last = 0.0
    for section in range(sections):
        start = table.alone[section] + waits[table.step[section]]
        # No op waits for a W: half of the draws leave it beside its B, the others put it off by up to three
        # periods.
        if section % 3 == 2:
            start += 3 * _half(x[WEIGHT]) * period
        for j in range(m):
            due[section * m + j] = start + begins[j]
        last = max(last, start + begins[m - 1])
    for section in range(2, sections, 3):
        for j in range(max(0, m - int(2 * _half(x[LATE]) * ranks)), m):
            # At the end no F needs their memory any more.
            due[section * m + j] += 2 * last  # the last W behind all else


@compiled
def _half(x):
    """0 for half of the draws, else up to 1."""
    return max(0.0, 2 * x - 1)


@compiled
def dispatch_ops(t, m, due, limits, lookahead, order):
    """Writes ``order`` as ``list_ops`` does, for ``m`` microbatches that are alike, in their order."""
    op_of, most = np.arange(len(t.section)).reshape((len(t.seconds), m)), np.empty((len(t.hold), m))
    for stage in range(len(t.hold)):
        most[stage] = t.hold[stage]
    return list_ops(t, op_of, most, due, limits, lookahead, order)


@compiled
def list_ops(t, op_of, most, due, limits, lookahead, order):
    """Writes ``order``: see ``dispatch.py``.  Returns its makespan, infinite if no op can run, as the needs
    form a cycle.

    Microbatches come in one order on all stages, their *places*: ``op_of[section, place]`` is an op.
    most: per stage and place the most that a microbatch so far holds there.
    """
    (sections, m), ranks = op_of.shape, len(limits)
    # The same instant, reached by sums over different paths, differs by rounding.
    epsilon = 0.0
    for seconds in t.seconds:
        epsilon += 1e-9 * seconds
    missing = np.empty(op_of.size, np.int64)
    for op in range(op_of.size):
        # A counter of missing inputs: the last one that comes makes the op ready, without a look at the
        # others.
        missing[op] = t.need_at[t.section[op] + 1] - t.need_at[t.section[op]]
    arrival = np.zeros(op_of.size)
    following = np.zeros(sections, np.int64)  # the next place of each
    live, free = np.zeros(ranks), np.zeros(ranks)
    used = np.zeros(len(most))  # between F and B, per stage
    filled = np.empty(ranks, np.int64)  # where each rank's next op goes
    for rank in range(ranks):
        filled[rank] = 3 * m * t.placed_at[rank]
    wakes = np.zeros(ranks)  # when each rank may next be able to go on
    ready, coming = np.empty(sections, np.int64), np.empty(sections, np.int64)
    comes = np.empty(sections)  # when each op of ``coming`` arrives
    now, waits, left = 0.0, True, op_of.size
    while left:
        # A scan instead of a heap: wakes of one rank change often, and there are few ranks.
        rank = 0
        for other in range(1, ranks):
            if wakes[other] < wakes[rank]:
                rank = other
        if wakes[rank] == inf:
            # All ranks wait for ops that are due earlier and have no memory: start those that have.
            if not waits:
                return inf
            waits = False
            for other in range(ranks):
                wakes[other] = max(now, free[other])
            continue
        now, wakes[rank] = wakes[rank], inf
        count, later, soon = 0, 0, inf
        for at in range(t.placed_at[rank], t.placed_at[rank + 1]):
            for kind in range(3):
                section = 3 * t.placed[at] + kind
                place = following[section]
                # A W whose B has not run is not looked out for: nothing is kept free for it.
                if place >= m or (kind == 2 and following[section - 1] <= place):
                    continue
                op = op_of[section, place]
                if missing[op]:
                    # Its arrival is not known yet; ``lead`` bounds it from below.
                    coming[later], comes[later] = op, now + t.lead[t.section[op]]
                    later += 1
                elif kind == 0 and not _has_memory(
                    t, rank, at, place, t.hold[t.section[op] // 3], most, live[rank], used, limits[rank]
                ):
                    continue
                elif arrival[op] > now + epsilon:
                    # It is known to come: it may be worth to keep the rank free for it.
                    coming[later], comes[later] = op, arrival[op]
                    later += 1
                    soon = min(soon, arrival[op])
                else:
                    ready[count] = op
                    count += 1
        chosen = -1
        while count and chosen < 0:
            least = 0
            for i in range(1, count):
                if (due[ready[i]], ready[i]) < (due[ready[least]], ready[least]):
                    least = i
            op = ready[least]
            count -= 1
            # The order of the rest does not matter, so the last one takes its place.
            ready[least] = ready[count]
            # Until then the rank would be busy with the op, as far as it looks ahead.
            until = now + t.seconds[t.section[op]] * lookahead[t.section[op] % 3] - epsilon
            chosen = op
            if waits:
                for i in range(later):
                    if comes[i] < until and due[coming[i]] < due[op]:
                        chosen = -1
                        break
        if chosen < 0:
            # The next known arrival wakes it; one that is not known yet does so when it becomes known, below.
            wakes[rank] = soon
            continue
        row = t.section[chosen]
        at, section = row // 3, row % sections
        stage, kind = section // 3, section % 3
        following[section] += 1
        order[filled[rank]] = chosen
        filled[rank] += 1
        end = free[rank] = now + t.seconds[row]
        if kind == 0:
            live[rank] += t.hold[at]
            used[stage] += t.hold[at]
        elif kind == 1:
            # From here on only what W reads is left.
            live[rank] -= t.hold[at] - t.hold_for_w[at]
            used[stage] -= t.hold[at]
        else:
            live[rank] -= t.hold_for_w[at]
        wakes[rank] = end
        for k in range(t.feed_at[row], t.feed_at[row + 1]):
            op = chosen + t.feed_step[k]
            missing[op] -= 1
            arrival[op] = max(arrival[op], end + t.feed_delay[k])
            other = t.feed_rank[k]
            # A busy rank looks for arrivals anyway at the end of its op.
            if other != rank and not missing[op] and free[other] <= now + epsilon:
                wakes[other] = min(wakes[other], arrival[op])
        left -= 1
        # An op ran, so values may arrive that let the others keep to their due dates again.
        waits = True
    return free.max()


@compiled
def _has_memory(t, rank, at, place, hold, most, live, used, limit):
    """Whether an F of the stage ``placed[at]`` may start: see :mod:`fxpipe.schedule.engine.dispatch`."""
    limit = limit * (1 + 1e-9)
    # What is live includes what waits for W alone, which ``used`` does not.
    if live + hold > limit:
        return False
    reserved = hold
    for k in range(t.placed_at[rank], at + 1):
        reserved += used[t.placed[k]]
    for k in range(at + 1, t.placed_at[rank + 1]):
        high = most[t.placed[k], place]
        if reserved + high > limit:
            return False
        # Later stages must be able to finish a microbatch, else their B, which this F's B waits for, may
        # never come.
        reserved += max(used[t.placed[k]], high)
    return True
