"""Finds the wait of a rank at which another rank has certainly taken a message that the rank sent.

A message that arrives proves that its sender has come as far as its send, and so has every message that the
sender had waited for before.  By vector clocks over the waits of all ranks each sent message gets the first
wait that proves its arrival.  There its memory can be used again, without a wait for the other rank.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Literal

Key = tuple[int, ...]
"""A tensor of a message, (source, target, number), or a collective, (group, number)."""
Event = tuple[Literal["give", "keep", "take"], tuple[Key, ...]]
"""What a rank does with tensors, in the order of its program: it starts to send them, and keeps them alive
until they are taken or not (``keep``, ``give``), or waits for them."""

Releases = Sequence[Sequence[int]]
"""For each wait of a rank the messages, of those that it keeps, that are certainly taken then."""


def as_bytes(events: Sequence[Event] | None) -> bytes:
    """Events for other ranks; ``events_from`` reads them."""
    return json.dumps(events).encode()


def events_from(data: bytes) -> list[Event] | None:
    events = json.loads(data)
    return events and [(verb, tuple(map(tuple, keys))) for verb, keys in events]


def releases(ranks: Sequence[Sequence[Event]]) -> list[list[list[int]]]:
    """The releases of each rank.  What no wait proves to be taken is kept until the end of the step."""
    givers, takers = _partners(ranks)
    times_given: Counter[Key] = Counter()
    # What the arrival of a tensor proves: the clocks of those that gave it, when they did.
    proof: defaultdict[Key, list[int]] = defaultdict(lambda: [0] * len(ranks))
    clocks = [[0] * len(ranks) for _ in ranks]  # per rank the number of waits of each that are over
    # Per rank, by the number of a kept message: the waits (rank, number) that take it.
    open_sends: list[dict[int, list[tuple[int, int]]]] = [{} for _ in ranks]
    numbers, at, released = [0] * len(ranks), [0] * len(ranks), [list[list[int]]() for _ in ranks]
    # Each rank runs as far as it can in turn: the clocks of its waits are the same in every order.
    moves = True
    while moves:
        moves = False
        for rank, events in enumerate(ranks):
            clock = clocks[rank]
            while at[rank] < len(events):
                verb, keys = events[at[rank]]
                if verb == "take":
                    if any(times_given[key] < givers[key] for key in keys):
                        break  # the next rank goes on: this wait is not over in any order
                    for key in keys:
                        clock[:] = map(max, clock, proof[key])
                    clock[rank] += 1
                    sends = open_sends[rank].items()
                    over = [n for n, needed in sends if all(clock[r] >= w for r, w in needed)]
                    for number in over:
                        del open_sends[rank][number]
                    released[rank].append(over)
                else:
                    for key in keys:
                        proof[key] = [*map(max, clock, proof[key])]
                        times_given[key] += 1
                    if verb == "keep":
                        needed = [taker for key in keys for taker in takers[key]]
                        if needed:
                            open_sends[rank][numbers[rank]] = needed
                        numbers[rank] += 1
                at[rank] += 1
                moves = True
    return released


def _partners(
    ranks: Sequence[Sequence[Event]],
) -> tuple[Counter[Key], defaultdict[Key, list[tuple[int, int]]]]:
    """The number of ranks that give each tensor, and those that take it, each with the number of its waits
    that are over then."""
    givers: Counter[Key] = Counter()
    takers: defaultdict[Key, list[tuple[int, int]]] = defaultdict(list)
    for rank, events in enumerate(ranks):
        waits = 0
        for verb, keys in events:
            waits += verb == "take"
            for key in keys:
                if verb == "take":
                    takers[key].append((rank, waits))
                else:
                    givers[key] += 1
    return givers, takers
