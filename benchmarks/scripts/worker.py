"""A process that runs scripts one after the other and writes down what each noted."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.scripts import kinds
from benchmarks.scripts.script import PLAIN, SCRIPTS, Run

#: Seconds that a script may take on a machine with other work.
LIMIT = 100


@dataclass(frozen=True)
class Outcome:
    """What one process has of a script: its values, or the error that ended it; warnings in any case."""

    values: dict[str, list[torch.Tensor]]
    error: str
    warnings: tuple[str, ...]


def path_of(directory: Path, setting: str, name: str, rank: int) -> Path:
    return directory / f"{setting} {name.replace('/', ' ')}.{rank}.pt"


def run_all(directory: str, setting: str, names: tuple[str, ...]) -> None:
    """Run the scripts in this process, which is one rank; the first that fails ends it."""
    kinds.load()
    for name in names:
        function = PLAIN[name] if setting == "1" else SCRIPTS[name].run
        files = Path(directory) / setting / name.replace("/", " ")
        files.mkdir(parents=True, exist_ok=True)
        run = Run(setting, files)
        target = path_of(Path(directory), setting, name, run.rank)
        target.with_suffix(".began").touch()
        torch.manual_seed(0)
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        try:
            with _noted_warnings() as noted:
                function(run)
        except Exception as error:
            write(target, Outcome({}, f"{type(error).__name__}: {error}", _texts(noted)))
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()
        write(target, Outcome(dict(run.values), "", _texts(noted)))
        del run
        gc.collect()


def write(path: Path, outcome: Outcome) -> None:
    """Write the outcome whole or not at all: the driver may look at any moment."""
    draft = path.with_suffix(f".{os.getpid()}")
    torch.save(vars(outcome), draft)
    draft.rename(path)


def read(path: Path) -> Outcome | None:
    return Outcome(**torch.load(path)) if path.exists() else None


@contextlib.contextmanager
def _noted_warnings() -> Any:
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        yield noted


def _texts(noted: list[warnings.WarningMessage]) -> tuple[str, ...]:
    return tuple(str(warning.message) for warning in noted)
