"""Measures what messages between two ranks cost, for ``fxpipe calibrate`` under torchrun."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from fxpipe.runtime.job.last_works import lasting
from fxpipe.runtime.job.process import Process
from fxpipe.runtime.program.accelerator import synchronize

SMALL, LARGE = 64, 1 << 20  # elements of float32
RUNS, LARGE_RUNS, AT_ONCE = 100, 16, 16


class MessageRates(NamedTuple):
    """The costs of messages.  ``latency``: seconds of a message of a few bytes.  ``bandwidth``: further bytes
    a second, one way.  ``posting``: seconds that a rank is busy with sending one message and receiving
    another."""

    latency: float
    bandwidth: float
    posting: float


def message_rates(process: Process, device: torch.device) -> MessageRates:
    """The rates of pairs of neighbors, (0, 1), (2, 3), …, at the same time; those of the slowest pair.

    All ranks call it, of which there are at least two; the last of an odd number waits.
    """
    backend, peer = process.backend(device), process.world_rank ^ 1
    group = process.control if backend == "gloo" else dist.new_group(backend=backend)
    assert group is not None
    pair = _Pair(device, peer, process.world_rank < peer, group, backend == "gloo")
    rates = torch.zeros(3, dtype=torch.float64, device="cpu")
    if peer < process.world_size:
        small, large = pair.seconds(SMALL, RUNS), pair.seconds(LARGE, LARGE_RUNS)
        rates = rates.new_tensor([small, max(large - small, 1e-9), pair.posting()])
    lasting(dist.all_reduce(rates, dist.ReduceOp.MAX, process.control, async_op=True), process.control).wait()
    latency, further, posting = rates.tolist()
    # Of float32, 4 bytes an element; the difference leaves out what each message takes, whatever its size.
    return MessageRates(latency, 4 * (LARGE - SMALL) / further, posting)


@dataclass(frozen=True)
class _Pair:
    """Two ranks that measure their messages.  ``first``: whether this is the rank that sends first.
    ``by_host``: messages go through its memory."""

    device: torch.device
    peer: int
    first: bool
    group: dist.ProcessGroup
    by_host: bool

    def seconds(self, elements: int, runs: int) -> float:
        """The median seconds of a message, by half the way there and back."""
        tensor = torch.zeros(elements, device=self.device)

        def there_and_back() -> None:
            for sends in (self.first, not self.first):
                self._move(tensor, sends)
            synchronize(self.device)

        return _median(there_and_back, runs) / 2

    def _move(self, tensor: torch.Tensor, sends: bool) -> None:
        value = tensor.cpu() if self.by_host else tensor
        (dist.send if sends else dist.recv)(value, self.peer, self.group)
        if value is not tensor and not sends:
            tensor.copy_(value)

    def posting(self) -> float:
        """The seconds of one message in each direction, of some in both at once."""
        where = torch.device("cpu") if self.by_host else self.device
        sent, got = (torch.zeros(AT_ONCE, SMALL, device=where) for _ in range(2))

        def all_at_once() -> None:
            for out, back in zip(sent, got, strict=True):
                ops = [(dist.isend, out), (dist.irecv, back)]
                made = [dist.P2POp(op, x, self.peer, self.group) for op, x in ops[:: 1 if self.first else -1]]
                for work in dist.batch_isend_irecv(made):
                    work.wait()
            synchronize(self.device)

        return _median(all_at_once, RUNS // 4) / AT_ONCE


def _median(run: Callable[[], None], runs: int) -> float:
    times = []
    for _ in range(runs + 1):  # the first connects the ranks
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])
