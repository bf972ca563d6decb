"""Lanes: processes that share each op of a rank, as tensor parallelism does, and the ops between them.

All lanes of a rank run one program.  An op of ``torch.ops.lanes`` is called by all of them at the same place
of that program, and gives values of all lanes to each.  Sums are added in the lanes' order, in single
precision at least, so they have the same bits on every lane, under torchrun and in one process.

``all_reduce(x, "sum", n)``           the sum of all n lanes' tensors (or "avg", "max", "min")
``all_gather(x, n)``                  all lanes' tensors, one behind the other in the first dimension
``reduce_scatter(x, "sum", n)``       this lane's share of the sum: of n in the first dimension
``all_to_all(x, n)``                  a share from each lane, for one of n in the first dimension to each
``begin_all_to_all(x, n)``            the same, on its way until ``end(…, n)``, which alone reads the result
``begin_all_gather(x, n)``            the same of ``all_gather``
``sum_shares(x, "sum", n)``           of the n shares in the first dimension: the rest of ``reduce_scatter``
``part(x, dim, n)``                   this lane's share of a tensor that all lanes have
``number(first, step)``               first + step * (number of this lane), 0-d

Where lanes are a mesh of several dimensions, an op may be between the lanes along one of them: n lanes, each
``stride`` (1 by default) behind the one before, as in ``all_reduce(x, "sum", n, stride)``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import reduce, wraps
from typing import Protocol

import torch

from fxpipe.errors import RunError
from fxpipe.plan.lanes import LaneGroup
from fxpipe.plan.tensors import sum_over_ranks
from fxpipe.runtime.torch_private import is_fake


class Lanes(Protocol):
    """The lanes of a rank, for one of them.  ``index``: of this lane of its rank, and ``number``: of all.
    All lanes call the same, in one order."""

    @property
    def index(self) -> int: ...

    @property
    def number(self) -> int: ...

    def exchange(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Give each lane its part, contiguous; return what each gave this one, in the lanes' order.

        The part of this lane for itself has the shape of what each of the others gives it.
        """
        ...

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all lanes, contiguous and of one shape, in their order."""
        ...

    def begin_exchange(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Begin ``exchange`` of parts of one shape.  The result is for ``end`` alone."""
        ...

    def begin_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin ``gather``.  The result is for ``end`` alone."""
        ...

    def end(self, begun: torch.Tensor) -> torch.Tensor:
        """What all lanes have given, one behind the other in the first dimension."""
        ...

    def along(self, group: LaneGroup) -> Lanes:
        """The lanes of a group that has this one among its members, from among all lanes of the rank."""
        ...


@dataclass(frozen=True)
class AloneLane:
    """A lane without the others: each of them gives what this one gives."""

    index: int
    number: int

    def exchange(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [parts[self.index]] * self.number

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor] * self.number

    def begin_exchange(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(self.exchange(parts))

    def begin_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.gather(tensor))

    def end(self, begun: torch.Tensor) -> torch.Tensor:
        return begun

    def along(self, group: LaneGroup) -> AloneLane:
        return AloneLane(group.index(self.index), group.number)


_running: ContextVar[Lanes | None] = ContextVar("lanes", default=None)  # each rank has a context of its own


@contextlib.contextmanager
def running(lanes: Lanes | None) -> Iterator[None]:
    """Within it the ops of this rank are between these lanes."""
    before = _running.set(lanes)
    try:
        yield
    finally:
        _running.reset(before)


def _lanes(n: int, stride: int) -> Lanes:
    lanes = _running.get()
    if lanes is None:
        raise RunError(
            "An op between lanes ran outside of a step, where there are none. Run the program by pipe.step "
            "or pipe.run_local."
        )
    return lanes if n in (0, lanes.number) else lanes.along(LaneGroup(n, stride))


_REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": sum_over_ranks,
    "avg": lambda *parts: sum_over_ranks(*parts) / len(parts),
    "max": lambda *parts: reduce(torch.maximum, parts),
    "min": lambda *parts: reduce(torch.minimum, parts),
}
REDUCTIONS = tuple(_REDUCTIONS)


def _one_op(run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Replace the function by the op of its name in a trace."""

    @wraps(run)
    def call(x: torch.Tensor, *rest: object) -> torch.Tensor:
        result: torch.Tensor = (
            getattr(torch.ops.lanes, run.__name__)(x, *rest) if is_fake(x) else run(x, *rest)
        )
        return result

    return call


@_one_op
def all_reduce(x: torch.Tensor, op: str, n: int, stride: int = 1) -> torch.Tensor:
    lanes, flat = _lanes(n, stride), x.contiguous().view(-1)
    slices = [part.contiguous() for part in flat.tensor_split(n)]
    total = _REDUCTIONS[op](*lanes.exchange(slices))
    longest = slices[0].numel()  # of slices that differ by one element
    padded = total.new_zeros(longest)  # a gather takes tensors of one shape
    padded[: total.numel()] = total
    parts = [part[: like.numel()] for part, like in zip(lanes.gather(padded), slices, strict=True)]
    return torch.cat(parts).view(x.shape)


@_one_op
def all_gather(x: torch.Tensor, n: int, stride: int = 1) -> torch.Tensor:
    return torch.cat(_lanes(n, stride).gather(x.contiguous()))


@_one_op
def reduce_scatter(x: torch.Tensor, op: str, n: int, stride: int = 1) -> torch.Tensor:
    return _REDUCTIONS[op](*_lanes(n, stride).exchange([part.contiguous() for part in x.chunk(n)]))


@_one_op
def all_to_all(x: torch.Tensor, n: int, stride: int = 1) -> torch.Tensor:
    return torch.cat(_lanes(n, stride).exchange([part.contiguous() for part in x.chunk(n)]))


@_one_op
def begin_all_to_all(x: torch.Tensor, n: int, stride: int = 1) -> torch.Tensor:
    return _lanes(n, stride).begin_exchange([part.contiguous() for part in x.chunk(n)])


@_one_op
def begin_all_gather(x: torch.Tensor, n: int, stride: int = 1) -> torch.Tensor:
    return _lanes(n, stride).begin_gather(x.contiguous())


@_one_op
def end(x: torch.Tensor, n: int, stride: int = 1) -> torch.Tensor:
    return _lanes(n, stride).end(x)


def _sum_shares(x: torch.Tensor, op: str, n: int) -> torch.Tensor:
    return _REDUCTIONS[op](*x.chunk(n))


def _part(x: torch.Tensor, dim: int, n: int, stride: int = 1) -> torch.Tensor:
    return x.chunk(n, dim)[_lanes(n, stride).index].clone(memory_format=torch.contiguous_format)


def _number(first: int, step: int, n: int = 0, stride: int = 1, *, device: torch.device) -> torch.Tensor:
    # full, as a tensor made from a number would wait for the device
    return torch.full((), first + step * _lanes(n, stride).index, dtype=torch.int64, device=device)


def _resized(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    return x.new_empty([*x.shape[:dim], length, *x.shape[dim + 1 :]])


def _like(x: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty(x.shape)


def _of_all(x: torch.Tensor, n: int, stride: int = 1) -> torch.Tensor:
    return _resized(x, 0, len(x) * n)


def _of_one(x: torch.Tensor, op: str, n: int, stride: int = 1) -> torch.Tensor:
    return _resized(x, 0, len(x) // n)


def _of_part(x: torch.Tensor, dim: int, n: int, stride: int = 1) -> torch.Tensor:
    return _resized(x, dim % x.dim(), x.shape[dim] // n)


def _of_number(*_: object, device: torch.device) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64, device=device)


#: The ops, with their parameters and the layouts of their results; those without _ are functions of programs.
_OPS: tuple[tuple[Callable[..., torch.Tensor], str, Callable[..., torch.Tensor]], ...] = (
    (all_reduce, "Tensor x, str op, int n, int stride=1", _like),
    (all_gather, "Tensor x, int n, int stride=1", _of_all),
    (reduce_scatter, "Tensor x, str op, int n, int stride=1", _of_one),
    (all_to_all, "Tensor x, int n, int stride=1", _like),
    (begin_all_to_all, "Tensor x, int n, int stride=1", _like),
    (begin_all_gather, "Tensor x, int n, int stride=1", _of_all),
    (end, "Tensor x, int n, int stride=1", _like),
    (_sum_shares, "Tensor x, str op, int n", _of_one),
    (_part, "Tensor x, int dim, int n, int stride=1", _of_part),
    (_number, "int first, int step, int n=0, int stride=1, *, Device device", _of_number),
)

#: Of the ops that all lanes run together, the functions that programs call.
FUNCTIONS: dict[object, Callable[..., torch.Tensor]] = {}

_library = torch.library.Library("lanes", "DEF")
for _run, _parameters, _layout in _OPS:
    _name = _run.__name__.removeprefix("_")
    _library.define(f"{_name}({_parameters}) -> Tensor")
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    _library.impl(_name, _layout, "Meta")
    if _name == _run.__name__:
        FUNCTIONS[getattr(torch.ops.lanes, _name).default] = _run

#: What begins an exchange, and gives a value that its end alone may read.
BEGIN_EXCHANGES = (torch.ops.lanes.begin_all_to_all.default, torch.ops.lanes.begin_all_gather.default)
ENDS_EXCHANGE = torch.ops.lanes.end.default
SUM_OF_LANES = torch.ops.lanes.all_reduce.default
