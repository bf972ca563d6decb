"""Writes and reads a compiled pipeline (:mod:`fxpipe.plan.artifact`) as a directory.

    rank0.py …  rank0.safetensors …  rank0.sha256 …  plan.json  captured.json  steps.json

Nothing is pickled.  A directory is written under a temporary name and renamed when it is complete.  Reading
does not trust a directory: the plan is checked field by field, the programs are not run, and ``rank0.sha256``
(in the format of sha256sum; that of rank 0 has the plan and steps.json as well) shows which files have
changed since they were saved.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fxpipe.errors import ArtifactError, OptionError, number_of
from fxpipe.plan.artifact import Artifact, Plan
from fxpipe.plan.program.parse import parse
from fxpipe.plan.rows import ShardName
from fxpipe.plan.saved.check import plan_of
from fxpipe.plan.spans import slices_of, spans_of, with_zeros
from fxpipe.plan.tensors import dtype_of
from fxpipe.strict import MEBIBYTE, Mismatch, open_regular, read_text, refused, shown

MOST_PLAN_BYTES, MOST_PROGRAM_BYTES = 32 * MEBIBYTE, 64 * MEBIBYTE
STEP, CAPTURED, PLAN, STEPS = "step_number", "captured.json", "plan.json", "steps.json"
AGAIN = "Save the pipeline again."
#: What ``pipe.save`` and ``fxpipe report`` write to a directory.
_SAVED = re.compile(
    r"rank\d+\.(py|safetensors|sha256)|(plan|captured|steps|graph)\.json|(graph|timeline)\.(svg|dot)|report\.html"
    r"|assumed|evaluation|__pycache__"
)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise ArtifactError, naming ``path``, for errors of the system in a block that writes to it."""
    # The system's error for it is a ValueError without the path.
    if "\0" in str(path):
        raise ArtifactError(f"{str(path)!r} is no path: it holds a null byte.")
    try:
        yield
    except OSError as error:
        # The error may be of another file than the one that is named.
        where = "" if error.filename in (None, str(path)) else f" ({error.filename})"
        raise ArtifactError(f"{path} cannot be written: {error.strerror or error}{where}.") from error
    except SafetensorError as error:
        raise ArtifactError(f"{path} cannot be written: {error}.") from error


def synchronize(path: Path) -> None:
    """Have the contents of a file, or the names in a directory, on the disk before what is written next."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EBADF, errno.EINVAL):  # of disks that synchronize no directories
            raise
    finally:
        os.close(number)


def as_path(path: object, what: str, kind: str = "a directory") -> Path:
    """A path that a user gives to ``what``.  Raises OptionError for anything else."""
    if not isinstance(path, str | os.PathLike):
        raise OptionError(f"{what} needs the path of {kind}, and got {path!r:.60}.")
    return Path(path)


def check_free(path: Path, overwrite: bool = False, option: str = "overwrite=True") -> None:
    """Raise ArtifactError if there is something at ``path`` that a new directory would replace.

    overwrite: a saved pipeline may be replaced, if nothing else is there.  option: how one asks for that.
    """
    if path.exists() and not path.is_dir():
        raise ArtifactError(f"{path} is a file. Name a new directory.")
    entries = sorted(each.name for each in path.iterdir()) if path.exists() else []
    if not entries:
        return
    is_saved = "plan.json" in entries
    if not overwrite:
        remedy = f", remove it first, or give {option}" if is_saved else ", or remove it first"
        raise ArtifactError(f"{path} is not empty. Name a new directory{remedy}.")
    # A directory that is not a saved pipeline may have files of the same names.
    others = [name for name in entries if not (is_saved and _SAVED.fullmatch(name))]
    if others:
        raise ArtifactError(
            f"{path} holds {shown(others[0])}, which is not of a saved pipeline: {option} would remove "
            "it. Name another directory, or move the file."
        )


def check_writable(path: Path) -> None:
    """Raise ArtifactError where no directory can be made at ``path``."""
    # Where the directory will be made, with its missing parents.
    above = next(each for each in path.absolute().parents if each.exists())
    with writing(path), tempfile.TemporaryDirectory(prefix=".fxpipe.", dir=above):
        pass


def write_programs(artifact: Artifact, directory: Path) -> None:
    """Write plan and programs, and the plan's checksum behind those of rank 0.

    Raises ArtifactError if a file would be too large to be read again.
    """
    texts = {f"rank{rank}.py": source.encode() for rank, source in enumerate(artifact.programs)}
    texts[PLAN] = artifact.plan.to_json().encode()
    texts |= {
        name: text.encode() for name, text in ((CAPTURED, artifact.captured), (STEPS, artifact.steps)) if text
    }
    for name, text in texts.items():
        most = MOST_PLAN_BYTES if name == PLAN else MOST_PROGRAM_BYTES
        # A pipeline that cannot be read again is of no use.
        if len(text) > most:
            raise ArtifactError(
                f"{name} would be larger than {most // MEBIBYTE} MiB, and not be read again. Take fewer "
                "microbatches, or offload less."
            )
        (directory / name).write_bytes(text)
    # Behind the sums of rank 0's own files, which are written with its tensors.
    with (directory / "rank0.sha256").open("a") as file:
        for name in (PLAN, STEPS) if artifact.steps else (PLAN,):
            file.write(f"{checksum(directory / name)}  {name}\n")


def write_tensors(
    tensors: Mapping[str, torch.Tensor], program: str, directory: Path, rank: int, step_number: int
) -> None:
    """Write the tensors of a rank, and the checksums of its tensor file and its program.

    step_number: of the next step, kept beside the tensors.
    """
    path = directory / f"rank{rank}.safetensors"
    save_file(apart(tensors), path, {STEP: str(step_number)})
    sums = {f"rank{rank}.py": hashlib.sha256(program.encode()).hexdigest(), path.name: checksum(path)}
    lines = (f"{checksum}  {name}\n" for name, checksum in sums.items())
    (directory / f"rank{rank}.sha256").write_text("".join(lines))


#: The directories of other programs within a saved pipeline: for batches that are as their plan assumes,
#: and of ``pipe.evaluate``.
ASSUMED, EVALUATION = "assumed", "evaluation"


def directory_of(plan: Plan, directory: Path) -> Path:
    """The directory of other programs within a saved pipeline."""
    return directory / (ASSUMED if plan.when else EVALUATION)


def directories(directory: Path) -> list[Path]:
    """The directories of programs of a saved pipeline, its own first."""
    others = directory / ASSUMED, directory / EVALUATION
    return [directory, *(path for path in others if path.exists())]


def _check_other(plan: Plan, trained: Plan, directory: Path) -> None:
    """Raise ArtifactError if the plan of other programs does not fit the tensors of the pipeline."""
    if plan.ranks != trained.ranks:
        raise ArtifactError(
            f"{directory} has {number_of(plan.ranks, 'rank')}, the pipeline {trained.ranks}. {AGAIN}"
        )
    if bool(plan.when) != (directory.name == ASSUMED):
        raise ArtifactError(f"{directory} has the programs of another directory. {AGAIN}")
    if plan.when and not plan.trains_as(trained):
        raise ArtifactError(f"{directory} does not train the tensors of the pipeline. {AGAIN}")
    for rank, (tensors, theirs) in enumerate(zip(plan.tensors, trained.tensors, strict=True)):
        missing = {*tensors.parameters} - {*theirs.parameters} | {*tensors.buffers} - {*theirs.buffers}
        for name in sorted(missing):
            raise ArtifactError(f"{directory} needs {shown(name)}, which rank {rank} does not hold. {AGAIN}")
        for name in tensors.state:
            if plan.layouts[name] != trained.layouts[name]:
                raise ArtifactError(f"{directory} needs {shown(name)} in another layout. {AGAIN}")


def apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors as safetensors requires them: on the CPU, contiguous, without shared memory.

    Raises ArtifactError as ``check_dtypes`` does.
    """
    check_dtypes(tensors)
    return {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}


def check_dtypes(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ArtifactError for a dtype that safetensors does not have."""
    for name, tensor in tensors.items():
        if tensor.is_complex() and tensor.dtype != torch.complex64:
            raise ArtifactError(
                f"{name!r} is of {tensor.dtype}, which a safetensors file cannot hold. Use complex64, or two "
                "tensors for the real and the imaginary part."
            )


def laid_out(
    tensors: Mapping[str, torch.Tensor], plan: Plan, *, of_all_lanes: bool = False
) -> dict[str, torch.Tensor]:
    """Tensors from a file with the strides that the programs expect; with the plain ones where lanes have
    shares.

    Each in memory of its own, which begins where torch's allocator lets it begin: a file's does so anywhere,
    and kernels may then add in another order.
    """
    layout = plan.whole_layout if of_all_lanes else plan.layouts.__getitem__
    return {name: layout(name).empty(t.device).copy_(t) for name, t in tensors.items()}


def read_plan(directory: Path) -> Plan:
    """Read the plan of a saved pipeline.  Raises ArtifactError if it is missing or invalid."""
    return plan_of(_plan_text(directory), str(directory / "plan.json"))


def plan_texts(directory: Path) -> dict[Path, str]:
    """The plan of a saved pipeline, and those of its other programs: directory -> text."""
    return {path: _plan_text(path) for path in directories(directory)}


def checked_plans(texts: Mapping[Path, str]) -> list[Plan]:
    """The plans of ``plan_texts``.  Raises ArtifactError if they are invalid or do not fit each other."""
    plans = [plan_of(text, str(directory / "plan.json")) for directory, text in texts.items()]
    # The first is that of training, whose tensors the others use.
    for plan, directory in [*zip(plans, texts, strict=True)][1:]:
        _check_other(plan, plans[0], directory)
    return plans


def checksum_of(texts: Mapping[Path, str]) -> bytes:
    """The SHA-256 of the texts of plans."""
    return hashlib.sha256("\0".join(texts.values()).encode()).digest()


def _found_instead(directory: Path) -> str:
    """What is where a saved pipeline was expected, and what to do with it."""
    if not os.path.exists(directory):
        return "there is no such directory"
    if not os.path.isdir(directory):
        return "it is a file, and there is no plan.json in it"
    # Directories that fxpipe writes itself are the likely mistakes.
    if any(os.path.exists(each / "state.json") for each in (directory, *directory.glob("step-*"))):
        return (
            "it has no plan.json, but checkpoints of a run. Compile the model, or load the pipeline that was "
            "saved, and resume with fxpipe.Checkpointer(pipe, directory).resume(); "
            "fxpipe.read_checkpoint(directory) gives the weights alone"
        )
    if any(directory.glob("*.safetensors")) or any(directory.glob("*.distcp")):
        return (
            "it has weights and no plan.json. Compile the model and give it these: "
            "pipe.load_state_dict(directory)"
        )
    return "there is no plan.json in it"


def _plan_text(directory: Path) -> str:
    path = directory / "plan.json"
    if not os.path.exists(path):
        raise ArtifactError(f"{directory} holds no saved pipeline: {_found_instead(directory)}.")
    return _text(path, MOST_PLAN_BYTES)


def _text(path: Path, most: int) -> str:
    with refused(ArtifactError, path, AGAIN):
        return read_text(path, most)


def read_beside(directory: Path, name: str) -> str:
    """A file beside the plan of a saved pipeline, ``CAPTURED`` or ``STEPS``; "" where it keeps none."""
    path = directory / name
    return _text(path, MOST_PROGRAM_BYTES) if os.path.exists(path) else ""


def read_programs(directory: Path, plan: Plan, ranks: Sequence[int]) -> tuple[str, ...]:
    """Read the programs of these ranks, of which no file may be missing; those of the others are empty."""
    for rank in ranks:
        for file in (f"rank{rank}.py", f"rank{rank}.safetensors", f"rank{rank}.sha256"):
            if not os.path.exists(directory / file):
                raise ArtifactError(f"{directory} is cut short: {file} is missing. {AGAIN}")
    return tuple(_program(directory / f"rank{r}.py") if r in ranks else "" for r in range(plan.ranks))


def _program(path: Path) -> str:
    with refused(ArtifactError, f"{path} is no program: it", "Mend it, or save again."):
        return read_text(path, MOST_PROGRAM_BYTES)


def read_tensors(
    directory: Path, plan: Plan, rank: int, names: Sequence[str] | None = None, lane: int | None = None
) -> dict[str, torch.Tensor]:
    """Read the tensors of a rank.  Raises ArtifactError if names, shapes or dtypes are not those of the plan.

    names: of the tensors in its file, if these are not all that the rank holds.  lane: read its shares alone;
    by default what all lanes hold together.
    Warns of a program that was edited since it was saved; weights that changed are an ArtifactError.
    """
    path, tensors_here = directory / f"rank{rank}.safetensors", plan.tensors[rank]
    if names is None:
        names = tensors_here.names
    with open_tensors(path) as file:
        stored = set(file.keys())
        # By name first: a wrong file has other shapes, too.
        for name in sorted(stored.symmetric_difference(names)):
            wrong = "does not hold" if name not in stored else "holds, beside what the rank needs,"
            raise ArtifactError(f"{path} {wrong} {shown(name)}. {AGAIN}")
        for name in names:
            _check_shape(path, name, file.get_slice(name).get_shape(), plan)
        tensors = {name: _read(file, name, plan, lane) for name in names}
    for name, tensor in tensors.items():
        if tensor.dtype != dtype_of(plan.layouts[name].dtype):
            raise ArtifactError(
                f"{path} holds {shown(name)} as {tensor.dtype}, and the programs need "
                f"{plan.layouts[name].dtype}. {AGAIN}"
            )
    # Behind the shapes, whose errors say more than a checksum.
    _check_sums(directory, rank)
    return laid_out(tensors, plan, of_all_lanes=lane is None)


def _read(file: Any, name: str, plan: Plan, lane: int | None) -> torch.Tensor:
    # A slice is read alone, so that a lane does not hold what all lanes have.
    if lane is None or name not in plan.lanes.shared:
        whole: torch.Tensor = file.get_tensor(name)
        return whole
    shape, spans = plan.whole_layout(name).shape, spans_of(plan, ShardName(name), lane)
    return with_zeros(file.get_slice(name)[slices_of(shape, spans)], spans, shape)


def read_constants(directory: Path, plan: Plan, ranks: Sequence[int]) -> dict[str, torch.Tensor]:
    """Read the tensors of these ranks of other programs: their constants alone."""
    by_rank = [read_tensors(directory, plan, rank, plan.tensors[rank].constants) for rank in ranks]
    return {name: tensor for tensors in by_rank for name, tensor in tensors.items()}


def read_step_number(directory: Path, rank: int) -> int:
    """The number of the next step of a saved pipeline; 0 if it was saved by a version that did not keep
    it."""
    path = directory / f"rank{rank}.safetensors"
    with open_tensors(path) as file:
        text = (file.metadata() or {}).get(STEP, "0")
    # Untrusted, as everything in the directory.
    if not re.fullmatch("[0-9]{1,15}", text):
        raise ArtifactError(f"{path} has the step number {shown(text)}. {AGAIN}")
    return int(text)


def _check_shape(path: Path, name: str, shape: list[int], plan: Plan) -> None:
    wanted = plan.whole_layout(name).shape
    if tuple(shape) != wanted:
        raise ArtifactError(
            f"{path} holds {shown(name)} in shape {tuple(shape)}, and the programs need {wanted}. {AGAIN}"
        )


@contextlib.contextmanager
def open_tensors(path: Path, remedy: str = AGAIN) -> Iterator[Any]:
    """Open a safetensors file to read its tensors one by one.  Raises ArtifactError if it is invalid."""
    with refused(ArtifactError, path, remedy), tensors_in(path) as file:
        yield file


@contextlib.contextmanager
def tensors_in(path: Path) -> Iterator[Any]:
    """Open a safetensors file; raises Mismatch where ``open_tensors`` raises ArtifactError."""
    try:
        # A pipe or a device of this name would block, or never end.
        open_regular(path).close()
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise Mismatch(f"is damaged or cut short, or no safetensors file: {error}") from error


def _check_sums(directory: Path, rank: int) -> None:
    """Warn of a program that was edited, and raise ArtifactError for weights, or a plan, that are not those
    that were saved: nobody edits these by hand, and no other check sees all that a disk has done to them."""
    path = directory / f"rank{rank}.sha256"
    lines = _text(path, MEBIBYTE).splitlines()
    sums = {name: checksum for checksum, _, name in (line.partition("  ") for line in lines)}
    program, weights = f"rank{rank}.py", f"rank{rank}.safetensors"
    beside = sorted(sums.keys() & {PLAN, STEPS})  # which an earlier version did not list
    for name in (program, weights, *beside):
        if name not in sums:
            raise ArtifactError(f"{path} is damaged or cut short: it has no checksum of {name}. {AGAIN}")
        try:
            differs = checksum(directory / name) != sums[name]
        except (Mismatch, OSError) as error:
            raise ArtifactError(f"{directory / name} {error}. {AGAIN}") from error
        if differs and name == program:
            edited = f"{directory / name} was edited since it was saved, and runs as it is now."
            warnings.warn(f"{edited}{_outside(directory / name)}", stacklevel=6)
        elif differs:
            elsewhere = " Weights from elsewhere are for pipe.load_state_dict(…)." if name == weights else ""
            raise ArtifactError(
                f"{directory / name} is damaged: its checksum is not the one in {path.name}. {AGAIN}"
                f"{elsewhere} If you have changed it yourself, write its checksum: "
                f"sha256sum {' '.join((program, weights, *beside))} > {path.name}"
            )


def _outside(path: Path) -> str:
    """Which lines of an edited program no check can prove, as text."""
    try:
        outside = parse(read_text(path, MOST_PROGRAM_BYTES)).outside
    except Mismatch:
        return ""  # who reads it to run it tells why it cannot be read
    if not outside:
        return ""
    more = f", nor {number_of(len(outside) - 1, 'other line')}" if outside[1:] else ""
    return f" fxpipe check cannot prove line {outside[0].lineno}: {outside[0].what}{more}."


def checksum(path: Path) -> str:
    """The SHA-256 of a regular file, as sha256sum writes it.  Raises Mismatch if it is none."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
