"""A run of two ranks of two lanes, saved and resumed on other meshes; each process writes its measures."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from tensor_parallel import Words, batch, parallelized
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from zoo import EFFORT

import fxpipe
from fxpipe.capture.trace import Captured
from fxpipe.compiler import compile as compiler
from fxpipe.training.model.speculative_update import SpeculativeUpdate
from fxpipe.training.optimizer.speculation_policy import SpeculationPolicy

PROCESSES, ROWS, MICROBATCHES, STEPS, HALF = 4, 1, 4, 5, 2
OPTIONS = {"lr": 3e-2, "clip_grad_norm": 1.12}
PLAN = "sequence"
#: Run -> (replicas, ranks, lanes), and what replicas divide.
MESHES: dict[str, tuple[tuple[int, int, int], str | None]] = {
    "1 x 2 x 2": ((1, 2, 2), None),
    "2 x 1 x 2": ((2, 1, 2), "optimizer"),
    "2 x 1 x 2 of rows": ((2, 1, 2), "parameters"),
    "2 x 2 x 1": ((2, 2, 1), None),
}
WITHOUT_LANES = "2 x 2 x 1"


def made() -> Words:
    torch.manual_seed(0)
    return Words(layers=2)


def batches() -> list[dict[str, torch.Tensor]]:
    """Of each step the rows of all replicas.  The norms are above the limit in steps 1 and 3."""
    torch.manual_seed(7)
    return [batch(ROWS * MICROBATCHES) for _ in range(STEPS)]


@functools.cache
def mesh_of(sizes: tuple[int, int, int]) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "pp", "tp"))


_api = importlib.import_module("fxpipe.api.compile")
_captured: dict[tuple[tuple[int, int, int], bool], Captured] = {}
_last_lane: dict[tuple[int, int, int], str] = {}


@contextlib.contextmanager
def captured_once(sizes: tuple[int, int, int]) -> Iterator[None]:
    """What replicas divide is not in the graph, nor in what the last lane runs, which all processes compare;
    ``zoo.captured_once`` has the traces, which lanes change."""
    whole, as_text = compiler.capture_lanes, _api.last_lane_as_text

    def captured(model: torch.nn.Module, *given: Any) -> Captured:
        kind = sizes, model.training  # that of an evaluation is another one
        if kind not in _captured:
            _captured[kind] = whole(model, *given)
        return _captured[kind]

    def last_lane(*given: Any) -> str:
        if sizes not in _last_lane:
            _last_lane[sizes] = as_text(*given)
        return _last_lane[sizes]

    with (
        mock.patch.object(compiler, "capture_lanes", captured),
        mock.patch.object(_api, "last_lane_as_text", last_lane),
    ):
        yield


def compiled(sizes: tuple[int, int, int], shard: str | None = None, **options: Any) -> fxpipe.Pipeline:
    model, (replicas, ranks, lanes) = made(), sizes
    mesh: DeviceMesh | int = ranks
    around: Any = contextlib.nullcontext()
    if lanes > 1:
        mesh = mesh_of(sizes)
        around = parallelized(model, mesh["tp"], PLAN)
        mesh = mesh if shard is None else mesh["dp", "pp"]
    with around, captured_once(sizes):
        return fxpipe.compile(
            model, batch(ROWS), ranks=mesh, shard=shard, microbatches=MICROBATCHES // replicas,
            schedule="1f1b", effort=EFFORT, check=False, **options,
        )  # fmt: skip


def until(pipe: fxpipe.Pipeline, optimizer: Any, steps: int, found: dict[str, torch.Tensor]) -> None:
    size = ROWS * MICROBATCHES // pipe.replicas
    while pipe.step_number < steps:
        step = pipe.step_number
        rows = {name: x[pipe.replica * size :][:size] for name, x in batches()[step].items()}
        found[f"loss {step}"] = pipe.step(rows)
        optimizer.step()
        optimizer.zero_grad()
        found[f"norm {step}"] = torch.as_tensor(optimizer.last_norm)


def ended(pipe: fxpipe.Pipeline, optimizer: Any, directory: Path, found: dict[str, torch.Tensor]) -> None:
    """Write a checkpoint, and what this process has measured."""
    with fxpipe.Checkpointer(pipe, directory / "end", optimizer=optimizer) as end:
        end.save()
    save_file(found, directory / f"measured {dist.get_rank()}")


def resumed(pipe: fxpipe.Pipeline, directory: Path, half: Path) -> None:
    optimizer, found = pipe.optimizer(torch.optim.AdamW, **OPTIONS), {}
    with fxpipe.Checkpointer(pipe, half, optimizer=optimizer) as checkpoints:
        assert checkpoints.resume()
    assert pipe.step_number == HALF
    until(pipe, optimizer, STEPS, found)
    ended(pipe, optimizer, directory, found)


@contextlib.contextmanager
def ahead_on_some_lanes(found: dict[str, torch.Tensor]) -> Iterator[None]:
    """Lane 0 goes ahead whenever it may, lane 1 every second time; ``found`` gets the updates taken back."""
    own, calls, back = dist.get_rank() % 2, [], []
    taken_back = SpeculativeUpdate.taken_back

    def goes_ahead(_: SpeculationPolicy) -> bool:
        calls.append(1)
        return not own or len(calls) % 2 == 0

    def counted(self: SpeculativeUpdate, *given: Any) -> Any:
        back.append(1)
        return taken_back(self, *given)

    with (
        mock.patch.object(SpeculationPolicy, "goes_ahead", goes_ahead),
        mock.patch.object(SpeculativeUpdate, "taken_back", counted),
    ):
        yield
    found["taken back"] = torch.tensor(len(back))


def run(directory: Path, meshes: Collection[str]) -> None:
    """Without interruption; ahead of the verdict; saved, loaded and resumed; on meshes of these names."""
    dist.init_process_group("gloo")
    sizes, _ = MESHES["1 x 2 x 2"]
    pipe = compiled(sizes, evaluation=True)
    optimizer, found = pipe.optimizer(torch.optim.AdamW, **OPTIONS), {}
    until(pipe, optimizer, HALF, found)
    half = directory / "half"
    with fxpipe.Checkpointer(pipe, half, optimizer=optimizer) as checkpoints:
        checkpoints.save()
    pipe.save(directory / "pipe")
    found["evaluated"] = pipe.evaluate(batches()[0])
    until(pipe, optimizer, STEPS, found)
    ended(pipe, optimizer, directory / "whole", found)
    check_state(pipe, directory / "export")

    loaded = fxpipe.load(directory / "pipe")
    assert loaded.step_number == HALF
    save_file({"evaluated": loaded.evaluate(batches()[0])}, directory / f"loaded {dist.get_rank()}")
    resumed(loaded, directory / "loaded", half)

    ahead: dict[str, torch.Tensor] = {}
    pipe.load_state_dict(made().state_dict())
    pipe.step_number = 0
    with ahead_on_some_lanes(ahead):
        optimizer = pipe.optimizer(torch.optim.AdamW, **OPTIONS, validation="post")
        until(pipe, optimizer, STEPS, ahead)
    ended(pipe, optimizer, directory / "ahead", ahead)

    check_other_lanes()
    for name, (other, shard) in MESHES.items():
        if name in meshes and other != sizes:
            resumed(compiled(other, shard), directory / name, half)
    back_to_lanes(directory)


def back_to_lanes(directory: Path) -> None:
    """What a run without lanes has at its end, read with lanes and written again."""
    pipe = fxpipe.load(directory / "pipe")
    optimizer = pipe.optimizer(torch.optim.AdamW, **OPTIONS)
    with fxpipe.Checkpointer(pipe, directory / WITHOUT_LANES / "end", optimizer=optimizer) as checkpoints:
        assert checkpoints.resume()
    with fxpipe.Checkpointer(pipe, directory / "back" / "end", optimizer=optimizer) as checkpoints:
        checkpoints.save()


def check_other_lanes() -> None:
    """DTensors over the ranks, and not over the lanes of each: all processes say so."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "pp"))["tp"]
    model = made()
    parallelized(model, mesh, PLAN)
    try:
        fxpipe.compile(model, batch(ROWS), ranks=2, microbatches=MICROBATCHES)
    except fxpipe.RunError as error:
        assert "Lanes are the last dimension" in str(error)  # noqa: PT017 - no pytest here
    else:
        raise AssertionError("DTensors over processes that are no lanes are compiled")


def check_state(pipe: fxpipe.Pipeline, directory: Path) -> None:
    """The same weights on all processes, from all ways to have them."""
    whole = pipe.full_state_dict(rank=None)
    other = made()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))["tp"]
    parallelized(other, mesh, PLAN)
    pipe.synchronize(other)
    for name, value in other.state_dict().items():
        found = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert torch.equal(found, whole[name]), name
    pipe.export(directory)
