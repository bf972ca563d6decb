"""Every private torch symbol that the compiler uses, and nothing else (checked with torch 2.11 to 2.15).

A new torch release that moves one of these breaks here, by name, and nowhere else; or in ``nodes.py``, or in
``patches.py``, which has what the compiler replaces in torch while it traces.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Callable, MutableMapping, Sequence
from functools import cache
from typing import Any

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
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type
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


@cache
def is_made_of_tensors(kind: type) -> bool:
    """Whether tensors of this class are others with a meaning, on which their ops run, as DTensors are."""
    return bool(is_traceable_wrapper_subclass_type(kind))


def make_fx(function: Callable[..., Any]) -> Callable[..., torch.fx.GraphModule]:
    """A trace of the function on the tensors that it is given, fake ones, and constants beside them.

    Nodes are not told by which of torch's Python functions they were made.
    """
    return proxy_tensor.make_fx(
        function, tracing_mode="real", _allow_non_fake_inputs=True, _disable_torch_fn_metadata_mode=True
    )


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
    mode = get_proxy_mode()
    if mode is None:  # as where torch makes a part of a mesh, of real tensors
        return None
    slot = get_proxy_slot(tensor, mode.tracer, None)
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


def apply_pending_writes(tensor: torch.Tensor) -> None:
    """Record the ops that bring a tensor up to date with the writes to its memory, now rather than at its
    next use, inside ``torch.func.functionalize``."""
    torch._sync(tensor)  # type: ignore[attr-defined, no-untyped-call]


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
