"""Cuts a chain of costs into contiguous stages, by dynamic programming.

First the smallest possible largest stage is found; no message takes longer either, as each microbatch goes
through all stages and all links.  Then, among all partitions within ``SLACK`` of that time, the one whose
cuts move the fewest bytes, and of equal ones the most even: where an output layer is the largest stage, equal
layers have many such partitions, and a rank with more of them than others holds more memory.  Where ranks
have several stages, the largest rank can take the place of the largest stage: where one op, such as an output
layer, is larger than other stages, its rank gets less of these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from fxpipe.errors import PartitionError, number_of

SLACK = 0.02
_ROUNDS = 3  # more change nothing
_ROUNDING = 1e-12  # of sums in other orders
_PLACES = 256  # of cuts that are as light, between which the most even is chosen: more are left out


def choose_cuts(
    seconds: Sequence[float],
    bytes: Sequence[float],
    stages: int,
    slowness: Sequence[float] = (),
    ranks: Sequence[int] = (),
    messages: Sequence[float] = (),
) -> tuple[int, ...]:
    """Return the positions (ascending) after which to cut a chain into ``stages`` parts.

    seconds: cost of each position, all phases together.
    bytes: sent across a cut after each position; ``inf`` where no cut may be.
    slowness: per stage, what its costs are to be multiplied by; by default all are alike.
    ranks: of each stage, to balance these.
    messages: the seconds for which the bytes of each position are on a link; by default none.
    Raises PartitionError if there are fewer places to cut than needed.
    """
    places = [i for i, b in enumerate(bytes[:-1]) if b != float("inf")]
    if len(places) < stages - 1:
        raise PartitionError(
            f"The model can be cut into {number_of(len(places) + 1, 'stage')} at most, and {stages} are "
            "asked for. Use fewer ranks or fewer stages per rank."
        )
    if stages == 1:
        return ()
    total = np.concatenate([[0.0], np.cumsum(seconds)])
    # block k lies between place k-1 and place k; ends[k] is the cost up to and with block k
    ends = np.array([total[i + 1] for i in places] + [total[-1]])
    speeds = 1 / np.array(slowness or [1.0] * stages)
    alone = np.zeros(stages)
    sent = np.array([messages[i] if messages else 0.0 for i in places] + [0.0])
    low, high = ends[-1] / speeds.sum(), ends[-1] / speeds.min()
    short = sent <= (1 + SLACK) * _least(ends, speeds, alone, low, max(high, sent.max()), sent)
    ends, places = ends[short], [i for i, is_short in zip(places, short[:-1], strict=True) if is_short]
    # Where any message takes longer than stages do, these are balanced all the same.
    limits = (1 + SLACK) * _least(ends, speeds, alone, low, high) * speeds
    weights = [float(bytes[i]) for i in places] + [0.0]
    cuts = _lightest(ends, weights, limits, speeds, alone)
    if ranks:
        cuts = _balanced(ends, weights, speeds, cuts, np.array(ranks))
    return tuple(places[k] for k in cuts)


def _balanced(
    ends: np.ndarray, weights: list[float], speeds: np.ndarray, cuts: list[int], ranks: np.ndarray
) -> list[int]:
    """Move cuts such that the largest rank gets smaller: in turns those between stages of different ranks,
    as many as follow each other."""
    turns = np.flatnonzero(np.diff([-1, *_turns(ranks), -1]))
    for _ in range(_ROUNDS):
        for first, behind in pairwise(turns):
            bounds = [-1, *cuts, len(ends) - 1]
            begin, end = bounds[first], bounds[behind]
            work = ends[begin + 1 : end + 1] - (ends[begin] if begin >= 0 else 0.0)
            costs = np.diff([0.0, *ends[bounds[1:]]]) / speeds
            loads = np.bincount(ranks, costs)
            others = (loads[ranks] - costs)[first:behind]
            scale = speeds[first:behind]
            least = _least(work, scale, others, others.max(), loads.max())
            limits = (least * (1 + SLACK) - others) * scale
            inner = _lightest(work, [*weights[begin + 1 : end], 0.0], limits, scale, others)
            cuts[first : behind - 1] = [begin + 1 + k for k in inner]
    return cuts


def _turns(ranks: np.ndarray) -> list[int]:
    """Number the turn of each stage: a stage begins another one if it comes to a rank again."""
    numbers, seen = [0], {ranks[0]}
    for rank in ranks[1:]:
        numbers.append(numbers[-1] + (rank in seen))
        seen = {rank} if rank in seen else seen | {rank}
    return numbers


def _least(
    ends: np.ndarray,
    speeds: np.ndarray,
    others: np.ndarray,
    low: float,
    high: float,
    sent: np.ndarray | None = None,
) -> float:
    """The smallest time of the slowest rank or message, found between two times by bisection.

    others: of each part, the time that the other stages of its rank take.  sent: behind each block, the time
    of a message, if messages count.
    """
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        if _suffices(ends if sent is None else ends[sent <= middle], (middle - others) * speeds):
            high = middle
        else:
            low = middle
    return high


def _suffices(ends: np.ndarray, limits: np.ndarray) -> bool:
    """Whether parts of at most these costs, each as large as it can be, take all blocks and none is empty."""
    if len(ends) < len(limits):
        return False
    last = -1  # the last block that is taken
    for left, limit in zip(range(len(limits) - 1, -1, -1), limits, strict=True):
        start = float(ends[last]) if last >= 0 else 0.0
        fits = int(np.searchsorted(ends, start + float(limit) * (1 + 1e-12), side="right")) - 1
        if fits <= last:
            return False
        last = min(fits, len(ends) - 1 - left)  # a block for each of the parts that are left
    return last == len(ends) - 1


def _lightest(
    ends: np.ndarray, weights: list[float], limits: np.ndarray, speeds: np.ndarray, others: np.ndarray
) -> list[int]:
    """The block indices after which to cut: no empty part, all within ``limits``, the least total weight, and
    of these cuts the one whose ranks are the most even.

    others: of each part, the time that the other stages of its rank take.
    """
    count, stages = len(ends), len(limits)
    first = [0.0 if e <= limits[0] else float("inf") for e in ends]  # one part that ends with block k
    best = [first]
    for limit in limits[1:]:
        lighter, nxt = best[-1], [float("inf")] * count
        window: deque[int] = deque()  # candidates j < k for the cut before, lightest first
        for k in range(1, count):
            cost = lighter[k - 1] + weights[k - 1]
            while window and lighter[window[-1]] + weights[window[-1]] >= cost:
                window.pop()
            window.append(k - 1)
            while window and ends[k] - ends[window[0]] > limit:
                window.popleft()
            if window:
                nxt[k] = lighter[window[0]] + weights[window[0]]
        best.append(nxt)
    if best[-1][-1] == float("inf"):
        raise PartitionError(
            f"The model has {count} pieces between places to cut, too uneven to give each of {stages} "
            "stages one. Use fewer ranks or fewer stages per rank."
        )
    return _most_even(ends, np.array(weights), np.array(best), limits, speeds, others)


def _most_even(
    ends: np.ndarray,
    weights: np.ndarray,
    best: np.ndarray,
    limits: np.ndarray,
    speeds: np.ndarray,
    others: np.ndarray,
) -> list[int]:
    """Of the cuts of least weight the one with the least sum of squares of the times of ranks; the first
    ranks, which hold more microbatches than the last ones, count more.

    best: for each number of parts and each block that the last one ends with, the least weight.
    """
    blocks, back = np.arange(len(ends)), list[np.ndarray]()
    squares = np.where(blocks == len(ends) - 1, 0.0, np.inf)  # of the parts behind a cut after each block
    for part in range(len(limits) - 1, 0, -1):
        used = np.flatnonzero(squares < np.inf)  # such as one a layer
        used = used[:: -(-len(used) // _PLACES)]
        size = ends[used, None] - ends
        ties = best[part - 1] + weights <= best[part, used, None] * (1 + _ROUNDING)
        allowed = ties & (size <= limits[part]) & (blocks < used[:, None])
        counts = 2 - part / len(limits)
        sums = squares[used, None] + counts * (others[part] + size / speeds[part]) ** 2
        sums = np.where(allowed, sums, np.inf)
        back.append(used[sums.argmin(axis=0)])
        squares = sums.min(axis=0)
    cuts = [int((squares + 2 * (others[0] + ends / speeds[0]) ** 2).argmin())]
    for behind in reversed(back):
        cuts.append(int(behind[cuts[-1]]))
    return cuts[:-1]  # the last part ends with the chain
