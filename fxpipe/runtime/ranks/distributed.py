"""Messages over torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from fxpipe.plan.lanes import LaneGroup
from fxpipe.runtime.job.last_works import lasting
from fxpipe.runtime.program.comm import (
    Collective,
    Layout,
    Numbers,
    Pending,
    add_up,
    answered,
    gets_values,
    new_buffer,
    new_buffers,
)
from fxpipe.runtime.ranks.lanes import DistributedLanes
from fxpipe.runtime.ranks.replicas import DistributedReplicas, exchanges, wired
from fxpipe.runtime.ranks.send_buffers import Sent
from fxpipe.runtime.ranks.side_stream import beside
from fxpipe.runtime.torch_private import all_gather_single, as_one


@dataclass(eq=False)
class DistributedComm:
    """The messages of a rank in several processes.  ``device``: of the program; ``wire``: the one from whose
    memory the process groups send.

    Ranks are those of a pipeline; ``processes``: of each the number of its process.
    ``channels``: (from, to) -> the process group of its messages.  ``joint``: those of the collectives.
    ``pipeline``: of all ranks, over gloo.  ``abreast``: this rank of all replicas, and ``lanes``:
    all lanes of it, if there are several.  ``summing_lanes``: groups of them that have gradients of the same
    parameters.
    ``on_streams``: whether the process groups send on streams of a device; they get the memory of a message
    alone, which is kept alive here.  ``tag``: of its messages, for backends that tell messages apart by one.
    """

    device: torch.device
    wire: torch.device
    rank: int
    ranks: int
    processes: Sequence[int]
    channels: Mapping[tuple[int, int], dist.ProcessGroup]
    joint: Sequence[dist.ProcessGroup]
    pipeline: dist.ProcessGroup
    sent: Sent
    on_streams: bool = False
    tag: int = 0
    abreast: DistributedReplicas | None = None
    lanes: DistributedLanes | None = None
    summing_lanes: Mapping[LaneGroup, DistributedReplicas] = field(default_factory=dict)

    def start(self) -> None:
        self.sent.start()

    def receive(self, layouts: Sequence[Layout], source: int) -> Pending:
        buffers = [self._buffer(layout) for layout in layouts]
        group = self.channels[source, self.rank]
        peer = dist.get_group_rank(group, self.processes[source])
        # The group's method directly: torch.distributed.irecv repeats checks that always pass here.
        started = self._each(group, lambda buffer: group.recv([self._wired(buffer)], peer, self.tag), buffers)
        return Pending(buffers, source, [work for work, _ in started])

    def wait(self, pending: Pending) -> list[torch.Tensor]:
        with answered():
            for work in pending.work:
                work.wait()
        self.sent.arrived()
        if self.wire == self.device:
            return pending.buffers
        return [buffer.to(self.device) for buffer in pending.buffers]

    def send(self, tensors: Sequence[torch.Tensor], to: int) -> None:
        group = self.channels[self.rank, to]
        peer = dist.get_group_rank(group, self.processes[to])
        flat = [self._flat(tensor) for tensor in tensors]
        for work, sent in self._each(group, lambda t: group.send([self._wired(t)], peer, self.tag), flat):
            self.sent.add(work, sent)

    def collective(
        self, verb: Collective, tensor: torch.Tensor | None, layout: Layout, root: int, group: int
    ) -> Pending | None:
        within, buffers = self.joint[group], list[torch.Tensor]()
        if verb == "all_gather":
            whole, buffers = new_buffers(layout, self.ranks, self.wire)
        elif gets_values(verb, tensor, root, self.rank):
            buffers = [self._buffer(layout) for _ in range(self.ranks if verb == "gather" else 1)]
        sent = buffers[0] if tensor is None else self._flat(tensor)
        data = self._wired(sent)
        with answered():
            match verb:
                case "broadcast":
                    begun = dist.broadcast(data, group=within, async_op=True, group_src=root)
                    work: object = lasting(begun, within)
                case "gather":
                    into = [self._wired(buffer) for buffer in buffers] or None
                    begun = dist.gather(data, into, group=within, async_op=True, group_dst=root)
                    work = lasting(begun, within)
                case "all_gather":
                    begun = all_gather_single(self._wired(whole), data, within, async_op=True)
                    work = lasting(begun, within)
                case "reduce":
                    exchange = exchanges(within, sent.itemsize, self.on_streams)
                    total = buffers[0] if buffers else None
                    added = partial(add_up, sent, total, root, self.rank, self.ranks, exchange)
                    work = beside(self.wire).run(added)
        if buffers:
            return Pending(buffers, root if verb == "broadcast" else -1, [work], sent)
        self.sent.add(work, [sent])
        return None

    def share_numbers(self, numbers: Numbers | None, source: int) -> Numbers:
        totals = torch.empty(2, dtype=torch.float64)

        def share() -> None:
            if numbers is not None:
                totals.copy_(numbers() if self.abreast is None else self.abreast.sum_numbers(numbers()))
            with answered():
                work = dist.broadcast(totals, group=self.pipeline, async_op=True, group_src=source)
                lasting(work, self.pipeline).wait()

        # In a thread: a rank gives them when it knows them, and goes on.
        work = beside(torch.device("cpu"), "numbers").run(share)

        def shared() -> torch.Tensor:
            work.wait()
            return totals

        return shared

    def flush(self) -> None:
        self.sent.join()

    def _buffer(self, layout: Layout) -> torch.Tensor:
        return new_buffer(layout, self.wire)

    def _flat(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.wire == self.device else tensor.cpu()

    def _wired(self, tensor: torch.Tensor) -> torch.Tensor:
        return wired(tensor, self.on_streams)

    def _each(
        self,
        group: dist.ProcessGroup,
        start: Callable[[torch.Tensor], dist.Work],
        tensors: Sequence[torch.Tensor],
    ) -> list[tuple[dist.Work, Sequence[torch.Tensor]]]:
        """Start an operation for each tensor of a message; on streams as one of the backend.

        Returns the operations, each with its tensors.

        Apart, the second would wait on its stream for the first, and with it all streams whose work comes
        behind it in the same queue of the device.
        """
        with answered():
            if len(tensors) == 1 or not self.on_streams:
                return [(start(tensor), [tensor]) for tensor in tensors]
            return [(as_one(group, self.wire, lambda: [start(tensor) for tensor in tensors]), tensors)]
