"""Writes the pipelines and the checkpoint beside this file, by the version of fxpipe that it runs with.

Run with the commit whose files later versions must read: PYTHONPATH=CHECKOUT python make.py DIRECTORY.
"""

import json
import sys
from pathlib import Path

import torch
from torch import nn

import fxpipe


class Words(nn.Module):
    """An embedding, a dropout, a buffer that the step changes, and an output layer that can be split."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(12, 4), nn.Linear(4, 12, bias=False)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 4))

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.head(self.body(self.embedding(x))), y)


def main(directory: Path) -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    example = {"x": torch.randint(12, (3,)), "y": torch.randint(12, (3,))}
    batch = {"x": torch.randint(12, (6,)), "y": torch.randint(12, (6,))}
    settings = {
        "vocabulary": {"ranks": 2, "schedule": "zb-h1", "vocab_parallel": True, "dimensions": {}},
        "offloaded": {"ranks": 2, "schedule": "1f1b", "offload": True},
        "trained": {"ranks": 1, "schedule": "auto"},
    }
    losses = {}
    for name, options in settings.items():
        torch.manual_seed(1)
        fxpipe.compile(Words(), example, microbatches=2, **options).save(directory / name)
        pipe = fxpipe.load(directory / name)
        losses[name] = [pipe.run_local(batch).loss.item()]
        if name == "trained":
            pipe = fxpipe.load(directory / name)
            optimizer = pipe.optimizer(torch.optim.Adam, lr=0.1)
            with fxpipe.Checkpointer(pipe, directory / "checkpoints", optimizer=optimizer) as checkpoints:
                for _ in range(2):
                    losses[name].append(float(pipe.step(batch)))
                    optimizer.step()
                    optimizer.zero_grad()
                checkpoints.save()
            losses[name].append(float(pipe.step(batch)))
    given = {name: tensor.tolist() for name, tensor in batch.items()}
    (directory / "losses.json").write_text(json.dumps({"batch": given, "losses": losses}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
