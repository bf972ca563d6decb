"""List scheduling under memory limits: any priorities, any placement, and it always comes to its end.

Time runs forward over all ranks at once.  A rank that is free starts the op with the least *due* among
those that have arrived and fit its memory, unless an op that is due before would then come too late.

Why it ends: an F of a rank's stage is admitted only while one microbatch would still fit in all later stages
of that rank at a time.  Take the latest stage whose next F has arrived and does not fit: all later stages can
run empty, and then it fits, or an earlier F of the same stage gets its B.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import inf

from fxpipe.errors import ScheduleError
from fxpipe.schedule.shop import Coded, Shop


def dispatch(
    shop: Shop,
    microbatches: int,
    due: Sequence[float],
    limits: Sequence[float],
    patience: tuple[float, float, float] = (1.0, 1.0, 1.0),
) -> Coded:
    """The order that follows from ``due``, one number per op (see :mod:`fxpipe.schedule.shop`).

    ``patience``, for F, B and W, is the share of an op that must fit before the arrival of an op that is due
    earlier: with 0 a rank never waits while it could compute, with 1 no op is delayed by one that is due
    later as far as is known; with more, ops wait for what may come a while later.
    Raises ScheduleError where a limit is below what one microbatch takes on the rank.
    """
    for rank, limit in enumerate(limits):
        if limit * (1 + 1e-9) < shop.smallest_limit(rank):
            raise ScheduleError(
                f"rank {rank} has a memory limit of {limit:g}, but one microbatch takes "
                f"{shop.smallest_limit(rank):g} on it"
            )
    m, seconds, lead, feeds, home = microbatches, shop.seconds, shop.lead, shop.feeds, shop.rank
    tick = 1e-9 * sum(seconds)
    most = [limit * (1 + 1e-9) for limit in limits]
    missing = [len(sources) for sources in shop.needs for _ in range(m)]
    arrival = [0.0] * len(missing)
    following = [0] * shop.sections  # the next microbatch of each
    live, free = [0.0] * shop.ranks, [0.0] * shop.ranks
    held = [[0.0] * len(own) for own in shop.own]  # between F and B, per stage of a rank
    order: Coded = [[] for _ in range(shop.ranks)]
    heads = [_heads(shop, rank, m) for rank in range(shop.ranks)]
    place = {stage: at for own in shop.own for at, stage in enumerate(own)}
    events = [(0.0, rank) for rank in range(shop.ranks)]
    push, pop = heapq.heappush, heapq.heappop

    # Closures, since local names are what Python reads fastest.
    def choose(rank: int, now: float, waits: bool) -> int:
        """The section to start, or -1 to wait (then the rank's next event is set, where it is known)."""
        now_too, soon = now + tick, inf
        ready: list[tuple[float, int]] = []
        coming: list[tuple[float, float]] = []
        for section, base, kind, at, hold in heads[rank]:
            j = following[section]
            if j >= m or (kind == 2 and following[section - 1] <= j):
                continue
            value = base + j
            if missing[value]:
                coming.append((due[value], now + lead[section]))
            elif kind == 0 and not _has_room(shop, rank, at, hold, live[rank], held[rank], most[rank]):
                continue
            elif (comes := arrival[value]) > now_too:
                coming.append((due[value], comes))
                if comes < soon:
                    soon = comes
            else:
                ready.append((due[value], section))
        if len(ready) > 1:
            ready.sort()
        for key, section in ready:
            until = now + seconds[section] * patience[section % 3] - tick
            if waits:
                for other, comes in coming:
                    if comes < until and other < key:
                        break
                else:
                    return section
            else:
                return section
        if soon < inf:
            push(events, (soon, rank))
        return -1

    def start(rank: int, section: int, now: float) -> None:
        j = following[section]
        following[section] = j + 1
        order[rank].append(section * m + j)
        end = free[rank] = now + seconds[section]
        stage, kind = divmod(section, 3)
        if kind == 0:
            live[rank] += shop.hold[stage]
            held[rank][place[stage]] += shop.hold[stage]
        elif kind == 1:
            live[rank] -= shop.hold[stage] - shop.kept[stage]
            held[rank][place[stage]] -= shop.hold[stage]
        else:
            live[rank] -= shop.kept[stage]
        push(events, (end, rank))
        for target, delay in feeds[section]:
            value = target * m + j
            missing[value] -= 1
            if end + delay > arrival[value]:
                arrival[value] = end + delay
            other = home[target]
            if other != rank and not missing[value] and free[other] <= now + tick:
                push(events, (arrival[value], other))

    now, waits, left = 0.0, True, len(missing)
    while left:
        if not events:
            # All ranks wait for what is due earlier and has no memory: let go what is there.
            if not waits:
                raise ScheduleError("no op can run: the edges between the sections form a cycle")
            waits = False
            events.extend(sorted((max(now, free[rank]), rank) for rank in range(shop.ranks)))
        now, rank = pop(events)
        if free[rank] <= now + tick and (section := choose(rank, now, waits)) >= 0:
            start(rank, section, now)
            left -= 1
            waits = True
    return order


def _heads(shop: Shop, rank: int, microbatches: int) -> list[tuple[int, int, int, int, float]]:
    """A rank's sections: section, its first op, kind, position of the stage on the rank, what an F needs."""
    return [
        (3 * stage + kind, (3 * stage + kind) * microbatches, kind, at, shop.hold[stage])
        for at, stage in enumerate(shop.own[rank])
        for kind in range(3)
    ]


def _has_room(
    shop: Shop, rank: int, at: int, hold: float, live: float, held: Sequence[float], limit: float
) -> bool:
    """May an F of the rank's stage number ``at`` start?  See above for the second condition."""
    if live + hold > limit:
        return False
    own = shop.own[rank]
    needed = hold + sum(held[: at + 1])
    for later in range(at + 1, len(own)):
        one = shop.hold[own[later]]
        if needed + one > limit:
            return False
        needed += max(held[later], one)
    return True
