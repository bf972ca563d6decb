"""The devices of all ranks, which may be of different models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from torch import fx

from fxpipe.cost.devices.device import Device, Interconnect
from fxpipe.cost.nodes import NodeSeconds
from fxpipe.ir.storage import call_nodes


@dataclass(frozen=True, eq=False)
class Cluster:
    """The devices of a pipeline.  ``devices``: one for each rank."""

    devices: tuple[Device, ...]

    @property
    def first(self) -> Device:
        """Rank 0's, by which the decisions are made that hold for all ranks."""
        return self.devices[0]

    @property
    def name(self) -> str:
        """Their names; of different devices with their ranks."""
        names = [device.name for device in self.devices]
        if len(set(names)) == 1:
            return names[0]
        ranks = {name: [str(rank) for rank, other in enumerate(names) if other == name] for name in names}
        return "; ".join(
            f"{name} (rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)})"
            for name, numbers in ranks.items()
        )

    @property
    def offload_bandwidth(self) -> float:
        """The rate of the slowest link, as the plan has one for all."""
        return min(device.offload_bandwidth for device in self.devices)

    @cached_property
    def _by_device(self) -> dict[Device, NodeSeconds]:
        return {device: NodeSeconds(device) for device in self.devices}

    def node_seconds(self, rank: int = 0) -> NodeSeconds:
        """The seconds of ops on a rank; one object for all ranks with the same device."""
        return self._by_device[self.devices[rank]]

    @property
    def distinct(self) -> Sequence[NodeSeconds]:
        """The seconds of ops on each device that some ranks have."""
        return tuple(self._by_device.values())

    def slowness(self, graph: fx.Graph) -> tuple[float, ...]:
        """The time of all ops of a graph on each rank, relative to rank 0's."""
        if len(self._by_device) == 1:
            return (1.0,) * len(self.devices)
        nodes = call_nodes(graph)
        times = {device: sum(map(seconds, nodes)) for device, seconds in self._by_device.items()}
        first = times[self.first]
        return tuple(times[device] / first if first else 1.0 for device in self.devices)

    def message_seconds(self, bytes: float, source: int, target: int) -> tuple[float, float]:
        """The seconds of a message between two ranks, within a machine and between two: those of the slower
        of both ranks' links."""
        ends = self.devices[source], self.devices[target]
        return max(end.intra.seconds(bytes) for end in ends), max(end.inter.seconds(bytes) for end in ends)

    def link_of_replicas(self, rank: int, replicas: int, ranks_per_machine: int | None) -> Interconnect:
        """The link over which a rank of all replicas exchanges: between machines, if they are on several."""
        # Replicas are outermost: the same rank of the next replica is a whole pipeline further on.
        last = rank + (replicas - 1) * len(self.devices)
        size = ranks_per_machine or inf
        device = self.devices[rank]
        # If the last replica is on the machine of the first, so are those between.
        return device.intra if rank // size == last // size else device.inter


def slowest_of_each(devices: Sequence[Sequence[Device]], graph: fx.Graph) -> Cluster:
    """The ranks by their slowest processes, for which the others wait.

    devices: of each rank those of its replicas and lanes, which all run its program.
    """
    if all(len(set(processes)) == 1 for processes in devices):
        return Cluster(tuple(processes[0] for processes in devices))
    nodes = call_nodes(graph)
    # Which device is slower depends on the model: by all of its ops.
    times = {device: sum(map(NodeSeconds(device), nodes)) for processes in devices for device in processes}
    return Cluster(tuple(max(processes, key=times.__getitem__) for processes in devices))
