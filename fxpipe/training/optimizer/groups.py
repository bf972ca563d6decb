"""The groups of an optimizer: parameters by name, their options, and the class that updates them."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch.nn import Parameter
from torch.optim import Optimizer

from fxpipe.errors import OptionError, suggested
from fxpipe.plan.rows import ShardName
from fxpipe.training.optimizer.several_optimizers import SeveralOptimizers

#: The options that ``Pipeline.optimizer`` takes by itself.
_OF_OPTIMIZER = (
    "groups", "clip_grad_norm", "norm_type", "skip_nonfinite", "master_weights", "validation",
    "changes_gradients",
)  # fmt: skip

MakesOptimizer = Callable[..., Optimizer]


@dataclass(frozen=True, eq=False)
class Group:
    """A group of parameters on all ranks.  ``cls``: makes the optimizer of the group.  ``defaults``: what it
    is made with.  ``options``: of the group alone.  ``names``: those of its parameters, on all ranks."""

    cls: MakesOptimizer
    defaults: Mapping[str, object]
    options: Mapping[str, object] = field(default_factory=dict)
    names: frozenset[str] = frozenset()

    def of(self, parameters: Sequence[Parameter]) -> dict[str, object]:
        """The group as torch takes it, with these parameters."""
        return {**self.options, "params": [*parameters]}


def groups_of(
    cls: MakesOptimizer, defaults: Mapping[str, object], mappings: object, model_names: Collection[str]
) -> list[Group]:
    """The same groups on every rank.

    cls, defaults: of groups that name no class of their own.  mappings: mappings with ``params``, a pattern
    as in a shell (``*.bias``) or several, with options, and perhaps with a ``class``.  A parameter belongs to
    the first group that has its name; those that none has make the last group.  model_names: of all ranks.
    Warns of a pattern that no name of the model matches, and raises OptionError for a group of such patterns.
    """
    if not isinstance(mappings, list | tuple) or not all(isinstance(group, Mapping) for group in mappings):
        raise OptionError('groups is a list of mappings: [{"params": ["*.bias"], "weight_decay": 0.0}].')
    groups, rest = [], {*model_names}
    for mapping in mappings:
        patterns = _patterns(mapping, model_names)
        names = frozenset(name for name in rest if any(fnmatchcase(name, p) for p in patterns))
        options = {name: value for name, value in mapping.items() if name not in ("params", "class")}
        own_class = "class" in mapping
        groups.append(
            Group(mapping["class"] if own_class else cls, {} if own_class else defaults, options, names)
        )
        rest -= names
    if rest or not groups:
        groups.append(Group(cls, defaults, names=frozenset(rest)))
    if defaults and not any(group.defaults is defaults for group in groups):
        raise OptionError(
            f"Every parameter belongs to a group with a class of its own, and {name_of(cls)} gets none. "
            f'Leave the "class" of one group out, to be made with {", ".join(defaults)}.'
        )
    return groups


def _patterns(group: Mapping[str, object], model_names: Collection[str]) -> list[str]:
    params = group.get("params")
    several = [params] if isinstance(params, str) else [*params] if isinstance(params, Iterable) else []
    if not several or not all(isinstance(pattern, str) for pattern in several):
        raise OptionError('A group is a mapping with "params", names or patterns like "*.bias", and options.')
    unmatched = [p for p in several if not any(fnmatchcase(name, p) for name in model_names)]
    message = f"No parameter that is trained matches {' or '.join(map(repr, unmatched))}."
    if len(unmatched) == len(several):
        raise OptionError(f"{message} Take a name of the model.")
    if unmatched:  # as where one list is for models with and without biases
        warnings.warn(message, stacklevel=6)
    return several


def optimizer_of(groups: Sequence[Group], parameters: Mapping[str, Parameter]) -> Optimizer:
    """The optimizer of a rank's parameters; on every rank it has all groups, some of them empty.

    parameters: by name, or the name of rows.
    """
    by_group = [
        [p for name, p in parameters.items() if ShardName(name).tensor in group.names] for group in groups
    ]
    return assembled(groups, by_group)


def assembled(groups: Sequence[Group], parameters: Sequence[Sequence[Parameter]]) -> Optimizer:
    """An optimizer of these groups.  parameters: of each."""
    as_torch = [group.of(of_group) for group, of_group in zip(groups, parameters, strict=True)]
    kinds = [(group.cls, id(group.defaults) if group.defaults else 0) for group in groups]
    optimizers = {
        kind: made(
            kind[0],
            [options for options, other in zip(as_torch, kinds, strict=True) if other == kind],
            groups[kinds.index(kind)].defaults,
        )
        for kind in dict.fromkeys(kinds)
    }
    if len(optimizers) == 1:
        return optimizers[kinds[0]]
    return SeveralOptimizers([optimizers[kind] for kind in kinds])


def made(
    cls: MakesOptimizer, groups: Sequence[Mapping[str, object]], defaults: Mapping[str, object]
) -> Optimizer:
    """``cls(groups, **defaults)``.  Raises OptionError where that is no optimizer."""
    if isinstance(cls, Optimizer):
        kind = type(cls).__name__
        raise OptionError(f"pipe.optimizer makes the optimizer: give the class {kind} and its options.")
    makes_none = not callable(cls) or (isinstance(cls, type) and not issubclass(cls, Optimizer))
    if not makes_none:
        _check_options(cls, defaults, groups)
    try:
        optimizer = None if makes_none else cls(groups, **defaults)
    except (TypeError, ValueError) as error:
        options = ", ".join(f"{name}={value!r:.40}" for name, value in defaults.items())
        text = f"{name_of(cls)} cannot be made with {options or 'no options'}: {error}."
        raise OptionError(text) from error
    if not isinstance(optimizer, Optimizer):
        raise OptionError(
            f"pipe.optimizer takes a class of torch optimizers, such as torch.optim.AdamW; {cls!r:.60} makes "
            "none."
        )
    return optimizer


def _check_options(
    cls: MakesOptimizer, defaults: Mapping[str, object], groups: Sequence[Mapping[str, object]]
) -> None:
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
    others = {name for group in groups for name in group.keys() - {"params"} - known.keys()}
    in_groups = {name for name in others if suggested(name, names)}
    for name in (defaults.keys() - known.keys()) | in_groups:
        meant = suggested(name, (*names, *_OF_OPTIMIZER))
        raise OptionError(
            f"{name_of(cls)} has no option {name!r}.{meant} It has {', '.join(names)}; and pipe.optimizer "
            f"itself {', '.join(_OF_OPTIMIZER)}."
        )


def name_of(cls: MakesOptimizer) -> str:
    return getattr(cls, "__name__", str(cls))
