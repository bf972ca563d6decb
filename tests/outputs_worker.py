"""What torchrun starts to ask for outputs: ``outputs_worker.py DIRECTORY``.

Every rank writes the tensors that it found into the directory, as ``NAME.RANK.safetensors``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from zoo import EFFORT, Chain, cut, numbers

import fxpipe

MICROBATCHES = 4


class Answers(Chain):
    """Gives a value of its first block, one of its middle, and logits."""

    def forward(self, x, y=None):
        hidden = []
        for block in self.blocks:
            x = block(x)
            hidden.append(x)
        found = {"logits": x, "hidden": hidden[::3], "best": x.argmax(-1), "above": x > 0}
        return found if y is None else found | {"loss": F.mse_loss(x, y)}


#: The outputs of a batch, from those of its microbatches in eager.
OUTPUTS = {
    "logits": lambda parts: torch.cat([part["logits"] for part in parts]),
    "hidden.0": lambda parts: torch.cat([part["hidden"][0] for part in parts]),
    "hidden.1": lambda parts: torch.cat([part["hidden"][1] for part in parts]),
    "best": lambda parts: torch.cat([part["best"] for part in parts]),
    "above": lambda parts: torch.cat([part["above"] for part in parts]),
    "loss": lambda parts: torch.stack([part["loss"] for part in parts]),
}


def wanted(model: torch.nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    """The outputs of ``Answers``, microbatch by microbatch."""
    parts = [model(**part) for part in cut(batch, MICROBATCHES)]
    return {name: of(parts) for name, of in OUTPUTS.items()}


def build() -> Answers:
    torch.manual_seed(0)
    return Answers(6)


def batch_of(rows: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(rows)
    return numbers(rows)


def compiled(model: Answers, ranks: int, **options: Any) -> fxpipe.Pipeline:
    example = batch_of(2)
    if not options.get("gradients", True):
        del example["y"]
    return fxpipe.compile(
        model,
        example,
        ranks=ranks,
        microbatches=MICROBATCHES,
        effort=EFFORT,
        **{"schedule": "1f1b", **options},
    )


def main(directory: Path) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    batch, names = batch_of(2 * MICROBATCHES), [*OUTPUTS]

    def write(name: str, result: fxpipe.StepResult) -> None:
        found = result.outputs if result.loss is None else {**result.outputs, "loss of all": result.loss}
        save_file({key: x.contiguous() for key, x in found.items()}, directory / f"{name}.{rank}.safetensors")

    pipe = compiled(build(), ranks, outputs=names)
    write("here", pipe.step(batch, outputs=names))
    write("on the last", pipe.step(batch, outputs=names, outputs_on=ranks - 1))
    write("on all", pipe.step(batch, outputs=names, outputs_on="all"))
    pipe.save(directory / "saved")
    write("loaded", fxpipe.load(directory / "saved").step(batch, outputs=names[:2], outputs_on=0))
    names.remove("loss")
    pipe = compiled(build(), ranks, outputs=names, gradients=False, schedule="zb-v")
    for _ in range(3):
        found = pipe.evaluate({"x": batch["x"]}, outputs=names, outputs_on="all")
    write("inference", found)
