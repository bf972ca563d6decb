"""What must be the same before and after a compilation: tensors by bits and type, attributes by identity."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

#: nn.Module's own attributes: their contents are compared tensor by tensor.
REGISTRIES = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters(remove_duplicate=False))


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """All buffers under all their names, also those that are not saved."""
    return {n: b.detach().clone() for n, b in model.named_buffers(remove_duplicate=False)}


@dataclass(frozen=True)
class State:
    tensors: dict[str, tuple[torch.Tensor, type, torch.Tensor]]  # itself, its type, its value
    attributes: dict[str, dict[str, Any]]  # of each module


def state_of(model: nn.Module) -> State:
    named = [*parameters_of(model).items(), *model.named_buffers(remove_duplicate=False)]
    return State(
        {name: (tensor, type(tensor), tensor.detach().clone()) for name, tensor in named},
        {path: _attributes(module) for path, module in model.named_modules(remove_duplicate=False)},
    )


def changed_tensors(model: nn.Module, before: State) -> list[str]:
    """Parameters and buffers that are not what they were, and tensors of a trace, each as a sentence."""
    found = [f"{place} holds a {kind}" for place, kind in _fakes(model)]
    after = state_of(model)
    for name, (tensor, kind, value) in before.tensors.items():
        if name not in after.tensors:
            found.append(f"the tensor {name} is gone")
            continue
        now, now_kind, now_value = after.tensors[name]
        if now is not tensor or now_kind is not kind:
            found.append(f"{name} is another object, of type {now_kind.__name__}")
        elif isinstance(now_value, FakeTensor) or not _same_bits(now_value, value):
            found.append(f"{name} has other values")
        elif isinstance(tensor, nn.Parameter) and tensor.grad is not None:
            found.append(f"{name} got a .grad")
    found += [f"the tensor {name} is new" for name in after.tensors.keys() - before.tensors.keys()]
    return found


def changed_attributes(model: nn.Module, before: State) -> list[str]:
    """The modules' other attributes that are not what they were."""
    found, after = [], state_of(model)
    for path, old in before.attributes.items():
        new = after.attributes.get(path)
        if new is None:
            found.append(f"the module {path} is gone")
            continue
        for name in old.keys() | new.keys():
            if name not in old or name not in new:
                found.append(f"the attribute {path}.{name} is {'gone' if name in old else 'new'}")
            elif old[name] is not new[name] and not _same_value(old[name], new[name]):
                found.append(f"the attribute {path}.{name} is another one")
    return found


def aliases_of(model: nn.Module) -> list[list[str]]:
    """The names that share one tensor, and those whose tensors share memory."""
    groups: dict[int, list[str]] = {}
    for name, tensor in [*parameters_of(model).items(), *model.named_buffers(remove_duplicate=False)]:
        if tensor.numel() and not isinstance(tensor, FakeTensor):
            groups.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    return sorted(sorted(names) for names in groups.values() if len(names) > 1)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {k: v for k, v in vars(module).items() if k not in REGISTRIES and "hooks" not in k}


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or (
        torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
    )


def _same_value(a: Any, b: Any) -> bool:
    simple = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
    return isinstance(a, simple) and isinstance(b, simple) and a == b


def _fakes(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Tensors of a trace that are still held by a module or by something in its attributes."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, value in vars(module).items():
            for leaf in _leaves(value, depth=4):
                if isinstance(leaf, FakeTensor) or (
                    "Functional" in type(leaf).__name__ and isinstance(leaf, torch.Tensor)
                ):
                    yield f"{path}.{name}", type(leaf).__name__


def _leaves(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, torch.Tensor) or depth == 0:
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item, depth - 1)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _leaves(item, depth - 1)
    elif hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)) and not callable(value):
        for item in vars(value).values():
            yield from _leaves(item, depth - 1)
