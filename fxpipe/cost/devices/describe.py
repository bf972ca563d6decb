"""The description that a compilation takes its costs from: of a named device, or of the device at hand."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import fx

from fxpipe.cost.arithmetic import arithmetic_of
from fxpipe.cost.calibration.calibrate import calibrated
from fxpipe.cost.devices.device import Device
from fxpipe.cost.devices.device_file import CALIBRATED
from fxpipe.cost.devices.known_devices import CPU, device_named, is_device_name, reported_device
from fxpipe.ir.ops import has_flops
from fxpipe.ir.storage import call_nodes
from fxpipe.runtime.program.accelerator import identity, is_accelerator, memory_size
from fxpipe.strict import structure, unstructure

log = logging.getLogger("fxpipe")


def describe(costs: str, device: torch.device, graph: fx.Graph) -> Device:
    """The device that the costs of a graph are computed for.

    costs: the name of a device; else the device at hand is described: the CPU as one core, an accelerator by
    the name that it reports.  One that no table has is calibrated, in the arithmetic of the graph.
    """
    return device_named(costs) if is_device_name(costs) else described_here(device, arithmetic_used(graph))


def described_here(device: torch.device, arithmetic: Iterable[str] = ("tf32", "bfloat16")) -> Device:
    """The device at hand.  arithmetic: of a model, for the calibration."""
    if not is_accelerator(device):
        return CPU
    name, memory = identity(device)[0], memory_size(device)
    return reported_device(name, memory) or _measured(device, name, memory, arithmetic)


def _measured(device: torch.device, name: str, memory: int, arithmetic: Iterable[str]) -> Device:
    measured = calibrated(device, f"{name}{CALIBRATED}", memory, arithmetic)
    rates = ", ".join(f"{kind} {rate / 1e12:.3g} TFLOP/s" for kind, rate in measured.flops.items())
    log.warning(
        "No description of %s: its rates were measured (%s, memory %.3g GB/s); its links count as PCIe. "
        "costs= takes the name of a device that is known.",
        name,
        rates,
        measured.memory_bandwidth / 1e9,
    )
    return measured


def arithmetic_used(graph: fx.Graph) -> set[str]:
    """The arithmetic of a graph's matrix products, convolutions and attention."""
    return {arithmetic_of(node) for node in call_nodes(graph) if has_flops(node)}


def described_everywhere(
    device: torch.device, gather: Callable[[bytes], Sequence[bytes]]
) -> tuple[Device, ...]:
    """The description of each rank's device; one that no table has is calibrated.

    gather: the bytes of all ranks, in order; all of them call this.
    """
    here = json.dumps(unstructure(described_here(device))).encode()
    described = [structure(json.loads(text), Device) for text in gather(here)]
    # Calibrations of equal devices differ a little.
    first = {device.name: device for device in reversed(described)}
    return tuple(first[device.name] for device in described)
