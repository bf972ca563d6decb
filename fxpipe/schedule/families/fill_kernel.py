"""The inner loop of ``families.weights.fill_bubbles``, compiled by numba."""

from __future__ import annotations

import heapq
from math import inf

import numpy as np

from fxpipe.schedule.engine.compiled import compiled
from fxpipe.schedule.engine.kernel import arrives_at


@compiled
def fill_ops(t, m, fb_order, fb_order_at, chunks, gap):
    """Return the order of ``families.weights.fill_bubbles``, and whether it has all ops.  Rank r's part of
    the fb_order begins at ``fb_order_at[r]``; ``gap`` is 0 for any, 1 for whole, 2 for balanced."""
    ranks, epsilon, left = len(fb_order_at) - 1, 0.0, len(t.section)
    # The same instant, reached by sums over different paths, differs by rounding.
    for seconds in t.seconds:
        epsilon += 1e-9 * seconds
    end = np.empty(len(t.seconds) * m)
    for op in range(len(end)):
        # Infinite until it runs, so that an arrival that depends on it is infinite as well.
        end[op] = inf
    order, pending = np.empty(len(end), np.int64), np.empty(len(end), np.int64)
    filled, queued, ran = np.empty(ranks, np.int64), np.empty(ranks, np.int64), np.zeros(ranks, np.int64)
    following = fb_order_at[:ranks].copy()
    live, free, idle = np.zeros(ranks, np.int64), np.zeros(ranks), np.zeros(ranks)
    for rank in range(ranks):
        filled[rank] = queued[rank] = 3 * m * t.placed_at[rank]
    # A rank is looked at when it becomes free and when a value may have arrived for it, and at no other time.
    events = [(0.0, rank) for rank in range(ranks)]
    while len(events):
        now, rank = heapq.heappop(events)
        if free[rank] > now + epsilon:
            continue  # the event is older than the op that the rank runs; the end of that op is another event
        begin, chosen, ready, full = 3 * m * t.placed_at[rank], -1, inf, False
        waiting = begin + ran[rank] < queued[rank]
        if following[rank] < fb_order_at[rank + 1]:
            op = fb_order[following[rank]]
            # Only an F takes memory; a B gives its own back in part.
            full = t.section[op] % 3 == 0 and live[rank] == chunks
            ready = arrives_at(t, end, op)
            if ready <= now + epsilon and not full:
                # F and B come before W: others wait for them, and for no W.
                following[rank] += 1
                chosen = op
        if chosen < 0 and waiting:
            op = pending[begin + ran[rank]]
            seconds = t.seconds[t.section[op]]
            # The W at the head alone: they stand in the order of their B, whose inputs came in that order.
            if arrives_at(t, end, op) <= now + epsilon:
                # A full rank has to run a W, however long the bubble is.
                suits = full or gap == 0 or now + seconds <= ready + epsilon
                if gap == 2 and not suits:
                    # The rank that idles the most sets the time: only if this rank would do so is it worth to
                    # delay its next op.
                    most = 0.0
                    for other in range(ranks):
                        most = max(most, idle[other])
                    suits = idle[rank] + ready - now > most + epsilon
                if suits:
                    ran[rank] += 1
                    chosen = op
        # The rank idles; the arrival of what it waits for is an event of its own.
        if chosen < 0:
            continue
        section = t.section[chosen]
        kind = section % 3
        start = max(now, free[rank], arrives_at(t, end, chosen))
        if filled[rank] > begin:
            # The fill before a rank's first op counts for nobody.
            idle[rank] += start - free[rank]
        end[chosen] = free[rank] = start + t.seconds[section]
        order[filled[rank]] = chosen
        filled[rank] += 1
        left -= 1
        if kind == 0:
            live[rank] += 1
        elif kind == 1:
            # The W of the same microbatch: its section follows that of B.
            pending[queued[rank]] = chosen + m
            queued[rank] += 1
        else:
            live[rank] -= 1
        heapq.heappush(events, (free[rank], rank))
        for k in range(t.feed_at[section], t.feed_at[section + 1]):
            other = t.feed_rank[k]
            if other != rank:
                # It may lack other inputs still; then a later event comes from those.
                heapq.heappush(events, (free[rank] + t.feed_delay[k], other))
    return order, left == 0
