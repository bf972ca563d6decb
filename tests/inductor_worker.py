"""A rank of a pipeline that Inductor compiles, in tests; and what it runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save_file
from torch import fx, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from zoo import Case, Dropout, Shape, compiled, numbers

import fxpipe.runtime.program.inductor
from fxpipe.errors import RunError

MICROBATCHES = 3
DROPOUT = Case(lambda: Dropout(6), numbers)  # layers that repeat are written once


class Mixed(nn.Module):
    """Few kernels: layers with dropout, and a weight that both stages use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(6)])

    def forward(self, x, y):
        for layer in self.layers:
            x = F.dropout(F.gelu(layer(x)), 0.3)
        return F.mse_loss(self.layers[0](x), y)


REAL = Case(Mixed, numbers), Shape(2, "zb-h1", backend="inductor")


def main(directory: Path) -> None:
    """Two steps, with the loss and gradients after each, and the number of functions that were not in the
    cache; then the errors where rank 1 has no compiler."""
    case, shape = REAL
    rank = int(os.environ["RANK"])
    pipe = compiled(case, case.build(), MICROBATCHES, shape)
    held = pipe.plan.tensors[rank]
    for step in (0, 1):
        for name in held.parameters:
            pipe.parameter(name).grad = None
        found = {"loss": pipe.step(case.data(MICROBATCHES))}
        found |= {name: pipe.parameter(name).grad for name in held.gradients}
        own = {name: tensor.detach().clone() for name, tensor in found.items()}
        save_file(own, directory / f"{step}.{rank}.safetensors")
    anew = sum(counters["inductor"][f"fxgraph_cache_{how}"] for how in ("miss", "bypass"))
    (directory / f"anew.{rank}").write_text(str(anew))

    def compile_on_rank_0(traced: fx.GraphModule, inputs: object) -> Callable[..., object]:
        if rank == 1:
            raise OSError("no compiler")
        return fx.Interpreter(traced).boxed_run

    fxpipe.runtime.program.inductor.compile_by_inductor = compile_on_rank_0
    pipe = compiled(DROPOUT, DROPOUT.build(), MICROBATCHES, shape)
    try:
        pipe.step(DROPOUT.data(MICROBATCHES))
    except RunError as error:
        (directory / f"error.{rank}").write_text(str(error))
