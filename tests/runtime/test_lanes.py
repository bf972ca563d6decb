"""Ops between lanes; and lanes as processes: the bits of one process, the norm, the whole state."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch
from launch import forked
from tensor_parallel import Words, batch, parallelized
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from zoo import relative_error

import fxpipe
from fxpipe.errors import RunError
from fxpipe.plan.tensors import sum_over_ranks
from fxpipe.runtime.program import lanes
from fxpipe.runtime.program.lanes import AloneLane, running
from fxpipe.runtime.ranks.lanes import LocalLanes
from fxpipe.runtime.ranks.local import LocalWorld
from fxpipe.runtime.ranks.turns import run_all

ops = torch.ops.lanes
STEPS, CLIP = 2, 0.25
OPTIONS = {"ranks": 2, "microbatches": 2, "schedule": "zb-h1"}


def on_lanes(number, function):
    """What each lane of one rank returns."""
    world = LocalWorld(1, 1, number)

    def main(lane):
        with running(LocalLanes(world, 0, 0, lane)):
            return function(lane)

    mains = [lambda lane=lane: main(lane) for lane in range(number)]
    return run_all(world, mains, lambda rank: "its op", 1, torch.device("cpu"))


@pytest.mark.parametrize("shape", [(4, 6), (7,), (1,), ()])
def test_sums_are_added_in_the_order_of_the_lanes(shape):
    given = [torch.randn(shape).bfloat16() for _ in range(3)]
    for found in on_lanes(3, lambda lane: lanes.all_reduce(given[lane], "sum", 3)):
        assert torch.equal(found, sum_over_ranks(*given))
    for how, expected in {"max": torch.stack(given).amax(0), "min": torch.stack(given).amin(0)}.items():
        for found in on_lanes(3, lambda lane, how=how: lanes.all_reduce(given[lane], how, 3)):
            assert torch.equal(found, expected)


def test_shares():
    given = torch.arange(24.0).view(2, 6, 2)
    parts = on_lanes(2, lambda lane: ops.part(given, 1, 2))
    assert torch.equal(torch.cat(parts, 1), given)
    for found in on_lanes(2, lambda lane: lanes.all_gather(given[lane], 2)):
        assert torch.equal(found, given.flatten(0, 1))
    sums = on_lanes(2, lambda lane: lanes.reduce_scatter(given[lane], "avg", 2))
    assert torch.equal(torch.cat(sums), given.mean(0))
    swapped = on_lanes(2, lambda lane: lanes.all_to_all(given[lane], 2))
    assert torch.equal(torch.stack(swapped), given.view(2, 2, 3, 2).transpose(0, 1).flatten(1, 2))
    assert on_lanes(3, lambda lane: int(ops.number(5, 16, device="cpu"))) == [5, 21, 37]


def test_an_exchange_in_two_is_that_in_one():
    """Also where others begin before it ends; until then nobody has what the others give."""
    given = torch.randn(2, 6, 2)

    def exchanged(lane):
        x = given[lane]
        shares, all_rows = lanes.begin_all_to_all(x, 2), lanes.begin_all_gather(x, 2)
        others = lanes.begin_all_to_all(2 * x, 2)
        before = [shares.clone(), all_rows.clone()]
        ends = [lanes.end(each, 2) for each in (all_rows, others, shares)]
        summed = ops.sum_shares(lanes.end(lanes.begin_all_to_all(x, 2), 2), "sum", 2)
        whole = lanes.all_gather(x, 2), lanes.all_to_all(2 * x, 2), lanes.all_to_all(x, 2)
        return [*ends, summed], [*whole, lanes.reduce_scatter(x, "sum", 2)], before

    for found, expected, before in on_lanes(2, exchanged):
        assert all(map(torch.equal, found, expected))
        assert not any(each.any() for each in before)
    empty = on_lanes(2, lambda lane: lanes.end(lanes.begin_all_gather(torch.zeros(0, 3), 2), 2))
    assert [x.shape for x in empty] == [(0, 3)] * 2


def test_an_exchange_ends_once():
    def ended_twice(lane):
        begun = lanes.begin_all_to_all(torch.ones(2), 2)
        return lanes.end(begun, 2), lanes.end(begun, 2)

    with pytest.raises(RunError, match="has not begun, or has ended before"):
        on_lanes(2, ended_twice)


def test_the_layouts_that_a_trace_predicts_are_those_of_the_ops():
    x = torch.randn(6, 4).t().contiguous().t()
    calls = [(ops.all_reduce, "sum", 2), (ops.all_gather, 2), (ops.reduce_scatter, "sum", 2)]
    calls += [(ops.begin_all_to_all, 2), (ops.begin_all_gather, 2)]
    of_begun = [(ops.end, 2), (ops.sum_shares, "max", 2)]  # which is contiguous
    for op, *rest in [*calls, (ops.all_to_all, 2), (ops.part, 0, 2), *of_begun]:
        x = x.contiguous() if (op, *rest) in of_begun else x
        with running(AloneLane(1, 2)):
            found = op(x, *rest)
        expected = op(x.to("meta"), *rest)
        assert (found.shape, found.stride(), found.dtype) == (
            expected.shape,
            expected.stride(),
            expected.dtype,
        )


def test_an_op_between_lanes_outside_of_a_step_has_none():
    with pytest.raises(RunError, match="outside of a step"):
        lanes.all_reduce(torch.ones(2), "sum", 2)


def test_a_lane_that_waits_for_ever_is_a_deadlock():
    def one_alone(lane):
        return lanes.all_gather(torch.ones(1), 2) if lane else None

    with pytest.raises(fxpipe.DeadlockError, match="rank 1 waits for the lanes of rank 0"):
        on_lanes(2, one_alone)


def trained(mesh, plan):
    torch.manual_seed(0)
    model = Words(dropout=0.25)
    whole = {name: 1.5 * value for name, value in model.state_dict().items()}
    with parallelized(model, mesh, plan):
        pipe = fxpipe.compile(model, batch(2), **OPTIONS)
    pipe.load_state_dict(whole)
    return pipe


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.detach().reshape(-1).view(torch.int32).tolist()


class Numbered(nn.Module):
    """Keeps the number of its lane."""

    def __init__(self, mesh):
        super().__init__()
        self.up, self.down = nn.Linear(2, 4), nn.Linear(4, 2)
        parallelize_module(self, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        self.lane = mesh.get_local_rank()

    def forward(self, x):
        return self.down(self.up(x) + self.lane).square().mean()


def rank_of_four(plan):
    """Print the loss and gradients of the first step, and at the end the norms and the whole state."""
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))["tp"]
    pipe = trained(mesh, plan)
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.5, clip_grad_norm=CLIP)
    torch.manual_seed(7)
    data, norms = batch(4), []
    for step in range(STEPS):
        loss = pipe.step(data)
        if not step:
            grads = {name: bits(grad) for name, grad in pipe.runtime.grads.items()}
            print(json.dumps([bits(loss), grads]))
        optimizer.step()
        optimizer.zero_grad()
        norms.append(float(optimizer.last_norm))
    state = {name: value.tolist() for name, value in pipe.full_state_dict().items()}
    print(json.dumps([norms, state]))
    check_small_tensors(pipe.runtime.lanes)
    try:
        edited(pipe).step(data)
    except fxpipe.RunError as error:
        print(f"edited: {error}")
    try:
        torch.manual_seed(0)
        pipe = fxpipe.compile(Numbered(mesh), (torch.ones(1, 2),), **OPTIONS)
    except fxpipe.CaptureError as error:
        print(f"refused: {error}")


def check_small_tensors(own):
    """Of fewer elements than lanes, of which some lanes add up none."""
    with running(own):
        for shape in ((), (1,), (0, 3)):
            found = lanes.all_reduce(torch.full(shape, 1.0 + own.index), "sum", 2)
            assert torch.equal(found, torch.full(shape, 3.0)), shape


def edited(pipe: fxpipe.Pipeline) -> fxpipe.Pipeline:
    """A new pipeline with the first two collectives of a program in other order, on the last process."""
    programs = [*pipe.artifact.programs]
    if pipe.process.world_rank == 3:
        lines = programs[1].splitlines(keepends=True)
        a, b, *_ = (k for k, line in enumerate(lines) if "= lanes." in line)
        lines[a], lines[b] = lines[b], lines[a]
        programs[1] = "".join(lines)
    return replace(pipe, artifact=replace(pipe.artifact, programs=tuple(programs)))


def test_local_lanes_leave_the_hook_of_uncaught_errors_as_it_is():
    hook = sys.excepthook
    with fxpipe.local_lanes(2):
        assert sys.excepthook is hook
    assert sys.excepthook is hook


@pytest.mark.variation
@pytest.mark.slow
def test_processes_have_the_bits_of_one_process_and_the_norm_of_the_whole_model(tmp_path):
    run = forked(4, rank_of_four, "sequence", dtype=torch.float32, logs=tmp_path / "logs")
    assert run.code == 0, run
    assert all("refused: The model of process 1, the last lane of rank 0" in out for out in run.stdout)
    message = "edited: Rank 3, of replica 0, lane 1, runs another rank1.py than rank 2, of replica 0, lane 0"
    assert all(message in out for out in run.stdout)
    found = [[json.loads(line) for line in out.splitlines() if line.startswith("[")] for out in run.stdout]
    with fxpipe.local_lanes(2) as mesh:
        pipe = trained(mesh, "sequence")
    torch.manual_seed(7)
    data = batch(4)
    for step in range(STEPS):
        local = pipe.run_local(data, step=step)
        if not step:
            for (loss, grads), rt in zip((own[0] for own in found), local.runtimes, strict=True):
                assert loss == bits(local.loss)
                assert grads == {name: bits(grad) for name, grad in rt.grads.items()}
        # One process with the whole model: the norm counts each share once.
        parameters = {name: nn.Parameter(value) for name, value in pipe.full_state_dict().items()}
        for name, parameter in parameters.items():
            parameter.grad = local.grads[name].clone()
        norm = nn.utils.clip_grad_norm_(parameters.values(), CLIP)
        torch.optim.SGD(parameters.values(), lr=0.5).step()
        assert all(own[1][0][step] == pytest.approx(float(norm), rel=1e-6) for own in found)
        pipe.load_state_dict({name: parameter.detach() for name, parameter in parameters.items()})
    last = pipe.full_state_dict()
    for name, value in found[0][1][1].items():
        assert relative_error(torch.tensor(value), last[name]) < 1e-6
