"""Makes the optimizer of a rank's parameters and their masters; all ranks must make the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from fxpipe.errors import one_of
from fxpipe.plan.artifact import Validation, holders
from fxpipe.plan.rows import ShardName
from fxpipe.plan.tensors import gradient_dtype
from fxpipe.runtime.job.process import agreed
from fxpipe.runtime.replays.recorder import recorder_of
from fxpipe.training.model.model_state import ModelState
from fxpipe.training.optimizer.batch_digest import SAME_OPTIONS
from fxpipe.training.optimizer.clipping import Clipping
from fxpipe.training.optimizer.groups import groups_of, optimizer_of
from fxpipe.training.optimizer.optimizer import PipelineOptimizer
from fxpipe.training.optimizer.optimizer_trial import Table, check_groups
from fxpipe.training.optimizer.script_changes import ScriptChanges


def make_optimizer(
    state: ModelState,
    rank: int,
    cls: Callable[..., Optimizer],
    options: Mapping[str, object],
    groups: Sequence[Mapping[str, object]],
    master_weights: bool,
    validation: Validation,
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
        return lanes.firsts(name.tensor, processes)[process.lane] == process.world_rank

    with agreed(process, "make its optimizer"):
        state.follow_model()
        owned_names = state.owned_by(rank).gradients
        parameters: dict[str, Parameter] = {name: state.parameter(name) for name in owned_names}
        trained = holders(tensors.gradients for tensors in state.owned)
        all_groups = groups_of(cls, options, groups, {name.tensor for name in trained})
        one_of("validation", validation, get_args(Validation))
        flags = {"master_weights": master_weights, "changes_gradients": changes_gradients}
        for name, flag in flags.items():
            one_of(name, flag, (True, False))
        kinds = {
            name: Table(state.plan.whole_layout(name.tensor).shape, frozenset(state.spans_of(name)))
            for name in trained
        }
        check_groups(
            all_groups,
            [{kind for name, kind in kinds.items() if name.tensor in group.names} for group in all_groups],
            state.device,
            ranks=len(state.owned),
            lacks=any(
                group.names.isdisjoint(name.tensor for name in tensors.gradients)
                for tensors in state.owned
                for group in all_groups
            ),
            undone=validation == "post",
        )
        updated = with_masters(parameters) if master_weights else parameters
        wrapped = optimizer_of(all_groups, updated)
        is_post = validation == "post" and process is not None  # with updates that may be taken back
        is_replayed = not is_post and recorder_of(state.device) is not None
        optimizer = PipelineOptimizer(
            wrapped,
            {parameter: name for name, parameter in updated.items()},
            [parameters[name] for name in owned_names if is_counted(name, trained[name])],
            process,
            Clipping(**clipping),
            masters={updated[name]: p for name, p in parameters.items() if updated[name] is not p},
            validation=validation,
            updates=state.updates,
            changed=state.updated,
            script_changes=script_changes,
            replay=(state.plan.replay, state.device) if is_replayed else None,
        )
    if script_changes is not None:
        script_changes.allowed = changes_gradients
    if process is not None:
        arguments = {"groups": repr([group.get("params") for group in groups])}
        arguments |= {name: str(flag) for name, flag in flags.items()}
        process.check_alike(arguments | optimizer.options(), "its optimizer", SAME_OPTIONS)
    return optimizer


def with_masters(parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """The tensors to update: a float32 copy of each parameter with fewer bits, and the others themselves."""
    targets = {}
    for name, parameter in parameters.items():
        dtype = gradient_dtype(parameter.dtype, torch.float32)
        wide = dtype == parameter.dtype
        targets[name] = parameter if wide else Parameter(parameter.detach().to(dtype))
    return targets
