"""A pickle of the dataclasses of ``torch.distributed.checkpoint`` as records of plain values.

The few operations of pickles that torch's dataclasses need are followed.  No class or function that the file
names is looked up, or called.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

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


#: The codes of the operations, by the names that ``pickle`` gives them.
_OPERATIONS = (
    pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE,
    pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT, pickle.SHORT_BINUNICODE,
    pickle.BINUNICODE, pickle.EMPTY_TUPLE, pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.TUPLE, pickle.TUPLE1,
    pickle.TUPLE2, pickle.TUPLE3, pickle.APPEND, pickle.APPENDS, pickle.MEMOIZE, pickle.BINGET,
    pickle.LONG_BINGET, pickle.BINPUT, pickle.LONG_BINPUT, pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE,
)  # fmt: skip
_DAMAGED = (
    pickle.UnpicklingError, EOFError, ValueError, LookupError, TypeError, AttributeError, RecursionError,
)  # fmt: skip


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
        return _Reader(io.BytesIO(data)).load()
    except Mismatch:
        raise
    except _DAMAGED as error:
        raise Mismatch(f"is damaged, or no pickle: {type(error).__name__}") from error


class _Reader(pickle._Unpickler):
    """Python's own reader of pickles, without the operations that torch's need not."""

    stack: list[Any]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        code: pickle._Unpickler.dispatch[code] for code in map(ord, _OPERATIONS)
    }

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a class or function that a pickle names."""
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if (module, name) == ("torch", "Size"):
            return numbers
        known = (
            (module.startswith("torch.distributed.") and name in _DATACLASSES)
            or (module.startswith("pathlib") and name in _PATHS)
            or (module, name) == ("torch.serialization", "_get_layout")
        )
        if not known:
            raise Mismatch(
                f"holds {shown(f'{module}.{name}')}, which torch.distributed.checkpoint itself does not write"
            )
        return lambda *arguments: Record(name, arguments)

    def build(self) -> None:
        """Set the state of a record, and of nothing else, as of a stand-in."""
        state = self.stack.pop()
        if not isinstance(self.stack[-1], Record):
            raise Mismatch("sets the state of something else than an object")
        self.stack[-1].state = state

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        _set(self.stack[-1], [key, value])

    def set_items(self) -> None:
        pairs = self.pop_mark()  # type: ignore[attr-defined]
        _set(self.stack[-1], pairs)

    # An object is made by a call of its stand-in, however the pickle makes it.
    dispatch |= {
        ord(pickle.NEWOBJ): dispatch[ord(pickle.REDUCE)],
        ord(pickle.BUILD): build,
        ord(pickle.SETITEM): set_item,
        ord(pickle.SETITEMS): set_items,
    }


def _set(mapping: object, pairs: list[object]) -> None:
    keys = pairs[::2]
    # The hash of other values can take forever.
    if type(mapping) is not dict or not all(isinstance(key, str | Record) for key in keys):
        raise Mismatch("holds a mapping with other keys than text and records")
    mapping.update(zip(keys, pairs[1::2], strict=True))
