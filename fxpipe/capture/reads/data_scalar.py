"""A floating-point number of the data, as the model's code sees it: it can be compared and rounded.

x.max().item() > 0.5        ──►  a branch on the tensor ``x.max() > 0.5``
int(x.max().item())         ──►  the integer ``x.max().long()``
y * x.max().item(), f"{x.max().item()}"
                            ──►  refused: its value is another one in each microbatch
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

import torch


class NumberOfData:
    """A number that stands for a tensor's value.  ``tensor``: one element.  ``refuse``: called by all but
    comparisons and conversions to integers."""

    def __init__(self, tensor: torch.Tensor, refuse: Callable[[], NoReturn]):
        self._tensor, self._refuse = tensor.detach().reshape(()), refuse

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the number, for isinstance."""
        return float

    def __getattr__(self, name: str) -> object:
        if hasattr(float, name):
            self._refuse()
        raise AttributeError(name)

    def _exact(self) -> torch.Tensor:
        """Python compares numbers of float64."""
        return self._tensor.double()

    def __bool__(self) -> bool:
        return bool(self._tensor != 0)

    def __int__(self) -> int:
        return int(self._tensor.long())

    __trunc__ = __int__

    def __floor__(self) -> int:
        return int(self._tensor.floor().long())

    def __ceil__(self) -> int:
        return int(self._tensor.ceil().long())


def _comparison(compare: Callable[[Any, Any], object]) -> Callable[[NumberOfData, object], bool]:
    def compared(number: NumberOfData, other: object) -> bool:
        return bool(compare(number._exact(), other._exact() if isinstance(other, NumberOfData) else other))

    return compared


def _refuse(number: NumberOfData, *_: object) -> NoReturn:
    number._refuse()


for _compare in (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne):
    setattr(NumberOfData, f"__{_compare.__name__}__", _comparison(_compare))
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "divmod", "matmul")
for _name in (
    *(f"__{side}{name}__" for name in _BINARY for side in ("", "r")),
    *("__neg__", "__pos__", "__abs__", "__round__", "__float__", "__complex__", "__index__"),
    *("__hash__", "__str__", "__repr__", "__format__"),
):
    setattr(NumberOfData, _name, _refuse)
