"""The directories of checkpoints: complete or absent, with checksums.

    checkpoints/step-00000200/  step-00000300/ …
        state.json  shard-00001-model-00001-of-00001.safetensors …  SHA256SUMS

A checkpoint is written under a hidden name, synchronized to the disk, and renamed.  ``SHA256SUMS`` is in the
format of sha256sum.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from fxpipe.errors import ArtifactError
from fxpipe.plan.saved.files import checksum, synchronize
from fxpipe.strict import MEBIBYTE, Mismatch, read_text, shown

PATIENCE = 10.0  # seconds until a file that another process wrote must be visible, or its lock be gone
SUMS, STATE = "SHA256SUMS", "state.json"
REPLACED = ".replaced"  # the end of the hidden name of a checkpoint while a new one takes its place


def path_of(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The number of steps by the name of a complete checkpoint; None for anything else."""
    match = re.fullmatch(r"step-([0-9]{8,15})", path.name)
    is_one = match is not None and path == path_of(path.parent, int(match[1])) and path.is_dir()
    return int(match[1]) if match is not None and is_one else None


def draft_of(directory: Path, step: int) -> Path:
    return directory / f".step-{step:08d}.draft"


def checkpoints(directory: Path) -> dict[int, Path]:
    """The complete checkpoints by the number of steps, the oldest first."""
    steps = sorted(step for path in directory.iterdir() if (step := step_of(path)) is not None)
    return {step: path_of(directory, step) for step in steps}


def newest(directory: Path) -> Path | None:
    """The newest complete checkpoint, if there is one."""
    return next(reversed(checkpoints(directory).values()), None)


def begin(directory: Path, step: int) -> None:
    """Make the directory of a new checkpoint, under its hidden name.

    Removes all that earlier runs left unfinished, as the disk may be full of it.
    """
    for path in directory.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)
    draft_of(directory, step).mkdir()


def discard(directory: Path, step: int) -> None:
    """Remove what was written of a checkpoint that will not be completed."""
    shutil.rmtree(draft_of(directory, step), ignore_errors=True)


def complete(directory: Path, step: int, state: str, sums: Mapping[str, str]) -> None:
    """Add state and checksums to the files that ranks have written and synchronized; give it its name."""
    draft, path = draft_of(directory, step), path_of(directory, step)
    _write(draft / STATE, state)
    sums = {**sums, STATE: checksum(draft / STATE)}
    _write(draft / SUMS, "".join(f"{sums[name]}  {name}\n" for name in sorted(sums)))
    synchronize(draft)  # before it gets its name, by which a run that resumes takes it for complete
    hidden = path.with_name(f".{path.name}{REPLACED}")
    if path.exists():  # of a run that went on from an earlier checkpoint; ``put_back`` knows the hidden name
        path.rename(hidden)
    draft.rename(path)
    synchronize(directory)
    shutil.rmtree(hidden, ignore_errors=True)


class Lock:
    """Keeps a directory of checkpoints for one run at a time, as long as its process lives.

    A disk that has no locks keeps nobody out.
    """

    def __init__(self, directory: Path) -> None:
        """Raises ArtifactError if another run has it for PATIENCE seconds."""
        self._path = directory / ".lock"
        end = time.monotonic() + PATIENCE
        while not self._taken():
            owner = ""
            with contextlib.suppress(FileNotFoundError):
                owner = self._path.read_text(errors="replace")
            is_ours = owner == _who()
            if is_ours or time.monotonic() > end:
                who = "another Checkpointer of this process" if is_ours else f"another run ({owner})"
                what = "close it first" if is_ours else "end that run"
                raise ArtifactError(
                    f"{directory.absolute()} is in use by {who}. Name another directory, or {what}."
                )
            time.sleep(0.1)

    def _taken(self) -> bool:
        self._file = self._path.open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # of another process, which may be one that ends
            self._file.close()
            return False
        except OSError:  # there are no locks
            return True
        if not _is_at(self._file, self._path):  # the one that had it has removed it
            self._file.close()
            return False
        self._file.truncate(0)
        self._file.write(_who())
        self._file.flush()
        return True

    def release(self) -> None:
        if not self._file.closed:
            with contextlib.suppress(OSError):
                if _is_at(self._file, self._path):
                    self._path.unlink()  # while it is locked: who locks it next sees that it is gone
                fcntl.flock(self._file, fcntl.LOCK_UN)  # also for processes forked since
            self._file.close()


def _who() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _is_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


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
    """The text of state.json.  Raises ArtifactError if it, or the list of checksums, is lost or changed."""
    verify(path, {STATE: read_sums(path)[STATE]})
    with reading(path):
        return read_text(path / STATE, 256 * MEBIBYTE)


def read_sums(path: Path) -> dict[str, str]:
    """The checksums by the names of the files, all of which exist; others beside them do not belong to the
    checkpoint.  Raises ArtifactError."""
    with reading(path / SUMS):
        lines = read_text(path / SUMS, MEBIBYTE).splitlines()
    sums: dict[str, str] = {}
    with reading(path):
        for number, line in enumerate(lines, 1):
            match = re.fullmatch(r"([0-9a-f]{64})  ([^/]+)", line)
            if match is None or match[2] in sums:
                raise Mismatch(f"line {number} is no checksum of another file", f"{SUMS}:")
            sums[match[2]] = match[1]
        for name in sorted({STATE, *sums}):
            if not os.path.lexists(path / name):
                raise Mismatch(f"{shown(name)} is missing")
            if name not in sums:
                raise Mismatch(f"{SUMS} does not list {name}")
    return sums


def verify(path: Path, sums: Mapping[str, str]) -> None:
    """Raise ArtifactError, naming the first file that is not what was written."""
    for name, expected in sums.items():
        with reading(path / name):
            if checksum(path / name) != expected:
                raise Mismatch(f"is damaged: its checksum is not the one in {SUMS}")


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise ArtifactError, naming a file of a checkpoint or its directory, for a Mismatch or an error of the
    system in the block, with what to do."""
    try:
        yield
    except (Mismatch, OSError) as error:
        is_file = step_of(path) is None and step_of(path.parent) is not None
        what, owner = (str(path), path.parent) if is_file else (f"{path}:", path)
        raise ArtifactError(f"{what} {error}. {_instead(owner)}") from error


def _instead(path: Path) -> str:
    step = step_of(path)
    if step is None:
        return "Take another checkpoint."
    older = [p.name for other, p in checkpoints(path.parent).items() if other < step]
    return f"Remove {path.name} to go on from {older[-1]}." if older else "There is no older checkpoint."


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _remove(path: Path) -> None:
    """Remove a checkpoint so that it is never seen half removed."""
    hidden = path.with_name(f".{path.name}.removed")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)
