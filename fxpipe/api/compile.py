"""``fxpipe.compile``: a model into one program per rank, on rank 0 for all ranks."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fxpipe.api.arguments import Arguments, takes
from fxpipe.api.lane_choice import OnLanes, on_fastest_lanes
from fxpipe.api.like import check_like, settings_like
from fxpipe.api.pipeline import Pipeline
from fxpipe.api.rank_consistency import arguments_of, check_lanes
from fxpipe.api.rank_tensors import held_of
from fxpipe.api.tried_torch import warn_of_untried
from fxpipe.compiler.assumed import with_assumed
from fxpipe.compiler.check_options import check as check_options
from fxpipe.compiler.choice.mesh import MeshChoice, checked, choose_mesh
from fxpipe.compiler.choice.mesh_request import request_of, rows_of
from fxpipe.compiler.compilation import Compilation
from fxpipe.compiler.compile import Compiled, compile_model, last_lane_as_text
from fxpipe.compiler.device_warnings import warn_of_attention, warn_of_memory
from fxpipe.compiler.evaluation import compile_evaluation
from fxpipe.compiler.options import Settings, settle
from fxpipe.compiler.progress import Phases, terminal
from fxpipe.cost.devices.describe import described_everywhere
from fxpipe.cost.devices.device import Device
from fxpipe.errors import CaptureError, FxpipeError, OptionError
from fxpipe.plan.artifact import Artifact, Plan
from fxpipe.plan.dtensors import mesh_of
from fxpipe.plan.meshes import Mesh, TriedMesh
from fxpipe.plan.saved import files
from fxpipe.python_state.walk import PythonState
from fxpipe.runtime.batch.microbatches import as_dicts
from fxpipe.runtime.job.mesh import ranks_and_replicas
from fxpipe.runtime.job.process import Process, agreed, as_timeout, under_torchrun
from fxpipe.runtime.job.tracebacks import brief
from fxpipe.runtime.program.accelerator import check_supported, default_device
from fxpipe.runtime.program.offload import check_tier, default_tier
from fxpipe.training.guards.guards import Traced
from fxpipe.training.guards.python_guards import PythonGuards
from fxpipe.training.model import parts
from fxpipe.training.model.partial_model import updates_of
from fxpipe.training.model.state_dict import make_whole


@brief
@takes(Arguments)
def compile(
    model: nn.Module, example: Mapping[str, object] | tuple[Any, ...] | list[Any], **options: Any
) -> Pipeline:
    """Compile a model into one program per rank.

    model: any module, on the CPU, a GPU, or the meta device; it is not changed, but under torchrun each rank
        frees what it does not hold, until ``pipe.synchronize()``.  With DTensors, as torch's
        ``parallelize_module`` makes them, each rank has as many processes as their mesh (docs/lanes.md).
    example: one microbatch, a mapping of keyword arguments, or a tuple or list of arguments.
    options: those of ``fxpipe.api.arguments.Arguments``, in the table of docs/reference.md.

    Where the forward branches on other data, the example decides, and each microbatch is checked to decide
    alike, else RunError, which names the line.

    Under torchrun all ranks must call it with the same arguments; rank 0 compiles, and each of the others
    receives its program.  Each tensor that several ranks hold gets the values of the first of them.
    Raises OptionError, CaptureError, PartitionError, VocabularyError or ScheduleError, each with what to
    do, and RunError where the number of processes is no multiple of ``ranks``, or not that of ``replicas`` *
    ``ranks``.
    """
    arguments = Arguments(**options)
    warn_of_untried(torch.__version__)
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise CaptureError(f"The model is {kind}, and must be a module, such as nn.Linear(8, 8).")
    device = _device_of(model)
    check_supported(device)
    example = as_dicts(tuple(example) if isinstance(example, list) else example)  # as DataLoaders give them
    if arguments.parallelize is None:
        if arguments.lanes != Arguments.lanes:
            raise OptionError(
                f"lanes={arguments.lanes!r} needs parallelize, which distributes the model over them. Leave "
                "it out for a model of DTensors, whose mesh says how many there are."
            )
        return _compile(model, example, arguments, device)

    def settled(asked: Arguments, lanes: int) -> Settings:
        return _settled(asked, None, None, device, lanes)

    with on_fastest_lanes(model, example, arguments, device, settled) as on_lanes:
        pipe = _compile(model, example, on_lanes.arguments, device, on_lanes)
    if on_lanes.values:
        pipe.load_state_dict(on_lanes.values)
    return pipe


def _compile(
    model: nn.Module,
    example: Any,
    arguments: Arguments,
    device: torch.device,
    on_lanes: OnLanes | None = None,
) -> Pipeline:
    """on_lanes: the model, where the compiler has chosen its lanes."""
    mesh = mesh_of(model)
    lanes = 1 if mesh is None else mesh.size()
    ranks, replicas = _ranks_and_replicas(arguments, lanes)
    arguments = replace(arguments, ranks=ranks, replicas=replicas)
    process = _joined(arguments, ranks, device, mesh) if under_torchrun() else None
    settings, meshes = _agreed(model, example, arguments, ranks, device, process, lanes)
    if process is not None:
        make_whole(model, process)

    has_group = torch.distributed.is_initialized() if process is None else process.users_group is not None
    walked = PythonState.of(model, arguments.loss_fn)
    compilation = Compilation(model, example, arguments.loss_fn, settings, device, has_group, walked)
    if process is not None and process.lanes > 1:
        check_lanes(process, lambda: last_lane_as_text(compilation))
    choice: MeshChoice | None = None
    if on_lanes is not None:
        choice = MeshChoice(on_lanes.mesh, None, on_lanes.meshes)
        compilation = compilation.on_mesh(choice.mesh)
    elif len(meshes) > 1:
        fastest, choice = _mesh_for_all(compilation, meshes, process)
        compilation = compilation.on_mesh(fastest)
    if process is not None and meshes:
        chosen = compilation.options.mesh
        process = process.with_ranks(chosen.ranks, chosen.replicas, lanes)

    compiled, artifacts = _compiled(compilation, choice, process)
    if compiled is not None and compiled.artifact.plan.tried:
        _explain_on_terminal(compiled.artifact.plan)
    return _pipeline(compilation, compiled, artifacts, process, arguments.like)


def _ranks_and_replicas(arguments: Arguments, lanes: int) -> tuple[int | None, int | None]:
    """Those that the arguments, or the pipeline ``like``, mean on a model's lanes; None of what is open."""
    like, ranks, replicas = arguments.like, arguments.ranks, arguments.replicas
    if like is not None:
        check_like(like)
        if ranks is None:
            ranks, replicas = like.artifact.plan.ranks, like.replicas
    as_timeout(arguments.timeout)  # an error also where no other rank is
    return ranks_and_replicas(ranks, replicas, lanes)


def _agreed(
    model: nn.Module,
    example: Any,
    arguments: Arguments,
    ranks: int | None,
    device: torch.device,
    process: Process | None,
    lanes: int,
) -> tuple[Settings, list[TriedMesh]]:
    """The options, which all ranks have alike, and the meshes among which to choose; none of a given one."""
    meshes: list[TriedMesh] = []
    with agreed(process, "compile"):
        world = None if process is None else process.world_size // lanes
        request = request_of(
            arguments.devices,
            ranks,
            arguments.replicas,
            arguments.microbatches,
            arguments.batch,
            arguments.shard,
            world,
        )
        settings = _settled(arguments, ranks, process, device)
        if arguments.like is not None:
            settings = settings_like(settings, arguments.like, model)
        if request is None:
            check_options(settings)
        else:
            meshes = checked(settings, request.meshes(rows_of(example), lanes))
            settings = replace(settings, mesh=meshes[0].mesh)
        if settings.offload.share is not None:
            of_another = settings.costs not in ("analytic", "measured")  # processes use the tier of their own
            tier = default_tier(device) if of_another else settings.tier
            check_tier(tier, device, settings.offload_directory)
        alike = {} if process is None else arguments_of(model, example, arguments.loss_fn, settings)
        alike |= {name: repr(getattr(arguments, name)) for name in _MESH}
    if process is not None:
        process.check_alike(alike, "the arguments of fxpipe.compile", "Call it with the same on all ranks.")
    return settings, meshes


def _pipeline(
    of: Compilation,
    compiled: Compiled | None,
    artifacts: list[Artifact],
    process: Process | None,
    like: Pipeline | None,
) -> Pipeline:
    """The pipeline of this process, with the tensors that its rank holds.

    of: what was compiled.  compiled: on the rank that did.  artifacts: see ``_compiled``.
    """
    artifact, *others = artifacts
    model = of.model
    with agreed(process, "compile"):
        parameters, buffers = held_of(model, artifact.plan, None if process is None else process.rank)
    pipe = Pipeline(
        artifact=artifact,
        parameters=parameters,
        buffers=buffers,
        device=of.device,
        process=None if process is None else process.for_pipeline(artifact.plan.model),
        of=(lambda: model) if process is None else weakref.ref(model),
        then=Traced(
            parameters,
            model,
            {name for each in artifacts for name in each.plan.own_hooks},
            PythonGuards(
                model,
                of.loss_fn,
                compiled.captured.sources if compiled else (),
                of.walked,
                compiled.captured.stored if compiled else None,
            ),
        ),
        graph=compiled.cut.graph if compiled else None,
        sections=compiled.cut.sections if compiled else (),
        offload_directory=of.options.offload_directory,
        like=like,
        updates=updates_of(model) if like is None else like.updates,
    ).with_others(others)
    if process is not None:
        pipe.share_model(model)
    return pipe


def _joined(
    arguments: Arguments, ranks: int | None, device: torch.device, mesh: DeviceMesh | None
) -> Process:
    """This process as one of all, with the lanes of its model's mesh."""
    lanes = 1 if mesh is None else mesh.size()
    process = Process.join(device, as_timeout(arguments.timeout))
    numbers = (process.world_size // lanes, None) if ranks is None else (ranks, arguments.replicas)
    process = process.with_ranks(*numbers, lanes)
    with process.agreed("use the mesh of its model"):
        process.check_mesh(mesh)
    process.backend(device)
    return process


def _compiled(
    compilation: Compilation, choice: MeshChoice | None, process: Process | None
) -> tuple[Compiled | None, list[Artifact]]:
    """The artifact, and those beside it (``Pipeline.with_others``), as rank 0 makes them for all; the
    compiled graph is on rank 0 alone."""
    known = _different_devices(compilation, process)  # by all ranks, before rank 0 compiles by itself

    def made() -> tuple[Compiled, list[Artifact]]:
        phases = Phases(f"fxpipe {type(compilation.model).__name__}")
        compared = (None, ()) if choice is None else (choice.step, choice.tried)
        training = compile_model(compilation, phases, known, *compared)
        warn_of_memory(training.artifact.plan, training.cluster.devices)
        warn_of_attention(training.captured.graph, compilation.device, training.cluster.first)
        training, assumed = with_assumed(compilation, phases, training, known)
        artifacts = [training.artifact, *assumed]
        if compilation.options.evaluation:
            artifacts.append(compile_evaluation(compilation, phases, training))
        for artifact in artifacts if process is not None else ():
            files.check_dtypes(artifact.constants)
        return training, artifacts

    if process is None:
        return made()
    if not process.leads:
        process.wait_for_first()
        return None, parts.received_artifacts(process)
    compiled, artifacts = parts.made_first(made, process)
    parts.send_artifacts(artifacts, process)
    return compiled, artifacts


def _different_devices(compilation: Compilation, process: Process | None) -> list[list[Device]]:
    """The devices of the processes of each rank, where costs are those of these devices and they differ."""
    device, is_asked = compilation.device, compilation.options.costs == "analytic"
    if process is None or not is_asked or not process.has_different_devices(device):
        return []
    devices = described_everywhere(device, process.gather)
    return [[devices[k] for k in process.that_run(rank)] for rank in range(process.ranks)]


_MESH = ("ranks", "replicas", "microbatches", "devices", "batch", "shard")


def _settled(
    arguments: Arguments,
    ranks: int | None,
    process: Process | None,
    device: torch.device,
    lanes: int = 1,
) -> Settings:
    """The options for this device, on a mesh of which unknown numbers are 1 until it is chosen."""
    if arguments.ranks_per_machine is None:
        machine = _torchrun_ranks(lanes if process is None else process.lanes)
        arguments = replace(arguments, ranks_per_machine=machine)
    first = Mesh(
        1 if ranks is None else ranks,
        process.replicas if process is not None else 1 if arguments.replicas is None else arguments.replicas,
        1 if arguments.microbatches is None else arguments.microbatches,
        "" if arguments.shard is None or arguments.shard == "auto" else arguments.shard,
    )
    return settle(arguments, first, device)


def _torchrun_ranks(lanes: int) -> int | None:
    """The number of ranks that torchrun started on this machine; None under another launcher or none."""
    number = os.environ.get("LOCAL_WORLD_SIZE")
    return max(1, int(number) // lanes) if number is not None and under_torchrun() else None


def _explain_on_terminal(plan: Plan) -> None:
    console = terminal()
    if console is not None:
        from fxpipe.viz.explanation import explain

        explain(plan, console)


def _device_of(model: nn.Module) -> torch.device:
    devices = {t.device for t in (*model.parameters(), *model.buffers())} - {torch.device("meta")}
    if len(devices) > 1:
        raise FxpipeError(
            f"The model's tensors lie on several devices ({', '.join(sorted(map(str, devices)))}). "
            "Move the model to one."
        )
    return devices.pop() if devices else default_device()


def _mesh_for_all(
    compilation: Compilation, meshes: list[TriedMesh], process: Process | None
) -> tuple[Mesh, MeshChoice | None]:
    """The mesh that rank 0 chooses, and on it the whole choice."""

    def choose() -> MeshChoice:
        title = f"fxpipe {type(compilation.model).__name__}, mesh"
        return choose_mesh(compilation, meshes, Phases(title, ends=False))

    if process is None:
        choice = choose()
    elif process.leads:
        choice = parts.made_first(choose, process)
        parts.send_mesh(choice.mesh, process)
    else:
        process.wait_for_first()
        return parts.received_mesh(process), None
    return choice.mesh, choice
