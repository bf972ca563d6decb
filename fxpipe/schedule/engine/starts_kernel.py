"""The sweep of the bound by starts (:mod:`fxpipe.schedule.starts_bound`), compiled by numba.

A count, so many microbatches of each kind, is a number: the sum of so many · ``step`` of each kind; ``of``
has so many of each kind, by the count.
"""

from __future__ import annotations

from math import inf

import numpy as np

from fxpipe.schedule.engine.compiled import compiled_later


@compiled_later
def held_at_most(of, most, saved, for_weight, room, rows):
    """Write to ``rows`` the pairs of counts (x, x + y) that are held under rule 4 and to which nothing can be
    added; return how many there are.

    most: of each kind, the most that can be held.
    """
    counts, kinds = of.shape
    pairs = 0
    more, to_more = np.minimum(saved, for_weight), saved - for_weight
    for z in range(counts):
        kept, fits = 0.0, True
        for k in range(kinds):
            kept += of[z, k] * for_weight[k]
            fits &= of[z, k] <= most[k]
        for x in range(z + 1 if fits else 0):
            held = kept
            for k in range(kinds):
                if of[x, k] > of[z, k]:
                    held = inf
                    break
                held += of[x, k] * to_more[k]
            if held > room:
                continue
            full = True
            for k in range(kinds):
                full &= of[z, k] == most[k] or held + more[k] > room
                full &= of[x, k] == of[z, k] or held + to_more[k] > room
            if full:
                rows[pairs, 0], rows[pairs, 1] = x, z
                pairs += 1
    return pairs


@compiled_later
def longest_of_starts(t, end, start):
    """The bound.  t: the tables.  end, start: of each section at each count, all of one section in a row,
    and of the latter one for each kind; to write to, zeros at first."""
    counts, kinds = t.of.shape
    sections = len(t.order)
    for u in range(1, counts):
        for s in t.order:
            head, least = inf, inf
            for k in range(kinds):
                if t.of[u, k]:
                    head = min(head, t.head[k, s])
            for c in range(kinds):
                if t.of[u, c] == 0:
                    continue
                v = u - t.step[c]
                begin = head + t.lead[c, s]
                for k in range(kinds):
                    begin += t.before[s, k, t.of[v, k]]
                begin = max(begin, end[s * counts + v])
                for row in range(t.need_at[s], t.need_at[s + 1]):
                    begin = max(begin, end[t.need_of[row] * counts + u] + t.delay[c, row])
                for row in range(t.wait_at[s], t.wait_at[s + 1]):
                    begin = max(begin, _freed(t, end, t.wait_for[row], v, t.held_at[row, c]))
                start[(s * counts + v) * kinds + c] = begin
                least = min(least, begin + t.seconds[c, s])
            end[s * counts + u] = least
    longest, path = 0.0, np.zeros(counts)
    for s in range(sections):
        for v in range(counts - 2, -1, -1):
            left, tail, least = 0.0, inf, inf
            for k in range(kinds):
                left += t.after[s, k, t.of[v, k]]
                if t.of[v, k] < t.of[counts - 1, k]:
                    tail = min(tail, t.tail[k, s])
            for c in range(kinds):
                if t.of[v, c] < t.of[counts - 1, c]:
                    until = start[(s * counts + v) * kinds + c] + left + tail
                    least = min(least, max(until, path[v + t.step[c]]))
            path[v] = least
        longest = max(longest, path[0])
    return longest


@compiled_later
def _freed(t, end, b, v, rows):
    """When all of a count but what is held have ended B, and W, for the best of these pairs."""
    counts, kinds = t.of.shape
    least = inf
    for row in range(rows[0], rows[1]):
        x, z = t.held[row]
        to_b, to_w = 0, 0
        for k in range(kinds):
            to_b += max(0, t.of[v, k] - t.of[x, k]) * t.step[k]
            to_w += max(0, t.of[v, k] - t.of[z, k]) * t.step[k]
        until = max(end[b * counts + to_b], end[(b + 1) * counts + to_w])
        least = min(least, until)
    return least
