"""Measures for ``edges.py``: seconds a step of many, with both validations."""

from __future__ import annotations

import ctypes
import time
from dataclasses import replace
from typing import Any

import gpt2_worker
import sleep_worker
import torch
import torch.distributed as dist
from worker import Worker

import fxpipe
from fxpipe.schedule.costs import StageCost, Update, chain
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.schedule.simulation.steps import simulate_steps
from fxpipe.training.optimizer.speculation_policy import BLOCK, BLOCKS, FIRST

#: The steps before the timed ones; those of "post" have the first trial of whether to go ahead.
WARM_UP = {"barrier": FIRST, "post": FIRST + BLOCKS * BLOCK + 1}


def compiled(worker: Worker) -> tuple[fxpipe.Pipeline, Any, Any]:
    """The pipeline, a batch, and the costs by which its steps are simulated."""
    case = worker.case
    microbatches, stages = case["microbatches"], worker.ranks * case["stages_per_rank"]
    options: dict[str, Any] = {"schedule": case["schedule"], "stages_per_rank": case["stages_per_rank"]}
    options |= {
        "ranks": worker.ranks,
        "microbatches": microbatches,
        "costs": "measured",
        "validation": "post",
    }
    if case["part"] == "sleep":
        model, seconds = sleep_worker.Sleeper(stages, case["sleep"]), case["sleep"]
        points = [f"layers.{i}" for i in range(1, stages)]
        pipe = fxpipe.compile(model, (sleep_worker.batch_of(1),), split_points=points, **options)
        even = StageCost(seconds, seconds, seconds)
        return pipe, (sleep_worker.batch_of(microbatches),), chain([even] * stages)
    pipe = fxpipe.compile(gpt2_worker.build(), gpt2_worker.example(), **options)
    return pipe, gpt2_worker.example(microbatches), pipe.plan.costs


def main() -> None:
    ctypes.CDLL(None).prctl(sleep_worker.PR_SET_TIMERSLACK, 1)
    worker = Worker.join()
    case = worker.case
    if case["part"] == "sleep":
        sleep_worker._call = sleep_worker.overshoot(case["sleep"])
    pipe, batch, costs = compiled(worker)
    rules = {"clip_grad_norm": 1e9, "skip_nonfinite": True, "lr": 1e-5}
    seconds: dict[str, list[float]] = {validation: [] for validation in WARM_UP}
    for _ in range(case["blocks"]):
        for validation, warm_up in WARM_UP.items():
            optimizer = pipe.optimizer(torch.optim.AdamW, validation=validation, fused=True, **rules)
            dist.barrier()
            begun = 0.0
            for k in range(warm_up + case["steps"]):
                if k == warm_up:
                    begun = time.perf_counter()
                loss = pipe.step(batch)
                optimizer.step()
                optimizer.zero_grad()
            own = (time.perf_counter() - begun) / case["steps"]
            seconds[validation].append(max(worker.gather(own)))
            assert optimizer.skipped == 0, loss
    found: dict[str, Any] = {"makespan": simulate(pipe.schedule, costs).seconds}
    if case["part"] == "sleep":
        costs = replace(costs, update=Update())
    for validation in WARM_UP:
        period = simulate_steps(pipe.schedule, costs, validation).period
        found[validation] = {"seconds": seconds[validation], "simulated": period}
    worker.finish(found)


if __name__ == "__main__":
    main()
