"""Checks, before anything is traced, that the example fits the model's forward and that loss_fn takes two
arguments: the tracer would name neither."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fxpipe.errors import CaptureError, OptionError, suggested

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)
_LOSS = "a function (output, microbatch) -> loss"


def check_call(model: nn.Module, example: object, loss_fn: Callable[..., object] | None) -> None:
    """Raise CaptureError for an example that ``forward`` does not take, OptionError for a wrong
    ``loss_fn``."""
    if loss_fn is not None:
        _check_loss(loss_fn)
    wrapper = next((x for x in model.modules() if isinstance(x, _WRAPPERS)), None)
    if wrapper is not None:
        raise CaptureError(
            f"The model is wrapped in {type(wrapper).__name__}, which exchanges gradients. Give what it "
            "wraps, model.module: the replicas of a pipeline train together by themselves (replicas=)."
        )
    if not isinstance(example, Mapping | tuple | list):
        return  # that is no microbatch at all: ``batch_leaves`` says so
    args, kwargs = arguments(example) if loss_fn is None else arguments_of_forward(model, example)
    model = _module_of(model)
    problem = mismatch(model.forward, args, kwargs) if _calls_forward(model) else None
    if problem is not None:
        text = (
            f"The example does not fit the model: {problem}. The forward is "
            f"{type(model).__name__}.forward{_parameters(model.forward)}, and the example gives "
            f"{described(args, kwargs)}"
        )
        others = [name for name in arguments(example)[1] if name not in kwargs]
        text += f" for it, and {', '.join(others)} for loss_fn alone." if others else "."
        if loss_fn is None:
            text += (
                " All of it goes to the forward. With a loss_fn, what the forward does not take is for that."
            )
        raise CaptureError(text)


def arguments(example: Any) -> tuple[tuple[object, ...], dict[str, object]]:
    """The positional and the keyword arguments of the forward that a microbatch is."""
    return ((), dict(example)) if isinstance(example, Mapping) else (tuple(example), {})


def arguments_of_forward(model: nn.Module, example: object) -> tuple[tuple[object, ...], dict[str, object]]:
    """The arguments that ``forward`` has parameters for, of a microbatch whose others are for loss_fn."""
    args, kwargs = arguments(example)
    model = _module_of(model)
    if not _calls_forward(model):
        return args, kwargs
    try:
        known = [*inspect.signature(model.forward).parameters.values()]
    except (TypeError, ValueError):  # of code that Python cannot look into
        return args, kwargs
    kinds = {p.kind for p in known}
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        kwargs = {name: value for name, value in kwargs.items() if name in {p.name for p in known}}
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        args = args[: sum(p.kind in by_place for p in known)]
    return args, kwargs


class Microbatch(dict[str, object]):
    """The microbatch that loss_fn gets.  ``names``: what it reads of it.  ``example``: the leaves that it has
    at first."""

    def __init__(self, example: Mapping[str, object]) -> None:
        super().__init__(example)
        self.names: set[str] = set()
        self.example = frozenset(example)

    def __getitem__(self, name: str) -> object:
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: object = None) -> object:
        self.names.add(name)
        return super().get(name, default)

    def pop(self, name: str, *default: object) -> object:
        self.names.add(name)
        return super().pop(name, *default)

    def __iter__(self) -> Iterator[str]:  # without it dict(…) and **… would read all at once
        return super().__iter__()

    def values(self) -> Any:
        self.names.update(self)
        return super().values()

    def items(self) -> Any:
        self.names.update(self)
        return super().items()


def warn_of_added(names: Iterable[str]) -> None:
    """Warn of what loss_fn puts into the microbatch, which is another object than the loop's batch."""
    if names := sorted(names):
        warnings.warn(
            f"loss_fn puts {', '.join(map(repr, names))} into its microbatch. The batch of the loop does not "
            "get that: let loss_fn return it behind the loss, as a metric, and ask for it with outputs=; or "
            "keep it in a variable of loss_fn.",
            stacklevel=2,
        )


def warn_of_unread(names: Iterable[str], model: nn.Module) -> None:
    """Warn of a leaf that nothing reads, and whose name is almost that of a parameter of forward."""
    for name in sorted(names):
        if meant := suggested(name, inspect.signature(_module_of(model).forward).parameters):
            warnings.warn(
                f"Nothing reads {name!r} of the example: the forward has no such parameter, nor does loss_fn "
                f"look at it.{meant}",
                stacklevel=2,
            )


def mismatch(
    function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> str | None:
    """The reason why a function does not take these arguments; None if it does, or if that is unknown."""
    if not all(isinstance(name, str) for name in kwargs):
        return "its keys are not all texts"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of code that Python cannot look into
        return None
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return None


def described(args: Sequence[object], kwargs: Mapping[str, object] | None = None) -> str:
    """Arguments as text: ``(2, 8) float32, y=(2,) int64``."""
    texts = [*map(_value, args), *(f"{name}={_value(x)}" for name, x in (kwargs or {}).items())]
    return ", ".join(texts) or "nothing"


def _value(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Mapping):
        return f"{type(value).__name__}({described((), {str(k): x for k, x in value.items()})})"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({described(value)})"
    return f"{value!r:.40}" if value is None or isinstance(value, int | float | str) else type(value).__name__


def _check_loss(loss_fn: Callable[..., object]) -> None:
    if not callable(loss_fn):
        raise OptionError(f"loss_fn is {loss_fn!r:.60} and must be {_LOSS}.")
    if isinstance(loss_fn, type):
        raise OptionError(f"loss_fn is the class {loss_fn.__name__} and must be {_LOSS}.")
    function = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    problem = mismatch(function, ("output", "microbatch"), {})
    if problem is not None:
        raise OptionError(
            f"loss_fn{_parameters(function)} must be {_LOSS}; called with these two: {problem}."
        )


def _parameters(function: Callable[..., object]) -> str:
    """``(x, y=None)``, without annotations."""
    try:
        known = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return "(…)"
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in known]
    return str(inspect.Signature(plain))


def _module_of(model: nn.Module) -> nn.Module:
    """The module that takes the arguments: what ``torch.compile`` has wrapped, else the model."""
    wrapped = getattr(model, "_orig_mod", None)
    return wrapped if isinstance(wrapped, nn.Module) else model


def _calls_forward(model: nn.Module) -> bool:
    """Whether ``model(…)`` hands its arguments to ``forward`` as they are."""
    hooked = model._forward_pre_hooks or type(model).__call__ is not nn.Module.__call__
    return not hooked
