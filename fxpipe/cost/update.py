"""The time of the optimizer's update behind a step, of the copies that undo it, and of the messages that tell
ranks that it is right.

The optimizer is unknown when a pipeline is compiled: it is taken for AdamW, with two states of a parameter's
dtype; where gradients of float32 are accumulated for a parameter with fewer bits, with master weights and
their states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from fxpipe.cost.devices.cluster import Cluster
from fxpipe.cost.devices.device import Device
from fxpipe.plan.work import Rates
from fxpipe.schedule.costs import Update

VERDICT = 32  # bytes of a message: whether all gradients are finite, and their norm
_STATES = 2
_SINGLE = 4


class Trained(NamedTuple):
    """A parameter that a rank updates: its elements, and the bytes of one and of one of its gradient.
    ``lanes``: of each replica, among which it may be divided."""

    elements: float
    parameter: int
    gradient: int
    lanes: int = 1

    def of_owner(self, replicas: int) -> Trained:
        """What one process updates, where all that have it divide it."""
        return self._replace(elements=self.elements / (replicas * self.lanes))

    @property
    def master(self) -> int:
        """The bytes of an element's master weight, in single precision; 0 where there is none."""
        return _SINGLE if self.parameter < _SINGLE <= self.gradient else 0

    @property
    def state(self) -> int:
        """The bytes of an element in one of the optimizer's states."""
        return self.master or self.parameter

    @property
    def copied(self) -> float:
        """The bytes that undo an update: what is updated, the parameter or its master, and the states."""
        return self.elements * (1 + _STATES) * self.state

    @property
    def moved(self) -> float:
        """The bytes that a fused update reads and writes: the gradient for the norm, for the update, and when
        it is set to zero; the states and the parameter or its master, whose value the parameter is given."""
        copy = self.parameter if self.master else 0
        return self.elements * (3 * self.gradient + 2 * (_STATES + 1) * self.state + copy)


def update_costs(cluster: Cluster, trained: Sequence[Sequence[Trained]]) -> Update:
    """The update of each rank's parameters, and the messages between the slowest links."""
    pairs = [*zip(cluster.devices, trained, strict=True)]
    return Update(
        tuple(_seconds(device, [one.moved for one in tensors]) for device, tensors in pairs),
        tuple(_seconds(device, [2 * one.copied for one in tensors]) for device, tensors in pairs),
        max(device.intra.seconds(VERDICT) for device in cluster.devices),
        max(device.inter.seconds(VERDICT) for device in cluster.devices),
    )


def _seconds(device: Device, moved: Sequence[float]) -> float:
    """The seconds of an update.  moved: the bytes of each parameter that are read and written."""
    if not moved:
        return 0.0
    # One call for all: its kernels take many parameters each.
    return device.stage_overhead + sum(moved) / device.memory_bandwidth


def update_on(update: Update, rates: Sequence[Rates], device: Device) -> Update:
    """The update on another device.  rates: of each rank's device in ``update``."""

    def there(seconds: float, before: Rates) -> float:
        # The part that moves bytes scales with the memory's bandwidth, the overhead does not.
        moving = max(0.0, seconds - before.stage_overhead) * before.memory / device.memory_bandwidth
        return device.stage_overhead + moving if seconds else 0.0

    return replace(
        update,
        seconds=tuple(map(there, update.seconds, rates)),
        copies=tuple(map(there, update.copies, rates)),
        message=device.intra.seconds(VERDICT),
        inter_message=device.inter.seconds(VERDICT),
    )
