"""torchrun as a subprocess, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path


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
