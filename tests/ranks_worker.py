"""What ranks run in tests of ranks that agree, fail and start again."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torchrun_worker import Rank
from zoo import LENGTH, WIDTH, WORDS, Block, Case, Shape, compiled, tokens

import fxpipe
import fxpipe.plan.saved.files
import fxpipe.runtime.job.watch
from fxpipe.runtime.job.process import Process

RANKS, MICROBATCHES = 3, 4
SHAPE = Shape(RANKS, "1f1b")
SHAPES = {"trained": SHAPE, "vocabulary": Shape(RANKS, "1f1b", vocab_parallel=True)}
LEARNING_RATE, STEPS = 0.1, 3
#: Seconds that a model takes to trace, and a shorter time limit of ranks that wait for each other.
TRACING, LIMIT = 10.0, 7.0
#: Seconds for which a rank is stopped.
STOPPED = 3.0
#: The time limit of a run whose store is stopped.
SHORT = 4.0


class Shared(nn.Module):
    """Values that several stages use: a tied weight, a frozen parameter, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.register_buffer("mask", torch.randn(LENGTH, 1))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids, labels):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x) * self.frozen + self.mask
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Listed(Shared):
    """Takes its batch by position, as a list from a DataLoader."""


SHARED = Case(Shared, tokens)
LISTED = Case(Listed, lambda rows: [*tokens(rows).values()])


def batch_of(seed: int, case: Case = SHARED):
    torch.manual_seed(seed)
    return case.batch(case.rows * MICROBATCHES)


def train(pipe: fxpipe.Pipeline, batches) -> dict[str, torch.Tensor]:
    """The losses of the steps, and the norms of the gradients of all ranks."""
    optimizer = pipe.optimizer(torch.optim.SGD, lr=LEARNING_RATE)
    losses, norms = [], []
    for batch in batches:
        losses.append(pipe.step(batch))
        norms.append(optimizer.grad_norm())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": torch.stack(losses), "norms": torch.stack(norms)}


def held(pipe: fxpipe.Pipeline, rank: Rank) -> dict[str, torch.Tensor]:
    own = pipe.plan.tensors[rank.number]
    return {n: pipe.parameter(n) for n in own.parameters} | {n: pipe.buffers[n] for n in own.buffers}


def write_training(rank: Rank, name: str, pipe: fxpipe.Pipeline, batches) -> None:
    """The tensors before and after some steps, and the losses."""
    rank.tensors(f"{name} before", held(pipe, rank))
    rank.tensors(f"{name} losses", train(pipe, batches))
    rank.tensors(f"{name} after", held(pipe, rank))


def write_part(rank: Rank, name: str, pipe: fxpipe.Pipeline) -> None:
    """What this rank has of the plan and of the programs, and the plan that it can ask for."""
    artifact = pipe.artifact
    rank.text(f"{name} part", [[*map(bool, artifact.programs)], len(artifact.plan.order)])
    rank.text(f"{name} plan", [pipe.plan.to_json(), pipe.simulate().seconds])


# -- ranks that agree -------------------------------------------------------------------------------------


def own_values(rank: Rank) -> None:
    """Each rank builds the model from its own seed, and gives the leaves that it needs."""
    rank.tensors("own", SHARED.build(seed=rank.number).state_dict())
    for name, shape in SHAPES.items():
        pipe = compiled(SHARED, SHARED.build(seed=rank.number), MICROBATCHES, shape)
        rank.text(f"{name} leaves", pipe.leaves())
        own = [{leaf: batch_of(seed)[leaf] for leaf in pipe.leaves()} for seed in range(STEPS)]
        write_training(rank, name, pipe, own)
        if name == "trained":
            write_part(rank, name, pipe)
            pipe.save(rank.directory / "saved")


class Wide(nn.Linear):
    """Has a constant that no file can hold."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.table = torch.ones(4, dtype=torch.complex128)

    def forward(self, x):
        return (super().forward(x) * self.table).abs().square().mean()


def constant_that_cannot_be_sent(rank: Rank) -> None:
    given = {"ranks": RANKS, "microbatches": MICROBATCHES, "schedule": "1f1b"}
    rank.error("wide", fxpipe.compile, Wide(), (torch.ones(2, 4),), **given)


def lists(rank: Rank) -> None:
    model = LISTED.build(seed=rank.number)
    pipe = compiled(LISTED, model, MICROBATCHES, SHAPE)
    ids, labels = batch_of(0, LISTED)
    needs = pipe.leaves()
    batches = [batch_of(0, LISTED), [ids if "0" in needs else None, labels if "1" in needs else None]]
    rank.tensors("lists", {"losses": torch.stack([pipe.step(batch) for batch in batches])})


def meta(rank: Rank) -> None:
    """A model without values gets others on each rank."""
    with torch.device("meta"):
        model = Shared()
    pipe = compiled(SHARED, model, MICROBATCHES, SHAPE)
    pipe.load_state_dict(SHARED.build(seed=10 + rank.number).state_dict())
    rank.tensors("meta", held(pipe, rank))


def random_(module: nn.Module) -> None:
    """For what the modules of ``Shared`` leave out."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        tensor.normal_()


def initialized(rank: Rank) -> None:
    with torch.device("meta"):
        model = Shared()
    pipe = compiled(SHARED, model, MICROBATCHES, SHAPES["vocabulary"])
    rank.error("nothing writes", pipe.initialize)
    rank.error("other seed", pipe.initialize, random_, seed=rank.number)
    pipe.initialize(random_, seed=5)
    rank.tensors("initialized", held(pipe, rank))
    rank.tensors("initialized loss", {"loss": pipe.step(batch_of(0))})
    del model
    rank.error("no model", pipe.initialize, random_)


def other_files(rank: Rank) -> None:
    """Rank 1 loads a damaged copy, and then another pipeline."""
    own = rank.directory / f"copy {rank.number}"
    shutil.copytree(rank.directory / "saved", own)
    if rank.number == 1:
        (own / "rank1.safetensors").write_bytes(b"short")
    rank.error("damaged", fxpipe.load, own)
    other = compiled(SHARED, SHARED.build(), MICROBATCHES, Shape(RANKS, "gpipe"))
    other.save(rank.directory / "other")
    rank.error("other plan", fxpipe.load, rank.directory / ("other" if rank.number == 1 else "saved"))


def full_disk(rank: Rank) -> None:
    pipe = fxpipe.load(rank.directory / "saved")
    write_part(rank, "loaded", pipe)
    rank.error("all alone", pipe.run_local, batch_of(0))
    write = fxpipe.plan.saved.files.write_tensors

    def fails(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if rank.number == 0:  # which writes the files of all
        fxpipe.plan.saved.files.write_tensors = fails
    rank.error("full disk", pipe.save, rank.directory / "full")
    fxpipe.plan.saved.files.write_tensors = write
    pipe.save(rank.directory / "not full")


def slow_rank(rank: Rank) -> None:
    """Rank 2 takes a while for an op of the second step, which all begin together: the others say that they
    wait."""
    pipe = compiled(SHARED, SHARED.build(), MICROBATCHES, SHAPE)
    pipe.step(batch_of(0))
    fxpipe.runtime.job.watch.SLOW = 1.0

    def begins(op: str) -> None:
        if rank.number == 2 and op == "F2.1":
            time.sleep(3.5)

    pipe.runtime.record.at_op = begins
    pipe.step(batch_of(1))


def other_batch(rank: Rank) -> None:
    """In the second step rank 1 has other labels; nothing can run after it."""
    pipe = compiled(SHARED, SHARED.build(), MICROBATCHES, SHAPE)
    pipe.step(batch_of(0))
    batch = batch_of(1)
    if rank.number == 1:
        batch["labels"] = batch["labels"].flip(0)
    rank.error("other batch", pipe.step, batch)


def agree(rank: Rank) -> None:
    """One after the other in the same processes, whose process group they made."""
    dist.init_process_group("gloo")
    own_values(rank)
    constant_that_cannot_be_sent(rank)
    lists(rank)
    meta(rank)
    initialized(rank)
    other_files(rank)
    full_disk(rank)
    slow_rank(rank)
    other_batch(rank)


# -- ranks that disagree ----------------------------------------------------------------------------------


def disagree(rank: Rank) -> None:
    """Outside of steps: all ranks raise, and can go on."""
    odd = rank.number == 1
    settings = {"ranks": RANKS, "microbatches": MICROBATCHES, "schedule": "1f1b"}
    build, example = SHARED.build, SHARED.example()

    def given(name: str, model: nn.Module, **options: object) -> None:
        rank.error(name, fxpipe.compile, model, example, **settings | options)

    given("another seed", build(), seed=int(odd))
    given("a wrong option", build(), seed="1" if odd else 1)
    given("another model", nn.Linear(2, 2) if odd else build())
    given("frozen on one", build().requires_grad_(not odd))
    pipe, other = (fxpipe.compile(build(), example, evaluation=True, **settings) for _ in range(2))
    own = pipe.optimizer
    rank.error("another class", own, torch.optim.SGD if odd else torch.optim.AdamW, lr=0.1)
    rank.error("another rate", own, torch.optim.SGD, lr=0.2 if odd else 0.1)
    rank.error("other groups", own, torch.optim.SGD, groups=[{"params": "*.bias" if odd else "*.weight"}])
    rank.error("groups of one", own, torch.optim.SGD, groups=[{"params": "*.bias"}] if odd else [])
    rank.error("a wrong norm", own, torch.optim.SGD, clip_grad_norm=-1 if odd else 1.0)
    rank.error("local", pipe.run_local, batch_of(0))
    rank.error("two pipelines", (other if odd else pipe).save, rank.directory / "never")
    rank.error("two calls", pipe.synchronize if odd else pipe.full_state_dict)
    rank.error("first steps", (pipe.evaluate if odd else pipe.step), batch_of(0))
    optimizer = own(torch.optim.SGD, lr=LEARNING_RATE, clip_grad_norm=1.0)
    checkpointer = partial(fxpipe.Checkpointer, pipe, rank.directory / "never")
    rank.error("one checkpointer", checkpointer if odd else pipe.full_state_dict)
    rank.error("an optimizer", checkpointer, optimizer=optimizer if odd else None)
    rank.error("every", checkpointer, every=1 + odd)
    pipe.step(batch_of(0))
    rank.error("no norm", optimizer.grad_norm if odd else pipe.full_state_dict)
    if odd:
        optimizer.counts.updates += 1
    rank.error("updates", pipe.save, rank.directory / "never")
    optimizer.counts.updates = 0
    optimizer.step()
    pipe.step(batch_of(1))
    with torch.no_grad():
        pipe.buffers["mask"].add_(float(odd))
    rank.error("values", pipe.full_state_dict)
    with torch.device("meta" if odd else "cpu"):  # of what the user makes, and no words for other ranks
        pipe.share_values()
        rank.text("names", sorted(pipe.full_state_dict()))


def other_options(rank: Rank) -> None:
    """A scheduler on one rank, seen in a step: nothing can run after it."""
    pipe = compiled(SHARED, SHARED.build(), MICROBATCHES, SHAPE)
    optimizer = pipe.optimizer(torch.optim.SGD, lr=LEARNING_RATE)
    pipe.step(batch_of(0))
    if rank.number == 2:
        optimizer.param_groups[0]["lr"] = 0.5
    rank.error("other options", pipe.step, batch_of(1))


def other_messages(rank: Rank) -> None:
    """Two pipelines whose messages have different sizes run in two orders: both wait for messages."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pipes = [
        fxpipe.compile(
            SHARED.build(), SHARED.batch(rows), ranks=RANKS, microbatches=MICROBATCHES, schedule="1f1b"
        )
        for rows in (2, 3)
    ]
    batches = [SHARED.batch(rows * MICROBATCHES) for rows in (2, 3)]
    for pipe, batch in zip(pipes, batches, strict=True):
        pipe.step(batch)
    which = 1 if rank.number == 1 else 0
    pipes[which].step(batches[which])


# -- ranks that fail and start again ----------------------------------------------------------------------


def attempts(rank: Rank) -> None:
    """The first attempt fails between two steps, the second is killed in a step, the third ends well.

    The ranks do not listen to torchrun, which ends all as soon as one has failed: they must end by
    themselves.  In the third attempt the time limit is shorter than it takes rank 0 to compile.  The script
    makes groups itself, before and behind the pipeline, whose keys are in the store of all attempts.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("pp",))
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    rank.directory /= str(attempt)
    rank.directory.mkdir(exist_ok=True)
    model = SHARED.build(seed=rank.number)
    if attempt == 2:
        model.register_forward_pre_hook(lambda *_: time.sleep(TRACING))
    pipe = fxpipe.compile(
        model,
        SHARED.example(),
        ranks=mesh,
        microbatches=MICROBATCHES,
        schedule="1f1b",
        timeout=LIMIT if attempt == 2 else None,
    )
    later = dist.new_group([0, 2])
    if rank.number != 1:
        dist.barrier(later)

    def batches():
        for seed in range(STEPS):
            if attempt == 0 and rank.number == 1 and seed == 1:
                rank.text("failed", time.time())
                raise ValueError("a bad row")
            yield batch_of(seed)

    def begins(op: str) -> None:
        if attempt == 1 and rank.number == 2 and op == "F2.1" and pipe.runtime.step_number == 1:
            rank.text("failed", time.time())
            os.kill(os.getpid(), signal.SIGKILL)

    pipe.runtime.record.at_op = begins
    try:
        write_training(rank, "trained", pipe, batches())
    except fxpipe.errors.RunError as error:
        rank.text("error", [str(error), time.time()])
        raise


# -- ranks that another one waits for ---------------------------------------------------------------------


def silent(rank: Rank) -> None:
    """Rank 2 is stopped for some seconds, and then killed; no connection tells the others that wait."""
    process = Process.join(torch.device("cpu"), timedelta(seconds=LIMIT))
    if rank.number == 2:
        subprocess.Popen(["sh", "-c", f"sleep {STOPPED}; kill -CONT {os.getpid()}"])
        begun = time.time()
        os.kill(os.getpid(), signal.SIGSTOP)
        rank.text("stopped", time.time() - begun)
    process.gather(b"")
    rank.text("went on", True)
    if rank.number == 2:
        rank.text("killed", time.time())
        os.kill(os.getpid(), signal.SIGKILL)
    with process.watch.collective():
        time.sleep(60)  # as a wait for a message would


def stopped_store(rank: Rank) -> None:
    """Rank 0, which has the store, is stopped for ever."""
    process = Process.join(torch.device("cpu"), timedelta(seconds=SHORT))
    first, *_ = process.gather(str(os.getpid()).encode())
    while rank.number and not process.watch.failures.remembered()[0].runs:
        time.sleep(0.05)  # on a busy machine rank 0 would be stopped before the others have looked at it
    process.gather(b"")
    if rank.number == 0:
        rank.text("stopped", time.time())
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        process.gather(b"")
    except fxpipe.errors.RunError as error:
        rank.text("error", [str(error), time.time()])
    process.watch._stop()
    rank.text("ended", time.time())
    time.sleep(1.0)  # the other one ends as well
    os.kill(int(first), signal.SIGKILL)


def calls_alone(rank: Rank) -> None:
    """Rank 1 alone calls torch.distributed."""
    rank.text("here", 0)
    while len([*rank.directory.glob("here.*")]) < RANKS:
        time.sleep(0.05)  # on a busy machine they come one after the other, and the limit below is short
    process = Process.join(torch.device("cpu"), timedelta(seconds=1.5))
    if rank.number == 1:
        dist.all_gather_object([None] * dist.get_world_size(), rank.number)
    process.gather(b"")


def main(check: Callable[[Rank], None], directory: Path) -> None:
    check(Rank(directory))
