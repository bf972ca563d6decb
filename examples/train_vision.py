"""Train a convolutional network on generated images on four ranks, and evaluate it on any number of images.

    torchrun --nproc-per-node 4 examples/train_vision.py

It shows a loss function with an exact mean and a metric, batch norm, and a test set that does not fill its
last batch. The images are disks, rings, squares and crosses in noise; nothing is downloaded.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe

MICROBATCHES, ROWS, SIZE, CLASSES = 8, 4, 24, 4
IGNORED = -100  # the label of a row that fills up a batch; F.cross_entropy leaves it out


def images(number: int, seed: int) -> dict[str, Tensor]:
    """{"images": [number, 1, SIZE, SIZE], "labels": [number]}: shapes of any place and size, in noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (number,), generator=generator)
    radius, y, x = torch.rand(3, number, 1, 1, generator=generator)
    radius, grid = 4 + 4 * radius, torch.arange(float(SIZE))
    dy = (grid[:, None] - 8 - (SIZE - 16) * y).abs()
    dx = (grid[None, :] - 8 - (SIZE - 16) * x).abs()
    distance, larger, smaller = dy.hypot(dx), torch.maximum(dy, dx), torch.minimum(dy, dx)
    shapes = torch.stack(
        [
            distance < radius,
            (distance < radius) & (distance > radius - 2),
            larger < radius,
            (larger < radius) & (smaller < 1.5),
        ]
    )
    chosen = shapes[labels, torch.arange(number)].float()
    noise = torch.randn(chosen.shape, generator=generator)
    return {"images": (chosen + 0.5 * noise)[:, None], "labels": labels}


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.second, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.second(F.relu(self.norm1(self.first(x))))))


class Network(nn.Module):
    """``forward`` takes the labels as well: all of a microbatch goes to it, also what loss_fn alone uses."""

    def __init__(self, width: int = 32, blocks: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(blocks)))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


def loss_fn(scores: Tensor, microbatch: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(sum, count, metrics): the loss of a batch is the mean over all its rows with labels."""
    labels = microbatch["labels"]
    total = F.cross_entropy(scores, labels, ignore_index=IGNORED, reduction="sum")
    return total, (labels != IGNORED).sum(), {"right": (scores.argmax(-1) == labels).sum()}


def filled_up(part: dict[str, Tensor], rows: int) -> dict[str, Tensor]:
    """The part with empty images behind it up to ``rows``, whose labels do not count."""
    missing = rows - len(part["labels"])
    return {
        "images": F.pad(part["images"], (0, 0, 0, 0, 0, 0, 0, missing)),
        "labels": F.pad(part["labels"], (0, missing), value=IGNORED),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--test-images", type=int, default=250)
    options = parser.parse_args()

    torch.manual_seed(0)
    batch = MICROBATCHES * ROWS
    pipe = fxpipe.compile(
        Network(options.width, options.blocks),
        images(ROWS, seed=0),
        ranks=4,
        microbatches=MICROBATCHES,
        schedule="zb-h1",
        loss_fn=loss_fn,
        outputs=["right"],
        evaluation=True,
    )
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=3e-3)
    first = pipe.runtime.rank == 0
    for step in range(options.steps):
        loss = pipe.step(images(batch, seed=1 + step))
        optimizer.step()
        optimizer.zero_grad()
        if first and step % 25 == 0:
            print(f"step {step:4d}  loss {loss:.3f}")

    test = images(options.test_images, seed=0)
    total = right = 0.0
    for begin in range(0, options.test_images, batch):
        part = {name: tensor[begin : begin + batch] for name, tensor in test.items()}
        result = pipe.evaluate(filled_up(part, batch), outputs=["right"], outputs_on="all")
        # The loss is the mean over the labeled rows of this batch: the last one weighs less.
        total += float(result.loss) * len(part["labels"])
        right += float(result.outputs["right"].sum())
    if first:
        count = options.test_images
        print(f"{count} test images: loss {total / count:.3f}, {right / count:.1%} right")


if __name__ == "__main__":
    main()
