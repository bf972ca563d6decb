"""Reads untrusted files as plain data: regular files of bounded size, strict JSON, fields of the right types.

Every function raises ``Misfit``.  Its callers turn that into the error of their file, and say what to do.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from enum import Enum
from io import BufferedReader
from math import isfinite
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import cattrs
from cattrs.errors import (
    AttributeValidationNote,
    ForbiddenExtraKeysError,
    IterableValidationError,
    IterableValidationNote,
)

_T = TypeVar("_T")

MEBIBYTE = 1 << 20
#: Maximum number of commas and brackets in a JSON file; each can cost 20 bytes of memory or more.
MOST_VALUES = 8_000_000
LARGEST_INT, LARGEST_FLOAT = 2**63 - 1, 1e30


class Misfit(ValueError):
    """The contents of a file are not as expected.  ``path``: of the field, such as ``step.ranks``."""

    def __init__(self, wrong: str, path: str = "") -> None:
        super().__init__(f"{path} {wrong}" if path else wrong)


def misfit(path: str, value: Any, wanted: str) -> Misfit:
    return Misfit(f"is {shown(value)} and must be {wanted}", path)


def shown(value: Any) -> str:
    """A value as one short line of text, for a message."""
    if isinstance(value, (dict, list, tuple)) and len(value) > 8:
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if isinstance(value, int) and abs(value) > LARGEST_INT:
        return f"a number of {value.bit_length()} bits"
    text = repr(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading.  Raises Misfit if it is not a regular file (after symbolic links)."""
    try:
        file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 - the caller closes it
    except (OSError, ValueError) as error:
        raise Misfit(f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise Misfit("is not a regular file")
    return file


def _without_waiting(path: str, flags: int) -> int:
    """Opening a pipe would otherwise wait for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_text(path: Path, most: int) -> str:
    """The text of a regular file of at most ``most`` bytes, in UTF-8.  Raises Misfit."""
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise Misfit(f"is larger than {most // MEBIBYTE} MiB, the maximum")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise Misfit(f"is not UTF-8 text: byte {error.start} is {data[error.start]:#04x}") from error


def parse_json(text: str) -> Any:
    """Parse JSON.  Raises Misfit for other text, NaN, infinity, repeated keys and too many values."""
    if sum(map(text.count, "[{,")) > MOST_VALUES:
        raise Misfit(f"holds more than {MOST_VALUES} values, the maximum")
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        raise Misfit(f"is not JSON: {error}") from error
    except RecursionError:
        raise Misfit("is JSON that is nested too deeply") from None
    except ValueError as error:
        if isinstance(error, Misfit):
            raise
        raise Misfit("holds a number with too many digits") from error


def structure(data: Any, kind: type[_T], path: str = "") -> _T:
    """Convert parsed JSON to ``kind``, a dataclass of dataclasses, tuples, dicts and plain values.

    Every field without a default must be present, no other key may be, and each value must have exactly the
    type of its field.  Raises Misfit for the first violation.
    path: of ``data`` in its file, for messages.
    """
    try:
        return _CONVERTER.structure(data, kind)
    except (Misfit, cattrs.BaseValidationError) as error:
        raise _first(error, path) from error


def unstructure(value: Any) -> Any:
    """The inverse of ``structure``."""
    return _CONVERTER.unstructure(value)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        again = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise Misfit(f"has the key {shown(again)} twice in one object")
    return found


def _no_number(text: str) -> Any:
    raise Misfit(f"holds {text}, which is not a number")


def _first(error: BaseException, path: str) -> Misfit:
    """The first error of a group of nested errors, with the path of its field."""
    while isinstance(error, cattrs.BaseValidationError):
        error = error.exceptions[0]
        for note in getattr(error, "__notes__", ()):
            if isinstance(note, AttributeValidationNote):
                path = f"{path}.{note.name}" if path else note.name
            elif isinstance(note, IterableValidationNote):
                path += f"[{note.index!r}]"
    if isinstance(error, KeyError):
        return Misfit("is missing", path)
    if isinstance(error, ForbiddenExtraKeysError):
        return Misfit(f"has the unknown field {shown(min(error.extra_fields))}", path or "it")
    return Misfit(str(error), path)


def _exactly(wanted: str, fits: Callable[[Any], bool]) -> Callable[[Any, Any], Any]:
    def hook(value: Any, _: Any) -> Any:
        if not fits(value):
            raise Misfit(f"is {shown(value)} and must be {wanted}")
        return value

    return hook


def _is_int(value: Any) -> bool:
    return type(value) is int and abs(value) <= LARGEST_INT


def _float(value: Any, _: Any) -> float:
    if not (_is_int(value) or (type(value) is float and isfinite(value) and abs(value) <= LARGEST_FLOAT)):
        raise Misfit(f"is {shown(value)} and must be a number, at most {LARGEST_FLOAT:g}")
    return float(value)


def _text(value: Any, kind: Any) -> Any:
    """Hook for strings and for enums of strings, which are subclasses of ``str``."""
    known = {member.value: member for member in kind} if issubclass(kind, Enum) else None
    if type(value) is not str or (known is not None and value not in known):
        wanted = "a string" if known is None else f"one of {', '.join(known)}"
        raise Misfit(f"is {shown(value)} and must be {wanted}")
    return value if known is None else known[value]


def _literal(value: Any, kind: Any) -> Any:
    if type(value) is not str or value not in get_args(kind):
        raise Misfit(f"is {shown(value)} and must be one of {', '.join(get_args(kind))}")
    return value


def _tuple_hook(kind: Any, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    """Hook for tuples.  It stops at the first wrong entry, since there may be millions of them."""
    items = get_args(kind)
    endless = items[-1] is Ellipsis
    hooks = [(item, converter.get_structure_hook(item)) for item in items[:1] if endless] or [
        (item, converter.get_structure_hook(item)) for item in items
    ]

    def structured(value: Any, _: Any) -> Any:
        if type(value) is not list:
            raise Misfit(f"is {shown(value)} and must be a list")
        if not endless and len(value) != len(hooks):
            raise Misfit(f"is {shown(value)} and must be a list of {len(hooks)}")
        found = []
        for k, entry in enumerate(value):
            item, hook = hooks[0] if endless else hooks[k]
            found.append(_at(k, hook, entry, item))
        return tuple(found)

    return structured


def _dict_hook(kind: Any, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    """Hook for dicts with string keys."""
    item = get_args(kind)[1]
    hook = converter.get_structure_hook(item)

    def structured(value: Any, _: Any) -> Any:
        if type(value) is not dict:
            raise Misfit(f"is {shown(value)} and must be an object")
        return {key: _at(key, hook, entry, item) for key, entry in value.items()}

    return structured


def _at(index: Any, hook: Callable[[Any, Any], Any], entry: Any, item: Any) -> Any:
    try:
        return hook(entry, item)
    except (Misfit, cattrs.BaseValidationError) as error:
        error.add_note(IterableValidationNote("", index, item))
        raise IterableValidationError("", [error], item) from None


def _object_hook(kind: Any, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    fill = cattrs.gen.make_dict_structure_fn(kind, converter, _cattrs_forbid_extra_keys=True)

    def structured(value: Any, _: Any) -> Any:
        if type(value) is not dict:
            raise Misfit(f"is {shown(value)} and must be an object")
        return fill(value, kind)

    return structured


def _origin(kind: Any) -> Any:
    return get_origin(kind)


def _converter() -> cattrs.Converter:
    made = cattrs.Converter(forbid_extra_keys=True)
    made.register_structure_hook_factory(lambda kind: hasattr(kind, "__dataclass_fields__"), _object_hook)
    made.register_structure_hook_factory(lambda kind: _origin(kind) is tuple, _tuple_hook)
    made.register_structure_hook_factory(lambda kind: _origin(kind) is dict, _dict_hook)
    made.register_structure_hook_func(lambda kind: _origin(kind) is Literal, _literal)
    made.register_structure_hook(int, _exactly("a whole number of at most 63 bits", _is_int))
    made.register_structure_hook(bool, _exactly("true or false", lambda value: type(value) is bool))
    made.register_structure_hook(str, _text)
    made.register_structure_hook(float, _float)
    return made


_CONVERTER = _converter()
