"""Kinds of Python objects: which of them hold others, whose code they belong to, and what they hold."""

from __future__ import annotations

import argparse
import array
import enum
import functools
import os
import queue
import random
import sys
import sysconfig
import threading
import types
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence, MutableSet
from configparser import RawConfigParser
from contextvars import ContextVar
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import nn

from fxpipe.runtime.functions import names_in

#: Values that are compared rather than identified.
PLAIN = (
    bool, int, float, complex, Fraction, Decimal, str, bytes, range, np.generic, enum.Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
#: What holds no other objects.
VALUES = (*PLAIN, torch.Tensor, types.NoneType)
CONTAINERS = (dict, list, tuple, deque, types.MappingProxyType)
#: What has a state of its own beside attributes.
OPAQUE = (np.ndarray, random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
#: What has settings of an optimizer, of which code reads few.
OPTIMIZERS = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
#: Of the standard library, what keeps things in attributes: containers in Python, and names for any use.
KEEPERS = (
    MutableMapping, MutableSequence, MutableSet,
    types.SimpleNamespace, argparse.Namespace, threading.local, functools.partial, queue.Queue,
)  # fmt: skip
#: Those of them whose attributes are settings.
SETTINGS = (types.SimpleNamespace, argparse.Namespace, UserDict, UserList, ChainMap, RawConfigParser)
#: What each module has: tensors, submodules and hooks.
OF_MODULES = vars(nn.Module()).keys() - {"training"}
CODE = "__code__"
"""The name of a function's code."""
#: Packages whose functions, classes and objects keep no state of a model.
_OTHERS = frozenset({*sys.stdlib_module_names, "torch", "sympy", "numpy", "fxpipe", ""}) - {"__main__"}
#: Where installed packages are; "<" begins the names of code without a file.
INSTALLED = (*{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}, "<")
#: ``Py_TPFLAGS_HEAPTYPE``: a class that Python code made.
_HEAP_TYPE = 1 << 9


def is_plain(x: object) -> bool:
    return isinstance(x, PLAIN) or (isinstance(x, tuple) and all(map(is_plain, x)))


def is_users(code: object) -> bool:
    """Whether a module, class or function belongs neither to torch nor to the standard library."""
    name = code.__name__ if isinstance(code, types.ModuleType) else getattr(code, "__module__", "")
    return str(name).partition(".")[0] not in _OTHERS


def is_made(cls: type) -> bool:
    """Whether Python code made a class, other than torch's own base of modules."""
    return cls is not nn.Module and bool(cls.__flags__ & _HEAP_TYPE)


def keeps_state(x: object) -> bool:
    """Whether an object's contents are recorded and restored: those of torch's own objects are not."""
    if isinstance(x, types.FunctionType | types.ModuleType | type):
        return is_users(x)
    kept = (nn.Module, ContextVar, set, frozenset, *CONTAINERS, *OPAQUE, *KEEPERS)
    return isinstance(x, kept) or is_users(type(x))


def has_hidden_state(x: object) -> bool:
    """Whether an object has state that cannot be recorded, or is code outside of installed packages."""
    if isinstance(x, types.FunctionType):
        return is_users(x) and not x.__code__.co_filename.startswith(INSTALLED)
    return isinstance(x, Iterator | threading.local | bytearray | array.array)


def has_attributes(x: object) -> bool:
    return bool(type(x).__dictoffset__) or any(slot_names(type(x)))


def has_only_attributes(x: object) -> bool:
    """Whether ``vars`` has all that an object holds, beside the tensors and submodules of a module."""
    if isinstance(x, nn.Module):  # of TorchScript they are properties
        has_tables = (isinstance(vars(x).get(name), dict) for name in ("_parameters", "_buffers", "_modules"))
        return all(has_tables) and not any(slot_names(type(x)))
    if isinstance(x, (ContextVar, os._Environ, set, frozenset, types.FunctionType, *CONTAINERS, *OPTIMIZERS)):
        return False
    return isinstance(x, type) or (hasattr(x, "__dict__") and not any(slot_names(type(x))))


def slot_names(cls: type) -> Iterator[str]:
    for base in cls.__mro__:
        slots = vars(base).get("__slots__", ()) if base.__flags__ & _HEAP_TYPE else ()
        yield from (x for x in ([slots] if isinstance(slots, str) else slots) if not x.startswith("__"))


def function_of(x: object) -> object:
    """The function of a property or a method; a bound method is another object each time."""
    if isinstance(x, property):
        return x.fget
    return x.__func__ if isinstance(x, staticmethod | classmethod | types.MethodType) else x


def class_path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def kind_of(owner: object) -> str:
    """The path of the class of an object; of a class, its own."""
    return class_path(owner if isinstance(owner, type) else type(owner))


def joined(path: str, name: object) -> str:
    return f"{path}.{name}" if path and name != "" else path or str(name)


def contents(owner: object) -> Mapping[Any, object]:
    """What an object holds, by name, key or index."""
    match owner:
        case dict():  # a subclass may have methods of its own
            return owner if type(owner) is dict else dict(dict.items(owner))
        case types.MappingProxyType():
            return dict(owner)
        case list() | tuple() | deque() | set() | frozenset():
            return dict(enumerate(owner))
        case types.FunctionType():
            return dict(_variables(owner))
        case type():
            return owner.__dict__
        case ContextVar():
            return _value_of(owner)
        case torch.optim.Optimizer():
            return {"param_groups": owner.param_groups}
        case torch.optim.lr_scheduler.LRScheduler():
            return {**vars(owner), "get_last_lr": owner.get_last_lr()}
        case os._Environ():  # its texts are other objects each time
            return {os.fsdecode(name): value for name, value in os.environb.items()}
        case _:
            slots = {name: getattr(owner, name) for name in slot_names(type(owner)) if hasattr(owner, name)}
            return {**slots, **getattr(owner, "__dict__", {})}


def _value_of(variable: ContextVar[object]) -> dict[str, object]:
    try:
        return {"value": variable.get()}
    except LookupError:
        return {}


def _variables(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """The code of a function, its attributes and defaults, the variables of its closure, and the globals that
    it names, if a user wrote it."""
    if not is_users(function):
        return
    code = function.__code__
    yield CODE, code
    for name, x in vars(function).items():
        if not name.startswith("__") and (is_plain(x) or isinstance(x, CONTAINERS)):
            yield name, x
    arguments = code.co_varnames[: code.co_argcount]
    defaults = [*zip(reversed(arguments), reversed(function.__defaults__ or ()), strict=False)]
    for name, x in (*defaults, *(function.__kwdefaults__ or {}).items()):
        if is_plain(x) or (isinstance(x, CONTAINERS) and x):  # an empty one is mostly a cache
            yield name, x
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        if cell != types.CellType():  # it has a value
            yield name, cell.cell_contents
    for name in sorted(names_in(code).globals & function.__globals__.keys()):
        yield name, function.__globals__[name]
