"""One run of ``lengths.py``: a pipeline whose stages sleep as long as the length of a microbatch takes."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from lengths import LATENCY, LONGEST, MEMORY, PER_TOKEN, RANKS, stage_cost
from sleep_worker import PR_SET_TIMERSLACK, WIDTH, Start, mean_square
from torch import Tensor, nn
from worker import Worker

import fxpipe
from fxpipe.compiler.step_writer import StepWriter
from fxpipe.cost.batch_order import BatchPlanner
from fxpipe.schedule.costs import Costs, chain
from fxpipe.training.run.batch_orders import BatchOrders

PHASES = ("forward", "backward", "weight")


def sleeping(phase: str) -> Any:
    def sleep(x: Tensor) -> Tensor:
        time.sleep(getattr(stage_cost([x.shape[1]]), phase))
        return x.clone()

    return sleep


for phase in PHASES:
    torch.library.define(f"lengths::{phase}", "(Tensor x) -> Tensor")
    torch.library.impl(f"lengths::{phase}", "CPU", sleeping(phase))
    torch.library.register_fake(f"lengths::{phase}", torch.empty_like)
ops = torch.ops.lengths


class _Data(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return ops.forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return ops.backward(gradient)


class _Weight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return ops.weight(gradient)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return _Data.apply(x) + _Weight.apply(self.weight.expand_as(x))


class Sleeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start = Start()
        self.layers = nn.ModuleList(Layer() for _ in range(RANKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for layer in self.layers:
            x = layer(x)
        return mean_square(x)


class Timed(BatchPlanner):
    """Orders for the seconds that the stages sleep, and for memory by tokens."""

    def costs(self, lengths: Mapping[str, int], share: float = 1.0) -> Costs:
        tokens = lengths["time"]
        return chain([stage_cost([tokens])] * RANKS, seconds=LATENCY + PER_TOKEN * tokens)


def compiled(microbatches: int) -> fxpipe.Pipeline:
    return fxpipe.compile(
        Sleeper(),
        (torch.ones(1, LONGEST, WIDTH),),
        ranks=RANKS,
        microbatches=microbatches,
        schedule="zb-h1",
        split_points=[f"layers.{i}" for i in range(1, RANKS)],
        dimensions={"time": LONGEST},
    )


def in_own_order(pipe: fxpipe.Pipeline) -> fxpipe.Pipeline:
    writer = pipe.artifact.write_step
    if writer is None:  # of another rank than the first
        return pipe
    assert isinstance(writer, StepWriter)
    plan = replace(pipe.artifact.plan, limits=(1.0 * MEMORY * LONGEST,) * RANKS)
    timed = replace(writer, orders=Timed.of(plan))
    return replace(pipe, artifact=replace(pipe.artifact, write_step=timed))


def in_fixed_order(pipe: fxpipe.Pipeline) -> fxpipe.Pipeline:
    return replace(pipe, artifact=replace(pipe.artifact, write_step=None))


def batch_of(tokens: list[int]) -> list[tuple[Tensor]]:
    return [(torch.ones(1, n, WIDTH),) for n in tokens]


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)
    worker = Worker.join()
    measured = []
    for each in worker.case["batches"]:
        pipe = compiled(len(each["packed"]))
        kinds = {"packed": in_fixed_order(pipe), "order 2048": in_own_order(pipe)}
        result: dict[str, Any] = {name: [] for name in (*kinds, "waits")}
        for _ in range(worker.case["rounds"]):
            for name, pipe in kinds.items():
                batch = batch_of(each[name])
                # The order is found once, as behind ``prepare``.
                taken, _ = worker.time_steps(lambda: float(pipe.step(batch)), lambda: None, 1, 2)  # noqa: B023
                result[name] += taken
        own = kinds["order 2048"]
        result["waits"] = waits_for_orders(own, each["order 2048"])
        if worker.rank == 0:
            writer = own.artifact.write_step
            assert isinstance(writer, StepWriter)
            timeline = writer.orders.timeline([{"time": n} for n in each["order 2048"]])
            result["simulated"] = timeline.seconds
        measured.append(result)
    worker.finish(measured)


def waits_for_orders(pipe: fxpipe.Pipeline, tokens: list[int]) -> list[float]:
    """Seconds that a step waits for an order that it has not run before, where each is prepared one ahead."""
    waited: list[float] = []
    found = BatchOrders.of

    def timed(self: BatchOrders, *arguments: Any) -> Any:
        begin = time.perf_counter()
        programs = found(self, *arguments)
        waited.append(time.perf_counter() - begin)
        return programs

    batches = [batch_of([max(2, n - 3 * k) for n in tokens]) for k in range(1, 5)]
    BatchOrders.of = timed  # type: ignore[method-assign]
    for batch, following in pairwise(batches):
        pipe.prepare(following)
        pipe.step(batch)
    pipe.step(batches[-1])
    BatchOrders.of = found  # type: ignore[method-assign]
    return waited[1:]  # the first was not prepared


if __name__ == "__main__":
    main()
