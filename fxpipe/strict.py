"""Reads untrusted files as plain data: regular files of bounded size, strict JSON, fields of the right types.

Every function raises ``Mismatch``.  Its callers turn that into the error of their file, and say what to do:
``refused``.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from io import BufferedReader
from math import isfinite
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

_T = TypeVar("_T")

MEBIBYTE = 1 << 20
#: Maximum number of commas and brackets in a JSON file; each can cost 20 bytes of memory or more.
MOST_VALUES = 8_000_000
LARGEST_INT, LARGEST_FLOAT = 2**63 - 1, 1e30


class Mismatch(ValueError):
    """The contents of a file are not as expected.  ``path``: of the field, such as ``step.ranks``."""

    def __init__(self, wrong: str, path: str = "") -> None:
        super().__init__(f"{path} {wrong}" if path else wrong)
        self.wrong, self.path = wrong, path

    def within(self, path: str) -> Mismatch:
        """The error of a value that is at ``path`` in a larger one."""
        joint = "." if path and self.path and not self.path.startswith("[") else ""
        return Mismatch(self.wrong, f"{path}{joint}{self.path}")


@contextlib.contextmanager
def refused(kind: type[Exception], file: object, remedy: str) -> Iterator[None]:
    """Turn a Mismatch in the block into an error of the file, which it begins with, and of what to do."""
    try:
        yield
    except Mismatch as error:
        raise kind(f"{file} {error}. {remedy}".rstrip()) from error


@dataclass(frozen=True)
class Fits:
    """A condition at the type of a field, such as ``Annotated[int, between(1, 9)]``: ``structure`` refuses
    other values, as in "step.ranks is 0 and must be from 1 to 9"."""

    fits: Callable[[Any], bool]
    wanted: str

    def check(self, value: Any, path: str = "") -> Any:
        """Return the value.  Raises Mismatch if it does not fit."""
        require(path, value, self.fits(value), self.wanted)
        return value


def between(least: float, most: float) -> Fits:
    return Fits(lambda number: least <= number <= most, f"from {least} to {most}")


def at_least(least: float) -> Fits:
    return Fits(lambda number: bool(number >= least), f"{least} or more")


def entries(least: int, most: int) -> Fits:
    """Bound the number of entries of tuples and dicts."""
    return Fits(lambda collection: least <= len(collection) <= most, f"of {least} to {most} entries")


NonNegative = Annotated[float, at_least(0)]
Share = Annotated[float, between(0, 1)]


def require(path: str, value: Any, fits: bool, wanted: str) -> None:
    """Raise Mismatch, naming the field at ``path`` and its value, unless the value ``fits``."""
    if not fits:
        raise Mismatch(f"is {shown(value)} and must be {wanted}", path)


def shown(value: Any) -> str:
    """A value as one short line of text, for a message."""
    if isinstance(value, (dict, list, tuple)) and len(value) > 8:
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if isinstance(value, int) and abs(value) > LARGEST_INT:
        return f"a number of {value.bit_length()} bits"
    text = repr(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading.  Raises Mismatch if it is not a regular file (after symbolic links)."""
    try:
        file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 - the caller closes it
    except (OSError, ValueError) as error:
        raise Mismatch(f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise Mismatch("is not a regular file")
    return file


def _without_waiting(path: str, flags: int) -> int:
    """Opening a pipe would otherwise wait for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_text(path: Path, most: int) -> str:
    """The text of a regular file of at most ``most`` bytes, in UTF-8.  Raises Mismatch."""
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise Mismatch(f"is larger than {most // MEBIBYTE} MiB, the maximum")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise Mismatch(f"is not UTF-8 text: byte {error.start} is {data[error.start]:#04x}") from error


def parse_json(text: str) -> Any:
    """Parse JSON.  Raises Mismatch for other text, NaN, infinity, repeated keys and too many values."""
    if sum(map(text.count, "[{,")) > MOST_VALUES:
        raise Mismatch(f"holds more than {MOST_VALUES} values, the maximum")
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        raise Mismatch(f"is not JSON: {error}") from error
    except RecursionError:
        raise Mismatch("is JSON that is nested too deeply") from None
    except ValueError as error:
        if isinstance(error, Mismatch):
            raise
        raise Mismatch("holds a number with too many digits") from error


def structure(data: Any, kind: type[_T], path: str = "") -> _T:
    """Convert parsed JSON, or data of ``unstructure``, to ``kind``: a dataclass of dataclasses, tuples, dicts
    and plain values.

    Every field without a default must be present, no other key may be, and each value must have exactly the
    type of its field and keep the conditions (``Fits``) there.  Raises Mismatch for the first violation.
    path: of ``data`` in its file, for messages.
    """
    try:
        return _reader(kind)(data)  # type: ignore[no-any-return, arg-type]
    except Mismatch as error:
        raise error.within(path) from None


def unstructure(value: Any) -> Any:
    """The inverse of ``structure``, for ``json.dumps``."""
    if type(value) in _PLAIN:
        return value
    if is_dataclass(value):
        return {name: unstructure(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, dict):
        return {key: unstructure(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [unstructure(entry) for entry in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, str) else value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields_by_key = dict(pairs)
    if len(fields_by_key) < len(pairs):
        seen: set[str] = set()
        again = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise Mismatch(f"has the key {shown(again)} twice in one object")
    return fields_by_key


def _no_number(text: str) -> Any:
    raise Mismatch(f"holds {text}, which is not a number")


def _is_int(value: Any) -> bool:
    return type(value) is int and abs(value) <= LARGEST_INT


def _is_number(value: Any) -> bool:
    return _is_int(value) or (type(value) is float and isfinite(value) and abs(value) <= LARGEST_FLOAT)


_TEXT = Fits(lambda value: type(value) is str, "a string")
_NUMBER = Fits(_is_number, f"a number, at most {LARGEST_FLOAT:g}")
_LIST = Fits(lambda value: type(value) is list, "a list")
_OBJECT = Fits(lambda value: type(value) is dict, "an object")

_Reader = Callable[[Any], Any]
_PLAIN: dict[Any, _Reader] = {
    Any: lambda value: value,
    int: Fits(_is_int, "a whole number of at most 63 bits").check,
    bool: Fits(lambda value: type(value) is bool, "true or false").check,
    str: _TEXT.check,
    float: lambda value: float(_NUMBER.check(value)),
}


@cache
def _reader(kind: Any) -> _Reader:
    """The function that converts plain data to ``kind``; it raises Mismatch with the path in that data."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in _PLAIN:
        return _PLAIN[kind]
    if is_dataclass(kind):
        return _record_reader(kind)
    if isinstance(kind, type) and issubclass(kind, str) and not issubclass(kind, Enum):
        return lambda value: kind(_TEXT.check(value))
    if origin is tuple:
        return _tuple_reader(arguments)
    if origin in (dict, Mapping):
        item = _reader(arguments[1])
        return lambda value: {key: _at(f"[{key!r}]", item, x) for key, x in _OBJECT.check(value).items()}
    if origin is Annotated:
        inner, condition = _reader(arguments[0]), arguments[1]
        return lambda value: condition.check(inner(value))
    if origin in (Union, UnionType):
        (some,) = (_reader(each) for each in arguments if each is not type(None))
        return lambda value: None if value is None else some(value)
    known = {x: x for x in arguments} if origin is Literal else {str(x.value): x for x in kind}
    one = Fits(lambda value: type(value) is str and value in known, f"one of {', '.join(known)}")
    return lambda value: known[one.check(value)]


def _record_reader(kind: Any) -> _Reader:
    hints = get_type_hints(kind, include_extras=True)
    readers = {field.name: _reader(hints[field.name]) for field in fields(kind)}
    required = [f.name for f in fields(kind) if f.default is f.default_factory is MISSING]

    def read(value: Any) -> Any:
        _OBJECT.check(value)
        for name in required:
            if name not in value:
                raise Mismatch("is missing", name)
        for name in value:
            if name not in readers:
                raise Mismatch(f"has the unknown field {shown(name)}")
        return kind(**{name: _at(name, readers[name], entry) for name, entry in value.items()})

    return read


def _tuple_reader(items: tuple[Any, ...]) -> _Reader:
    endless = items[-1] is Ellipsis
    readers = [_reader(item) for item in items if item is not Ellipsis]

    def read(value: Any) -> Any:
        count = len(_LIST.check(value))
        require("", value, endless or count == len(readers), f"a list of {len(readers)}")
        return tuple(map(_at, range(count), readers * count if endless else readers, value))

    return read


def _at(place: str | int, reader: _Reader, entry: Any) -> Any:
    """Read an entry; ``place``: its index in a list, or its path from the object that holds it."""
    try:
        return reader(entry)
    except Mismatch as error:
        raise error.within(f"[{place}]" if isinstance(place, int) else place) from None
