"""What a script is, and what it notes while it runs."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

#: Settings of scripts for which replicas make sense.
EVERYWHERE = ("2", "4", "2x2")
#: Patterns of errors that several scripts expect: about a part of the model that is taken for the whole, a
#: second pipeline of tensors that train, and gradients that a rank changes by what it alone has.
WHOLE_MODEL = r"full_state_dict|synchronize|average"
TWO_PIPELINES = r"like=|synchronize|another pipeline"
BY_RANK = r"clip_grad_norm=|gradient"
MICROBATCHES, ROWS = 4, 2
#: Rows of a batch of all replicas.
BATCH = MICROBATCHES * ROWS
#: By name: processes and the ranks of a pipeline; "1" is plain torch.
SETTINGS = {"1": (1, 1), "2": (2, 2), "4": (4, 4), "2x2": (4, 2)}


class Run:
    """One run of a script in this process.

    ranks and options are for ``fxpipe.compile``.  directory: of the run, which all its processes share.
    """

    def __init__(self, setting: str, directory: Path) -> None:
        processes, self.ranks = SETTINGS[setting]
        self.replicas = processes // self.ranks
        self.rank = int(os.environ.get("RANK", 0))
        self.directory = directory
        self.values: dict[str, list[torch.Tensor]] = defaultdict(list)

    @property
    def options(self) -> dict[str, Any]:
        return {"ranks": self.ranks, "microbatches": MICROBATCHES // self.replicas, "schedule": "1f1b"}

    def note(self, name: str, *values: Any) -> None:
        """Keep values to compare: all that a process notes under a name must be what plain torch noted."""
        self.values[name] += [torch.as_tensor(value).detach().clone() for value in values]

    def weights(self, state: Mapping[str, torch.Tensor], name: str = "weights") -> None:
        """Keep the tensors of a state dict, which only rank 0 has where it is gathered."""
        for key, tensor in state.items():
            self.note(f"{name} {key}", tensor)

    def rows(self, batch: Any) -> Any:
        """The rows of a batch that this replica takes."""
        if self.replicas == 1:
            return batch
        each = BATCH // self.replicas
        replica = self.rank // self.ranks
        return _part(batch, replica * each, (replica + 1) * each)


def few(batch: Any) -> Any:
    """One microbatch, as an example to compile with."""
    return _part(batch, 0, ROWS)


def _part(batch: Any, start: int, end: int) -> Any:
    """Rows of a batch; tensors without dimensions stay whole."""
    return pytree.tree_map_only(torch.Tensor, lambda leaf: leaf[start:end] if leaf.ndim else leaf, batch)


def microbatches(batch: Any) -> list[Any]:
    """The microbatches of a batch, for losses that are not those of single rows."""
    return [_part(batch, i, i + ROWS) for i in range(0, BATCH, ROWS)]


@dataclass(frozen=True)
class Script:
    """A script on fxpipe, and the plain one beside it.

    equal: whether the numbers of the plain script may come.  error: a pattern of the errors that may come.
    warning: a pattern of the warnings with which other numbers may come.  differs: why other numbers are
    right, where the pages say so.  tolerance: relative, of each noted tensor.  alone: what it leaves behind
    would end or change scripts that follow in the same processes.
    """

    name: str
    kind: str
    run: Callable[[Run], None]
    plain: str
    settings: tuple[str, ...]
    equal: bool
    error: str
    warning: str
    differs: str
    tolerance: float
    alone: bool


Function = Callable[[Run], None]
PLAIN: dict[str, Function] = {}
SCRIPTS: dict[str, Script] = {}


def plain(function: Function) -> Function:
    """Register the script as its author wrote it."""
    name = function.__name__.replace("_", " ")
    assert name not in PLAIN, name
    PLAIN[name] = function
    return function


def piped(
    reference: Function,
    *settings: str,
    variant: str = "",
    kind: str = "",
    equal: bool | None = None,
    error: str = "",
    warning: str = "",
    differs: str = "",
    tolerance: float = 1e-8,
    alone: bool = False,
) -> Callable[[Function], Function]:
    """Register the script as fxpipe's pages ask for it, or with a habit that its author did not change."""
    title = reference.__name__.replace("_", " ")
    name = f"{title}: {variant}" if variant else title
    assert name not in SCRIPTS, name
    right = equal if equal is not None else not (error or warning or differs)
    kind = (kind or reference.__module__).rpartition(".")[2]

    def register(function: Function) -> Function:
        SCRIPTS[name] = Script(
            name, kind, function, title, settings or ("2",), right, error, warning, differs, tolerance, alone
        )
        return function

    return register
