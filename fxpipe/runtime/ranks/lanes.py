"""The lanes of a rank: in one process, and over torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
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
        self._joined = 0

    @property
    def number(self) -> int:
        return self._world.lanes

    def exchange(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [given[self.index] for given in self._given(parts)]

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [own for (own,) in self._given([tensor])]

    def _given(self, tensors: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
        """What each lane gives to its n-th op, in their order."""
        world = self._world
        key: tuple[Hashable, int] = ("lanes", self._replica, self._rank), self._joined
        self._joined += 1
        with no_modes():  # a mode on this thread must see this lane's own tensors only
            world.between.setdefault(key, {})[self.index] = [tensor.clone() for tensor in tensors]
        given, own = world.between[key], world.number(self._rank, self._replica, self.index)
        what = f"the lanes of rank {self._rank}"
        world.wait_until(lambda: len(given) == self.number, own, what)
        if self.index == self.number - 1:
            del world.between[key]  # ``given`` keeps it for those that have not returned yet
        return [given[lane] for lane in range(self.number)]


@dataclass(eq=False)
class DistributedLanes:
    """``wire``: the device from whose memory ``group`` sends.  ``waits``: is told when this lane begins to
    wait for the others, and with None when it has what they give."""

    index: int
    number: int
    wire: torch.device
    group: dist.ProcessGroup
    waits: Callable[[Wait | None], None] = lambda what: None

    def exchange(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        gives = [part.nbytes for part in parts]
        takes = [gives[self.index]] * self.number
        own = parts[self.index]
        found = torch.empty(sum(takes), dtype=torch.uint8, device=self.wire)
        given = torch.cat([on_wire(part).to(self.wire) for part in parts])
        self._run(lambda: dist.all_to_all_single(found, given, takes, gives, self.group, async_op=True))
        return self._tensors(found, own)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        given = on_wire(tensor).to(self.wire)
        found = torch.empty(self.number * given.numel(), dtype=torch.uint8, device=self.wire)
        self._run(lambda: dist.all_gather([*found.view(self.number, -1)], given, self.group, async_op=True))
        return self._tensors(found, tensor)

    def _run(self, begin: Callable[[], dist.Work | None]) -> None:
        self.waits(_OTHERS)
        with answered():
            lasting(begin(), self.group).wait()
        self.waits(None)

    def _tensors(self, found: torch.Tensor, like: torch.Tensor) -> list[torch.Tensor]:
        return [*found.to(like.device).view(like.dtype).view(self.number, *like.shape)]
