"""One run of ``replicas.py``, part overlap: replicas of a pipeline whose stages, and links, only sleep."""

from __future__ import annotations

import ctypes
import re
import time
from dataclasses import replace
from typing import Any

import sleep_worker
import torch
import torch.distributed as dist
from sleep_worker import PR_SET_TIMERSLACK, Sleeper, batch_of, overshoot
from worker import Worker

import fxpipe
from fxpipe.runtime.ranks.replicas import DistributedReplicas
from fxpipe.schedule.costs import Exchange, StageCost, chain
from fxpipe.schedule.simulation.simulator import simulate


def compiled(case: dict[str, Any], seconds: float) -> fxpipe.Pipeline:
    stages = case["ranks"] * case["stages_per_rank"]
    pipe = fxpipe.compile(
        Sleeper(stages, seconds),
        (batch_of(1),),
        ranks=case["ranks"],
        microbatches=case["microbatches"],
        schedule=case["schedule"],
        stages_per_rank=case["stages_per_rank"],
        placement="plain",
        split_points=[f"layers.{i}" for i in range(1, stages)],
        costs="measured",  # from shapes alone nobody knows how long an op sleeps
    )
    if case["overlaps"]:
        return pipe
    programs = tuple(map(with_sums_at_the_end, pipe.artifact.programs))
    return replace(pipe, artifact=replace(pipe.artifact, programs=programs))


def with_sums_at_the_end(program: str) -> str:
    sums = re.findall(r"rt\.reduce_gradients\(\d+\)", program)
    program = re.sub(r"rt\.reduce_gradients\(\d+\)(; )?", "pass\\1", program)
    return program.replace("    rt.wait_gradients()", f"    {'; '.join(sums)}\n    rt.wait_gradients()")


def forget_groups(pipe: fxpipe.Pipeline) -> None:
    """End the process groups of a pipeline that is over: each has a thread that wakes 100 times a second."""
    replicas = pipe.runtime.replicas
    assert isinstance(replicas, DistributedReplicas)
    dist.barrier()
    for group in (replicas.group, replicas.control):
        dist.destroy_process_group(group)


def main() -> None:
    # Wake from sleeps at once, not with the 50 µs of delay that Linux allows itself by default.
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)
    worker = Worker.join()
    seconds, exchange = worker.case["sleep"], worker.case["exchange"]
    sleep_worker._call = overshoot(seconds)

    def slept(self: DistributedReplicas, *_: object, **__: object) -> None:
        time.sleep(exchange)

    DistributedReplicas._reduce = slept  # type: ignore[method-assign]
    measured = []
    for case in worker.case["cases"]:
        pipe = compiled(case, seconds)
        stages = len(pipe.stages)
        costs = chain([StageCost(seconds, seconds, seconds)] * stages)
        simulated = simulate(pipe.schedule, replace(costs, exchanges=(Exchange(exchange),) * stages))
        batch = (batch_of(case["microbatches"]) + pipe.replica,)

        def zero_grad(pipe: fxpipe.Pipeline = pipe) -> None:
            for parameter in pipe.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.zero_()

        taken, _ = worker.time_steps(
            lambda pipe=pipe, batch=batch: float(pipe.step(batch)),  # type: ignore[misc]
            zero_grad,
            1,
            worker.case["steps"],
        )
        hidden = simulated.exposed_exchange
        measured.append({"seconds": taken, "simulated": simulated.seconds, "exposed": hidden})
        forget_groups(pipe)
    worker.finish(measured)


if __name__ == "__main__":
    torch.set_grad_enabled(True)
    main()
