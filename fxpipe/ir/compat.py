"""Every private torch symbol that the compiler uses, and nothing else (checked with torch 2.11 to 2.15).

A new torch release that moves one of these breaks here, by name, and nowhere else.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import threading
from collections.abc import Callable, Generator, Iterator, MutableMapping, Sequence
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch._C import Argument
from torch._C import DisableTorchFunction as no_function_modes
from torch._library import simple_registry
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import checkpoint
from torch.utils.checkpoint import _StopRecomputationError as StopRecomputation

from fxpipe.ir.nodes import new_node
from fxpipe.runtime.torch_private import TorchDispatchMode, no_modes, pytree

#: What others import from here of torch's own.
__all__ = [
    "Argument",
    "FakeTensor",
    "OpOverload",
    "StopRecomputation",
    "TorchDispatchMode",
    "no_function_modes",
    "no_modes",
    "pytree",
]

#: Raised by a fake tensor if the model reads a number that only real data has.
DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)


class FakeMode(FakeTensorMode):
    """Fake tensors; the workspace of the CTC loss, which depends on the longest target, gets its maximum
    length.

    ``results``: of ops that were appended to graphs (``fake_op_cache.py``).
    ``elsewhere`` is set to the line, as ``source`` gives it, of an op that another thread of Python's runs on
    them: no trace sees that.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._thread, self.elsewhere = threading.get_ident(), ""
        self.source: Callable[[], str] = str
        self.results: dict[Any, Any] = {}

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if threading.get_ident() != self._thread and _is_of_python():
            self.elsewhere = self.elsewhere or self.source() or str(func)
        if func is torch.ops.aten._ctc_loss.Tensor:
            scores, targets = args[:2]
            steps, rows = scores.shape[0], scores.shape[1] if scores.dim() == 3 else 1
            longest = targets.shape[1] if targets.dim() == 2 else targets.numel()
            with self:
                return scores.new_empty(rows), scores.new_empty(rows, steps, 2 * longest + 1)
        if kwargs and kwargs.get("device") is not None:
            _ask_for(kwargs["device"])
        return super().dispatch(func, types, args, kwargs)


@cache
def _ask_for(device: torch.device) -> None:
    """Raise eager's error of a device that is not here; a CUDA build without a driver fakes tensors on it."""
    with no_modes():
        torch.empty(0, device=device)


def _is_of_python() -> bool:
    """Whether Python code started this thread, rather than autograd for the backward on a GPU."""
    started = (x.ident for x in threading.enumerate() if not isinstance(x, threading._DummyThread))
    return threading.get_ident() in started


def make_fx(function: Callable[..., Any]) -> Callable[..., torch.fx.GraphModule]:
    """A trace of the function on the tensors that it is given, fake ones, and constants beside them.

    Nodes are not told by which of torch's Python functions they were made.
    """
    return proxy_tensor.make_fx(
        function, tracing_mode="real", _allow_non_fake_inputs=True, _disable_torch_fn_metadata_mode=True
    )


def compiling_flag() -> contextlib.AbstractContextManager[object]:
    """Let the model see ``torch.compiler.is_compiling()`` as true.

    Models query it before they branch on data (attention masks, expert routing).  ``is_exporting()`` stays
    false: models query it before they rely on the example's shapes, which a program may do.
    """
    return mock.patch.object(torch.compiler, "_is_compiling_flag", True)


def current_sequence_number() -> int:
    """The sequence number of the last autograd node of this thread."""
    autograd: Any = torch.autograd
    return int(autograd._get_sequence_nr()) - 1


def sequence_number(grad_fn: torch.autograd.graph.Node) -> int:
    return int(grad_fn._sequence_nr())


def gradient_hooks(parameter: torch.Tensor) -> list[Callable[..., object]]:
    """The hooks registered by ``parameter.register_hook``."""
    return list((parameter._backward_hooks or {}).values())


def has_accumulation_hooks(parameter: torch.Tensor) -> bool:
    """Whether a parameter has hooks of ``register_post_accumulate_grad_hook``."""
    return bool(parameter._post_accumulate_grad_hooks)


def is_real(value: object) -> bool:
    """Whether a value is a tensor with data, in a trace on fake tensors."""
    return isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)


def mark_as_parameter(tensor: torch.Tensor) -> None:
    """Let ``isinstance(tensor, nn.Parameter)`` be true."""
    tensor._is_param = True


def is_tracing() -> bool:
    """Whether a make_fx trace is running, without a Dynamo trace inside it."""
    return get_proxy_mode() is not None


def _tracer() -> Any:
    """The tracer of the running make_fx trace."""
    mode = get_proxy_mode()
    assert mode is not None, "no make_fx trace is running"
    return mode.tracer


def traced_graph() -> torch.fx.Graph:
    """The graph of the running make_fx trace."""
    graph: torch.fx.Graph = _tracer().graph
    return graph


def traced_constants() -> torch.nn.Module:
    """The module whose attributes are the constants of that graph."""
    root: torch.nn.Module = _tracer().root
    return root


def traced_node(tensor: torch.Tensor) -> torch.fx.Node | None:
    """The node of a tensor in the running trace; None if the trace has not seen the tensor."""
    if not is_tracing():  # as where torch makes a part of a mesh, of real tensors
        return None
    slot = get_proxy_slot(tensor, _tracer(), None)
    return None if slot is None else slot.proxy.node


def proxies() -> MutableMapping[torch.Tensor, Any]:
    """The tensors of the running trace that are alive -> what stands for each, with its node at
    ``.proxy.node``.  It may be changed."""
    tracker: MutableMapping[torch.Tensor, Any] = _tracer().tensor_tracker
    return tracker


def untraced() -> contextlib.AbstractContextManager[object]:
    """Record none of a block's ops in the running trace."""
    return proxy_tensor.disable_proxy_modes_tracing()


def fake_tensor(
    mode: FakeTensorMode,
    shape: Sequence[int],
    strides: Sequence[int],
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
    base: torch.Tensor | None,
) -> FakeTensor:
    """A fake tensor in new memory, or in that of ``base``."""
    storage = None if base is None else base.untyped_storage()
    with torch._C._DisableTorchDispatch():
        x = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        if storage is not None:
            x.set_(storage, offset, shape, strides)
    return FakeTensor(mode, x, device)


def node_value(result: Any) -> Any:
    """What a node says of its result, which may be changed later."""
    return proxy_tensor.extract_val(result)


def recorded(func: OpOverload, args: Any, kwargs: Any, run: Callable[..., tuple[Any, Any]]) -> Any:
    """Run an op and record it in the running trace, in less than half of the time of ``make_fx`` where that
    need not look for more: the op writes to nothing or to its first argument, which it returns, and takes
    results of nodes and plain values.

    run: runs such an op without recording it; gives its result and the value of its node.
    """
    tracer = _tracer()
    written = _written(func)
    tracked = tracer.tensor_tracker
    operands = None if written is None else _as_nodes((args, kwargs), tracked, takes_constants=not written)
    # Torch's own trace does the rest: it looks for subclasses, modes and constants.
    if operands is None:
        return func(*args, **kwargs)
    result, value = run(func, args, kwargs)
    name = func.overloadpacket.__name__
    node = new_node(tracer.graph, "call_function", func, operands[0], operands[1], name)
    node.meta["val"] = value
    proxy: Any = torch.fx.Proxy(node, tracer)
    if isinstance(result, torch.Tensor):
        tracer.tensor_tracker[result] = proxy_tensor._ProxyTensor(proxy, None)
        return result
    for place, x in enumerate(result):
        part = proxy[place]
        if x is not None:
            part.node.meta["val"] = value[place]
            tracer.tensor_tracker[x] = proxy_tensor._ProxyTensor(part, None)
    return result


def _as_nodes(arguments: Any, tracked: MutableMapping[torch.Tensor, Any], takes_constants: bool) -> Any:
    """The arguments with the nodes of their tensors; None if one has no node.

    takes_constants: also of tensors whose values the trace knows, beside others.  It knows the result of an
    op on such tensors alone: then None, too.
    """
    are_known = set[bool]()

    def as_node(x: object) -> Any:
        if type(x) in _PLAIN_TYPES:
            return x
        entry = tracked[x] if type(x) is FakeTensor else None
        if entry is None:
            raise KeyError
        # The trace computes with constants itself, and records nothing.
        are_known.add(entry.constant is not None)
        return entry.proxy.node

    try:
        nodes = torch.fx.node.map_aggregate(arguments, as_node)
    except KeyError:
        return None
    return nodes if True not in are_known or (takes_constants and False in are_known) else None


_PLAIN_TYPES = frozenset(
    (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
)


def is_plain(value: object) -> bool:
    """Whether an op's argument is neither a tensor nor anything that may lead to one."""
    # Its ends may be tensors.
    if isinstance(value, slice):
        return all(map(is_plain, (value.start, value.stop, value.step)))
    return (
        type(value) in _PLAIN_TYPES or isinstance(value, (torch.Size, np.ndarray, np.generic)) or value is ...
    )


@cache
def _written(func: object) -> int | None:
    """The number of tensors that an op writes to: none, or its first argument, which it returns.  None for an
    op that is not of ATen, reads data, is made of other ops, or gives something else than tensors."""
    if not isinstance(func, OpOverload) or func.namespace != "aten":
        return None
    asks = func in (torch.ops.aten.lift_fresh.default, torch.ops.aten.is_nonzero.default)
    reads = asks or torch.Tag.data_dependent_output in func.tags
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    schema = func._schema
    if reads or composite or {str(x.type) for x in schema.returns} not in ({"Tensor"}, {"List[Tensor]"}):
        return None
    written = [
        k for k, x in enumerate(schema.arguments) if x.alias_info is not None and x.alias_info.is_write
    ]
    # An out variant writes to an argument that is no operand.
    in_place = written == [0] and func.overloadpacket.__name__.endswith("_")
    return len(written) if not written or (in_place and torch.Tag.inplace_view not in func.tags) else None


def gives_new_tensors(func: Any) -> bool:
    """Whether an op of ATen computes tensors alone, and writes to none."""
    return _written(func) == 0


def is_placeholder(tensor: torch.Tensor) -> bool:
    """Whether a tensor is an input of the running trace that no op has written to."""
    node = traced_node(tensor)
    return node is not None and node.op == "placeholder"


def track(tensor: torch.Tensor, node: torch.fx.Node) -> None:
    """Let a fake tensor be the value of a node of the running trace."""
    # Else the tensor would get a second proxy, and equal nodes would differ.
    if traced_node(tensor) is node:
        return
    tracer = _tracer()
    proxy = torch.fx.Proxy(node, tracer)
    proxy_tensor.track_tensor_tree(tensor, proxy, constant=None, tracer=tracer)


def functional_node(tensor: torch.Tensor) -> torch.fx.Node:
    """The node of a tensor inside ``torch.func.functionalize`` in the running trace."""
    node = traced_node(torch._C._functorch.get_unwrapped(tensor))
    assert node is not None, "the trace has not seen the tensor"
    return node


def modules_without_code() -> contextlib.AbstractContextManager[None]:
    """Defer the Python code of traced graphs until it is called."""
    return _use_lazy_graph_module(True)


def apply_pending_writes(tensor: torch.Tensor) -> None:
    """Record the ops that bring a tensor up to date with the writes to its memory, now rather than at its
    next use, inside ``torch.func.functionalize``."""
    torch._sync(tensor)  # type: ignore[attr-defined, no-untyped-call]


def uncompiled() -> contextlib.AbstractContextManager[object]:
    """Run what is ``torch.compile``d as it is written, in a trace by make_fx."""
    from torch._dynamo import config

    patch: contextlib.AbstractContextManager[object] = config.patch(error_on_nested_fx_trace=False)
    return patch  # then the function is called


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
    generator = checkpoint._checkpoint_without_reentrant_generator

    def noted(fn: Any, *args: Any, **kwargs: Any) -> Generator[object]:
        generators.append(generator(_under_these_modes(fn), *args, **kwargs))
        return generators[-1]

    try:
        with mock.patch.object(checkpoint, generator.__name__, noted):
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


def has_kernel(op: OpOverload, device: str) -> bool:
    """Whether an op has its own kernel for this type of device."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), device.upper())


@cache
def registrar(op: OpOverload) -> str | None:
    """The Python module that registers an op, "" if torch does not tell; None for ops of torch itself.

    That is the module of a custom op's function, of the function of its fake, or of the file that made the
    op's ``torch.library.Library``; or else, of ops in C++, the loaded module that is called as the ops are.
    """
    if op.namespace in _OF_TORCH:
        return None
    name: str = op._schema.name
    custom, fake = OPDEFS.get(name), simple_registry.singleton.find(op.name()).fake_impl.kernel
    functions = [custom and custom._init_fn, fake and fake.func]
    modules = [function.__module__ for function in functions if function is not None]
    files = set(re.findall(r"registered at (.+):\d+", torch._C._dispatch_dump(name)))
    for loaded, module in [*sys.modules.items()]:
        if getattr(module, "__dict__", {}).get("__file__") in files:
            modules.append(loaded)
    modules += [op.namespace] if op.namespace in sys.modules else []
    return next((module for module in modules if not _REGISTERS_FOR_OTHERS.match(module)), "")


_REGISTERS_FOR_OTHERS = re.compile(r"torch\.(_?library|_ops)\b")
_OF_TORCH = {
    *("aten", "prims", "inductor", "inductor_prims", "rngprims", "profiler", "lanes", "symm_mem", "c10d"),
    *("_c10d_functional", "_c10d_functional_autograd", "_dtensor", "_native", "_quantized", "quantized"),
    *("mkl", "mkldnn", "mkldnn_prepacked", "onednn", "sparse"),
}


def takes_numbers(op: OpOverload) -> bool:
    """Whether the op takes Python's numbers in the place of tensors."""
    return torch._C._should_allow_numbers_as_tensors(op.overloadpacket.__name__)
