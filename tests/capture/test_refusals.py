"""Errors that the trace alone raises, where the model's code catches them: it must not be traced on another
way than eager's."""

import contextlib
import io
import math
import pickle

import numpy as np
import pytest
import torch
from equality import assert_equals_eager
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxpipe


@torch.library.custom_op("fxpipe_tests::without_a_fake", mutates_args=())
def without_a_fake(x: torch.Tensor) -> torch.Tensor:
    return x * 3


without_a_fake.register_autograd(lambda ctx, gradient: gradient * 3)


class Net(nn.Module):
    """``between``: what runs between two layers, with the second one."""

    def __init__(self, between):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.between = between

    def forward(self, x):
        return self.second(self.between(self.first(x).tanh(), self.second)).square().mean()


def batch(count):
    return (torch.randn(count, 4),)


def refused(between, match=r"test_refusals\.py:\d+"):
    with pytest.raises(fxpipe.CaptureError, match=match) as error:
        fxpipe.compile(Net(between), batch(2), ranks=2, microbatches=2, schedule="1f1b")
    return str(error.value)


def saved(x):
    file = io.BytesIO()
    torch.save(x.detach(), file)
    file.seek(0)
    return x + torch.load(file)


KINDS = {
    "a custom op without a fake": lambda x, _: without_a_fake(x),
    "nested": lambda x, _: x + torch.nested.nested_tensor([x[0], x[1]]).to_padded_tensor(0.0),
    "saved": lambda x, _: saved(x),
    "pickled": lambda x, _: x + pickle.loads(pickle.dumps(x.detach())),
    "bytes": lambda x, _: x * len(bytes(x.detach().untyped_storage())),
    "an old storage": lambda x, _: x * x.detach().storage()[0],
    "split at a tensor": lambda x, _: x + torch.tensor_split(x, x[0, :1].long())[0].sum(),
    "from numbers": lambda x, _: x * torch.Tensor([x.detach().amax(), x.detach().amin()]).mean(),
    "dlpack": lambda x, _: x + torch.from_dlpack(x.detach()),
    "dlpack to numpy": lambda x, _: x * float(np.from_dlpack(x.detach()).sum()),
    "a capsule": lambda x, _: x * (torch.to_dlpack(x.detach()) is None),
    "shared memory": lambda x, _: x.detach().share_memory_() + x,
    "a function for each element": lambda x, _: x + x.detach().map_(x.detach(), lambda a, b: 1.0),
    "grad mode": lambda x, _: checkpoint(
        lambda y: y * (3 if torch.is_grad_enabled() else 1.7), x, use_reentrant=True
    ),
    "history": lambda x, _: checkpoint(lambda y: y * (2 if (y * 2).grad_fn else 1), x, use_reentrant=True),
    "text": lambda x, _: x * (3 if "tensor" in f"{x.detach()}" else 1),
    "changed text": lambda x, _: x * (3 if str(x.detach()).strip().upper()[0] == "T" else 1),
    "a number's method": lambda x, _: x * (1 + x.sum().item().is_integer()),
    "a number's root": lambda x, _: x * math.sqrt(x.square().sum()),
    "a converted layer": lambda x, layer: layer.bfloat16()(x.bfloat16()).float(),
}


def caught(function):
    def between(x, layer):
        try:
            return function(x, layer)
        except Exception:  # noqa: BLE001 - as models do
            return x / 2

    return between


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_that_the_model_catches(kind):
    refused(caught(KINDS[kind]))
    if kind != "a converted layer":  # which later layers do not fit
        Net(KINDS[kind])(*batch(2)).backward()  # it is of the trace alone


def suppressed(x, _):
    with contextlib.suppress(Exception):
        x = without_a_fake(x)
    return x


def lost(x, _):
    try:
        x = without_a_fake(x)
    finally:
        return x  # noqa: B012


class Lazy:
    """An attribute that is computed from a tensor."""

    def __init__(self, x):
        self.x = x

    @property
    def triple(self):
        try:
            return without_a_fake(self.x)
        except RuntimeError as error:
            raise AttributeError("triple") from error


def asked(x, _):
    return x * 3 if hasattr(Lazy(x), "triple") else x


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        try:
            return without_a_fake(gradient)
        except RuntimeError:
            return gradient


def hooked(x, _):
    x.register_hook(lambda gradient: caught(KINDS["a custom op without a fake"])(gradient, _))
    return x * 2


def another_error(x, layer):
    result = caught(lambda *args: without_a_fake(x) and None)(x, layer)
    return result + torch.ones(5)  # which does not fit, on the other way


@pytest.mark.parametrize(
    "between",
    [
        suppressed,
        lost,
        asked,
        lambda x, _: InBackward.apply(x),
        hooked,
        another_error,
        lambda x, layer: checkpoint(suppressed, x, layer, use_reentrant=True),
        lambda x, layer: checkpoint(suppressed, x, layer, use_reentrant=False),
    ],
)
def test_other_ways_to_go_on(between):
    message = refused(between)
    assert "register_fake" in message
    assert "is caught" in message


#: Each of these raises on real tensors as well.
FAIL = (
    lambda x, layer: x @ torch.ones(5, 3),
    lambda x, layer: x.view(3, 3),
    lambda x, layer: x.T[1:].view(-1),
    lambda x, layer: x.numpy(),
    lambda x, layer: x.expand(3, 3, 3),
    lambda x, layer: layer.weight.add_(1),
    lambda x, layer: x.missing,
    lambda x, layer: round(x),
    lambda x, layer: torch.stack([x, x[0]]),
    lambda x, layer: torch.nn.functional.dropout(x).view(3, 3),
    lambda x, layer: without_a_fake(x, x),
    lambda x, layer: torch.autograd.grad(x.sum(), layer.weight),
    lambda x, layer: torch.linalg.cholesky(x),
    lambda x, layer: x.cuda() if not torch.cuda.is_available() else x.view(3, 3),
)


def one_of_eager(x, layer):
    for fails in FAIL:
        with contextlib.suppress(Exception):
            fails(x, layer)
            x = x * 3
    return x


def test_a_generator_that_the_forward_makes():
    """Another object each time that the forward runs, also where the one before is still alive."""
    made = []

    def noisy(x, _):
        made.append(torch.Generator().manual_seed(0))
        return x + torch.randn(x.shape, generator=made[-1])

    refused(noisy, r"gives a Generator to an op, which a program cannot hold")


@pytest.mark.usefixtures("double")
def test_errors_that_eager_has_too():
    assert_equals_eager(lambda: Net(one_of_eager), batch, ranks=2, schedule="1f1b")


@pytest.mark.usefixtures("double")
def test_a_number_of_the_data_is_a_float():
    assert_equals_eager(
        lambda: Net(lambda x, _: x * (3 if isinstance(x.sum().item(), float) else 1)),
        batch,
        ranks=2,
        schedule="1f1b",
    )


def test_text_within_longer_text():
    assert "compare tensors" in refused(lambda x, _: x * (3 if "tensor" in f"x is {x.detach()}" else 1))


def test_what_a_forward_prints(capsys):
    def shows(x, _):
        print("before", x, f"and {x.mean():.3f}", str(x.detach()).strip())
        return x

    fxpipe.compile(Net(shows), batch(2), ranks=2, microbatches=2, schedule="1f1b")
    shown = capsys.readouterr().out
    assert "Fake" not in shown
    assert shown.count("before tensor(size=(2, 4), dtype=torch.float32: fxpipe traces the forward") == 1
