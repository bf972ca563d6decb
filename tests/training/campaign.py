"""A run with a fault in each of its attempts, which torch's elastic agent starts again, as torchrun does.

    python tests/training/campaign.py --ranks 4 --faults 50 --first 1000
    python tests/training/campaign.py --groups lanes --faults 50

With ``--groups`` each attempt makes the process group itself, a mesh before the pipeline and a group behind
it: of ranks, or of 2 x 2 ranks and lanes.  The result must be that of an undisturbed run, bit for bit.  The
processes begin with torch loaded, so that an attempt takes a second.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import lanes_worker
import torch
import torch.distributed as dist
from launch import forked
from run_worker import MICROBATCHES, Options, Reader, batch_of, pipeline
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh

import fxpipe
from fxpipe.runtime.job.liveness import own_process
from fxpipe.training.checkpoint import files as checkpoint_files
from fxpipe.training.checkpoint import tensor_store

EVERY = 3  # steps from one checkpoint to the next
PLACES = ("F", "B", "W", "send", "optimizer", "loader", "checkpoint", "files", "complete", "save")
KINDS = ("kill", "raise", "preempt", "exit")


Batches = Callable[[int], Mapping[str, torch.Tensor]]  # of a step


@dataclass(frozen=True)
class Fault:
    """On one rank: what happens, where, and how many steps after the attempt began.

    delay: seconds from the place to it, which goes on meanwhile.
    """

    rank: int
    kind: str
    place: str
    after: int
    delay: float = 0.0


def fault_of(number: int, ranks: int) -> Fault:
    """Every place and every kind comes in turn, with a random rank and step."""
    draw = random.Random(number)
    place = PLACES[number % len(PLACES)]
    kind = KINDS[(number // len(PLACES) + number) % len(KINDS)]
    rank = 0 if place in ("files", "complete") else draw.randrange(ranks)  # rank 0 alone does these
    return Fault(rank, kind, place, draw.randrange(1, EVERY + 2))


class Raised(Exception):
    """What a fault raises."""


def strike(fault: Fault, directory: Path, attempt: int) -> None:
    """Once in an attempt."""
    if fault.delay:
        later = threading.Timer(fault.delay, strike, (replace(fault, delay=0.0), directory, attempt))
        later.daemon = True
        later.start()
        return
    file = directory / f"fault.{attempt}.json"
    if file.exists():
        return
    file.write_text(json.dumps({"at": time.time(), **fault.__dict__}))
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault.kind == "hang":
        time.sleep(1e6)
    if fault.kind == "preempt":
        os.kill(os.getpid(), signal.SIGTERM)
        return
    if fault.kind == "exit":
        os._exit(3)
    raise Raised(f"{fault.place} of rank {fault.rank}")


def attempt_to_train(
    directory: Path, first: int, faults: int, steps: int, batch: Batches, groups: bool
) -> None:
    """What each process runs."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    fault = fault_of(first + attempt, int(os.environ["WORLD_SIZE"])) if attempt < faults else None
    train(directory, fault, attempt, steps, batch, groups=groups)


def train(
    directory: Path,
    fault: Fault | None,
    attempt: int,
    steps: int,
    batch: Batches = batch_of,
    timeout: float | None = None,
    groups: bool = False,
) -> None:
    """To the end, or to the fault, from the newest checkpoint.  groups: whether to make some before."""
    rank, ranks = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    if groups:
        dist.init_process_group("gloo")
        init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("first", "second"))
    (directory / f"process.{rank}").write_text(own_process())
    saves = fault is not None and fault.place == "save"
    if fault is not None and fault.rank != rank:
        fault = None
    if rank == 0:
        (directory / f"begun.{attempt}.json").write_text(json.dumps({"at": time.time()}))
    pipe = fxpipe.load(directory / "saved", timeout=timeout)
    if groups and (later := dist.new_group([0, 1])) is not dist.GroupMember.NON_GROUP_MEMBER:
        dist.barrier(later)
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.05, clip_grad_norm=0.5)

    def meets(place: str) -> bool:
        late = fault is not None and (place == "save" or pipe.step_number >= begun + fault.after)
        return late and fault.place == place

    def wrap(function: Callable, place: str) -> Callable:
        def called(*arguments, **options):
            if meets(place):
                strike(fault, directory, attempt)
            return function(*arguments, **options)

        return called

    with fxpipe.Checkpointer(
        pipe, directory / "checkpoints", optimizer=optimizer, every=EVERY, keep=2
    ) as checkpoints:
        checkpoints.resume()
        begun = pipe.step_number
        comm = pipe.runtime.comm
        comm.send = wrap(comm.send, "send")
        tensor_store.write = wrap(tensor_store.write, "checkpoint")
        checkpoint_files.begin = wrap(checkpoint_files.begin, "files")
        checkpoint_files.complete = wrap(checkpoint_files.complete, "complete")

        def at_op(op: str) -> None:
            if any(map(meets, op.rstrip("0123456789."))):  # BW is both
                strike(fault, directory, attempt)

        pipe.runtime.record.at_op = at_op
        optimizer.register_step_pre_hook(wrap(lambda *_: None, "optimizer"))
        loader = wrap(batch, "loader")
        while pipe.step_number < steps:
            pipe.step(loader(pipe.step_number))
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.step()
            if saves and pipe.step_number == begun + EVERY:
                wrap(pipe.save, "save")(directory / f"saved.{attempt}")
    state = pipe.full_state_dict()
    if rank == 0:
        save_file({name: t.clone() for name, t in state.items()}, directory / "full.safetensors")
    dist.barrier()


def save_lanes(directory: Path) -> None:
    """Save a pipeline of two ranks of two lanes."""
    lanes_worker.compiled((1, 2, 2)).save(directory)


def words(step: int) -> dict[str, torch.Tensor]:
    """A batch of that."""
    torch.manual_seed(step)
    return lanes_worker.batch(lanes_worker.ROWS * lanes_worker.MICROBATCHES)


def campaign(
    directory: Path, ranks: int, first: int, faults: int, vocab_parallel: bool = False, groups: str = ""
) -> dict:
    """Run it with the faults of these numbers; return what is left.

    groups: those that each attempt makes itself: "ranks", "lanes", or none.
    ``same``: whether the bits are; ``met``: the faults; ``slowest``: seconds from a fault to the next
    attempt, which begins when all ranks have ended; ``steps``: more than were asked for; ``left``: unfinished
    files.
    """
    steps = faults * (EVERY + 1) + EVERY + 2  # an attempt gets no further than its fault
    options = Options(steps=steps, every=EVERY, vocab_parallel=vocab_parallel)
    whole = directory / "whole"
    for path, number in ((whole, 0), (directory, faults)):
        path.mkdir(exist_ok=True)
        if groups == "lanes":
            logs = path / "logs of saving"
            saving = forked(ranks, save_lanes, path / "saved", dtype=torch.float32, logs=logs)
            assert saving.code == 0, saving
        else:
            pipeline(Reader(), replace(options), ranks).save(path / "saved")
        batch = words if groups == "lanes" else batch_of
        run = forked(
            ranks,
            attempt_to_train,
            *(path, first, number, steps, batch, bool(groups)),
            dtype=torch.float32,
            logs=path / "logs",
            limit=120.0 + 30.0 * faults,
            restarts=number,
        )
        assert run.code == 0, run
    expected, found = (load_file(path / "full.safetensors") for path in (whole, directory))
    met = [json.loads(file.read_text()) for file in sorted(directory.glob("fault.*.json"))]
    waits = []
    for attempt in range(faults):
        struck, begun = directory / f"fault.{attempt}.json", directory / f"begun.{attempt + 1}.json"
        if struck.exists() and begun.exists():
            waits.append(json.loads(begun.read_text())["at"] - json.loads(struck.read_text())["at"])
    return {
        "same": expected.keys() == found.keys()
        and all(torch.equal(tensor, expected[name]) for name, tensor in found.items()),
        "steps": int(found["seen"]) // MICROBATCHES - steps if "seen" in found else 0,
        "met": met,
        "slowest": max(waits, default=0.0),
        "left": sorted(p.name for p in (directory / "checkpoints").iterdir() if p.name.startswith(".")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="the number of the first fault")
    parser.add_argument("--vocab-parallel", action="store_true")
    parser.add_argument("--groups", choices=("", "ranks", "lanes"), default="")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        result = campaign(
            Path(directory),
            options.ranks,
            options.first,
            options.faults,
            options.vocab_parallel,
            options.groups,
        )
    print(json.dumps(result))
    for what in ("place", "kind"):
        print(dict(Counter(fault[what] for fault in result["met"])), file=sys.stderr)
    sys.exit(not result["same"])


if __name__ == "__main__":
    main()
