"""The variables of a program that is evaluated, and the lines that it has come to."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from fxpipe.certificate.problems import Line


class Unbound(NameError):
    """A variable without a value.  ``is_around``: whether the function around has it, or will."""

    def __init__(self, name: str, is_around: bool) -> None:
        super().__init__(f"the variable {name} has no value there", name=name)
        self.is_around = is_around


@dataclass(eq=False, repr=False, slots=True)
class Frame:
    """A function that runs, or the top level.  ``local``: the names that it assigns; ``around``: where it
    finds others.  ``line``: that runs."""

    name: str
    local: Collection[str]
    values: dict[str, object]
    around: Frame | None
    line: int = 0

    def lookup(self, name: str) -> object:
        frame: Frame | None = self
        while frame is not None:
            if name in frame.values:
                return frame.values[name]
            # As in Python, a name that a function assigns anywhere is its own, also before it has a value.
            if name in frame.local and frame.around is not None:
                raise Unbound(name, frame is not self)
            frame = frame.around
        raise Unbound(name, False)


@dataclass(eq=False, repr=False)
class Stack:
    """The functions of a rank's program that run, ``step`` first.  After an error they are those it left."""

    rank: int
    frames: list[Frame] = field(default_factory=list)

    def __call__(self) -> Line:
        """The line that runs."""
        return Line(self.rank, self.frames[-1].line if self.frames else 0)

    def of_step(self) -> Line:
        """The line of ``step`` that runs, which may call another function."""
        return Line(self.rank, self.frames[0].line if self.frames else 0)

    def lines(self) -> list[Line]:
        """The line of each function that runs."""
        return [Line(self.rank, frame.line) for frame in self.frames]
