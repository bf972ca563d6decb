"""The two ways to a pipeline: compile a model, or load what was saved."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import nn

from fxpipe.errors import CaptureError, FxpipeError, PartitionError, RunError
from fxpipe.pipeline import Pipeline
from fxpipe.plan import files
from fxpipe.plan.artifact import Artifact, Plan
from fxpipe.runtime.offloader import Tier, check_tier, default_tier
from fxpipe.runtime.process import Process, default_device, under_torchrun
from fxpipe.runtime.tensors import in_strides
from fxpipe.schedule.ops import Schedule
from fxpipe.vocabulary.rows import whole

if TYPE_CHECKING:
    from fxpipe.compiler import Compiled


def compile(
    model: nn.Module,
    example: Mapping[str, Any] | tuple[Any, ...],
    *,
    ranks: int,
    microbatches: int,
    schedule: str | Schedule | Path = "auto",
    loss_fn: Callable[..., Any] | None = None,
    stages_per_rank: int | None = None,
    placement: str | None = None,
    split_points: Sequence[str] | None = None,
    memory_limit: float | str | None = None,
    vocab_parallel: bool | str = False,
    recompute: bool | str = False,
    offload: bool | float | str = False,
    offload_tier: Tier | None = None,
    offload_directory: str | Path | None = None,
    offload_bandwidth: float | None = None,
    ranks_per_link: int = 1,
    costs: str = "analytic",
    seed: int = 0,
    gradients: bool = True,
    dimensions: Mapping[str, int] | None = None,
    fixed: Sequence[str] = (),
) -> Pipeline:
    """Compile a model into one program a rank.

    model: any module, on the CPU, a GPU, or the meta device; it is not changed.
    example: one microbatch, a mapping of keyword arguments or a tuple of arguments.
    schedule: the name of a family (``fxpipe simulate --help`` lists them); ``auto``, the one with the
        shortest simulated step over all families, placements and one or two stages a rank; a Schedule; or
        the path of one that you wrote, as text or as torch's CSV.
    loss_fn: ``(output, microbatch) -> loss``, a scalar, or ``-> (sum, count)`` for an exact mean over
        all counts of the batch.  Without it the model's output or its ``.loss`` is the loss.
    stages_per_rank, placement: ``plain`` (stage s on rank s mod ranks) or ``v`` (down the ranks and back
        up).  The schedule's own where they are not given.
    split_points: module paths that begin the second and later stages, instead of cuts by cost.
    memory_limit: of each rank, in bytes or as ``"16GiB"``: for its parameters, gradients and buffers, and
        what it saves between ops.  Leave room for the optimizer's state and for what a single op needs.
    vocab_parallel: spread the output layer with its cross-entropy, and the input embedding, over all ranks:
        ``"1-barrier"`` (or True) or ``"2-barrier"`` (ranks wait for each other once or twice a microbatch;
        the second needs less work before the first barrier and holds a microbatch more).
    recompute: forward values that the backward makes again instead of keeping them: ``"norms"`` (all but
        matrix products, convolutions and attention), ``"full"``, or ``"auto"``, whichever of none and these
        has the shortest simulated step within ``memory_limit``.  Gradients stay the same to the bit.
    offload: what F saves may leave the rank until B and W need it: all of it (True), a share (``0.5``), or as
        much as ``memory_limit`` asks for (``"auto"``); those values that are wanted last go first, and no
        more than can be away and back in time.
    offload_tier: where to: ``"host"``, pinned memory beside a GPU, or ``"disk"``, beside the CPU; the one
        that goes with the device where it is not given.
    offload_directory: of the disk tier, on a disk that is fast and not memory itself (the system's directory
        for temporary files).  Its files have no names and are gone with the process.
    offload_bandwidth: bytes a second, one way, that the plan reckons with; measured where ``costs`` are, else
        of the device's description.
    ranks_per_link: so many neighboring ranks share that way and take turns (two GPUs on one switch: 2).
    costs: what the schedule is made for: ``analytic`` (FLOPs and bytes on a described device) or
        ``measured`` (each section timed on the device at hand).
    seed: of the random ops; their numbers depend on it, the step and the microbatch alone.
    gradients: False compiles the forward alone: ``pipe.step`` and ``run_local`` then only give the loss. For
        evaluation, of ``model.eval()``; the pipeline works on the model's own weights, as others of it do.
    dimensions: names for lengths of the example, ``{"sequence": 256}``, so that ``pipe.simulate`` can tell
        costs for other lengths: every dimension that is 256 long is called so, but for the leading one,
        ``microbatch``.  The model is traced twice more, at other lengths.  Raises SizeError where it then
        does other ops.
    fixed: names of tensors of the example whose values are part of the program, where the model's Python code
        decides by them in ways that a trace cannot follow (``["image_grid_thw"]``).  Every microbatch must
        hold the same values, else RunError.

    Where the forward branches on other data, the example decides, and each microbatch is checked to decide
    alike, else RunError, which names the line.

    Under torchrun all ranks call it alike; rank 0 compiles and the others receive the programs.
    Raises CaptureError, PartitionError, VocabularyError or ScheduleError, each with what to do, and RunError
    where the number of processes is not ``ranks``.
    """
    # Here, as ``load`` needs neither the compiler nor the schedule search with its compiled kernels.
    from fxpipe.compiler import compile_model, phases
    from fxpipe.options import Options, check, parse_bytes, share_of
    from fxpipe.progress import Phases
    from fxpipe.schedule.handwritten import read_schedule

    if not isinstance(model, nn.Module):
        raise CaptureError(f"The model is a {type(model).__name__}; fxpipe compiles an nn.Module.")
    if isinstance(split_points, str):
        raise PartitionError(f"split_points is a list of module paths: give [{split_points!r}].")
    if isinstance(fixed, str):
        raise CaptureError(f"fixed is a list of names: give [{fixed!r}].")
    options = Options(
        ranks=ranks,
        microbatches=microbatches,
        schedule=read_schedule(schedule) if isinstance(schedule, Path) else schedule,
        stages_per_rank=stages_per_rank,
        placement=placement,
        split_points=None if split_points is None else tuple(split_points),
        memory_limit=None if memory_limit is None else parse_bytes(memory_limit),
        costs=costs,
        seed=seed,
        vocab_parallel=vocab_parallel,
        gradients=gradients,
        recompute=recompute,
        offload=share_of(offload),
        offload_tier=offload_tier,
        offload_directory=None if offload_directory is None else Path(offload_directory),
        offload_bandwidth=offload_bandwidth,
        ranks_per_link=ranks_per_link,
        dimensions=dimensions,
        fixed=tuple(fixed),
    )
    check(options)
    device = _device_of(model)
    if options.offload is not None:
        check_tier(offload_tier or default_tier(device), device, options.offload_directory)
    process = Process.join(ranks, device) if under_torchrun() else None
    compiled: Compiled | None = None
    if process is None or process.rank == 0:
        title = f"fxpipe {type(model).__name__}"
        try:
            compiled = compile_model(model, example, loss_fn, options, device, Phases(title, phases(options)))
        except FxpipeError as error:
            if process is not None:
                process.broadcast_bytes(json.dumps({"error": str(error)}).encode())
            raise
    artifact = compiled.artifact if compiled is not None else None
    if process is not None:
        artifact = _shared(artifact, process)
    assert artifact is not None
    if compiled is not None and artifact.plan.tried:
        _explain_on_terminal(artifact.plan)
    # Frozen parameters that the step changes are buffers of the pipeline.
    changed = {name for held in artifact.plan.tensors for name in held.buffers}
    pipe = Pipeline(
        artifact=artifact,
        parameters={n: p for n, p in model.named_parameters() if n not in changed},
        buffers=dict(model.named_buffers()) | {n: p for n, p in model.named_parameters() if n in changed},
        device=device,
        process=process,
        model=model,
        graph=compiled.graph if compiled else None,
        sections=compiled.sections if compiled else (),
        offload_directory=options.offload_directory,
    )
    return pipe


def load(path: str | Path, *, offload_directory: str | Path | None = None) -> Pipeline:
    """Load a saved pipeline with its weights; its programs run as they are now, edits included.

    A saved pipeline is a program: run only what you trust.  Loading checks all of its files and runs none of
    them; ``step`` and ``run_local`` run the programs with all that your user may do.

    offload_directory: as for ``compile``, where the pipeline offloads to disk.

    Under torchrun each rank loads the weights that it holds.  Warns of a program that was edited since it was
    saved, and of weights that were replaced.  Raises ArtifactError, naming file and field, for a directory
    that holds no pipeline, is cut short or damaged, or was written by another version.
    """
    directory = Path(path).absolute()
    plan, programs = files.read(directory)
    device = default_device()
    process = Process.join(plan.ranks, device) if under_torchrun() else None
    ranks = range(plan.ranks) if process is None else [process.rank]
    parameters: dict[str, nn.Parameter] = {}
    buffers: dict[str, torch.Tensor] = {}
    constants: dict[str, torch.Tensor] = {}
    for rank in ranks:
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
    return Pipeline(
        Artifact(plan, programs, constants),
        parameters,
        buffers,
        device,
        process,
        directory=directory,
        offload_directory=None if offload_directory is None else Path(offload_directory),
    )


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


def _shared(artifact: Artifact | None, process: Process) -> Artifact:
    """Rank 0's artifact on every rank, as JSON and safetensors."""
    if artifact is not None:
        text = json.dumps({"plan": artifact.plan.to_json(), "programs": artifact.programs})
        process.broadcast_bytes(text.encode())
        process.broadcast_bytes(tensors_to_bytes(files.apart(artifact.constants)))
        return artifact
    data = json.loads(process.broadcast_bytes(None))
    if "error" in data:
        raise RunError(f"Rank 0 could not compile the model: {data['error']}")
    constants = tensors_from_bytes(process.broadcast_bytes(None))
    plan = Plan.from_json(data["plan"], "rank 0's plan")
    return Artifact(plan, tuple(data["programs"]), files.laid_out(constants, plan))
