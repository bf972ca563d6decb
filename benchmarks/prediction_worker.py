"""A rank of ``prediction.py``: runs steps of a saved pipeline, timed in turns on the wall and by its thread.

The thread's time does not depend on what other programs take of the machine, and has no waits: of an op it is
that of its section, its messages included.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from prediction_models import MODELS

import fxpipe
from fxpipe.runtime.program.record import Clock
from fxpipe.schedule.ops import parse_op

WARM_UP = 3


class ThreadClock(Clock):
    """A clock that stands while the thread does not run."""

    def mark(self) -> float:
        return time.thread_time()


def main(case: dict[str, Any], result: Path) -> None:
    torch.manual_seed(0)
    _, example = MODELS[case["model"]]()
    pipe = fxpipe.load(case["directory"])
    batch = {name: torch.cat([x] * case["microbatches"]) for name, x in example.items()}
    record, steps = pipe.runtime.record, list[float]()
    by_wall, taken = record.clock, defaultdict[str, list[float]](list)
    gc.disable()
    for number in range(WARM_UP + case["steps"]):
        is_timed = number % 2 == 0
        record.clock = by_wall if is_timed else ThreadClock()
        dist.barrier()
        begin = time.perf_counter()
        pipe.step(batch)
        dist.barrier()
        if number < WARM_UP:
            continue
        if is_timed:
            steps.append(time.perf_counter() - begin)
        else:
            for name, start, end in record.spans:
                op = parse_op(name)
                taken[f"{op.kind} {op.stage}"].append(end - start)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, {name: median(times) for name, times in taken.items()})
    if pipe.runtime.rank == 0:
        ops = {name: seconds for own in found for name, seconds in own.items()}
        result.write_text(json.dumps({"steps": steps, "ops": ops}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
