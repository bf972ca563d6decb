"""A script with an ``Accelerator``, under ``accelerate launch`` or torchrun: what is of use to a rank."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

import fxpipe
from fxpipe.errors import FxpipeError

Rows = list[dict[str, torch.Tensor]]


def model() -> nn.Module:
    """The same weights in every dtype."""
    torch.manual_seed(0)
    layers = (nn.Linear(4, 4, dtype=torch.float32).to(torch.get_default_dtype()) for _ in range(4))
    return nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in layers))


def loader() -> DataLoader:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).float()
    return DataLoader([{"input": row[:4], "labels": row[4:]} for row in x], batch_size=8)


def loss_fn(output: torch.Tensor, microbatch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (output - microbatch["labels"].to(output.dtype)).square().mean()


def main(directory: str) -> None:
    accelerator = Accelerator(cpu=True)
    rows = {name: x[:2].to(torch.get_default_dtype()) for name, x in next(iter(loader())).items()}

    def compiled(module: nn.Module) -> fxpipe.Pipeline:
        ranks = accelerator.num_processes
        return fxpipe.compile(module, rows, ranks=ranks, microbatches=4, schedule="1f1b", loss_fn=loss_fn)

    told: dict[str, object] = {"processes": accelerator.num_processes, "first": accelerator.is_main_process}
    pipe = compiled(model())
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1, clip_grad_norm=0.5)
    losses = []
    for batch in loader():  # not a prepared one, of which each process gets its own part
        loss = pipe.step({name: x.to(torch.get_default_dtype()) for name, x in batch.items()})
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    told["losses"] = losses
    accelerator.wait_for_everyone()
    for name, call in {
        "backward": lambda: accelerator.backward(loss),
        "prepare": lambda: compiled(accelerator.prepare(model())),
    }.items():
        try:
            call()
        except FxpipeError as error:
            told[name] = str(error)
    Path(directory, f"accelerate{os.environ['RANK']}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1])
