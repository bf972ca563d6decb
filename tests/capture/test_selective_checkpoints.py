"""Selective activation checkpointing: the policy of the model's code decides what F saves."""

from functools import partial

import pytest
import torch
from equality import eager_step
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from zoo import too_far

import fxpipe

aten = torch.ops.aten
WIDTH, ROWS, LAYERS = 8, 4, 3
MATRIX, INNER = ROWS * WIDTH * 8, ROWS * 4 * WIDTH * 8  # bytes


class Net(nn.Module):
    """Each layer saves its input, and the policy the results of these ops."""

    def __init__(self, saved: tuple[object, ...]):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Tanh())
            for _ in range(LAYERS)
        )
        self.saved = saved

    def policy(self, context, op, *args, **kwargs):
        save = op in self.saved
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    def forward(self, x):
        contexts = partial(create_selective_checkpoint_contexts, self.policy)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
        return x.square().mean()


@pytest.mark.parametrize(
    ("saved", "kept"),
    [
        ((), LAYERS * MATRIX),
        ((aten.gelu.default,), LAYERS * (MATRIX + INNER)),
        ((aten.addmm.default,), LAYERS * (MATRIX + INNER + MATRIX)),
    ],
)
def test_a_policy_decides_what_is_saved(double, saved, kept):
    torch.manual_seed(1)
    rows = (torch.randn(2 * ROWS, WIDTH),)
    pipe = fxpipe.compile(Net(saved), (rows[0][:ROWS],), ranks=1, microbatches=2, schedule="1f1b")
    found, (loss, grads) = pipe.run_local(rows), eager_step(Net(saved), rows, 2, None)
    assert too_far({"loss": found.loss, **found.grads}, {"loss": loss, **grads}, 1e-12) == {}
    # Of the first layer the input is the batch's, and the last result is at hand.
    assert abs(max(pipe.simulate().peak_memory) - kept) <= 2 * MATRIX
