"""The state of schedulers, loaders and optimizers as JSON and tensors, without pickle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

import torch

from fxpipe.errors import RunError
from fxpipe.strict import Mismatch, shown


def to_json(value: object, tensors: dict[str, torch.Tensor] | None, prefix: str, what: str) -> object:
    """A value as JSON has it: None, numbers, texts, bytes, tensors, and lists, tuples, dicts, Counters of
    them.

    tensors: gets those in the value, under names that begin with ``prefix``; None if there may be none.
    what: for messages.
    Raises RunError, naming the entry, for anything else.
    """

    def encode(value: object, path: str) -> Any:
        match value:
            case None | bool() | str():  # before int, of which bool is a subclass
                return value
            case int():
                return int(value)
            case float():
                return float(value) if isfinite(value) else {"float": str(float(value))}
            case bytes():
                return {"bytes": value.hex()}
            case torch.Tensor() if tensors is not None:
                name = f"{prefix}{len(tensors)}"
                tensors[name] = value.detach()
                return {"tensor": name}
            case list():
                return [encode(x, f"{path}[{k}]") for k, x in enumerate(value)]
            case tuple():
                return {"tuple": [encode(x, f"{path}[{k}]") for k, x in enumerate(value)]}
            case Mapping():
                entries = [[encode(k, path), encode(x, f"{path}[{k!r}]")] for k, x in value.items()]
                if isinstance(value, Counter):
                    return {"Counter": entries}
                if all(type(key) is str for key in value):
                    return {"dict": dict(entries)}
                return {"items": entries}
        kinds = "numbers, texts, bytes" + (", tensors" if tensors is not None else "")
        raise RunError(
            f"{path} is a {type(value).__name__}, which a checkpoint does not hold there. Keep {kinds}, and "
            "lists, tuples and dicts of them."
        )

    return encode(value, what)


def from_json(value: object, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The inverse.  Raises Mismatch for what ``to_json`` does not give."""

    def decode(value: object) -> object:
        match value:
            case None | bool() | str() | int() | float():
                return value
            case list():
                return [decode(x) for x in value]
            case {**entries} if len(entries) == 1:
                ((kind, content),) = entries.items()
                if kind in _KINDS:
                    return _KINDS[kind](content, decode, tensors)
        raise Mismatch(f"is {shown(value)}, which is no state")

    try:
        return decode(value)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise error if isinstance(error, Mismatch) else Mismatch(f"is no state: {error!r:.80}") from error


_Decode = Callable[[object], object]
_KINDS: dict[str, Callable[[Any, _Decode, Mapping[str, torch.Tensor]], Any]] = {
    "float": lambda content, decode, tensors: float(content),
    "bytes": lambda content, decode, tensors: bytes.fromhex(content),
    "tensor": lambda content, decode, tensors: tensors[content],
    "tuple": lambda content, decode, tensors: tuple(decode(x) for x in content),
    "dict": lambda content, decode, tensors: {k: decode(x) for k, x in content.items()},
    "items": lambda content, decode, tensors: {decode(k): decode(x) for k, x in content},
    "Counter": lambda content, decode, tensors: Counter({decode(k): decode(x) for k, x in content}),
}
