"""Values for parameters and buffers, as ``load_state_dict`` takes them: part by part, never all at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch

from fxpipe.plan.rows import Rows


class GivenValues(Protocol):
    """Tensors by name, of which nothing is read before ``parts``."""

    def names(self) -> tuple[str, ...]: ...

    def source(self, name: str) -> str:
        """Where a tensor is or would be, for messages: "the state dict", or a file."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def parts(self, name: str, rows: Rows | None) -> Iterator[torch.Tensor]:
        """The rows of a tensor, all for None, in pieces along the first dimension; a number is one piece."""
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

    def parts(self, name: str, rows: Rows | None) -> Iterator[torch.Tensor]:
        tensor = self._tensors[name]
        yield tensor[rows.begin : rows.end] if rows else tensor


class Shares:
    """What one of several lanes holds of given tensors: an even share of a dimension."""

    def __init__(self, given: GivenValues, dim: int, lane: int, lanes: int):
        self._given, self._dim, self._lane, self._lanes = given, dim, lane, lanes

    def names(self) -> tuple[str, ...]:
        return self._given.names()

    def source(self, name: str) -> str:
        return self._given.source(name)

    def shape(self, name: str) -> tuple[int, ...]:
        whole, dim = self._given.shape(name), self._dim
        return *whole[:dim], whole[dim] // self._lanes, *whole[dim + 1 :]

    def dtype(self, name: str) -> torch.dtype:
        return self._given.dtype(name)

    def parts(self, name: str, rows: Rows | None) -> Iterator[torch.Tensor]:
        if self._dim:
            for part in self._given.parts(name, rows):
                yield part.chunk(self._lanes, self._dim)[self._lane]
            return
        length = self.shape(name)[0]
        own = rows or Rows(name, 0, length)
        begin = self._lane * length
        yield from self._given.parts(name, Rows(name, begin + own.begin, begin + own.end))


@torch.no_grad()
def copy_to(target: torch.Tensor, given: GivenValues, name: str, rows: Rows | None) -> None:
    """Overwrite a tensor, of whatever device and dtype, with these rows of a given one."""
    begin = 0
    for part in given.parts(name, rows):
        if target.dim():
            target[begin : begin + len(part)].copy_(part)
            begin += len(part)
        else:
            target.copy_(part)


def are_equal(given: GivenValues, name: str, other: str) -> bool:
    """Whether two given tensors have the same dtype, shape and values."""
    if (given.dtype(name), given.shape(name)) != (given.dtype(other), given.shape(other)):
        return False
    pairs = zip(given.parts(name, None), given.parts(other, None), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)
