"""The text of a tensor, which a trace lets code print but not read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fxpipe.errors import CaptureError


class Text(str):
    """Text that may be printed or put into a message; code that reads it gets a CaptureError."""

    __slots__ = ("_place",)
    _place: Callable[[], str]

    @staticmethod
    def of(text: str, place: Callable[[], str]) -> Text:
        """place: gives the current place in the model's code."""
        made = Text(text)
        made._place = place
        return made

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise CaptureError(
            f"The model's code reads the text of a tensor, at {self._place()}. A program is fixed before the "
            "data is known: compare tensors instead."
        )


_SPECIAL = ("eq", "ne", "lt", "le", "gt", "ge", "hash", "contains", "len", "getitem", "iter", "float", "int")
_PLAIN = ("startswith", "endswith", "find", "index", "count", "split", "isdigit")
for _name in (*(f"__{x}__" for x in _SPECIAL), *_PLAIN):
    setattr(Text, _name, Text._refuse)

#: Text for the second run of a forward: code that looks for a number in longer text goes another way.
ANY_VALUES = "tensor([nan, inf, -0.5, 1e+10, 0, True])"
