"""The repeated block: when one microbatch's ops start if a microbatch starts every period (2405.15362).

This is modulo scheduling: on every rank no two ops may overlap modulo the period.  A beam search follows a
microbatch down its forwards and back up its backwards, with the real times; each op starts as early as its
rank has room, or later where that is the better fit, and what waits is weighed by the memory that it holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from fxpipe.ir.compiled import compiled
from fxpipe.schedule.kernel import copy
from fxpipe.schedule.shop import Shop

_ROUNDING = 1e-7
_MOST_CHUNKS = 2  # with more the packing of a rank's ops takes too long to prove
_SLOTS = 3 * _MOST_CHUNKS
_FOLLOW = 4  # states that one is followed by at most


@dataclass(frozen=True)
class Block:
    """``start`` is per section, for microbatch 0; microbatch j runs ``j · period`` later."""

    period: float
    start: tuple[float, ...]


def flow(shop: Shop) -> tuple[float, ...]:
    """Per section when it starts if a microbatch is alone."""
    start = [0.0] * shop.sections
    for section in (*_chain(shop), *(3 * stage + 2 for stage in range(shop.stages))):
        start[section] = max(
            (start[source] + shop.seconds[source] + delay for source, delay in shop.needs[section]),
            default=0.0,
        )
    return tuple(start)


def find_block(shop: Shop, period: float, waits: tuple[float, ...], width: int = 16) -> Block | None:
    """The block of this period that holds the least memory for the shortest time, as far as is seen.

    ``waits`` are seconds that every op waits at least, one figure for each quarter of a microbatch's way.
    None where the ops do not fit the period, or a rank has more than two stages.
    """
    if max(map(len, shop.own)) > _MOST_CHUNKS or period <= 0:
        return None
    start = _beam(shop.tables(1), period, np.asarray(waits, np.float64), width)
    return Block(period, tuple(start.tolist())) if len(start) else None


def _chain(shop: Shop) -> tuple[int, ...]:
    """A microbatch's way: all F, then all B."""
    down = (3 * stage for stage in range(shop.stages))
    return (*down, *(3 * stage + 1 for stage in reversed(range(shop.stages))))


@compiled
def _beam(t, period, waits, width):
    """The start of each section; empty where nothing is found."""
    stages, ranks = len(t.hold), len(t.own_at) - 1
    length = 2 * stages
    # A state: what its waits cost, its times along the chain, and per rank the slots that are taken, sorted.
    cost, times = np.zeros(1), np.zeros((1, length))
    starts, lengths = np.zeros((1, ranks, _SLOTS)), np.zeros((1, ranks, _SLOTS))
    taken = np.zeros(ranks, np.int64)
    most = _FOLLOW * width
    new_cost, new_time, new_at = np.empty(most), np.empty(most), np.empty(most)
    parent = np.empty(most, np.int64)
    ranked = np.empty(most, np.int64)  # the least cost first, what is found earlier before its equals
    rest, gaps, tried = np.empty(_SLOTS), np.empty(_SLOTS), np.empty(_SLOTS, np.int64)
    options = np.empty(1 + 2 * _SLOTS * (1 + _SLOTS))
    for k in range(length):
        section = _section(k, stages)
        rank, seconds = t.rank[section], t.seconds[section]
        lefts, others = _left(t, k, rank, rest), taken[rank]
        weight = 1e-9  # what a wait before this op keeps in memory longer, over all ranks
        for stage in range(stages):
            if stage < k < length - stage:
                weight += t.hold[stage]
        found = 0
        for state in range(len(cost)):
            ready = 0.0
            for i in range(t.need_at[section], t.need_at[section + 1]):
                source = t.need[i]
                at = _position(source, stages)
                if source % 3 < 2 and at < k:
                    ready = max(ready, times[state, at] + t.seconds[source] + t.need_delay[i])
            if k:
                ready += waits[k * len(waits) // length]
            starts_now, lengths_now = starts[state, rank, :others], lengths[state, rank, :others]
            count = _waits(starts_now, lengths_now, ready, seconds, rest[:lefts], period, options)
            follow = 0
            for option in range(count):
                wait = options[option]
                at = (ready + wait) % period
                if option and wait == options[option - 1]:
                    continue
                if not _fits(starts_now, lengths_now, at, seconds, rest[:lefts], period, gaps, tried):
                    continue
                total = cost[state] + wait * weight
                known = False
                for i in range(found):
                    if abs(new_cost[i] - total) < 1e-6 and abs(new_at[i] - at) < 1e-6:
                        known = known or _alike(starts[parent[i], rank, :others], starts_now)
                if not known:
                    new_cost[found], new_time[found], new_at[found] = total, ready + wait, at
                    parent[found] = state
                    i = found
                    while i and new_cost[ranked[i - 1]] > total:
                        ranked[i] = ranked[i - 1]
                        i -= 1
                    ranked[i] = found
                    found += 1
                follow += 1
                if follow == _FOLLOW:
                    break
        kept = min(found, width)
        old_times, old_starts, old_lengths = times, starts, lengths
        cost, times = np.empty(kept), np.empty((kept, length))
        starts, lengths = np.empty((kept, ranks, _SLOTS)), np.empty((kept, ranks, _SLOTS))
        for i in range(kept):
            new, old = ranked[i], parent[ranked[i]]
            cost[i] = new_cost[new]
            copy(old_times[old], times[i])
            for other in range(ranks):
                copy(old_starts[old, other], starts[i, other])
                copy(old_lengths[old, other], lengths[i, other])
            times[i, k] = new_time[new]
            _insert(starts[i, rank], lengths[i, rank], others, new_at[new], seconds)
        taken[rank] += 1
    for state in range(len(cost)):
        block = np.zeros(3 * stages)
        for k in range(length):
            block[_section(k, stages)] = times[state, k]
        placed = True
        for rank in range(ranks):
            if placed:
                placed = _place_weights(t, rank, block, starts[state, rank], lengths[state, rank], period)
        if placed:
            return block
    return np.zeros(0)


@compiled
def _section(k, stages):
    """Along a microbatch's way: all F, then all B."""
    return 3 * k if k < stages else 3 * (2 * stages - 1 - k) + 1


@compiled
def _position(section, stages):
    return section // 3 if section % 3 == 0 else 2 * stages - 1 - section // 3


@compiled
def _left(t, k, rank, rest):
    """How many ops the rank has besides the first k of the chain and this one; writes their seconds, the
    longest first."""
    count, stages = 0, len(t.hold)
    for at in range(t.own_at[rank], t.own_at[rank + 1]):
        for kind in range(3):
            section = 3 * t.own[at] + kind
            if kind == 2 or _position(section, stages) > k:
                i = count
                while i and rest[i - 1] < t.seconds[section]:
                    rest[i] = rest[i - 1]
                    i -= 1
                rest[i] = t.seconds[section]
                count += 1
    return count


@compiled
def _alike(one, other):
    equal = True
    for i in range(len(one)):
        equal = equal and one[i] == other[i]
    return equal


@compiled
def _waits(starts, lengths, ready, seconds, rest, period, found):
    """How many waits there are after which an op would touch another, or leave room between for just one of
    the rest; writes them, the shortest first."""
    found[0] = 0.0
    count = 1
    for i in range(len(starts)):
        for k in range(-1, len(rest)):
            room = 0.0 if k < 0 else rest[k]
            for wait in (starts[i] + lengths[i] + room - ready, starts[i] - seconds - room - ready):
                wait %= period
                if wait < period - _ROUNDING:
                    at = count
                    while found[at - 1] > wait:
                        found[at] = found[at - 1]
                        at -= 1
                    found[at] = wait
                    count += 1
    return count


@compiled
def _fits(starts, lengths, at, seconds, rest, period, gaps, tried):
    """Is the slot free, and do the rest fit into what it leaves?"""
    count = len(starts)
    for i in range(len(starts)):
        after, before = (at - starts[i]) % period, (starts[i] - at) % period
        if after < lengths[i] - _ROUNDING or before < seconds - _ROUNDING:
            return False
    for i in range(count):
        following = starts[i + 1] if i + 1 < count else starts[0] + period
        gaps[i] = following - starts[i] - lengths[i]
    # The new slot cuts the gap behind the last that starts before it.
    cut = count - 1
    for i in range(count):
        if starts[i] <= at:
            cut = i
    if count:
        before = (at - starts[cut]) % period - lengths[cut]
        gaps[count] = gaps[cut] - before - seconds
        gaps[cut] = before
    else:
        gaps[0] = period - seconds
    return _pack(gaps[: count + 1], rest, tried)


@compiled
def _insert(starts, lengths, count, at, seconds):
    """Into slots that are sorted by start."""
    i = count
    while i and starts[i - 1] > at:
        starts[i], lengths[i] = starts[i - 1], lengths[i - 1]
        i -= 1
    starts[i], lengths[i] = at, seconds


@compiled
def _pack(gaps, items, gap):
    """Do the items, longest first, fit into the gaps?  ``gap`` is for notes: which one each is in."""
    gap[0], k = -1, 0
    while 0 <= k < len(items):
        if gap[k] >= 0:
            gaps[gap[k]] += items[k]
        gap[k] += 1
        while gap[k] < len(gaps) and gaps[gap[k]] < items[k] - 1e-9:
            gap[k] += 1
        if gap[k] < len(gaps):
            gaps[gap[k]] -= items[k]
            k += 1
            if k < len(items):
                gap[k] = -1
        else:
            k -= 1
    return k >= 0


@compiled
def _place_weights(t, rank, block, starts, lengths, period):
    """Each W into the first gap after its B that leaves room for the rank's others; in the best sequence."""
    own = t.own[t.own_at[rank] : t.own_at[rank + 1]]
    taken = 2 * len(own)
    gaps, tried, options = np.empty(_SLOTS), np.empty(_SLOTS, np.int64), np.empty(1 + 2 * _SLOTS * _SLOTS)
    slots, ends, rest = np.empty(_SLOTS), np.empty(_SLOTS), np.empty(_SLOTS)
    best, times, new_times = inf, np.empty(len(own)), np.empty(len(own))
    for turn in range(len(own)):
        copy(starts, slots)
        copy(lengths, ends)
        total = 0.0
        for i in range(len(own)):
            section = 3 * own[(i + turn) % len(own)] + 2
            seconds, ready = t.seconds[section], block[section - 1] + t.seconds[section - 1]
            others = len(own) - 1 - i
            for k in range(others):
                rest[k] = t.seconds[3 * own[(i + 1 + k + turn) % len(own)] + 2]
            count = taken + i
            when = inf
            found = _waits(slots[:count], ends[:count], ready, seconds, rest[:others], period, options)
            for option in range(found):
                at = (ready + options[option]) % period
                if _fits(slots[:count], ends[:count], at, seconds, rest[:others], period, gaps, tried):
                    when = ready + options[option]
                    break
            if when == inf:
                total = inf
                break
            _insert(slots, ends, count, when % period, seconds)
            new_times[(i + turn) % len(own)] = when
            total += when
        if total < best:
            best = total
            copy(new_times, times)
    if best == inf:
        return False
    for i in range(len(own)):
        block[3 * own[i] + 2] = times[i]
    return True
