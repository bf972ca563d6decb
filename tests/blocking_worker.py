"""Steps of ranks over the backend that blocks as those of GPUs do, each with gradients as in eager.

    python tests/blocking_worker.py --ranks 2 3 4 8 --microbatches 1 2 3 4 8 16

runs them all, which takes too long for the tests.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import blocking_backend
import stand_in_device
import torch
import torch.distributed as dist
from caching_allocator import Driver
from launch import forked
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from zoo import LIMIT, WIDTH, WORDS, Block, Case, Shape, TiedHead, built_and_compiled, eager, tokens, too_far

import fxpipe
from fxpipe.compiler.choice.refine_cuts import LighterCuts
from fxpipe.errors import RunError
from fxpipe.runtime.job.backend import is_gloo_alone
from fxpipe.runtime.job.process import Process
from fxpipe.runtime.ranks import connect, distributed, send_buffers, step_memory
from fxpipe.training.run import rank_runner, warm_up

#: Every family, by name with stages per rank and placement.
FAMILIES = {
    "gpipe": [(1, None)],
    "1f1b": [(1, None), (2, "v")],
    "interleaved": [(2, None)],
    "staggered": [(2, None)],
    "zb-h1": [(1, None), (2, "plain"), (2, "v")],
    "zb-h2": [(1, None)],
    "zb-2p": [(1, None)],
    "zb-v": [(2, "v")],
    "v-half": [(2, "v")],
    "v-min": [(2, "v")],
    "dualpipe-v": [(2, "v")],
}
#: Of two replicas: what they divide, and sums and gathers while other ops run.
REPLICAS = [
    Shape(2, "zb-h1", replicas=2),
    Shape(2, "1f1b", replicas=2, shard="optimizer"),
    Shape(2, "interleaved", 2, replicas=2, shard="gradients"),
    Shape(2, "zb-v", 2, "v", replicas=2, shard="parameters"),
]
#: Seconds after which a rank that waits for another one gives up.
LIMIT_OF_A_HANG = 4.0


class Deep(TiedHead):
    """Tied over the first rank and the last, with a block for each stage."""

    def __init__(self, blocks: int) -> None:
        nn.Module.__init__(self)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(blocks)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight


@functools.cache
def deep(ranks: int) -> Case:
    return Case(lambda: Deep(2 * ranks), tokens)


def shapes(ranks: int) -> list[Shape]:
    """Every family and placement, and the vocabulary split over the ranks."""
    found = [
        Shape(ranks, name, stages, placement)
        for name, settings in FAMILIES.items()
        for stages, placement in settings
    ]
    return [
        *found,
        Shape(ranks, "1f1b", vocab_parallel="1-barrier"),
        Shape(ranks, "zb-h1", vocab_parallel="2-barrier"),
        Shape(ranks, "gpipe", vocab_parallel="1-barrier"),
        Shape(ranks, "1f1b", 2, "v", vocab_parallel="1-barrier"),
    ]


def run(shapes: list[Shape], microbatches: list[int], fault: str = "", limit: float = 60.0) -> None:
    """Run one step of each shape with each number of microbatches.

    fault: what is undone: ``lazy``, communicators are connected before the step; ``waits``, a send keeps no
    op behind it waiting; ``order``, ranks connect in one order; ``lost``, messages arrive;
    ``kinds``, each kind of collective runs before the step; ``kept``, what is sent is kept until it is taken;
    ``one``, the tensors of a message are one operation.  limit: of a wait, in seconds.
    """
    blocking_backend.register()
    dist.init_process_group(f"cpu:{blocking_backend.NAME}")
    Process.join(torch.device("cpu"), timedelta(seconds=limit))
    _undo(fault)
    # Cuts stay inside blocks, so that messages have several tensors.
    with mock.patch.object(LighterCuts, "moved", return_value=None):
        for m in microbatches:
            for shape in shapes:
                _step(shape, m)
    dist.barrier(dist.new_group(backend="gloo"))


def batches_on_devices() -> None:
    """Train where rank 0 has its batch on a device, rank 1 none of it, and rank 2 on the CPU; ``WORLD`` has a
    backend for devices."""
    blocking_backend.register(stand_in_device.DEVICE.type)
    dist.init_process_group(f"cpu:gloo,{stand_in_device.DEVICE.type}:{blocking_backend.NAME}")
    case, microbatches = deep(3), 2
    _, pipe = built_and_compiled(case, microbatches, Shape(3, "1f1b"))
    assert pipe.process is not None
    assert is_gloo_alone(pipe.process.control)
    rank = pipe.process.rank

    def stepped(batch: dict[str, torch.Tensor]) -> float:
        with stand_in_device.Device() if rank == 0 else contextlib.nullcontext():
            given = {name: x.to(stand_in_device.DEVICE) if rank == 0 else x for name, x in batch.items()}
            return pipe.step(dict.fromkeys(given) if rank == 1 else given).item()

    batch = case.data(microbatches)
    assert stepped(batch) == stepped(batch)
    try:
        stepped({name: x.flip(0) if rank == 0 else x for name, x in batch.items()})
    except RunError as error:
        assert "Rank 2 has other values in 'ids' of the batch than rank 0" in str(error)  # noqa: PT017 - no pytest here
    else:
        raise AssertionError("ranks with different batches agree")


def _step(shape: Shape, microbatches: int) -> None:
    case = deep(shape.ranks)
    _, pipe = built_and_compiled(case, microbatches, replace(shape, check=False))
    assert pipe.process is not None
    assert pipe.process.backend(pipe.device) == blocking_backend.NAME
    batch = case.data(pipe.replicas * microbatches)
    expected = eager(case.build(), batch, pipe.replicas * microbatches)
    messages = _watch(pipe.runtime.comm)
    before = _operations(pipe)
    loss = pipe.step({name: x.chunk(pipe.replicas)[pipe.replica] for name, x in batch.items()})
    assert _operations(pipe) - before == len(messages) - messages.count("wait"), "a message is one operation"
    assert abs(loss - expected.loss) <= LIMIT * expected.loss, shape
    found, wanted = {}, {}
    for name in pipe.model_state.owned_by(pipe.process.rank).gradients:
        found[name] = pipe.parameter(name).grad
        wanted[name] = name.part_of(expected.grads[name.tensor])
    assert too_far(found, wanted) == {}, shape


#: Bytes of a model of the device for a byte of the small models here.
SCALE = 3000


def trains_in_settled_memory(shapes: list[Shape], microbatches: int, fault: str = "") -> None:
    """Train with AdamW in the memory of a modelled device: no step asks it for memory, or for a new kernel.

    fault: what is undone: ``pool``, the memory of steps is theirs alone; ``kept``, dry runs keep what a step
    keeps; ``dry``, there are any.
    """
    blocking_backend.register()
    dist.init_process_group(f"cpu:{blocking_backend.NAME}")
    _undo_settling(fault)
    for shape in shapes:
        case = deep(shape.ranks)
        _, pipe = built_and_compiled(case, microbatches, replace(shape, check=False))
        held = [*pipe.parameters.values(), *pipe.runtime.constants.values()]
        driver = Driver(SCALE, "" if fault == "pool" else "steps")
        step_memory.device_allocations = lambda _, driver=driver: driver.allocator.asked
        step_memory.memory_pool = lambda _, driver=driver: driver.steps
        step_memory.step_memory.cache_clear()
        batch = case.data(microbatches)
        driver.hold([*held, *batch.values()])
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=1e-3)
        with driver:
            for _ in range(4):
                pipe.step(batch)
                optimizer.step()
                optimizer.zero_grad()
        found = f"{shape}: asked for memory {driver.in_steps}, first used {driver.first_used}"
        assert (driver.in_steps, driver.first_used) == ([0] * 4, []), found
    dist.barrier(dist.new_group(backend="gloo"))


def _undo_settling(fault: str) -> None:
    run = warm_up.dry_run

    def dry(rt: Any, step: Any, batch: Any, grads: Any, releases: Any = None) -> Any:
        if fault == "dry":
            return []
        _get_current_dispatch_mode().is_dry = True
        return run(rt, step, batch, grads, None if fault == "kept" else releases)

    warm_up.dry_run = dry


def _watch(comm: Any) -> list[str]:
    """Before each call of a step write over free memory of the sizes of its messages; return the list of its
    calls."""
    messages: list[str] = []
    sizes: set[int] = set()

    def watched(verb: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def called(given: Any, *others: Any) -> Any:
            free = [torch.full((size,), 0xFF, dtype=torch.uint8) for size in sizes for _ in range(8)]
            del free
            if verb == "send":
                sizes.update(tensor.nbytes for tensor in given)
            messages.append(verb)
            return method(given, *others)

        return called

    for verb in ("send", "receive", "wait"):
        setattr(comm, verb, watched(verb, getattr(comm, verb)))
    return messages


def _operations(pipe: fxpipe.Pipeline) -> int:
    """Those on messages of this rank, of all pipelines so far."""
    groups = {id(g): g for (*_, what), g in pipe.process.groups.items() if isinstance(what, tuple)}
    return sum(g.operations for g in groups.values() if isinstance(g, blocking_backend.Blocking))


def _undo(fault: str) -> None:
    if fault == "lazy":
        connect._first_message = connect._first_broadcast = connect._run_once = lambda *_: None
    elif fault == "waits":
        send_buffers.SentOnStreams.add = lambda self, work, tensors: work.wait()
    elif fault == "order":
        begun = connect.connect

        def reversed_on_odd_ranks(process, device, channels, *others):
            order = channels[::-1] if process.rank % 2 else channels
            return begun(process, device, order, *others)

        rank_runner.connect = reversed_on_odd_ranks
    elif fault == "kinds":
        connect._run_once = lambda *_: None
    elif fault == "kept":
        send_buffers.SentOnStreams.add = lambda self, work, tensors: self._sent.update(
            {len(self._sent): (work, ())}
        )
    elif fault == "one":
        distributed.as_one = lambda group, device, start: blocking_backend.All(start())
    elif fault == "lost":
        blocking_backend.LOST = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1])
    asked = parser.parse_args()
    failed = False
    for ranks in asked.ranks:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            given = shapes(ranks), asked.microbatches
            logs = Path(folder) / "logs"
            done = forked(ranks, run, *given, dtype=torch.float64, logs=logs, limit=3600.0)
        took = time.monotonic() - begun
        settings = f"{len(given[0])} settings, microbatches {' '.join(map(str, asked.microbatches))}"
        print(f"{ranks} ranks, {settings}: {'ok' if done.code == 0 else done}, {took:.0f} s", flush=True)
        failed |= done.code != 0
    sys.exit(failed)


if __name__ == "__main__":
    main()
