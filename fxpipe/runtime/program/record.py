"""The measured start and end of each op of one step on one rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import record_function

from fxpipe.runtime.program.accelerator import current_stream, event
from fxpipe.runtime.torch_private import is_profiling, is_watched

#: Ops that a host starts before it waits for the first of them to be over.  Enough to hide the host; more
#: would hold the messages of all those ops in memory, which is free only when their streams are seen to be.
#: The deadlock proof is for as many (``schedule/lowering/execution.py``).
RUN_AHEAD = 4


class Clock:
    """Takes marks of the time at which the ops that were started before are over: of the host's time, for a
    device whose ops run in it."""

    def mark(self) -> Any:
        return time.perf_counter()

    def wait(self, mark: Any) -> None:
        """Block until the mark's time has come."""

    def seconds(self, marks: list[Any]) -> list[float]:
        """The times of marks, in ``time.perf_counter`` seconds; the first is that at which it was taken."""
        return marks


class DeviceClock(Clock):
    """Takes the time of an accelerator: a mark is an event on the stream of the ops, with the host's time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> tuple[torch.Event, float]:
        taken = event(self._device, timing=True)
        taken.record(current_stream(self._device))
        return taken, time.perf_counter()

    def wait(self, mark: tuple[torch.Event, float]) -> None:
        mark[0].synchronize()

    def seconds(self, marks: list[tuple[torch.Event, float]]) -> list[float]:
        if not marks:
            return []
        first, start = marks[0]
        marks[-1][0].synchronize()
        return [start + first.elapsed_time(taken) / 1e3 for taken, _ in marks]


@dataclass
class Record:
    """The ops of the last step.

    A program waits for messages between its ops; that time does not count for any op.  While torch's profiler
    runs, or a mode sees the ops, each op is a range.  For measurements
    ``at_op`` is called with the name of each op before it runs, ``at_arrival`` with each message,
    ``at_once`` with what is computed for the whole step, and ``at_free`` before what was offloaded is freed.
    """

    clock: Clock = field(default_factory=Clock)
    at_op: Callable[[str], None] | None = None
    at_arrival: Callable[[torch.Tensor], None] | None = None
    at_once: Callable[[Iterable[torch.Tensor]], None] | None = None
    at_free: Callable[[], None] | None = None
    _closed: list[tuple[str, object, object]] = field(default_factory=list)  # name, marks of begin and end
    _open: tuple[str, object] | None = None
    _over: bool = True  # the step
    _range: record_function | None = None

    @property
    def spans(self) -> list[tuple[str, float, float]]:
        """(op, start, end) of each op, in ``time.perf_counter`` seconds; waits for the device."""
        times = iter(self.clock.seconds([mark for _, *marks in self._closed for mark in marks]))
        return [(name, next(times), next(times)) for name, *_ in self._closed]

    def keep_up(self) -> None:
        """Wait, before an op begins, until the device is few ops behind its host."""
        self.pause()
        if self._over:
            self._closed, self._over = [], False
        if len(self._closed) >= RUN_AHEAD:
            self.clock.wait(self._closed[-RUN_AHEAD][2])

    def begin(self, name: str) -> None:
        """Record the start of an op, behind ``keep_up``."""
        self._open = name, self.clock.mark()
        if is_profiling() or is_watched():
            self._range = record_function(name)
            self._range.__enter__()
        if self.at_op is not None:
            self.at_op(name)

    def pause(self) -> None:
        """Record the end of the op, before the program waits for something."""
        if self._open is not None:
            self._closed.append((*self._open, self.clock.mark()))
            self._open = None
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def forget(self) -> None:
        """Forget the ops of the step so far, which run again."""
        self.pause()
        self._closed = []

    def end(self) -> None:
        """Record the end of the step."""
        self.pause()
        self._over = True
