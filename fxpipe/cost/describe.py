"""The description that a compilation takes its costs from: of a named device, or of the device at hand."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import fx

from fxpipe.cost.arithmetic import arithmetic_of
from fxpipe.cost.calibrate import calibrated
from fxpipe.cost.device import Device
from fxpipe.cost.known_devices import CPU, device_named, is_device_name, reported_device
from fxpipe.cost.nodes import node_flops
from fxpipe.ir.storage import call_nodes

log = logging.getLogger("fxpipe")

#: Kinds of devices other than the CPU that have a description.
ACCELERATORS = ("cuda", "xpu")


def describe(costs: str, device: torch.device, graph: fx.Graph) -> Device:
    """The device that the costs of a graph are computed for.

    costs: the name of a device; else the device at hand is described: the CPU as one core, an accelerator by
    the name that it reports.  One that no table has is calibrated, in the arithmetic of the graph.
    """
    if is_device_name(costs):
        return device_named(costs)
    if device.type not in ACCELERATORS:
        return CPU
    name, memory = reported(device)
    return reported_device(name, memory) or _measured(device, name, memory, arithmetic_used(graph))


def _measured(device: torch.device, name: str, memory: float, arithmetic: Iterable[str]) -> Device:
    found = calibrated(device, f"{name} (calibrated)", memory, arithmetic)
    rates = ", ".join(f"{kind} {rate / 1e12:.3g} TFLOP/s" for kind, rate in found.flops.items())
    log.warning(
        "No description of %s: its rates were measured (%s, memory %.3g GB/s); its links count as PCIe. "
        "costs= takes the name of a device that is known.",
        name,
        rates,
        found.memory_bandwidth / 1e9,
    )
    return found


def arithmetic_used(graph: fx.Graph) -> set[str]:
    """The arithmetic of a graph's matrix products, convolutions and attention."""
    return {arithmetic_of(node) for node in call_nodes(graph) if node_flops(node)}


def reported(device: torch.device) -> tuple[str, float]:
    """The name of an accelerator and the bytes of its memory, as torch reports them."""
    found = torch.get_device_module(device).get_device_properties(device)
    return str(found.name), float(found.total_memory)
