"""Writes a pipeline to a directory: rank 0 does, for all ranks, as they may have no disk in common."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch

from fxpipe.plan.artifact import Artifact
from fxpipe.plan.rows import ShardName
from fxpipe.plan.saved import files
from fxpipe.plan.spans import place_of, without_zeros
from fxpipe.runtime.job.process import Process, agreed, own_ranks
from fxpipe.training.model.model_state import ModelState


def save(
    artifact: Artifact,
    others: Sequence[Artifact],
    state: ModelState,
    step_number: int,
    path: Path,
    draw: Callable[[Path], object] | None,
    overwrite: bool = False,
) -> None:
    """See ``Pipeline.save``.

    others: other programs on the same tensors.  draw: writes the pictures; None without
    a graph.
    """
    process = state.process
    leads = process is None or process.leads
    with agreed(process, "save"):
        state.follow_model()
        for rank in own_ranks(process, artifact.plan.ranks):
            state.check_values(rank)
    with new_directory(path, process, overwrite) as draft:
        _write(artifact, state, draft, path, step_number)
        for other in others:
            _write(other, state, files.directory_of(other.plan, draft), path, None)
        with agreed(process, "save"), files.writing(path):
            if leads and draw is not None:
                draw(draft)


def _write(
    artifact: Artifact, state: ModelState, directory: Path, path: Path, step_number: int | None
) -> None:
    """Write an artifact and its tensors; of other programs, without a step number, the constants alone.

    path: the name of the whole, for messages.
    """
    process = state.process
    leads = process is None or process.leads
    for rank, (program, rank_tensors) in enumerate(
        zip(artifact.programs, artifact.plan.tensors, strict=True)
    ):
        names = rank_tensors.constants if step_number is None else rank_tensors.names
        tensors = _on_first(artifact, state, rank, names)
        with agreed(process, "save"), files.writing(path):
            if leads:
                directory.mkdir(exist_ok=True)
                files.write_tensors(tensors, program, directory, rank, step_number or 0)
    with agreed(process, "save"), files.writing(path):
        if leads:
            files.write_programs(artifact, directory)


def _on_first(
    artifact: Artifact, state: ModelState, rank: int, names: Iterable[ShardName]
) -> dict[str, torch.Tensor]:
    """Bring tensors of a rank to rank 0, where this returns them; the pipeline may have been loaded, and each
    rank then holds its own constants alone."""
    process, plan, constants = state.process, artifact.plan, artifact.plan.tensors[rank].constants
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        if process is None:
            tensors[name] = artifact.constants[name] if name in constants else state.value(name)
            continue
        owners = [(process.number(0, rank, 0), name)] if name in constants else state.pieces(name)
        if owners == [(0, name)]:  # nobody has to send it
            if process.leads:
                tensors[name] = artifact.constants[name] if name in constants else state.value(name)
            continue
        whole = plan.whole_layout(name).empty(state.device) if process.leads else None
        for owner, piece in owners:
            part = whole
            if whole is not None and piece not in constants:
                spans = state.spans_of(piece, owner % process.lanes)
                part = place_of(whole, spans, name.begin)
            _send(artifact, state, process, owner, piece, part)
        if whole is not None:
            tensors[name] = whole
    return tensors


def _send(
    artifact: Artifact,
    state: ModelState,
    process: Process,
    owner: int,
    name: ShardName,
    target: torch.Tensor | None,
) -> None:
    """Copy a tensor of an owner to its place on the first process; the others do nothing."""
    source = artifact.constants.get(name) if process.world_rank == owner else None
    if process.world_rank == owner and source is None:
        source = without_zeros(state.value(name), state.spans_of(name))
    if owner == 0 and target is not None and source is not None:
        target.copy_(source)
    elif process.world_rank == owner and source is not None:
        process.send_to(source, owner, 0)
    elif target is not None:
        value = target.contiguous()
        process.send_to(value, owner, 0)
        if value is not target:
            target.copy_(value)


def _put_in_place(draft: Path, path: Path) -> None:
    # A crash at any line leaves the old pipeline or the new one, whole: the files are on the disk before
    # their directory gets its name, and the old directory is removed only behind that.
    before = path.with_name(f".{path.name}.before")
    shutil.rmtree(before, ignore_errors=True)
    for each in (*draft.rglob("*"), draft):
        files.synchronize(each)
    if path.exists():
        path.rename(before)
    try:
        draft.rename(path)
    except OSError:
        if before.exists():
            before.rename(path)
        raise
    files.synchronize(path.parent)
    shutil.rmtree(before, ignore_errors=True)


@contextlib.contextmanager
def new_directory(path: Path, process: Process | None, overwrite: bool = False) -> Iterator[Path]:
    """A temporary directory, which is renamed to ``path`` at the end, or removed after an error.

    overwrite: in the place of a pipeline that was saved there, which stays until then.

    Under torchrun all ranks call this, and end the block alike (``process.agreed``); rank 0 alone makes the
    directory and writes to it.
    """
    path = path.absolute()
    draft = path.with_name(f".{path.name}.draft")
    leads = process is None or process.leads
    with agreed(process, "save"), files.writing(path):
        if leads:
            files.check_free(path, overwrite)
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
    try:
        yield draft
        with agreed(process, "save"), files.writing(path):
            if leads:
                files.check_free(path, overwrite)
                _put_in_place(draft, path)
    finally:
        if leads:
            shutil.rmtree(draft, ignore_errors=True)
