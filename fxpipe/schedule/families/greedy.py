"""The greedy schedulers of 2401.10241: ZB under a memory limit, and ZB-V.

Both build the orders of all ranks together, op by op, each op as early as possible. They run forwards and
backwards in a fixed pattern and choose the positions of the W ops. A rank's *idle* time is counted from its
first op on. A W is inserted

- while the rank has no memory for its next F,
- into a gap that holds it whole,
- into a smaller gap, which delays the ops after it, where the gap is longer than the rank's *slack*: the
  largest idle time of any rank less its own.

All combinations of their switches are tried; the caller takes the best order that keeps its limits. Both
require a chain of stages, whose costs may differ. They take time in proportion to ops · ranks and do not look
ahead, so they serve as starts for local search (:mod:`fxpipe.schedule.search`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import inf
from typing import NamedTuple

import numpy as np

from fxpipe.schedule.engine.arrays import ScheduleArrays
from fxpipe.schedule.engine.compiled import compiled
from fxpipe.schedule.engine.kernel import arrives_at
from fxpipe.schedule.engine.order import Order
from fxpipe.schedule.engine.tables import Floats, Ints

_IMPROVED = 20  # maximum number of ZB-V runs, each given the idle times of the run before


def zero_bubble(arrays: ScheduleArrays, limits: Sequence[float]) -> list[Order]:
    """ZB's orders for one stage per rank that keep the limits: at most eight."""
    m, bounds = arrays.microbatches, np.asarray(limits, np.float64)
    switches = product((False, True), repeat=3)
    orders = (zero_bubble_ops(arrays.tables, m, bounds, *chosen) for chosen in switches)
    return [Order(arrays, order) for order in orders if len(order)]


def zero_bubble_v(arrays: ScheduleArrays, limits: Sequence[float]) -> list[Order]:
    """ZB-V's orders for two stages per rank in V placement: at most four."""
    return [order for switches in product((False, True), repeat=2) for order in _v(arrays, limits, *switches)]


def _v(
    arrays: ScheduleArrays, limits: Sequence[float], fill_forward: bool, fill_backward: bool
) -> Iterator[Order]:
    """The last of the runs, each with the idle times of the one before, that shortens the largest of them."""
    m, bounds = arrays.microbatches, np.asarray(limits, np.float64)
    best, allowed, least = None, np.full(arrays.ranks, -1.0), inf
    for _ in range(_IMPROVED):
        order, idle = zero_bubble_v_ops(arrays.tables, m, bounds, fill_forward, fill_backward, allowed)
        # A run that shortens nothing gives the next one the same idle times, so no later one would.
        if not len(order) or idle.max() >= least:
            break
        best, allowed, least = order, idle, idle.max()
    if best is not None:
        yield Order(arrays, best)


class _State(NamedTuple):
    """What has run so far.  Per op: ``end``, infinite before it ran, ``order``, and ``pending``: the W ops
    that may run.  Per rank: the position of its next op (``filled``), its clock, live memory and idle time,
    the end of its pending ops (``queued``) and of those that ran (``ran``).
    """

    end: Floats
    order: Ints
    pending: Ints
    filled: Ints
    queued: Ints
    ran: Ints
    clock: Floats
    live: Floats
    idle: Floats


@compiled
def _fresh(t, m, ranks):
    begin = 3 * m * t.placed_at[:ranks]
    ops = len(t.section)
    return _State(
        np.full(ops, inf),
        np.empty(ops, np.int64),
        np.empty(ops, np.int64),
        begin.copy(),
        begin.copy(),
        begin.copy(),
        np.zeros(ranks),
        np.zeros(ranks),
        np.zeros(ranks),
    )


@compiled
def _put(t, s, m, op):
    """Append an op to its rank's order."""
    section = t.section[op]
    rank, stage, kind = t.rank[section], section // 3, section % 3
    start = max(s.clock[rank], arrives_at(t, s.end, op))
    # Before its first op a rank waits in any schedule, so this counts for nobody.
    if s.filled[rank] > 3 * m * t.placed_at[rank]:
        s.idle[rank] += start - s.clock[rank]
    s.end[op] = s.clock[rank] = start + t.seconds[section]
    s.order[s.filled[rank]] = op
    s.filled[rank] += 1
    if kind == 0:
        s.live[rank] += t.hold[stage]
    elif kind == 1:
        s.live[rank] -= t.hold[stage] - t.hold_for_w[stage]
        # The W of the same microbatch: its section follows that of B.
        s.pending[s.queued[rank]] = op + m
        s.queued[rank] += 1
    else:
        s.live[rank] -= t.hold_for_w[stage]


@compiled
def _has_weight(s, rank):
    return s.ran[rank] < s.queued[rank]


@compiled
def _put_weight(t, s, m, rank):
    op = s.pending[s.ran[rank]]
    s.ran[rank] += 1
    _put(t, s, m, op)


@compiled
def _fill_whole(t, s, m, rank, arrival):
    """Run W ops that end before the arrival."""
    while _has_weight(s, rank):
        section = t.section[s.pending[s.ran[rank]]]
        # By rounding alone a W that fits exactly would be refused.
        if s.clock[rank] + t.seconds[section] > arrival * (1 + 1e-12):
            break
        _put_weight(t, s, m, rank)


@compiled
def _free_memory(t, s, m, rank, stage, limits):
    """Run W ops until an F of the stage fits; False if there are too few."""
    while s.live[rank] + t.hold[stage] > limits[rank] * (1 + 1e-9):
        if not _has_weight(s, rank):
            return False
        _put_weight(t, s, m, rank)
    return True


@compiled
def _put_rest(t, s, m):
    for rank in range(len(s.clock)):
        while _has_weight(s, rank):
            _put_weight(t, s, m, rank)


@compiled
def zero_bubble_ops(t, m, limits, overshoot, prioritize, greedy):
    """ZB under a limit. ``overshoot``: warm-up may delay the first B. ``prioritize``: a stage may leave
    out an F in favor of a B. ``greedy``: a W also goes into a partial gap that is shorter than the slack.
    Empty where it runs out of memory.
    """
    p = len(limits)
    s = _fresh(t, m, p)
    none = s.order[:0]
    f, b = np.ones(p, np.int64), np.ones(p, np.int64)
    for stage in range(p):
        # Not one microbatch fits, which no order can change.
        if t.hold[stage] > limits[stage] * (1 + 1e-9):
            return none
        _put(t, s, m, 3 * stage * m)
    # How many F each stage runs before its first B, counted as if none had to wait for its input.
    # The end of the first B on the last stage, from which those of the others follow back up the stages.
    last = s.clock[p - 1] + t.seconds[3 * p - 2]
    for stage in range(p - 2, -1, -1):
        forward, clock = t.seconds[3 * stage], s.clock[stage]
        arrival = last + _delay(t, 3 * stage + 1)
        # As many as memory allows before the first B arrives: an F more would be idle time else.
        while f[stage] < m and (f[stage] + 1) * t.hold[stage] <= limits[stage] * (1 + 1e-9):
            if (clock if overshoot else clock + forward) >= arrival + (0.0 if overshoot else 1e-9 * arrival):
                break
            f[stage] += 1
            clock += forward
        last = max(clock, arrival) + t.seconds[3 * stage + 1]
    for stage in range(1, p):
        # A stage cannot run an F that the stage before it has not run, whose own one more is on its way.
        f[stage] = max(1, min(f[stage], f[stage - 1] - 1))
    for stage in range(p):
        for j in range(1, f[stage]):
            _put(t, s, m, 3 * stage * m + j)
    for stage in range(p - 1, -1, -1):
        _put(t, s, m, (3 * stage + 1) * m)
    wants = np.empty(p, np.int64)
    for _ in range(1, m):
        for stage in range(p):
            wants[stage] = 1
        if prioritize:
            for stage in range(p - 1):
                # The next stage has an F to go on with, so this one may leave one out.
                if f[stage] < m and f[stage] - f[stage + 1] >= 2:
                    wants[stage] = _wants_forward(t, s, m, limits, stage, f[stage])
            for stage in range(p - 2, -1, -1):
                # Without an F for the next stage, the memory of this one's would wait.
                wants[stage] = min(wants[stage], wants[stage + 1])
        for stage in range(p):
            if wants[stage] and f[stage] < m:
                op = 3 * stage * m + f[stage]
                if not _free_memory(t, s, m, stage, stage, limits):
                    return none
                _fill_before(t, s, m, stage, op, greedy)
                _put(t, s, m, op)
                f[stage] += 1
        for stage in range(p - 1, -1, -1):
            op = (3 * stage + 1) * m + b[stage]
            # It has run out of microbatches in flight: this pattern does not go on.
            if f[stage] <= b[stage]:
                return none
            _fill_before(t, s, m, stage, op, greedy)
            _put(t, s, m, op)
            b[stage] += 1
            # Nobody waits for a B of the first stage, so without an F left its W can follow at once.
            if stage == 0 and f[0] == m:
                _put_weight(t, s, m, 0)
    _put_rest(t, s, m)
    return s.order


@compiled
def _delay(t, section):
    """Seconds that the section's inputs take from other ranks."""
    longest = 0.0
    for k in range(t.need_at[section], t.need_at[section + 1]):
        longest = max(longest, t.need_delay[k])
    return longest


@compiled
def _fill_before(t, s, m, rank, op, greedy):
    arrival = arrives_at(t, s.end, op)
    _fill_whole(t, s, m, rank, arrival)
    gap = arrival - s.clock[rank]
    # The rank that idles the most sets the time, so others may idle as long for free.
    if _has_weight(s, rank) and gap > 0 and (greedy or gap > s.idle.max() - s.idle[rank]):
        _put_weight(t, s, m, rank)


@compiled
def _wants_forward(t, s, m, limits, stage, f):
    """Whether the stage runs an F before its next B (1 or 0)."""
    following, clock = stage + 1, s.clock[stage]
    arrival = (
        s.clock[following]
        + t.seconds[3 * following]
        + t.seconds[3 * following + 1]
        + _delay(t, 3 * stage + 1)
    )
    # B is there already: it goes first, as the ranks before it wait for it.
    if arrival <= clock:
        return 0
    live, at = s.live[stage], s.ran[stage]
    end = clock
    # The F would need as many W before it as make room for it.
    while live + t.hold[stage] > limits[stage] * (1 + 1e-9) and at < s.queued[stage]:
        end += t.seconds[3 * stage + 2]
        live -= t.hold_for_w[stage]
        at += 1
    end = max(end, arrives_at(t, s.end, 3 * stage * m + f)) + t.seconds[3 * stage]
    # It ends in the gap before B, so it delays nothing.
    if end <= arrival:
        return 1
    return 0 if arrival - clock <= s.idle.max() - s.idle[stage] else 1


@compiled
def _stage(p, chunk, rank):
    """The stage of a rank's chunk, in V placement."""
    return rank if chunk == 0 else 2 * p - 1 - rank


@compiled
def _forward(t, s, m, f, chunk, rank):
    """Run the next F of the chunk, if there is one."""
    if f[chunk, rank] < m:
        _put(t, s, m, 3 * _stage(len(s.clock), chunk, rank) * m + f[chunk, rank])
        f[chunk, rank] += 1


@compiled
def zero_bubble_v_ops(t, m, limits, fill_forward, fill_backward, allowed):
    """ZB-V. ``fill_forward``, ``fill_backward``: a W also goes into a partial gap before an F, before a B
    of the second chunk. ``allowed``: idle time of each rank in the run before, or -1. The order, empty
    where it runs out of memory or blocks, and the idle time of each rank.
    """
    p = len(limits)
    s = _fresh(t, m, p)
    none = s.order[:0]
    f, b = np.zeros((2, p), np.int64), np.zeros((2, p), np.int64)

    for rank in range(p):
        _forward(t, s, m, f, 0, rank)
    _forward(t, s, m, f, 1, p - 1)
    for rank in range(p - 2, -1, -1):
        arrival = arrives_at(t, s.end, 3 * _stage(p, 1, rank) * m)
        while (
            f[0, rank] < m
            and s.live[rank] + t.hold[rank] * (2 + 2 * rank) <= limits[rank] * (1 + 1e-9)
            and s.clock[rank] + t.seconds[3 * rank] <= arrival
        ):
            for above in range(rank + 1):
                _forward(t, s, m, f, 0, above)
        _forward(t, s, m, f, 1, rank)
    chunk = 0
    for rank in range(1, p):
        # Every rank enters the steady state with as many F as the one before it.
        while f[0, rank] + f[1, rank] < f[0, rank - 1] + f[1, rank - 1] or f[1, rank] <= f[1, rank - 1] < m:
            for below in range(p - 1, rank - 1, -1):
                _forward(t, s, m, f, chunk, below)
            chunk = 1 - chunk
    first = np.empty(p, np.bool_)
    for _ in range(2 * m):
        for rank in range(p):
            # The backward of the first chunk, if its input has arrived.
            if b[0, rank] >= b[1, rank]:
                first[rank] = False
            elif rank == p - 1 or b[1, rank] >= m:
                first[rank] = True
            else:
                # Of the first chunk, the gradient comes from the next rank.
                first[rank] = s.end[(3 * (rank + 1) + 1) * m + b[0, rank]] < inf
        for turn in range(2 * p):
            rank, chunk = (p - 1 - turn, 0) if turn < p else (turn - p, 1)
            if first[rank] != (chunk == 0) or b[chunk, rank] >= m:
                continue
            op = (3 * _stage(p, chunk, rank) + 1) * m + b[chunk, rank]
            # Its own F or its gradient is not there yet and comes later in this pattern: it blocks.
            if s.end[op - m] == inf or arrives_at(t, s.end, op) == inf:
                return none, s.idle
            _fill_v(t, s, m, rank, op, chunk == 0 or fill_backward, allowed)
            _put(t, s, m, op)
            b[chunk, rank] += 1
        for rank in range(p):
            if f[1, rank] >= m:
                continue
            if f[1, rank] >= f[0, rank]:
                chunk = 0
            elif rank == p - 1 or s.end[3 * _stage(p, 1, rank + 1) * m + f[1, rank]] < inf:
                chunk = 1
            elif f[0, rank] < m and (rank == 0 or s.end[3 * (rank - 1) * m + f[0, rank]] < inf):
                chunk = 0
            else:
                continue
            op = 3 * _stage(p, chunk, rank) * m + f[chunk, rank]
            if arrives_at(t, s.end, op) == inf or not _free_memory(
                t, s, m, rank, _stage(p, chunk, rank), limits
            ):
                return none, s.idle
            _fill_v(t, s, m, rank, op, fill_forward, allowed)
            _put(t, s, m, op)
            f[chunk, rank] += 1
    _put_rest(t, s, m)
    for rank in range(p):
        if b[0, rank] < m or b[1, rank] < m:
            return none, s.idle
    return s.order, s.idle


@compiled
def _fill_v(t, s, m, rank, op, partial, allowed):
    arrival = arrives_at(t, s.end, op)
    _fill_whole(t, s, m, rank, arrival)
    if partial and _has_weight(s, rank):
        # It may idle as long as any rank does in this run, or as it had left in the run before.
        slack = max(s.idle.max(), allowed.max() - allowed[rank]) - s.idle[rank]
        if arrival - s.clock[rank] > slack:
            _put_weight(t, s, m, rank)
