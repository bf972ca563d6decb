"""Sums and gathers over the replicas of one rank, or over lanes of it, by torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from fxpipe.runtime.job.last_works import lasting
from fxpipe.runtime.program.accelerator import unowned
from fxpipe.runtime.program.captured import captured
from fxpipe.runtime.program.comm import Exchange, answered, in_memory_order, on_wire
from fxpipe.runtime.program.replicas import add_shard, copy_from_bucket, in_bucket, shard_of
from fxpipe.runtime.ranks.side_stream import Begun, beside
from fxpipe.runtime.torch_private import as_one, storage_number


@dataclass(eq=False)
class DistributedReplicas:
    """The replicas of a rank in several processes, or lanes of one with gradients of the same parameters.
    ``wire``: the device from whose memory ``group`` sends, which is None for a process alone.  ``control``:
    of the replicas, over gloo, for numbers of the host.  ``on_streams``: whether ``group`` sends on streams
    of a device.

    What it starts runs beside the ops of the program, one after the other, also of those of other groups.
    """

    index: int
    number: int
    wire: torch.device
    group: dist.ProcessGroup | None
    control: dist.ProcessGroup | None
    on_streams: bool
    _under_way: list[tuple[Begun, tuple[torch.Tensor, ...]]] = field(default_factory=list)

    @staticmethod
    def alone(wire: torch.device) -> DistributedReplicas:
        """The replicas of a process that is the only one."""
        return DistributedReplicas(0, 1, wire, None, None, wire.type != "cpu")

    def reduce(self, bucket: torch.Tensor, begins: Sequence[int], into: torch.Tensor, *, mean: bool) -> Begun:
        return self.beside(partial(self._reduce, bucket, begins, into, mean=mean), bucket)

    def wait(self, work: Begun) -> None:
        with answered():
            work.wait()
        # What comes next is behind it, so its memory may go, which no later sum would let go between steps.
        self._under_way = [entry for entry in self._under_way if entry[0] is not work]

    def copy_first(self, tensors: Sequence[torch.Tensor]) -> None:
        if self.group is None:
            return
        for tensor in tensors:
            value = tensor.to(self.wire).contiguous()
            with answered():
                lasting(self._begin_broadcast(value, 0), self.group).wait()
            if value is not tensor:
                tensor.copy_(value)

    def sum_numbers(self, numbers: torch.Tensor) -> torch.Tensor:
        """The sum of float64 numbers of all replicas, on the CPU."""
        if self.control is None:
            return numbers
        table = numbers.new_empty((self.number, *numbers.shape))
        with answered():
            work = dist.all_gather([*table], numbers, self.control, async_op=True)
            lasting(work, self.control).wait()
        return table.sum(0)

    def beside(self, run: Callable[[], None], *tensors: torch.Tensor) -> Begun:
        """Start ``run``, and keep what it works on until it is over on the device."""
        work = beside(self.wire, "replicas").run(run)
        if captured.get() is None:  # else no event of the device may be asked
            self._under_way = [entry for entry in self._under_way if not entry[0].is_over()]
        self._under_way.append((work, tensors))
        return work

    def _reduce(self, bucket: torch.Tensor, begins: Sequence[int], into: torch.Tensor, mean: bool) -> None:
        # ``into`` is one of three, as ``Replicas.reduce`` says: the bucket, a view of it, or other memory.
        whole = bucket.to(self.wire)
        shares, adds = into is bucket, storage_number(into) != storage_number(bucket)
        shard = shard_of(whole, begins, self.index)
        exchange = exchanges(self.group, bucket.itemsize, self.on_streams)
        done = [add_shard(whole, begins, self.index, exchange, shard, mean=mean)]
        if shares:
            self.share(whole, begins)
        if adds and not shares:
            into.add_(shard.to(into.device))
        elif whole is not bucket:
            into.copy_(whole if shares else shard)
        if adds:  # the caller has given the bucket's memory up
            done += [whole, bucket]
        for tensor in done if not self.on_streams else ():  # gloo keeps them until the group's next work
            tensor.untyped_storage().resize_(0)

    def share(self, bucket: torch.Tensor, begins: Sequence[int]) -> None:
        """Give all of them the shards of all, in a bucket on the wire's device."""
        if self.group is None:
            return
        group = self.group

        def start() -> list[dist.Work]:
            return [
                lasting(self._begin_broadcast(shard, index), group)
                for index in range(self.number)
                if (shard := shard_of(bucket, begins, index)).numel()
            ]

        for work in [as_one(group, self.wire, start)] if self.on_streams else start():
            work.wait()

    def _begin_broadcast(self, tensor: torch.Tensor, source: int) -> dist.Work | None:
        data = wired(tensor, self.on_streams)
        work: dist.Work | None = dist.broadcast(data, group=self.group, async_op=True, group_src=source)
        return work


@dataclass(eq=False)
class DistributedShards:
    """The processes that own rows of the same parameters: replicas, and lanes if these divide them before."""

    replicas: DistributedReplicas
    lanes: DistributedReplicas | None

    def gather(self, tensors: Sequence[torch.Tensor], begins: Sequence[int]) -> Begun:
        return self.replicas.beside(partial(self._gather, tensors, begins), *tensors)

    def wait(self, work: Begun) -> None:
        self.replicas.wait(work)

    def _gather(self, tensors: Sequence[torch.Tensor], begins: Sequence[int]) -> None:
        replicas, lanes = self.replicas, self.lanes
        is_bucket = len(tensors) == 1 and tensors[0].device == replicas.wire
        bucket = tensors[0] if is_bucket else in_bucket(tensors).to(replicas.wire)
        flat = in_memory_order(bucket).view(-1)
        # Owners are numbered lane by lane: the replicas complete their lane's part, then lanes swap parts.
        first = 0 if lanes is None else lanes.index * replicas.number
        of_lane = begins[first : first + replicas.number + 1]
        replicas.share(flat[of_lane[0] : of_lane[-1]], [begin - of_lane[0] for begin in of_lane])
        if lanes is not None:
            lanes.share(flat, begins[:: replicas.number])
        if not is_bucket:
            copy_from_bucket(bucket, tensors)


def wired(tensor: torch.Tensor, on_streams: bool) -> torch.Tensor:
    """The memory of a tensor, for a process group."""
    return unowned(on_wire(tensor)) if on_streams else on_wire(tensor)


def exchanges(group: dist.ProcessGroup | None, itemsize: int, on_streams: bool) -> Exchange:
    """A function that exchanges parts of tensors of such elements between the ranks of a group."""

    def exchange(into: torch.Tensor, parts: torch.Tensor, takes: list[int], gives: list[int]) -> None:
        if group is None:
            into.copy_(parts)
            return
        takes, gives = ([n * itemsize for n in sizes] for sizes in (takes, gives))
        to, source = wired(into, on_streams), wired(parts, on_streams)
        lasting(dist.all_to_all_single(to, source, takes, gives, group, async_op=True), group).wait()

    return exchange
