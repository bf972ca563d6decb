"""A small language model and microbatches of any length, for tests; and what ranks run to train it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from zoo import captured_once

import fxpipe

WORDS, WIDTH, LENGTH, MICROBATCHES = 16, 8, 16, 3  # as many words as a microbatch has positions
LEARNING_RATE = 0.1
LISTS = ((5, 16, 2), (9, 3, 12))
NUMBERS = ((5, 16, 2), (9, 3, 12, 7, 4), (4, 16), (9, 3, 12, 7, 4))


class Block(nn.Module):
    """Causal attention by a mask that is part of a buffer, and a convolution over time."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.over_time = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.register_buffer("mask", torch.ones(32, 32, dtype=torch.bool).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = self.mix(x).view(rows, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, self.mask[:length, :length])
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.over_time(x.transpose(1, 2)).transpose(1, 2)


class Words(nn.Module):
    """Positions from a table, masks, and the mean over labels that count."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.logits(ids).flatten(0, 1), labels.flatten())

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        output: torch.Tensor = self.head(x)
        return output


ROWS = {"rows": 2, "sequence": LENGTH}  # as dimensions


def rows_of(length: int) -> int:
    """As many of this length as no more tokens than the example's are, from 1 to 4."""
    return 1 + length % min(4, 2 * LENGTH // length)


def microbatch(length: int, rows: int = 2) -> dict[str, torch.Tensor]:
    labels = torch.randint(WORDS, (rows, length))
    labels[0, : length // 3] = -100
    return {"ids": torch.randint(WORDS, (rows, length)), "labels": labels}


def words(**options: object) -> fxpipe.Pipeline:
    torch.manual_seed(0)
    given = {"ranks": 2, "microbatches": MICROBATCHES, "schedule": "1f1b", "dimensions": {"sequence": LENGTH}}
    options = given | options
    asked = options["microbatches"], str(options["dimensions"]), str(options.get("outputs"))
    with captured_once("words of lengths", *asked):
        return fxpipe.compile(Words(), microbatch(LENGTH), **options)


def counted(microbatches: Sequence[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    return [(each["labels"] != -100).sum() for each in microbatches]


def eager(model: nn.Module, microbatches: Sequence[dict[str, torch.Tensor]]) -> torch.Tensor:
    """The loss of all labels that count; gradients are in the model's parameters then."""
    model.zero_grad()
    counts = counted(microbatches)
    each = [model(**one) * count for one, count in zip(microbatches, counts, strict=True)]
    loss = torch.stack(each).sum() / sum(counts)
    loss.backward()
    return loss.detach()


def train(directory: Path) -> None:
    """Two updates beside eager PyTorch, with refused lists between them, in each rank."""
    pipe = words(outputs=["head"], evaluation=True, dimensions=ROWS)
    model = Words()

    def some(length: int) -> dict[str, torch.Tensor]:
        return microbatch(length, rows_of(length))

    torch.manual_seed(0)
    reference = Words()
    rank = pipe.artifact.plan.ranks and int(pipe._runner.runtime.rank)
    optimizer = pipe.optimizer(torch.optim.SGD, lr=LEARNING_RATE)
    theirs = torch.optim.SGD(reference.parameters(), lr=LEARNING_RATE)
    differences, refused = [], []
    for number, lengths in enumerate(NUMBERS):
        torch.manual_seed(number)
        batch = [some(length) for length in lengths]
        loss = pipe.step(batch)
        optimizer.step()
        optimizer.zero_grad()
        pipe.prepare([some(length) for length in NUMBERS[(number + 1) % len(NUMBERS)]])
        differences.append(float(loss - eager(reference, batch)))
        named = [{"rows": rows_of(length), "sequence": length} for length in lengths]
        differences.append(pipe.figures()["predicted"] - pipe.simulate(lengths=named).span_bubble)
        theirs.step()
        rows = rows_of(lengths[-1])
        last = microbatch(lengths[-1] - 1 if rank else lengths[-1], rows)
        one = [*batch[:-1], microbatch(1)] if rank else batch
        longer = [*batch[:-1], microbatch(LENGTH + 1)]
        no_labels = [{"ids": each["ids"]} for each in batch]  # which rank 1 alone needs
        larger = [*batch[:-1], microbatch(LENGTH, 3)]
        other_rows = [*batch[:-1], microbatch(lengths[-1], rows + rank)]
        word = [*batch[:-1], {**batch[-1], "ids": torch.full_like(batch[-1]["ids"], WORDS)}]
        label = [*batch[:-1], {**batch[-1], "labels": torch.full_like(batch[-1]["labels"], -1)}]
        refused_ones = (
            [],
            longer,
            [*batch[:-1], last],
            one,
            batch[rank:],
            no_labels,
            larger,
            other_rows,
            word,
            label,
        )
        for wrong in refused_ones:
            try:
                pipe.step(wrong)
                refused.append("")
            except fxpipe.BatchError as error:
                refused.append(str(error))
    pipe.synchronize(model)
    weights = zip(model.parameters(), reference.parameters(), strict=True)
    differences += [float((ours - those).abs().max()) for ours, those in weights]
    torch.manual_seed(LENGTH)
    batch = [some(length) for length in (3, 16, 9)]
    outputs = pipe.evaluate(batch, outputs=["head"], outputs_on=0).listed
    found = zip(outputs.get("head", []), batch, strict=rank == 0)
    apart = [float((x - reference.logits(one["ids"])).abs().max()) for x, one in found]
    pipe.save(directory / "saved")
    loaded, numbers = fxpipe.load(directory / "saved"), [some(length) for length in (4, 16, 7, 9)]
    loaded.prepare(numbers)
    differences.append(float(loaded.step(numbers) - eager(reference, numbers)))
    differences.append(float(loaded.evaluate(numbers) - eager(reference, numbers)))
    (directory / f"{rank}.json").write_text(json.dumps([differences, refused, apart]))


def train_split(directory: Path) -> None:
    """Three updates with a vocabulary that the ranks share, beside eager PyTorch, and an evaluation."""
    pipe = words(vocab_parallel="2-barrier", schedule="zb-h1", evaluation=True, dimensions=ROWS)
    torch.manual_seed(0)
    reference = Words()
    ours = pipe.optimizer(torch.optim.SGD, lr=LEARNING_RATE)
    theirs = torch.optim.SGD(reference.parameters(), lr=LEARNING_RATE)
    differences = []
    for lengths in NUMBERS[:3]:
        batch = [microbatch(length, rows_of(length)) for length in lengths]
        differences.append(float(pipe.step(batch) - eager(reference, batch)))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    batch = [microbatch(length, rows_of(length)) for length in NUMBERS[3]]
    differences.append(float(pipe.evaluate(batch) - eager(reference, batch)))
    model = Words()
    pipe.synchronize(model)
    weights = zip(model.parameters(), reference.parameters(), strict=True)
    differences += [float((mine - those).detach().abs().max()) for mine, those in weights]
    (directory / f"{pipe._runner.runtime.rank}.json").write_text(json.dumps(differences))
