"""Ranks whose programs start kernels on the streams of a device, each with a queue of its own."""

from __future__ import annotations

from typing import Any

from fxpipe.runtime.program.record import RUN_AHEAD
from fxpipe.schedule.lowering.execution import Rank


class OnDevice(Rank):
    """A wait holds up the stream of the ops; the host waits where ``run_ahead`` ops that it has started are
    not over."""

    run_ahead: int | None = RUN_AHEAD

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.started: list[int] = []

    def op(self) -> None:
        if self.run_ahead is not None and len(self.started) >= self.run_ahead:
            self.host = self.host_node([self.host, self.started[-self.run_ahead]])
        self.ops = [self.kernel("ops")]
        self.started += self.ops

    def wait(self, over: int) -> None:
        self.ops = [*self.ops, over]
