"""Moves of an op within the order of its rank, compiled by numba."""

from __future__ import annotations

from fxpipe.schedule.engine.compiled import compiled


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
