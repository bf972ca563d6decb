"""What differs from period to period of a loop, as the head of a ``for`` and expressions of its variables.

for i in range(2, 14):                                         numbers that advance evenly, also in names
for at, rate in (("blocks.2", 0.1), ("blocks.3", 0.2)):        others
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from fxpipe.codegen.expressions import number
from fxpipe.ir.names import text_literal

Values = Sequence[str] | Sequence[int | float]


class _Advancing(NamedTuple):
    """Numbers that advance by a ``step``, perhaps within a text."""

    first: int
    step: int
    prefix: str = ""
    suffix: str = ""
    is_text: bool = False


def loop_head(times: int, values: Mapping[str, Values]) -> tuple[str, dict[str, str]]:
    """The head of a loop, and an expression for each named sequence of values."""
    if not values:
        return f"for _ in range({times}):", {}
    advancing = {name: _advancing(each) for name, each in values.items()}
    index = next((each for each in advancing.values() if each is not None and each.step), None)
    texts = {name: _of_index(each, index) for name, each in advancing.items()}
    if index is None or None in texts.values():
        names = ", ".join(values)
        rows = (", ".join(_literal(each[k]) for each in values.values()) for k in range(times))
        return f"for {names} in ({', '.join(f'({row})' if len(values) > 1 else row for row in rows)}):", {
            name: name for name in values
        }
    end = index.first + index.step * times
    step = f", {index.step}" if index.step != 1 else ""
    return f"for i in range({index.first}, {end}{step}):", {name: text or "" for name, text in texts.items()}


def _advancing(values: Values) -> _Advancing | None:
    if isinstance(values[0], float):
        return None
    if isinstance(values[0], int):
        return _evenly([int(x) for x in values])
    parts = [re.split(r"([0-9]+)", str(text)) for text in values]
    if len({len(split) for split in parts}) > 1:
        return None
    unlike = [k for k, column in enumerate(zip(*parts, strict=True)) if len(set(column)) > 1]
    # The numbers are at the odd places of a split; one with zeros before it is not what an f-string writes.
    if len(unlike) != 1 or not unlike[0] % 2 or any(s[unlike[0]] != str(int(s[unlike[0]])) for s in parts):
        return None
    numbers = _evenly([int(split[unlike[0]]) for split in parts])
    prefix, suffix = "".join(parts[0][: unlike[0]]), "".join(parts[0][unlike[0] + 1 :])
    return numbers and numbers._replace(prefix=prefix, suffix=suffix, is_text=True)


def _evenly(numbers: list[int]) -> _Advancing | None:
    steps = {b - a for a, b in pairwise(numbers)}
    return _Advancing(numbers[0], steps.pop()) if len(steps) == 1 else None


def _of_index(each: _Advancing | None, index: _Advancing | None) -> str | None:
    """The value as an expression of ``i``, which runs as ``index`` does."""
    if each is None or index is None or each.step % index.step:
        return None
    factor = each.step // index.step
    offset = each.first - factor * index.first
    scaled = "i" if factor == 1 else f"{factor} * i"
    text = scaled + (f" + {offset}" if offset > 0 else f" - {-offset}" if offset else "")
    if not each.is_text:
        return text
    prefix, suffix = (
        _literal(x)[1:-1].replace("{", "{{").replace("}", "}}") for x in (each.prefix, each.suffix)
    )
    return f'f"{prefix}{{{text}}}{suffix}"'


def _literal(value: str | int | float) -> str:
    return text_literal(value) if isinstance(value, str) else number(value)
