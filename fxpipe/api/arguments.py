"""All options of ``fxpipe.compile``, and what gives them to its signature and its docstring."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from textwrap import TextWrapper
from typing import Concatenate, Literal, ParamSpec, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fxpipe.api.option_docs import DOCS
from fxpipe.api.pipeline import Pipeline
from fxpipe.compiler.options import Options

P = ParamSpec("P")
T = TypeVar("T")
Example = TypeVar("Example")
Parallelize = Callable[[nn.Module, DeviceMesh], object]


@dataclass(frozen=True, kw_only=True)
class Arguments(Options):
    """The options of the compiler, with those that say for which processes and with which loss to compile."""

    ranks: int | DeviceMesh | None = None
    """The number of ranks of a pipeline, a process each. Or a DeviceMesh of (replicas, ranks), or of the
    ranks of a replica; with DTensors their lanes may be its last dimension. By default the fastest mesh
    within ``memory_limit`` for ``devices`` and a ``batch`` (docs/mesh.md)."""
    replicas: int | None = None
    """The number of pipelines that train together, each on its own rows (docs/mesh.md). By default as many as
    torchrun started processes for. ``run_local`` runs so many, 1 by default."""
    shard: Literal["optimizer", "gradients", "parameters", "auto"] | None = None
    """What the replicas divide between them: ``"optimizer"``, its state (ZeRO 1), ``"gradients"``, these too
    (ZeRO 2), or ``"parameters"``, these too (ZeRO 3); ``"auto"``, the fastest of these within
    ``memory_limit``. By default each replica has all of it."""
    microbatches: int | None = None
    """The number of microbatches of each replica; or give ``batch``."""
    devices: int | None = None
    """The number of devices: ranks times replicas, where the compiler chooses these (docs/mesh.md)."""
    parallelize: Parallelize | Mapping[str, Parallelize] | None = None
    """A function of (model, mesh) that distributes the model over the lanes of a rank, in place, as
    ``fxpipe.integrations.transformers.parallelize`` does: the compiler chooses their number with that of
    ranks and replicas, for a ``batch`` (docs/mesh.md). Or several by names, of which it chooses one."""
    lanes: Sequence[int] = (1, 2, 4, 8)
    """With ``parallelize``, the numbers of lanes that are compared, of those that divide a machine's
    devices."""
    batch: int | None = None
    """The rows of a step over all replicas, instead of ``microbatches``."""
    loss_fn: Callable[..., object] | None = None
    """``(output, microbatch) -> loss``, a scalar, or ``-> (sum, count)`` for an exact mean over all
    counts of the batch; either with a mapping of metrics behind it, ``-> (loss, {"accuracy": …})``.
    Without it the loss is found in the model's output (docs/training.md)."""
    like: Pipeline | None = None
    """Another pipeline, of this model or of one with modules of it, which trains together with this one.
    Each tensor that both use lies on the ranks that have it there; parameters, ``.grad`` and the step
    number are those of both. By default so are ``ranks``, ``replicas``, ``shard``, ``grad_dtype`` and
    ``vocab_parallel``. Raises PartitionError where the model cannot be cut so (docs/training.md)."""
    timeout: float | timedelta | None = None
    """The longest time that a rank waits for another one under torchrun, in seconds or as a timedelta; 10
    minutes by default, without the time that rank 0 takes to compile. A process group that exists keeps
    its own (docs/training.md)."""


def takes(
    arguments: Callable[P, Arguments],
) -> Callable[
    [Callable[Concatenate[nn.Module, Example, ...], T]], Callable[Concatenate[nn.Module, Example, P], T]
]:
    """Give a function of (model, example, **options) the options that ``arguments`` has: for type checkers by
    these types, for ``help`` and editors at run time by its signature and its docstring."""

    def documented(function: Callable[..., T]) -> Callable[..., T]:
        whole = inspect.signature(function)
        options = [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
            for f in sorted(fields(Arguments), key=lambda f: f.name in Options.__dataclass_fields__)
        ]
        positional = [p for p in whole.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        function.__signature__ = whole.replace(parameters=[*positional, *options])  # type: ignore[attr-defined]
        wrapper = TextWrapper(106, break_on_hyphens=False, subsequent_indent=4 * " ")
        texts = [wrapper.fill(f"{name}: {text}") for name, text in DOCS.items()]
        if function.__doc__ is not None:
            text = inspect.cleandoc(function.__doc__)  # as Python 3.13 does already
            before, _, after = re.split(r"^options: (.*)\n", text, flags=re.MULTILINE)
            function.__doc__ = "\n".join([before.rstrip(), *texts, after])
        return function

    return documented
