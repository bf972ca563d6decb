"""Finds by trial what an optimizer's class does: whether its update of a parameter needs what no rank has.

Small tables stand for the parameters.  They have their shapes up to a length, and the size of their gradients
changes from update to update: a class may treat small tables, small gradients, or first updates otherwise.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from fxpipe.errors import RunError
from fxpipe.runtime.program.accelerator import is_accelerator
from fxpipe.runtime.torch_private import TorchDispatchMode
from fxpipe.training.optimizer.groups import Group, name_of

#: The sizes of the gradients, update by update.
_SIZES = (1.0, 1e-2, 1e2, 1e-4, 1e4, 1.0, 1.0, 1e-1, 10.0, 1.0, 1e3, 1e-3)
#: The largest length of a table: above 128, from which on some classes factor their second moments.
_LENGTH = 144
#: The part of an update by which two ways to make it may differ.
_LIMIT = 1e-3

Shape = tuple[int, ...]


def check_group(
    group: Group, shapes: Iterable[Sequence[int]], dims: Collection[int], device: torch.device, ranks: int
) -> None:
    """Raise RunError for a class that cannot update the parameters of a group on one rank alone.

    shapes: of the parameters.  dims: along which ranks have parts of them.  ranks: the processes that update.
    """
    group = replace(group, defaults=_with_rate(group.defaults), options=_with_rate(group.options))
    tables = _tables(shapes)
    with torch.random.fork_rng([device] if is_accelerator(device) else []), _alone(name_of(group.cls)):
        check_closure(group, tables[-1], device)
        if ranks > 1:
            check_separable(group, tables, dims, device)


def check_users_optimizer(
    optimizer: Optimizer, shapes: Iterable[Sequence[int]], dims: Collection[int], device: torch.device
) -> None:
    """Raise RunError for an optimizer of the user's own that cannot update its parameters on one rank alone.

    shapes, dims: as above.  One that cannot be made again by its options is not tried.
    """
    cls, tables = type(optimizer), _tables(shapes)
    names = inspect.signature(cls).parameters.keys() & optimizer.defaults.keys()
    defaults = _with_rate({name: optimizer.defaults[name] for name in names})
    with torch.random.fork_rng([device] if is_accelerator(device) else []), _alone(name_of(cls)):
        for group in optimizer.param_groups:
            options = _with_rate({name: value for name, value in group.items() if name != "params"})
            try:
                check_separable(Group(cls, defaults, options), tables, dims, device)
            except RunError:
                raise
            except Exception:  # noqa: BLE001 - a class of the user's, which may need more than its options
                return


def _tables(shapes: Iterable[Sequence[int]]) -> list[Shape]:
    """The largest shape of each number of dimensions, up to a length."""
    cut = {tuple(min(length, _LENGTH) for length in shape) for shape in shapes} or {(8, 8)}
    return [max(shape for shape in cut if len(shape) == n) for n in sorted({*map(len, cut)})]


def check_closure(group: Group, shape: Shape, device: torch.device) -> None:
    """Raise RunError for a class whose ``step(closure)`` does more than to evaluate the loss before it."""
    start, grads = _drawn(shape, 3, device)

    def updated(*, inside: bool) -> torch.Tensor:
        torch.manual_seed(0)
        table = Parameter(start.clone())
        optimizer = ready(group, [table])
        for grad in grads:

            def closure(grad: torch.Tensor = grad) -> torch.Tensor:
                table.grad = grad + 0.5 * table.detach()
                return table.detach().square().sum()

            closure()
            with _NoCommunication():  # type: ignore[no-untyped-call]
                optimizer.step(*[closure] * inside)
        return table.detach()

    try:
        expected = updated(inside=True)
    except _CommunicatesError:
        raise
    except Exception:  # noqa: BLE001 - it takes no closure, or no such table
        return
    name, cause = name_of(group.cls), None
    try:
        if torch.equal(updated(inside=False), expected):
            return
    except Exception as error:  # noqa: BLE001 - what a class of the user's says when it has no closure
        cause = error
    raise RunError(
        f"{name} evaluates the loss within its update, as SAM and L-BFGS do, and pipe.optimizer updates once "
        "behind a step. Take a class that needs no closure, such as AdamW; docs/training.md has SAM in two "
        f"steps of the pipeline. With one rank, {name}(model.parameters(), …) of your own works too: zero "
        "its gradients and return pipe.step(batch) in the closure."
    ) from cause


def check_separable(
    group: Group, shapes: Sequence[Shape], dims: Collection[int], device: torch.device
) -> None:
    """Raise RunError for a class whose update of a parameter depends on other parameters (clips by the norm
    of all), or, where ranks have parts of one, on other parts (Adafactor, Muon): they would make another one.
    """
    several = shapes if len(shapes) > 1 else [*shapes] * 2
    drawn = [_drawn(shape, len(_SIZES), device, k) for k, shape in enumerate(several)]
    starts = [start for start, _ in drawn]
    updates = [[size * grads[k] for _, grads in drawn] for k, size in enumerate(_SIZES)]
    name = name_of(group.cls)
    # The others make the same updates in parts, without a watch over each of their ops.
    with _NoCommunication():  # type: ignore[no-untyped-call]
        whole = [starts, *map(_Tables(group, starts, 1).updated, updates)]
    if _differs(whole, _Tables(group, starts, 2), updates):
        raise RunError(
            f"{name} updates a parameter by the values of others, which other ranks hold. Take an optimizer "
            "that updates each parameter by itself, such as AdamW."
        )
    for dim in sorted(dims):
        if _differs(whole, _Tables(group, starts, 2, dim), updates):
            elements = "columns" if dim else "rows"
            raise RunError(
                f"{name} updates {elements} of a parameter by the values of other {elements}, which other "
                "ranks hold with vocab_parallel, shard or DTensors. Compile without them, or take an "
                "optimizer that updates each element by itself, such as AdamW, for these parameters: "
                'groups=[{"params": […], "class": …}].'
            )


class _Tables:
    """Tables that several optimizers update: of each a part along ``dim``, or some tables each."""

    def __init__(self, group: Group, starts: Sequence[torch.Tensor], optimizers: int, dim: int | None = None):
        self.dim = [dim if dim is not None and start.dim() > dim else None for start in starts]
        self.parts = [
            [Parameter(part.clone()) for part in _divided(start, along, optimizers)]
            for start, along in zip(starts, self.dim, strict=True)
        ]
        by_optimizer: list[list[Parameter]] = [[] for _ in range(optimizers)]
        for k, parts in enumerate(self.parts):
            for number, part in enumerate(parts, k if len(parts) == 1 else 0):
                by_optimizer[number % optimizers].append(part)
        self.optimizers = [ready(group, tables) for tables in by_optimizer if tables]

    def whole(self) -> list[torch.Tensor]:
        return [
            parts[0].detach().clone() if dim is None else torch.cat([x.detach() for x in parts], dim)
            for parts, dim in zip(self.parts, self.dim, strict=True)
        ]

    def updated(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        for parts, grad, dim in zip(self.parts, grads, self.dim, strict=True):
            for part, rows in zip(parts, _divided(grad, dim, len(parts)), strict=True):
                part.grad = rows.clone()
        for optimizer in self.optimizers:
            optimizer.step()
        return self.whole()


def _divided(tensor: torch.Tensor, dim: int | None, parts: int) -> Sequence[torch.Tensor]:
    return [tensor] if dim is None else tensor.chunk(parts, dim)


def _differs(
    whole: Sequence[Sequence[torch.Tensor]], tables: _Tables, updates: Sequence[Sequence[torch.Tensor]]
) -> bool:
    """Whether the tables get other values by these gradients than whole ones have before and after each."""
    for grads, before, after in zip(updates, whole, whole[1:], strict=False):
        for then, expected, result in zip(before, after, tables.updated(grads), strict=True):
            # Kernels for other shapes add in another order, so equal updates differ by a few roundings.
            rounding = 8 * torch.finfo(then.dtype).eps * expected.abs().max()
            limit = _LIMIT * (expected - then).abs().max() + rounding
            if not bool(((result - expected).abs() <= limit).all()):
                return True
    return False


def _drawn(
    shape: Shape, number: int, device: torch.device, seed: int = 0
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A table, and so many gradients."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(shape, generator=generator, device="cpu") for _ in range(1 + number)]
    start, *grads = (tensor.to(device) for tensor in drawn)
    return start, grads


def _with_rate(options: Mapping[str, object]) -> dict[str, object]:
    """Options with a learning rate that hides no difference, as 0 would."""
    return {name: 0.1 if name == "lr" else value for name, value in options.items()}


def ready(group: Group, tables: Sequence[Parameter]) -> Any:
    """An optimizer of the group, ready to train."""
    return in_train_mode(group.made(tables))


def in_train_mode(optimizer: object) -> Any:
    """The optimizer, in the mode in which it updates: one that is schedule-free has another one."""
    if callable(train := getattr(optimizer, "train", None)):
        train()
    return optimizer


class _CommunicatesError(RunError):
    """A class sends or receives in its update."""


class _NoCommunication(TorchDispatchMode):
    """Raises before anything is sent."""

    def __torch_dispatch__(
        self, op: Any, types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        if op.namespace in ("c10d", "_c10d_functional"):
            raise _CommunicatesError(op.name().partition("::")[2].rstrip("_"))
        return op(*args, **(kwargs or {}))


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """Raise RunError if a class communicates in a trial."""
    try:
        yield
    except _CommunicatesError as error:
        raise RunError(
            f"{name} communicates in its step ({error}), as where all ranks have all parameters; here each "
            'rank updates its own alone. Compile with shard="optimizer" for what ZeroRedundancyOptimizer '
            "does, and take a class that updates on one device, such as torch.optim.Muon."
        ) from None
