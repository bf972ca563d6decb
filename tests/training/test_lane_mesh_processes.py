"""Lanes of two dimensions as processes: values, norms, checkpoints on other meshes, beside one process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from launch import forked
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from zoo import relative_error

import fxpipe

sys.path.append(str(Path(__file__).parent.parent / "capture"))
from test_lane_meshes import PLACEMENTS, Layer, Net, Table

HALF, STEPS, CLIP = 2, 3, 0.4
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def made() -> Net:
    torch.manual_seed(0)
    return Net(Layer(), Table(), Layer(), Table())


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(12, (8, 4), generator=generator) for _ in range(STEPS)]


def plain() -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and the last weights of one process."""
    net, losses = made(), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-2)
    for ids in batches():
        loss = net(ids)
        loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return losses, net.state_dict()


def on_two_dimensions() -> fxpipe.Pipeline:
    """One rank of 2 x 2 lanes.  Values of the others differ before ``compile`` gives them the first's."""
    mesh, net = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "ep", "tp")), made()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.distributed.get_rank())
    for k, name in ((0, "ep"), (2, "tp")):
        parallelize_module(net.layers[k], mesh[name], PLAN)
    net.layers[1].distribute(mesh["ep", "tp"], **PLACEMENTS["two dimensions of a tensor"])
    net.layers[3].distribute(mesh["ep", "tp"], **PLACEMENTS["one dimension twice"])
    pipe = fxpipe.compile(net, (batches()[0][:2],), ranks=mesh, microbatches=4)
    pipe.load_state_dict(made().state_dict())
    return pipe


def on_one_dimension() -> fxpipe.Pipeline:
    """Two ranks of two lanes."""
    mesh, net = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp")), made()
    for k in (0, 2):
        parallelize_module(net.layers[k], mesh["tp"], PLAN)
    return fxpipe.compile(net, (batches()[0][:2],), ranks=mesh, microbatches=4)


def until(pipe: fxpipe.Pipeline, optimizer, last: int) -> list[float]:
    losses = []
    for ids in batches()[pipe.step_number : last]:
        losses.append(pipe.step((ids,)).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def run(directory: Path) -> None:
    torch.distributed.init_process_group("gloo")
    losses, state = plain()
    for there, back in ((on_two_dimensions, on_one_dimension), (on_one_dimension, on_two_dimensions)):
        at = directory / there.__name__
        found = []
        for compiled, end in ((there, HALF), (back, STEPS)):
            pipe = compiled()
            pipe.load_state_dict(made().state_dict())
            optimizer = pipe.optimizer(torch.optim.AdamW, lr=3e-2, clip_grad_norm=CLIP)
            with fxpipe.Checkpointer(pipe, at, optimizer=optimizer) as checkpoints:
                assert checkpoints.resume() == (compiled is back)
                found += until(pipe, optimizer, end)
                checkpoints.save()
        assert found == pytest.approx(losses, rel=1e-13)
        whole = pipe.full_state_dict(rank=None)
        assert max(relative_error(whole[name], value) for name, value in state.items()) < 1e-13
    print("equal")


@pytest.mark.variation
@pytest.mark.slow
def test_processes_train_as_one_on_meshes_of_lanes(tmp_path):
    result = forked(4, run, tmp_path, dtype=torch.float64, logs=tmp_path / "logs")
    assert result.code == 0, result
    assert all("equal" in out for out in result.stdout)
