"""A pickle of the dataclasses of ``torch.distributed.checkpoint`` as records of plain values.

It is not unpickled: the few operations that torch's dataclasses need are followed here.  No class or function
that the file names is looked up, or called.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fxpipe.strict import LARGEST_INT, Mismatch, shown

#: Of modules below torch.distributed, where they have moved from release to release.
_DATACLASSES = {
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "MEM_FORMAT_ENCODING",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
    "_StorageInfo",
}
_PATHS = {"PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"}


@dataclass(eq=False)
class Record:
    """An object of the pickle: the name of its class or function, what that was called with, its state."""

    kind: str
    arguments: object = ()
    state: Any = field(default_factory=dict)

    def get(self, name: str) -> object:
        if not isinstance(self.state, dict) or name not in self.state:
            raise Mismatch(f"holds a {self.kind} without {name}")
        return self.state[name]


@dataclass(frozen=True)
class _Callable:
    kind: str


def of_kind(value: object, kind: str) -> Record:
    if not isinstance(value, Record) or value.kind != kind:
        raise Mismatch(f"has something else where a {kind} of torch.distributed.checkpoint must be")
    return value


def numbers(value: object) -> tuple[int, ...]:
    if type(value) is not tuple or len(value) > 64:
        raise Mismatch("has something else where a shape or a place must be")
    if not all(type(number) is int and 0 <= number <= LARGEST_INT for number in value):
        raise Mismatch("has a shape or a place that is not of whole numbers of at most 63 bits, 0 or more")
    return value


def read_plain(data: bytes) -> object:
    """Read a pickle of torch's dataclasses, with plain values in them, as records."""
    try:
        return _Stack().follow(data)
    except Mismatch:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise Mismatch(f"is damaged, or no pickle: {type(error).__name__}") from error


class _Stack:
    """The machine that a pickle is a program for, without the operations that torch's need not."""

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, object] = {}

    def follow(self, data: bytes) -> object:
        argument: Any
        for operation, argument, _ in pickletools.genops(data):
            name = operation.name
            if name in _PLAIN:
                self._values.append(argument)
            elif name in _NEW:
                self._values.append(_NEW[name]())
            elif name == "MEMOIZE":
                self._memo[len(self._memo)] = self._values[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                self._values.append(self._memo[argument])
            elif name in ("BINPUT", "LONG_BINPUT"):
                self._memo[argument] = self._values[-1]
            elif name == "MARK":
                self._marks.append(len(self._values))
            elif name == "STOP":
                return self._values.pop()
            elif name not in ("PROTO", "FRAME"):
                self._combine(name, argument)
        raise Mismatch("is cut short")

    def _combine(self, name: str, argument: Any) -> None:
        """An operation that takes values from the stack."""
        if name == "GLOBAL":
            self._values.append(_global(*argument.split(" ", 1)))
            return
        last = self._popped(name)
        match name:
            case "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                self._values.append(tuple(last))
            case "APPEND" | "APPENDS":
                self._values[-1].extend(last)
            case "SETITEM" | "SETITEMS":
                _set(self._values[-1], last)
            case "STACK_GLOBAL":
                self._values.append(_global(*last))
            case "NEWOBJ" | "REDUCE":
                self._values.append(_made(*last))
            case "BUILD":
                self._values[-1].state = last[0]

    def _popped(self, name: str) -> list[Any]:
        if name in ("TUPLE", "APPENDS", "SETITEMS"):
            begin = self._marks.pop()
        elif name in _TAKEN:
            begin = len(self._values) - _TAKEN[name]
        else:
            raise Mismatch(f"is not as torch writes it: the operation {name} of a pickle")
        if begin < 0:
            raise Mismatch("is damaged")
        last = self._values[begin:]
        del self._values[begin:]
        return last


_PLAIN = {"NONE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE"}
_NEW: Mapping[str, Callable[[], object]] = {
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
}
#: How many values an operation takes from the stack.
_TAKEN = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "APPEND": 1, "SETITEM": 2}
_TAKEN |= {"STACK_GLOBAL": 2, "NEWOBJ": 2, "REDUCE": 2, "BUILD": 1}


def _global(module: object, name: object) -> torch.dtype | _Callable:
    """The stand-in for a class or function that a pickle names."""
    if type(module) is not str or type(name) is not str:
        raise Mismatch("names a class by something else than text")
    dtype = getattr(torch, name, None) if module == "torch" else None
    if isinstance(dtype, torch.dtype):
        return dtype
    known = (
        (module.startswith("torch.distributed.") and name in _DATACLASSES)
        or (module.startswith("pathlib") and name in _PATHS)
        or (module, name) in (("torch", "Size"), ("torch.serialization", "_get_layout"))
    )
    if not known:
        raise Mismatch(
            f"holds {shown(f'{module}.{name}')}, which torch.distributed.checkpoint itself does not write"
        )
    return _Callable(name)


def _made(function: object, arguments: object) -> object:
    if not isinstance(function, _Callable) or type(arguments) is not tuple:
        raise Mismatch("makes an object of something else than a class")
    if function.kind == "Size":
        return numbers(*arguments)
    return Record(function.kind, arguments)


def _set(mapping: object, pairs: list[object]) -> None:
    keys = pairs[::2]
    # The hash of other values can take forever.
    if type(mapping) is not dict or not all(isinstance(key, str | Record) for key in keys):
        raise Mismatch("holds a mapping with other keys than text and records")
    mapping.update(zip(keys, pairs[1::2], strict=True))
