"""Orders run and judged, compiled by numba, on ops and sections as numbers (``arrays.py``)."""

from __future__ import annotations

from math import inf

import numpy as np

from fxpipe.schedule.engine.compiled import compiled, compiled_later

TIE_BREAK = 1e-3  # of the ranks' mean span in a value, to tell equals apart


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
            free[rank] = max(free[rank], end[last_of(section, m)] + summed_behind(t, m, end, section))
    return True


@compiled_later
def last_of(section, m):
    """The last op of a section, whose ops are in microbatch order."""
    return (section + 1) * m - 1


@compiled_later
def summed_behind(t, m, end, section):
    """The seconds of sums over replicas from the last W of a stage on, its own first, one after the other."""
    rank, last, total = t.rank[section], end[last_of(section, m)], 0.0
    for k in range(t.placed_at[rank], t.placed_at[rank + 1]):
        weight = 3 * t.placed[k] + 2
        # Sums share one link of the rank: those of stages that end later queue behind this one.
        if end[last_of(weight, m)] >= last:
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


@compiled
def arrives_at(t, end, op):
    """When the last of an op's inputs is on its rank; infinite where the ``end`` of one is."""
    section, last = t.section[op], 0.0
    for k in range(t.need_at[section], t.need_at[section + 1]):
        last = max(last, end[op + t.need_step[k]] + t.need_delay[k])
    return last


@compiled_later
def score(first, free, by_makespan):
    """The value to minimize: the makespan or the longest span of a rank, plus 0.1% of the mean span."""
    total = 0.0
    for rank in range(len(free)):
        total += free[rank] - first[rank]
    # Where several ranks are as slow, only a change of all of them improves the objective; the mean shows
    # progress.
    return objective(first, free, by_makespan) + TIE_BREAK * total / len(free)


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
            seconds[k] = objective(first, free, by_makespan)
    return seconds, peaks


@compiled_later
def objective(first, free, by_makespan):
    most = 0.0
    for rank in range(len(free)):
        most = max(most, free[rank] - (0.0 if by_makespan else first[rank]))
    return most
