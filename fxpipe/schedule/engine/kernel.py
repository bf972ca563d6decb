"""The inner loops of the searches, compiled by numba, on ops and sections as numbers (``arrays.py``)."""

from __future__ import annotations

import random
from math import inf

import numpy as np

from fxpipe.schedule.engine.compiled import compiled, compiled_later
from fxpipe.schedule.engine.moves import keeps_between, may_pass, shift

TIE_BREAK = 1e-3  # of the ranks' mean span in a value, to tell equals apart
_REACH = 8  # ops that a move may pass, about
_BLOCK = 0.8  # of the moves are out of a run of ops of one rank on the critical path


@compiled
def copy(source, target):
    for i in range(len(source)):  # a[:] = b compiles ten times as long, for its error messages
        target[i] = source[i]


@compiled_later
def run_ops(t, order, m, since, end, cause, first, free, turn):
    """Run every op as early as its rank's order allows; False if the orders block each other.

    Writes the last five, which are per op and per rank, but for the ops that ended before ``since``.
    ``first`` is the start of a rank's first op, less its update, and ``free`` the end of its last op and of
    its sums over replicas: so ``free`` - ``first`` is its span.  ``turn`` has the ops of all ranks, each
    behind those that it waits for.
    """
    ranks, unchanged, done = len(free), 0, 0
    at = np.empty(ranks, np.int64)
    for rank in range(ranks):
        low, high = 3 * m * t.placed_at[rank], 3 * m * t.placed_at[rank + 1]
        begin, stop = low, high
        # A whole run: there are no ends to bisect.
        if since <= 0:
            high = low
        # Ends rise along a rank's order, so the ops that stay as they are come first.
        while low < high:
            middle = (low + high) // 2
            if end[order[middle]] < since:
                low = middle + 1
            else:
                high = middle
        at[rank] = low
        unchanged += low - begin
        free[rank] = end[order[low - 1]] if low > begin else 0.0
        for i in range(low, stop):
            # Negative marks an op that has not run yet, which no end of one can be.
            end[order[i]] = -1.0
    i = 0
    while done < unchanged:  # what does not stay is overwritten: a branch here is often mispredicted
        turn[done] = turn[i]
        done += end[turn[i]] >= 0
        i += 1
    # A stack of ranks: one that waits leaves it, and the op that it waits for puts it back.  So each op is
    # looked at about once, in whatever order the ranks take turns.
    waits_for = np.empty(ranks, np.int64)
    runnable = np.empty(ranks, np.int64)
    for rank in range(ranks):
        waits_for[rank] = -1
        runnable[rank] = rank
    count = ranks
    while count:
        count -= 1
        rank = runnable[count]
        begin, stop = 3 * m * t.placed_at[rank], 3 * m * t.placed_at[rank + 1]
        i, now = at[rank], free[rank]
        # The cause of an op that starts when its rank is free, unless a later arrival takes its place.
        before = order[i - 1] if i > begin else -1
        while i < stop:
            op = order[i]
            section = t.section[op]
            start, why, missing = now, before, -1
            # No op causes it: the critical path begins here.
            if t.gathered[section] > start:
                start, why = t.gathered[section], -1
            for k in range(t.need_at[section], t.need_at[section + 1]):
                source = op + t.need_step[k]
                arrival = end[source]
                if arrival < 0:
                    missing = source
                    break
                arrival += t.need_delay[k]
                if arrival > start:
                    start, why = arrival, source
            if missing >= 0:
                # One of its inputs is enough: when that is there, the rank looks for the next one.
                waits_for[rank] = missing
                break
            now = start + t.seconds[section]
            end[op], cause[op], turn[done] = now, why, op
            done += 1
            if i == begin:
                # In steady state the update of the step before stands between two steps of a rank.
                first[rank] = start - t.update[rank]
            for k in range(t.feed_at[section], t.feed_at[section + 1]):
                other = t.feed_rank[k]
                # Its ready time is found when the rank takes its turn: here it only becomes runnable.
                if waits_for[other] == op:
                    waits_for[other] = -1
                    runnable[count] = other
                    count += 1
            before = op
            i += 1
        at[rank], free[rank] = i, now
    for rank in range(ranks):
        # Nobody is left to compute what it waits for.
        if waits_for[rank] >= 0:
            return False
    for section in range(len(t.sum)):
        if t.sum[section]:
            rank = t.rank[section]
            # A rank's step is not over before its last gradients are summed.
            free[rank] = max(free[rank], end[_last(section, m)] + _summed_behind(t, m, end, section))
    return True


@compiled_later
def _last(section, m):
    """The last op of a section, whose ops are in microbatch order."""
    return (section + 1) * m - 1


@compiled_later
def _summed_behind(t, m, end, section):
    """The seconds of sums over replicas from the last W of a stage on, its own first, one after the other."""
    rank, last, total = t.rank[section], end[_last(section, m)], 0.0
    for k in range(t.placed_at[rank], t.placed_at[rank + 1]):
        weight = 3 * t.placed[k] + 2
        # Sums share one link of the rank: those of stages that end later queue behind this one.
        if end[_last(weight, m)] >= last:
            total += t.sum[weight]
    return total


@compiled
def peak_of(t, ops):
    """The peak memory of a rank, which depends on its own order alone."""
    live, most = 0.0, 0.0
    for op in ops:
        section = t.section[op]
        live += t.at_start[section]
        # What an op makes is live beside what it frees while it runs, so the peak may be at its start.
        most = max(most, live)
        live += t.at_end[section]
        most = max(most, live)
    return most


@compiled_later
def score(first, free, by_makespan):
    """The value to minimize: the makespan or the longest span of a rank, plus 0.1% of the mean span."""
    total = 0.0
    for rank in range(len(free)):
        total += free[rank] - first[rank]
    # Where several ranks are as slow, only a change of all of them improves the objective; the mean shows
    # progress.
    return _objective(first, free, by_makespan) + TIE_BREAK * total / len(free)


@compiled
def judge_ops(t, orders, m, limits, by_makespan):
    """The time (the makespan, or the longest span of a rank) and the largest peak of each order, a row.

    The time is infinite if a rank exceeds its limit by more than rounding, or if the orders block each other.
    """
    ranks, ops = len(limits), len(t.section)
    seconds, peaks = np.full(len(orders), inf), np.zeros(len(orders))
    end, cause, turn = np.empty(ops), np.empty(ops, np.int64), np.empty(ops, np.int64)
    first, free = np.empty(ranks), np.empty(ranks)
    for k in range(len(orders)):
        order, within = orders[k], True
        for rank in range(ranks):
            peak = peak_of(t, order[3 * m * t.placed_at[rank] : 3 * m * t.placed_at[rank + 1]])
            within = within and peak <= limits[rank] * (1 + 1e-9)
            peaks[k] = max(peaks[k], peak)
        if within and run_ops(t, order, m, 0.0, end, cause, first, free, turn):
            seconds[k] = _objective(first, free, by_makespan)
    return seconds, peaks


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
            if longest + value - _objective(first, free, by_makespan) <= most:
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


@compiled_later
def _objective(first, free, by_makespan):
    most = 0.0
    for rank in range(len(free)):
        most = max(most, free[rank] - (0.0 if by_makespan else first[rank]))
    return most


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
            count += _note(changed, _last(section, m), end, until)
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
        if t.sum[section] and op == _last(section, m):
            longest = max(longest, _summed_behind(t, m, end, section))
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
        if t.sum[section] and op == _last(section, m):
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
    worst, at, equals = _objective(first, free, by_makespan) * (1 - 1e-9), 0, 0
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
            op = _last(section, m)
            if end[op] + _summed_behind(t, m, end, section) >= free[rank] * (1 - 1e-9):
                return op
    return order[3 * m * t.placed_at[rank + 1] - 1]
