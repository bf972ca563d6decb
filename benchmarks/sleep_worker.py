"""One contender of ``vs_torch.py --part b``: pipelines whose stages only sleep, all cases in one run.

A layer sleeps in its forward, in the gradient of its input and in that of its weight, each a registered
op.  Autograd sees two nodes that are added up, because torch splits the backward by autograd's nodes: one
node that gives both gradients would run twice.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch_pipeline import TorchPipeline
from worker import Worker

import fxpipe
from fxpipe.schedule.costs import StageCost, chain
from fxpipe.schedule.ops import Phase
from fxpipe.schedule.simulation.simulator import simulate

WIDTH = 8
WARM_UP = 1
PR_SET_TIMERSLACK = 29

#: Seconds that a call of an op takes beside its sleep, on this rank: an op of 20 ms takes its caller 20 ms.
_call = 0.0


def _sleeping(x: Tensor, seconds: float) -> Tensor:
    # No look at the clock before the end: ranks whose ops end together would wait for each other's core.
    time.sleep(max(0.0, seconds - _call))
    return x.clone()


for name in ("forward", "input_grad", "weight_grad"):
    torch.library.define(f"bench::{name}", "(Tensor x, float seconds) -> Tensor")
    torch.library.impl(f"bench::{name}", "CPU", _sleeping)
    torch.library.register_fake(f"bench::{name}", lambda x, seconds: torch.empty_like(x))
ops = torch.ops.bench


class _Data(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return ops.forward(x, seconds)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ops.input_grad(gradient, ctx.seconds), None


class _Weight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ops.weight_grad(gradient, ctx.seconds), None


class Sleep(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return _Data.apply(x, self.seconds) + _Weight.apply(self.weight, self.seconds)


class Start(nn.Module):
    """A parameter before the first layer, broadcast, so that the layer's input gradient is needed too."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class Sleeper(nn.Module):
    def __init__(self, stages: int, seconds: float) -> None:
        super().__init__()
        self.start = Start()
        self.layers = nn.ModuleList(Sleep(seconds) for _ in range(stages))

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for layer in self.layers:
            x = layer(x)
        return mean_square(x)


def mean_square(x: Tensor, target: Tensor | None = None) -> Tensor:
    return (x * x).mean()


def batch_of(microbatches: int) -> Tensor:
    return torch.linspace(0, 1, microbatches * WIDTH).reshape(microbatches, WIDTH)


Contender = tuple[Callable[[], float | None], Callable[[], None], float]
"""The step, what is done between steps, and the seconds that the step takes when simulated."""


def fxpipe_contender(worker: Worker, case: dict[str, Any], seconds: float) -> Contender:
    """``seconds`` are those of one phase of one layer."""
    stages, microbatches = worker.ranks * case["stages_per_rank"], case["microbatches"]
    model = Sleeper(stages, seconds)
    pipe = fxpipe.compile(
        model,
        (batch_of(1),),
        ranks=worker.ranks,
        microbatches=microbatches,
        schedule=case["schedule"],
        stages_per_rank=case["stages_per_rank"],
        placement=case["placement"],
        split_points=[f"layers.{i}" for i in range(1, stages)],
        costs="measured",  # from shapes alone nobody knows how long an op sleeps
    )
    if pipe.graph is not None:
        _check_split(pipe)
    even = StageCost(seconds, seconds, seconds)
    simulated = simulate(pipe.schedule, chain([even] * stages)).seconds
    batch = (batch_of(microbatches),)

    def zero_grad() -> None:
        for parameter in pipe.parameters.values():
            if parameter.grad is not None:
                parameter.grad.zero_()

    return lambda: float(pipe.step(batch)), zero_grad, simulated


def _check_split(pipe: fxpipe.Pipeline) -> None:
    """Every stage sleeps once in each phase, or the simulated time would be another program's.  Where the
    schedule runs every B and W as one op, one section has both."""
    backward = {"bench::input_grad", "bench::weight_grad"}
    for stage in pipe.stages:
        slept: list[tuple[bool, str]] = []
        for section in stage.sections:
            targets = [str(getattr(n.target, "_schema", "")).split("(")[0] for n in section.graph.nodes]
            slept += [(section.phase is Phase.F, t) for t in targets if t in backward | {"bench::forward"}]
        if sorted(slept) != sorted([(True, "bench::forward"), *((False, t) for t in backward)]):
            raise SystemExit(f"stage {stage.index} sleeps in {slept}")


def torch_contender(worker: Worker, case: dict[str, Any], seconds: float) -> Contender:
    microbatches = case["microbatches"]

    def part(stage: int) -> nn.Module:
        return nn.Sequential(*([Start()] if stage == 0 else []), Sleep(seconds))

    pipeline = TorchPipeline(case["schedule"], worker.rank, worker.ranks, microbatches, part, mean_square)
    # torch does all of the first stage's backward in W.
    first, even = StageCost(seconds, 0.0, 2 * seconds), StageCost(seconds, seconds, seconds)
    costs = chain([first] + [even] * (len(pipeline.placement) - 1))
    simulated = simulate(pipeline.as_schedule(), costs).seconds
    batch = batch_of(microbatches)
    return lambda: pipeline.step(batch, batch), pipeline.zero_grad, simulated


CONTENDERS = {"fxpipe": fxpipe_contender, "torch": torch_contender}


def overshoot(seconds: float) -> float:
    """How much longer than it should a sleeping op takes: the median of 20, in seconds."""
    x, took = torch.zeros(1, WIDTH), []
    for _ in range(20):
        before = time.perf_counter()
        ops.forward(x, seconds)
        took.append(time.perf_counter() - before)
    return statistics.median(took) - seconds


def main() -> None:
    global _call
    # Wake from sleeps at once, not with the 50 µs of delay that Linux allows itself by default.
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)
    worker = Worker.join()
    _call = overshoot(worker.case["sleep"])
    measured = []
    for case in worker.case["cases"]:
        seconds = worker.case["sleep"]
        step, reset, simulated = CONTENDERS[worker.case["contender"]](worker, case, seconds)
        taken, loss = worker.time_steps(step, reset, WARM_UP, worker.case["steps"])
        measured.append({"seconds": taken, "simulated": simulated, "loss": loss})
    worker.finish({"cases": measured, "overshoot": max(worker.gather(overshoot(worker.case["sleep"])))})


if __name__ == "__main__":
    main()
