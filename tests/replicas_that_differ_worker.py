"""What replicas that do not fit together run; each process writes the errors that it gets."""

from __future__ import annotations

import atexit
import json
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from replicas_worker import LENGTH, MICROBATCHES, RANKS, REPLICAS, ROWS, WIDTH, Normed, numbers
from saved_plan import accept
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fxpipe
from fxpipe.cost.devices import describe
from fxpipe.cost.devices.known_devices import device_named
from fxpipe.plan.saved.check import plan_of
from fxpipe.runtime.job.mesh import ranks_and_replicas
from fxpipe.runtime.job.process import Process

LIMIT = 20.0  # seconds, of a wait


class Remembers(nn.Module):
    """Keeps a mean of its inputs in an attribute, or in a buffer that is in no state dict."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(LENGTH * WIDTH, 4)
        if buffer:
            self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)
        else:
            self.mean = torch.zeros(WIDTH)

    def forward(self, x, y):
        self.mean = 0.9 * self.mean + 0.1 * x.mean((0, 1)).detach()
        return (self.second((self.first(x) - self.mean).flatten(1)) - y).square().mean()


def compiled(model: nn.Module | None = None, **options: object) -> fxpipe.Pipeline:
    torch.manual_seed(7)
    given = {
        "ranks": RANKS,
        "microbatches": MICROBATCHES,
        "schedule": "interleaved",
        "timeout": LIMIT,
        **options,
    }
    return fxpipe.compile(model or Normed(), numbers(ROWS), **given)


def batch(replica: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(11 + replica)
    return numbers(ROWS * MICROBATCHES)


def edited(directory: Path, number: int) -> fxpipe.Pipeline:
    """Two buckets are exchanged in the program of rank 1, on the machine of the last process."""
    pipe = fxpipe.load(directory)
    if number == RANKS * REPLICAS - 1:
        names = re.compile(r"(reduce_gradients)\((\d)\)")
        programs = [
            names.sub(lambda found: f"{found[1]}({1 - int(found[2])})", text)
            for text in pipe.artifact.programs
        ]
        pipe = replace(pipe, artifact=replace(pipe.artifact, programs=tuple(programs)))
    return pipe


def without_buckets(directory: Path) -> None:
    """Write the plan as versions wrote it that knew no replicas."""
    path = directory / "plan.json"
    plan = plan_of(path.read_text(), "")
    tensors = tuple(replace(held, buckets=()) for held in plan.tensors)
    path.write_text(replace(plan, tensors=tensors).to_json())
    accept(directory)


def differ(directory: Path) -> None:
    """Calls that all processes raise an error from, and go on; then a step of replicas with the same rows."""
    number = int(os.environ["RANK"])
    replica = number // RANKS
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (REPLICAS, RANKS), mesh_dim_names=("dp", "pp"))
    assert ranks_and_replicas(mesh["pp"], None) == (RANKS, None)
    pipe = compiled(ranks=mesh)
    assert (pipe.replicas, pipe.replica, pipe.process.rank) == (REPLICAS, replica, number % RANKS)
    check_other_devices(number)
    for name in ("saved", "other", "earlier"):
        pipe.save(directory / name)
    if number == 0:
        without_buckets(directory / "earlier")
        plan = directory / "other" / "plan.json"
        plan.write_text(plan.read_text().replace('"seed": 0', '"seed": 1'))
        accept(directory / "other")
    pipe.process.gather(b"")
    calls: dict[str, Callable[[], object]] = {
        "no multiple": lambda: compiled(ranks=3),
        "other replicas": lambda: compiled(replicas=3),
        "replicas beside a mesh": lambda: compiled(ranks=mesh, replicas=3),
        "ranks first": lambda: compiled(ranks=init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))),
        "ranks apart": lambda: compiled(ranks=DeviceMesh("cpu", [[0, 2], [1, 3]])),
        "mesh of three": lambda: compiled(ranks=init_device_mesh("cpu", (1, 2, 2))),
        "other options": lambda: compiled(shard=(None, "optimizer")[replica]),
        "buffer": lambda: compiled(Remembers(buffer=True)),
        "other plans": lambda: fxpipe.load(directory / ("saved", "other")[replica]),
        "earlier version": lambda: fxpipe.load(directory / "earlier"),
        "edited": lambda: edited(directory / "saved", number).step(batch(replica)),
    }
    errors = {}
    for name, call in calls.items():
        try:
            call()
        except fxpipe.FxpipeError as error:
            errors[name] = f"{type(error).__name__}: {error}"
    found = {}
    for name, rows in (("own rows", replica), ("same rows", 0)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fxpipe.load(directory / "saved").step(batch(rows))
        found[name] = [str(warning.message) for warning in caught]
    (directory / f"{number}.json").write_text(json.dumps([errors, found]))


def check_other_devices(number: int) -> None:
    """As if the last process had a slower device: its rank is planned for that."""
    fast = device_named("H100")
    own = replace(fast, name="slow", launch=10 * fast.launch) if number == RANKS * REPLICAS - 1 else fast
    with (
        mock.patch.object(describe, "described_here", return_value=own),
        mock.patch.object(Process, "has_different_devices", return_value=True),
    ):
        pipe = compiled()
    assert pipe.plan.device == "H100 SXM (rank 0); slow (rank 1)", pipe.plan.device


def rows_of_another_size(pipe: fxpipe.Pipeline, number: int) -> None:
    rows = batch(pipe.replica)
    pipe.step(rows if number < RANKS else {name: x[:-1] for name, x in rows.items()})


def ends_early(pipe: fxpipe.Pipeline, number: int) -> None:
    pipe.step(batch(pipe.replica))
    if number >= RANKS:
        atexit._run_exitfuncs()
        os._exit(0)  # torch's agent keeps functions that return until all have
    pipe.step(batch(pipe.replica))


FAILURES = (rows_of_another_size, ends_early)


def fail(directory: Path) -> None:
    """Each attempt of the agent makes another failure of a step, which ends all processes."""
    attempt, number = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    FAILURES[attempt](fxpipe.load(directory / "saved", timeout=LIMIT), number)
