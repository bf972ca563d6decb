"""What a program takes from its model once, when it is compiled: which parameters are trained, hooks, and the
model's Python.

A parameter that is frozen later would still be trained, a hook that is registered later would never run, a
method that is replaced later would not be called, and a rate of dropout would stay as it was.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Container, Mapping

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from fxpipe.errors import RunError
from fxpipe.runtime.batch.microbatches import batch_leaves
from fxpipe.runtime.functions import function_name
from fxpipe.runtime.torch_private import (
    gradient_hooks,
    hooks_of,
    hooks_of_all_modules,
    hooks_of_saved_tensors,
    hooks_registered,
    pytree,
)
from fxpipe.training.guards.python_guards import PythonGuards

Hooks = dict[str, tuple[int, ...]]
"""Where hooks are, as text -> their numbers."""
PARAMETER = "the parameter"
_REMEDIES = {"training": "call model.train() or model.eval() before each step"}


class Traced:
    """Which parameters a model trains, and its hooks, at the time of its compilation."""

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        model: nn.Module | None,
        of_forward: Collection[str] = (),
        python: PythonGuards | None = None,
    ):
        """parameters: of the pipeline; under torchrun some of the model's.
        python: of the model and its loss function.
        of_forward: the functions of hooks that the forward registers by itself when it runs first, as
            libraries do that capture outputs: the trace has run them, and a later forward registers them
            again.
        """
        self._of_forward = frozenset(of_forward)
        named = ({} if model is None else dict(model.named_parameters())) | dict(parameters)
        self._tied = [names for names in _names_of_each(model) if len(names) > 1]
        self._trained = {name: p.requires_grad for name, p in named.items()}
        self._registered = hooks_registered()
        self._forward, self._backward = _hooks(named, model, self._of_forward)
        self._has_model = model is not None
        self._in_training = model is not None and model.training
        self._python = python
        self._told: set[str] = set()
        self._autocast = _autocast()
        self._written = WeakIdKeyDictionary()  # leaves that a step had -> how often they had been written to

    def check(
        self,
        parameters: Mapping[str, torch.Tensor],
        model: nn.Module | None,
        used: Container[str],
        *,
        trains: bool,
    ) -> None:
        """Raise RunError, naming the parameter, where they differ now; warn of hooks and settings of modules.

        parameters: the pipeline's and the model's.  used: the names of those that programs use.  trains:
        whether these have a backward; else only hooks of the forward count.
        """
        for name, parameter in parameters.items() if trains else ():
            before = self._trained.get(name, parameter.requires_grad)
            if parameter.requires_grad != before and name in used:
                does = "trains it" if before else "does not train it"
                raise RunError(
                    f"requires_grad of the parameter {name} is now {not before}, and the program, compiled "
                    f"when it was {before}, {does}. Compile the model again."
                )
        if model is not None:
            self._check_tied(model)
        if self._python is not None:
            self._check_python(self._python, model, trains)
        registered = hooks_registered()
        known = registered == self._registered and not self._forward and not self._backward
        if known or self._has_model != (model is not None):
            return
        hooks = _hooks(parameters, model, self._of_forward)
        for old, new in [*zip((self._forward, self._backward), hooks, strict=True)][: 1 + trains]:
            for where in new | old:
                if old.get(where) != new.get(where):
                    text = (
                        f"The hooks of {where} have changed since the model was compiled: those of now do "
                        "not run. Compile the model again, or undo the change."
                    )
                    if where.startswith(PARAMETER):
                        raise RunError(text)
                    warnings.warn(text, stacklevel=2)  # an eager forward may have registered them
        self._forward = hooks[0]
        if trains:  # else those of the backward are still to be checked
            self._registered, self._backward = registered, hooks[1]

    def warn_before_step(self, model: nn.Module | None, batch: object, written: Collection[str]) -> None:
        """Warn, once, of a step that trains where a script asks for no gradients, or has set the model to
        eval mode since it was compiled: its gradients would come to those of the next update.  Also of
        autocast, of hooks for what a backward saves, of a batch that is to get gradients, and of one that the
        forward would have changed.

        written: the leaves that the forward writes to.
        """
        has_gradients = torch.is_grad_enabled()
        if not has_gradients or (self._in_training and model is not None and not model.training):
            where = "of a model in eval mode" if has_gradients else "under torch.no_grad()"
            remedy = "before it call model.train()" if has_gradients else "leave no_grad out"
            self._warn_once(
                f"pipe.step {where} trains as ever: its backward adds to the gradients of the next update. "
                "For a validation compile with evaluation=True and call pipe.evaluate; if the step is to "
                f"train, {remedy}."
            )
        if any(isinstance(x, torch.Tensor) and x.requires_grad for x in pytree.tree_leaves(batch)):
            self._warn_once(
                "A tensor of the batch requires a gradient, and pipe.step computes none for it: its .grad "
                "stays as it is. Let the forward compute it, with torch.autograd.grad, or detach the tensor."
            )

        if cast := _autocast() - self._autocast:
            dtype = next(iter(cast))[1]
            self._warn_once(
                f"pipe.step under torch.autocast runs as it was compiled, without casts to {dtype}: call "
                "fxpipe.compile under autocast, too, or enter it in the forward and leave it out here."
            )
        if hooks_of_saved_tensors():
            self._warn_once(
                "pipe.step under hooks for saved tensors, as those of save_on_cpu, keeps activations as it "
                "was compiled to: offload= and recompute= of fxpipe.compile say where and which."
            )
        if _accumulates():
            self._warn_once(
                "pipe.step within Accelerator.accumulate adds its gradients to those of the steps before, "
                "undivided: the backward that divides them by gradient_accumulation_steps does not run. Give "
                "one step all of these rows, with more microbatches= in fxpipe.compile."
            )
        for name, leaf in batch_leaves(batch) if written else ():
            if name in written and isinstance(leaf, torch.Tensor) and not leaf.is_inference():
                if self._written.get(leaf) == leaf._version:
                    self._warn_once(
                        f"The forward writes to {name!r} of the batch, which stays as it was: a step writes "
                        "to its own copy. The same tensor comes again, without what plain torch would have "
                        "written: write to it in the loop, or to a copy in the forward (.clone())."
                    )
                self._written[leaf] = leaf._version

    def _warn_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            warnings.warn(text, stacklevel=5)

    def _check_tied(self, model: nn.Module) -> None:
        """Raise RunError where one parameter under several names is another one under some of them now."""
        for first, *others in self._tied:
            for name in others:
                if _parameter(model, name) is not _parameter(model, first):
                    raise RunError(
                        f"The parameter {name} was {first} too when the model was compiled, "
                        "and is another one now, which the program does not read. Compile the model again, "
                        "or undo the change."
                    )

    def _check_python(self, guards: PythonGuards, model: nn.Module | None, trains: bool) -> None:
        """Raise RunError where other code would run than when the model was compiled; warn, once for each, of
        other values."""
        for change in guards.changes(model, trains=trains):
            if change.is_of_code:
                raise RunError(f"{change} Compile the model again, or undo the change.")
            if change.name not in self._told:
                self._told.add(change.name)
                remedy = _REMEDIES.get(change.name, "make it a buffer of the model, which each step reads")
                warnings.warn(f"{change} Compile the model again, or {remedy}.", stacklevel=2)


def _autocast() -> set[tuple[str, torch.dtype]]:
    """The types of devices on which torch casts, with the dtypes."""
    on = (kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind))
    return {(kind, torch.get_autocast_dtype(kind)) for kind in on}


def _accumulates() -> bool:
    """Whether accelerate is to add the gradients of this step to others, before an update."""
    accelerate = sys.modules.get("accelerate.state")
    return accelerate is not None and not accelerate.GradientState().sync_gradients


def _parameter(model: nn.Module, name: str) -> object:
    """The parameter of this name; None if the model has none."""
    path, _, key = name.rpartition(".")
    try:
        return getattr(model.get_submodule(path), key, None)
    except AttributeError:
        return None


def _names_of_each(model: nn.Module | None) -> list[list[str]]:
    """The names of each parameter."""
    names: dict[int, list[str]] = {}
    for name, x in () if model is None else model.named_parameters(remove_duplicate=False):
        names.setdefault(id(x), []).append(name)
    return [*names.values()]


def _hooks(
    parameters: Mapping[str, torch.Tensor], model: nn.Module | None, of_forward: Container[str]
) -> tuple[Hooks, Hooks]:
    """Find the hooks of the forward, and those of gradients; but those that the forward registers."""
    passes: tuple[Hooks, Hooks] = {}, {}
    for what, hooks in () if model is None else hooks_of_all_modules().items():
        if hooks:
            passes[what.startswith("backward")][f"all modules ({what})"] = tuple(hooks)
    for name, module in () if model is None else model.named_modules():
        where = f"the module {name}" if name else "the model"
        for what, hooks in hooks_of(module).items():
            of_pass = passes[what.startswith("backward")]
            numbers = tuple(k for k, function in hooks.items() if function_name(function) not in of_forward)
            if numbers:
                of_pass[where] = of_pass.get(where, ()) + numbers
    for name, parameter in parameters.items():
        if numbers := (*gradient_hooks(parameter),):
            passes[1][f"{PARAMETER} {name}"] = numbers
    return passes
