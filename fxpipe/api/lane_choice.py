"""The number of lanes that a user leaves to the compiler: the model on each, compared.

For each number the model is distributed without its values, and its step captured; then the model itself is
distributed over the lanes of the fastest mesh.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fxpipe.api.arguments import Arguments, Parallelize
from fxpipe.compiler.choice.mesh import checked, compare_meshes, fastest_mesh, planned_step
from fxpipe.compiler.choice.mesh_request import request_of, rows_of
from fxpipe.compiler.compilation import Compilation
from fxpipe.compiler.options import Settings
from fxpipe.compiler.progress import Phases
from fxpipe.errors import FxpipeError, OptionError, ScheduleError, at_least_one
from fxpipe.plan.meshes import Mesh, TriedMesh
from fxpipe.python_state.walk import PythonState
from fxpipe.runtime.job.failure import in_short
from fxpipe.runtime.job.process import Process, as_timeout, under_torchrun
from fxpipe.runtime.ranks.local_mesh import local_lanes
from fxpipe.training.model import parts

#: The dimensions of the mesh of all processes.
_NAMES = ("dp", "pp", "tp")


@dataclass(frozen=True, eq=False)
class OnLanes:
    """A model that is distributed over its lanes.  ``mesh``: that was chosen; ``arguments``: for it.
    ``meshes``: that were compared, where this process compared them.  ``values``: of the whole model, where
    this process runs all lanes."""

    mesh: Mesh
    arguments: Arguments
    meshes: tuple[TriedMesh, ...]
    values: dict[str, torch.Tensor]


@contextmanager
def on_fastest_lanes(
    model: nn.Module,
    example: object,
    arguments: Arguments,
    device: torch.device,
    settled: Callable[[Arguments, int], Settings],
) -> Iterator[OnLanes]:
    """Distribute a model by ``parallelize`` over the lanes of the fastest mesh, for a block that compiles it.

    settled: the options for a number of lanes.  Under torchrun all processes call this, and rank 0 compares.
    Raises OptionError for options that leave no choice of lanes, and ScheduleError, with the reason against
    each mesh, where none is possible.
    """
    devices = int(os.environ["WORLD_SIZE"]) if under_torchrun() else arguments.devices
    numbers = _numbers(arguments, devices)
    assert devices is not None, "checked with the numbers"
    search = _Search(model, example, arguments, device, settled, devices)
    lanes: DeviceMesh | None
    with ExitStack() as stack:
        if under_torchrun():
            # All processes make each of them, in one order: meshes have process groups.
            meshes = {
                n: init_device_mesh(device.type, (devices // n, n), mesh_dim_names=_NAMES[1:])
                for n in numbers
            }
            process = Process.join(device, as_timeout(arguments.timeout))
            copies = [one for n, mesh in meshes.items() for one in search.distributed(n, mesh["tp"])]
            mesh, tried = _mesh_for_all(search, copies, process)
            sizes = mesh.replicas, mesh.ranks, mesh.lanes
            lanes = init_device_mesh(device.type, sizes, mesh_dim_names=_NAMES)["tp"]
        else:
            tried = []
            for n in numbers:
                with _local(n) as of_lanes:
                    for one in search.distributed(n, of_lanes):
                        tried += search.compared(one, tried)
            mesh = search.fastest(tried)
            lanes = stack.enter_context(_local(mesh.lanes))
        values = {}
        if lanes is not None and mesh.lanes > 1:
            # The mesh of this process keeps the first lane's shares alone: ``compile`` gives all back later.
            if not under_torchrun() and not any(p.is_meta for p in model.parameters()):
                values = {name: value.clone() for name, value in model.state_dict().items()}
            _parallelize(search.ways[mesh.way], model, lanes)
        fixed = replace(
            arguments,
            ranks=mesh.ranks,
            replicas=mesh.replicas,
            microbatches=mesh.microbatches,
            shard=mesh.shard or None,
            devices=None,
            batch=None,
            parallelize=None,
        )
        yield OnLanes(mesh, fixed, tuple(tried), values)


def _numbers(arguments: Arguments, devices: int | None) -> list[int]:
    """The numbers of lanes that are compared, of those that share machines and devices evenly."""
    if not all(map(callable, _ways(arguments).values())) or devices is None or arguments.batch is None:
        raise OptionError(
            "parallelize, a function of (model, mesh) or several by names, leaves the number of lanes to the "
            "compiler. It needs batch, the rows of a step over all replicas, and without torchrun devices."
        )
    if isinstance(arguments.ranks, DeviceMesh):
        raise OptionError("With parallelize ranks is a number, or None: the compiler makes the mesh.")
    at_least_one("devices", devices)
    if not isinstance(arguments.lanes, Sequence):
        raise OptionError(f"lanes is {arguments.lanes!r} and must be a list of the numbers to compare.")
    for number in arguments.lanes:
        at_least_one("Each of lanes", number)
    machine = int(os.environ.get("LOCAL_WORLD_SIZE", devices)) if under_torchrun() else devices
    numbers = [n for n in dict.fromkeys(arguments.lanes) if not machine % n]
    if not numbers:
        raise OptionError(
            f"lanes={[*arguments.lanes]}: none of these divides {machine} devices of a machine."
        )
    return numbers


def _local(lanes: int) -> AbstractContextManager[DeviceMesh | None]:
    """The mesh of several lanes."""
    return local_lanes(lanes) if lanes > 1 else nullcontext()


def _ways(arguments: Arguments) -> Mapping[str, Parallelize]:
    """The functions that distribute the model, by names."""
    asked = arguments.parallelize
    return asked if isinstance(asked, Mapping) else {} if asked is None else {"": asked}


def _parallelize(way: Parallelize, model: nn.Module, mesh: DeviceMesh) -> None:
    result = way(model, mesh)
    if result is not None and result is not model:
        raise OptionError("parallelize distributes the model in place, and has returned another one.")


def _mesh_for_all(
    search: _Search, copies: Sequence[_Distributed], process: Process
) -> tuple[Mesh, list[TriedMesh]]:
    """The mesh that rank 0 chooses, and on it those that were compared."""
    tried = list[TriedMesh]()

    def choose() -> Mesh:
        for one in copies:
            tried.extend(search.compared(one, tried))
        return search.fastest(tried)

    if not process.leads:
        process.wait_for_first()
        return parts.received_mesh(process), []
    mesh = parts.made_first(choose, process)
    parts.send_mesh(mesh, process)
    return mesh, tried


class _Distributed(NamedTuple):
    """A model without its values on so many lanes, or why it cannot be there."""

    lanes: int
    way: str
    model: nn.Module | str


@dataclass(frozen=True, eq=False)
class _Search:
    model: nn.Module
    example: object
    arguments: Arguments
    device: torch.device
    settled: Callable[[Arguments, int], Settings]
    devices: int

    @cached_property
    def ways(self) -> Mapping[str, Parallelize]:
        return _ways(self.arguments)

    def distributed(self, lanes: int, mesh: DeviceMesh | None) -> Iterator[_Distributed]:
        """The model in each way; on one lane as it is."""
        if mesh is None or lanes == 1:
            yield _Distributed(1, "", self.model)
            return
        for name, way in self.ways.items():
            shapes: dict[int, Any] = {
                id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
                for p in self.model.parameters()
            }
            model = copy.deepcopy(self.model, shapes)
            try:
                _parallelize(way, model, mesh)
            except Exception as error:  # noqa: BLE001 - the user's function may raise anything
                yield _Distributed(lanes, name, in_short(error))
            else:
                yield _Distributed(lanes, name, model)

    def compared(self, one: _Distributed, before: Sequence[TriedMesh]) -> list[TriedMesh]:
        """All meshes of ranks that have lanes like these.  before: others."""
        asked, (lanes, way, model) = self.arguments, one
        any_mesh = Mesh(1, max(1, self.devices // lanes), 1, lanes=lanes, way=way)
        if isinstance(model, str):
            return [TriedMesh(any_mesh, why=model)]
        try:
            assert not isinstance(asked.ranks, DeviceMesh), "checked with the numbers"
            devices = self.devices // lanes
            request = request_of(
                devices, asked.ranks, asked.replicas, asked.microbatches, asked.batch, asked.shard, None
            )
            assert request is not None, "a batch is given"
            settings = self.settled(asked, lanes)
            wanted = checked(settings, request.meshes(rows_of(self.example), lanes))
            settings = replace(settings, mesh=wanted[0].mesh)
            walked = PythonState.of(model, asked.loss_fn)
            compilation = Compilation(
                model,
                self.example,
                asked.loss_fn,
                settings,
                self.device,
                dist.is_initialized(),
                walked,
                has_programs=False,
            )
            phase = Phases(f"fxpipe {type(model).__name__}, {lanes} lanes {way}".rstrip(), ends=False)
            step = planned_step(compilation, phase)
            best = min((each.seconds for each in before if each.seconds is not None), default=inf)
            tried = compare_meshes(compilation, step, wanted, phase, best=best)
            phase.finish("compared")
        except FxpipeError as error:
            return [TriedMesh(any_mesh, why=in_short(error))]
        return [replace(each, mesh=replace(each.mesh, lanes=lanes, way=way)) for each in tried]

    def fastest(self, tried: Sequence[TriedMesh]) -> Mesh:
        if all(each.why for each in tried):
            raise ScheduleError("; ".join(dict.fromkeys(f"{each.mesh}: {each.why}" for each in tried)))
        return fastest_mesh(tried).mesh
