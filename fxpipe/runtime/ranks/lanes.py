"""The lanes of a rank: in one process, and over torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from fxpipe.errors import RunError
from fxpipe.plan.lanes import LaneGroup
from fxpipe.runtime.job.last_works import lasting
from fxpipe.runtime.program.comm import Wait, answered, on_wire
from fxpipe.runtime.ranks.local import Joint, LocalWorld
from fxpipe.runtime.torch_private import no_modes

_OTHERS = Wait("the other lanes of its rank", "lanes")


class LocalLanes:
    """The lanes of one rank in a LocalWorld, or a group of them, for one of them."""

    def __init__(self, world: LocalWorld, rank: int, replica: int, lane: int, group: LaneGroup | None = None):
        group = group or LaneGroup(world.lanes)
        self.index, self.number = group.index(lane), group.number
        self._world, self._place, self._name = world, (rank, replica, lane), f"the lanes of rank {rank}"
        self._joint = "lanes", rank, replica, *group.members(lane)
        self._begun: dict[int, Joint] = {}  # by the address of what is for ``end``
        self._along: dict[LaneGroup, LocalLanes] = {}

    def along(self, group: LaneGroup) -> LocalLanes:
        if group not in self._along:
            self._along[group] = LocalLanes(self._world, *self._place, group)
        return self._along[group]

    def exchange(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        # Copies, as this lane alone holds them: the others may have to take these yet.
        return [each[self.index].clone() for each in self._of_all(parts)]

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [part.clone() for (part,) in self._of_all([tensor])]

    def begin_exchange(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return self._begin(parts, torch.cat([parts[self.index]] * self.number))

    def begin_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._begin([tensor] * self.number, torch.cat([tensor] * self.number))

    def end(self, begun: torch.Tensor) -> torch.Tensor:
        if not begun.numel():
            return begun
        joint = self._begun.pop(begun.data_ptr(), None)
        if joint is None:
            raise RunError(
                "A program ends an exchange between lanes that has not begun, or has ended before."
            )
        return torch.cat([parts[self.index] for parts in self._taken(joint)])

    def _begin(self, parts: Sequence[torch.Tensor], result: torch.Tensor) -> torch.Tensor:
        result.zero_()  # not what ``end`` gives: who reads it has a wrong program
        joint = self._joined(parts)
        if result.numel():
            self._begun[result.data_ptr()] = joint
        else:
            self._taken(joint)
        return result

    def _of_all(self, tensors: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
        """The tensors that each lane gives to its n-th op, in the lanes' order.  The last lane to take them
        frees them."""
        return self._taken(self._joined(tensors))

    def _joined(self, tensors: Sequence[torch.Tensor]) -> Joint:
        with no_modes():  # a mode on this thread must see this lane's own tensors only
            copies = [tensor.clone() for tensor in tensors]
        return self._world.join(self._joint, self.index, copies)

    def _taken(self, joint: Joint) -> list[Sequence[torch.Tensor]]:
        number = self._world.number(*self._place)
        return self._world.take(joint, range(self.number), self.number, number, self._name)


@dataclass(eq=False)
class DistributedLanes:
    """The lanes of a rank in several processes, or a group of them.  ``wire``: the device from whose memory
    ``group`` sends.  ``waits``: is told when this lane begins to wait for the others, and with None when it
    has what they give.  ``groups``: of lanes that have one, for this one."""

    index: int
    number: int
    wire: torch.device
    group: dist.ProcessGroup
    waits: Callable[[Wait | None], None] = lambda what: None
    groups: Mapping[LaneGroup, DistributedLanes] = field(default_factory=dict)
    #: By the address of what is for ``end``; with what is sent, which nobody may free or write over before.
    _begun: dict[int, tuple[dist.Work, torch.Tensor]] = field(default_factory=dict)

    def along(self, group: LaneGroup) -> DistributedLanes:
        along = self.groups.get(group)
        if along is None:
            raise RunError(f"The mesh of the lanes has no {group}. Undo the edit of the program.")
        along.waits = self.waits
        return along

    def exchange(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        received, work, _ = self._exchanged(parts)
        self._wait(work)
        return self._tensors(received, parts[self.index])

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        received, work, _ = self._gathered(tensor)
        self._wait(work)
        return self._tensors(received, tensor)

    def begin_exchange(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return self._begin(*self._exchanged(parts), parts[self.index])  # ``_exchanged`` sends a copy

    def begin_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        # A copy: an op may write over the tensor while it is sent.
        return self._begin(*self._gathered(tensor.clone()), tensor)

    def end(self, begun: torch.Tensor) -> torch.Tensor:
        if (on_its_way := self._begun.pop(begun.data_ptr(), None)) is not None:
            self._wait(on_its_way[0])
        return begun

    def _exchanged(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dist.Work, torch.Tensor]:
        """Tell where the others' parts will be, when the work has ended, and what is sent."""
        gives = [part.nbytes for part in parts]
        takes = [gives[self.index]] * self.number
        received = torch.empty(sum(takes), dtype=torch.uint8, device=self.wire)
        sent = torch.cat([on_wire(part).to(self.wire) for part in parts])
        with answered():
            work = dist.all_to_all_single(received, sent, takes, gives, self.group, async_op=True)
        return received, lasting(work, self.group), sent

    def _gathered(self, tensor: torch.Tensor) -> tuple[torch.Tensor, dist.Work, torch.Tensor]:
        sent = on_wire(tensor).to(self.wire)
        received = torch.empty(self.number * sent.numel(), dtype=torch.uint8, device=self.wire)
        with answered():
            work = dist.all_gather([*received.view(self.number, -1)], sent, self.group, async_op=True)
        return received, lasting(work, self.group), sent

    def _begin(
        self, received: torch.Tensor, work: dist.Work, sent: torch.Tensor, like: torch.Tensor
    ) -> torch.Tensor:
        # What arrives in other memory is copied from there; nothing arrives where all shares are empty.
        if self.wire != like.device or not received.numel():
            self._wait(work)
        else:
            self._begun[received.data_ptr()] = work, sent
        return received.to(like.device).view(like.dtype).view(-1, *like.shape[1:])

    def _wait(self, work: dist.Work) -> None:
        self.waits(_OTHERS)
        with answered():
            work.wait()
        self.waits(None)

    def _tensors(self, received: torch.Tensor, like: torch.Tensor) -> list[torch.Tensor]:
        return [*received.to(like.device).view(like.dtype).view(self.number, *like.shape)]
