"""Progress of long work as a bar, on a terminal only."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fxpipe.errors import printable

if TYPE_CHECKING:
    from rich.console import Console


def terminal() -> Console | None:
    """Standard error, if it is a terminal.  Else rich is not loaded, which takes longer than many a phase."""
    try:
        is_terminal = sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        is_terminal = False
    if not is_terminal and not {"FORCE_COLOR", "TTY_COMPATIBLE"} & os.environ.keys():
        return None
    from rich.console import Console

    console = Console(stderr=True, markup=False, emoji=False)
    return console if console.is_terminal else None


class Phases:
    """``with phases("capture"): …`` moves a bar through named phases; ``seconds`` keeps their times, without
    those of the phases within them."""

    def __init__(self, title: str, *, ends: bool = True):
        """The display ends with the last expected phase if ``ends``; else ``finish`` is called."""
        self._ends = ends
        console = terminal()
        self._bar = None if console is None else _Bar(title, console)
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._nested = 0.0  # seconds of the phases within the current one

    def expect(self, count: int) -> None:
        """Note that so many phases are still to come."""
        if self._bar is not None:
            self._bar.expect(count)

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        # Phases nest; each counts the time that is in no phase within it.
        before, outer, self._nested = time.perf_counter(), self._nested, 0.0
        try:
            with contextlib.nullcontext() if self._bar is None else self._bar.phase(phase):
                yield
        finally:  # also where it fails: of a candidate that cannot be cut the compiler goes on to the next
            passed = time.perf_counter() - before
            self.seconds[phase] += passed - self._nested
            self._nested = outer + passed
        if self._bar is not None and self._bar.is_advanced_to_end() and self._ends:
            self.finish("compiled")

    def finish(self, what: str) -> None:
        """All phases are over, also where more were expected."""
        if self._bar is not None:
            self._bar.finish(f"{what} in {sum(self.seconds.values()):.1f} s")


class _Bar:
    """The display of phases on a terminal."""

    def __init__(self, title: str, console: Console) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = TextColumn("{task.fields[title]}", markup=False), BarColumn()
        self._rich = Progress(
            *columns, TextColumn("{task.description}"), TimeElapsedColumn(), console=console
        )
        self._task = self._rich.add_task("", total=None, title=printable(title))

    def expect(self, count: int) -> None:
        done = self._rich.tasks[self._task].completed
        self._rich.update(self._task, total=done + count)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._rich.update(self._task, description=name)
        self._rich.start()
        try:
            yield
        except BaseException:  # also Ctrl-C: a bar that goes on would overwrite what the terminal says next
            self._rich.stop()
            raise

    def is_advanced_to_end(self) -> bool:
        """Count a phase; whether it was the last that is expected."""
        self._rich.advance(self._task)
        return self._rich.finished

    def finish(self, text: str) -> None:
        done = self._rich.tasks[self._task].completed
        self._rich.update(self._task, total=done, description=text)
        self._rich.stop()
