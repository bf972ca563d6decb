"""The tensors in what a function returns, with the names of their places: ``logits``, ``loss_dict.ce``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass

import torch

#: The name of a result that is one tensor.
OUTPUT = "output"


def named_tensors(value: object, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in mappings, dataclasses, tuples and lists, with their names."""
    items: Iterator[tuple[object, object]]
    if isinstance(value, torch.Tensor):
        yield path or OUTPUT, value
        return
    if isinstance(value, Mapping):
        items = iter(value.items())
    elif isinstance(value, (tuple, list)):
        items = zip(getattr(value, "_fields", range(len(value))), value, strict=True)
    elif is_dataclass(value) and not isinstance(value, type):
        items = ((f.name, getattr(value, f.name)) for f in fields(value))
    else:
        return
    for key, item in items:
        yield from named_tensors(item, f"{path}.{key}" if path else str(key))


def listed(names: Iterable[str]) -> str:
    texts = list(names)
    return ", ".join(texts[:40]) + (f" and {len(texts) - 40} more" if len(texts) > 40 else "")
