"""A bucket's use: the ops of a rank that need its parameters, and those that add to its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from fxpipe.schedule.ops import Op


class BucketUse(NamedTuple):
    """The exchanges of a bucket with other replicas.  ``spans``: the first and the last op between which the
    parameters are needed of other replicas; none where each has all of them.  ``frees``: whether they are
    freed behind each span.  ``sums``: the ops behind which what was added to the gradients is summed over the
    replicas; none of frozen parameters.  ``of_lanes``: the arguments that name the lanes over which it is
    summed before; None if over none."""

    spans: tuple[tuple[Op, Op], ...]
    sums: tuple[Op, ...]
    frees: bool = False
    of_lanes: tuple[int, ...] | None = None


def once(first: Op | None, last: Op) -> BucketUse:
    """A bucket that is needed from its first op to the end of the step, and summed when it is complete.

    first: None where each replica has all parameters.
    """
    return BucketUse(() if first is None else ((first, last),), (last,))


def per_use(ops: Sequence[Op], uses: Callable[[Op], bool], adds: Callable[[Op], bool], last: Op) -> BucketUse:
    """A bucket that replicas have whole for the ops that use it alone: once for ops that follow each other.

    uses, adds: whether an op uses its parameters, and adds to its gradients.  last: the op behind which it is
        summed if none does.
    """
    sums = tuple(end for _, end in _runs(ops, adds))
    return BucketUse(tuple(_runs(ops, uses)), sums or (last,), frees=True)


class Asks:
    """The ops of a rank before which it asks other replicas for what later ops need.

    It asks before the ops that run on the stage ahead, as many as follow each other.  So two stages are there
    at a time, and what the next one needs has all the time of this one to come.
    """

    def __init__(self, ops: Sequence[Op]) -> None:
        self._ops = ops
        self._place = {op: position for position, op in enumerate(ops)}
        self._ahead = [0, 0][: len(ops)]  # of each position, where it is asked for
        for position in range(2, len(ops)):
            changes = ops[position - 1].stage != ops[position - 2].stage
            self._ahead.append(position - 1 if changes else self._ahead[-1])

    def of(self, use: BucketUse) -> list[tuple[Op, Op]]:
        """List for each span of a bucket, but one that begins with the step, the op before which it is asked
        for, and its first op.  What was freed is asked for behind the op that it was freed behind."""
        asks, free = list[tuple[Op, Op]](), 0
        for first, last in use.spans:
            if (place := self._place[first]) > 0:
                asks.append((self._ops[min(max(self._ahead[place], free), place)], first))
            free = self._place[last] + 1
        return asks


def _runs(ops: Sequence[Op], wanted: Callable[[Op], bool]) -> list[tuple[Op, Op]]:
    """The first and the last op of each run of wanted ones, with at most one other between two of them: what
    was freed behind one would be asked for again at once."""
    runs: list[tuple[Op, Op]] = []
    last = -3
    for position, op in enumerate(ops):
        if wanted(op):
            runs.append((runs.pop()[0], op) if position - last <= 2 else (op, op))
            last = position
    return runs
