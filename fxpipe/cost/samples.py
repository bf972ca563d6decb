"""What a step of samples of many lengths takes: padded, or packed into microbatches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fxpipe.cost.batch_order import BatchPlanner, filled
from fxpipe.errors import ScheduleError, SizeError
from fxpipe.plan.step import NamedLength

#: Of the longest length: what samples are padded to, and to which they are packed where nobody says.
BUCKETS, PACKED = (16, 8, 4, 2, 1), (4, 2, 1)
#: The share of a step below which more memory makes it no faster.
_GAIN = 0.01


@dataclass(frozen=True)
class Way:
    """A way to put samples into microbatches.

    ``name``: "packed to 2048".  ``tokens``: to which samples are packed; None where they are padded.
    ``lengths``: of the microbatches of each step.  ``places``: how many tokens these have in all their rows.
    ``seconds``: of all steps together; None where one is too long for memory.
    ``limit``: what keeps the step from being shorter: the memory for activations, the longest sample, or the
    tokens of a microbatch.
    """

    name: str
    tokens: int | None
    lengths: tuple[tuple[int, ...], ...]
    places: int
    seconds: float | None
    limit: str


@dataclass(frozen=True, eq=False)
class Packer:
    """The steps of samples on a pipeline.

    ``length``: the dimension that samples have lengths in.  ``rows``: of a microbatch.  ``replicas``: which
    run microbatches of the same lengths.  ``tail``: seconds that their exchanges take behind the last op.
    """

    planner: BatchPlanner
    length: NamedLength
    rows: int
    replicas: int = 1
    tail: float = 0.0

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
            "padded to the longest": [[max(step)] * len(step) for step in steps],
            "padded to buckets": [[min(b for b in buckets if b >= n) for n in step] for step in steps],
        }
        ways = [self._way(name, None, rows, "longest sample") for name, rows in padded.items()]
        for number in sorted({*tokens} or {most // part for part in PACKED}):
            packed = [[sum(step[k] for k in place) for place in filled(step, number)] for step in steps]
            limit = "tokens" if longest <= number else "longest sample"
            ways.append(self._way(f"packed to {number}", number, packed, limit))
        return ways

    def _way(self, name: str, tokens: int | None, steps: Iterable[Sequence[int]], limit: str) -> Way:
        """steps: the lengths of the rows of each."""
        lengths = tuple(map(self._microbatches, steps))
        places = sum(map(sum, lengths)) * self.rows * self.replicas
        try:
            seconds = self._seconds(self.planner, lengths)
        except ScheduleError:
            return Way(name, tokens, lengths, places, None, "memory")
        # A search for each: what one finds with less memory, the other may miss.
        if self._seconds(self.planner.without_limits, lengths) < (1 - _GAIN) * seconds:
            limit = "memory"
        return Way(name, tokens, lengths, places, seconds, limit)

    def _microbatches(self, rows: Sequence[int]) -> tuple[int, ...]:
        """The lengths of microbatches, each with rows of about equal lengths of all replicas."""
        step, together = self.length.step, self.rows * self.replicas
        longest = sorted(rows, reverse=True)[::together]
        return tuple(max(self.length.least, -(-n // step) * step) for n in longest)

    def _seconds(self, planner: BatchPlanner, steps: Sequence[Sequence[int]]) -> float:
        name = self.length.name
        return sum(self.tail + planner.timeline([{name: n} for n in each]).seconds for each in steps)
