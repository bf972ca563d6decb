"""Tensors that modules keep in plain attributes, by name: hidden states, memories, averages.

    self.hidden = (h, c), of the module "lstm"  ──►  "lstm.hidden.0", "lstm.hidden.1"

They may stand in tuples, lists, deques, dicts whose keys are texts and numbers, and data classes.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

#: What modules keep otherwise.
_TABLES = {"_parameters", "_buffers", "_modules"}


@dataclasses.dataclass(frozen=True, eq=False)
class KeptSlot:
    """The place of a tensor: a module, and the keys that lead from its ``__dict__`` to the tensor."""

    module: nn.Module
    keys: tuple[object, ...]

    def get(self) -> torch.Tensor | None:
        """The tensor; None if there is none (any more)."""
        thing: object = self.module.__dict__
        for key in self.keys:
            try:
                # What led there may have been replaced, or may have become shorter.
                thing = _entries(thing)[key]
            except (LookupError, TypeError):
                return None
        return thing if isinstance(thing, torch.Tensor) else None

    def put(self, tensor: torch.Tensor) -> None:
        """Put another tensor there.  Tuples are made anew, other containers stay the same objects."""
        _with(self.module.__dict__, self.keys, tensor)


def kept_slots(model: nn.Module) -> dict[str, KeptSlot]:
    """The places of tensors in plain attributes, by names that no parameter or buffer has."""
    used = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    slots: dict[str, KeptSlot] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        attributes = ((key, x) for key, x in vars(module).items() if key not in _TABLES)
        for keys in (keys for key, x in attributes for keys in _keys(x, (key,), seen)):
            name = ".".join([path, *map(str, keys)] if path else map(str, keys))
            # An attribute can be called like a path: ``a.b`` of the model, ``b`` of ``a``.
            while name in used:
                name += "_"
            used.add(name)
            slots[name] = KeptSlot(module, keys)
    return slots


def kept_tensors(model: nn.Module, names: Collection[str]) -> dict[str, torch.Tensor]:
    """The tensors of these names that the model has now, without their gradients' history."""
    slots = kept_slots(model) if names else {}
    values = {name: slot.get() for name, slot in slots.items() if name in names}
    return {name: x.detach() if x.requires_grad else x for name, x in values.items() if x is not None}


def own_of_each_replica(name: str) -> str:
    """The reason against several replicas where a step changes a tensor that is in no state dict."""
    return (
        f"The step changes {name}, which is in no state dict of the model: each replica would go on with its "
        "own, as it depends on the rows that it was given. Train it with one replica, or register it as a "
        "buffer, of which all take the values of replica 0."
    )


def _entries(thing: object) -> Any:
    """A container, by its keys."""
    return vars(thing) if dataclasses.is_dataclass(thing) and hasattr(thing, "__dict__") else thing


def _keys(thing: object, above: tuple[object, ...], seen: set[int]) -> Iterator[tuple[object, ...]]:
    """The keys that lead to tensors; seen: containers that were searched, and can be reached by two ways."""
    entries = _entries(thing)
    if isinstance(thing, torch.Tensor):
        yield above
    elif isinstance(entries, (dict, list, tuple, deque)) and id(thing) not in seen:
        # A tuple cannot contain itself, and equal ones are often one object.
        if not isinstance(thing, tuple):
            seen.add(id(thing))
        for key, x in entries.items() if isinstance(entries, dict) else enumerate(entries):
            # Others have no text that leads back to them.
            if isinstance(key, (str, int)):
                yield from _keys(x, (*above, key), seen)


def _with(thing: object, keys: tuple[Any, ...], tensor: torch.Tensor) -> Any:
    """The thing, with the tensor at the end of the keys."""
    if not keys:
        return tensor
    new = _with(_entries(thing)[keys[0]], keys[1:], tensor)
    if not isinstance(thing, tuple):
        _entries(thing)[keys[0]] = new
        return thing
    items = [*thing[: keys[0]], new, *thing[keys[0] + 1 :]]
    # A named tuple takes its fields one by one.
    return type(thing)._make(items) if hasattr(thing, "_make") else type(thing)(items)
