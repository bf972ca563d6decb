"""The directories of checkpoints: complete or absent, with checksums.

    checkpoints/step-00000200/  step-00000300/ …
        state.json  shard-00001-model-00001-of-00001.safetensors …  SHA256SUMS

A checkpoint is written under a hidden name, synchronized to the disk, and renamed.  ``SHA256SUMS`` is in the
format of sha256sum.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from fxpipe.errors import ArtifactError
from fxpipe.plan.files import checksum
from fxpipe.strict import MEBIBYTE, Misfit, read_text, shown

SUMS, STATE = "SHA256SUMS", "state.json"
REPLACED = ".replaced"  # the end of the hidden name of a checkpoint while a new one takes its place


def path_of(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def draft_of(directory: Path, step: int) -> Path:
    return directory / f".step-{step:08d}.draft"


def checkpoints(directory: Path) -> dict[int, Path]:
    """The complete checkpoints by the number of steps, the oldest first."""
    names = (re.fullmatch(r"step-([0-9]{8,15})", path.name) for path in directory.iterdir())
    steps = sorted(int(match[1]) for match in names if match)
    return {step: path_of(directory, step) for step in steps}


def newest(directory: Path) -> Path | None:
    """The newest complete checkpoint, if there is one."""
    return next(reversed(checkpoints(directory).values()), None)


def begin(directory: Path, step: int) -> Path:
    """Make the directory of a new checkpoint, under its hidden name.

    Removes all that earlier runs left unfinished, as the disk may be full of it.
    """
    for path in directory.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)
    draft = draft_of(directory, step)
    draft.mkdir()
    return draft


def discard(directory: Path, step: int) -> None:
    """Remove what was written of a checkpoint that will not be completed."""
    shutil.rmtree(draft_of(directory, step), ignore_errors=True)


def complete(directory: Path, step: int, state: str, sums: Mapping[str, str]) -> Path:
    """Add state and checksums to the files that ranks have written and synchronized; give it its name."""
    draft, path = draft_of(directory, step), path_of(directory, step)
    _write(draft / STATE, state)
    sums = {**sums, STATE: checksum(draft / STATE)}
    _write(draft / SUMS, "".join(f"{sums[name]}  {name}\n" for name in sorted(sums)))
    _synchronize(draft)
    hidden = path.with_name(f".{path.name}{REPLACED}")
    if path.exists():  # of a run that went on from an earlier checkpoint
        path.rename(hidden)
    draft.rename(path)
    _synchronize(directory)
    shutil.rmtree(hidden, ignore_errors=True)
    return path


def put_back(directory: Path) -> None:
    """Give a checkpoint its name again that was about to be replaced when the run was killed."""
    for hidden in directory.glob(f".step-*{REPLACED}"):
        path = directory / hidden.name.removeprefix(".").removesuffix(REPLACED)
        if not path.exists():
            hidden.rename(path)


def keep_newest(directory: Path, number: int) -> None:
    """Remove all but the newest checkpoints."""
    for path in list(checkpoints(directory).values())[:-number]:
        _remove(path)


def read_state(path: Path) -> str:
    """The text of state.json.  Raises ArtifactError if it, or the list of checksums, is missing or
    changed."""
    sums = read_sums(path)
    verify(path, {STATE: sums[STATE]})
    return read_text(path / STATE, 256 * MEBIBYTE)


def read_sums(path: Path) -> dict[str, str]:
    """The checksums by the names of the files; all these files exist, and no others.  Raises
    ArtifactError."""
    try:
        lines = read_text(path / SUMS, MEBIBYTE).splitlines()
    except Misfit as error:
        raise ArtifactError(f"{path / SUMS} {error}. {_instead(path)}") from error
    sums = {}
    for number, line in enumerate(lines, 1):
        match = re.fullmatch(r"([0-9a-f]{64})  (.+)", line)
        if match is None:
            raise ArtifactError(f"{path / SUMS}: line {number} is no checksum of a file. {_instead(path)}")
        sums[match[2]] = match[1]
    held = {file.name for file in path.iterdir()} - {SUMS}
    for name in sorted(held ^ {STATE, *sums}):
        wrong = "is missing" if name not in held else f"is not in {SUMS}"
        raise ArtifactError(f"{path}: {shown(name)} {wrong}. {_instead(path)}")
    return sums


def verify(path: Path, sums: Mapping[str, str]) -> None:
    """Raise ArtifactError, naming the first file that is not what was written."""
    for name, expected in sums.items():
        try:
            found = checksum(path / name)
        except (Misfit, OSError) as error:
            raise ArtifactError(f"{path / name} {error}. {_instead(path)}") from error
        if found != expected:
            wrong = f"is damaged: its checksum is not the one in {SUMS}"
            raise ArtifactError(f"{path / name} {wrong}. {_instead(path)}")


def _instead(path: Path) -> str:
    step = int(path.name.removeprefix("step-"))
    older = [p.name for other, p in checkpoints(path.parent).items() if other < step]
    return f"Remove {path.name} to go on from {older[-1]}." if older else "There is no older checkpoint."


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _synchronize(directory: Path) -> None:
    number = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _remove(path: Path) -> None:
    """Remove a checkpoint so that it is never seen half removed."""
    hidden = path.with_name(f".{path.name}.removed")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)
