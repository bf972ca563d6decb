"""What a checkpoint of ``torch.distributed.checkpoint`` says of its tensors, in the file ``.metadata``.

The file is a pickle.  It is not unpickled: the few operations that torch's dataclasses need are followed
here, and build records of plain values.  No class or function that the file names is looked up.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fxpipe.strict import LARGEST_INT, MEBIBYTE, Misfit, open_regular, shown

METADATA = ".metadata"
LARGEST = 512 * MEBIBYTE
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


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor, and the bytes of a file of the directory that ``torch.save`` wrote of it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """``chunks``: those with elements; each element of the tensor is in one of them."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


@dataclass(eq=False)
class _Record:
    """An object of the pickle: the name of its class or function, what that was called with, its state."""

    kind: str
    arguments: Any = ()
    state: Any = field(default_factory=dict)

    def get(self, name: str) -> Any:
        if not isinstance(self.state, dict) or name not in self.state:
            raise Misfit(f"holds a {self.kind} without {name}")
        return self.state[name]


@dataclass(frozen=True)
class _Callable:
    kind: str


class Metadata:
    """The tensors of a checkpoint, by their keys.  Raises Misfit, here and later, for what does not fit."""

    def __init__(self, path: Path) -> None:
        with open_regular(path) as file:
            data = file.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise Misfit(f"is larger than {LARGEST // MEBIBYTE} MiB, the maximum")
        root = _of_kind(_followed(data), "Metadata")
        self._tensors = {
            key: entry
            for key, entry in _mapping(root.get("state_dict_metadata")).items()
            if isinstance(entry, _Record) and entry.kind == "TensorStorageMetadata"
        }
        # Without a planner's data the state dict was flat.
        planned = root.get("planner_data")
        paths = _mapping(planned) if planned is not None else {}
        #: Key -> its path in the nested state dict.
        self.paths = {key: _path(paths.get(key, (key,))) for key in self._tensors}
        self._places: dict[tuple[str, tuple[int, ...]], _Record] = {}
        for index, info in _mapping(root.get("storage_data")).items():
            key = _of_kind(index, "MetadataIndex").get("fqn")
            if key in self._tensors:
                self._places[key, _numbers(index.get("offset"))] = _of_kind(info, "_StorageInfo")

    def tensor(self, key: str) -> StoredTensor:
        """The chunks of one tensor, checked to make it up."""
        stored = self._tensors[key]
        shape, dtype = _numbers(stored.get("size")), _dtype(stored.get("properties"))
        records = stored.get("chunks")
        if not isinstance(records, list):
            raise Misfit("holds chunks that are no list")
        records = [_of_kind(record, "ChunkStorageMetadata") for record in records]
        areas = [(_numbers(record.get("offsets")), _numbers(record.get("sizes"))) for record in records]
        filled = [(offsets, sizes) for offsets, sizes in areas if math.prod(sizes)]
        _check_areas(key, shape, filled)
        return StoredTensor(shape, dtype, tuple(self._chunk(key, *area) for area in filled))

    def _chunk(self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Chunk:
        info = self._places.get((key, offsets))
        if info is None:
            raise Misfit(f"does not say where {shown(key)} is from {offsets}")
        file, state = info.get("relative_path"), info.state
        if not isinstance(file, str) or Path(file).name != file or "\0" in file:
            what = shown(file) if isinstance(file, str) else "no name"
            raise Misfit(f"has {shown(key)} in {what}, which must be a file of the same directory")
        if state.get("transform_descriptors"):
            raise Misfit(f"says that {shown(key)} is compressed: save it without extensions")
        begin, length = _numbers((info.get("offset"), info.get("length")))
        return Chunk(offsets, sizes, file, begin, length)


_Area = tuple[tuple[int, ...], tuple[int, ...]]


def _check_areas(key: str, shape: tuple[int, ...], areas: list[_Area]) -> None:
    """Raise Misfit unless each element of a tensor is in one area; an area has offsets and sizes."""
    for offsets, sizes in areas:
        inside = len(offsets) == len(sizes) == len(shape)
        if not inside or any(o + s > n for o, s, n in zip(offsets, sizes, shape, strict=True)):
            raise Misfit(f"has a part of {shown(key)} from {offsets}, of {sizes}, beyond its shape {shape}")
    missing = math.prod(shape) - sum(math.prod(sizes) for _, sizes in areas)
    if missing > 0:
        raise Misfit(f"lacks {missing} of the {math.prod(shape)} elements of {shown(key)}")
    # Along the dimension with the most cuts few areas are side by side.
    dims = sorted(range(len(shape)), key=lambda d: -len({offsets[d] for offsets, _ in areas}))[:1]
    beside: list[_Area] = []
    for area in sorted(areas, key=lambda area: [area[0][d] for d in dims]):
        beside = [(o, s) for o, s in beside if all(o[d] + s[d] > area[0][d] for d in dims)]
        for other in beside:
            if common(area, other) is not None:
                raise Misfit(
                    f"has two parts of {shown(key)} that overlap, from {other[0]} and from {area[0]}"
                )
        beside.append(area)


def common(one: _Area, other: _Area) -> _Area | None:
    """The area that two have in common, if any."""
    pairs = list(zip(*one, *other, strict=True))
    begins = tuple(max(a, b) for a, _, b, _ in pairs)
    sizes = tuple(min(a + m, b + n) - max(a, b) for a, m, b, n in pairs)
    return (begins, sizes) if all(size > 0 for size in sizes) else None


def _of_kind(value: Any, kind: str) -> _Record:
    if not isinstance(value, _Record) or value.kind != kind:
        raise Misfit(f"has something else where a {kind} of torch.distributed.checkpoint must be")
    return value


def _mapping(value: Any) -> dict[Any, Any]:
    if type(value) is not dict:
        raise Misfit("has something else where a mapping must be")
    return value


def _numbers(value: Any) -> tuple[int, ...]:
    if type(value) is not tuple or len(value) > 64:
        raise Misfit("has something else where a shape or a place must be")
    if not all(type(number) is int and 0 <= number <= LARGEST_INT for number in value):
        raise Misfit("has a shape or a place that is not of whole numbers of at most 63 bits, 0 or more")
    return value


def _path(value: Any) -> tuple[str | int, ...]:
    if type(value) is not tuple or not value or not all(type(name) in (str, int) for name in value):
        raise Misfit("has something else where a path in the state dict must be")
    return value


def _dtype(properties: Any) -> torch.dtype:
    state = _of_kind(properties, "TensorProperties").state
    if not isinstance(state, tuple) or not state or not isinstance(state[0], torch.dtype):
        raise Misfit("has a tensor without a dtype")
    return state[0]


def _followed(data: bytes) -> Any:
    """What a pickle of torch's dataclasses, with plain values in them, describes."""
    try:
        return _Stack().follow(data)
    except Misfit:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise Misfit(f"is damaged, or no pickle: {type(error).__name__}") from error


class _Stack:
    """The machine that a pickle is a program for, without the operations that torch's need not."""

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def follow(self, data: bytes) -> Any:
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
        raise Misfit("is cut short")

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
            raise Misfit(f"is not as torch writes it: the operation {name} of a pickle")
        if begin < 0:
            raise Misfit("is damaged")
        last = self._values[begin:]
        del self._values[begin:]
        return last


_PLAIN = {"NONE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE"}
_NEW: Mapping[str, Callable[[], Any]] = {
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
}
#: How many values an operation takes from the stack.
_TAKEN = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "APPEND": 1, "SETITEM": 2}
_TAKEN |= {"STACK_GLOBAL": 2, "NEWOBJ": 2, "REDUCE": 2, "BUILD": 1}


def _global(module: Any, name: Any) -> torch.dtype | _Callable:
    """What stands for a class or function that a pickle names."""
    if type(module) is not str or type(name) is not str:
        raise Misfit("names a class by something else than text")
    dtype = getattr(torch, name, None) if module == "torch" else None
    if isinstance(dtype, torch.dtype):
        return dtype
    known = (
        (module.startswith("torch.distributed.") and name in _DATACLASSES)
        or (module.startswith("pathlib") and name in _PATHS)
        or (module, name) in (("torch", "Size"), ("torch.serialization", "_get_layout"))
    )
    if not known:
        raise Misfit(
            f"holds {shown(f'{module}.{name}')}, which torch.distributed.checkpoint itself does not write"
        )
    return _Callable(name)


def _made(function: Any, arguments: Any) -> Any:
    if not isinstance(function, _Callable) or type(arguments) is not tuple:
        raise Misfit("makes an object of something else than a class")
    if function.kind == "Size":
        return _numbers(*arguments)
    return _Record(function.kind, arguments)


def _set(mapping: Any, pairs: list[Any]) -> None:
    keys = pairs[::2]
    # The hash of other values can take forever.
    if type(mapping) is not dict or not all(isinstance(key, str | _Record) for key in keys):
        raise Misfit("holds a mapping with other keys than text and records")
    mapping.update(zip(keys, pairs[1::2], strict=True))
