"""Random modules with buffers, aliases, in-place ops, shared submodules and repeated calls, under every
option, against eager in double precision: equal, or too short to be cut.

    FXPIPE_EXAMPLES=2000 pytest tests/whole_models/test_random_models.py
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equality import assert_equals_eager
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st
from torch import nn

import fxpipe

WIDTH = 6
EXAMPLES = int(os.environ.get("FXPIPE_EXAMPLES", "10"))


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("double")]


class Random(nn.Module):
    """Runs the steps that it is given, each a name and a number, on one activation."""

    def __init__(self, steps: tuple[tuple[str, int], ...], shared: bool, frozen: bool) -> None:
        super().__init__()
        self.steps = steps
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        if shared:
            self.layers.append(self.layers[0])
            self.again = self.layers[1]
            self.several = [self.layers[2].weight]
        if frozen:
            self.layers[0].requires_grad_(False)
        self.norms = nn.ModuleList([nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH, affine=False)])
        self.scale = nn.Parameter(torch.ones(WIDTH))
        for k in range(2):
            self.register_buffer(f"buffer{k}", torch.full((WIDTH,), 0.5))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("queue", torch.zeros(4, WIDTH), persistent=False)
        self.table = torch.linspace(0.5, 1.5, WIDTH)
        self.cache: Any = None

    def linear(self, x, k):
        return self.layers[k % len(self.layers)](x)

    def tied(self, x, k):
        return x @ self.layers[k % 3].weight * 0.5

    def norm(self, x, k):
        return self.norms[k % 2](x)

    def activation(self, x, k):
        return (torch.tanh, F.softplus, F.elu, torch.sin, F.hardswish)[k % 5](x)

    def relu_in_place(self, x, k):
        return F.leaky_relu_(x * 1.0, 0.1)

    def scaled(self, x, k):
        return x * self.scale

    def transposed(self, x, k):
        return F.softplus(x.view(-1, 2, 3).transpose(1, 2)).reshape(-1, WIDTH)

    def slice_written(self, x, k):
        y = x.clone()
        y[:, k % WIDTH] = y[:, (k + 1) % WIDTH] * 2
        y.view(-1, 2, 3)[:, 0].add_(0.1)
        return y

    def read(self, x, k):
        return x * (1 + 0.1 * getattr(self, f"buffer{k % 2}").clone().cos())

    def write(self, x, k):
        getattr(self, f"buffer{k % 2}").mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x

    def replace(self, x, k):
        setattr(self, f"buffer{k % 2}", getattr(self, f"buffer{k % 2}") * 0.8 + x.detach().mean(0))
        return x

    def swap(self, x, k):
        self.buffer0, self.buffer1 = self.buffer1, self.buffer0
        return x

    def through_data(self, x, k):
        self.buffer0.data = self.buffer0.data * 0.9
        return x * self.buffer0.clone()

    def counted(self, x, k):
        self.count += 1
        return x * torch.exp(-0.01 * self.count)

    def queued(self, x, k):
        self.queue.copy_(torch.cat([self.queue[x.shape[0] :], x.detach()]))
        return x + self.queue.mean(0)

    def cached(self, x, k):
        if self.cache is None:
            self.cache = torch.arange(float(WIDTH)).cos()
        return x + self.cache * self.table

    def rounded(self, x, k):
        return x + ((x * 4).round() / 4 - x).detach()

    def branch(self, x, k):
        return x * 0.5 if torch.isfinite(x).all() else -x

    def frozen_statistics(self, x, k):
        with torch.no_grad():
            spread = x.std(0) + 1
        return x / spread

    def forward(self, x):
        kept = [x]
        for name, k in self.steps:
            x = kept[k % len(kept)] * 0.1 + x if name == "skip" else getattr(self, name)(x, k)
            kept.append(x)
        return (x @ self.layers[2].weight).square().mean()


STEPS = [
    "linear", "tied", "norm", "activation", "relu_in_place", "scaled", "transposed", "slice_written", "read",
    "write", "replace", "swap", "through_data", "counted", "queued", "cached", "rounded", "branch",
    "frozen_statistics", "skip",
]  # fmt: skip
#: Every second step works with weights, so that there is something to cut.
steps = st.lists(
    st.tuples(st.one_of(st.sampled_from(STEPS), st.sampled_from(["linear", "tied"])), st.integers(0, 11)),
    min_size=3,
    max_size=12,
).map(tuple)
options = st.fixed_dictionaries(
    {"ranks": st.integers(1, 3), "schedule": st.sampled_from(["gpipe", "1f1b", "zb-h1", "zb-v", "auto"])},
    optional={
        "recompute": st.sampled_from(["norms", "full", "auto"]),
        "offload": st.sampled_from([True, 0.5]),
    },
)


def rows(count: int) -> tuple[torch.Tensor]:
    return (torch.randn(count, WIDTH),)


def _trains(build: Callable[[], nn.Module]) -> bool:
    try:
        build()(*rows(2)).backward()
    except RuntimeError:  # what a step wrote was needed for the backward: eager refuses it as well
        return False
    return True


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    derandomize="FXPIPE_EXAMPLES" not in os.environ,
)
@given(steps, st.booleans(), st.booleans(), options)
@pytest.mark.filterwarnings("error::UserWarning:fxpipe")
def test_equals_eager(steps, shared, frozen, options):
    build = partial(Random, steps, shared, frozen)
    assume(_trains(build))
    try:
        offload = fxpipe.Offload(options.get("offload", False), bandwidth=1e12)
        # Steps of the models take numbers of all rows, of each microbatch as is meant here.
        assert_equals_eager(build, rows, **{**options, "offload": offload, "mean": "microbatch"})
    except fxpipe.PartitionError:
        event("a buffer that is read early and written late leaves too few places to cut")
