"""One run of a worker: a script of this folder, on some processes under torchrun, one thread each.

The worker gets its case as JSON in its first argument, and its rank 0 writes what was measured, as JSON,
to the file named by the second (``Worker.finish``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
TIME_LIMIT = 900  # seconds; a run that hangs must not hold up the others for ever


def run(
    worker: str,
    ranks: int,
    case: dict[str, Any],
    *,
    limit: float = TIME_LIMIT,
    environment: dict[str, str] | None = None,
) -> Any:
    """Run a case; return what its rank 0 wrote.  Raises RuntimeError with the end of its output."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [str(FOLDER / worker), json.dumps(case), str(result)]
        settings = {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
        done = subprocess.run(
            command,
            env=os.environ | settings | (environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit,
        )
        if done.returncode or not result.exists():
            raise RuntimeError(f"{worker} failed with {case}:\n{done.stdout[-4000:]}")
        return json.loads(result.read_text())
