"""Progress of long work: on a terminal only, and nothing elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console


class Progress:
    """``with progress("capture"): …`` shows the phase while it runs and its seconds when it is done."""

    def __init__(self, title: str, shown: bool = True):
        self._console = Console(stderr=True)
        self._shown = shown and self._console.is_terminal
        self._title = title
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        before = time.perf_counter()
        status = self._console.status(f"{self._title}: {phase}") if self._shown else contextlib.nullcontext()
        with status:
            yield
        self.seconds[phase] = time.perf_counter() - before
        if self._shown:
            self._console.print(f"[dim]{self._title}: {phase:<10} {self.seconds[phase]:6.2f} s")
