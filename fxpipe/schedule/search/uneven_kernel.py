"""Orders of a step whose microbatches have costs of their own, by list scheduling, compiled by numba.

Microbatches come in one order on all stages, their *places*; ops are numbers of the arrays of all of them
(:mod:`fxpipe.schedule.search.uneven`): 3 · (microbatch · stages + stage) + 0, 1, 2 for F, B, W.
"""

from __future__ import annotations

import random
from math import inf

import numpy as np

from fxpipe.schedule.engine.compiled import compiled
from fxpipe.schedule.engine.dispatch_kernel import list_ops

#: The numbers of a timetable: how far F, B and W look ahead, how long W is put off, the pace of the
#: microbatches, and how many of the last W stand behind all else; behind these, of each microbatch, what it
#: adds to the pace, and of each to how long its W is put off.
F, B, W, LATE, PACE, LAST = range(6)
NUMBERS = LAST + 1
_DRAWN = 40  # timetables that are drawn before the best one is moved
_OFF = 4.0  # periods by which a W is put off at most
_WORSE = 0.01  # how much longer the order of the next timetable may be, at first; at last not at all


@compiled
def climb(t, stages, m, alone, period, starts, moves, limits, good, rounds, seed, best):
    """Write to ``best`` the fastest order of so many timetables; return its makespan, infinite if none is
    possible.

    t: the tables of all microbatches, with the stages of one on each rank.
    alone: per op its start where its microbatch runs alone.  period: per microbatch the work of the busiest
    rank.  starts: orders of the microbatches to begin with, one a row.  moves: whether others are tried.
    good: the makespan at which the search ends.
    """
    random.seed(seed)
    ops, numbers, value, least = len(t.seconds), NUMBERS + 2 * m, inf, inf
    due, order = np.empty(ops), np.empty(ops, np.int64)
    x, y, perm, other = np.empty(numbers), np.empty(numbers), starts[0].copy(), starts[0].copy()
    for k in range(numbers):
        x[k] = 0.5
    for i in range(rounds):
        if least <= good:
            break
        for k in range(numbers):
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
        elif random.random() < 0.1:
            y[random.randrange(NUMBERS, numbers)] = random.random()
        elif not moves or random.random() < 0.3:
            y[random.randrange(NUMBERS)] = random.random()
        else:
            _move(other, m)
        _write_due_dates(stages, m, alone, period, other, y, len(limits), due)
        time = _list_in(t, stages, other, due, limits, y, order)
        # Equals are taken too, as a way on, and of moved ones some that are worse; the order is kept where it
        # is faster by more than rounding.
        worse = _WORSE * (1 - i / rounds) * random.random() if i >= _DRAWN else 0.0
        if time <= value * (1 + worse):
            if time < least * (1 - 1e-9):
                least = time
                for k in range(ops):
                    best[k] = order[k]
            value = time
            for k in range(numbers):
                x[k] = y[k]
            for k in range(m):
                perm[k] = other[k]
    return least


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
    """The times of each microbatch alone, one after the other at a pace of about .4 to 1.6 of its work."""
    begin, last = 0.0, int(2 * max(0.0, 2 * y[LAST] - 1) * ranks)
    for place in range(m):
        microbatch = perm[place]
        for section in range(3 * stages):
            op = 3 * stages * microbatch + section
            due[op] = begin + alone[op]
            if section % 3 == 2:
                late = y[LATE] + y[NUMBERS + m + microbatch] - 0.5
                due[op] += _OFF * max(0.0, 2 * late - 1) * period[microbatch]
                # Of the last ones no F needs the memory any more.
                if place >= m - last:
                    due[op] += 1e6 * period[microbatch]
        begin += (0.4 + 1.2 * (y[PACE] + y[NUMBERS + microbatch] - 0.5)) * period[microbatch]


@compiled
def _list_in(t, stages, perm, due, limits, y, order):
    """Write the order in which microbatches come as in ``perm``; return its makespan."""
    m = len(perm)
    op_of, most = np.empty((3 * stages, m), np.int64), np.empty((stages, m))
    for section in range(3 * stages):
        for place in range(m):
            op_of[section, place] = 3 * stages * perm[place] + section
    # What a microbatch so far holds at most in later stages, which must be able to finish it.
    for stage in range(stages):
        high = 0.0
        for place in range(m):
            high = max(high, t.hold[perm[place] * stages + stage])
            most[stage, place] = high
    # With 1.001 a rank waits for what arrives later than the end of an op, as far as is known.
    lookahead = np.array((1.001 * y[F], 0.7 * y[B], 0.7 * y[W]))
    return list_ops(t, op_of, most, due, limits, lookahead, order)
