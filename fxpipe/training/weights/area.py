"""Areas of tensors, as the files of checkpoints hold one each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch


@dataclass(frozen=True)
class Area:
    """The elements from ``begin`` on, ``shape`` of them."""

    begin: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def of(place: Sequence[slice]) -> Area:
        return Area(tuple(s.start for s in place), tuple(s.stop - s.start for s in place))

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(b + n for b, n in zip(self.begin, self.shape, strict=True))

    def common(self, other: Area) -> Area | None:
        """The area that two have in common, if any."""
        place = tuple(map(slice, map(max, self.begin, other.begin), map(min, self.end, other.end)))
        return Area.of(place) if all(s.start < s.stop for s in place) else None

    def within(self, origin: Sequence[int]) -> tuple[slice, ...]:
        """The place of the area, counted from a corner on."""
        return tuple(slice(b - o, b - o + n) for b, n, o in zip(self.begin, self.shape, origin, strict=True))


@dataclass(frozen=True)
class InFile:
    """An area in a file of a directory."""

    area: Area
    file: str


_Chunk = TypeVar("_Chunk", bound=InFile)


@dataclass(frozen=True)
class Stored(Generic[_Chunk]):
    """A tensor in files.  ``chunks``: each element is in one of them."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[_Chunk, ...]

    def parts(self, wanted: Area) -> Iterator[tuple[_Chunk, Area]]:
        """The chunks that have something of an area, each with that."""
        for chunk in self.chunks:
            if (common := wanted.common(chunk.area)) is not None:
                yield chunk, common


def unlike_whole(shape: tuple[int, ...], areas: Sequence[Area]) -> str:
    """Why areas do not have each element of a tensor once, as text; empty where they do."""
    for area in areas:
        inside = len(area.begin) == len(area.shape) == len(shape)
        if not inside or any(end > n for end, n in zip(area.end, shape, strict=True)):
            return f"one from {area.begin}, of {area.shape}, is beyond its shape {shape}"
    missing = math.prod(shape) - sum(math.prod(area.shape) for area in areas)
    if missing > 0:
        return f"it lacks {missing} of the {math.prod(shape)} elements"
    # Along the dimension with the most cuts few areas are side by side.
    dims = sorted(range(len(shape)), key=lambda d: -len({area.begin[d] for area in areas}))[:1]
    beside: list[Area] = []
    for area in sorted(areas, key=lambda area: [area.begin[d] for d in dims]):
        beside = [other for other in beside if all(other.end[d] > area.begin[d] for d in dims)]
        for other in beside:
            if area.common(other) is not None:
                return f"there are two parts of it that overlap, from {other.begin} and from {area.begin}"
        beside.append(area)
    return ""
