"""Orders of a step whose microbatches have costs of their own, by list scheduling, compiled by numba.

Microbatches come in one order on all stages, their *places*; ops are numbers of the arrays of all of them
(:mod:`fxpipe.schedule.search.uneven`): 3 · (microbatch · stages + stage) + 0, 1, 2 for F, B, W.
"""

from __future__ import annotations

import random
from math import inf

import numpy as np

from fxpipe.schedule.engine.compiled import compiled

#: The numbers of a timetable: how far F, B and W look ahead, how long W is put off, the pace of the
#: microbatches, and how many of the last W stand behind all else.
F, B, W, LATE, PACE, LAST = range(6)
NUMBERS = LAST + 1
_DRAWN = 40  # timetables that are drawn before the best one is moved
_OFF = 4.0  # periods by which a W is put off at most


@compiled
def climb(t, stages, m, placed_at, placed, alone, period, starts, moves, limits, good, rounds, seed, best):
    """Write to ``best`` the fastest order of so many timetables; return its makespan, infinite if none is
    possible.

    alone: per op its start where its microbatch runs alone.  period: per microbatch the work of the busiest
    rank.  starts: orders of the microbatches to begin with, one a row.  moves: whether others are tried.
    good: the makespan at which the search ends.
    """
    random.seed(seed)
    ops, value = len(t.seconds), inf
    due, order = np.empty(ops), np.empty(ops, np.int64)
    x, y, perm, other = np.empty(NUMBERS), np.empty(NUMBERS), starts[0].copy(), starts[0].copy()
    for k in range(NUMBERS):
        x[k] = 0.5
    for i in range(rounds):
        if value <= good:
            break
        for k in range(NUMBERS):
            y[k] = x[k]
        for k in range(m):
            other[k] = perm[k]
        if i < _DRAWN:
            for k in range(m):
                other[k] = starts[i % len(starts), k]
            # The first of each start puts nothing off, and lets ops wait for what is due earlier.
            if i >= len(starts):
                for k in range(NUMBERS):
                    y[k] = random.random()
        elif not moves or random.random() < 0.3:
            y[random.randrange(NUMBERS)] = random.random()
        else:
            _move(other, m)
        _write_due_dates(stages, m, alone, period, other, y, len(limits), due)
        time = list_ops(t, stages, m, placed_at, placed, other, due, limits, y, order)
        # Equals are taken too, as a way on; the order is kept where it is faster by more than rounding.
        if time <= value:
            if time < value * (1 - 1e-9):
                for k in range(ops):
                    best[k] = order[k]
            value = time
            for k in range(NUMBERS):
                x[k] = y[k]
            for k in range(m):
                perm[k] = other[k]
    return value


@compiled
def _move(perm, m):
    """Exchange two microbatches, or move one between others."""
    a, b = random.randrange(m), random.randrange(m)
    moved = perm[a]
    if random.random() < 0.5:
        perm[a] = perm[b]
    else:
        step = 1 if b > a else -1
        for k in range(a, b, step):
            perm[k] = perm[k + step]
    perm[b] = moved


@compiled
def _write_due_dates(stages, m, alone, period, perm, y, ranks, due):
    """The times of each microbatch alone, one after the other at a pace between .4 and 1.6 of its work."""
    begin, last = 0.0, int(2 * max(0.0, 2 * y[LAST] - 1) * ranks)
    for place in range(m):
        microbatch = perm[place]
        for section in range(3 * stages):
            op = 3 * stages * microbatch + section
            due[op] = begin + alone[op]
            if section % 3 == 2:
                due[op] += _OFF * max(0.0, 2 * y[LATE] - 1) * period[microbatch]
                # Of the last ones no F needs the memory any more.
                if place >= m - last:
                    due[op] += 1e6 * period[microbatch]
        begin += (0.4 + 1.2 * y[PACE]) * period[microbatch]


@compiled
def list_ops(t, stages, m, placed_at, placed, perm, due, limits, y, order):
    """Write ``order`` by list scheduling under memory limits, as ``dispatch_ops`` does; return the makespan,
    infinite where the ops block each other.

    t: the tables of all microbatches.  Of rank r are the stages ``placed[placed_at[r]:placed_at[r + 1]]`` of
    each microbatch.
    """
    ranks, ops, epsilon = len(limits), len(t.seconds), 0.0
    for seconds in t.seconds:
        epsilon += 1e-9 * seconds
    missing, arrival = np.empty(ops, np.int64), np.zeros(ops)
    for op in range(ops):
        missing[op] = t.need_at[op + 1] - t.need_at[op]
    # Per stage and place the most that a microbatch so far holds there, for later stages that must finish it.
    most = np.empty((stages, m))
    for stage in range(stages):
        high = 0.0
        for place in range(m):
            high = max(high, t.hold[perm[place] * stages + stage])
            most[stage, place] = high
    following = np.zeros(3 * stages, np.int64)  # the next place of each section
    live, free, used = np.zeros(ranks), np.zeros(ranks), np.zeros(stages)
    wakes, filled = np.zeros(ranks), np.empty(ranks, np.int64)
    for rank in range(ranks):
        filled[rank] = 3 * m * placed_at[rank]
    ready, coming, comes = (
        np.empty(3 * stages, np.int64),
        np.empty(3 * stages, np.int64),
        np.empty(3 * stages),
    )
    now, waits, left = 0.0, True, ops
    while left:
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
        for at in range(placed_at[rank], placed_at[rank + 1]):
            for kind in range(3):
                section = 3 * placed[at] + kind
                place = following[section]
                if place >= m or (kind == 2 and following[section - 1] <= place):
                    continue
                op = 3 * stages * perm[place] + section
                if missing[op]:
                    coming[later], comes[later] = op, now + t.lead[op]
                    later += 1
                elif kind == 0 and not _has_memory(
                    placed_at, placed, rank, at, place, t.hold[op // 3], most, live[rank], used, limits[rank]
                ):
                    continue
                elif arrival[op] > now + epsilon:
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
                if due[ready[i]] < due[ready[least]]:
                    least = i
            op = ready[least]
            count -= 1
            ready[least] = ready[count]
            # With 1.001 a rank waits for what arrives later than the end of an op, as far as is known.
            ahead = 1.001 * y[F] if op % 3 == 0 else 0.7 * y[op % 3]
            until = now + t.seconds[op] * ahead - epsilon
            chosen = op
            if waits:
                for i in range(later):
                    if comes[i] < until and due[coming[i]] < due[op]:
                        chosen = -1
                        break
        if chosen < 0:
            wakes[rank] = soon
            continue
        at, stage, kind = chosen // 3, (chosen // 3) % stages, chosen % 3
        following[3 * stage + kind] += 1
        order[filled[rank]] = chosen
        filled[rank] += 1
        end = free[rank] = now + t.seconds[chosen]
        if kind == 0:
            live[rank] += t.hold[at]
            used[stage] += t.hold[at]
        elif kind == 1:
            live[rank] -= t.hold[at] - t.hold_for_w[at]
            used[stage] -= t.hold[at]
        else:
            live[rank] -= t.hold_for_w[at]
        wakes[rank] = end
        for k in range(t.feed_at[chosen], t.feed_at[chosen + 1]):
            op = chosen + t.feed_step[k]
            missing[op] -= 1
            arrival[op] = max(arrival[op], end + t.feed_delay[k])
            other = t.feed_rank[k]
            if other != rank and not missing[op] and free[other] <= now + epsilon:
                wakes[other] = min(wakes[other], arrival[op])
        left -= 1
        waits = True
    return free.max()


@compiled
def _has_memory(placed_at, placed, rank, at, place, hold, most, live, used, limit):
    """Whether an F of the stage ``placed[at]`` may start: see :mod:`fxpipe.schedule.engine.dispatch`."""
    limit = limit * (1 + 1e-9)
    if live + hold > limit:
        return False
    reserved = hold
    for k in range(placed_at[rank], at + 1):
        reserved += used[placed[k]]
    for k in range(at + 1, placed_at[rank + 1]):
        high = most[placed[k], place]
        if reserved + high > limit:
            return False
        reserved += max(used[placed[k]], high)
    return True
