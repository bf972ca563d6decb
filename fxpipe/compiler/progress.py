"""Progress of long work as a bar, on a terminal only."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from fxpipe.errors import printable


class Phases:
    """``with phases("capture"): …`` moves a bar through named phases; ``seconds`` keeps their times, without
    those of the phases within them."""

    def __init__(self, title: str, *, ends: bool = True):
        """The display ends with the last expected phase if ``ends``; else ``finish`` is called."""
        self._ends = ends
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.fields[title]}", markup=False), BarColumn(), TextColumn("{task.description}"),
            TimeElapsedColumn(), console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=None, title=printable(title))
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._nested = 0.0  # seconds of the phases within the current one

    def expect(self, count: int) -> None:
        """Note that so many phases are still to come."""
        done = self._bar.tasks[self._task].completed
        self._bar.update(self._task, total=done + count)

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        # Phases nest; each counts the time that is in no phase within it.
        before, outer, self._nested = time.perf_counter(), self._nested, 0.0
        self._bar.update(self._task, description=phase)
        self._bar.start()
        try:
            yield
        except BaseException:  # also Ctrl-C: a bar that goes on would overwrite what the terminal says next
            self._bar.stop()
            raise
        passed = time.perf_counter() - before
        self.seconds[phase] += passed - self._nested
        self._nested = outer + passed
        self._bar.advance(self._task)
        if self._ends and self._bar.finished:
            self.finish("compiled")

    def finish(self, what: str) -> None:
        """All phases are over, also where more were expected."""
        done = self._bar.tasks[self._task].completed
        text = f"{what} in {sum(self.seconds.values()):.1f} s"
        self._bar.update(self._task, total=done, description=text)
        self._bar.stop()
