"""The public functions: compile a model, and load a saved pipeline."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fxpipe.errors import CaptureError, FxpipeError
from fxpipe.pipeline import Pipeline
from fxpipe.plan import files
from fxpipe.plan.artifact import Artifact, Plan
from fxpipe.plan.dtensors import is_dtensor, local
from fxpipe.plan.kept import kept_tensors
from fxpipe.plan.number import number
from fxpipe.plan.rows import whole, whole_name
from fxpipe.plan.step import Shard
from fxpipe.plan.tensors import in_strides
from fxpipe.runtime.job.failure import in_short
from fxpipe.runtime.job.mesh import ranks_and_replicas
from fxpipe.runtime.job.process import Process, agreed, as_timeout, own_ranks, under_torchrun
from fxpipe.runtime.program.accelerator import check_supported, default_device
from fxpipe.runtime.program.batch import batch_leaves
from fxpipe.runtime.program.offload import check_tier
from fxpipe.schedule.ops import Schedule, Validation
from fxpipe.tracebacks import brief
from fxpipe.training import parts
from fxpipe.training.accumulators import check_buckets

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from fxpipe.compiler.compile import Compiled
    from fxpipe.compiler.mesh import MeshChoice
    from fxpipe.compiler.options import Offload, Options
    from fxpipe.cost.device import Device
    from fxpipe.plan.meshes import Mesh, TriedMesh


@brief
def compile(
    model: nn.Module,
    example: Mapping[str, Any] | tuple[Any, ...] | list[Any],
    *,
    ranks: int | DeviceMesh | None = None,
    replicas: int | None = None,
    shard: Shard | Literal["auto"] | None = None,
    microbatches: int | None = None,
    devices: int | None = None,
    batch: int | None = None,
    # the step
    loss_fn: Callable[..., Any] | None = None,
    gradients: bool = True,
    grad_dtype: torch.dtype | None = None,
    outputs: Sequence[str] = (),
    evaluation: bool = False,
    seed: int = 0,
    fixed: Sequence[str] = (),
    # the schedule
    schedule: str | Schedule | Path = "auto",
    validation: Validation = "barrier",
    stages_per_rank: int | None = None,
    placement: str | None = None,
    split_points: Sequence[str] | None = None,
    effort: float | None = None,
    costs: str | Sequence[str] = "analytic",
    ranks_per_machine: int | None = None,
    dimensions: Mapping[str, int] | None = None,
    # memory
    memory_limit: float | str | None = None,
    optimizer_bytes: float = 0.0,
    vocab_parallel: bool | str = False,
    recompute: bool | str = False,
    offload: Offload | bool | float | str = False,
    # the programs
    backend: str = "eager",
    timeout: float | timedelta | None = None,
    print_after: str | None = None,
    check: bool = True,
) -> Pipeline:
    """Compile a model into one program per rank.

    model: any module, on the CPU, a GPU, or the meta device; it is not changed.  With DTensors, as torch's
        ``parallelize_module`` makes them, each rank has as many processes as their mesh (docs/lanes.md).
    example: one microbatch, a mapping of keyword arguments, or a tuple or list of arguments.
    ranks: of a pipeline, a process each; or a DeviceMesh of (replicas, ranks), or of the ranks of a replica.
        By default the compiler chooses ranks and replicas, the fastest mesh within ``memory_limit``, for so
        many ``devices`` (those that torchrun started) and a ``batch`` (docs/mesh.md).
    replicas: the number of pipelines that train together, each on its own rows (docs/mesh.md); by default as
        many as torchrun started processes for.  ``run_local`` runs so many, 1 by default.
    shard: what the replicas divide between them: ``"optimizer"``, its state (ZeRO 1), ``"gradients"``, these
        too (ZeRO 2), or ``"parameters"``, these too (ZeRO 3); ``"auto"``, the fastest of these within
        ``memory_limit``; by default each replica has all of it.
    microbatches: of each replica; or ``batch``, the rows of a step over all replicas.

    loss_fn: ``(output, microbatch) -> loss``, a scalar, or ``-> (sum, count)`` for an exact mean over
        all counts of the batch; either with a mapping of metrics behind it, ``-> (loss, {"accuracy": …})``.
        Without it the loss is the model's output if that is a scalar, its ``.loss`` or ``["loss"]``, or the
        one scalar with a gradient in a tuple.
    gradients: False compiles the forward alone, for evaluation of ``model.eval()``: ``pipe.step`` and
        ``run_local`` then give the loss.  The pipeline works on the model's own weights.  With ``outputs`` it
        needs no loss.
    grad_dtype: the dtype in which the gradients of parameters with fewer bits are accumulated over the
        microbatches, summed over ranks and clipped: torch.float32 for a model of bfloat16, which loses bits
        from about 16 microbatches on.  By default each parameter's own.  ``.grad`` and ``run_local(…).grads``
        have it; ``pipe.optimizer`` hands them over in the dtype of what it updates.
    outputs: names of values that ``pipe.step(batch, outputs=[…])`` can give beside the loss: tensors in the
        model's output (``"logits"``, ``"0"`` of a tuple, ``"losses.ce"``; ``"output"`` if it is one tensor),
        metrics of ``loss_fn``, ``"loss"`` and ``"count"``, those of each microbatch, and the results of
        modules by their paths (``"blocks.3"``; ``"norm#1"`` of the second call).
    evaluation: also make the programs of ``pipe.evaluate``, the forward in eval mode alone, for the same
        ranks, which hold its tensors already.  The model is traced once more.
    seed: of the random ops; their numbers depend on it, the step and the microbatch alone.
    fixed: names of tensors of the example whose values are part of the program, for models whose Python code
        decides by them in ways that a trace cannot follow (``["image_grid_thw"]``).  Every microbatch must
        hold the same values, else RunError.

    schedule: the name of a family (``fxpipe simulate --help`` lists them); ``auto``, the one with the
        shortest simulated step over all families, placements and one, two or four stages per rank; a
        Schedule; or the path of a schedule as text or as torch's CSV (``"mine.txt"``).
    validation: of the optimizer with which the pipeline is to train, for the schedule (docs/steps.md).  With
        ``"post"`` a rank begins the next step before the others have ended this one: the schedule is then the
        one with the shortest simulated time a step of many, instead of that of one by itself.
    stages_per_rank, placement: ``plain`` (stage s on rank s mod ranks) or ``v`` (down the ranks and back
        up).  By default the schedule's own.
    split_points: module paths that begin the second and later stages, instead of cuts by cost.
    effort: of the search for a schedule, about the seconds of one core; it uses all cores.  By default two
        milliseconds for every op (stage, phase, microbatch) of all placements, and 8 seconds at most.
    costs: the times that the schedule is made for: ``analytic`` (FLOPs and bytes on a description of the
        device at hand), ``measured`` (each section timed on it), or the name of a device on which the
        pipeline is to run later, ``"H100"``, which need not be here (docs/costs.md lists them), or of one for
        each rank.  Under torchrun, analytic times of a stage are those on its own rank's device.
    ranks_per_machine: so many ranks share a machine, and messages to others take the time of the network;
        by default torchrun's ``--nproc-per-node``, and without torchrun one machine has all ranks.
    dimensions: names for lengths of the example, ``{"sequence": 256}``, so that ``pipe.simulate`` can predict
        costs for other lengths: every dimension that is 256 long gets that name, but the leading one is
        ``microbatch``.  The model is traced twice more, at other lengths; raises SizeError if its ops differ.

    memory_limit: of each rank, in bytes or as ``"16GiB"``: for its parameters, gradients and buffers, and
        the values saved between ops; with ``validation="post"`` also for copies of what an update changes.
        Leave room for the memory of a single op, and for the optimizer's state, unless ``optimizer_bytes``
        counts it: for each element of a trained parameter, 8 for AdamW in float32, 12 with
        ``master_weights``.
    vocab_parallel: split the output layer with its cross-entropy, and the input embedding, over all ranks:
        ``"1-barrier"`` (or True) or ``"2-barrier"`` (ranks wait for each other once or twice a microbatch;
        the second needs less work before the first barrier and holds a microbatch more), or ``"auto"``.
    recompute: recompute forward values in the backward instead of saving them; gradients are bit-identical.
        ``"norms"`` (all but matrix products, convolutions and attention), ``"full"``, or ``"auto"``, the
        fastest of none and these within ``memory_limit``, as simulated.
    offload: move saved activations off the rank until the backward needs them: an :class:`fxpipe.Offload`, or
        its ``share`` alone (True, ``0.5``, ``"auto"``).
    backend: ``"eager"``, or ``"inductor"``: before its first step each rank compiles the forward and backward
        of its stages with Inductor, PyTorch's own compiler, which fuses their ops; weight gradients stay
        eager (docs/inductor.md).  Random numbers are the same, other results differ by rounding.
    timeout: under torchrun, the longest time that a rank waits for another one, in seconds or as a timedelta;
        10 minutes by default.  The time that rank 0 takes to compile does not count.  It is a property of the
        process group: the first call makes that, and a group that exists keeps its own.
    print_after: the name of a rewrite, after which the graph is printed, one line a node, for each candidate
        (``"untie"``; docs/architecture.md lists them, and so does the error for another name).
    check: prove that the programs are the captured step (docs/certificate.md).  False leaves it to
        ``pipe.check()`` and ``fxpipe check``.

    Where the forward branches on other data, the example decides, and each microbatch is checked to decide
    alike, else RunError, which names the line.

    Under torchrun all ranks must call it with the same arguments; rank 0 compiles, and each of the others
    receives its program.  Each tensor that several ranks hold gets the values of the first of them.
    Raises OptionError, CaptureError, PartitionError, VocabularyError or ScheduleError, each with what to
    do, and RunError where the number of processes is no multiple of ``ranks``, or not that of ``replicas`` *
    ``ranks``.
    """
    # Imported here, as ``load`` needs neither the compiler nor the schedule search with its compiled kernels.
    from fxpipe.capture.call import check_call
    from fxpipe.capture.dtensors import mesh_of
    from fxpipe.compiler.compile import compile_evaluation, compile_model, last_lane_as_text
    from fxpipe.compiler.mesh import checked, choose_mesh, with_mesh
    from fxpipe.compiler.mesh_request import request_of, rows_of
    from fxpipe.compiler.options import Options, as_offload, limit_of, names_of
    from fxpipe.compiler.options import check as check_options
    from fxpipe.compiler.progress import Phases
    from fxpipe.schedule.formats.handwritten import is_file_name, read_schedule

    if not isinstance(model, nn.Module):
        raise CaptureError(f"The model is a {type(model).__name__}; fxpipe compiles an nn.Module.")
    device = _device_of(model)
    check_supported(device)
    pipeline_ranks, replicas = ranks_and_replicas(ranks, replicas)
    limit = as_timeout(timeout)
    process = Process.join(device, limit) if under_torchrun() else None
    mesh = mesh_of(model)
    lanes = 1 if mesh is None else mesh.size()
    if process is not None:
        unknown = process.world_size // lanes, None
        given = unknown if pipeline_ranks is None else (pipeline_ranks, replicas)
        process = process.with_ranks(*given, lanes)
        process.check_mesh(mesh)
        process.backend(device)
    with agreed(process, "compile"):
        world = None if process is None else process.world_size // lanes
        asked = pipeline_ranks, replicas, microbatches, batch, shard
        request = request_of(devices, *asked, world)
        if isinstance(example, list):  # as DataLoaders give them
            example = tuple(example)
        options = Options(
            ranks=1 if pipeline_ranks is None else pipeline_ranks,
            microbatches=1 if microbatches is None else microbatches,
            schedule=read_schedule(schedule) if is_file_name(schedule) else schedule,  # type: ignore[arg-type]
            stages_per_rank=stages_per_rank,
            placement=placement,
            split_points=None if split_points is None else names_of(split_points, "split_points"),
            memory_limit=None if memory_limit is None else limit_of(memory_limit),
            limit_text="" if memory_limit is None else str(memory_limit),
            costs=tuple(costs) if isinstance(costs, list | tuple) else costs,  # type: ignore[arg-type]
            seed=seed,
            shard=None if shard == "auto" else shard,
            replicas=(1 if replicas is None else replicas) if process is None else process.replicas,
            optimizer_bytes=optimizer_bytes,
            vocab_parallel=vocab_parallel,
            gradients=gradients,
            grad_dtype=grad_dtype,
            recompute=recompute,
            offload=as_offload(offload, device),
            dimensions=dimensions,
            fixed=names_of(fixed, "fixed"),
            outputs=tuple(dict.fromkeys(names_of(outputs, "outputs"))),
            evaluation=evaluation,
            effort=effort,
            ranks_per_machine=(
                _torchrun_ranks(1 if process is None else process.lanes)
                if ranks_per_machine is None
                else ranks_per_machine
            ),
            backend=backend,
            print_after=print_after,
            check=check,
            validation=validation,
        )
        wanted: list[TriedMesh] = []
        if request is None:
            check_options(options)
        else:
            wanted = checked(options, request.meshes(rows_of(example)))
            options = with_mesh(options, wanted[0].mesh)
        if options.offload.share is not None:
            check_tier(options.tier, device, options.offload_directory)
        own = {} if process is None else _arguments(model, example, loss_fn, options)
        own["mesh"] = repr((devices, *asked))
    if process is not None:
        process.check_alike(own, "the arguments of fxpipe.compile", "Call it with the same on all ranks.")

    if process is not None and process.lanes > 1:
        _check_lanes(process, lambda: last_lane_as_text(model, example, loss_fn, options, device))

    choice: MeshChoice | None = None
    if len(wanted) > 1:

        def chosen() -> MeshChoice:
            phases = Phases(f"fxpipe {type(model).__name__}, mesh", ends=False)
            return choose_mesh(model, example, loss_fn, options, wanted, device, phases)

        found, choice = _mesh_for_all(chosen, process)
        options = with_mesh(options, found)
    if process is not None and request is not None:
        process = process.with_ranks(options.ranks, options.replicas, lanes)

    known: tuple[Device, ...] = ()
    if process is not None and costs == "analytic" and process.has_different_devices(device):
        from fxpipe.cost.describe import described_everywhere

        known = described_everywhere(device, process.gather)

    def compiled_here() -> tuple[Compiled, Artifact | None]:
        check_call(model, example, loss_fn)
        given = model, example, loss_fn, options, device, Phases(f"fxpipe {type(model).__name__}")
        compared = (None, ()) if choice is None else (choice.step, choice.tried)
        training = compile_model(*given, known, *compared)
        return training, compile_evaluation(*given, training) if evaluation else None

    compiled: Compiled | None = None
    forward: Artifact | None = None
    if process is None or process.leads:
        compiled, forward = compiled_here() if process is None else _compiled_for_all(compiled_here, process)
        artifact = compiled.artifact
    else:
        artifact, forward = _received(process)
    if compiled is not None and artifact.plan.tried:
        _explain_on_terminal(artifact.plan)
    with agreed(process, "compile"):
        parameters, buffers = _held_of(model, artifact.plan, None if process is None else process.rank)
    pipe = Pipeline(
        artifact=artifact,
        parameters=parameters,
        buffers=buffers,
        device=device,
        process=None if process is None else process.for_pipeline(artifact.plan.model),
        of=(lambda: model) if process is None else weakref.ref(model),
        graph=compiled.graph if compiled else None,
        sections=compiled.sections if compiled else (),
        offload_directory=options.offload_directory,
    )
    pipe = pipe if forward is None else pipe.with_evaluation(forward)
    if process is not None:
        weakref.finalize(model, pipe.let_model_go).atexit = False
    pipe.share_values()
    return pipe


@brief
def load(
    path: str | Path,
    *,
    offload_directory: str | Path | None = None,
    timeout: float | timedelta | None = None,
) -> Pipeline:
    """Load a saved pipeline with its weights; its programs run as they are now, edits included.

    A saved pipeline is a program: run only what you trust.  Loading checks all of its files and runs none of
    them; ``step`` and ``run_local`` run the programs with all that your user may do.

    offload_directory: as for ``compile``, where the pipeline offloads to disk.
    timeout: as for ``compile``.

    Under torchrun all ranks must call it, and each loads the weights that it holds.  Warns of a program that
    was edited since it was saved, and of weights that were replaced.  Raises ArtifactError, naming file and
    field, for a directory that holds no pipeline, is cut short or damaged, or was written by another version.
    """
    directory, limit = files.as_path(path, "fxpipe.load").absolute(), as_timeout(timeout)
    device = default_device()
    process = Process.join(device, limit) if under_torchrun() else None
    if process is not None:
        process.backend(device)
    leads = process is None or process.leads
    with agreed(process, f"load {directory}"):
        texts = files.plan_texts(directory)
        plans = files.checked_plans(texts) if leads else []
    if process is None:
        artifacts = [Artifact(plan, (), {}, plan.number) for plan in plans]
    else:
        process.check_same(files.checksum_of(texts), f"{directory / 'plan.json'}")
        artifacts = parts.share_plans(plans, process)
        process = process.with_ranks(artifacts[0].plan.ranks)
    plan = artifacts[0].plan
    own = own_ranks(process, plan.ranks)
    with agreed(process, f"load {directory}"):
        programs = range(plan.ranks) if leads else own  # rank 0 saves those of all
        artifact, *forward = (
            replace(
                artifact,
                programs=files.read_programs(path, artifact.plan, programs),
                captured=files.read_captured(path) if leads else "",
            )
            for path, artifact in zip(texts, artifacts, strict=True)
        )
        parameters, buffers, constants = _read_tensors(directory, plan, process, device)
        step_number = files.read_step_number(directory, own[0])
        if process is not None and process.replicas > 1:
            check_buckets(plan)
        evaluation = files.evaluation_directory(directory)
        forward = [replace(a, constants=files.read_constants(evaluation, a.plan, own)) for a in forward]
    pipe = Pipeline(
        replace(artifact, constants=constants),
        parameters,
        buffers,
        device,
        None if process is None else process.for_pipeline(plan.model),
        directory=directory,
        offload_directory=None if offload_directory is None else Path(offload_directory),
        first_step=step_number,
    )
    pipe = pipe.with_evaluation(forward[0]) if forward else pipe
    pipe.share_values()
    return pipe


def _arguments(
    model: nn.Module, example: Any, loss_fn: Callable[..., Any] | None, options: Options
) -> dict[str, str]:
    """What all ranks must compile alike, as texts by name; all but values."""
    own = {f.name: repr(getattr(options, f.name)) for f in fields(options) if f.name not in _OWN}
    own["offload"] = repr(replace(options.offload, directory=None))
    own["loss_fn"] = getattr(loss_fn, "__qualname__", type(loss_fn).__name__)
    for name, value in batch_leaves(example):
        is_tensor = isinstance(value, torch.Tensor)
        own[f"example.{name}"] = f"{value.dtype} {tuple(value.shape)}" if is_tensor else repr(value)
    own["model"] = type(model).__qualname__
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        frozen = ", frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
        shape = "" if is_lazy(tensor) else f" {tuple(tensor.shape)}"
        placed = f" {getattr(tensor, 'placements', '')}" if is_dtensor(tensor) else ""
        own[f"model.{name}"] = f"{tensor.dtype}{shape}{placed}{frozen}"
    return own


#: Options that differ between machines.
_OWN = ("ranks_per_machine", "offload")


def _check_lanes(process: Process, traced: Callable[[], str]) -> None:
    """Raise CaptureError on all processes unless the model of the first, as the last lane of its rank would
    run it, is what the model of that lane runs: code may have kept the number of its process."""
    last, own = process.lanes - 1, b""
    with process.agreed("trace its model"), process.unhurried():
        if process.world_rank in (0, last):
            own = str(number(traced().encode())).encode()
    found = process.gather(own)
    if found[0] != found[last]:
        raise CaptureError(
            f"The model of process {last}, the last lane of rank 0, runs other ops than that of process 0 "
            "would on that lane. All lanes run one program: let a module keep neither the number of its "
            "process nor what follows from it, and ask mesh.get_local_rank() in the forward."
        )


def _read_tensors(
    directory: Path, plan: Plan, process: Process | None, device: torch.device
) -> tuple[dict[str, nn.Parameter], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The parameters, buffers and constants of this rank; of all ranks without torchrun."""
    parameters: dict[str, nn.Parameter] = {}
    buffers: dict[str, torch.Tensor] = {}
    constants: dict[str, torch.Tensor] = {}
    for rank in own_ranks(process, plan.ranks):
        held = plan.tensors[rank]
        tensors = files.read_tensors(directory, plan, rank)
        for name in held.parameters:
            trained = name in held.gradients
            parameters.setdefault(name, nn.Parameter(tensors[name].to(device), requires_grad=trained))
        buffers |= {name: tensors[name].to(device) for name in held.buffers}
        constants |= {name: tensors[name] for name in held.constants}
    if process is None:
        joined = whole(parameters).items()
        parameters = {
            name: nn.Parameter(in_strides(t.detach(), plan.layouts[name].stride), t.requires_grad)
            for name, t in joined
        }
    return parameters, buffers, constants


def _held_of(
    model: nn.Module, plan: Plan, rank: int | None
) -> tuple[dict[str, nn.Parameter], dict[str, torch.Tensor]]:
    """The parameters and buffers of the model that a rank needs; of all ranks, with None."""
    needed = plan.tensors if rank is None else (plan.tensors[rank],)
    names = {name for held in needed for name in held.state}
    names |= set(map(whole_name, names))
    # Frozen parameters that the step changes are buffers of the pipeline.
    changed = {name for held in plan.tensors for name in held.buffers}
    registered = (*model.named_parameters(), *model.named_buffers())
    held = {n: _held_part(n, t, plan, rank is None) for n, t in registered if n in names}
    trained = {n for n, _ in model.named_parameters()} - changed
    parameters: dict[str, Any] = {n: t for n, t in held.items() if n in trained}
    buffers = {n: t for n, t in held.items() if n not in trained}
    kept = {n for held in needed for n in held.buffers} - buffers.keys()
    buffers |= kept_tensors(model, kept)
    if missing := kept - buffers.keys():
        raise CaptureError(
            f"The model of this rank has no {min(missing)}, which that of rank 0 keeps. Run the model on one "
            "batch on all ranks before you compile it."
        )
    return parameters, buffers


def _held_part(name: str, tensor: torch.Tensor, plan: Plan, alone: bool) -> torch.Tensor:
    """Of a DTensor the part of this process; the whole of it, without values yet, where it runs all lanes."""
    if not is_dtensor(tensor):
        return tensor
    part = local(tensor).detach()
    if alone and name in plan.lanes.shards:
        part = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(part, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else part


def _torchrun_ranks(lanes: int = 1) -> int | None:
    """The number of ranks that torchrun started on this machine; None under another launcher or none."""
    number = os.environ.get("LOCAL_WORLD_SIZE")
    return max(1, int(number) // lanes) if number is not None and under_torchrun() else None


def _explain_on_terminal(plan: Plan) -> None:
    from rich.console import Console

    from fxpipe.viz.explanation import explain

    console = Console(stderr=True, markup=False, emoji=False)
    if console.is_terminal:
        explain(plan, console)


def _device_of(model: nn.Module) -> torch.device:
    devices = {t.device for t in (*model.parameters(), *model.buffers())} - {torch.device("meta")}
    if len(devices) > 1:
        raise FxpipeError(
            f"The model's tensors lie on several devices ({', '.join(sorted(map(str, devices)))}). "
            "Move the model to one."
        )
    return devices.pop() if devices else default_device()


def _compiled_for_all(
    build: Callable[[], tuple[Compiled, Artifact | None]], process: Process
) -> tuple[Compiled, Artifact | None]:
    """The compilation on rank 0, which sends the others their parts of its artifacts."""
    try:
        compiled, forward = build()
        artifacts = [compiled.artifact, *filter(None, [forward])]
        for artifact in artifacts:
            files.check_dtypes(artifact.constants)
    except Exception as error:  # the model's own code may raise anything
        process.first_is_ready()
        parts.send_error(in_short(error), process)
        raise
    process.first_is_ready()
    parts.send_artifacts(artifacts, process)
    return compiled, forward


def _mesh_for_all(
    choose: Callable[[], MeshChoice], process: Process | None
) -> tuple[Mesh, MeshChoice | None]:
    """The mesh that rank 0 chooses, and on it the whole choice."""
    if process is not None and not process.leads:
        process.wait_for_first()
        return parts.received_mesh(process), None
    try:
        choice = choose()
    except Exception as error:  # the model's own code may raise anything
        if process is not None:
            process.first_is_ready()
            parts.send_error(in_short(error), process)
        raise
    if process is not None:
        process.first_is_ready()
        parts.send_mesh(choice.mesh, process)
    return choice.mesh, choice


def _received(process: Process) -> tuple[Artifact, Artifact | None]:
    """This rank's part of rank 0's artifacts.  Raises RunError if it could not compile the model."""
    process.wait_for_first()
    artifact, *forward = parts.received_artifacts(process)
    return artifact, forward[0] if forward else None
