"""The Python that a program takes from its model and its loss function once, when they are compiled.

    drop.p                  0.1
    blocks.0                the class of a module
    blocks.0.activation     a function in an attribute
    Block.forward           a method
    config.text.window      4, of an object, a dict or a list in an attribute
    beta in loss (net.py:7)  0.5, a global that the function names, or a variable of its closure
    weights                 a tensor that is a constant of the program, also a buffer of the loss function

What the code sets itself outside of constructors is its state, which eager runs change as well: counters,
flags, lengths of caches.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from fxpipe.python_state.objects import CODE, CONTAINERS, class_path, function_of, is_plain, joined
from fxpipe.python_state.walk import LOSS, Owner, PythonState
from fxpipe.training.guards.compared_ids import ComparedIds
from fxpipe.training.guards.guard_slots import (
    Code,
    Compared,
    GuardSlots,
    Numbers,
    attribute_of,
    code,
    strong,
)

#: Names that code reads, of tensors mostly: another object that gets one of them is another matter.
_OF_TENSORS = frozenset(dir(torch.Tensor))
Key = tuple[str, str]
"""The path of an owner (``Owner``) or of a class; and an attribute, "" for its class."""


class Change(NamedTuple):
    """A value that is another one now; None where there was, or is, nothing."""

    name: str
    before: object
    now: object
    is_of_code: bool

    def __str__(self) -> str:
        whose = "" if self.name.startswith(LOSS) else "The model's "
        if isinstance(self.before, Numbers):
            return f"{whose}{self.name} has other values than when it was compiled: programs run with those."
        return (
            f"{whose}{self.name} was {self.before!r} when it was compiled, and is {self.now!r}: "
            f"programs run with {self.before!r}."
        )


class PythonGuards:
    """The Python of a model and its loss function when this is made, and how it changes.

    It does not keep the model.  constants: the tensors that programs hold the values of.
    walked: what the model and the loss function reach, if it is known.  stored: see ``Compared``.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: object = None,
        constants: Sequence[weakref.ref[torch.Tensor]] = (),
        walked: PythonState | None = None,
        stored: Mapping[str, Collection[str]] | None = None,
    ):
        self._loss_fn = loss_fn
        walked = PythonState.of(model, loss_fn) if walked is None else walked
        by_id = {id(tensor): ref for ref in constants if (tensor := ref()) is not None}
        self._compared = Compared(walked.reads, walked.sets, by_id, stored)
        self._slots = self._slots_of(walked)
        self._ids = ComparedIds(self._slots)
        self._then: Mapping[Key, object] = _described(self._slots)
        self._now = self._then
        self._paths = {slots.path for slots in self._slots}

    def changes(self, model: nn.Module | None, *, trains: bool = True) -> list[Change]:
        """Find the changes since the last call, or since this was made, if a step that trains had them.

        model: None if it is gone: its functions and classes are still there, and what these read.
        trains: whether the mode of the whole model matters.
        """
        again = {place: self._slots[place].again() for place in self._ids.changed()}
        if not again:
            return []
        if None in again.values():  # other objects: what they lead to is searched
            slots = self._slots_of(self._left() if model is None else PythonState.of(model, self._loss_fn))
            now: dict[Key, object] = _described(slots)
            keys = {*now, *self._then}
            if model is None:
                paths = {each.path for each in slots}
                keys = {key for key in keys if key[0] in paths}
        else:
            slots = [again.get(place) or each for place, each in enumerate(self._slots)]
            new = _described(each for each in again.values() if each is not None)
            keys = {*new, *_described(self._slots[place] for place in again)}
            now = {key: x for key, x in self._now.items() if key not in keys} | new
        owners = {each.path: strong(each.owner) for each in slots}
        changes = []
        for path, name in keys:
            before, after = self._then.get((path, name)), now.get((path, name))
            owner = owners.get(path)
            holder = owner if name else owners.get(path.rpartition(".")[0])
            is_set = self._compared.is_set(holder, name or path.rpartition(".")[2])
            matters = before != after and not is_set and self._matters(path, name, now, trains)
            if matters and not self._is_of_script(path, name, owners):
                of_class = _of_class(owner, name)
                before, after = (of_class if x is None else x for x in (before, after))
                is_function = isinstance(owner, types.FunctionType)
                called = joined(path, name) or "class"
                if is_function and name:
                    called = f"code of {path}" if name == CODE else f"{name} in {path}"
                is_key = name in self._compared.reads and not name.isdigit()  # a text "1" is no index
                may_be_unread = is_function or (isinstance(owner, CONTAINERS) and not is_key)
                is_of_code = not may_be_unread and any(isinstance(x, Code) for x in (before, after))
                if before != after:
                    changes.append(Change(called, before, after, is_of_code))
        if trains and not any(change.is_of_code for change in changes):
            self._slots, self._now, self._ids = slots, now, self._ids.accepted(slots)
        return sorted(changes, key=lambda change: change.name)

    def _matters(self, path: str, name: str, now: Mapping[Key, object], trains: bool) -> bool:
        owner = path, ""
        if name == "training" and now.get(("", name)) != self._then.get(("", name)):
            return trains and not path and name in self._compared.reads  # one message for all modules
        if not name and path not in self._paths:
            return attribute_of(path) in self._compared.reads
        if name and (path not in self._paths or now.get(owner) != self._then.get(owner)):
            return False  # of a new module, of another one, or of its class: a change by itself
        if name == CODE and (path, CODE) not in now:
            return False  # another function, which is a change of what held it
        is_new = (path, name) not in self._then
        return not is_new or name.isdigit() or (name in self._compared.reads and name not in _OF_TENSORS)

    def _is_of_script(self, path: str, name: str, owners: Mapping[str, object]) -> bool:
        """Whether it is a new entry of a list that no function of the model reads by a name: the losses so
        far, say."""
        if (path, name) in self._then or not name.isdigit():
            return False
        names = []
        while isinstance(owners.get(path), CONTAINERS):
            path, _, last = path.rpartition(".")
            names.append(last)
        is_of_object = path in owners and not isinstance(owners[path], types.FunctionType)
        return is_of_object and not any(each in self._compared.reads for each in names)

    def _left(self) -> PythonState:
        """What is reached without the model."""
        left = ((x, strong(x.owner)) for x in self._slots)
        owners = [Owner(x.path, owner, x.is_far) for x, owner in left if owner is not None]
        return PythonState.without_model(owners, self._compared.reads, self._loss_fn)

    def _slots_of(self, walked: PythonState) -> list[GuardSlots]:
        classes = {class_path(cls): Owner(class_path(cls), cls, True) for cls in walked.classes}
        owners = (*walked.owners.values(), *classes.values())
        return [GuardSlots(x.path, x.thing, x.is_far, self._compared) for x in owners]


def _described(slots: Iterable[GuardSlots]) -> dict[Key, object]:
    return {(each.path, name): value for each in slots for name, value in each.values.items()}


def _of_class(owner: object, name: str) -> object:
    """What an attribute is where the object itself has none."""
    x = inspect.getattr_static(type(owner), name, None) if name else None
    return x if x is None or is_plain(x) else code(function_of(x)) if callable(function_of(x)) else None
