"""The arguments of a captured op, from the data that ``ir/captured.py`` writes."""

from __future__ import annotations

from typing import Any

import torch

from fxpipe.certificate.terms.layouts import Unknown

_TORCH = (torch.dtype, torch.layout, torch.memory_format)


def decoded(argument: object, values: list[object]) -> Any:
    """An argument of a captured op.  values: of the nodes before it.  Raises Unknown for other data."""
    if isinstance(argument, list | tuple):
        return [decoded(each, values) for each in argument]
    if not isinstance(argument, dict):
        return argument
    match argument:
        case {"value": int(number)}:
            return values[number]
        case {"float": str(text)} if text in ("inf", "-inf", "nan"):
            return float(text)
        case {"complex": [real, imaginary]}:
            return complex(decoded(real, values), decoded(imaginary, values))
        case {"device": str(kind)}:
            return torch.device(kind)
        case {"torch": str(text)} if isinstance(value := _torch(text), _TORCH):
            return value
        case {"op": str(text)}:
            return op_named(text)
    raise Unknown(f"has the argument {argument!r}, which is none")


def _torch(text: str) -> object:
    return getattr(torch, text.removeprefix("torch."), None)


def op_named(text: str) -> object:
    """The op of torch with a name such as ``aten.addmm.default``.  Raises Unknown where there is none."""
    parts = text.split(".")
    value: object = torch.ops
    for part in parts:
        value = getattr(value, part, None)
    if len(parts) != 3 or not hasattr(value, "_schema"):
        raise Unknown(f"names the op {text!r}, which this version of torch does not have")
    return value
