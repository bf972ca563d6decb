"""Outputs that are named after modules: what a forward hook of the eager model is given."""

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.capture.capture_options import CaptureOptions
from fxpipe.capture.trace import capture
from fxpipe.errors import CaptureError

MICROBATCHES, ROWS = 3, 2


class Block(nn.Module):
    """Its activation overwrites what the layer returned."""

    def __init__(self):
        super().__init__()
        self.layer, self.act = nn.Linear(4, 4), nn.ReLU(inplace=True)

    def forward(self, x):
        return x + self.act(self.layer(x))


class Pair(nn.Module):
    def forward(self, x):
        return x * 2, {"sum": x.sum()}


class Net(nn.Module):
    """``norm`` is called once a block, under two names."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.pair, self.unused = nn.LayerNorm(4), Pair(), nn.Linear(2, 2)
        self.same = self.norm

    def forward(self, x, y):
        for block in self.blocks:
            x = self.norm(block(x))
        double, more = self.pair(x)
        return (double + more["sum"] - y).square().mean()


def example(rows=ROWS):
    return {"x": torch.randn(rows, 4), "y": torch.randn(rows, 4)}


#: Output -> the module, the number of its call, and its tensor among what the module returns.
ASKED = {
    "blocks.2": ("blocks.2", 0, lambda x: x),
    "blocks.1.layer": ("blocks.1.layer", 0, lambda x: x),
    "blocks.0.act": ("blocks.0.act", 0, lambda x: x),
    "same#1": ("norm", 1, lambda x: x),
    "pair.0": ("pair", 0, lambda x: x[0]),
    "pair.1.sum": ("pair", 0, lambda x: x[1]["sum"]),
}


def hooked(model, batch, name):
    """What hooks see, of all microbatches."""
    path, number, of = ASKED[name]
    seen = []
    handle = model.get_submodule(path).register_forward_hook(
        lambda module, args, result: seen.append(of(result).detach().clone())
    )
    found = []
    for m in range(MICROBATCHES):
        seen.clear()
        model(**{key: x[ROWS * m : ROWS * (m + 1)] for key, x in batch.items()})
        found.append(seen[number])
    handle.remove()
    return torch.cat(found) if found[0].dim() else torch.stack(found)


@pytest.mark.parametrize("ranks", [1, 2])
def test_values_are_those_of_a_forward_hook(ranks):
    torch.manual_seed(0)
    model = Net()
    options = {"ranks": ranks, "microbatches": MICROBATCHES, "schedule": "1f1b", "outputs": [*ASKED]}
    pipe = fxpipe.compile(model, example(), **options)
    batch = example(ROWS * MICROBATCHES)
    results = [run(batch, outputs=[*ASKED]) for run in (pipe.run_local, pipe.step)[: 2 if ranks == 1 else 1]]
    for name in ASKED:
        expected = hooked(model, batch, name)
        for result in results:
            assert torch.equal(result.outputs[name], expected), name


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("block.2", "There is no output 'block.2'. Did you mean 'blocks.2'? Known: output, loss, and the"),
        ("norm", "'norm' is called 3 times in a forward: name the call, 'norm#0', 'norm#1', 'norm#2'."),
        ("norm#3", "'norm' is called 3 times in a forward: name the call, 'norm#0', 'norm#1', 'norm#2'."),
        ("pair", "'pair' returns a tuple, and an output is one tensor. Name one of 'pair.0', 'pair.1.sum'."),
        ("pair.2", "The module 'pair' has no '2' in what it returns. Name one of 'pair.0', 'pair.1.sum'."),
        ("unused", "'unused' is not called in the forward, so it gives no output. Name one that is"),
        ("blocks", "'blocks' is not called in the forward"),
    ],
)
def test_names_that_give_no_output(name, says):
    model = Net()
    with pytest.raises(CaptureError) as raised:
        capture(model, example(), None, 1.0, torch.device("cpu"), CaptureOptions(outputs=[name]))
    assert says in str(raised.value)
    assert not any(module._forward_hooks for module in model.modules())
