"""Collectives that write to tensors, which a model's own code calls, as functions of tensors in a trace.

before: dist.all_reduce(x, group=lanes)
after:  x.copy_(_c10d_functional.all_reduce(x, "sum", lanes)), which is what DTensor's ops run

They are replaced where ``torch.distributed`` calls its group, so that code that has imported a function of
it, and code of a backward, is traced alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fxpipe.errors import CaptureError

_Group = Any  # torch.distributed.ProcessGroup, which a build without it lacks
_OPS: Any = torch.ops._c10d_functional


class Ended:
    """What a collective with ``async_op=True`` returns: it has ended."""

    def wait(self, timeout: object = None) -> bool:
        return True

    is_completed = is_success = wait


@contextlib.contextmanager
def functional_collectives() -> Iterator[None]:
    """Within it, collectives of any group are functions of tensors, or CaptureErrors."""
    group_type: Any = torch.distributed.ProcessGroup
    before = {name: vars(group_type)[name] for name in _COLLECTIVES if name in vars(group_type)}
    for name in before:
        setattr(group_type, name, _traced(name))
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(group_type, name, method)


def _traced(name: str) -> Callable[..., Ended]:
    collective = _COLLECTIVES[name]

    def call(group: _Group, *arguments: Any, **options: Any) -> Ended:
        if collective is None:
            raise CaptureError(
                f"The model calls {name.replace('_', ' ').strip()} of torch.distributed, which the lanes of "
                "a rank do not have. They have all_reduce, all_gather, reduce_scatter, all_to_all, broadcast."
            )
        with torch.no_grad():  # as in eager, autograd does not see that the tensor changes
            collective(group, *arguments, *options.values())
        return Ended()

    return call


def _write(target: torch.Tensor, value: torch.Tensor) -> None:
    target.copy_(_OPS.wait_tensor(value).view(target.shape))


def _reduction(options: Any) -> str:
    """The name of a reduction; one that lanes do not have is refused by this name."""
    kinds = torch.distributed.ReduceOp.RedOpType.__members__
    return next((name.lower() for name, kind in kinds.items() if options.reduceOp == kind), "premul_sum")


def _all_reduce(group: _Group, tensors: Sequence[torch.Tensor], options: Any) -> None:
    for x in tensors:
        _write(x, _OPS.all_reduce(x, _reduction(options), group.group_name))


def _gathered(group: _Group, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _OPS.all_gather_into_tensor(
        x.contiguous().view(1, *x.shape), group.size(), group.group_name
    )
    return result


def _all_gather(
    group: _Group, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], options: Any
) -> None:
    for parts, x in zip(outputs, inputs, strict=True):
        for part, value in zip(parts, _OPS.wait_tensor(_gathered(group, x)).unbind(), strict=True):
            part.copy_(value)


def _all_gather_single(group: _Group, output: torch.Tensor, x: torch.Tensor, options: Any) -> None:
    _write(output, _gathered(group, x))


def _reduce_scatter_single(group: _Group, output: torch.Tensor, x: torch.Tensor, options: Any) -> None:
    shares = x.contiguous().view(group.size(), *output.shape)
    _write(output, _OPS.reduce_scatter_tensor(shares, _reduction(options), group.size(), group.group_name))


def _reduce_scatter(
    group: _Group, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], options: Any
) -> None:
    for output, parts in zip(outputs, inputs, strict=True):
        _reduce_scatter_single(group, output, torch.stack([*parts]), options)


def _all_to_all_single(
    group: _Group,
    output: torch.Tensor,
    x: torch.Tensor,
    takes: Sequence[int],
    gives: Sequence[int],
    options: Any,
) -> None:
    even = [len(x) // group.size()] * group.size()
    _write(
        output,
        _OPS.all_to_all_single(x.contiguous(), [*takes] or even, [*gives] or even, group.group_name),
    )


def _all_to_all(
    group: _Group, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], options: Any
) -> None:
    together = torch.stack([*inputs])
    even = [1] * len(inputs)
    received = _OPS.wait_tensor(_OPS.all_to_all_single(together, even, even, group.group_name))
    for output, value in zip(outputs, received.unbind(), strict=True):
        output.copy_(value)


def _broadcast(group: _Group, tensors: Sequence[torch.Tensor], options: Any) -> None:
    for x in tensors:
        _write(x, _OPS.wait_tensor(_gathered(group, x))[options.rootRank])


#: method of a process group -> what a trace has for it; None for what lanes do not have
_COLLECTIVES: dict[str, Callable[..., None] | None] = {
    "allreduce": _all_reduce,
    "allgather": _all_gather,
    "_allgather_base": _all_gather_single,  # until torch 2.12
    "all_gather_single": _all_gather_single,
    "_reduce_scatter_base": _reduce_scatter_single,  # until torch 2.12
    "reduce_scatter_single": _reduce_scatter_single,
    "reduce_scatter": _reduce_scatter,
    "alltoall_base": _all_to_all_single,  # until torch 2.12
    "all_to_all_single": _all_to_all_single,
    "alltoall": _all_to_all,
    "broadcast": _broadcast,
    **dict.fromkeys(("reduce", "gather", "scatter", "send", "recv", "recv_anysource", "barrier")),
    "allreduce_coalesced": None,
}
