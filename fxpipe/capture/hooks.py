"""Warns of hooks that programs do not call.

A hook runs in the trace, where its ops become part of the step: one that changes a value does so in every
step.  Nothing else of a hook is in a program: what it stores, prints, counts or asserts happened once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from fxpipe.capture.functional import is_mutating
from fxpipe.capture.state.registered import Registered
from fxpipe.capture.traced_nodes import last_node, nodes_after
from fxpipe.ir import compat
from fxpipe.ir.storage import leading_to
from fxpipe.runtime.functions import code_of, function_name, name_and_line
from fxpipe.runtime.torch_private import hooks_of, hooks_of_all_modules, state_hooks

_TORCH = str(Path(torch.__file__).parent)


class _Requests(TorchFunctionMode):
    """Notes whether a hook asks for gradients of a value, which may have some already."""

    gradients = False

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        self.gradients |= func is torch.Tensor.requires_grad_
        return func(*args, **(kwargs or {}))


@dataclass(eq=False)
class _Hook:
    """A hook, called in its place.  ``owner``: what it is registered on, as text.

    ``nodes``: of its ops.  ``returned``: whether it gave another value for what it was called with, or asked
    for gradients of that, as transformers' does for activation checkpointing.
    """

    kind: str
    owner: str
    function: Callable[..., object]
    times: int = 0
    returned: bool = False
    nodes: list[fx.Node] = field(default_factory=list)

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.times += 1
        last = last_node() if compat.is_tracing() else None
        with _Requests() as requests:
            result = self.function(*args, **kwargs)
        if last is not None:
            self.nodes += nodes_after(last)
        self.returned |= result is not None or requests.gradients
        return result

    def __deepcopy__(self, memo: object) -> _Hook:
        return self  # of a module that the forward copies

    def __str__(self) -> str:
        return f"The {self.kind} {name_and_line(self.function)} of {self.owner}"


class Hooks:
    """While entered, notes what the hooks of a model's modules do, and those that ``noted`` is given."""

    def __init__(self, model: nn.Module, gradients: bool):
        """gradients: whether there is a backward, in which hooks could run."""
        self._model, self._gradients = model, gradients
        self._hooks: list[_Hook] = []
        self._places: list[tuple[MutableMapping[int, object], int, _Hook]] = []

    def noted(self, kind: str, owner: str, function: Callable[..., object]) -> _Hook:
        """The hook to register instead of a function."""
        hook = _Hook(kind, owner, function)
        self._hooks.append(hook)
        return hook

    def follow_gradients(self, registered: Sequence[Registered], wanted: Mapping[str, torch.Tensor]) -> bool:
        """Give the fake parameters the gradients' hooks of the real ones; whether there are any."""
        hooks = [(r.name, hook) for r in registered for hook in compat.gradient_hooks(r.tensor)]
        for name, hook in hooks:
            if self._gradients and name in wanted:
                wanted[name].register_hook(self.noted("hook", f"the gradient of {name}", hook))
        return bool(hooks)

    def __enter__(self) -> Hooks:
        for owner, kind, hooks in self._all():
            for number, function in [*hooks.items()]:
                if self._gradients or not kind.startswith("backward"):
                    hooks[number] = self.noted(kind, owner, function)
                    self._places.append((hooks, number, hooks[number]))
        return self

    def __exit__(self, *exc: object) -> None:
        for hooks, number, hook in self._places:
            if hooks.get(number) is hook:
                hooks[number] = hook.function
        self._places = []

    def _all(self) -> Iterator[tuple[str, str, MutableMapping[int, Any]]]:
        for kind, hooks in hooks_of_all_modules().items():
            yield "all modules", kind, hooks
        for path, module in self._model.named_modules():
            for kind, hooks in hooks_of(module).items():
                yield f"the module {path}" if path else "the model", kind, hooks

    def warn(self, graph: fx.Graph) -> None:
        """Warn of the hooks that leave nothing in the traced graph."""
        live = leading_to([graph.output_node(), *filter(is_mutating, graph.nodes)])
        for hook in self._hooks:
            if hook.times and not hook.returned and live.isdisjoint(hook.nodes):
                _warn(
                    f"{hook} ran in the trace alone: it changes no value, so no step calls it. If it keeps "
                    "values for the forward or the loss, as for distillation, these are in the step; what "
                    "the script reads of them, or it prints, is of the trace. Ask for a module's result by "
                    "its path in outputs=[…], do the work outside of the step, or remove the hook."
                )
            elif not hook.times and not _is_torchs(hook.function):
                _warn(f"{hook} never ran in the trace, so no step calls it. Remove it.")
        for path, module in self._model.named_modules():
            for kind, function in state_hooks(module):
                if not _is_torchs(function):
                    owner = f"the module {path}" if path else "the model"
                    _warn(
                        f"The {kind} {name_and_line(function)} of {owner} is not called: pipe.state_dict and "
                        "pipe.load_state_dict take tensors by their names. Call it on what they give or get."
                    )


def hook_functions(model: nn.Module) -> set[str]:
    """The names of the functions of all hooks of a model's modules."""
    kinds = (hooks for module in model.modules() for hooks in hooks_of(module).values())
    return {function_name(hook) for hooks in kinds for hook in hooks.values()}


def _is_torchs(function: Any) -> bool:
    code = code_of(function)
    return code is None or code.co_filename.startswith(_TORCH)


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=2)
