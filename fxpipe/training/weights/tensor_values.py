"""Values for parameters and buffers, as ``load_state_dict`` takes them: part by part, never all at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch

from fxpipe.plan.spans import PartSpan, Spans, place_of, without_zeros


class TensorSource(Protocol):
    """Tensors by name, of which nothing is read before ``parts``."""

    def names(self) -> tuple[str, ...]: ...

    def source(self, name: str) -> str:
        """The place where a tensor is or would be, for messages: "the state dict", or a file."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def parts(self, name: str, spans: Spans) -> Iterator[torch.Tensor]:
        """A part of a tensor, in pieces along the first dimension; a number is one piece."""
        ...


class InMemory:
    """The tensors of a mapping, each a single piece."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self._tensors = tensors

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def source(self, name: str) -> str:
        return "the state dict"

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def parts(self, name: str, spans: Spans) -> Iterator[torch.Tensor]:
        yield place_of(self._tensors[name], spans)


@torch.no_grad()
def copy_to(target: torch.Tensor, values: TensorSource, name: str, spans: Spans) -> None:
    """Overwrite a tensor, of whatever device and dtype, with this part of a given one."""
    begin, share = 0, target
    target = without_zeros(share, spans)
    if target is not share:
        share.zero_()
    for part in values.parts(name, spans):
        if target.dim():
            target[begin : begin + len(part)].copy_(part)
            begin += len(part)
        else:
            target.copy_(part)


def are_equal(values: TensorSource, name: str, other: str) -> bool:
    """Whether two given tensors have the same dtype, shape and values."""
    if (values.dtype(name), values.shape(name)) != (values.dtype(other), values.shape(other)):
        return False
    begin, equal = 0, True
    for piece in values.parts(name, {}):
        same = torch.empty_like(piece)
        rows = {0: PartSpan(begin, len(piece), values.shape(name)[0])} if piece.dim() else {}
        copy_to(same, values, other, rows)
        equal = equal and torch.equal(piece, same)
        begin += len(piece) if piece.dim() else 0
    return equal
