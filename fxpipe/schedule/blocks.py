"""The repeated block: when one microbatch's ops start if a microbatch starts every period (2405.15362).

This is modulo scheduling: on every rank no two ops may overlap modulo the period.  A beam search follows a
microbatch down its forwards and back up its backwards, with the real times; each op starts as early as its
rank has room, or later where that is the better fit, and what waits is weighed by the memory that it holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations

from fxpipe.schedule.shop import Shop

Slots = tuple[tuple[float, float], ...]
"""What is taken of a rank's period, sorted: (start modulo the period, seconds), …"""

_ROUNDING = 1e-7
_MOST_CHUNKS = 2  # with more the packing of a rank's ops takes too long to prove


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
    return _Beam(shop, period, waits, width).search()


def _chain(shop: Shop) -> tuple[int, ...]:
    """A microbatch's way: all F, then all B."""
    down = (3 * stage for stage in range(shop.stages))
    return (*down, *(3 * stage + 1 for stage in reversed(range(shop.stages))))


@dataclass(frozen=True, slots=True)
class _State:
    cost: float
    times: tuple[float, ...]  # along the chain
    slots: tuple[Slots, ...]  # per rank


class _Beam:
    def __init__(self, shop: Shop, period: float, waits: tuple[float, ...], width: int) -> None:
        self.shop, self.period, self.waits, self.width = shop, period, waits, width
        self.chain = _chain(shop)
        position = {section: k for k, section in enumerate(self.chain)}
        self.sources = [
            [(position[s], shop.seconds[s] + d) for s, d in shop.needs[section] if position.get(s, k) < k]
            for k, section in enumerate(self.chain)
        ]
        # What a wait before an op keeps in memory longer, over all ranks.
        last = len(self.chain) - 1
        self.weight = [
            sum(shop.hold[stage] for stage in range(shop.stages) if stage < k <= last - stage) + 1e-9
            for k in range(len(self.chain))
        ]
        # What else has to fit on the rank after an op, longest first.
        todo = [[shop.seconds[3 * stage + 2] for stage in own] for own in shop.own]
        self.rest: list[tuple[float, ...]] = [()] * len(self.chain)
        for k in reversed(range(len(self.chain))):
            rank = shop.rank[self.chain[k]]
            self.rest[k] = tuple(sorted(todo[rank], reverse=True))
            todo[rank].append(shop.seconds[self.chain[k]])

    def search(self) -> Block | None:
        states = [_State(0.0, (), ((),) * self.shop.ranks)]
        for k in range(len(self.chain)):
            following: dict[tuple[float, float, Slots], _State] = {}
            for state in states:
                self._extend(state, k, following)
            states = sorted(following.values(), key=lambda state: state.cost)[: self.width]
        for state in states:
            block = self._with_weights(state)
            if block is not None:
                return block
        return None

    def _extend(self, state: _State, k: int, following: dict[tuple[float, float, Slots], _State]) -> None:
        section, period, rest = self.chain[k], self.period, self.rest[k]
        rank, seconds = self.shop.rank[section], self.shop.seconds[section]
        ready = max((state.times[at] + after for at, after in self.sources[k]), default=0.0)
        if k:
            ready += self.waits[k * len(self.waits) // len(self.chain)]
        taken, found = state.slots[rank], 0
        for wait in _candidates(taken, ready % period, seconds, rest, period):
            slot = ((ready + wait) % period, seconds)
            if not _is_free(taken, slot, period):
                continue
            slots = tuple(sorted((*taken, slot)))
            if not _pack(_gaps(slots, period), rest):
                continue
            cost = state.cost + wait * self.weight[k]
            key = round(cost, 6), round(slot[0], 6), slots
            if key not in following:
                ranks = (*state.slots[:rank], slots, *state.slots[rank + 1 :])
                following[key] = _State(cost, (*state.times, ready + wait), ranks)
            found += 1
            if found == 4:
                break

    def _with_weights(self, state: _State) -> Block | None:
        """Each W into the first gap after its B that leaves room for the rank's others."""
        start = [0.0] * self.shop.sections
        for section, time in zip(self.chain, state.times, strict=True):
            start[section] = time
        for rank, own in enumerate(self.shop.own):
            best: dict[int, float] | None = None
            for stages in permutations(own):
                placed = self._place_weights(start, state.slots[rank], stages)
                if placed is not None and (best is None or sum(placed.values()) < sum(best.values())):
                    best = placed
            if best is None:
                return None
            for stage, time in best.items():
                start[3 * stage + 2] = time
        return Block(self.period, tuple(start))

    def _place_weights(
        self, start: list[float], slots: Slots, stages: tuple[int, ...]
    ) -> dict[int, float] | None:
        period, placed = self.period, dict[int, float]()
        for at, stage in enumerate(stages):
            section = 3 * stage + 2
            seconds = self.shop.seconds[section]
            ready = start[section - 1] + self.shop.seconds[section - 1]
            rest = tuple(self.shop.seconds[3 * other + 2] for other in stages[at + 1 :])
            for wait in _candidates(slots, ready % period, seconds, rest, period):
                slot = ((ready + wait) % period, seconds)
                if _is_free(slots, slot, period):
                    taken = tuple(sorted((*slots, slot)))
                    if _pack(_gaps(taken, period), rest):
                        slots, placed[stage] = taken, ready + wait
                        break
            else:
                return None
        return placed


def _candidates(
    slots: Slots, ready: float, seconds: float, rest: tuple[float, ...], period: float
) -> list[float]:
    """Waits after which an op would touch another, or leave room between for just one of the rest."""
    waits = {0.0}
    for start, length in slots:
        for room in (0.0, *set(rest)):
            for wait in ((start + length + room - ready) % period, (start - seconds - room - ready) % period):
                waits.add(wait if wait < period - _ROUNDING else 0.0)
    return sorted(waits)


def _is_free(slots: Slots, slot: tuple[float, float], period: float) -> bool:
    at, seconds = slot
    return all(
        (at - start) % period >= length - _ROUNDING and (start - at) % period >= seconds - _ROUNDING
        for start, length in slots
    )


def _gaps(slots: Slots, period: float) -> tuple[float, ...]:
    following = (*(start for start, _ in slots[1:]), slots[0][0] + period)
    return tuple(after - start - length for (start, length), after in zip(slots, following, strict=True))


def _pack(gaps: tuple[float, ...], items: tuple[float, ...]) -> bool:
    """Do the items, longest first, fit into the gaps?"""
    if not items:
        return True
    tried = set()
    for k, gap in enumerate(gaps):
        if gap >= items[0] - 1e-9 and round(gap, 9) not in tried:
            tried.add(round(gap, 9))
            if _pack((*gaps[:k], gap - items[0], *gaps[k + 1 :]), items[1:]):
                return True
    return False
