"""Ranks as processes, for tests: torchrun as a subprocess, or forked with all imports."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def forked(
    ranks: int, function: Callable[..., None], *arguments: object, dtype: torch.dtype, restarts: int = 0
) -> None:
    """Run a function on ranks that torch's elastic agent starts, as torchrun does.

    Each is forked from a server that has imported torch and fxpipe, which saves seconds.  The server has one
    thread: a fork of this process, whose other threads hold locks, can hang.
    function: of a module, not nested.  dtype: torch's default dtype in the ranks.
    """
    multiprocessing.set_forkserver_preload(["fxpipe.compiler", "fxpipe.training.checkpoint"])
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=f"tests{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        start_method="forkserver",
    )
    elastic_launch(config, _in_rank)(dtype, function, *arguments)


def _in_rank(dtype: torch.dtype, function: Callable[..., None], *arguments: object) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(dtype)
    function(*arguments)


@dataclass(frozen=True)
class Run:
    """``code``: torchrun's exit code.  ``stdout`` and ``stderr`` of each rank; ``own``: what torchrun said.

    ``ended``: when it was over, in seconds since the epoch.
    """

    code: int
    stdout: tuple[str, ...]
    stderr: tuple[str, ...]
    own: str
    ended: float

    def __str__(self) -> str:
        ranks = [f"-- rank {r} --\n{out}{err}" for r, (out, err) in enumerate(zip(self.stdout, self.stderr))]  # noqa: B905
        return "\n".join([f"exit code {self.code}", self.own[-2000:], *(text[-3000:] for text in ranks)])


def torchrun(ranks: int, *arguments: object, logs: Path, limit: float = 240.0, restarts: int = 0) -> Run:
    """``torchrun --nproc-per-node RANKS ARGUMENTS``; fails if it is not over after ``limit`` seconds.

    logs: a new directory for what the ranks print.  restarts: of all ranks after a failure, at most.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", str(restarts), "--redirects", "3", "--log-dir", str(logs)]
    command += map(str, arguments)
    paths = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))  # for helpers
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONPATH": paths}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    late = False
    try:
        own, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        late = True
        process.terminate()  # torchrun ends its ranks before it goes
        own, _ = process.communicate()
    ended = time.time()
    run = Run(process.returncode, printed(logs, "stdout", ranks), printed(logs, "stderr", ranks), own, ended)
    assert not late, f"not over after {limit} s\n{run}"
    return run


def printed(logs: Path, stream: str, ranks: int, attempt: int = 0) -> tuple[str, ...]:
    """What each rank has printed in one attempt."""
    files = (next(logs.glob(f"*/attempt_{attempt}/{rank}/{stream}.log"), None) for rank in range(ranks))
    return tuple(map(_text, files))


def _text(file: Path | None) -> str:
    return "" if file is None else file.read_text(errors="replace")
