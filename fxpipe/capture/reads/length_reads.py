"""The comparisons that a model's Python makes with sizes of tensors, as ``if x.shape[1] > 512``.

A step is captured at a few lengths.  What Python compares there tells of the lengths in between whether it
would decide alike: the difference of both sides of ``x.shape[1] % 5 == 0`` is no polynomial of the length,
and that of ``x.shape[1] > 512`` changes its sign.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

#: Parts of torch that are model code; the rest of it, as the ops on fake tensors, decides in each trace anew.
_MODEL_CODE = Path(torch.__file__).parent / "nn"
_OTHER_CODE = Path(torch.__file__).parent, Path(__file__).parents[2]


class Comparison(NamedTuple):
    """``difference`` of a size and another number, which Python compares with 0 by ``sign``, ``"<"``."""

    sign: str
    difference: Fraction
    source: str


SIGNS: dict[str, Callable[[Any, Any], object]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


class LengthReads(TorchFunctionMode):
    """While entered, gives sizes that note to what they are compared.  ``comparisons``: in order."""

    def __init__(self) -> None:
        super().__init__()
        self.comparisons: list[Comparison] = []

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        result = func(*args, **(kwargs or {}))
        if func not in _SIZES:
            return result
        if isinstance(result, torch.Size):
            return torch.Size([_ReadSize(n, self) for n in result])
        return _ReadSize(result, self)

    def note(self, sign: str, difference: Fraction) -> None:
        frame = sys._getframe(2)
        path = Path(frame.f_code.co_filename)
        is_other = any(path.is_relative_to(folder) for folder in _OTHER_CODE)
        if not is_other or path.is_relative_to(_MODEL_CODE):
            self.comparisons.append(Comparison(sign, difference, f"{path}:{frame.f_lineno}"))


_SIZES = {torch.Tensor.shape.__get__, torch.Tensor.size, torch.Tensor.numel, torch.Tensor.nelement}  # type: ignore[attr-defined]


class _ReadSize(int):
    """A size, and what is computed of it in whole numbers."""

    reads: LengthReads

    def __new__(cls, value: int, reads: LengthReads) -> _ReadSize:
        size = super().__new__(cls, value)
        size.reads = reads
        return size

    def __bool__(self) -> bool:
        self.reads.note("!=", Fraction(int(self)))
        return int(self) != 0

    __hash__ = int.__hash__


class _ReadRatio(float):
    """A size that is divided by a number, to be compared or rounded."""

    reads: LengthReads
    exact: Fraction


def _exact(number: float) -> Fraction:
    return number.exact if isinstance(number, _ReadRatio) else Fraction(number)


def _compared(sign: str) -> Callable[..., object]:
    def compare(self: _ReadSize | _ReadRatio, other: object) -> object:
        if isinstance(other, int) or (isinstance(other, float) and math.isfinite(other)):
            self.reads.note(sign, _exact(self) - _exact(other))
        # As plain numbers, which note nothing once more.
        one, two = (int(x) if isinstance(x, _ReadSize) else x for x in (self, other))
        return SIGNS[sign](*(float(x) if isinstance(x, _ReadRatio) else x for x in (one, two)))

    return compare


def _computed(of: type, method: str) -> Callable[..., object]:
    def compute(self: Any, *others: object) -> object:
        result = getattr(of, method)(self, *others)
        return _ReadSize(result, self.reads) if type(result) is int else result

    return compute


def _divided(size: _ReadSize, by: Any) -> object:
    result = int.__truediv__(size, by)
    if type(result) is not float:
        return result
    ratio = _ReadRatio(result)
    ratio.reads, ratio.exact = size.reads, Fraction(int(size)) / Fraction(int(by))
    return ratio


_ReadSize.__truediv__ = _divided  # type: ignore[assignment]
_ReadRatio.__hash__ = float.__hash__  # type: ignore[method-assign]
for _sign, _name in zip(SIGNS, ("eq", "ne", "lt", "le", "gt", "ge"), strict=True):
    setattr(_ReadSize, f"__{_name}__", _compared(_sign))
    setattr(_ReadRatio, f"__{_name}__", _compared(_sign))
_BINARY = "add", "sub", "mul", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"
for _name in (*_BINARY, *(f"r{_name}" for _name in _BINARY), "neg", "abs"):
    setattr(_ReadSize, f"__{_name}__", _computed(int, f"__{_name}__"))
for _name in ("ceil", "floor", "round", "trunc"):
    setattr(_ReadRatio, f"__{_name}__", _computed(float, f"__{_name}__"))
