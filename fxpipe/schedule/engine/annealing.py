"""The annealing of an order, compiled by numba, on ops and sections as numbers (``arrays.py``)."""

from __future__ import annotations

import random
from math import inf

import numpy as np

from fxpipe.schedule.engine.compiled import compiled
from fxpipe.schedule.engine.kernel import last_of, objective, run_ops, score, summed_behind

_REACH = 8  # ops that a move may pass, about
_BLOCK = 0.8  # of the moves are out of a run of ops of one rank on the critical path


@compiled
def anneal(t, order, m, limits, by_makespan, good_enough, work, seed, hot, cold):
    """Simulated annealing: see :func:`fxpipe.schedule.search.local_search.improve`.

    The best order that is met within ``work``, the number of ops that may be looked at; the search ends early
    when the value is ``good_enough``.
    """
    random.seed(seed)
    ranks, ops, order, best_order = len(limits), len(order), order.copy(), order.copy()
    pos, live = np.empty(ops, np.int64), np.zeros(ops)
    for i in range(ops):
        pos[order[i]] = i
    for rank in range(ranks):
        begin, stop = 3 * m * t.placed_at[rank], 3 * m * t.placed_at[rank + 1]
        # Without a limit: this only fills in ``live``, on which later moves build.
        keeps_between(t, order, live, begin, begin, stop - 1, inf)
    end, cause, tail = np.empty(ops), np.empty(ops, np.int64), np.zeros(ops)
    first, free, turn = np.empty(ranks), np.empty(ranks), np.empty(ops, np.int64)
    run_ops(t, order, m, 0.0, end, cause, first, free, turn)
    value = best = score(first, free, by_makespan)
    moved_end, moved_tail = np.empty(ops), np.empty(ops)
    changed = np.zeros(ops, np.int64)
    run_back(t, order, m, pos, 0, ops - 1, inf, end, turn, first, by_makespan, changed, tail)
    befores, afters = np.empty(ops, np.int64), np.empty(ops, np.int64)
    heads, lasts = np.empty(ops, np.int64), np.empty(ops, np.int64)
    arcs, blocks = _critical(t, order, m, end, cause, first, free, by_makespan, befores, afters, heads, lasts)
    cool, spent, temperature, next_cooling = np.log(cold / hot), 0, hot, 0
    # Without arcs no op of the critical path has a neighbor on its rank, so no move shortens it.
    while arcs and spent < work and best > good_enough:
        if spent >= next_cooling:  # in steps, since an exponential for every move takes time
            temperature = hot * np.exp(cool * spent / work)
            next_cooling = spent + work // 1000
        if random.random() < _BLOCK:
            # An op of the head or the tail of a run of ops of one rank jumps out of it.
            k = random.randrange(blocks)
            head, last = pos[heads[k]], pos[lasts[k]]
            by = random.randrange(_REACH)
            if random.random() < 0.5:
                # Close to the end of the run, so that the jump out of it is short.
                source = max(head, last - 1 - by)
                target = last + random.randrange(_REACH - by)
            else:
                # The same at its head.
                source = min(last, head + 1 + by)
                target = head - random.randrange(_REACH - by)
        else:
            k = random.randrange(arcs)
            if random.random() < 0.5:
                source = pos[befores[k]]
                target = source + 1 + random.randrange(_REACH)
            else:
                source = pos[afters[k]]
                target = source - 1 - random.randrange(_REACH)
        op = order[source]
        rank = t.rank[t.section[op]]
        begin, stop = 3 * m * t.placed_at[rank], 3 * m * t.placed_at[rank + 1]
        target = max(begin, min(stop - 1, target))
        # Also of moves that are refused, so that the search ends where none is possible.
        spent += _REACH
        if source == target or not may_pass(t, order, m, source, target):
            continue
        low, high = min(source, target), max(source, target)
        # Nothing that ended before the first moved op began can change.
        since, until = end[order[low]] - t.seconds[t.section[order[low]]], end[order[high]]
        # The most that is accepted (Metropolis), drawn first, so that the estimate alone can reject.
        most = value - temperature * np.log(random.random())
        # In place, and back if it is refused: a copy of the order would cost more than the move.
        shift(order, pos, source, target)
        new, runs = inf, False
        if keeps_between(t, order, live, begin, low, high, limits[rank] * (1 + 1e-9)):
            rest = 0.0 if by_makespan else -first[rank]
            longest = _path_through(
                t, order, m, pos, rest, begin, stop, low, high, end, tail, moved_end, moved_tail
            )
            # The estimate has no tie break; the one of the order before stands in for it.
            if longest + value - objective(first, free, by_makespan) <= most:
                spent += ops // 2  # on the average a move changes the times of half of the ops
                if run_ops(t, order, m, since, end, cause, first, free, turn):
                    new = score(first, free, by_makespan)
                runs = True
        if new > most:
            shift(order, pos, target, source)
            keeps_between(t, order, live, begin, low, high, inf)
            if runs:  # as the estimate is nearly always right, this is too rare to keep a copy for it
                run_ops(t, order, m, 0.0, end, cause, first, free, turn)
            continue
        value = new
        spent += ops // 2
        # The moved ops may end later than those that stood there before.
        until = max(until, end[order[high]])
        run_back(t, order, m, pos, low, high, until, end, turn, first, by_makespan, changed, tail)
        arcs, blocks = _critical(
            t, order, m, end, cause, first, free, by_makespan, befores, afters, heads, lasts
        )
        # By more than rounding, since a copy of the order takes time.
        if value < best * (1 - 1e-12):
            best = value
            copy(order, best_order)
    return best_order


@compiled
def may_pass(t, order, m, source, target):
    """Whether an op may move: it must not pass an op of its section, or of its stage and microbatch."""
    section = t.section[order[source]]
    first = 3 * (section // 3)
    j = order[source] - section * m
    step = 1 if target > source else -1
    for i in range(source + step, target + step, step):
        other = t.section[order[i]]
        # Ops of a section are alike, so another order of them gains nothing; F, B and W of a microbatch
        # depend on each other.
        if other == section or (first <= other < first + 3 and order[i] - other * m == j):
            return False
    return True


@compiled
def shift(order, pos, source, target):
    """Move an op, and those between one place towards where it was."""
    op, step = order[source], 1 if target > source else -1
    for i in range(source, target, step):
        order[i] = order[i + step]
        pos[order[i]] = i
    order[target] = op
    pos[op] = target


@compiled
def keeps_between(t, order, live, begin, low, high, limit):
    """Writes the live memory after each op from low to high of a rank; whether it keeps the limit."""
    now, within = live[low - 1] if low > begin else 0.0, True
    for i in range(low, high + 1):
        section = t.section[order[i]]
        now += t.at_start[section]
        # All are written even if one exceeds the limit: a refused move writes them once more, from the old
        # order.
        within = within and now <= limit
        now += t.at_end[section]
        within = within and now <= limit
        live[i] = now
    return within


@compiled
def copy(source, target):
    for i in range(len(source)):  # a[:] = b compiles ten times as long, for its error messages
        target[i] = source[i]


@compiled
def run_back(t, order, m, pos, low, high, until, end, turn, first, by_makespan, changed, tail):
    """Writes ``tail``: per op the longest path from its end to the end of a rank's last op; for the span,
    less the start of that rank's first op.

    The tails of ops that end after ``until`` stay as they are.  Of the others, few are new: those of the ops
    from ``low`` to ``high`` of the order and of the one before them, of the last of a rank or of a section
    with a sum, and of those before an op whose tail is new.  ``changed`` has a 1 for each of them that is
    still to be looked at, and is all 0 before and after.
    """
    ranks, count = len(first), 0
    for i in range(max(0, low - 1), high + 1):
        count += _note(changed, order[i], end, until)
    for rank in range(ranks):
        # For the span, its tail depends on the start of the rank's first op, which may have moved.
        count += _note(changed, order[3 * m * t.placed_at[rank + 1] - 1], end, until)
    for section in range(len(t.sum)):
        if t.sum[section]:
            count += _note(changed, last_of(section, m), end, until)
    # From the end of ``turn``: then all that an op's tail depends on is up to date.
    i = len(turn)
    while count:
        i -= 1
        op = turn[i]
        if not changed[op]:
            continue
        changed[op] = 0
        count -= 1
        section, at = t.section[op], pos[op]
        rank = t.rank[section]
        if at + 1 < 3 * m * t.placed_at[rank + 1]:
            behind = order[at + 1]
            longest = tail[behind] + t.seconds[t.section[behind]]
        else:
            longest = 0.0 if by_makespan else -first[rank]
        if t.sum[section] and op == last_of(section, m):
            longest = max(longest, summed_behind(t, m, end, section))
        for k in range(t.feed_at[section], t.feed_at[section + 1]):
            longest = max(longest, t.feed_way[k] + tail[op + t.feed_step[k]])
        # Only a changed tail changes others, which keeps this to few of the ops.
        if longest != tail[op]:
            tail[op] = longest
            if at > 3 * m * t.placed_at[rank]:
                count += _note(changed, order[at - 1], end, until)
            for k in range(t.need_at[section], t.need_at[section + 1]):
                count += _note(changed, op + t.need_step[k], end, until)


@compiled
def _note(changed, op, end, until):
    """Notes an op that ends by ``until``; 1 if it was not noted."""
    # Without a branch, which would often be mispredicted.
    new = (end[op] <= until) & (1 - changed[op])
    changed[op] |= new
    return new


@compiled
def _path_through(t, order, m, pos, rest, begin, stop, low, high, end, tail, moved_end, moved_tail):
    """An estimate of the longest path through the ops from low to high of a rank's new order, if all other
    orders stay (Balas and Vazirani 1998).  ``rest``: the tail of the rank's last op.
    """
    now = end[order[low - 1]] if low > begin else 0.0
    for i in range(low, high + 1):
        op = order[i]
        section = t.section[op]
        for k in range(t.need_at[section], t.need_at[section + 1]):
            source = op + t.need_step[k]
            # A source among the moved ops has its new end.  One that the move put behind its user blocks the
            # rank, which the run finds.
            inside = low <= pos[source] < i
            now = max(now, (moved_end[source] if inside else end[source]) + t.need_delay[k])
        now = max(now, t.gathered[section]) + t.seconds[section]
        moved_end[op] = now
    longest = -inf
    for i in range(high, low - 1, -1):
        op = order[i]
        section = t.section[op]
        if i + 1 < stop:
            behind = order[i + 1]
            way = (moved_tail[behind] if i < high else tail[behind]) + t.seconds[t.section[behind]]
        else:
            way = rest
        if t.sum[section] and op == last_of(section, m):
            way = max(way, t.sum[section])
        for k in range(t.feed_at[section], t.feed_at[section + 1]):
            other = op + t.feed_step[k]
            inside = i < pos[other] <= high
            later = moved_tail[other] if inside else tail[other]
            way = max(way, t.feed_way[k] + later)
        moved_tail[op] = way
        longest = max(longest, moved_end[op] + way)
    return longest


@compiled
def _critical(t, order, m, end, cause, first, free, by_makespan, befores, afters, heads, lasts):
    """Writes the critical path of a worst rank: its pairs of consecutive ops of one rank, and the ends of its
    runs of ops of one rank.  Returns the number of pairs and of runs.
    """
    worst, at, equals = objective(first, free, by_makespan) * (1 - 1e-9), 0, 0
    for rank in range(len(free)):
        if free[rank] - (0.0 if by_makespan else first[rank]) >= worst:
            equals += 1
            # Reservoir sampling, without a list of the worst ranks.
            if random.random() * equals < 1:  # each of the worst ranks is as likely
                at = rank
    op, arcs, blocks = _last_critical(t, order, m, end, free, at), 0, 0
    last = op
    while cause[op] >= 0:
        before = cause[op]
        if t.rank[t.section[before]] == t.rank[t.section[op]]:
            befores[arcs], afters[arcs] = before, op
            arcs += 1
        else:
            # A run of one op has no other place to jump to within itself.
            if last != op:
                heads[blocks], lasts[blocks] = op, last
                blocks += 1
            # The path comes from another rank: a new run begins there.
            last = before
        op = before
    if last != op:
        heads[blocks], lasts[blocks] = op, last
        blocks += 1
    return arcs, blocks


@compiled
def _last_critical(t, order, m, end, free, rank):
    """The last op of the critical path of a rank: the last of all, or one that is followed by sums alone."""
    for k in range(t.placed_at[rank], t.placed_at[rank + 1]):
        section = 3 * t.placed[k] + 2
        if t.sum[section]:
            op = last_of(section, m)
            if end[op] + summed_behind(t, m, end, section) >= free[rank] * (1 - 1e-9):
                return op
    return order[3 * m * t.placed_at[rank + 1] - 1]
