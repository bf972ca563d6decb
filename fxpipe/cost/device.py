"""Devices as data: rates and links, for the analytic cost model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Interconnect:
    """A link between two ranks: bytes a second, one way, and the least seconds of a message."""

    bandwidth: float
    latency: float

    def seconds(self, bytes: float) -> float:
        return self.latency + bytes / self.bandwidth


@dataclass(frozen=True)
class Device:
    """``flops``: arithmetic (see ``arithmetic.py``) -> FLOPs a second that large matrix products reach.

    ``memory_bandwidth``: bytes a second from and to device memory; ``memory_size``: its bytes.
    ``intra`` and ``inter``: the links to a rank of the same machine and of another one.
    ``offload_bandwidth``: bytes a second, one way, to the offload store: pinned memory for a GPU, a disk for
    the CPU.
    ``launch``: seconds that any op takes at least.  ``stage_overhead``: seconds that a rank spends on running
    one section beside its ops: the call, its arguments, posting its messages.
    """

    name: str
    flops: Mapping[str, float] = field(hash=False)
    memory_bandwidth: float
    memory_size: float
    intra: Interconnect
    inter: Interconnect
    offload_bandwidth: float
    launch: float
    stage_overhead: float

    def seconds(self, flops: float, bytes: float, arithmetic: str) -> float:
        """Roofline: the slower of computing and moving, and no faster than a launch."""
        return max(flops / self.rate(arithmetic), bytes / self.memory_bandwidth, self.launch)

    def rate(self, arithmetic: str) -> float:
        """FLOPs a second; an arithmetic that is not described counts as float32."""
        return self.flops.get(arithmetic, self.flops["float32"])
