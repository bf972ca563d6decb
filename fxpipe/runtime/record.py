"""The measured start and end of each op of one step on one rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass
class Record:
    """``spans``: (op, start, end) of the last step, in ``time.perf_counter`` seconds.

    A program waits for messages between its ops; that time does not count for any op.  For measurements
    ``at_op`` is called with the name of each op before it runs, and ``at_arrival`` with each message.
    """

    spans: list[tuple[str, float, float]] = field(default_factory=list)
    at_op: Callable[[str], None] | None = None
    at_arrival: Callable[[torch.Tensor], None] | None = None
    _name: str = ""
    _start: float = 0.0
    _waited: float = 0.0

    def begin(self, name: str) -> None:
        self._close()
        if not self._name:
            self.spans = []
        self._name, self._start, self._waited = name, time.perf_counter(), 0.0
        if self.at_op is not None:
            self.at_op(name)

    def end(self) -> None:
        """Record the end of the step."""
        self._close()
        self._name = ""

    def _close(self) -> None:
        if self._name:
            self.spans.append((self._name, self._start, time.perf_counter() - self._waited))

    def waited(self, since: float) -> None:
        """Record that the last op has been waiting since ``since`` (``time.perf_counter``)."""
        self._waited += time.perf_counter() - since
