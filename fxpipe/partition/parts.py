"""Cuts stages into parts that follow each other on their rank: into a number of them, or between the begin
and the end of each exchange between lanes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import Literal

from fxpipe.errors import PartitionError
from fxpipe.partition.chain import Chain
from fxpipe.partition.cuts import choose_cuts

EXCHANGES: Literal["exchanges"] = "exchanges"
"""As many parts as exchanges make."""

PartsOfStage = int | Literal["exchanges"]

_MOST = 0.98  # of the bytes of all exchanges: for those that make up the rest no stage is cut


def inner_cuts(chain: Chain, cuts: Sequence[int], parts: PartsOfStage) -> tuple[int, ...]:
    """The positions behind which stages are cut into parts, ascending.  cuts: between the stages.

    Raises PartitionError where a stage has fewer places to cut than parts.
    """
    allowed = chain.inside
    stages = [*pairwise((-1, *cuts, len(allowed) - 1))]
    if parts != EXCHANGES:
        inner: list[int] = []
        for number, (before, last) in enumerate(stages):
            part = slice(before + 1, last + 1)
            try:
                inner += (before + 1 + k for k in choose_cuts(chain.seconds[part], allowed[part], parts))
            except PartitionError as error:
                raise PartitionError(
                    f"Stage {number} cannot be cut into {parts} parts: it has too few places, or pieces too "
                    "uneven. Take fewer parts."
                ) from error
        return tuple(inner)
    sizes = sorted(chain.exchanges.values(), reverse=True)
    enough = _MOST * sum(sizes)
    least = next((size for size, so_far in zip(sizes, accumulate(sizes), strict=True) if so_far >= enough), 0)
    wanted = sorted((end, begin) for (begin, end), size in chain.exchanges.items() if size >= least)
    chosen: list[int] = []

    def divided(at: int) -> tuple[int, int]:
        # One that is not would wait for those before it, which share its link.
        return sum(begin <= at <= end for begin, end in chain.exchanges), at

    for end, begin in wanted:  # by their ends, as the last place that divides one is the first for the next
        if chosen and chosen[-1] >= begin:
            continue
        places = [at for at in range(begin, end + 1) if allowed[at] < inf and at not in cuts]
        if places:
            chosen.append(max(places, key=divided))
    return tuple(chosen)


def parts_of(cuts: Sequence[int], inner: Collection[int]) -> tuple[int, ...]:
    """The number of parts of each stage.  cuts: between the stages; inner: the positions of other cuts."""
    ends = [bisect_left([*cuts], at) for at in inner]
    return tuple(1 + ends.count(stage) for stage in range(len(cuts) + 1))
