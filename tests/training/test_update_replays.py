"""Clipping and updates that are replays of captured ones, by a tape in place of a GPU's graph."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from tape import Tape
from torch import nn
from torch.optim import adam
from zoo import captured_once

import fxpipe
from fxpipe.runtime.replays import replays
from fxpipe.runtime.replays.replays import TRIALS
from fxpipe.training.optimizer import make_optimizer, update_replays

STEPS = TRIALS + 4


@pytest.fixture(autouse=True)
def tape() -> Iterator[None]:
    """Also lets torch's optimizers keep their counts on the CPU."""
    with (
        mock.patch.object(adam, "_get_capturable_supported_devices", return_value=["cpu"]),
        mock.patch.object(replays, "recorder_of", return_value=Tape),
        mock.patch.object(update_replays, "recorder_of", return_value=Tape),
        mock.patch.object(make_optimizer, "recorder_of", return_value=Tape),
    ):
        yield


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.second(self.first(x).tanh()).square().mean()


def batch(step: int) -> torch.Tensor:
    return (1 + step % 3) * torch.randn(4, 4, generator=torch.Generator().manual_seed(step))


def trained(
    replay: bool, cls: Any = torch.optim.AdamW, half: bool = False, between: Any = None, **options: Any
):
    """The pipeline's optimizer, and the weights behind each update."""
    torch.manual_seed(0)
    model = Net().to(torch.bfloat16 if half else torch.float32)
    dtype = next(model.parameters()).dtype
    with captured_once(Net, half):
        pipe = fxpipe.compile(
            model, (batch(0)[:2].to(dtype),), ranks=1, microbatches=2, replay=replay, check=False
        )
    options = {"lr": torch.tensor(0.05), "capturable": True} | options
    optimizer, weights = pipe.optimizer(cls, **options), []
    for step in range(STEPS):
        pipe.step((batch(step).to(dtype),))
        optimizer.step()
        optimizer.zero_grad()  # to None they would move: a tape holds what it has recorded
        if between is not None:
            between(step, optimizer)
        weights += [p.detach().clone() for p in model.parameters()]
    return optimizer, weights


def why(optimizer: Any) -> str:
    return optimizer._replays.reason


def check_same(reason: str = "", **options: Any) -> Any:
    """Train with replays and without; compare all weights.  reason: for which updates run op by op."""
    optimizer, weights = trained(True, **options)
    assert reason in why(optimizer)
    assert bool(why(optimizer)) == bool(reason)
    other, expected = trained(False, **options)
    assert all(map(torch.equal, weights, expected))
    assert len({tuple(x.flatten().tolist()) for x in weights[::4]}) > 1
    return optimizer, other


def warmer(step: int, optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"].mul_(0.9)


@pytest.mark.in_ci("options1", "options2")
@pytest.mark.parametrize(
    "options",
    [{}, {"clip_grad_norm": 0.1}, {"clip_grad_norm": 0.1, "half": True, "master_weights": True},
     {"groups": [{"params": ["*.bias"], "weight_decay": 0.0}], "clip_grad_norm": 0.5, "norm_type": 1.0}],
)  # fmt: skip
def test_replayed_updates_have_the_bits_of_the_ops(options):
    """With a learning rate that changes on the device."""
    check_same(between=warmer, **options)


def test_an_update_that_is_left_out_is_no_replay():
    def broken(step: int) -> torch.Tensor:
        return plain(step) * (torch.inf if step == TRIALS + 1 else 1)

    plain = batch
    with mock.patch.dict(globals(), batch=broken):
        optimizer, _ = check_same(skip_nonfinite=True, clip_grad_norm=0.1)
    assert optimizer.skipped == 1


def test_updates_are_captured_anew_for_another_state():
    def loads(step: int, optimizer: Any) -> None:
        if step == TRIALS + 2:
            optimizer.load_state_dict(optimizer.state_dict())

    optimizer, _ = check_same(between=loads)
    assert optimizer._replays._updates == 1


class Counting(torch.optim.AdamW):
    """Decays by a number that Python has counted."""

    calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        self.calls += 1
        for group in self.param_groups:
            torch._foreach_mul_(group["params"], 1 - 1e-3 * (self.calls % 3))


class Reading(torch.optim.AdamW):
    """Reads a number of the device."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            if parameter.sum() > 0:
                parameter.mul_(0.99)


class Replacing(torch.optim.AdamW):
    """Puts a new tensor into its state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for state in self.state.values():
            state["exp_avg"] = state["exp_avg"] * 1.0


def cooler(step: int, optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.9


@pytest.mark.parametrize(
    ("reason", "options"),
    [("AdamW was not made with capturable=True", {"capturable": False, "lr": 0.05}),
     ("lr of group 0 is another one", {"lr": 0.05, "between": cooler}),
     ("the host reads a tensor", {"cls": Reading}),
     ("the exp_avg of first.bias lies at another address", {"cls": Replacing}),
     ("a replay gives another parameter", {"cls": Counting})],
    ids=["no flag", "a number of the host", "a read", "a new tensor", "a count"],
)  # fmt: skip
def test_what_a_replay_would_freeze_is_told(reason, options):
    with pytest.warns(UserWarning, match="Updates run op by op, and are not replayed: "):
        check_same(reason, **options)
