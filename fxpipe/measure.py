"""What sections really take on this device: each is run on made-up inputs and timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from fxpipe.graph import Input, Kind, Phase, Section
from fxpipe.schedule.costs import Costs

RUNS = 3
_FIELDS = {Phase.F: "forward", Phase.B: "backward", Phase.W: "weight"}


def measured_costs(sections: tuple[Section, ...], costs: Costs, device: torch.device) -> Costs:
    """``costs`` with the stages' times replaced by the median of a few runs; bytes and edges stay."""
    stages = list(costs.stages)
    for section in sections:
        module = fx.GraphModule(nn.Module(), section.graph)
        inputs = [_made_up(n, device) for n in section.graph.find_nodes(op="placeholder")]
        with torch.no_grad():
            seconds = [_timed(partial(module, *inputs), device) for _ in range(RUNS + 1)]
        times = {_FIELDS[section.phase]: statistics.median(seconds[1:])}
        stages[section.stage] = replace(stages[section.stage], **times)
    return replace(costs, stages=tuple(stages))


def _made_up(node: fx.Node, device: torch.device) -> Any:
    """An input of the right shape: zeros for integers, which are valid indices, else small numbers."""
    given = node.meta.get("input")
    if isinstance(given, Input) and given.kind is Kind.KEY:
        return 0
    val = node.meta["val"]
    tensor = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=device)
    return tensor.normal_(std=0.02) if val.is_floating_point() else tensor.zero_()


def _timed(run: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    before = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - before
