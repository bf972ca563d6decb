"""The text of a tensor, which a trace lets code print but not read."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch


class Text(str):
    """Text that may be printed or put into a message; code that reads it gets an error."""

    __slots__ = ("_refuse",)
    _refuse: Callable[[], NoReturn]

    @staticmethod
    def of(text: str, refuse: Callable[[], NoReturn]) -> Text:
        """Make text of a plain one.  refuse: raises the error."""
        made = Text(text)
        made._refuse = refuse
        return made

    def __str__(self) -> Text:
        return self

    def __format__(self, spec: str) -> Text:
        return self

    def __radd__(self, other: str) -> Text:
        return Text.of(str.__add__(other, self), self._refuse)


def _followed(name: str) -> Callable[..., Text]:
    """A method that gives text of this text, and otherwise reads it."""
    method = getattr(str, name)

    def call(text: Text, *args: object, **kwargs: object) -> Text:
        result = method(text, *args, **kwargs)
        if type(result) is not str:
            text._refuse()
        return Text.of(result, text._refuse)

    return call


_READ = {f"__{x}__" for x in ("eq", "ne", "lt", "le", "gt", "ge", "hash")}
for _name in {*dir(str)} - ({*dir(object)} - _READ) - {"__getnewargs__"}:
    setattr(Text, _name, _followed(_name))


def without_values(tensor: torch.Tensor) -> str:
    """The text that a traced tensor shows."""
    layout = f"size={tuple(tensor.shape)}, dtype={tensor.dtype}"
    return f"tensor({layout}: fxpipe traces the forward, and there are no values yet)"


#: Text for the second run of a forward: code that looks for something in longer text goes another way.
OTHER_TEXT = "[nan, inf, -0.5, 1e+10, 0, True]"
