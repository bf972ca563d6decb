"""``check="finite"``: the op with which NaN or infinities begin."""

import contextlib
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxpipe
from fxpipe.errors import OptionError, RunError


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return x + self.outer(torch.log(torch.relu(self.inner(x)) + 1e-3))


class Masked(nn.Module):
    """Infinities that are meant: a mask, and its softmax."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        mask = torch.ones(4, 4).triu(1).bool()
        scores = (x @ x.transpose(-1, -2)).masked_fill(mask, -torch.inf)
        return F.l1_loss(F.softmax(scores, -1) @ x, y)


@pytest.fixture(scope="module")
def compiled():
    torch.manual_seed(0)
    model = Masked()
    example = {"x": torch.randn(1, 4, 4), "y": torch.randn(1, 4, 4)}
    pipe = fxpipe.compile(model, example, ranks=2, microbatches=2, schedule="zb-h1", check=False)
    return model, pipe, {name: torch.cat([x, x + 0.5]) for name, x in example.items()}


@contextlib.contextmanager
def filled(weight, value):
    before = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(value)
    try:
        yield
    finally:
        with torch.no_grad():
            weight.copy_(before)


def test_a_step_without(compiled):
    _, pipe, batch = compiled
    found, expected = pipe.run_local(batch, check="finite"), pipe.run_local(batch)
    assert torch.equal(found.loss, expected.loss)
    with pytest.raises(OptionError, match="check is 'nan' and must be 'finite' or None"):
        pipe.run_local(batch, check="nan")


def test_the_first_one_is_named(compiled):
    """An op of a layer in the middle of a loop, by its module's path and the line of the model."""
    model, pipe, batch = compiled
    line = Block.forward.__code__.co_firstlineno + 1
    with filled(model.blocks[4].outer.weight, 3e38), pytest.raises(RunError) as raised:
        pipe.run_local(batch, check="finite")
    found = re.fullmatch(
        r"Rank 1, F1\.0: aten\.addmm\.\S+ gives the first (?:NaN|infinity), in \d+ of 16 values of shape "
        r"\(4, 4\), in the module (\S+) \((\S+):(\d+)\), line \d+ of rank1\.py; its operands are finite, .*",
        str(raised.value),
    )
    assert found, raised.value
    assert found.groups() == ("blocks.4.outer", "test_finite.py", str(line))
    line = Masked.forward.__code__.co_firstlineno + 4  # of the comment, where the model's own ops begin
    message = rf"aten\.bmm\S* gives the first infinity, .* in the model itself \(test_finite\.py:{line}\)"
    with filled(model.blocks[5].outer.weight, 1e30), pytest.raises(RunError, match=message):
        pipe.run_local(batch, check="finite")


@pytest.mark.parametrize(("bad", "kind"), [(torch.nan, "NaN"), (torch.inf, "infinity")])
def test_a_parameter_that_is_not_finite(compiled, bad, kind):
    """Its name comes before the op."""
    model, pipe, batch = compiled
    message = (
        rf"^Not finite before the step: the parameter blocks\.5\.outer\.weight \({kind} in 1 of 16 "
        r"values\)\. Rank 1, F1\.0: aten\.addmm\..* in the module blocks\.5\.outer .*; an operand "
        r"is not finite\.$"
    )
    with filled(model.blocks[5].outer.weight[0, :1], bad), pytest.raises(RunError, match=message):
        pipe.run_local(batch, check="finite")


def test_a_batch_that_is_not_finite(compiled):
    """An infinity may be a mask, so its name comes with the first NaN, or with the loss."""
    _, pipe, batch = compiled
    x, y = batch["x"].clone(), batch["y"].clone()
    x[1, 2, 3] = torch.nan
    found = r"^Not finite before the step: the batch's leaf "
    with pytest.raises(RunError, match=found + r"x \(NaN in 1 of 32 values\)\. Rank 0, F0\.1: "):
        pipe.run_local({"x": x, "y": y}, check="finite")
    y[0, 0, 0] = torch.inf
    message = (
        r"^Not finite before the step: the batch's leaf y \(infinity in 1 of 32 values\)\. The loss is inf"
    )
    with pytest.raises(RunError, match=message):
        pipe.run_local(batch | {"y": y}, check="finite")
