"""What a program asks of buckets of gradients and parameters, which replicas and lanes exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fxpipe.errors import RunError
from fxpipe.plan.step import StepSpec
from fxpipe.runtime.program.comm import Wait
from fxpipe.runtime.program.record import Record

if TYPE_CHECKING:  # most programs run without them
    from fxpipe.plan.lanes import LaneGroup
    from fxpipe.runtime.program.lanes import Lanes
    from fxpipe.runtime.program.replicas import Bucket, Replicas, Shards


@dataclass(eq=False, kw_only=True)
class BucketVerbs:
    """A part of ``Runtime``.  Sums and gathers that it starts run beside the ops.

    ``params`` and ``grads`` (accumulators) by parameter name.  ``replicas``: this rank of all replicas, where
    there are several.  ``buckets``: the accumulators, as they are summed over replicas and lanes; ``shards``:
    the processes that own rows of their parameters, by the lanes that divide a bucket.  ``lanes``: those that
    share each op with this process, where there are several; ``summing_lanes``: groups of them that have
    gradients of the same parameters; None where the program runs without them.  ``waiting``: what the rank
    waits for, if it does.
    """

    spec: StepSpec
    params: dict[str, torch.Tensor]
    grads: dict[str, torch.Tensor]
    record: Record = field(default_factory=Record)
    waiting: Wait | None = None
    lanes: Lanes | None = None
    replicas: Replicas | None = None
    shards: Mapping[LaneGroup, Shards] = field(default_factory=dict)
    summing_lanes: Mapping[LaneGroup, Replicas] | None = None
    buckets: Sequence[Bucket] = ()
    _sums: list[Callable[[], None]] = field(default_factory=list)
    _gathers: dict[int, Any] = field(default_factory=dict)

    def sum_over_lanes(self, bucket: int, n: int = 0, stride: int = 1) -> None:
        """Start to sum a bucket of gradients over the lanes, or n that are ``stride`` behind each other,
        before it is summed over the replicas."""
        if self.lanes is None:
            raise RunError(f"The program sums the bucket {bucket} over lanes, and there are none.")
        if self.summing_lanes is None:
            return
        from fxpipe.plan.lanes import LaneGroup  # which most programs run without

        group = LaneGroup(n or self.lanes.number, stride)
        lanes = self.summing_lanes.get(group)
        if lanes is None:
            raise RunError(f"The plan sums nothing over {group}. Undo the edit of the program.")
        self._sum(lanes, *self._bucket(bucket).begin_sum_over_lanes(group), bucket, mean=False)

    def reduce_gradients(self, bucket: int) -> None:
        """Start to sum a bucket of gradients over the replicas.

        Those of a mean are divided by the number of replicas.
        """
        if self.replicas is None:
            return
        if self._bucket(bucket).is_frozen:
            raise RunError(f"The bucket {bucket} has no gradients to sum: its parameters are frozen.")
        self._sum(self.replicas, *self._bucket(bucket).begin_sum(), bucket, mean=not self.spec.has_count)

    def _sum(
        self,
        peers: Replicas,
        gives: torch.Tensor,
        begins: Sequence[int],
        into: torch.Tensor,
        bucket: int,
        *,
        mean: bool,
    ) -> None:
        if self._bucket(bucket).flat is None:  # the accumulators go when they are summed
            for name in self._bucket(bucket).names:
                self.grads.pop(name, None)
        self._sums.append(partial(peers.wait, peers.reduce(gives, begins, into, mean=mean)))

    def wait_gradients(self) -> None:
        """Wait for the sums over the replicas, and over the lanes."""
        with self._waits_for(_OWNERS if self.summing_lanes else REPLICAS):
            for wait in self._sums:
                wait()
        self._sums = []

    def gather_parameters(self, bucket: int) -> None:
        """Start to give this process the rows of parameters that others own."""
        if self.shards:
            gathered = self._bucket(bucket)
            tensors, division = gathered.parameters or (gathered.own_rows(),), gathered.division
            self._gathers[bucket] = tensors, self.shards[division.lanes].gather(tensors, division.begins)

    def wait_parameters(self, bucket: int) -> None:
        """Wait for the rows that other processes own."""
        if bucket not in self._gathers:
            return
        gathered, ((first, *_), work) = self._bucket(bucket), self._gathers.pop(bucket)
        lanes = gathered.division.lanes
        with self._waits_for(REPLICAS if lanes.number == 1 else _OWNERS):
            self.shards[lanes].wait(work)
        if not gathered.parameters:
            self.params |= gathered.views(first)

    def free_parameters(self, bucket: int) -> None:
        """Free the parameters of a bucket, but for the rows that this process owns."""
        if self.shards:
            for name in self._bucket(bucket).names:
                del self.params[name]

    def _bucket(self, number: int) -> Bucket:
        if not 0 <= number < len(self.buckets):
            raise RunError(f"The program names the bucket {number} of {len(self.buckets)}.")
        return self.buckets[number]

    def mean_over_replicas(self, numbers: torch.Tensor) -> None:
        """Let all replicas have the mean of their numbers, which are few."""
        assert self.replicas is not None
        from fxpipe.runtime.program.replicas import even  # which is there where replicas are

        flat = numbers.view(-1)
        begins = even(flat.numel(), self.replicas.number)
        self.replicas.wait(self.replicas.reduce(flat, begins, flat, mean=True))

    @contextmanager
    def _waits_for(self, what: Wait) -> Iterator[None]:
        """Wait in a block, whose time counts for no op.  After an error ``waiting`` stays, for messages."""
        self.record.pause()
        self.waiting = what
        yield
        self.waiting = None


REPLICAS = Wait("the other replicas", "replicas")
_OWNERS = Wait("the other replicas and lanes of its rank", "alike")
