"""The lanes of a rank: in one process, and over torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fxpipe.runtime.job.last_works import lasting
from fxpipe.runtime.program.comm import Wait, answered, on_wire
from fxpipe.runtime.ranks.local import LocalWorld
from fxpipe.runtime.torch_private import no_modes

_OTHERS = Wait("the other lanes of its rank", "lanes")


class LocalLanes:
    """The lanes of one rank in a LocalWorld, for one of them."""

    def __init__(self, world: LocalWorld, rank: int, replica: int, lane: int):
        self._world, self._rank, self._replica, self.index = world, rank, replica, lane

    @property
    def number(self) -> int:
        return self._world.lanes

    def exchange(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [each[self.index] for each in self._of_all(parts)]

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [part for (part,) in self._of_all([tensor])]

    def _of_all(self, tensors: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
        """The tensors that each lane gives to its n-th op, in the lanes' order."""
        world = self._world
        with no_modes():  # a mode on this thread must see this lane's own tensors only
            copies = [tensor.clone() for tensor in tensors]
        joint = world.join(("lanes", self._replica, self._rank), self.index, copies)
        number = world.number(self._rank, self._replica, self.index)
        return world.take(joint, range(self.number), self.number, number, f"the lanes of rank {self._rank}")


@dataclass(eq=False)
class DistributedLanes:
    """The lanes of a rank in several processes.  ``wire``: the device from whose memory ``group`` sends.
    ``waits``: is told when this lane begins to wait for the others, and with None when it has what they
    give."""

    index: int
    number: int
    wire: torch.device
    group: dist.ProcessGroup
    waits: Callable[[Wait | None], None] = lambda what: None

    def exchange(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        gives = [part.nbytes for part in parts]
        takes = [gives[self.index]] * self.number
        mine = parts[self.index]
        received = torch.empty(sum(takes), dtype=torch.uint8, device=self.wire)
        sent = torch.cat([on_wire(part).to(self.wire) for part in parts])
        self._run(lambda: dist.all_to_all_single(received, sent, takes, gives, self.group, async_op=True))
        return self._tensors(received, mine)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        sent = on_wire(tensor).to(self.wire)
        received = torch.empty(self.number * sent.numel(), dtype=torch.uint8, device=self.wire)
        self._run(lambda: dist.all_gather([*received.view(self.number, -1)], sent, self.group, async_op=True))
        return self._tensors(received, tensor)

    def _run(self, begin: Callable[[], dist.Work | None]) -> None:
        self.waits(_OTHERS)
        with answered():
            lasting(begin(), self.group).wait()
        self.waits(None)

    def _tensors(self, received: torch.Tensor, like: torch.Tensor) -> list[torch.Tensor]:
        return [*received.to(like.device).view(like.dtype).view(self.number, *like.shape)]
