"""Lanes that hold zeros behind what they share, as processes: initial values, training, checkpoints."""

from __future__ import annotations

import pytest
import torch
from launch import forked
from safetensors.torch import load_file, save_file
from tensor_parallel import Experts, Words, batch, parallelized
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fxpipe

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("double")]
LANES, OPTIONS = 3, {"lr": 1e-2, "weight_decay": 0.1}


def on_meta() -> Words:
    with torch.device("meta"):
        return Words()


def normal(module: nn.Module) -> None:
    if isinstance(module, Experts):
        for parameter in module.parameters():
            nn.init.normal_(parameter)


def data() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return batch(4)


def uneven(model: nn.Module, mesh: DeviceMesh) -> None:
    parallelized(model, mesh, "uneven")


def train(directory) -> None:
    """One lane has no expert, and one head of four; saved, and loaded once more.  The compiler takes all
    three processes for lanes, as two do not divide them."""
    model = on_meta()
    pipe = fxpipe.compile(
        model, batch(2), batch=4, parallelize=uneven, lanes=(2, LANES), shard="optimizer", schedule="1f1b"
    )
    pipe.initialize(normal, seed=3)
    start = pipe.full_state_dict()
    optimizer = pipe.optimizer(torch.optim.AdamW, **OPTIONS)
    with fxpipe.Checkpointer(pipe, directory / "checkpoints", optimizer=optimizer) as checkpoints:
        pipe.step(data())
        optimizer.step()
        checkpoints.save()
    pipe.save(directory / "saved")
    loaded, end = fxpipe.load(directory / "saved").full_state_dict(), pipe.full_state_dict()
    if dist.get_rank() == 0:
        save_file({name: value.contiguous() for name, value in start.items()}, directory / "start")
        assert all(loaded[name].equal(end[name]) for name in end)
    held = dict(pipe.parameters)["blocks.0.mixture.experts.up"]
    if dist.get_rank() == LANES - 1:  # zeros stay zeros
        assert held.shape[0] == 2
        assert not held.any()


@pytest.mark.variation
def test_it_trains_as_one_process(tmp_path):
    run = forked(LANES, train, tmp_path, dtype=torch.float64, logs=tmp_path)
    assert run.code == 0, run
    model = on_meta()
    pipe = fxpipe.compile(model, batch(2), ranks=1, microbatches=2, schedule="1f1b")
    pipe.initialize(normal, seed=3)
    start, expected = load_file(tmp_path / "start"), Words()
    assert all(value.equal(start[name]) for name, value in pipe.full_state_dict().items())

    expected.load_state_dict(start)
    plain = torch.optim.AdamW(expected.parameters(), **OPTIONS)
    for _ in range(2):  # with the optimizer's state of the checkpoint in the second
        for rows in zip(*(value.split(2) for value in data().values()), strict=True):
            (expected(*rows) / 2).backward()
        plain.step()
        plain.zero_grad()
    optimizer = pipe.optimizer(torch.optim.AdamW, **OPTIONS)
    with fxpipe.Checkpointer(pipe, tmp_path / "checkpoints", optimizer=optimizer) as checkpoints:
        assert checkpoints.resume()
    pipe.step(data())
    optimizer.step()
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(pipe.full_state_dict()[name], value, atol=1e-12, rtol=0)
