"""The seconds of an op by its size, as measured: a line from each measured size to the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

from fxpipe.strict import Fits, NonNegative

MOST_POINTS = 64
Amount = Any  #: a number, or an expression of sympy's


def _ascends(points: tuple[tuple[float, float], ...]) -> bool:
    ascending = all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(points))
    return ascending and 1 <= len(points) <= MOST_POINTS


@dataclass(frozen=True)
class Curve:
    """Seconds by size.  ``points``: (FLOPs or bytes, seconds), both ascending.

    Below the first size an op takes the first one's seconds, and above the last size each further unit of
    size as long as between the last two.
    """

    points: Annotated[
        tuple[tuple[NonNegative, NonNegative], ...],
        Fits(_ascends, f"1 to {MOST_POINTS} sizes in order, none faster than a smaller one"),
    ]

    def seconds(self, size: Amount, largest: Callable[..., Amount] = max) -> Amount:
        """The seconds at a size.  size, largest: numbers, or sympy's expressions and Max."""
        seconds, slope = self.points[0][1], 0.0
        for (start, least), (end, most) in pairwise(self.points):
            steeper = (most - least) / (end - start)
            # A sum of ramps instead of cases, so that it is an expression of sympy's as well.
            seconds = seconds + (steeper - slope) * largest(0, size - start)
            slope = steeper
        return seconds
