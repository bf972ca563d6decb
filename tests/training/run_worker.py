"""A training run for the tests of checkpoints."""

import copy
import gc
import json
import os
import resource
import signal
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from zoo import EFFORT, captured_once

import fxpipe
from fxpipe.training.checkpoint import files as checkpoint_files
from fxpipe.training.checkpoint import tensor_store

SIZE, WIDTH, LENGTH, ROWS, MICROBATCHES = 64, 16, 6, 2, 4


class Reader(nn.Module):
    """A tied table, dropout, batch norm's running statistics, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(SIZE, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.norm = nn.BatchNorm1d(LENGTH)
        self.head = nn.Linear(WIDTH, SIZE, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens, labels):
        self.seen += 1
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + F.dropout(torch.tanh(layer(x)), 0.2)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch_of(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    rows = ROWS * MICROBATCHES
    return {name: torch.randint(SIZE, (rows, LENGTH), generator=generator) for name in ("tokens", "labels")}


@dataclass(frozen=True)
class Options:
    """``steps``: in all.  ``every``: steps to a checkpoint.  ``at_once``: without the background thread."""

    steps: int
    every: int = 2
    schedule: str = "zb-h1"
    stages_per_rank: int = 1
    vocab_parallel: bool = False
    at_once: bool = False


def pipeline(model: nn.Module, options: Options, ranks: int) -> fxpipe.Pipeline:
    example = {name: t[:ROWS] for name, t in batch_of(0).items()}
    with captured_once(type(model), next(model.parameters()).device):
        return fxpipe.compile(
            model,
            example,
            ranks=ranks,
            microbatches=MICROBATCHES,
            schedule=options.schedule,
            stages_per_rank=options.stages_per_rank,
            vocab_parallel=options.vocab_parallel,
            effort=EFFORT,
            check=False,
        )


def train(pipe: fxpipe.Pipeline, options: Options, directory: Path) -> bool:
    """Train to the end, from the newest checkpoint if there is one; return whether there was one."""
    optimizer = pipe.optimizer(
        torch.optim.AdamW,
        groups=[{"params": "*.bias", "weight_decay": 0.0}],
        lr=0.05,
        clip_grad_norm=0.5,
    )
    rate = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    with fxpipe.Checkpointer(
        pipe,
        directory / "checkpoints",
        optimizer=optimizer,
        state={"rate": rate},
        every=options.every,
        keep=2,
        asynchronous=not options.at_once,
    ) as checkpoints:
        resumed = checkpoints.resume()
        while pipe.step_number < options.steps:
            pipe.step(batch_of(pipe.step_number))
            optimizer.step()
            optimizer.zero_grad()
            rate.step()
            checkpoints.step()
    return resumed


def on_a_full_disk(directory: Path) -> None:
    """The third checkpoint, in the background, does not fit the disk of rank 1."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    pipe = pipeline(Reader(), Options(steps=9), ranks)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    message = "no error"
    try:
        with fxpipe.Checkpointer(pipe, directory / "checkpoints", every=1) as checkpoints:
            while pipe.step_number < 9:
                pipe.step(batch_of(pipe.step_number))
                checkpoints.step()
                checkpoints.wait()
                if pipe.step_number == 2 and rank == 1:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    except fxpipe.FxpipeError as error:
        message = str(error)
    pipe.step(batch_of(pipe.step_number))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    report = {"message": message, "steps": pipe.step_number}
    (directory / f"report.{rank}.json").write_text(json.dumps(report))


LATE = 4.0  # seconds that ranks wait for each other in ``dropped_and_late``


def dropped_and_late(directory: Path) -> None:
    """Two replicas, with pipelines and Checkpointers that they close or drop; the last checkpoint waits for
    rank 1, whose disk does not answer."""
    rank = int(os.environ["RANK"])
    report: dict[str, object] = {}

    def trained(number: int) -> tuple[fxpipe.Pipeline, fxpipe.Checkpointer]:
        example = torch.zeros(2, WIDTH)
        pipe = fxpipe.compile(
            nn.Linear(WIDTH, 2),
            (example,),
            ranks=1,
            replicas=2,
            microbatches=2,
            schedule="1f1b",
            loss_fn=lambda output, _: output.square().mean(),
            evaluation=number % 2 == 0,
            timeout=LATE,
            check=False,
        )
        pipe.step((torch.full((4, WIDTH), float(rank)),))
        checkpoints = fxpipe.Checkpointer(pipe, directory / f"run{number}")
        checkpoints.save()
        if number % 2:
            group = checkpoints._group
            checkpoints.close()
            assert group not in dist.distributed_c10d._world.pg_map
        return pipe, checkpoints

    for number in range(4):
        pipe, checkpoints = trained(number)
        if number in (1, 3):
            report[f"after {number}"] = {
                "threads": sorted(thread.name for thread in threading.enumerate()),
                "files": len(os.listdir("/proc/self/fd")),
                "all threads": len(os.listdir("/proc/self/task")),
            }
        del pipe, checkpoints
    pipe, checkpoints = trained(4)
    if rank == 1:
        (directory / "report.1.json").write_text(json.dumps(report))
        tensor_store.write = lambda *_: time.sleep(60)
    begin = time.monotonic()
    try:
        pipe.step_number += 1
        checkpoints.save()
    except fxpipe.FxpipeError as error:
        report |= {"message": str(error), "seconds": time.monotonic() - begin}
        (directory / f"report.{rank}.json").write_text(json.dumps(report))
        raise


class Picky:
    """Takes no state on rank 1."""

    def state_dict(self) -> dict:
        return {"rank": 0}

    def load_state_dict(self, state: dict) -> None:
        if os.environ["RANK"] == "1":
            raise ValueError("not mine")


def does_not_fit_one_rank(directory: Path) -> None:
    """A checkpoint that is refused on rank 1 alone, by an object of the user."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    pipe = pipeline(Reader(), Options(steps=2), ranks)
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    state, message = {"picky": Picky()}, "no error"
    with fxpipe.Checkpointer(
        pipe, directory / "checkpoints", optimizer=optimizer, state=state
    ) as checkpoints:
        for _ in range(2):
            pipe.step(batch_of(pipe.step_number))
            optimizer.step()
            if pipe.step_number == 1:
                checkpoints.save()
        own = pipe.plan.tensors[rank].parameters
        before = copy.deepcopy(({name: pipe.parameter(name) for name in own}, optimizer.state_dict()))
        try:
            checkpoints.resume()
        except fxpipe.FxpipeError as error:
            message = str(error)
    after = optimizer.state_dict()["state"]
    unchanged = all(torch.equal(pipe.parameter(name), tensor) for name, tensor in before[0].items())
    for k, fields in before[1]["state"].items():
        unchanged &= all(torch.equal(after[k][key], value) for key, value in fields.items())
    report = {"message": message, "steps": pipe.step_number, "unchanged": unchanged}
    (directory / f"report.{rank}.json").write_text(json.dumps(report))


def main(directory: Path, options: Options) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model = Reader()
    pipe = pipeline(model, options, ranks)
    alive = weakref.ref(model)
    del model
    gc.collect()
    resumed = train(pipe, options, directory)
    report = {
        "resumed": resumed,
        "model alive": alive() is not None,
        "parameters": sorted(pipe.parameters),
        "steps": pipe.step_number,
    }
    checkpoint_files.PATIENCE = 0.2
    report["blind"] = "no error"
    try:  # as if each machine had a disk of its own
        fxpipe.Checkpointer(pipe, directory / f"disk of rank {rank}")
    except fxpipe.FxpipeError as error:
        report["blind"] = str(error)
    pipe.save(directory / f"saved on disk {rank}")
    report["saved"] = sorted(path.name for path in directory.glob(f"saved on disk {rank}"))
    (directory / f"report.{rank}.json").write_text(json.dumps(report))
    state = pipe.full_state_dict()
    if rank == 0:
        save_file({name: t.clone() for name, t in state.items()}, directory / "full.safetensors")
