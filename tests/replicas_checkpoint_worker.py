"""A run of two replicas of two ranks, saved and resumed on other numbers of both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from replicas_worker import MICROBATCHES, OPTIONS, RANKS, REPLICAS, ROWS, Case, Tied
from safetensors.torch import load_file, save_file
from zoo import captured_once

import fxpipe

PROCESSES = RANKS * REPLICAS
STEPS, CHECKPOINT = 4, 2
#: No checkpoint has the gradients, which one level more divides.
SHARDS = (None, "optimizer", "parameters")
#: Run -> its ranks and shard level, and the level of the run that it resumes.
RESUMED = {
    "4 x 1": (1, "parameters", "optimizer"),
    "1 x 4": (4, None, "parameters"),
}


def partly_frozen() -> Tied:
    model = Tied(blocks=4)
    model.blocks[0].requires_grad_(False)
    return model


CASE = Case(partly_frozen)


def batches() -> list[dict[str, torch.Tensor]]:
    found = CASE.batches()
    return [found[step % len(found)] for step in range(STEPS)]


def compiled(ranks: int, replicas: int, shard: str | None) -> fxpipe.Pipeline:
    example = {name: x[:ROWS] for name, x in batches()[0].items()}
    microbatches = MICROBATCHES * REPLICAS // replicas
    with captured_once(microbatches):
        return fxpipe.compile(
            CASE.made(), example, ranks=ranks, replicas=replicas, shard=shard, schedule="1f1b",
            microbatches=microbatches, vocab_parallel=shard == "parameters", check=False,
        )  # fmt: skip


class Rows:
    """The rows of a replica; knows which step comes next, as a loader does."""

    def __init__(self, replica: int, replicas: int, own: bool) -> None:
        """own: whether its state differs by replica."""
        self.replica, self.size, self.own = replica, ROWS * MICROBATCHES * REPLICAS // replicas, own
        self.next = 0

    def __next__(self) -> dict[str, torch.Tensor]:
        batch, self.next = batches()[self.next], self.next + 1
        return {name: x[self.replica * self.size :][: self.size] for name, x in batch.items()}

    def state_dict(self) -> dict[str, Any]:
        own = {"replica": self.replica, "seen": torch.tensor([self.replica, self.next])} if self.own else {}
        return {"next": self.next, **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.own:
            assert state["replica"] == self.replica
            assert state["seen"].tolist() == [self.replica, state["next"]]
        self.next = state["next"]


def train(pipe: fxpipe.Pipeline, directory: Path, resume: Path | None = None, own: bool = False) -> None:
    """Train, from a checkpoint on or with one after some steps; write one at the end, and the losses."""
    optimizer = pipe.optimizer(torch.optim.AdamW, **OPTIONS)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    rows = Rows(pipe.replica, pipe.replicas, own)
    state = {"scheduler": scheduler, "rows": rows}

    def until(steps: int) -> dict[str, torch.Tensor]:
        losses = {}
        while pipe.step_number < steps:
            step = pipe.step_number
            losses[str(step)] = pipe.step(next(rows))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        return losses

    if resume is None:
        until(CHECKPOINT)
    with fxpipe.Checkpointer(pipe, resume or directory / "half", optimizer=optimizer, state=state) as half:
        if resume is None:
            half.save()
        else:
            assert half.resume()
            assert (pipe.step_number, rows.next) == (CHECKPOINT, CHECKPOINT)
    losses = until(STEPS)
    with fxpipe.Checkpointer(pipe, directory / "end", optimizer=optimizer, state=state) as end:
        end.save()
    if pipe.process is None or pipe.process.leads:
        save_file(losses, directory / "losses")


def run(directory: Path, goes_on: Sequence[str | None]) -> None:
    """Runs without interruption, of each level; their other halves, of loaded pipelines; other meshes.

    goes_on: the levels whose other half has the same level.
    """
    for shard in SHARDS:
        pipe = compiled(RANKS, REPLICAS, shard)
        pipe.save(directory / f"pipe {shard}")
        train(pipe, directory / f"{shard}", own=shard is None)
        check_exports(pipe, directory / f"export {shard}")
    for shard, earlier in zip(SHARDS, (*SHARDS[1:], SHARDS[0]), strict=True):
        for of in (shard, earlier) if shard in goes_on else (earlier,):
            pipe = fxpipe.load(directory / f"pipe {shard}")
            assert shard != "parameters" or abs(bytes_held(pipe) / whole_bytes(pipe) - 1 / REPLICAS) < 0.01
            train(pipe, directory / f"{shard} of {of}", directory / f"{of}" / "half", of is None)
    for name, (ranks, level, of) in RESUMED.items():
        pipe = compiled(ranks, PROCESSES // ranks, level)
        train(pipe, directory / name, directory / f"{of}" / "half")
        come_back(directory, name)
    rows = {"rows": Rows(pipe.replica, pipe.replicas, own=True)}
    with fxpipe.Checkpointer(pipe, directory / "None" / "half", state=rows) as checkpoints:
        try:
            checkpoints.resume()
        except fxpipe.ArtifactError as error:
            message = "another state 'rows' for each of 2 replicas, and this run has 1. Start as many"
            assert message in str(error)  # noqa: PT017 - no pytest here
        else:
            raise AssertionError("the states of two replicas are given to one")


def bytes_held(pipe: fxpipe.Pipeline) -> int:
    """The memory of the parameters of this process."""
    storages = [parameter.untyped_storage() for parameter in pipe.parameters.values()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def whole_bytes(pipe: fxpipe.Pipeline) -> int:
    """That of a replica without others."""
    return sum(pipe.plan.layouts[name].nbytes for name in pipe.plan.tensors[pipe.process.rank].parameters)


def come_back(directory: Path, name: str) -> None:
    """What a run on another mesh has at its end, read by the replicas and written again."""
    pipe = fxpipe.load(directory / "pipe parameters")
    optimizer = pipe.optimizer(torch.optim.AdamW, **OPTIONS)
    for path in (directory / name / "end", directory / f"back from {name}" / "end"):
        with fxpipe.Checkpointer(pipe, path, optimizer=optimizer) as checkpoints:
            if not checkpoints.resume():
                checkpoints.save()


def check_exports(pipe: fxpipe.Pipeline, directory: Path) -> None:
    """The same weights of all replicas, from all ways to have them."""
    pipe.export(directory)
    whole = pipe.full_state_dict(rank=None)
    model = CASE.made()
    pipe.synchronize(model)
    for found in (model.state_dict(), load_file(directory / "model.safetensors")):
        assert {*found} <= {*whole}
        assert all(torch.equal(value, whole[name]) for name, value in found.items())
