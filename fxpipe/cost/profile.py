"""Measured times of sections on this device: each section is run and timed.

A section reads the tensors of the model and of the example, whose indices decide how long lookups and sums of
rows take, and synthetic values where other sections would have computed them, but for what these make of such
integers alone: which labels are ignored goes with the labels.  What lanes exchange does not
travel here: its time is that of the link.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import fx, nn
from torch.fx.passes.split_module import split_module

from fxpipe.cost.calibration.background_load import busy_threads
from fxpipe.cost.calibration.clock import Timed, medians_in_turns, seconds_until_done
from fxpipe.cost.devices.device import Device
from fxpipe.cost.kinds import kind_of
from fxpipe.cost.nodes import node_seconds
from fxpipe.errors import ScheduleError
from fxpipe.ir.compiled import is_compiled, stretches
from fxpipe.ir.graph import Input, Kind, Section
from fxpipe.ir.nodes import copy_graph
from fxpipe.ir.ops import is_between_lanes, lane_group
from fxpipe.ir.size import size_names, without_names
from fxpipe.ir.step_invariants import copied
from fxpipe.ir.storage import call_nodes, leading_to, storage_root, written_arguments
from fxpipe.plan.attribute_state import kept_slots, kept_tensors
from fxpipe.plan.dtensors import local
from fxpipe.plan.step import Tier
from fxpipe.plan.tensors import in_strides, storage_bytes
from fxpipe.plan.work import BETWEEN_LANES
from fxpipe.runtime.batch.microbatches import batch_leaves
from fxpipe.runtime.program.accelerator import is_accelerator
from fxpipe.runtime.program.checks import expect
from fxpipe.runtime.program.inductor import inductor
from fxpipe.runtime.program.lanes import AloneLane, running
from fxpipe.runtime.program.offload import open_store
from fxpipe.schedule.costs import TIMES, Costs
from fxpipe.schedule.ops import Color, Phase

Known = Mapping[tuple[Kind, str], torch.Tensor]
"""The tensors of the model and of the example, by the kind and name of the input."""

SAMPLE = 1 << 27  # bytes


def known_tensors(model: nn.Module, example: object, constants: Mapping[str, torch.Tensor]) -> Known:
    """The tensors that sections can be run on; those on the meta device have no values."""
    by_kind: dict[Kind, dict[str, torch.Tensor]] = {
        Kind.PARAMETER: {name: local(p) for name, p in model.named_parameters()},
        Kind.BUFFER: kept_tensors(model, kept_slots(model))
        | {name: local(b) for name, b in model.named_buffers()},
        Kind.CONSTANT: dict(constants),
        Kind.BATCH: {name: x for name, x in batch_leaves(example) if isinstance(x, torch.Tensor)},
    }
    return {
        (kind, name): tensor.detach()
        for kind, tensors in by_kind.items()
        for name, tensor in tensors.items()
        if not tensor.is_meta
    }


def measured_seconds(
    sections: tuple[Section, ...],
    graph: fx.Graph,
    device: torch.device,
    described: Device,
    known: Known,
    compiled: Collection[Phase],
    ranks: int,
) -> dict[Color, float]:
    """The median seconds of some runs of each section, plus its overhead in a program, and the time of the
    link for what lanes exchange.

    The sections of a stage run in turns, as those of a step do.  graph: that they are cut from.  compiled:
    the phases of which sections are compiled.  ranks: that share this machine, whose other cores compute
    meanwhile.
    Raises ScheduleError for an op that fails on synthetic inputs.
    """
    between = {
        section.color: [n for n in call_nodes(section.graph) if is_between_lanes(n.target)]
        for section in sections
    }
    lanes = max((lane_group(node).number for nodes in between.values() for node in nodes), default=1)
    of_stage = defaultdict[int, list[Section]](list)
    for section in sections:
        of_stage[section.stage].append(section)
    medians_of = dict[Color, float]()
    values = _Values(graph, device, known)
    # The other ranks of this machine compute as well, which slows caches and memory down.
    with running(AloneLane(0, lanes)), torch.no_grad(), busy_threads(_others(ranks, device)):
        for each in of_stage.values():
            # Their inputs are freed before those of the next stage are made.
            medians = medians_in_turns(
                [_timed(section, device, values, compiled) for section in each], device
            )
            medians_of |= zip((section.color for section in each), medians, strict=True)
    return {
        color: described.stage_overhead
        + medians_of[color]
        # A lane alone has nobody to exchange with, so this part is computed.
        + sum(node_seconds(node, described) for node in nodes if kind_of(node) == BETWEEN_LANES)
        for color, nodes in between.items()
    }


def _others(ranks: int, device: torch.device) -> int:
    """The number of ranks, of so many, that compute beside this one on the cores of this machine."""
    if is_accelerator(device):
        return 0
    # More than the machine has cores for would measure a machine that is overloaded.
    return max(1, min(ranks, len(os.sched_getaffinity(0)) // torch.get_num_threads())) - 1


def _timed(section: Section, device: torch.device, values: _Values, compiled: Collection[Phase]) -> Timed:
    # The checks of data would fail on values that are made up.
    graph = _without_checks(section.graph)
    function = _function(graph, section.phase) if is_compiled(section, compiled) else _by_op(graph)
    written = _written(graph)
    inputs, overwritten = list[object](), list[torch.Tensor]()
    generator = torch.Generator(device)  # the user's random numbers stay as they are
    for node in graph.find_nodes(op="placeholder"):
        step_input = node.meta.get("input")
        kind = step_input.kind if isinstance(step_input, Input) else None
        value: object = 0 if kind is Kind.KEY else values.of(node)
        if value is None:
            flat, value = _made_up(node, generator)
            if node in written and kind is not Kind.GRADIENT:  # gradients are only added to
                # Other inputs stay as they are, so that only these need be made again before each run.
                overwritten.append(flat)
        inputs.append(value)

    def fill_again() -> None:
        """An op that overwrites its input would else work on ever smaller or larger numbers."""
        for flat in overwritten:
            _fill(flat, generator)

    return Timed(partial(_run, section, function, *inputs), fill_again)


def _by_op(graph: fx.Graph) -> Callable[..., object]:
    if size_names(graph.nodes):  # the text of a module has no variables for them
        graph = copy_graph(graph)
        without_names(graph)
    return fx.GraphModule(nn.Module(), graph).forward


def _function(graph: fx.Graph, phase: Phase) -> Callable[..., object]:
    """A section as Inductor compiles it: as a whole, of a W its stretches."""
    if phase is not Phase.W:
        return inductor(_by_op(graph))
    stretch_of = {node: k for k, nodes in enumerate(stretches(call_nodes(graph))) for node in nodes}
    part, behind = dict[fx.Node, int](), 0  # the stretches have odd numbers
    for node in call_nodes(graph):
        part[node] = 2 * stretch_of[node] + 1 if node in stretch_of else behind
        behind = max(behind, part[node] + part[node] % 2)
    parts = split_module(fx.GraphModule(nn.Module(), graph), nn.Module(), part.__getitem__)
    for k in {*stretch_of.values()}:
        name = f"submod_{2 * k + 1}"
        setattr(parts, name, _Called(inductor(getattr(parts, name).forward)))
    return parts.forward


class _Called(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.forward = function


def _run(section: Section, function: Callable[..., object], *inputs: object) -> None:
    try:
        function(*inputs)
    except RuntimeError as error:
        cause = str(error).strip().splitlines()[0].rstrip(".")
        raise ScheduleError(
            f"costs='measured' runs {section.phase} of stage {section.stage} on synthetic inputs, and "
            f"an op fails on them: {cause}. Compile with costs='analytic'."
        ) from error


def _written(graph: fx.Graph) -> Set[fx.Node]:
    """The owners of the storages that ops of the section overwrite, inputs among them."""
    arguments = (x for n in graph.nodes for x in written_arguments(n.target, n.args, n.kwargs))
    return {storage_root(x) for x in arguments if isinstance(x, fx.Node)}


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
    out = seconds_until_done(lambda: store.wait(store.write(sample, 0)), device)
    back = seconds_until_done(lambda: store.wait(store.read(sample, 0, written)), device)
    return SAMPLE / max(out, back)


def with_seconds(costs: Costs, seconds: Mapping[Color, float]) -> Costs:
    """The costs with measured times of sections; bytes and edges stay."""
    stages = list(costs.stages)
    for color, time in seconds.items():
        times = {TIMES[color.phase]: time}
        stages[color.stage] = replace(stages[color.stage], **times)
    return replace(costs, stages=tuple(stages))


class _Values:
    """The values of the inputs of sections that are known.  Sections do not change them."""

    def __init__(self, graph: fx.Graph, device: torch.device, known: Known) -> None:
        self._nodes = {node.name: node for node in graph.nodes}
        self._device, self._known = device, known

    def of(self, placeholder: fx.Node) -> torch.Tensor | None:
        """The tensor of the model or the example, or what ops make of integers of these alone."""
        step_input, like = placeholder.meta.get("input"), placeholder.meta["val"]
        if not isinstance(step_input, Input):
            return self._of_integers(self._nodes[placeholder.name])
        if step_input.computed is not None:
            return self._of_integers(step_input.computed)
        tensor = self._known.get((step_input.kind, step_input.name))
        if tensor is None or (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
            return None
        return in_strides(tensor.to(self._device), like.stride())

    def _of_integers(self, node: fx.Node) -> torch.Tensor | None:
        needed = leading_to([node], _has_integers)
        if any(x not in needed for n in needed for x in n.all_input_nodes) or not _has_integers(node):
            return None
        graph = fx.Graph()
        copies = copied(needed, graph, None)
        graph.output(copies[node])
        inputs = [self.of(x) for x in graph.find_nodes(op="placeholder")]
        value = None if any(x is None for x in inputs) else _by_op(graph)(*inputs)
        return value if isinstance(value, torch.Tensor) else None


def _has_integers(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and not (val.is_floating_point() or val.is_complex())


def _made_up(node: fx.Node, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """The memory of an input with the values of ``_fill``, and the input, in its shape and strides."""
    val = node.meta["val"]
    flat = torch.empty(storage_bytes(val) // val.element_size(), dtype=val.dtype, device=generator.device)
    _fill(flat, generator)
    return flat, flat.as_strided(val.shape, val.stride())


def _fill(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Small numbers; for integers zeros, which are valid indices."""
    if tensor.is_floating_point():
        tensor.normal_(std=0.02, generator=generator)
    else:
        tensor.zero_()
