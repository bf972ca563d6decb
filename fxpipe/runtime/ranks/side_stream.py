"""Runs functions beside the ops of a program, in order: on a stream of a device, or in a thread."""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from fxpipe.runtime.program.accelerator import current_stream, is_accelerator, stream


@dataclass(frozen=True, eq=False)
class Begun:
    """A function that has begun beside the ops.  ``wait``: lets the ops that come next wait until the
    function is over; raises what it raised.  ``is_over``: whether it is, on the device too."""

    wait: Callable[[], object]
    is_over: Callable[[], bool]


class OnStream:
    """Runs functions on a stream of a device.  The memory of their tensors goes to later ones of that stream,
    which are behind their use."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, stream(device)

    def run(self, function: Callable[[], None]) -> Begun:
        ready = current_stream(self._device).record_event()  # what the ops before have computed
        with self._stream:
            self._stream.wait_event(ready)
            function()
            over = self._stream.record_event()
        return Begun(lambda: current_stream(self._device).wait_event(over), over.query)


class InThread:
    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = queue.SimpleQueue()
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        thread.start()

        def stop() -> None:  # a thread inside torch when the interpreter ends would abort the process
            self._tasks.put(None)
            thread.join(1.0)

        atexit.register(stop)

    def run(self, function: Callable[[], None]) -> Begun:
        over = Future[None]()
        self._tasks.put((function, over))
        return Begun(over.result, over.done)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            function, over = task
            del task
            try:
                function()
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                del function
                over.set_exception(error)
            else:
                del function  # and its tensors: who waits finds their memory free
                over.set_result(None)
            del over


@cache
def beside(
    device: torch.device, what: Literal["sums", "replicas", "numbers", "sends"] = "sums"
) -> OnStream | InThread:
    """The side stream of a device, for all programs of the process: they run one after the other."""
    return OnStream(device) if is_accelerator(device) else InThread(f"fxpipe-{what}")
