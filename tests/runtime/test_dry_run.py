"""A program that runs without the other ranks, before its first step on an accelerator, leaves no trace."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

import fxpipe
from fxpipe.runtime.ranks.dry_run import dry_run
from fxpipe.runtime.ranks.local import LocalComm, LocalWorld
from fxpipe.training.model.accumulators import zero_gradients

WIDTH, RANKS = 8, 2


class Net(nn.Module):
    """Tied over both ranks, with random numbers, a running buffer, and a branch that zeros would not take."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm, self.scale = nn.BatchNorm1d(WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        h = self.norm(nn.functional.dropout(torch.tanh(self.first(x)), 0.2))
        h = self.second(h)
        if h.abs().sum() > 0:
            h = h * 2
        return self.first(h) * self.scale


def loss_fn(output, batch):
    return output.square().sum(), torch.tensor(output.numel())


@pytest.mark.parametrize("offload", [False, True])
def test_a_dry_run_leaves_no_trace(offload):
    torch.manual_seed(0)
    model, batch = Net(), {"x": torch.randn(3 * 4, WIDTH)}
    pipe = fxpipe.compile(
        model,
        {"x": batch["x"][:4]},
        ranks=RANKS,
        microbatches=3,
        loss_fn=loss_fn,
        schedule="1f1b",
        split_points=["second"],
        offload=offload,
    )
    expected = pipe.run_local(batch)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    generator, runner, gradients = torch.get_rng_state(), pipe._runner, 0.0
    for rank in range(RANKS):
        rt = runner._runtime_of(rank, LocalComm(LocalWorld(RANKS), rank), {}, runner._offloader(rank))
        grads = zero_gradients(runner.state, rank)
        dry_run(rt, runner._local_programs[rank].step, batch, grads)
        gradients += sum(float(grad.abs().sum()) for grad in grads.values())
        assert (rt.step_number, rt.current_op, rt.grads, rt.losses.values) == (0, "", {}, [])
        assert rt.record.spans == []
    assert gradients > 0, "the programs have run"
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    model.norm.load_state_dict(nn.BatchNorm1d(WIDTH).state_dict())
    again = pipe.run_local(batch)
    assert torch.equal(again.loss, expected.loss)
    assert all(torch.equal(grad, expected.grads[name]) for name, grad in again.grads.items())


def test_a_program_that_cannot_run_on_zeros_is_a_warning():
    pipe = fxpipe.compile(
        Net(), {"x": torch.randn(4, WIDTH)}, ranks=2, microbatches=1, loss_fn=loss_fn, schedule="1f1b"
    )
    rt = pipe._runner._runtime_of(0, LocalComm(LocalWorld(2), 0), {}, None)

    def step(rt, batch):
        rt.op("F0.0")
        (message,) = rt.comm.wait(rt.comm.receive([((1,), (1,), torch.float32)], 1))
        if message == 0:
            raise ValueError("edited")

    with pytest.warns(UserWarning, match=r"F0\.0 cannot run on zeros \(ValueError: edited\)"):
        dry_run(rt, step, None, {})


def test_what_fails_is_named_by_its_op():
    """As memory that does not suffice."""
    pipe = fxpipe.compile(
        Net(), {"x": torch.randn(4, WIDTH)}, ranks=2, microbatches=1, loss_fn=loss_fn, schedule="1f1b"
    )
    runner = pipe._runner
    rt = runner._runtime_of(0, LocalComm(LocalWorld(2), 0), {}, None)

    def step(rt, batch):
        rt.op("F0.0")
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError):
        dry_run(rt, step, None, {})
    assert rt.current_op == "F0.0"


@pytest.mark.skipif(torch.__version__ < "2.12", reason="its DTensors do not flatten divided tokens")
def test_a_program_that_sums_over_lanes():
    model = nn.Linear(WIDTH, WIDTH)
    with fxpipe.local_lanes(2) as mesh:
        parallelize_module(model, mesh, fxpipe.ContextParallel({"input": 1}))
        pipe = fxpipe.compile(
            model,
            (torch.ones(2, 4, WIDTH),),
            loss_fn=lambda output, _: output.square().mean(),
            ranks=1,
            microbatches=2,
        )
    runner, world = pipe._runner, LocalWorld(1, 1, 2)
    assert "rt.sum_over_lanes(0)" in pipe.artifact.programs[0]
    rt = runner._local_runtime(world, 0, 0, 1)
    grads = zero_gradients(runner.state.of_lane(1), 0)
    assert dry_run(rt, runner._local_programs[0].step, (torch.ones(4, 4, WIDTH),), grads) is not None
    assert grads["weight"].abs().sum() > 0
