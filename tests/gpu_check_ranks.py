"""A rank of ``benchmarks/gpu_check_worker.py``, in a forked process."""

import json
import sys
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(case: dict[str, Any], result: str) -> None:
    sys.path.insert(0, str(BENCHMARKS))
    import gpu_check_worker

    sys.argv[1:] = [json.dumps(case), result]
    gpu_check_worker.main()
