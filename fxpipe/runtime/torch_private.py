"""Every private torch symbol that running programs use; those of the compiler are in ``fxpipe.ir.compat``."""

from __future__ import annotations

import contextlib
import operator
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch._C._distributed_c10d import PrefixStore, Store
from torch.autograd import profiler as autograd_profiler
from torch.distributed.rendezvous import rendezvous
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as nn_module
from torch.optim import optimizer as nn_optimizer
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _python_dispatch as dispatch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as no_modes
from torch.utils.hooks import RemovableHandle

# The names of torch that others import from here; those below are this file's own.
__all__ = ["PrefixStore", "StorageWeakRef", "Store", "TorchDispatchMode", "no_modes", "pytree", "rendezvous"]

# One kernel for all tensors of a list, where an accelerator would start one for each.
copy_each: Callable[[list[Any], list[Any]], None] = torch._foreach_copy_
multiply_each: Callable[[list[Any], list[float]], tuple[torch.Tensor, ...]] = torch._foreach_mul
zero_each: Callable[[list[Any]], None] = torch._foreach_zero_

#: ``dist.all_gather`` to a list of tensors would allocate them once more.  torch 2.13 gave it another name.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

#: The files of torch's collectives, and of its transforms of functions.
OF_COLLECTIVES: str = dist.distributed_c10d.__file__
OF_TRANSFORMS = os.path.join(os.path.dirname(torch.__file__), "_functorch", "")


def default_store() -> Any:
    """The key-value store that torchrun's processes share."""
    return dist.distributed_c10d._get_default_store()


def collectives_begun() -> int:
    """How many collectives this process has begun on the default process group; 0 if its backend does not
    count them."""
    group: Any = dist.group.WORLD if dist.is_initialized() else None
    try:
        return 0 if group is None else int(group._get_sequence_number_for_group())
    except RuntimeError:  # another one than torch's
        return 0


def members_of(group: str) -> list[int]:
    """The processes of a group, by its name."""
    resolve: Any = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    return dist.get_process_group_ranks(resolve(group))


def as_one(group: dist.ProcessGroup, device: torch.device, start: Callable[[], object]) -> dist.Work:
    """The operations that ``start`` begins on a group, as one."""
    group._start_coalescing(device)
    start()
    return group._end_coalescing(device)


def communicator_error(group: dist.ProcessGroup, device: torch.device) -> Callable[[], str] | None:
    """A function that gives the error of a group's communicator: "", "TIMEOUT", "COMM_ERROR", "REMOTE_ERROR".

    None where the backend has no such function, as gloo, whose errors come out of waits.
    """
    get = getattr(group._get_backend(device), "get_error", None)
    return None if get is None else lambda: "" if get().name == "SUCCESS" else get().name


#: Kinds of hooks -> the attribute of a module that has them by number.
_HOOKS = {
    "forward pre-hook": "forward_pre_hooks",
    "forward hook": "forward_hooks",
    "backward pre-hook": "backward_pre_hooks",
    "backward hook": "backward_hooks",
}
_STATE_HOOKS = {
    "state-dict pre-hook": "_state_dict_pre_hooks",
    "state-dict hook": "_state_dict_hooks",
    "load-state-dict pre-hook": "_load_state_dict_pre_hooks",
    "load-state-dict hook": "_load_state_dict_post_hooks",
}


def hooks_of(module: torch.nn.Module) -> dict[str, Any]:
    """A module's hooks of its forward and backward: kind -> number -> function, to be changed in place."""
    return {kind: getattr(module, f"_{name}") for kind, name in _HOOKS.items()}


def hooks_of_all_modules() -> dict[str, Any]:
    """The hooks that torch calls for every module."""
    return {kind: getattr(nn_module, f"_global_{name}") for kind, name in _HOOKS.items()}


def state_hooks(module: torch.nn.Module) -> list[tuple[str, Any]]:
    """Kind and function of the hooks of a module's state dict."""
    pairs = ((kind, hook) for kind, name in _STATE_HOOKS.items() for hook in getattr(module, name).values())
    return [(kind, getattr(hook, "hook", hook)) for kind, hook in pairs]


def gradient_hooks(tensor: torch.Tensor) -> dict[int, Any]:
    """The hooks that a leaf's gradient has: number -> function."""
    return {**(tensor._backward_hooks or {}), **(tensor._post_accumulate_grad_hooks or {})}


#: The hooks of all optimizers that are not the user's, by torch's numbers.
_own_step_hooks = set[int]()


def before_each_update(function: Callable[[torch.optim.Optimizer], None]) -> None:
    """Call a function before each step of every optimizer, as no hook of the user's, from now on: torch goes
    through its hooks, of which none may be removed meanwhile."""
    handle = nn_optimizer.register_optimizer_step_pre_hook(lambda optimizer, *_: function(optimizer))
    _own_step_hooks.add(handle.id)


def after_each_update(function: Callable[[torch.optim.Optimizer], None]) -> None:
    """The same behind each step."""
    handle = nn_optimizer.register_optimizer_step_post_hook(lambda optimizer, *_: function(optimizer))
    _own_step_hooks.add(handle.id)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether functions of the user's are called before or behind each step of an optimizer."""
    of_optimizer = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    of_all = nn_optimizer._global_optimizer_pre_hooks, nn_optimizer._global_optimizer_post_hooks
    return any((*of_optimizer, *(hooks.keys() - _own_step_hooks for hooks in of_all)))


def hooks_of_saved_tensors() -> bool:
    """Whether this thread has hooks for what a backward saves."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def hooks_registered() -> int:
    """The number of hooks that this process has registered so far, of modules, tensors and optimizers."""
    number: int = RemovableHandle.next_id
    return number


def is_watched() -> bool:
    """Whether a TorchDispatchMode sees the ops of this thread."""
    return torch._C._len_torch_dispatch_stack() > 0


@dataclass(frozen=True)
class ThreadState:
    """The state that with-blocks of torch set for a thread: modes, autocast on one type of device, and
    whether gradients are recorded."""

    dispatch: tuple[Any, ...]
    function: tuple[object, ...]
    grad: bool
    autocast: tuple[bool, torch.dtype]
    device_type: str

    @staticmethod
    def now(device_type: str) -> ThreadState:
        return ThreadState(
            tuple(dispatch._get_current_dispatch_mode_stack()),
            tuple(_get_current_function_mode_stack()),
            torch.is_grad_enabled(),
            (torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)),
            device_type,
        )

    def set(self, now: ThreadState) -> None:
        """Make it that of the thread, where there is another one now."""
        if self == now:
            return
        for _ in now.dispatch:
            dispatch._pop_mode()
        for mode in self.dispatch:
            dispatch._push_mode(mode)
        for _ in now.function:
            _pop_mode()
        for mode in self.function:
            _push_mode(mode)
        torch.set_grad_enabled(self.grad)
        torch.set_autocast_enabled(self.device_type, self.autocast[0])
        torch.set_autocast_dtype(self.device_type, self.autocast[1])


def schema_of(op: object) -> Any:
    """The schema of an op of torch; None of any other function."""
    return getattr(op, "_schema", None)


def overload_name(op: Any) -> str:
    """The name of an op's overload: "default", "Tensor"."""
    name: str = op._overloadname
    return name


def tensors_by_kind(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """A module's own parameters, and its own buffers, by name, to be changed in place."""
    return module._parameters, module._buffers


def storage_number(tensor: torch.Tensor) -> int:
    """A number that no other storage has as long as this tensor's lives."""
    number: int = tensor.untyped_storage()._cdata
    return number


def writes_to(tensor: torch.Tensor) -> int:
    """How often a tensor's memory was written to in place, as autograd counts it."""
    return tensor._version


def is_profiling() -> bool:
    """Whether torch's profiler runs, on whatever thread it was started."""
    return bool(autograd_profiler._is_profiler_enabled)


def as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a subclass as one of torch's own class, in the same memory."""
    with of_base_class():
        return tensor.as_subclass(torch.Tensor)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without its gradient's history, as one of torch's own class, whatever its class is."""
    with of_base_class():
        return tensor.detach()


def holders_of_memory(memory: torch.UntypedStorage) -> int:
    """The number of tensors and others that have it, beside this object."""
    return int(torch._C._storage_Use_Count(memory._cdata)) - 1


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor of torch's own class has memory, and does not stand for one in a transform."""
    return bool(torch._C._has_storage(tensor))


def of_base_class() -> contextlib.AbstractContextManager[None]:
    """Inside of it functions take tensors of subclasses as torch's own, and give such."""
    context: contextlib.AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return context


def fake_store() -> Store:
    """A store for a process group of torch's fake backend, which sends nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # which registers the backend

    return FakeStore()


def fake_tensors() -> contextlib.AbstractContextManager[Any]:
    """Inside of it new tensors are fake: they have a layout, and no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv())  # all shapes are known; but Inductor's cache asks for it


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a layout alone, in a trace."""
    known = sys.modules.get("torch._subclasses.fake_tensor")
    return known is not None and isinstance(tensor, known.FakeTensor)


def decompositions() -> dict[object, Callable[..., object]]:
    """The ops that Inductor replaces by others before it compiles a graph."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def default_kernels() -> str:
    """The folder of Inductor's kernels where nobody chose one.  An import of Inductor, as transformers does
    it, writes it to the environment."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return os.path.abspath(default_cache_dir())


def compile_by_inductor(
    traced: fx.GraphModule, inputs: Sequence[torch.Tensor]
) -> Callable[[list[torch.Tensor]], Sequence[object]]:
    """Compile a graph of ATen ops, which returns a list, for inputs like these, which may be fake.

    The result takes the inputs in a list, which it empties: each is freed after its last use.
    """
    from torch import _inductor

    graph = fx.Graph()
    values = graph.placeholder("inputs")
    values.meta["steal_arg"] = True
    placeholders = traced.graph.find_nodes(op="placeholder")
    copies = {n: graph.call_function(operator.getitem, (values, i)) for i, n in enumerate(placeholders)}
    results = graph.graph_copy(traced.graph, copies)
    graph.output(tuple(results))  # type: ignore[arg-type]
    compiled: Callable[..., Any] = _inductor.compile(fx.GraphModule(traced, graph), [list(inputs)])  # type: ignore[list-item]
    return compiled
