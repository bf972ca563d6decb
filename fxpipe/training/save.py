"""Writes a pipeline to a directory: rank 0 does, for all ranks, as they may have no disk in common."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError

from fxpipe.errors import ArtifactError, FxpipeError
from fxpipe.plan import files
from fxpipe.plan.artifact import Artifact
from fxpipe.runtime.process import Process, agreed
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
        for rank in range(artifact.plan.ranks) if process is None else [process.rank]:
            state.check_values(rank)
    with files.new_directory(path, process) as draft:

        def write_programs() -> None:
            files.write_programs(artifact, draft)
            if evaluation is not None:
                files.write_evaluation(evaluation, draft)
            if draw is not None:
                draw(draft)

        for rank, program in enumerate(artifact.programs):
            tensors = _tensors_of(artifact, state, rank)

            def write_tensors(rank: int = rank, program: str = program, tensors: _Tensors = tensors) -> None:
                files.write_tensors(tensors, program, draft, rank, step_number)

            agree(problem_of(write_tensors) if leads else "", process)
        agree(problem_of(write_programs) if leads else "", process)


_Tensors = dict[str, torch.Tensor]


def _tensors_of(artifact: Artifact, state: ModelState, rank: int) -> _Tensors:
    """On rank 0, all tensors of a rank, which sends those that it trains."""
    held, process = artifact.plan.tensors[rank], state.process
    constants = {name: artifact.constants[name] for name in held.constants}
    if process is None or process.rank == rank == 0:
        return constants | {name: state.held(name) for name in (*held.parameters, *held.buffers)}
    sent = {}
    for name in (*held.parameters, *held.buffers):
        if process.rank in (rank, 0):
            own = state.held(name) if process.rank == rank else state.empty(name, state.device)
            process.send_to(own, rank, 0)
            sent[name] = own.cpu()
    return constants | sent


def problem_of(write: Callable[[], None]) -> str:
    """What writing fails with, for the other ranks; empty if it does not."""
    try:
        write()
    except (OSError, SafetensorError, FxpipeError) as error:
        return str(error)
    return ""


def agree(problem: str, process: Process | None) -> None:
    """Raise rank 0's problem on every rank."""
    if process is not None:
        given = problem.encode(errors="backslashreplace") if process.rank == 0 else None
        problem = process.broadcast_bytes(given).decode()
    if problem:
        raise ArtifactError(problem)
