"""Measured times of sections on this device: each section is run on synthetic inputs and timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from fxpipe.errors import ScheduleError
from fxpipe.ir.graph import Color, Input, Kind, Phase, Section
from fxpipe.runtime.checks import expect
from fxpipe.runtime.offloader import Tier, open_store
from fxpipe.runtime.tensors import storage_bytes
from fxpipe.schedule.costs import Costs

RUNS = 3
SAMPLE = 1 << 27  # bytes
_FIELDS = {Phase.F: "forward", Phase.B: "backward", Phase.W: "weight"}


def measured_seconds(
    sections: tuple[Section, ...], device: torch.device, overhead: float
) -> dict[Color, float]:
    """The median seconds of a few runs of each section, plus its overhead in a program.

    Raises ScheduleError for an op that fails on synthetic inputs.
    """
    taken = {}
    for section in sections:
        graph = _without_checks(section.graph)
        module = fx.GraphModule(nn.Module(), graph)
        inputs = [_made_up(n, device) for n in graph.find_nodes(op="placeholder")]
        try:
            with torch.no_grad():
                seconds = [_timed(partial(module, *inputs), device) for _ in range(RUNS + 1)]
        except RuntimeError as error:
            raise ScheduleError(
                f"costs='measured' runs {section.phase} of stage {section.stage} on synthetic inputs, and "
                f"an op fails on them: {str(error).strip().splitlines()[0]} Compile with costs='analytic'."
            ) from error
        taken[section.color] = overhead + statistics.median(seconds[1:])
    return taken


def _without_checks(graph: fx.Graph) -> fx.Graph:
    """A copy without the checks of the data, which synthetic inputs would not pass."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    for check in copy.find_nodes(op="call_function", target=expect):
        copy.erase_node(check)
    return copy


def measured_bandwidth(tier: Tier, directory: Path | None, device: torch.device) -> float:
    """The offload bandwidth in bytes per second, of the slower direction."""
    store = open_store(tier, SAMPLE, directory, device)
    sample = torch.zeros(SAMPLE, dtype=torch.uint8, device=device)
    written = store.write(sample, 0)
    store.wait(written)  # the first time, memory and files are made
    out = _timed(lambda: store.wait(store.write(sample, 0)), device)
    back = _timed(lambda: store.wait(store.read(sample, 0, written)), device)
    return SAMPLE / max(out, back)


def with_seconds(costs: Costs, seconds: Mapping[Color, float]) -> Costs:
    """The costs with measured times of sections; bytes and edges stay."""
    stages = list(costs.stages)
    for color, taken in seconds.items():
        times = {_FIELDS[color.phase]: taken}
        stages[color.stage] = replace(stages[color.stage], **times)
    return replace(costs, stages=tuple(stages))


def _made_up(node: fx.Node, device: torch.device) -> Any:
    """An input of the right shape: zeros for integers, which are valid indices, else small numbers."""
    given = node.meta.get("input")
    if isinstance(given, Input) and given.kind is Kind.KEY:
        return 0
    val = node.meta["val"]
    flat = torch.empty(storage_bytes(val) // val.element_size(), dtype=val.dtype, device=device)
    flat = flat.normal_(std=0.02) if val.is_floating_point() else flat.zero_()
    return flat.as_strided(val.shape, val.stride())


def _timed(run: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    before = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - before
