"""Makes the optimizer of a rank's parameters: its groups, its masters, and a check that it can be divided
between ranks."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, get_args

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from fxpipe.errors import OptionError, RunError, suggested
from fxpipe.plan.artifact import Validation, holders
from fxpipe.plan.rows import ShardName
from fxpipe.plan.tensors import gradient_dtype
from fxpipe.runtime.job.process import agreed
from fxpipe.training.clipping import Clipping
from fxpipe.training.model_state import ModelState
from fxpipe.training.optimizer import PipelineOptimizer
from fxpipe.training.same_batch import SAME_OPTIONS
from fxpipe.training.script_changes import ScriptChanges
from fxpipe.training.undo import check_undoable
from fxpipe.training.updates import Updates

#: The options that ``Pipeline.optimizer`` takes by itself.
_OWN = (
    "groups", "clip_grad_norm", "norm_type", "skip_nonfinite", "master_weights", "validation",
    "changes_gradients",
)  # fmt: skip


def make_optimizer(
    state: ModelState,
    rank: int,
    cls: Callable[..., Optimizer],
    options: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    master_weights: bool,
    validation: Validation,
    updates: Updates,
    script_changes: ScriptChanges | None,
    changes_gradients: bool,
    **clipping: Any,
) -> PipelineOptimizer:
    """The optimizer of a rank, after a check that all ranks make the same; see ``Pipeline.optimizer``.

    clipping: the fields of ``Clipping``.
    """
    process, lanes = state.process, state.plan.lanes

    def is_counted(name: ShardName, processes: Sequence[int]) -> bool:
        """Whether this process counts a gradient in the norm; processes: that have it, or ranks."""
        if process is None:
            return processes[0] == rank
        first = processes[process.lane] if name.tensor in lanes.shards else processes[0]
        return first == process.world_rank

    with agreed(process, "make its optimizer"):
        _check_groups(groups)
        state.follow_model()
        own = state.owned_by(rank).gradients
        held: dict[str, Parameter] = {name: state.parameter(name) for name in own}
        trained = holders(tensors.gradients for tensors in state.owned)
        if len(state.owned) > 1:
            check_separable(
                cls, options, state.device, {dim for name in trained for dim in state.spans_of(name)}
            )
        if validation not in get_args(Validation):
            raise OptionError(f'validation is {validation!r} and must be "barrier" or "post".')
        flags = {"master_weights": master_weights, "changes_gradients": changes_gradients}
        for name, flag in flags.items():
            if not isinstance(flag, bool):
                raise OptionError(f"{name} is {flag!r} and must be True or False.")
        if validation == "post":
            name = getattr(cls, "__name__", str(cls))
            check_undoable(lambda tables: made(cls, tables, options), name, state.device)
        updated = with_masters(held) if master_weights else held
        own_optimizer = made(cls, grouped(updated, groups, {name.tensor for name in trained}), options)
        _check_step(own_optimizer)
        optimizer = PipelineOptimizer(
            own_optimizer,
            {parameter: name for name, parameter in updated.items()},
            [held[name] for name in own if is_counted(name, trained[name])],
            process,
            Clipping(**clipping),
            masters={updated[name]: own for name, own in held.items() if updated[name] is not own},
            validation=validation,
            updates=updates,
            changed=state.updated,
            script_changes=script_changes,
        )
    if script_changes is not None:
        script_changes.allowed = changes_gradients
    if process is not None:
        given = {"groups": repr([group.get("params") for group in groups])}
        given |= {name: str(flag) for name, flag in flags.items()}
        process.check_alike(given | optimizer.options(), "its optimizer", SAME_OPTIONS)
    return optimizer


def with_masters(held: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """By name what to update: a float32 copy of each parameter with fewer bits, and the others themselves."""
    found = {}
    for name, parameter in held.items():
        dtype = gradient_dtype(parameter.dtype, torch.float32)
        wide = dtype == parameter.dtype
        found[name] = parameter if wide else Parameter(parameter.detach().to(dtype))
    return found


def made(cls: Callable[..., Optimizer], parameters: Any, options: Mapping[str, Any]) -> Optimizer:
    """``cls(parameters, **options)``.  Raises OptionError where that is no optimizer."""
    if isinstance(cls, Optimizer):
        kind = type(cls).__name__
        raise OptionError(f"pipe.optimizer makes the optimizer: give the class {kind} and its options.")
    makes_none = not callable(cls) or (isinstance(cls, type) and not issubclass(cls, Optimizer))
    if not makes_none:
        _check_options(cls, options, parameters)
    try:
        optimizer = None if makes_none else cls(parameters, **options)
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{name}={value!r:.40}" for name, value in options.items())
        raise OptionError(f"{_name(cls)} cannot be made with {given or 'no options'}: {error}.") from error
    if not isinstance(optimizer, Optimizer):
        raise OptionError(
            f"pipe.optimizer takes a class of torch optimizers, such as torch.optim.AdamW; {cls!r:.60} makes "
            "none."
        )
    return optimizer


def _check_options(cls: Callable[..., Optimizer], options: Mapping[str, Any], groups: Any) -> None:
    """Raise OptionError for an option that the class does not have, with those that it has.

    A group may have options of the user's own: only one that is spelled like another is refused there.
    """
    try:
        known = inspect.signature(cls).parameters
    except (TypeError, ValueError):  # of code that Python cannot look into
        return
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values()):
        return
    names = [name for name in known if name != "params"]
    mappings = [group for group in groups if isinstance(group, Mapping)]
    own = {name for group in mappings for name in group.keys() - {"params"} - known.keys()}
    in_groups = {name for name in own if suggested(name, names)}
    for name in (options.keys() - known.keys()) | in_groups:
        meant = suggested(name, (*names, *_OWN))
        raise OptionError(f"{_name(cls)} has no option {name!r}.{meant} It has {', '.join(names)}.")


def _check_step(optimizer: Optimizer) -> None:
    """Raise RunError for an optimizer that evaluates the loss again and again within its step."""
    parameters = inspect.signature(optimizer.step).parameters.values()
    given = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if any(p.default is p.empty and p.kind not in given for p in parameters):
        name = type(optimizer).__name__
        raise RunError(
            f"{name} needs a closure, which it calls several times, and pipe.optimizer updates once behind a "
            f"step. Take one that needs none, such as AdamW. With one rank, {name}(model.parameters(), …) of "
            "your own works too: zero its gradients and return pipe.step(batch) in the closure."
        )


def _check_groups(groups: Any) -> None:
    if not isinstance(groups, list | tuple) or not all(isinstance(group, Mapping) for group in groups):
        raise OptionError('groups is a list of mappings: [{"params": ["*.bias"], "weight_decay": 0.0}].')


def _name(cls: Callable[..., Optimizer]) -> str:
    return getattr(cls, "__name__", str(cls))


def grouped(
    held: Mapping[str, Parameter], groups: Sequence[Mapping[str, Any]], model_names: Collection[str]
) -> list[dict[str, Any]]:
    """Param groups of a rank's parameters; every rank has the same groups, some of them empty.

    held: by name, or the name of rows.  groups: each with ``params``, a pattern as in a shell (``*.bias``) or
    several; a parameter belongs to the first group that has its name, and to the last, without options, if
    none has.  model_names: those of all ranks.
    Warns of a pattern that no name of the model matches, and raises OptionError for a group of such patterns.
    """
    patterns = []
    for group in groups:
        given = group.get("params")
        several = [given] if isinstance(given, str) else [*given] if isinstance(given, Iterable) else []
        if not several or not all(isinstance(pattern, str) for pattern in several):
            raise OptionError(
                'A group is a mapping with "params", names or patterns like "*.bias", and options.'
            )
        unmatched = [p for p in several if not any(fnmatchcase(name, p) for name in model_names)]
        message = f"No parameter that is trained matches {' or '.join(map(repr, unmatched))}."
        if len(unmatched) == len(several):
            raise OptionError(f"{message} Take a name of the model.")
        if unmatched:  # as where one list is for models with and without biases
            warnings.warn(message, stacklevel=5)
        patterns.append(several)
    made: list[dict[str, Any]] = [{**group, "params": []} for group in groups] + [{"params": []}]
    for name, parameter in held.items():
        known = ShardName(name).tensor
        fits = (k for k, several in enumerate(patterns) if any(fnmatchcase(known, p) for p in several))
        made[next(fits, -1)]["params"].append(parameter)
    return made


def check_separable(
    cls: Callable[..., Optimizer], options: Mapping[str, Any], device: torch.device, dims: Collection[int]
) -> None:
    """Raise RunError for an optimizer whose update of a parameter depends on other parameters (L-BFGS), or,
    where ranks hold parts of one, on other parts (Adafactor, Muon): ranks would compute another update.

    Found by trial: both updates of a small table, in one optimizer and by halves in two.
    dims: along which ranks hold parts.
    """
    name = _name(cls)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(8, 8, generator=generator, device="cpu").to(device)
    grads = [torch.randn(8, 8, generator=generator, device="cpu").to(device) for _ in range(3)]
    options = {**options, "lr": 0.1} if "lr" in options else options  # 0 would hide every difference

    def updated(dim: int, parts: int, optimizers: int) -> torch.Tensor:
        """The table after an update of its parts along a dimension, divided between optimizers."""
        held = [Parameter(part.clone()) for part in start.chunk(parts, dim)]
        for k in range(optimizers):
            optimizer = made(cls, held[k::optimizers], options)
            for grad in grads:
                for parameter, own in zip(held, grad.chunk(parts, dim), strict=True):
                    parameter.grad = own.clone()
                optimizer.step(lambda: 0.0)
        return torch.cat([parameter.detach() for parameter in held], dim)

    if not torch.allclose(updated(0, 2, 1), updated(0, 2, 2), rtol=1e-4):
        raise RunError(
            f"{name} updates a parameter by the values of others, which other ranks hold. Take an optimizer "
            "that updates each parameter by itself, such as AdamW."
        )
    for dim in sorted({min(dim, 1) for dim in dims}):
        if not torch.allclose(updated(dim, 1, 1), updated(dim, 2, 2), rtol=1e-4):
            elements = "columns" if dim else "rows"
            raise RunError(
                f"{name} updates {elements} of a parameter by the values of other {elements}, which other "
                "ranks hold with vocab_parallel, shard or DTensors. Compile without them, or take an "
                "optimizer that updates each element by itself, such as AdamW."
            )
