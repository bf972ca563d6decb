"""Finds the messages of vocabulary stages that can be sent as collectives."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, groupby

from fxpipe.ir.graph import Color
from fxpipe.ir.sections import Message
from fxpipe.schedule.lowering.lower import Collective, CollectiveKind


def collectives(
    messages: tuple[Message, ...], placement: tuple[int, ...], vocabulary: frozenset[int]
) -> tuple[Collective, ...]:
    """The collectives: messages to a vocabulary stage on every rank, from one on every rank, or both.  Other
    messages are sent one by one."""
    numbers = count()
    return tuple(
        Collective(kind, next(numbers), sources, targets)
        for kind, sources, targets in _found(messages, placement, vocabulary)
    )


def values(collective: Collective, messages: tuple[Message, ...]) -> tuple[tuple[str, ...], ...]:
    """Per source the names of the values that it sends."""
    given: dict[Color, tuple[str, ...]] = {}
    for message in messages:
        if message.source in collective.sources and message.target in collective.targets:
            given[message.source] = message.names
    return tuple(given[source] for source in collective.sources)


def _found(
    messages: tuple[Message, ...], placement: tuple[int, ...], vocabulary: frozenset[int]
) -> Iterator[tuple[CollectiveKind, tuple[Color, ...], tuple[Color, ...]]]:
    everyone = list(range(max(placement) + 1))
    if len(everyone) == 1:
        return

    def on_all_ranks(colors: tuple[Color, ...]) -> bool:
        return [placement[color.stage] for color in colors] == everyone

    spread = [m for m in messages if m.source.stage not in vocabulary and m.target.stage in vocabulary]
    for source, group in _grouped(spread, by_source=True):
        targets = tuple(sorted(m.target for m in group))
        if on_all_ranks(targets) and len({m.names for m in group}) == 1:
            yield CollectiveKind.BROADCAST, (source,), targets
    gathered = [m for m in messages if m.source.stage in vocabulary and m.target.stage not in vocabulary]
    for target, group in _grouped(gathered, by_source=False):
        sources = tuple(sorted(m.source for m in group))
        if on_all_ranks(sources) and len({len(m.names) for m in group}) == 1:
            yield CollectiveKind.GATHER, sources, (target,)
    among = [m for m in messages if m.source.stage in vocabulary and m.target.stage in vocabulary]
    sources = tuple(sorted({m.source for m in among}))
    targets = tuple(sorted({m.target for m in among}))
    pairs = len(everyone) * (len(everyone) - 1)
    if on_all_ranks(sources) and on_all_ranks(targets) and len(among) == pairs:
        yield CollectiveKind.ALL_GATHER, sources, targets


def _grouped(messages: list[Message], *, by_source: bool) -> list[tuple[Color, list[Message]]]:
    def end(message: Message) -> Color:
        return message.source if by_source else message.target

    def key(message: Message) -> tuple[Color, str]:
        other = message.target if by_source else message.source
        return end(message), other.phase

    return [(k[0], list(group)) for k, group in groupby(sorted(messages, key=key), key)]
