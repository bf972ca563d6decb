"""Replicas with other numbers of microbatches, and what ranks run to train them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from lengths_model import Words, eager, microbatch, words
from safetensors.torch import save_file

import fxpipe

RANKS, REPLICAS = 2, 2
NUMBERS = ((1, 4), (5, 2), (0, 3), (2, 5))
"""Of the microbatches of each replica, in each step; those of the example are 3."""
SPLIT = 2  # the step with which a resumed run begins
OPTIONS = {"shard": "parameters", "validation": "post", "schedule": "zb-h1", "recompute": "full"}


def lists_of(numbers: tuple[int, ...], seed: int = 0) -> list[list[dict[str, torch.Tensor]]]:
    """The microbatches of each replica."""
    torch.manual_seed(seed)
    return [[microbatch(2 + (5 * k + 3 * r + seed) % 14) for k in range(n)] for r, n in enumerate(numbers)]


def compiled(**options: object) -> fxpipe.Pipeline:
    return words(evaluation=True, outputs=["head"], replicas=REPLICAS, **options)


class Training:
    """A run of the pipeline, and plain torch beside it on the microbatches of all replicas."""

    def __init__(self, directory: Path, pipe: fxpipe.Pipeline) -> None:
        self.pipe = pipe
        self.optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, clip_grad_norm=0.5)
        self.checkpoints = fxpipe.Checkpointer(pipe, directory / "checkpoints", optimizer=self.optimizer)

    def step(self, number: int) -> torch.Tensor:
        lists = lists_of(NUMBERS[number], number)
        loss = self.pipe.step(lists[self.pipe.replica])
        self.pipe.prepare(lists_of(NUMBERS[(number + 1) % len(NUMBERS)], number + 1)[self.pipe.replica])
        return loss

    def update(self) -> torch.Tensor:
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.optimizer.last_norm


def train(directory: Path) -> None:
    """Steps beside plain torch, refused batches between them; then the second half again, resumed."""
    pipe = compiled(**OPTIONS)
    assert pipe.process is not None
    process, replica = pipe.process.world_rank, pipe.replica
    torch.manual_seed(0)
    model = Words()
    theirs = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ours, differences, refused = Training(directory, pipe), [], []
    losses: dict[str, torch.Tensor] = {}
    with ours.checkpoints:
        for number in range(len(NUMBERS)):
            lists = lists_of(NUMBERS[number], number)
            loss = losses[f"loss {number}"] = ours.step(number)
            if number == 0:
                grads = {name: p.grad for name, p in pipe.parameters.items() if p.grad is not None}
                save_file({n: x.clone() for n, x in grads.items()}, directory / f"grads {process}")
            figures = pipe.figures()
            tokens = sum(each["ids"].numel() for one in lists for each in one)
            differences += [figures["tokens/s"] * figures["seconds"] / tokens - 1]
            differences += [float(loss - eager(model, [each for one in lists for each in one]))]
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            theirs.step()
            differences += [float(ours.update() - norm)]
            last = [] if process == RANKS * REPLICAS - 1 else lists[replica]
            for wrong in (last, lists if replica else lists[0]):
                try:
                    pipe.step(wrong)
                    refused.append("")
                except fxpipe.BatchError as error:
                    refused.append(str(error))
            if number == SPLIT - 1:
                ours.checkpoints.save()
    lists = lists_of((4, 0), 9)
    whole = [each for one in lists for each in one]
    result = pipe.evaluate(lists[replica], outputs=["head"], outputs_on="all")
    differences += [float(result.loss - eager(model, whole))]
    logits = [model.logits(each["ids"]) for each in lists[replica]]
    heads = zip(result.listed["head"], logits, strict=True)
    differences += [float((x - y).abs().max()) for x, y in heads]
    end = pipe.full_state_dict(rank=None)
    differences += [float((end[name] - p).abs().max()) for name, p in model.named_parameters()]
    again = Training(directory, pipe)
    with again.checkpoints:
        assert again.checkpoints.resume()
        assert pipe.step_number == SPLIT
        for number in range(SPLIT, len(NUMBERS)):
            assert torch.equal(again.step(number), losses[f"loss {number}"])
            again.update()
    resumed = pipe.full_state_dict(rank=None)
    assert all(torch.equal(resumed[name], x) for name, x in end.items())
    save_file(losses, directory / f"losses {process}")
    (directory / f"{process}.json").write_text(json.dumps([differences, refused]))
