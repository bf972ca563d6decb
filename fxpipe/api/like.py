"""Another pipeline of a model, whose tensors lie where the first one has them: ``compile(…, like=pipe)``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from fxpipe.api.pipeline import Pipeline
from fxpipe.compiler.options import Settings
from fxpipe.errors import OptionError
from fxpipe.plan.tensors import dtype_of
from fxpipe.training.model.partial_model import names_by_rank


def check_like(like: object) -> None:
    """Raise OptionError unless this is a pipeline that was compiled in this process."""
    if not isinstance(like, Pipeline) or like.is_evaluation or like.directory is not None:
        raise OptionError(
            f"like is {like!r:.60} and must be a pipeline that fxpipe.compile has made in this process."
        )


def settings_like(options: Settings, like: Pipeline, model: nn.Module) -> Settings:
    """The settings with those of the other pipeline on which its tensors and gradients depend.

    Raises OptionError for other ones, and for a model that has no tensor of the other one's.
    """
    plan = like.artifact.plan
    barriers = 0 if plan.vocabulary is None else plan.vocabulary.barriers
    grad_dtype = dtype_of(plan.grad_dtype) if plan.grad_dtype else None
    mesh = replace(options.mesh, ranks=plan.ranks, replicas=like.replicas, shard=plan.shard)
    for name, asked, other in (
        ("ranks", options.mesh.ranks, mesh.ranks),
        ("replicas", options.mesh.replicas, mesh.replicas),
        ("shard", options.mesh.shard or None, mesh.shard or None),
        ("grad_dtype", options.grad_dtype, grad_dtype),
    ):
        if asked is not None and asked != other:
            raise OptionError(
                f"{name} is {asked!r}, and {other!r} in the pipeline that this one is to be like."
            )
    on_ranks, has_on_ranks = names_by_rank(model, like.model_state)
    if not on_ranks:
        raise OptionError(
            f"The {type(model).__name__} has no tensor of the pipeline that this one is to be like."
        )
    theirs: dict[str, Any] = {"mesh": mesh, "grad_dtype": grad_dtype}
    if plan.undivided and not options.undivided:
        own = {name for names in has_on_ranks for name in names}
        theirs["undivided"] = tuple(name for name in plan.undivided if name in own)
    if barriers and not options.vocab_parallel:
        theirs["vocab_parallel"] = f"{barriers}-barrier"
    return replace(options, **theirs, on_ranks=on_ranks, has_on_ranks=has_on_ranks)
