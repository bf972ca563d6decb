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


def choose_cuts(seconds: Sequence[float], bytes: Sequence[float], stages: int) -> tuple[int, ...]:
    """Return the positions (ascending) after which to cut a chain into ``stages`` parts.

    seconds: cost of each position, all phases together.
    bytes: sent across a cut after each position; ``inf`` where no cut may be.
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
    limit = _smallest_maximum(ends, stages) * (1 + SLACK)
    weights = [float(bytes[i]) for i in places] + [0.0]
    return tuple(places[k] for k in _lightest(ends, weights, stages, limit))


def _smallest_maximum(ends: np.ndarray, stages: int) -> float:
    """The smallest possible cost of the largest part, for at most ``stages`` parts (bisection)."""
    blocks = np.diff(np.concatenate([[0.0], ends]))
    low, high = max(float(blocks.max()), float(ends[-1]) / stages), float(ends[-1])
    for _ in range(60):
        middle = (low + high) / 2
        if _parts_needed(ends, middle) <= stages:
            high = middle
        else:
            low = middle
        if high - low <= 1e-6 * high:
            break
    return high


def _parts_needed(ends: np.ndarray, limit: float) -> int:
    start, parts = 0.0, 0
    while start < ends[-1]:
        k = int(np.searchsorted(ends, start + limit * (1 + 1e-12), side="right")) - 1
        if k < 0 or ends[k] <= start:
            return len(ends) + 1
        start = float(ends[k])
        parts += 1
    return parts


def _lightest(ends: np.ndarray, weights: list[float], stages: int, limit: float) -> list[int]:
    """The block indices after which to cut: minimum total weight, no empty part, all within ``limit``."""
    count = len(ends)
    best = [0.0 if e <= limit else float("inf") for e in ends]  # one part that ends with block k
    back: list[list[int]] = []
    for _ in range(1, stages):
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
