"""The result of a check: what was proved of each rank, and what a program does otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fxpipe.errors import number_of
from fxpipe.schedule.units import bytes_text

ORDER = "order"
"""The cause of what an op that runs in another's place, or not at all, may have led to."""
LAYOUT, NAME = "layout", "name"
"""What causes begin with, a name behind it: of a message's layout in a program's table, and of a variable
that is not there."""


class Line(NamedTuple):
    """A line of a rank's program; 0 for the program as a whole."""

    rank: int
    number: int

    def __str__(self) -> str:
        return f"rank{self.rank}.py:{self.number}" if self.number else f"rank{self.rank}.py"


def differs_at(line: Line) -> str:
    """The cause of what follows from a value that the captured step does not have."""
    return f"differs at {line}"


def named(microbatches: Sequence[int]) -> str:
    """Name microbatches in messages: "microbatch 3", "microbatches 1, 2"."""
    shown = ", ".join(map(str, microbatches[:8])) + (", …" if len(microbatches) > 8 else "")
    return f"microbatch{'es' if len(microbatches) > 1 else ''} {shown}"


@dataclass(frozen=True, order=True)
class Problem:
    """``text``: what the program does at that line, and what the captured step does.  ``cause``: problems of
    one cause are told as one (``causes.py``); "" for none that others have, too."""

    rank: int
    line: int
    text: str
    # Not compared: one text at one line is one problem, whatever led to it.
    cause: str = field(default="", compare=False)

    @staticmethod
    def at(line: Line | None, text: str, cause: str = "") -> Problem:
        return Problem(*(line or Line(0, 0)), text, cause)

    def __str__(self) -> str:
        return f"{Line(self.rank, self.line)}: {self.text}"


@dataclass(frozen=True)
class RankProof:
    """What one rank's program was found to do.

    ``ops``: distinct ops on terms.  ``calls``: of its sections.  ``messages``: sent.  ``peak_bytes``: the
    most that it holds between two ops; ``predicted_bytes``: by the plan.
    """

    ops: int
    calls: int
    messages: int
    peak_bytes: int
    predicted_bytes: int


@dataclass(frozen=True)
class Certificate:
    """``ranks``: one entry each.  ``problems``: empty if the programs are the captured step.  ``otherwise``:
    where they hold more memory than the plan has, or run in another order, which changes no result.

    ``split``: whether the step was taken with its vocabulary layers split, which is not proved here.
    ``parts``: in how many parts of the tokens output layers are, which is equal for real numbers.
    ``lengths``: of microbatches, as text, at which the programs were checked, where they take several.
    """

    microbatches: int
    values: int
    gradients: int
    buffers: int
    outputs: int
    ranks: tuple[RankProof, ...]
    problems: tuple[Problem, ...]
    split: bool = False
    parts: int = 1
    otherwise: tuple[Problem, ...] = ()
    lengths: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        return not self.problems

    def at_lengths(self, lengths: Mapping[str, int], proved: Certificate) -> Certificate:
        """This certificate and that of the same programs for microbatches of other lengths."""
        text = lengths_text(lengths)
        problems = (replace(each, text=f"at {text}: {each.text}") for each in proved.problems)
        return replace(self, lengths=(*self.lengths, text), problems=(*self.problems, *problems))

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def lengths_text(lengths: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {length}" for name, length in lengths.items())


class Rejected(Exception):
    """Ends the check: a program does what no runtime would."""

    def __init__(self, line: Line, text: str, cause: str = "") -> None:
        super().__init__(text)
        self.problem = Problem(line.rank, line.number, text, cause)


def _lines(certificate: Certificate) -> list[str]:
    if certificate.problems:
        number = number_of(len(certificate.problems), "problem")
        return [
            f"The programs are not proved to be the captured step: {number}",
            *map(str, certificate.problems),
        ]
    lines = [
        "The programs of all ranks compute the captured step: the loss, "
        f"{number_of(certificate.gradients, 'gradient')}, {number_of(certificate.buffers, 'buffer')} and "
        f"{number_of(certificate.outputs, 'output')}, once for each of "
        f"{number_of(certificate.microbatches, 'microbatch')} ({number_of(certificate.values, 'value')})."
    ]
    if certificate.lengths:
        lines.append(f"Checked for microbatches of {'; '.join(certificate.lengths)}.")
    for rank, proof in enumerate(certificate.ranks):
        lines.append(
            f"rank {rank}: {number_of(proof.ops, 'op')}, {number_of(proof.calls, 'call')} of sections, "
            f"{number_of(proof.messages, 'tensor')} sent; "
            f"holds at most {bytes_text(proof.peak_bytes)} between ops, "
            f"of {bytes_text(proof.predicted_bytes)} predicted"
        )
    if certificate.otherwise:
        lines.append("Otherwise than the plan; sums in another order may round differently:")
        lines += map(str, certificate.otherwise)
    if certificate.parts > 1:
        parts = f"Output layers are computed in {certificate.parts} parts of the tokens"
        lines.append(f"{parts}: equal for real numbers, sums over the tokens may round differently.")
    if certificate.split:
        lines.append("Taken as given: the split of the vocabulary layers (docs/certificate.md).")
    return lines
