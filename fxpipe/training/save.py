"""Writes a pipeline to a directory: rank 0 does, for all ranks, as they may have no disk in common."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from fxpipe.plan import files
from fxpipe.plan.artifact import Artifact
from fxpipe.runtime.process import agreed, own_ranks
from fxpipe.training.model_state import ModelState


def save(
    artifact: Artifact,
    evaluation: Artifact | None,
    state: ModelState,
    step_number: int,
    path: Path,
    draw: Callable[[Path], object] | None,
) -> None:
    """See ``Pipeline.save``.

    evaluation: the programs of ``pipe.evaluate``, if there are any.  draw: writes the pictures; None without
        a graph.
    """
    process = state.process
    leads = process is None or process.rank == 0
    with agreed(process, "save"):
        state.follow_model()
        for rank in own_ranks(process, artifact.plan.ranks):
            state.check_values(rank)
    with files.new_directory(path, process) as draft:
        for rank, program in enumerate(artifact.programs):
            tensors = _tensors_of(artifact, state, rank)
            with agreed(process, "save"), files.writing(path):
                if leads:
                    files.write_tensors(tensors, program, draft, rank, step_number)
        with agreed(process, "save"), files.writing(path):
            if leads:
                files.write_programs(artifact, draft)
                if evaluation is not None:
                    files.write_evaluation(evaluation, draft)
                if draw is not None:
                    draw(draft)


def _tensors_of(artifact: Artifact, state: ModelState, rank: int) -> dict[str, torch.Tensor]:
    """On rank 0, all tensors of a rank, which sends those that it trains."""
    held, process = artifact.plan.tensors[rank], state.process
    constants = {name: artifact.constants[name] for name in held.constants}
    if process is None or process.rank == rank == 0:
        return constants | {name: state.held(name) for name in held.state}
    sent = {}
    for name in held.state:
        if process.rank in (rank, 0):
            own = state.held(name) if process.rank == rank else state.empty(name, state.device)
            process.send_to(own, rank, 0)
            sent[name] = own.cpu()
    return constants | sent
