"""What a step of samples of many lengths takes: padded, or packed into microbatches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fxpipe.cost.batch_order import BatchPlanner, filled
from fxpipe.errors import ScheduleError, SizeError
from fxpipe.plan.step import NamedLength
from fxpipe.schedule.simulation.timeline import Timeline

#: Of the longest length: what samples are padded to, and to which they are packed where nobody says.
BUCKETS, PACKED = (16, 8, 4, 2, 1), (4, 2, 1)
#: The share of a step below which more memory makes it no faster.
_GAIN = 0.01


Row = Sequence[int]
"""The lengths of the documents of a row: one where it is padded."""


class Microbatch(NamedTuple):
    """``rows``: of each replica.  ``share``: of what attention to all tokens computes, that of documents
    (``BatchPlanner.costs``)."""

    rows: int
    length: int
    share: float


@dataclass(frozen=True)
class Way:
    """A way to put samples into microbatches.

    ``name``: "packed to 2048".  ``tokens``: to which samples are packed; None where they are padded.
    ``steps``: the microbatches of each.  ``places``: how many tokens these have in all their rows.
    ``seconds``: of all steps together; None where one is too long for memory.
    ``limit``: what keeps the step from being shorter: the memory for activations, the longest sample, or the
    tokens of a microbatch.
    """

    name: str
    tokens: int | None
    steps: tuple[tuple[Microbatch, ...], ...]
    places: int
    seconds: float | None
    limit: str


@dataclass(frozen=True, eq=False)
class Packer:
    """The steps of samples on a pipeline.

    ``length``: the dimension that samples have lengths in.  ``rows``: of a microbatch.  ``replicas``: which
    run microbatches of the same lengths.  ``leading``: the name of the rows, if there may be others.
    """

    planner: BatchPlanner
    length: NamedLength
    rows: int
    replicas: int = 1
    leading: str | None = None

    def ways(self, steps: Sequence[Sequence[int]], tokens: Sequence[int] = ()) -> list[Way]:
        """steps: the lengths of the samples of each.  tokens: how many to pack to.

        Raises SizeError for a sample that is longer than the example.
        """
        most = self.length.example
        if (longest := max(map(max, steps))) > most:
            raise SizeError(
                f"A sample has {longest} tokens, and the example {most}: cut it, or leave it out."
            )
        buckets = [most // part for part in BUCKETS]
        padded = {
            "padded to the longest": [[[max(step)]] * len(step) for step in steps],
            "padded to buckets": [[[min(b for b in buckets if b >= n)] for n in step] for step in steps],
        }
        ways = [self._way(name, None, rows, "longest sample") for name, rows in padded.items()]
        if self.leading is not None:
            alone = ([[n] for n in step] for step in steps)
            ways.append(self._way("rows by length", None, alone, "longest sample", by_length=True))
        for number in sorted({*tokens} or {max(1, most // part) for part in PACKED}):
            packed = [[[step[k] for k in place] for place in filled(step, number)] for step in steps]
            limit = "tokens" if longest <= number else "longest sample"
            ways.append(self._way(f"packed to {number}", number, packed, limit))
        return ways

    def _way(
        self,
        name: str,
        tokens: int | None,
        steps: Iterable[Sequence[Row]],
        limit: str,
        by_length: bool = False,
    ) -> Way:
        """steps: the rows of each.  by_length: put as many short rows into a microbatch as it has tokens."""
        made = tuple(self._microbatches(rows, by_length) for rows in steps)
        places = sum(each.rows * each.length for step in made for each in step) * self.replicas
        try:
            seconds = self._seconds(self.planner, made)
        except ScheduleError:
            return Way(name, tokens, made, places, None, "memory")
        # A search for each: what one finds with less memory, the other may miss.
        if self._seconds(self.planner.without_limits, made) < (1 - _GAIN) * seconds:
            limit = "memory"
        return Way(name, tokens, made, places, seconds, limit)

    def _microbatches(self, rows: Sequence[Row], by_length: bool) -> tuple[Microbatch, ...]:
        """Each has rows of about equal lengths, of all replicas."""
        ordered, made, k = sorted(rows, key=sum, reverse=True), list[Microbatch](), 0
        while k < len(ordered):
            length = self._padded(sum(ordered[k]))
            number = self.rows * self.length.example // length if by_length else self.rows
            # Of what is left a microbatch has no more than it needs.
            number = min(number, -(-(len(ordered) - k) // self.replicas)) if by_length else number
            made.append(self._microbatch(ordered[k : k + number * self.replicas], number, length))
            k += number * self.replicas
        return tuple(made)

    def _padded(self, tokens: int) -> int:
        step = self.length.step
        return max(self.length.least, -(-tokens // step) * step)

    def _microbatch(self, rows: Sequence[Row], number: int, length: int) -> Microbatch:
        squares = sum(n * n for row in rows for n in row) / self.replicas
        return Microbatch(number, length, min(1.0, squares / (number * length) ** 2))

    def _seconds(self, planner: BatchPlanner, steps: Sequence[Sequence[Microbatch]]) -> float:
        return sum(self.timeline(planner, each).seconds for each in steps)

    def timeline(self, planner: BatchPlanner, step: Sequence[Microbatch]) -> Timeline:
        return planner.timeline([*map(self.lengths, step)], [each.share for each in step])

    def lengths(self, microbatch: Microbatch) -> dict[str, int]:
        """The lengths of the sample, by name."""
        rows = {} if self.leading is None else {self.leading: microbatch.rows}
        return {**rows, self.length.name: microbatch.length}
