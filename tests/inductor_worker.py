"""A rank of a pipeline that Inductor compiles, in tests; and what it runs."""

from __future__ import annotations

import os
from pathlib import Path

from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F
from zoo import Case, Dropout, Shape, compiled, numbers

MICROBATCHES = 3
DROPOUT = Case(Dropout, numbers)


class Mixed(nn.Module):
    """Few kernels, with dropout and a weight that both stages use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.after = nn.Linear(8, 8)

    def forward(self, x, y):
        x = F.dropout(F.gelu(self.layer(x)), 0.3)
        return F.mse_loss(self.layer(self.after(x)), y)


REAL = Case(Mixed, numbers), Shape(2, "zb-h1", backend="inductor")


def main(directory: Path) -> None:
    """Two steps, with the loss, gradients and buffers after each."""
    case, shape = REAL
    rank = int(os.environ["RANK"])
    pipe = compiled(case, case.build(), MICROBATCHES, shape)
    held = pipe.plan.tensors[rank]
    for step in (0, 1):
        for name in held.parameters:
            pipe.parameter(name).grad = None
        found = {"loss": pipe.step(case.data(MICROBATCHES))}
        found |= {name: pipe.parameter(name).grad for name in held.gradients}
        found |= {name: pipe.buffers[name] for name in held.buffers}
        own = {name: tensor.detach().clone() for name, tensor in found.items()}
        save_file(own, directory / f"{step}.{rank}.safetensors")
