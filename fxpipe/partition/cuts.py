"""Cuts a chain of costs into contiguous stages, by dynamic programming.

First the smallest possible largest stage is found; then, among all partitions whose largest stage is
within ``SLACK`` of it, the one whose cuts move the fewest bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from fxpipe.errors import PartitionError

SLACK = 0.02


def choose_cuts(
    seconds: Sequence[float], bytes: Sequence[float], stages: int, slowness: Sequence[float] = ()
) -> tuple[int, ...]:
    """Return the positions (ascending) after which to cut a chain into ``stages`` parts.

    seconds: cost of each position, all phases together.
    bytes: sent across a cut after each position; ``inf`` where no cut may be.
    slowness: per stage, what its costs are to be multiplied by; by default all are alike.
    Raises PartitionError if there are fewer places to cut than needed.
    """
    places = [i for i, b in enumerate(bytes[:-1]) if b != float("inf")]
    if len(places) < stages - 1:
        raise PartitionError(
            f"The model can be cut into {len(places) + 1} stages at most, and {stages} are asked for. "
            "Use fewer ranks or fewer stages per rank."
        )
    if stages == 1:
        return ()
    total = np.concatenate([[0.0], np.cumsum(seconds)])
    # block k lies between place k-1 and place k; ends[k] is the cost up to and with block k
    ends = np.array([total[i + 1] for i in places] + [total[-1]])
    speeds = 1 / np.array(slowness or [1.0] * stages)
    limits = _smallest_maximum(ends, speeds) * (1 + SLACK) * speeds
    weights = [float(bytes[i]) for i in places] + [0.0]
    return tuple(places[k] for k in _lightest(ends, weights, limits.tolist()))


def _smallest_maximum(ends: np.ndarray, speeds: np.ndarray) -> float:
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


def _suffices(ends: np.ndarray, limits: np.ndarray) -> bool:
    """Whether parts of at most these costs, each as large as it can be, take all blocks and none is empty."""
    last = -1  # the last block that is taken
    for left, limit in zip(range(len(limits) - 1, -1, -1), limits, strict=True):
        start = float(ends[last]) if last >= 0 else 0.0
        fits = int(np.searchsorted(ends, start + float(limit) * (1 + 1e-12), side="right")) - 1
        if fits <= last:
            return False
        last = min(fits, len(ends) - 1 - left)  # a block for each of the parts that are left
    return last == len(ends) - 1


def _lightest(ends: np.ndarray, weights: list[float], limits: Sequence[float]) -> list[int]:
    """The block indices after which to cut: minimum total weight, no empty part, all within ``limits``."""
    count, stages = len(ends), len(limits)
    best = [0.0 if e <= limits[0] else float("inf") for e in ends]  # one part that ends with block k
    back: list[list[int]] = []
    for limit in limits[1:]:
        nxt, came = [float("inf")] * count, [-1] * count
        window: deque[int] = deque()  # candidates j < k for the cut before, lightest first
        for k in range(1, count):
            cost = best[k - 1] + weights[k - 1]
            while window and best[window[-1]] + weights[window[-1]] >= cost:
                window.pop()
            window.append(k - 1)
            while window and ends[k] - ends[window[0]] > limit:
                window.popleft()
            if window:
                nxt[k] = best[window[0]] + weights[window[0]]
                came[k] = window[0]
        best = nxt
        back.append(came)
    if best[-1] == float("inf"):
        raise PartitionError(
            f"The model has {count} pieces between places to cut, too uneven to give each of {stages} "
            "stages one. Use fewer ranks or fewer stages per rank."
        )
    cuts, k = [], count - 1
    for came in reversed(back):
        k = came[k]
        cuts.append(k)
    return cuts[::-1]
