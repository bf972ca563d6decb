"""One run of ``hidden_exchanges.py``: layers that sleep, and lanes whose link takes its time."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from hidden_exchanges import LANES, LAYERS, MICROBATCHES, RANKS, SLEEP, STEPS
from sleep_worker import PR_SET_TIMERSLACK, WIDTH, Sleep, Start, mean_square
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import parallelize_module
from worker import Worker

import fxpipe
from fxpipe.compiler.choice import costing
from fxpipe.cost import analytic, nodes
from fxpipe.cost.devices.known_devices import CPU
from fxpipe.runtime.ranks.lanes import DistributedLanes
from fxpipe.schedule.bound import lower_bound
from fxpipe.schedule.costs import StageCost
from fxpipe.schedule.ops import Color, Phase
from fxpipe.schedule.simulation.simulator import simulate

ROWS = 2 * LANES


class Layer(nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.sleep, self.mesh = Sleep(SLEEP), mesh

    def forward(self, x: Tensor) -> Tensor:
        shares = [ROWS // LANES] * LANES
        return functional.all_to_all_single_autograd(self.sleep(x), shares, shares, self.mesh.get_group())


class Sleeper(nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.start, self.mesh = Start(), mesh
        self.layers = nn.ModuleList(Layer(mesh) for _ in range(RANKS * LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for layer in self.layers:
            x = layer(x)
        # The loss of all lanes' rows, the same on each.
        share = DTensor.from_local(mean_square(x) / LANES, self.mesh, [Partial()], run_check=False)
        return share.redistribute(placements=[Replicate()]).to_local()


class SlowLink:
    """Gives each exchange its time on a link that carries one after the other."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.free = seconds, 0.0
        self.due: dict[dist.Work, float] = {}

    def install(self) -> None:
        exchanged, wait = DistributedLanes._exchanged, DistributedLanes._wait

        def slow_exchanged(lanes: DistributedLanes, parts: Any) -> Any:
            made = exchanged(lanes, parts)
            if made[0].numel() > 64:  # the loss takes no time
                self.free = max(time.monotonic(), self.free) + self.seconds
                self.due[made[1]] = self.free
            return made

        def slow_wait(lanes: DistributedLanes, work: dist.Work) -> None:
            wait(lanes, work)
            time.sleep(max(0.0, self.due.pop(work, 0.0) - time.monotonic()))

        DistributedLanes._exchanged, DistributedLanes._wait = slow_exchanged, slow_wait  # type: ignore


def compiled(schedule: str, parts: Any) -> fxpipe.Pipeline:
    mesh = init_device_mesh("cpu", (RANKS, LANES), mesh_dim_names=("pp", "tp"))
    # Each lane has rows of its own, so a parameter's gradient is the sum of theirs.
    plan = {"start": fxpipe.SummedGradients(), "layers.*.sleep": fxpipe.SummedGradients()}
    model, rows = (
        parallelize_module(Sleeper(mesh["tp"]), mesh["tp"], plan),
        torch.linspace(0, 1, ROWS * WIDTH).reshape(ROWS, WIDTH),
    )
    stages = RANKS * (2 if schedule == "zb-v" else 1)
    return fxpipe.compile(
        model,
        (rows,),
        ranks=mesh,
        microbatches=MICROBATCHES,
        schedule=schedule,
        parts=parts,
        split_points=[f"layers.{k * RANKS * LAYERS // stages}" for k in range(1, stages)],
        costs="measured",  # from shapes alone nobody knows how long an op sleeps
    )


def seconds_of(graph: fx.Graph, exchange: float) -> float:
    """Of a section: what its layers sleep, and the exchanges that it waits for."""
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    sleeps = sum(name.startswith("bench.") for name in names)
    return SLEEP * sleeps + exchange * names.count("lanes.all_to_all.default")


def known_seconds(exchange: float) -> Callable[..., Mapping[Color, float]]:
    """In place of what is measured, which other processes of this machine disturb."""
    return lambda sections, *rest: {each.color: seconds_of(each.graph, exchange) for each in sections}


def step(pipe: fxpipe.Pipeline, batch: tuple[Tensor]) -> float:
    return float(pipe.step(batch))


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)
    worker = Worker.join()
    exchange = worker.case["exchange"]

    def sent(node: Any, size: Any = None) -> float:
        """Bytes that take the seconds of an exchange on the link of the plan."""
        return exchange * link.bandwidth if node.meta["val"].numel() > 8 else 0.0

    link = CPU.intra
    nodes.sent_between_lanes = analytic.sent_between_lanes = sent  # type: ignore
    costing.measured_seconds = known_seconds(exchange)  # type: ignore
    slow = SlowLink(exchange)
    slow.install()
    results = []
    for schedule, parts in worker.case["ways"]:
        pipe = compiled(schedule, parts)
        batch = (torch.linspace(0, 1, ROWS * WIDTH * MICROBATCHES).reshape(-1, WIDTH),)
        timed = []
        for slow.seconds in (exchange, 0.0):
            taken, _ = worker.time_steps(partial(step, pipe, batch), lambda: None, 1, STEPS)
            timed.append(statistics.median(taken))
        costs, made = pipe.plan.costs, pipe.schedule
        if worker.rank:
            continue
        slept = {s.color: seconds_of(s.graph, 0.0) for stage in pipe.stages for s in stage.sections}
        times = [[slept.get(Color(k, phase), 0.0) for phase in Phase] for k in range(len(costs.stages))]
        pure = replace(
            costs,
            stages=tuple(StageCost(*each) for each in times),
            edges=tuple(replace(edge, exchange=0.0) for edge in costs.edges),
        )
        bounds = [lower_bound(each, made.placement, MICROBATCHES) for each in (costs, pure)]
        results.append({
            "seconds": timed[0],
            "without": timed[1],
            "simulated": simulate(made, costs).seconds,
            "simulated_without": simulate(made, pure).seconds,
            "bound": bounds[0] - bounds[1],
        })  # fmt: skip
    worker.finish(results)


if __name__ == "__main__":
    main()
