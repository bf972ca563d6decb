"""Devices as data: peak rates and bandwidths, for the analytic cost model."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Device:
    """``flops``: dtype -> floating-point operations a second that large matrix products reach.

    ``memory`` and ``link``: bytes a second to device memory and to another rank; ``latency`` seconds
    a message takes at least; ``launch`` seconds that any op takes at least; ``stage_overhead`` seconds that a
    rank spends on running one section beside its ops: the call, its arguments, posting its messages.
    ``offload_bandwidth``: bytes a second, one way, to the offload store: pinned memory for a GPU, a disk for
    the CPU.
    """

    name: str
    flops: dict[torch.dtype, float] = field(hash=False)
    memory: float
    link: float
    latency: float
    launch: float
    stage_overhead: float
    offload_bandwidth: float

    def seconds(self, flops: float, bytes: float, dtype: torch.dtype) -> float:
        """Roofline: the slower of computing and moving, and no faster than a launch."""
        return max(flops / self.rate(dtype), bytes / self.memory, self.launch)

    def rate(self, dtype: torch.dtype) -> float:
        """FLOPs a second; a dtype that is not described counts as float32."""
        return self.flops.get(dtype, self.flops[torch.float32])

    def transfer_seconds(self, bytes: float) -> float:
        return self.latency + bytes / self.link


# Data-sheet rates times the share that large kernels reach in practice (about 60%); one core for the CPU.
# ``stage_overhead``: for the CPU measured by benchmarks/stage_overhead.py, 140 to 190 µs with messages on a
# busy machine, up to 50 µs without; for GPUs an estimate, as kernels hide a call, but not those of nccl.
CPU = Device(
    "cpu",
    {torch.float32: 60e9, torch.float64: 30e9, torch.bfloat16: 60e9},
    memory=8e9,
    link=2e9,
    latency=150e-6,
    launch=3e-6,
    stage_overhead=150e-6,
    offload_bandwidth=1e9,
)
A100 = Device(
    "a100",
    {torch.float32: 90e12, torch.float64: 11e12, torch.bfloat16: 190e12, torch.float16: 190e12},
    memory=1.4e12,
    link=200e9,
    latency=10e-6,
    launch=5e-6,
    stage_overhead=20e-6,
    offload_bandwidth=20e9,
)
H100 = Device(
    "h100",
    {torch.float32: 250e12, torch.float64: 40e12, torch.bfloat16: 600e12, torch.float16: 600e12},
    memory=2.4e12,
    link=300e9,
    latency=10e-6,
    launch=5e-6,
    stage_overhead=20e-6,
    offload_bandwidth=45e9,
)


def describe(device: torch.device) -> Device:
    """The description of a torch device; unknown GPUs count as an A100."""
    if device.type != "cuda":
        return CPU
    return H100 if torch.cuda.get_device_capability(device)[0] >= 9 else A100
