"""``fxpipe.compile``: a model into one program per rank, on rank 0 for all ranks."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from rich.console import Console
from torch import nn

from fxpipe.api.like import check_like, options_like, ranks_like
from fxpipe.api.pipeline import Pipeline
from fxpipe.api.rank_consistency import arguments_of, check_lanes
from fxpipe.api.rank_tensors import held_of
from fxpipe.compiler.compilation import Compilation
from fxpipe.compiler.compile import Compiled, compile_model, last_lane_as_text
from fxpipe.compiler.evaluation import compile_evaluation
from fxpipe.compiler.mesh import MeshChoice, checked, choose_mesh, with_mesh
from fxpipe.compiler.mesh_request import request_of, rows_of
from fxpipe.compiler.options import Offload, Options, as_offload, limit_of, names_of
from fxpipe.compiler.options import check as check_options
from fxpipe.compiler.progress import Phases
from fxpipe.cost.describe import described_everywhere
from fxpipe.cost.device import Device
from fxpipe.errors import CaptureError, FxpipeError
from fxpipe.plan.artifact import Artifact, Plan
from fxpipe.plan.dtensors import mesh_of
from fxpipe.plan.meshes import Mesh, TriedMesh
from fxpipe.plan.saved import files
from fxpipe.plan.step import Shard
from fxpipe.runtime.job.mesh import ranks_and_replicas
from fxpipe.runtime.job.process import Process, agreed, as_timeout, under_torchrun
from fxpipe.runtime.job.tracebacks import brief
from fxpipe.runtime.program.accelerator import check_supported, default_device
from fxpipe.runtime.program.batch import as_dicts
from fxpipe.runtime.program.offload import check_tier
from fxpipe.schedule.formats.handwritten import is_file_name, read_schedule
from fxpipe.schedule.ops import Schedule, Validation
from fxpipe.training.model import parts
from fxpipe.training.model.partial_model import updates_of
from fxpipe.training.model.state_dict import make_whole
from fxpipe.viz.explanation import explain

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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
    mean: Literal["batch", "microbatch"] = "batch",
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
    like: Pipeline | None = None,
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
    without: Sequence[str] = (),
    check: bool = True,
) -> Pipeline:
    """Compile a model into one program per rank.

    model: any module, on the CPU, a GPU, or the meta device; it is not changed, but under torchrun each rank
        frees what it does not hold, until ``pipe.synchronize()``.  With DTensors, as torch's
        ``parallelize_module`` makes them, each rank has as many processes as their mesh (docs/lanes.md).
    example: one microbatch, a mapping of keyword arguments, or a tuple or list of arguments.
    ranks: of a pipeline, a process each; or a DeviceMesh of (replicas, ranks), or of the ranks of a replica;
        with DTensors it may have their lanes as one more dimension, the last.  By default the compiler
        chooses ranks and replicas, the fastest mesh within ``memory_limit``, for so many ``devices`` (those
        that torchrun started) and a ``batch`` (docs/mesh.md).
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
    mean: ``"batch"``: a loss that divides by a number of labels, as a cross-entropy with ignored ones does,
        or by the sum of a mask, divides by that of the whole batch, so that loss and gradients are the whole
        batch's.  ``"microbatch"``: each microbatch divides by its own, as in a loop of plain torch that
        accumulates gradients; the step takes the mean of these.
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
    like: another pipeline, of this model or of one with modules of it, which trains together with this one:
        for another length, loss, or part that is trained.  Each tensor that both use lies on the ranks that
        have it there; parameters, ``.grad`` and the step number are those of both.  By default so are
        ``ranks``, ``replicas``, ``shard``, ``grad_dtype`` and ``vocab_parallel``.  Raises PartitionError,
        naming the tensor, where the model cannot be cut so.
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
    without: names of rules that are not to be applied.  By their values ``"causal-masks"`` and
        ``"empty-masks"`` of attention are dropped, so that it runs by a kernel that knows causality, or that
        has no mask (docs/models.md); ``fxpipe explain`` tells what they save.
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
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise CaptureError(f"The model is {kind}, and must be a module, such as nn.Linear(8, 8).")
    device = _device_of(model)
    check_supported(device)
    mesh = mesh_of(model)
    lanes = 1 if mesh is None else mesh.size()
    if like is not None:
        check_like(like)
        ranks, replicas = ranks_like(like, ranks, replicas)
    pipeline_ranks, replicas = ranks_and_replicas(ranks, replicas, lanes)
    limit = as_timeout(timeout)
    process = Process.join(device, limit) if under_torchrun() else None
    if process is not None:
        unknown = process.world_size // lanes, None
        numbers = unknown if pipeline_ranks is None else (pipeline_ranks, replicas)
        process = process.with_ranks(*numbers, lanes)
        with process.agreed("use the mesh of its model"):
            process.check_mesh(mesh)
        process.backend(device)
    with agreed(process, "compile"):
        world = None if process is None else process.world_size // lanes
        asked = pipeline_ranks, replicas, microbatches, batch, shard
        request = request_of(devices, *asked, world)
        if isinstance(example, list):  # as DataLoaders give them
            example = tuple(example)
        example = as_dicts(example)
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
            mean=mean,
            evaluation=evaluation,
            effort=effort,
            ranks_per_machine=(
                _torchrun_ranks(1 if process is None else process.lanes)
                if ranks_per_machine is None
                else ranks_per_machine
            ),
            backend=backend,
            print_after=print_after,
            without=names_of(without, "without"),
            check=check,
            validation=validation,
        )
        if like is not None:
            options = options_like(options, like, model)
        wanted: list[TriedMesh] = []
        if request is None:
            check_options(options)
        else:
            wanted = checked(options, request.meshes(rows_of(example)))
            options = with_mesh(options, wanted[0].mesh)
        if options.offload.share is not None:
            check_tier(options.tier, device, options.offload_directory)
        own = {} if process is None else arguments_of(model, example, loss_fn, options)
        own["mesh"] = repr((devices, *asked))
    if process is not None:
        process.check_alike(own, "the arguments of fxpipe.compile", "Call it with the same on all ranks.")
        make_whole(model, process)

    has_group = torch.distributed.is_initialized() if process is None else process.users_group is not None
    given = Compilation(model, example, loss_fn, options, device, has_group)
    if process is not None and process.lanes > 1:
        check_lanes(process, lambda: last_lane_as_text(given))

    choice: MeshChoice | None = None
    if len(wanted) > 1:

        def chosen() -> MeshChoice:
            phases = Phases(f"fxpipe {type(model).__name__}, mesh", ends=False)
            return choose_mesh(given, wanted, phases)

        found, choice = _mesh_for_all(chosen, process)
        options = with_mesh(options, found)
        given = replace(given, options=options)
    if process is not None and request is not None:
        process = process.with_ranks(options.ranks, options.replicas, lanes)

    known: list[list[Device]] = []
    if process is not None and costs == "analytic" and process.has_different_devices(device):
        devices_of_all = described_everywhere(device, process.gather)
        known = [[devices_of_all[k] for k in process.that_run(rank)] for rank in range(process.ranks)]

    def compiled_here() -> tuple[Compiled, list[Artifact]]:
        phases = Phases(f"fxpipe {type(model).__name__}")
        compared = (None, ()) if choice is None else (choice.step, choice.tried)
        training = compile_model(given, phases, known, *compared)
        made = [training.artifact, *([compile_evaluation(given, phases, training)] if evaluation else [])]
        for artifact in made if process is not None else ():
            files.check_dtypes(artifact.constants)
        return training, made

    compiled: Compiled | None = None
    if process is None:
        compiled, artifacts = compiled_here()
    elif process.leads:
        compiled, artifacts = parts.made_first(compiled_here, process)
        parts.send_artifacts(artifacts, process)
    else:
        process.wait_for_first()
        artifacts = parts.received_artifacts(process)
    artifact, *forward = artifacts
    if compiled is not None and artifact.plan.tried:
        _explain_on_terminal(artifact.plan)
    with agreed(process, "compile"):
        parameters, buffers = held_of(model, artifact.plan, None if process is None else process.rank)
    pipe = Pipeline(
        artifact=artifact,
        parameters=parameters,
        buffers=buffers,
        device=device,
        process=None if process is None else process.for_pipeline(artifact.plan.model),
        of=(lambda: model) if process is None else weakref.ref(model),
        loss_fn=loss_fn,
        constants=compiled.constants if compiled else (),
        graph=compiled.graph if compiled else None,
        sections=compiled.sections if compiled else (),
        offload_directory=options.offload_directory,
        like=like,
        updates=updates_of(model) if like is None else like.updates,
    )
    pipe = pipe.with_evaluation(forward[0]) if forward else pipe
    if process is not None:
        pipe.share_model(model)
    return pipe


def _torchrun_ranks(lanes: int = 1) -> int | None:
    """The number of ranks that torchrun started on this machine; None under another launcher or none."""
    number = os.environ.get("LOCAL_WORLD_SIZE")
    return max(1, int(number) // lanes) if number is not None and under_torchrun() else None


def _explain_on_terminal(plan: Plan) -> None:
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


def _mesh_for_all(
    choose: Callable[[], MeshChoice], process: Process | None
) -> tuple[Mesh, MeshChoice | None]:
    """The mesh that rank 0 chooses, and on it the whole choice."""
    if process is None:
        choice = choose()
    elif process.leads:
        choice = parts.made_first(choose, process)
        parts.send_mesh(choice.mesh, process)
    else:
        process.wait_for_first()
        return parts.received_mesh(process), None
    return choice.mesh, choice
