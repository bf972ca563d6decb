"""What of torch is another one while a model is traced.

Beside ``compat.py``, what a new torch may break.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.nn import functional
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import checkpoint

from fxpipe.ir.compat import FakeTensor
from fxpipe.runtime.torch_private import no_modes


def compiling_flag() -> contextlib.AbstractContextManager[object]:
    """Let the model see ``torch.compiler.is_compiling()`` as true.

    Models query it before they branch on data (attention masks, expert routing).  ``is_exporting()`` stays
    false: models query it before they rely on the example's shapes, which a program may do.
    """
    return mock.patch.object(torch.compiler, "_is_compiling_flag", True)


@contextlib.contextmanager
def graphs_alone() -> Iterator[None]:
    """Give the graphs of traces as they are, with the Python code of their modules when it is called.

    Torch looks for dead numbers among their nodes, a twentieth of the time of a trace: here all are tensors.
    """
    with _use_lazy_graph_module(True), mock.patch.object(fx.Graph, "eliminate_dead_code", _remove_nothing):
        yield


def _remove_nothing(graph: fx.Graph, is_impure: object = None) -> bool:
    return False


def uncompiled() -> contextlib.AbstractContextManager[object]:
    """Run what is ``torch.compile``d as it is written, in a trace by make_fx."""
    from torch._dynamo import config

    patch: contextlib.AbstractContextManager[object] = config.patch(error_on_nested_fx_trace=False)
    return patch  # then the function is called


def unoptimized_scripts() -> contextlib.AbstractContextManager[object]:
    """Let functions of TorchScript run the ops that are written, in each run: from their second one on it
    replaces some."""
    context: contextlib.AbstractContextManager[object] = torch.jit.optimized_execution(False)  # type: ignore[attr-defined]
    return context


def weighted_errors() -> contextlib.AbstractContextManager[object]:
    """Let ``l1_loss`` have its weight where modes see torch's functions, to which torch 2.11 to 2.14 give it
    without one."""
    hand_on = functional.handle_torch_function  # type: ignore[attr-defined]

    def handle(function: object, relevant: tuple[object, ...], *args: object, **kwargs: object) -> object:
        if function is functional.l1_loss:
            _, _, kwargs["weight"] = relevant  # as what a class may handle
        return hand_on(function, relevant, *args, **kwargs)

    return mock.patch.object(functional, "handle_torch_function", handle)


def whole_heads() -> contextlib.AbstractContextManager[object]:
    """Let a head and its cross-entropy that torch takes in chunks, by one op since torch 2.13, be ops that
    are known: fxpipe makes chunks of its own, and their mean is one over the labels of all microbatches."""
    try:
        from torch.nn.modules import linear_cross_entropy as module
    except ImportError:
        return contextlib.nullcontext()

    def reduced(
        x: Any, head: Any, labels: Any, bias: Any, weight: Any, reduction: str, ignored: int, *_: object
    ) -> Any:
        logits = functional.linear(x, head, bias)
        return (functional.cross_entropy(logits, labels, weight, ignore_index=ignored, reduction=reduction),)

    def of_each(x: Any, head: Any, labels: Any, bias: Any, weight: Any, ignored: int, *_: object) -> Any:
        return reduced(x, head, labels, bias, weight, "none", ignored)[0]

    name = "_linear_cross_entropy_batch_chunked"
    ops: Any = {name: reduced, f"{name}_no_reduction": of_each}
    patch: contextlib.AbstractContextManager[object] = mock.patch.multiple(module, **ops)
    return patch


def without_log() -> contextlib.AbstractContextManager[object]:
    """Let fake tensors raise an error without logging its traceback first."""
    return mock.patch.object(logging.getLogger(FakeTensor.__module__), "disabled", True)


def selective_checkpoints() -> contextlib.AbstractContextManager[object]:
    """Let the policy of a selective activation checkpointing decide what is saved, as in eager.

    In a trace torch saves all and marks the nodes, for a compiler that recomputes by marks.
    """

    def is_compiling(*_: object) -> bool:
        return False

    return mock.patch.object(checkpoint, "_is_compiling", is_compiling)


@contextlib.contextmanager
def checkpoints_that_end() -> Iterator[None]:
    """Run the functions of activation checkpointing again as they ran, and end it where an error occurs.

    In a backward no mode sees torch's functions: what the trace replaces there, such as masks of attention,
    would be replaced in the first run alone.  While an error is alive, torch 2.11 leaves its hooks for saved
    tensors to later traces and to eager.
    """
    generators: list[Generator[object]] = []
    name = "_checkpoint_without_reentrant_generator"
    name = f"{name}_impl" if hasattr(checkpoint, f"{name}_impl") else name  # since torch 2.14
    generator = getattr(checkpoint, name)

    def noted(fn: Any, *args: Any, **kwargs: Any) -> Generator[object]:
        generators.append(generator(_under_these_modes(fn), *args, **kwargs))
        return generators[-1]

    try:
        with mock.patch.object(checkpoint, name, noted):
            yield
    finally:
        for each in reversed(generators):
            each.close()


def _under_these_modes(function: Callable[..., object]) -> Callable[..., object]:
    """A function that runs under the modes of torch's functions that are active now."""
    modes = _get_current_function_mode_stack()

    def run(*args: Any, **kwargs: Any) -> object:
        active = [*map(id, _get_current_function_mode_stack())]
        with contextlib.ExitStack() as pushed:
            for mode in modes:
                if id(mode) not in active:
                    _push_mode(mode)
                    pushed.callback(_pop_mode)
            return function(*args, **kwargs)

    return run


@contextlib.contextmanager
def plain_kernels() -> Iterator[None]:
    """Let ATen use its own ops instead of those of cuDNN and oneDNN.

    The latter keep a workspace that is empty without autograd (``mkldnn_rnn_layer``), or write to arguments
    that their schemas do not mark (``cudnn_batch_norm``).
    """
    before = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    torch._C._set_cudnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before[0])
        torch._C._set_cudnn_enabled(before[1])


@contextlib.contextmanager
def as_lane(meshes: Any, lanes: int, lane: int, place: Callable[[str], int | None]) -> Iterator[None]:
    """Let DTensors, and code that asks for the number of its process, compute as one of the lanes does.

    meshes: the class DeviceMesh.  A plan has several equal meshes, in the hooks of modules among others.
    place: that of the lane in a process group of lanes, by its name; None for other groups.
    """
    known: dict[int, tuple[Any, object]] = {}  # by id, with the mesh, which keeps it

    def coordinate(mesh: Any) -> object:
        before = vars(mesh)["_coordinate_on_dim"]
        if before is None:
            return None
        if id(mesh) not in known:
            groups = getattr(mesh, "_dim_group_names", [None] * len(before))
            places = [None if name is None else place(name) for name in groups]
            there = [old if new is None else new for old, new in zip(before, places, strict=True)]
            known[id(mesh)] = mesh, type(before)(there)
        return known[id(mesh)][1]

    def assign(mesh: Any, coordinates: object) -> None:
        vars(mesh)["_coordinate_on_dim"] = coordinates
        known.pop(id(mesh), None)

    def rank(group: torch.distributed.ProcessGroup | None = None) -> int:
        process: int = get_rank(group)
        if group is None:
            return process - own_lane + lane
        there = place(group.group_name)
        return process if there is None else there

    def local_rank(mesh: Any, mesh_dim: int | str | None = None) -> int:
        there = place(mesh.get_group(mesh_dim).group_name)
        return before(mesh, mesh_dim) if there is None else there

    def outside_of_the_trace(*args: Any, **kwargs: Any) -> object:
        with no_modes():
            return sizes(*args, **kwargs)

    # Counts elements of a share by ops on positions, for each way of many to distribute a value.
    strided = sys.modules["torch.distributed.tensor"].placement_types._StridedShard
    sizes = strided.local_shard_size_and_offset
    before, get_rank = meshes.get_local_rank, torch.distributed.get_rank
    own_lane = get_rank() % lanes  # lanes are innermost
    meshes._coordinate_on_dim, meshes.get_local_rank = property(coordinate, assign), local_rank
    torch.distributed.get_rank = rank
    strided.local_shard_size_and_offset = outside_of_the_trace
    try:
        yield
    finally:
        del meshes._coordinate_on_dim
        strided.local_shard_size_and_offset = sizes
        meshes.get_local_rank, torch.distributed.get_rank = before, get_rank


@contextlib.contextmanager
def default_group(group: torch.distributed.ProcessGroup, is_initialized: bool) -> Iterator[None]:
    """Let a process group be the default one, also for code that holds the other one; other groups have the
    size of their part of it.

    group: of replicas, each of as many processes as the default one has of them.
    is_initialized: whether torch.distributed says that there is one.
    """
    dist: Any = torch.distributed
    module = dist.distributed_c10d
    before, get = dist.group.WORLD, module._get_default_group
    size = vars(dist.ProcessGroup)["size"]  # as the class has it, which binds

    def size_of(any_group: torch.distributed.ProcessGroup) -> int:
        members = None if before is None else world.pg_group_ranks.get(any_group)
        if members is None or any_group is before:
            return int(group.size() if any_group is before else size.__get__(any_group)())
        each = size.__get__(before)() // group.size()
        return len({member // each for member in members})

    world = module._world
    world.pg_map[group] = world.pg_map.get(before, (dist.Backend("gloo"), None))
    world.pg_group_ranks[group] = {0: 0}
    module._get_default_group = lambda: group
    dist.ProcessGroup.size = size_of
    dist.group.WORLD = group if is_initialized else None
    try:
        yield
    finally:
        dist.group.WORLD, module._get_default_group = before, get
        dist.ProcessGroup.size = size
        del world.pg_map[group], world.pg_group_ranks[group]
