"""The tensors that a program trains and carries: parameters, buffers, and others that modules keep; all their
names, and which of them share memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxpipe.errors import CaptureError
from fxpipe.ir import compat
from fxpipe.ir.graph import Kind
from fxpipe.plan.attribute_state import KeptSlot, kept_slots
from fxpipe.plan.dtensors import is_dtensor, local
from fxpipe.plan.tensors import storage_bytes


@dataclass(frozen=True, eq=False)
class Registered:
    """One parameter or buffer; ``name``: its first name; ``slots``: all places that refer to it.

    ``is_kept``: whether it is in a plain attribute.  Such a tensor is replaced, not written to, when a step
    gives it another value.
    """

    kind: Kind
    name: str
    tensor: torch.Tensor
    slots: tuple[KeptSlot, ...]
    is_kept: bool = False

    @property
    def local(self) -> torch.Tensor:
        return local(self.tensor)

    def now(self) -> list[torch.Tensor | None]:
        """The current tensors, one for each slot."""
        return [slot.get() for slot in self.slots]


def registered(model: nn.Module, kept: Collection[str] = ()) -> list[Registered]:
    """Parameters, then buffers, then the tensors in plain attributes of these names, each once.

    Raises CaptureError for modules whose parameters cannot be followed, and for trainable parameters that
    share memory without being the same parameter: the ranks could not keep them equal.
    """
    slots: dict[int, list[KeptSlot]] = {}
    for path, module in model.named_modules():
        _check_module(path, module)
        for kind in ("_parameters", "_buffers"):
            for key, tensor in getattr(module, kind).items():
                if tensor is not None:
                    slots.setdefault(id(tensor), []).append(KeptSlot(module, (kind, key)))
    tensors = []
    for of_kind, named in ((Kind.PARAMETER, model.named_parameters()), (Kind.BUFFER, model.named_buffers())):
        tensors += [Registered(of_kind, name, tensor, tuple(slots[id(tensor)])) for name, tensor in named]
    for x in tensors:
        check_class(x.name, x.tensor)
        if compat.has_accumulation_hooks(x.tensor):
            raise CaptureError(
                f"{x.name!r} has a hook for after its gradient is accumulated, which programs do not call. "
                "Remove it (the handle's remove()) and do its work after the step, or change each "
                "microbatch's gradient by register_hook."
            )
    for a, b in overlapping(tensors):
        if a.tensor.requires_grad or b.tensor.requires_grad:
            raise CaptureError(
                f"{a.name!r} and {b.name!r} share memory and are two tensors, which ranks could not keep "
                "equal. Make them one parameter (self.b = self.a), or copy one of them."
            )
    for name, slot in kept_slots(model).items() if kept else ():
        tensor = slot.get()
        if name in kept and tensor is not None:
            tensors.append(Registered(Kind.BUFFER, name, tensor.detach(), (slot,), is_kept=True))
    return tensors


def check_class(name: str, tensor: torch.Tensor) -> None:
    """Raise CaptureError, naming the tensor, for one of a class that changes what torch's ops do, but for a
    DTensor, which the trace knows."""
    torchs = ("torch", "torch._tensor", "torch._C", "torch.nn.parameter")
    kind: Any = type(tensor)
    for base in () if is_dtensor(tensor) else kind.__mro__[: kind.__mro__.index(torch.Tensor)]:
        hooks = vars(base).keys() & {"__torch_function__", "__torch_dispatch__"}
        if not hooks or base.__module__ in torchs:
            continue
        what = f"{name!r} is a {base.__name__}, a subclass of torch.Tensor with ops of its own"
        if compat.is_made_of_tensors(kind):
            parts, _ = kind.__tensor_flatten__(tensor)
            raise CaptureError(
                f"{what}, and made of other tensors ({', '.join(parts)}). Register those as parameters or "
                "buffers, and let the forward make it of them: torch.nn.utils.parametrize does that, and "
                "torchao.utils.unwrap_tensor_subclass(model) by it."
            )
        raise CaptureError(
            f"{what}, which a program would leave out. Give a plain tensor: x.as_subclass(torch.Tensor)."
        )


def overlapping(tensors: Iterable[Registered]) -> list[tuple[Registered, Registered]]:
    """Pairs of neighbors in memory that overlap, in the order of the tensors, wherever those lie."""
    tensors = list(tensors)
    spans = []
    for place, x in enumerate(tensors):
        memory = x.local
        if not memory.is_meta and memory.layout is torch.strided and memory.numel():
            begin = memory.data_ptr()
            spans.append((memory.device.type, begin, begin + storage_bytes(memory), place))
    spans.sort(key=lambda span: span[:3])
    pairs = []
    for k, (device, _, end, a) in enumerate(spans):
        for other, begin, _, b in spans[k + 1 :]:
            if other != device or begin >= end:
                break
            pairs.append((min(a, b), max(a, b)))
    return [(tensors[a], tensors[b]) for a, b in sorted(pairs)]


def _check_module(path: str, module: nn.Module) -> None:
    where = f"{path!r}" if path else "The model"
    if isinstance(module, torch.jit.ScriptModule):
        raise CaptureError(
            f"{where} is a TorchScript module, whose parameters cannot be followed. Give the Python module "
            "that it was scripted from."
        )
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise CaptureError(
            f"{where} is a {type(module).__name__}. fxpipe spreads the model itself: give what it wraps "
            "(.module)."
        )
