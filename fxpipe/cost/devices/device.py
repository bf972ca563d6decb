"""Devices as data: rates and links, for the analytic cost model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from fxpipe.plan.curve import Curve
from fxpipe.plan.work import Rate, op_seconds
from fxpipe.strict import Fits, NonNegative, between

_HAS_FLOAT32 = Fits(lambda rates: "float32" in rates, "an object with a rate of float32")


@dataclass(frozen=True)
class Interconnect:
    """A link between two ranks: bytes a second, one way, and the least seconds of a message."""

    bandwidth: Rate
    latency: NonNegative

    def seconds(self, bytes: float) -> float:
        return self.latency + bytes / self.bandwidth


@dataclass(frozen=True)
class Device:
    """A device as costs see it.  ``flops``: arithmetic (see ``arithmetic.py``) -> FLOPs a second that large
    matrix products reach.

    ``memory_bandwidth``: bytes a second from and to device memory; ``memory_size``: its bytes, 0 if
    unknown.
    ``intra`` and ``inter``: the links to a rank of the same machine and of another one.
    ``offload_bandwidth``: bytes a second, one way, to the offload store: pinned memory for a GPU, a disk for
    the CPU.
    ``launch``: seconds that a kernel takes beside its work: to begin, and while few of its blocks run.
    ``stage_overhead``: seconds that a rank spends on running
    one section beside its ops: the call, its arguments, posting its messages.
    ``curves``: of a calibrated device, by the kind of an op (see ``kinds.py``; of those that compute with
    their arithmetic, "product float32"), its seconds by its size.  ``attention``: the FLOPs a second of
    attention, relative to products.
    """

    name: str
    flops: Annotated[Mapping[str, Rate], _HAS_FLOAT32] = field(hash=False)
    memory_bandwidth: Rate
    memory_size: NonNegative
    intra: Interconnect
    inter: Interconnect
    offload_bandwidth: Rate
    launch: NonNegative
    stage_overhead: NonNegative
    curves: Mapping[str, Curve] = field(default_factory=dict, hash=False)
    attention: Annotated[float, between(0.01, 1)] = 1.0

    def holds(self, bytes: float) -> bool:
        """Whether so many bytes fit, as far as its memory is known."""
        return not self.memory_size or bytes <= self.memory_size

    def seconds(self, flops: float, bytes: float, arithmetic: str, kind: str = "") -> float:
        """The seconds of an op by the measured curve of its kind; else by the roofline: a launch, and the
        slower of computing and moving."""
        roofline = self.rate(arithmetic, kind), self.memory_bandwidth, self.launch
        return float(op_seconds(flops, bytes, arithmetic, kind, roofline, self.curves))

    def rate(self, arithmetic: str, kind: str = "") -> float:
        """FLOPs a second of a kind of op; an arithmetic that is not described counts as float32."""
        share = self.attention if kind.startswith("attention") else 1.0
        return share * self.flops.get(arithmetic, self.flops["float32"])
