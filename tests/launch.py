"""Ranks as processes, for tests: torchrun as a subprocess, or forked with all imports."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import fork_server
import torch
import trials
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

#: The agent looks after its ranks ten times a second, and names the method that does: torch asks ``inspect``
#: for it, which walks all modules and takes a fifth of a core.
_UNNAMED = mock.patch.object(dynamic_rendezvous, "get_method_name", new=str)


@dataclass(frozen=True)
class Run:
    """``code``: the exit code.  ``stdout`` and ``stderr`` of each rank; ``own``: what torchrun said.

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


def forked(
    ranks: int,
    function: Callable[..., int | None],
    *arguments: object,
    dtype: torch.dtype,
    logs: Path,
    limit: float = 240.0,
    restarts: int = 0,
) -> Run:
    """Run a function on ranks that torch's elastic agent starts, as torchrun does; as ``torchrun`` below.

    Each is forked from a server that has imported torch and fxpipe.
    function: of a module, not nested; like a command, it may return an exit code.  dtype: torch's default
    dtype in the ranks.
    """
    fork_server.serve()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=f"tests{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL),
    )
    code, own = 0, ""
    with _at_most(limit), _UNNAMED:
        try:
            elastic_launch(config, _in_rank)(dtype, function, *arguments)
        except ChildFailedError as error:
            code, own = 1, str(error)
        except EOFError as error:
            raise RuntimeError(f"{fork_server.ENDED} when asked for a rank; stderr says why") from error
    return _run_of(code, own, logs, ranks)


def without_agent(
    ranks: int,
    function: Callable[..., int | None],
    *arguments: object,
    dtype: torch.dtype,
    logs: Path,
    limit: float = 240.0,
) -> Run:
    """As ``forked``, of ranks that no agent watches, as some cluster managers start them.

    After the limit those that still run are killed.
    """
    fork_server.serve()
    logs.mkdir()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(ranks):
        own = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        processes.append(
            multiprocessing.get_context("forkserver").Process(
                target=_alone, args=(own, logs / str(rank), dtype, function, *arguments)
            )
        )
        processes[-1].start()
    end = time.monotonic() + limit
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    ended = time.time()
    for process in processes:
        process.kill()
        process.join()
    code = next((process.exitcode for process in processes if process.exitcode), 0)
    printed = tuple((logs / str(rank)).read_text(errors="replace") for rank in range(ranks))
    return Run(code, ("",) * ranks, printed, "", ended)


def _alone(own: dict[str, object], log: Path, dtype: torch.dtype, *rest: Any) -> None:
    os.environ.update({name: str(value) for name, value in own.items()})
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    _in_rank(dtype, *rest)


def _in_rank(dtype: torch.dtype, function: Callable[..., int | None], *arguments: object) -> None:
    """The function, and what an interpreter does at its end and multiprocessing does not."""
    torch.set_num_threads(1)
    torch.set_default_dtype(dtype)
    trials.made_once()
    try:
        if code := function(*arguments):
            sys.exit(code)
    except Exception:
        sys.excepthook(*sys.exc_info())
        raise
    finally:
        atexit._run_exitfuncs()


@contextlib.contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raise TimeoutError within the block when it takes longer; torch's agent then ends its ranks."""

    def late(*_: object) -> None:
        raise TimeoutError(f"not over after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def torchrun(ranks: int, *arguments: object, logs: Path, limit: float = 240.0, restarts: int = 0) -> Run:
    """``torchrun --nproc-per-node RANKS ARGUMENTS``; fails if it is not over after ``limit`` seconds.

    logs: a new directory for what the ranks print.  restarts: of all ranks after a failure, at most.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", str(restarts), "--redirects", "3", "--log-dir", str(logs)]
    command += map(str, arguments)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONPATH": fork_server.paths()}
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
    run = _run_of(process.returncode, own, logs, ranks)
    assert not late, f"not over after {limit} s\n{run}"
    return run


def _run_of(code: int, own: str, logs: Path, ranks: int) -> Run:
    """One that is over now."""
    return Run(code, printed(logs, "stdout", ranks), printed(logs, "stderr", ranks), own, time.time())


def printed(logs: Path, stream: str, ranks: int, attempt: int = 0) -> tuple[str, ...]:
    """What each rank has printed in one attempt."""
    files = (next(logs.glob(f"*/attempt_{attempt}/{rank}/{stream}.log"), None) for rank in range(ranks))
    return tuple(map(_text, files))


def _text(file: Path | None) -> str:
    return "" if file is None else file.read_text(errors="replace")
