"""Tells what a step cannot be on the devices whose costs it has, before it runs there."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import fx

from fxpipe.cost.devices.device import Device
from fxpipe.cost.devices.known_devices import tier_of
from fxpipe.errors import number_of
from fxpipe.plan.artifact import Plan
from fxpipe.plan.memory import rank_memory
from fxpipe.schedule.units import bytes_text


def warn_of_memory(plan: Plan, devices: Sequence[Device]) -> None:
    """Warn where the simulated peak of a rank is above the memory of its device.  devices: of the ranks."""
    needs = rank_memory(plan, plan.prediction.peak_memory)
    above = [
        rank
        for rank, (need, device) in enumerate(zip(needs, devices, strict=True))
        if not device.holds(need.peak)
    ]
    if not above:
        return
    rank = max(above, key=lambda rank: needs[rank].peak)
    others = f" (and {number_of(len(above) - 1, 'other')})" if len(above) > 1 else ""
    state = f", and {bytes_text(needs[rank].adamw)} more of an AdamW" if needs[rank].adamw else ""
    warnings.warn(
        f"A step does not fit its devices: rank {rank}{others} is simulated to hold "
        f"{bytes_text(needs[rank].peak)}{state}; {devices[rank].name} has "
        f"{bytes_text(devices[rank].memory_size)}. Give "
        'memory_limit="…GiB", with which schedule="auto", recompute="auto" and offload="auto" find steps '
        "that need less; or take smaller microbatches or more ranks.",
        stacklevel=2,
    )


def warn_of_attention(graph: fx.Graph, traced_on: torch.device, device: Device) -> None:
    """Warn where attention was traced as matrix products, which an accelerator computes in one kernel.

    traced_on: where the step was traced.  device: whose costs the step has.
    """
    found = graph.find_nodes(op="call_function", target=torch.ops.aten._safe_softmax.default)
    products = [node for node in found if node.meta["val"].dim() == 4]  # of others no device has a kernel
    if products and traced_on.type in ("cpu", "meta") and tier_of(device.name) == "host":
        warnings.warn(
            f"{number_of(len(products), 'attention')} of the step became products of all tokens with all, as "
            "this CPU has no kernel for them (dropout, heads of two widths, a bias with a gradient): they "
            f"take more memory and time than on {device.name}. fxpipe plan has what they take there.",
            stacklevel=2,
        )
