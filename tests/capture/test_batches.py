"""What a batch may be: leaves that only loss_fn reads, mappings of any class, numbers that differ."""

from __future__ import annotations

import warnings
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.errors import BatchError, CaptureError


@dataclass
class Fields:
    x: torch.Tensor
    y: torch.Tensor


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


class Scaled(Net):
    def forward(self, x, scale=1.0):
        return super().forward(x) * scale


def loss_fn(output, batch):
    y = batch["y"] if isinstance(batch, dict) else batch[1]
    return (output - y).square().mean()


def compiled(model: nn.Module, example: Any, **options: Any) -> fxpipe.Pipeline:
    return fxpipe.compile(model, example, ranks=2, microbatches=2, schedule="1f1b", **options)


def agrees(found: Any, loss: torch.Tensor, model: nn.Module) -> None:
    model.zero_grad()
    loss.backward()
    torch.testing.assert_close(found.loss, loss.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.grads[name], parameter.grad)


@pytest.mark.parametrize(
    "made", [lambda x, y: (x, y), lambda x, y: [x, y], Fields, lambda x, y: UserDict(x=x, y=y)]
)
def test_what_forward_does_not_take_is_for_loss_fn(made):
    torch.manual_seed(0)
    model = Scaled() if made is not None and isinstance(made(0, 0), Fields | UserDict) else Net()
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    pipe = compiled(model, made(x[:2], y[:2]), loss_fn=loss_fn)
    agrees(pipe.run_local(made(x, y)), loss_fn(model(x), (x, y)), model)


def test_without_loss_fn_the_forward_takes_all():
    with pytest.raises(CaptureError, match="With a loss_fn, what the forward does not take is for that"):
        compiled(Net(), (torch.zeros(2, 4), torch.zeros(2, 4)))


def test_what_nothing_reads_is_not_compared():
    torch.manual_seed(0)
    model, x, y = Scaled(), torch.randn(4, 4), torch.randn(4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe = compiled(model, {"x": x[:2], "y": y[:2], "id": "first", "at": torch.zeros(3)}, loss_fn=loss_fn)
    found = pipe.run_local({"x": x, "y": y, "id": "second", "at": torch.zeros(7)})
    agrees(found, loss_fn(model(x), (x, y)), model)


def test_a_name_that_is_almost_a_parameter():
    with pytest.warns(UserWarning, match="Nothing reads 'scal' .*Did you mean 'scale'"):
        compiled(Scaled(), {"x": torch.zeros(2, 4), "y": torch.zeros(2, 4), "scal": 2.0}, loss_fn=loss_fn)


def test_messages_say_what_to_give():
    x, y = torch.zeros(4, 4), torch.zeros(4, 4)
    pipe = compiled(Scaled(), {"x": x[:2], "y": y[:2], "scale": 2}, loss_fn=loss_fn)
    with pytest.raises(
        BatchError, match=r"'scale' is 3 and was 2 .* give torch.tensor\(3\), in the example too"
    ):
        pipe.run_local({"x": x, "y": y, "scale": 3})
    with pytest.raises(
        BatchError, match=r"\(4, 7\); 2 microbatches of \(2, 4\) make \(4, 4\).* has one length"
    ):
        pipe.run_local({"x": torch.zeros(4, 7), "y": y, "scale": 2})


def test_what_loss_fn_puts_into_the_batch_is_told():
    """The loop would look for it there."""

    def keeps(output, batch):
        batch["output"] = output.detach()
        return loss_fn(output, batch)

    example = {"input": torch.ones(2, 4), "y": torch.ones(2, 4)}
    with pytest.warns(UserWarning, match="loss_fn puts 'output' into its microbatch"):
        compiled(Net(), example, loss_fn=keeps)


@pytest.mark.parametrize(
    ("leaf", "example", "remedy"),
    [
        (torch.ones(4), torch.ones(4), "If all rows share this tensor, make it a buffer"),
        ([0.5] * 4, [0.5] * 2, "Give 'scale' as one tensor of all rows"),
    ],
    ids=["shared", "a list"],
)
def test_a_leaf_without_rows_is_refused(leaf, example, remedy):
    """A vector that all rows share, and a list that has a number for each row."""

    def scaled(output, batch):
        return torch.as_tensor(batch["scale"]).mean() * (output - batch["y"]).square().mean()

    rows = {"input": torch.ones(4, 4), "y": torch.ones(4, 4)}
    few = {name: x[:2] for name, x in rows.items()}
    pipe = fxpipe.compile(
        Net(), few | {"scale": example}, ranks=1, microbatches=2, schedule="1f1b", loss_fn=scaled
    )
    with pytest.raises(BatchError, match=remedy):
        pipe.step(rows | {"scale": leaf})
