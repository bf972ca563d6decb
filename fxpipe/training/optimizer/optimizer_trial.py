"""Finds by trial what an optimizer does: whether its update of a parameter needs what no rank has, and
whether it can be taken back.

Tables stand for the parameters, in their groups, and are divided as these are.  They have their shapes up to
a length, and the size of their gradients changes from update to update: a class may treat small tables, small
gradients, or first updates otherwise.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import prod
from typing import Any, NamedTuple

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from fxpipe.errors import RunError
from fxpipe.runtime.program.accelerator import is_accelerator
from fxpipe.runtime.torch_private import TorchDispatchMode
from fxpipe.training.model.rollback import Rollback
from fxpipe.training.optimizer.groups import Group, MakesOptimizer, assembled, name_of
from fxpipe.training.optimizer.several_optimizers import optimizers_in

#: The sizes of the gradients, update by update.
_SIZES = (
    1.0, 1e-2, 1e2, 1e-4, 1e4, 1.0, 1.0, 1e-1, 10.0, 1.0,
    1e3, 1e-3, 0.3, 3.0, 1e-5, 1e5, 0.03, 30.0, 1e-6, 1e6,
)  # fmt: skip
#: The update in which one element alone has a gradient, like the words of a table that a batch uses.
_SPARSE = 6
#: The largest length of a table: above 128, from which on some classes factor their second moments.
_LENGTH = 144
#: The elements of the largest tables, and their updates: some classes project what has hundreds of rows.
_ELEMENTS, _FEW = 1 << 20, 3
#: The part of an update by which two ways to make it may differ.
_LIMIT = 1e-4
#: In which tables are drawn: the first one shows the smallest differences, and some classes know no float64.
_DTYPES = torch.float64, torch.float32

Shape = tuple[int, ...]


class Table(NamedTuple):
    """A kind of parameters.  ``shape``: of the whole.  ``dims``: along which ranks have parts of it."""

    shape: Shape
    dims: frozenset[int] = frozenset()


class _Drawn(NamedTuple):
    """A table of a group: its value before the first update, and its gradients of all."""

    group: int
    dims: frozenset[int]
    start: torch.Tensor
    grads: Sequence[torch.Tensor]


def check_groups(
    groups: Sequence[Group],
    kinds: Sequence[Collection[Table]],
    device: torch.device,
    *,
    ranks: int,
    lacks: bool = False,
    undone: bool = False,
) -> None:
    """Raise RunError for an optimizer of these groups that cannot update its parameters on one rank alone.

    kinds: of the parameters of each group.  ranks: the processes that update.  lacks: whether one of them has
    no parameter of some group.  undone: whether updates are taken back.
    """
    tables = [_extremes(of_group, _LENGTH**2, _LENGTH) for of_group in kinds]
    # What a class refuses is told with the options as they were given.
    _made(groups, [[Parameter(torch.empty(each[-1].shape, device=device))] for each in tables])
    groups = _with_rates(groups)
    with torch.random.fork_rng([device] if is_accelerator(device) else []):
        for group, of_group in zip(groups, tables, strict=True):
            with _alone(name_of(group.cls)):
                check_closure(group, of_group[-1].shape, device)
        if ranks > 1 or undone:
            tried = _Trial.of(groups, tables, device)
        if undone:
            check_undoable(tried)
        if ranks > 1:
            check_separable(tried, lacks=lacks)
            divided = [[table for table in of_group if table.dims] for of_group in kinds]
            large = [[t for t in _extremes(x, _ELEMENTS)[-1:] if max(t.shape) > _LENGTH] for x in divided]
            if any(large):
                some = [own or small[-1:] for own, small in zip(large, tables, strict=True)]
                check_separable(_Trial.of(groups, some, device, _FEW))


def check_users_optimizer(optimizer: Optimizer, dims: frozenset[int], device: torch.device) -> None:
    """Raise RunError for an optimizer of the user's own that cannot update its parameters on one rank alone.

    dims: along which ranks have parts of some.  It is made again by its options, and with its attributes;
    what can be neither is not tried.
    """
    cls, defaults = type(optimizer), optimizer.defaults
    made_with = {name: defaults[name] for name in inspect.signature(cls).parameters.keys() & defaults.keys()}
    groups, kinds = [], []
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name != "params"}
        groups.append(Group(cls, made_with, options))
        kinds.append(_extremes((Table(tuple(p.shape), dims) for p in group["params"]), _LENGTH**2, _LENGTH))
    ways: list[MakesOptimizer] = [cls, _copies_of(optimizer)]
    with torch.random.fork_rng([device] if is_accelerator(device) else []):
        for way, step in product(ways, (_step, _step_with_closure)):
            alike = [replace(each, cls=way, defaults=made_with if way is cls else {}) for each in groups]
            try:
                check_separable(_Trial.of(_with_rates(alike), kinds, device, step=step))
            except RunError:
                raise
            except Exception:  # noqa: BLE001 - a class of the user's, which may need more
                continue


def _step(optimizer: Optimizer) -> None:
    optimizer.step()


def _step_with_closure(optimizer: Optimizer) -> None:
    """An update of a class that needs one, by gradients that stay as they are."""
    optimizer.step(lambda: 0.0)


def _copies_of(optimizer: Optimizer) -> MakesOptimizer:
    """What makes optimizers with copies of an optimizer's attributes, but for those that each has."""
    cls, of_each = type(optimizer), vars(Optimizer([Parameter(torch.empty(0))], {})).keys()
    attributes = {
        name: x for name, x in vars(optimizer).items() if name not in of_each and not hasattr(cls, name)
    }

    def copied(groups: Any, **_: object) -> Optimizer:
        other = cls.__new__(cls)
        Optimizer.__init__(other, groups, {**optimizer.defaults})
        vars(other).update(copy.deepcopy(attributes))
        return other

    copied.__name__ = cls.__name__
    return copied


def _with_rates(groups: Sequence[Group]) -> list[Group]:
    """Groups with a learning rate that hides no difference, as 0 would."""

    def with_rate(options: Mapping[str, object]) -> dict[str, object]:
        return {name: 0.1 if name == "lr" else value for name, value in options.items()}

    # Those with the same defaults have one optimizer.
    defaults = {id(group.defaults): with_rate(group.defaults) for group in groups}
    return [
        replace(group, defaults=defaults[id(group.defaults)], options=with_rate(group.options))
        for group in groups
    ]


def _extremes(tables: Iterable[Table], elements: int, length: int | None = None) -> list[Table]:
    """Of each number of dimensions, and way to divide them, the tables that a limit of any kind could tell
    from the rest: the smallest and the largest, by elements and by sides; last one with long short sides.

    elements, length: to which shapes are cut.
    """
    # Without elements nothing is updated.
    cut = {Table(_cut(shape, elements, length), dims) for shape, dims in tables if 0 not in shape}
    alike: dict[object, list[Table]] = {}
    for table in sorted(cut or {Table((8, 8))}, key=lambda table: (table.shape, sorted(table.dims))):
        alike.setdefault((len(table.shape), table.dims), []).append(table)
    sides: list[Callable[[Table], int]] = [
        lambda table: prod(table.shape),
        lambda table: max(table.shape, default=1),
        lambda table: table.shape[0] if table.shape else 1,
        lambda table: table.shape[-1] if table.shape else 1,
        lambda table: min(table.shape, default=1),
    ]
    chosen = [end(same, key=side) for side in sides for same in alike.values() for end in (min, max)]
    return [*reversed(dict.fromkeys(reversed(chosen)))]


def _cut(shape: Sequence[int], elements: int, length: int | None) -> Shape:
    """A shape of at most so many elements, whose longest sides are shorter; and of this length at most."""
    most = max(shape, default=1) if length is None else length
    while prod(min(side, most) for side in shape) > elements:
        most = most * 9 // 10
    return tuple(min(side, most) for side in shape)


def check_closure(group: Group, shape: Shape, device: torch.device) -> None:
    """Raise RunError for a class whose ``step(closure)`` does more than to evaluate the loss before it."""
    start, grads = _drawn(shape, 3, device, torch.get_default_dtype())

    def updated(*, inside: bool) -> torch.Tensor:
        torch.manual_seed(0)
        table = Parameter(start.clone())
        optimizer = _made([group], [[table]])
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


def check_separable(trial: _Trial, *, lacks: bool = False) -> None:
    """Raise RunError for groups whose update of a parameter depends on other parameters (clips by the norm
    of all), or, where ranks have parts of one, on other parts (Adafactor, Muon): they would make another one.

    lacks: see ``check_groups``.
    """
    if name := trial.differing(ranks=3 if lacks else 2):
        if trial.differing(ranks=1):
            raise RunError(
                f"{name} makes other updates by the same gradients when it makes them again, as one that "
                "draws random numbers does, and each rank would draw its own. Take one that does not."
            )
        raise RunError(
            f"{name} updates a parameter by the values of others, which other ranks hold. Take an optimizer "
            "that updates each parameter by itself, such as AdamW."
        )
    for dim in sorted({dim for table in trial.drawn for dim in table.dims}):
        if name := trial.differing(dim, ranks=2):
            elements = "columns" if dim else "rows"
            raise RunError(
                f"{name} updates {elements} of a parameter by the values of other {elements}, which other "
                "ranks hold with vocab_parallel, shard or DTensors. With shard alone, compile with the names "
                'of these parameters, undivided=["*.weight"]: one replica then owns all of each. Or compile '
                "without what divides them, or take an optimizer that updates each element by itself, such "
                'as AdamW, for them: groups=[{"params": […], "class": …}].'
            )


def check_undoable(trial: _Trial) -> None:
    """Raise RunError for groups whose update cannot be taken back and made again with the same bits: one
    optimizer makes each of its updates once, another one twice."""
    outside: dict[str, set[str]] = {}

    def twice(optimizer: Optimizer) -> None:
        undo, parts = Rollback.of(optimizer), optimizers_in(optimizer)
        before = [_attributes(each) for each in parts]
        optimizer.step()
        for each, known in zip(parts, before, strict=True):
            changed = {name for name, text in _attributes(each).items() if known.get(name) != text}
            outside.setdefault(type(each).__name__, set()).update(changed)
        undo.take_back(optimizer)
        optimizer.step()

    if name := trial.differing(step=twice, exactly=True):
        attributes = ", ".join(sorted(outside.get(name, ())))
        where = f" (in {attributes})" if attributes else ", or draws random numbers"
        raise RunError(
            f'validation="post" takes an update back and makes it again, and {name} gives another result '
            "then: it keeps what is not taken back, outside of its state_dict or in options of its groups"
            f'{where}. Take validation="barrier".'
        )


@dataclass(frozen=True)
class _Trial:
    """Tables of groups, with their values before the first update and after each, on a rank that has all."""

    groups: Sequence[Group]
    drawn: Sequence[_Drawn]
    whole: Sequence[Sequence[torch.Tensor]]
    step: Callable[[Optimizer], object] = _step

    @staticmethod
    def of(
        groups: Sequence[Group],
        tables: Sequence[Sequence[Table]],
        device: torch.device,
        updates: int = len(_SIZES),
        step: Callable[[Optimizer], object] = _step,
    ) -> _Trial:
        """Make the updates.  tables: of each group.  step: makes one."""
        for dtype in _DTYPES:
            try:
                drawn = list[_Drawn]()
                for number, of_group in enumerate(tables):
                    for shape, dims in of_group if len(of_group) != 1 else [*of_group] * 2:
                        start, grads = _drawn(shape, updates, device, dtype, len(drawn))
                        drawn.append(_Drawn(number, dims, start, grads))
                with _alone(" and ".join(dict.fromkeys(name_of(group.cls) for group in groups))):
                    together = _Tables(groups, drawn, step=step)
                    with _NoCommunication():  # type: ignore[no-untyped-call]
                        whole = [together.whole(), *map(together.updated, range(updates))]
                return _Trial(groups, drawn, whole, step)
            except RunError:
                raise
            except Exception:  # whatever a class, or a device, raises that has no such dtype
                if dtype is _DTYPES[-1]:
                    raise
        raise AssertionError

    def differing(
        self,
        dim: int | None = None,
        ranks: int = 1,
        step: Callable[[Optimizer], object] | None = None,
        *,
        exactly: bool = False,
    ) -> str | None:
        """The class of the first table that gets other values where these ranks update, each its own.

        They make the same updates without a watch over each of their ops.
        """
        tables = _Tables(self.groups, self.drawn, dim, ranks, step or self.step)
        for update, (before, after) in enumerate(pairwise(self.whole)):
            if not all(bool(table.isfinite().all()) for table in after):
                break  # the class cannot stand gradients of this size
            pairs = zip(self.drawn, before, after, tables.updated(update), strict=True)
            for table, then, expected, result in pairs:
                # Kernels for other shapes add in another order, so equal updates differ by a few roundings.
                rounding = 8 * torch.finfo(then.dtype).eps * expected.abs().amax()
                limit = 0.0 if exactly else _LIMIT * (expected - then).abs().amax() + rounding
                if not bool(((result - expected).abs() <= limit).all()):
                    return name_of(self.groups[table.group].cls)
        return None


class _Tables:
    """Tables that several ranks update: of each a part along ``dim``, or some tables each.  The first and the
    last of three have no tables of some groups.  ``step``: makes an update."""

    def __init__(
        self,
        groups: Sequence[Group],
        drawn: Sequence[_Drawn],
        dim: int | None = None,
        ranks: int = 1,
        step: Callable[[Optimizer], object] = _step,
    ):
        self.drawn, self.step = drawn, step
        self.dims = [dim if dim in table.dims else None for table in drawn]
        self.parts: list[list[Parameter]] = []
        by_rank: list[list[list[Parameter]]] = [[[] for _ in groups] for _ in range(ranks)]
        for number, (table, along) in enumerate(zip(drawn, self.dims, strict=True)):
            self.parts.append([Parameter(part.clone()) for part in _divided(table.start, along)])
            first = number if along is None else 0
            for k, part in enumerate(self.parts[-1], first):
                by_rank[min(k % 2 + (ranks == 3 and table.group > 0), ranks - 1)][table.group].append(part)
        self.optimizers = [_made(groups, by_group) for by_group in by_rank]

    def whole(self) -> list[torch.Tensor]:
        return [
            parts[0].detach().clone() if dim is None else torch.cat([x.detach() for x in parts], dim)
            for parts, dim in zip(self.parts, self.dims, strict=True)
        ]

    def updated(self, update: int) -> list[torch.Tensor]:
        for parts, table, dim in zip(self.parts, self.drawn, self.dims, strict=True):
            for part, rows in zip(parts, _divided(table.grads[update], dim), strict=True):
                part.grad = rows.clone()
        for optimizer in self.optimizers:
            self.step(optimizer)
        return self.whole()


def _divided(tensor: torch.Tensor, dim: int | None) -> Sequence[torch.Tensor]:
    """The first row, about half of the rows, and the others: few, many, and at no even border, as blocks of
    elements may have it that a class treats together."""
    if dim is None:
        return [tensor]
    length = tensor.shape[dim]
    sizes = [1, length // 2, length - length // 2 - 1]
    parts: Sequence[torch.Tensor] = tensor.split([size for size in sizes if size > 0], dim)
    return parts


def _drawn(
    shape: Shape, number: int, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A table, and so many gradients, which grow along each dim, so that no two parts have the same norm."""
    generator = torch.Generator().manual_seed(seed)
    start, *grads = (
        torch.randn(shape, generator=generator, dtype=dtype, device="cpu") for _ in range(1 + number)
    )
    for k, (grad, size) in enumerate(zip(grads, _SIZES, strict=False)):
        for dim, length in enumerate(shape):
            ramp = torch.linspace(0.5, 2.0, length, dtype=dtype, device="cpu")
            grad.mul_(ramp.view(-1, *[1] * (len(shape) - dim - 1)))
        grad.mul_(size)
        if k == _SPARSE:
            grad.view(-1)[:-1] = 0
    return start.to(device), [grad.to(device) for grad in grads]


def _attributes(optimizer: Optimizer) -> dict[str, str]:
    """The optimizer's own attributes, and options of its groups, as text."""
    known = {"state", "param_groups", "defaults"}
    attributes = {k: repr(x) for k, x in vars(optimizer).items() if k not in known and not k.startswith("_")}
    groups = [group.items() for group in optimizer.param_groups]
    return attributes | {k: repr(x) for options in groups for k, x in options if k != "params"}


def _made(groups: Sequence[Group], tables: Sequence[Sequence[Parameter]]) -> Any:
    """The optimizer of the groups, ready to train."""
    optimizer = assembled(groups, tables)
    for each in optimizers_in(optimizer):
        in_train_mode(each)
    return optimizer


def in_train_mode(optimizer: object) -> Any:
    """The optimizer, in the mode in which it updates: one that is schedule-free has another one."""
    if callable(train := getattr(optimizer, "train", None)):
        train()
    return optimizer


class _CommunicatesError(RunError):
    """A class sends or receives in its update."""


class _NoCommunication(TorchDispatchMode):
    """Raises before anything is sent."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # else Dynamo would never compile again what a trial calls

    def __torch_dispatch__(self, op: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
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
