"""One run of ``divided_parts.py``."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from divided_parts import LAYERS, REPLICAS, SLEEP
from gpt2_worker import build, example
from sleep_worker import PR_SET_TIMERSLACK, Sleep, Start, _Data, _Weight, batch_of, mean_square
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from worker import Worker, resident, start_counting_memory

import fxpipe
from fxpipe.compiler import compile as compiling
from fxpipe.compiler import options
from fxpipe.runtime.ranks.replicas import DistributedReplicas
from fxpipe.schedule.costs import Exchange, StageCost, chain
from fxpipe.schedule.simulation.simulator import simulate

LEARNING_RATE = 1e-4


class Layer(Sleep):
    """One whose input gradient needs the weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Data.apply(x, self.seconds) * _Weight.apply(self.weight, self.seconds)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start, self.layers = Start(), nn.Sequential(*(Layer(SLEEP) for _ in range(LAYERS)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return mean_square(self.layers(self.start(x)))


def for_each_use(settings: options.Settings, chosen: Callable[[options.Settings], Any]) -> Any:
    """In place of ``with_uses``: a model that sleeps is too small for a limit."""
    settings = replace(settings, per_use=True)
    return settings, chosen(settings)


def sleeping(worker: Worker) -> None:
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)
    case = worker.case
    microbatches, exchange = case["microbatches"], case["exchange"]

    def slept(self: DistributedReplicas, *_: object, **__: object) -> None:
        time.sleep(exchange)

    DistributedReplicas._reduce = DistributedReplicas._gather = slept  # type: ignore
    compiling.with_uses = for_each_use  # type: ignore
    pipe = fxpipe.compile(
        Layers(),
        (batch_of(1),),
        ranks=1,
        replicas=REPLICAS,
        microbatches=microbatches,
        schedule=case["schedule"],
        shard="parameters",
        # On one rank these are parts as well, and from shapes alone nobody knows how long an op sleeps.
        stages_per_rank=LAYERS,
        split_points=[f"layers.{k}" for k in range(1, LAYERS)],
    )
    costs = chain([StageCost(SLEEP, SLEEP, SLEEP)] * LAYERS)
    costs = replace(costs, exchanges=(Exchange(exchange, exchange, per_use=True),) * LAYERS)
    simulated = simulate(pipe.schedule, costs)
    batch = (batch_of(microbatches),)
    taken, _ = worker.time_steps(lambda: float(pipe.step(batch)), lambda: None, 1, case["steps"])
    worker.finish(
        {"seconds": taken, "simulated": simulated.seconds, "work": 3 * SLEEP * LAYERS * microbatches}
    )


Contender = tuple[Callable[[], float], Callable[[], None]]


def fxpipe_contender(case: dict[str, Any]) -> Contender:
    pipe = fxpipe.compile(
        build(),
        example(),
        ranks=1,
        replicas=REPLICAS,
        microbatches=4,
        schedule=case["schedule"],
        shard="parameters",
        parts=case["parts"],
        memory_limit=case["limit"],
    )
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=LEARNING_RATE, clip_grad_norm=1.0)
    batch = example(4)

    def step() -> float:
        loss = float(pipe.step(batch))
        optimizer.step()
        return loss

    return step, optimizer.zero_grad


def torch_contender(case: dict[str, Any]) -> Contender:
    mesh, model = init_device_mesh("cpu", (REPLICAS,)), build()
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, reshard_after_forward=case["reshard"])
    fully_shard(model, mesh=mesh, reshard_after_forward=case["reshard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    batches = [{name: x[k : k + 1] for name, x in example(4).items()} for k in range(4)]

    def step() -> float:
        total = 0.0
        for batch in batches:
            loss = model(**batch).loss / 4
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    return step, partial(optimizer.zero_grad, set_to_none=True)


def training(worker: Worker) -> None:
    contender = {"fxpipe": fxpipe_contender, "torch": torch_contender}[worker.case["contender"]]
    before = start_counting_memory()
    step, reset = contender(worker.case)
    seconds, loss = worker.time_steps(step, reset, 1, worker.case["steps"])
    memory = worker.gather(resident() - before)
    worker.finish({"seconds": seconds, "loss": loss, "peak": memory})


if __name__ == "__main__":
    joined = Worker.join()
    {"overlap": sleeping, "torch": training}[joined.case["part"]](joined)
