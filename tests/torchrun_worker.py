"""What ranks run in tests.

Every rank writes what it found into the directory: tensors as ``NAME.RANK.safetensors``, text as
``NAME.RANK.json``.  An error that a test expects is caught and written, so that the rank ends by itself and
torchrun ends no other one meanwhile.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F
from zoo import (
    CASES,
    WIDTH,
    Case,
    Chain,
    Dropout,
    Shape,
    TiedHead,
    built_and_compiled,
    compiled,
    numbers,
    tokens,
)

import fxpipe
import fxpipe.ir.liveness

MICROBATCHES = 4
DROPOUT = Case(Dropout, numbers)
#: Its gradients are summed in float32, over the microbatches and over the ranks that hold the tied weight.
LOW = Case(lambda: TiedHead().bfloat16(), tokens)
#: By number of ranks: name -> how it is run; a case is captured once for its neighbors.
SAME_BITS: dict[int, dict[str, tuple[Case, Shape]]] = {
    2: {
        "sum_and_count": (CASES["sum_and_count"], Shape(2, "gpipe")),
        "batch_norm": (CASES["batch_norm"], Shape(2, "1f1b")),
        "dropout": (DROPOUT, Shape(2, "zb-h1", seed=3)),
        "offload": (DROPOUT, Shape(2, "gpipe", offload=True)),
        "skips, V": (CASES["unet"], Shape(2, "zb-h1", 2, "v")),
        "tied": (CASES["tied_head"], Shape(2, "1f1b", 2)),
        "tied, float32": (LOW, Shape(2, "1f1b", grad_dtype=torch.float32)),
        "vocabulary, float32": (LOW, Shape(2, "zb-h1", vocab_parallel=True, grad_dtype=torch.float32)),
        "vocabulary": (CASES["tied_head"], Shape(2, "1f1b", vocab_parallel="1-barrier")),
    },
    4: {
        "vocabulary, V": (CASES["tied_head"], Shape(4, "zb-v", vocab_parallel="1-barrier")),
        "vocabulary, two barriers": (CASES["tied_head"], Shape(4, "zb-h1", vocab_parallel="2-barrier")),
        "offload, vocabulary": (CASES["tied_head"], Shape(4, "gis", vocab_parallel=True, offload=0.5)),
        "tied, V": (CASES["tied_head"], Shape(4, "zb-h1", 2, "v")),
        "tied thrice": (CASES["tied_thrice"], Shape(4, "1f1b")),
        **{name: (CASES["unet"], Shape(4, name)) for name in ("interleaved", "dualpipe-v")},  # skips
        "encoder output": (CASES["encoder_decoder"], Shape(4, "1f1b")),
        "integers": (CASES["integer_crossing"], Shape(4, "gpipe")),
        "offload, V": (CASES["transformer_layer"], Shape(4, "zb-v", offload=True)),
    },
}
#: Those whose way another one of as many ranks shows, or one of ``ADDED`` and ``TRAINED_SHAPES``.
VARIATIONS = {2: ("tied", "vocabulary"), 4: ("vocabulary, V", "tied, V", "interleaved", "offload, V")}
#: Gradients of several steps add up, until they are zeroed.
ADDED = {
    "plain": (Case(Chain, numbers), Shape(2, "zb-h1", check=False)),
    "tied": (CASES["tied_head"], Shape(2, "1f1b", check=False)),
    "sum_and_count": (CASES["sum_and_count"], Shape(2, "1f1b", check=False)),
    "vocabulary": (CASES["tied_head"], Shape(2, "zb-v", vocab_parallel=True, check=False)),
}
TRAINED = CASES["tied_head"]
TRAINED_SHAPES = {
    "whole": Shape(2, "zb-h1", 2, check=False),
    "vocabulary": Shape(2, "zb-h1", vocab_parallel=True, check=False),
}
MASTER_SHAPES = {
    "whole": Shape(2, "1f1b", grad_dtype=torch.float32, check=False),
    "vocabulary": Shape(2, "zb-h1", vocab_parallel=True, grad_dtype=torch.float32, check=False),
}
STEPS, LEARNING_RATE, CLIP = 3, 0.01, 0.2
BATCHES = [5, 6, 7]  # seeds
OTHER_NORMS = "1e-05", "0.25"


def batch_of(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return TRAINED.batch(TRAINED.rows * MICROBATCHES)


class BranchesOnChance(Chain):
    def between(self, x, i):
        return x * 2 if i == 2 and torch.rand(()) > 0.5 else x


class Rank:
    def __init__(self, directory: Path):
        self.directory = directory
        self.number = int(os.environ["RANK"])

    def tensors(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        own = {key: t.detach().contiguous().clone() for key, t in tensors.items()}
        save_file(own, self.directory / f"{name}.{self.number}.safetensors")

    def text(self, name: str, value: object) -> None:
        (self.directory / f"{name}.{self.number}.json").write_text(json.dumps(value))

    def error(self, name: str, function: Callable[..., object], *args: object, **kwargs: object) -> None:
        message = "no error"
        try:
            function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the test looks at its type
            message = f"{type(error).__name__}: {error}"
        self.text(name, message)


def after_step(pipe: fxpipe.Pipeline, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """What this rank holds then."""
    held = pipe.plan.tensors[pipe.runtime.rank]
    found = {"loss": loss}
    found |= {f"grad {name}": pipe.parameter(name).grad for name in held.gradients}
    return found | {f"buffer {name}": pipe.buffers[name] for name in held.buffers}


# -- the same bits ----------------------------------------------------------------------------------------


def names_of(ranks: int, variations: bool = False) -> list[str]:
    return [name for name in SAME_BITS[ranks] if (name in VARIATIONS[ranks]) == variations]


def same_bits(rank: Rank, variations: bool = False) -> None:
    """Each case, saved for the test to run in one process, and two steps with the same weights."""
    ranks = int(os.environ["WORLD_SIZE"])
    for name in names_of(ranks, variations):
        case, shape = SAME_BITS[ranks][name]
        _, pipe = built_and_compiled(case, MICROBATCHES, replace(shape, check=False))
        assert bool(pipe.plan.transfers) == bool(shape.offload)
        pipe.save(rank.directory / f"{name} saved")
        for step in (0, 1):
            for held in pipe.plan.tensors[rank.number].parameters:
                pipe.parameter(held).grad = None
            rank.tensors(f"{name} {step}", after_step(pipe, pipe.step(case.data(MICROBATCHES))))


def same_bits_of_variations(rank: Rank) -> None:
    same_bits(rank, variations=True)


def sums(rank: Rank) -> None:
    for name, (case, shape) in ADDED.items():
        _, pipe = built_and_compiled(case, MICROBATCHES, shape)
        for step in (0, 1):
            rank.tensors(f"added {name} {step}", after_step(pipe, pipe.step(case.data(MICROBATCHES))))


# -- training ---------------------------------------------------------------------------------------------


def training(rank: Rank) -> None:
    """Three steps; then the pipeline is saved."""
    for name, shape in TRAINED_SHAPES.items():
        model, pipe = built_and_compiled(TRAINED, MICROBATCHES, shape)
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=LEARNING_RATE, clip_grad_norm=CLIP)
        losses, norms = [], []
        for seed in BATCHES:
            losses.append(pipe.step(batch_of(seed)))
            optimizer.step()
            norms.append(float(optimizer.last_norm))
            optimizer.zero_grad()
        held = pipe.plan.tensors[rank.number].parameters
        rank.tensors(f"{name} parameters", {name: pipe.parameter(name) for name in held})
        rank.tensors(f"{name} course", {"losses": torch.stack(losses), "norms": torch.tensor(norms)})
        pipe.save(rank.directory / name)
        rank.error(f"{name} part", pipe.state_dict)
        rank.tensors(f"{name} full", pipe.full_state_dict())
        pipe.synchronize()
        rank.tensors(f"{name} whole", pipe.state_dict())
        evaluation = compiled(TRAINED, model.eval(), MICROBATCHES, replace(shape, gradients=False))
        rank.tensors(f"{name} evaluation", {"loss": evaluation.step(batch_of(8))})


def masters(rank: Rank) -> None:
    """Three steps on master weights, of which the last is resumed from a checkpoint; they are written."""
    for name, shape in MASTER_SHAPES.items():
        for steps in (STEPS - 1, STEPS):
            _, pipe = built_and_compiled(LOW, MICROBATCHES, shape)
            optimizer = pipe.optimizer(
                torch.optim.AdamW, lr=LEARNING_RATE, clip_grad_norm=CLIP, master_weights=True
            )
            checkpoints = fxpipe.Checkpointer(pipe, rank.directory / f"{name} steps", optimizer=optimizer)
            with checkpoints:
                assert checkpoints.resume() == (steps == STEPS)
                while pipe.step_number < steps:
                    pipe.step(batch_of(BATCHES[pipe.step_number]))
                    optimizer.step()
                    optimizer.zero_grad()
                checkpoints.save()
        held = {optimizer.names[master]: master for master in optimizer.masters}
        assert all(torch.equal(pipe.parameter(key), master.bfloat16()) for key, master in held.items())
        rank.tensors(f"{name} masters", held)


def loaded(rank: Rank) -> None:
    """One step of what ``training`` saved, as it is and with other norms in the program of rank 0."""
    if rank.number == 0:
        shutil.copytree(rank.directory / "whole", rank.directory / "edited")
        program = rank.directory / "edited" / "rank0.py"
        program.write_text(program.read_text().replace(*OTHER_NORMS))
    dist.barrier()
    for name in ("whole", "edited", "vocabulary"):
        pipe = fxpipe.load(rank.directory / name)
        rank.tensors(name, after_step(pipe, pipe.step(batch_of(BATCHES[0]))))


# -- edited programs that do not fit together ---------------------------------------------------------------


class Cached(Chain):
    """Uses a plain tensor twice, and a view of it: constants that share their memory."""

    def __init__(self) -> None:
        super().__init__(4)
        self.table = torch.linspace(0.5, 1.5, WIDTH)

    def between(self, x, i):
        return x * self.table if i < 2 else x * self.table[: WIDTH // 2].repeat(2)


def shared_constants(rank: Rank) -> None:
    case = Case(Cached, numbers)
    pipe = compiled(case, case.build(), MICROBATCHES, Shape(2))
    assert any(held.constants for held in pipe.plan.tensors)
    rank.tensors("shared", {"loss": pipe.step(case.data(MICROBATCHES))})
    pipe.save(rank.directory / "shared")


def misfit(rank: Rank) -> None:
    """A step of a pipeline that the test has edited. The process can run no other step after it."""
    pipe = fxpipe.load(rank.directory / "misfit")
    rank.error("misfit", pipe.step, Case(Chain, numbers).data(MICROBATCHES))


def on_two_ranks(rank: Rank) -> None:
    """One after the other in the same processes, and what fails at the end."""
    same_bits(rank)
    shared_constants(rank)
    masters(rank)
    torch.set_default_dtype(torch.float64)
    sums(rank)
    training(rank)
    loaded(rank)
    torch.set_default_dtype(torch.float32)
    misfit(rank)


# -- what is refused --------------------------------------------------------------------------------------


def ends_with(rank: Rank, name: str, pipe: fxpipe.Pipeline, batch: dict[str, torch.Tensor]) -> NoReturn:
    """A step that fails, and the end of the process, which the ranks that wait for it notice.

    They do not listen to torch's agent, which ends all ranks as soon as one has failed.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    rank.error(name, pipe.step, batch)
    sys.exit(1)


def refused(rank: Rank) -> None:
    """One after the other, in the same processes."""
    case = Case(Chain, numbers)
    batch = case.data(MICROBATCHES)
    rank.error("world size", compiled, case, case.build(), MICROBATCHES, Shape(3))
    rank.error("untraceable", compiled, Case(BranchesOnChance, numbers), BranchesOnChance(), 2, Shape(2))
    rank.error("schedule", compiled, case, case.build(), MICROBATCHES, Shape(2, "2f2b"))
    rank.error("too few blocks", compiled, case, nn.Identity(), MICROBATCHES, Shape(2))
    pipe = compiled(case, case.build(), MICROBATCHES, Shape(2))
    rank.tensors("fine", {"loss": pipe.step(batch)})
    rank.error("not empty", pipe.save, rank.directory / "full")
    rank.error("a file", pipe.save, rank.directory / "full" / "file")
    rank.error("loaded", fxpipe.load, rank.directory / "full")
    pipe.save(rank.directory / "new")
    wide = {name: F.pad(x, (0, 1)) for name, x in batch.items()}
    rank.error("bad batches", pipe.step, wide)
    rank.error("unknown output", pipe.step, batch, outputs=["logits"])
    before = pipe.step_number, pipe.process.watch.failures.are_known
    rank.text("refused", [*before, pipe.step(batch).item()])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one rank may have ended before the other one has written
    rank.error("one bad batch", pipe.step, wide if rank.number == 1 else batch)
    ends_with(rank, "after a failure", pipe, batch)


# -- what fails in the middle -----------------------------------------------------------------------------


def step_with_fault(rank: Rank, fault: Callable[[], None], at: str) -> Callable[[], torch.Tensor]:
    """The second step of a pipeline, in which rank 2 meets a fault where it begins ``at``."""
    case = Case(Chain, numbers)
    pipe = compiled(case, case.build(), MICROBATCHES, Shape(int(os.environ["WORLD_SIZE"]), "zb-h1"))
    pipe.step(case.data(MICROBATCHES))

    def begins(op: str) -> None:
        if rank.number == 2 and op == at:
            rank.text("failed", time.time())
            fault()

    pipe.runtime.record.at_op = begins
    return lambda: pipe.step(case.data(MICROBATCHES))


def boom() -> None:
    raise ValueError("boom")


def raises(rank: Rank) -> None:
    """Torchrun ends all ranks as soon as one has failed. They do not listen: they must end by themselves."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    step_with_fault(rank, boom, "B2.1")()


def raises_and_stays(rank: Rank) -> None:
    """The rank that failed goes on living, so that no connection breaks."""
    step = step_with_fault(rank, boom, "F2.2")
    try:
        step()
    except fxpipe.errors.RunError:
        if rank.number != 2:
            raise
        signal.pause()


def disk_fails(rank: Rank) -> None:
    """Rank 1 cannot read back what it offloaded."""
    case = Case(Chain, numbers)
    pipe = compiled(case, case.build(), MICROBATCHES, Shape(2, "gpipe", offload=True))
    pipe.step(case.data(MICROBATCHES))
    if rank.number == 1:
        os.preadv = lambda *args: 0
    ends_with(rank, "disk", pipe, case.data(MICROBATCHES))


def main(check: Callable[[Rank], None], directory: Path) -> None:
    fxpipe.ir.liveness.SMALLEST = 1  # the models are small
    check(Rank(directory))
