"""Cuts a chain of costs into contiguous stages, by dynamic programming: balance against messages.

First the smallest possible largest stage is found; then, for each share by which the largest may exceed it,
the cuts whose messages cost the least.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fxpipe.errors import PartitionError

_Array = np.ndarray


def lightest_cuts(
    seconds: Sequence[float],
    weights: Sequence[float],
    stages: int,
    slacks: Sequence[float],
    slowness: Sequence[float] = (),
) -> list[tuple[int, ...]]:
    """Return for each of ``slacks`` the positions (ascending) after which to cut a chain into ``stages``
    parts: the cuts of least total weight whose largest part exceeds the smallest possible one by at most that
    share.

    seconds: cost of each position, all phases together.
    weights: of a cut after each position; ``inf`` where no cut may be.
    slowness: per stage, what its costs are to be multiplied by; by default all are alike.
    Raises PartitionError if there are fewer places to cut than needed.
    """
    places = [i for i, weight in enumerate(weights[:-1]) if weight != np.inf]
    if len(places) < stages - 1:
        raise PartitionError(
            f"The model can be cut into {len(places) + 1} stages at most, and {stages} are asked for. "
            "Use fewer ranks or fewer stages per rank."
        )
    if stages == 1:
        return [()] * len(slacks)
    total = np.cumsum(seconds)
    # block k lies between place k-1 and place k; ends[k] is the cost up to and with block k
    ends = total[[*places, len(total) - 1]]
    speeds = 1 / np.array(slowness or [1.0] * stages)
    smallest = _smallest_maximum(ends, speeds)
    own = np.array([weights[i] for i in places])
    limits = [smallest * (1 + slack) * (1 + 1e-9) * speeds for slack in slacks]
    return [tuple(places[k] for k in _lightest(ends, own, limit)) for limit in limits]


def _smallest_maximum(ends: _Array, speeds: _Array) -> float:
    """The smallest possible time of the slowest part (bisection)."""
    low, high = float(ends[-1] / speeds.sum()), float(ends[-1] / speeds.min())
    for _ in range(60):
        middle = (low + high) / 2
        if _suffices(ends, middle * speeds):
            high = middle
        else:
            low = middle
        if high - low <= 1e-6 * high:
            break
    return high


def _suffices(ends: _Array, limits: _Array) -> bool:
    """Whether parts of at most these costs, each as large as it can be, take all blocks and none is empty."""
    last = -1  # the last block that is taken
    for left, limit in zip(range(len(limits) - 1, -1, -1), limits, strict=True):
        start = float(ends[last]) if last >= 0 else 0.0
        fits = int(np.searchsorted(ends, start + float(limit) * (1 + 1e-12), side="right")) - 1
        if fits <= last:
            return False
        last = min(fits, len(ends) - 1 - left)  # a block for each of the parts that are left
    return last == len(ends) - 1


def _lightest(ends: _Array, weights: _Array, limits: _Array) -> list[int]:
    """The block indices after which to cut: minimum total weight, no empty part, all within ``limits``."""
    blocks = np.arange(len(ends))
    best = np.where(ends <= limits[0], 0.0, np.inf)  # of the parts so far, if the last ends with block k
    steps: list[tuple[_Array, _Array]] = []
    for limit in limits[1:]:
        cut = best[:-1] + weights  # the same, and a cut behind block k
        first = np.searchsorted(ends, ends - limit)  # of the blocks behind which the part may begin
        steps.append((cut, first))
        best = _window_minima(cut, first, blocks)
    if best[-1] == np.inf:
        raise PartitionError(
            f"The model has {len(ends)} pieces between places to cut, too uneven to give each of "
            f"{len(limits)} stages one. Use fewer ranks or fewer stages per rank."
        )
    cuts, k = [], len(ends) - 1
    for cut, first in reversed(steps):
        k = int(first[k] + cut[first[k] : k].argmin())
        cuts.append(k)
    return cuts[::-1]


def _window_minima(values: _Array, begins: _Array, ends: _Array) -> _Array:
    """The minimum of ``values[begin:end]`` for each begin and end; inf where there is none.

    The minima of all windows of 1, 2, 4, … values are found first: any window is two of them.
    """
    found = np.full(len(ends), np.inf)
    lengths, width = ends - begins, 1
    while len(values):
        which = (lengths >= width) & (lengths < 2 * width)
        found[which] = np.minimum(values[begins[which]], values[ends[which] - width])
        values, width = np.minimum(values[:-width], values[width:]), 2 * width
    return found
