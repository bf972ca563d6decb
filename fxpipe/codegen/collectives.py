"""Finds the edges of vocabulary stages that can be sent as collectives."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, groupby

from fxpipe.ir.sections import SectionEdge
from fxpipe.schedule.lowering.instructions import Collective, CollectiveKind
from fxpipe.schedule.ops import Color, Schedule


def collectives(edges: tuple[SectionEdge, ...], schedule: Schedule) -> tuple[Collective, ...]:
    """The collectives of a schedule: edges to a vocabulary stage on every rank, from one on every rank, or
    both.  The values of other edges are messages of their own."""
    if schedule.vocabulary is None:
        return ()
    vocabulary = frozenset(stage for stage in range(schedule.stages) if schedule.is_vocabulary(stage))
    numbers = count()
    return tuple(
        Collective(kind, next(numbers), sources, targets)
        for kind, sources, targets in _between(edges, schedule.placement, vocabulary)
    )


def _between(
    edges: tuple[SectionEdge, ...], placement: tuple[int, ...], vocabulary: frozenset[int]
) -> Iterator[tuple[CollectiveKind, tuple[Color, ...], tuple[Color, ...]]]:
    everyone = list(range(max(placement) + 1))
    if len(everyone) == 1:
        return

    def on_all_ranks(colors: tuple[Color, ...]) -> bool:
        return [placement[color.stage] for color in colors] == everyone

    spread = [e for e in edges if e.source.stage not in vocabulary and e.target.stage in vocabulary]
    for source, group in _grouped(spread, by_source=True):
        targets = tuple(sorted(e.target for e in group))
        if on_all_ranks(targets) and len({e.names for e in group}) == 1:
            yield CollectiveKind.BROADCAST, (source,), targets
    gathered = [e for e in edges if e.source.stage in vocabulary and e.target.stage not in vocabulary]
    for target, group in _grouped(gathered, by_source=False):
        sources = tuple(sorted(e.source for e in group))
        if any(e.sums for e in group):
            whole = on_all_ranks(sources) and all(e.sums.keys() == {*e.names} for e in group)
            assert whole, "a sum is of parts of all ranks, which give nothing else"
            yield CollectiveKind.REDUCE, sources, (target,)
    among = [e for e in edges if e.source.stage in vocabulary and e.target.stage in vocabulary]
    sources = tuple(sorted({e.source for e in among}))
    targets = tuple(sorted({e.target for e in among}))
    pairs = len(everyone) * (len(everyone) - 1)
    if on_all_ranks(sources) and on_all_ranks(targets) and len(among) == pairs:
        yield CollectiveKind.ALL_GATHER, sources, targets


def _grouped(edges: list[SectionEdge], *, by_source: bool) -> list[tuple[Color, list[SectionEdge]]]:
    def end(edge: SectionEdge) -> Color:
        return edge.source if by_source else edge.target

    def key(edge: SectionEdge) -> tuple[Color, str]:
        other = edge.target if by_source else edge.source
        return end(edge), other.phase

    return [(k[0], list(group)) for k, group in groupby(sorted(edges, key=key), key)]
