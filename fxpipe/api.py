"""The public functions: compile a model, and load a saved pipeline."""

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
from fxpipe.runtime.offloader import check_tier
from fxpipe.runtime.process import Process, default_device, under_torchrun
from fxpipe.runtime.tensors import in_strides
from fxpipe.schedule.ops import Schedule
from fxpipe.vocabulary.rows import whole

if TYPE_CHECKING:
    from fxpipe.compiler import Compiled
    from fxpipe.options import Offload


def compile(
    model: nn.Module,
    example: Mapping[str, Any] | tuple[Any, ...],
    *,
    ranks: int,
    microbatches: int,
    # the step
    loss_fn: Callable[..., Any] | None = None,
    gradients: bool = True,
    outputs: Sequence[str] = (),
    evaluation: bool = False,
    seed: int = 0,
    fixed: Sequence[str] = (),
    # the schedule
    schedule: str | Schedule | Path = "auto",
    stages_per_rank: int | None = None,
    placement: str | None = None,
    split_points: Sequence[str] | None = None,
    effort: float | None = None,
    costs: str = "analytic",
    dimensions: Mapping[str, int] | None = None,
    # memory
    memory_limit: float | str | None = None,
    vocab_parallel: bool | str = False,
    recompute: bool | str = False,
    offload: Offload | bool | float | str = False,
    **old_spellings: Any,
) -> Pipeline:
    """Compile a model into one program per rank.

    model: any module, on the CPU, a GPU, or the meta device; it is not changed.
    example: one microbatch, a mapping of keyword arguments or a tuple of arguments.

    loss_fn: ``(output, microbatch) -> loss``, a scalar, or ``-> (sum, count)`` for an exact mean over
        all counts of the batch; either with a mapping of metrics behind it, ``-> (loss, {"accuracy": …})``.
        Without it the loss is the model's output if that is a scalar, its ``.loss`` or ``["loss"]``, or the
        one scalar with a gradient in a tuple.
    gradients: False compiles the forward alone, for evaluation of ``model.eval()``: ``pipe.step`` and
        ``run_local`` then give the loss.  The pipeline works on the model's own weights.  With ``outputs`` it
        needs no loss.
    outputs: names of values that ``pipe.step(batch, outputs=[…])`` can give beside the loss: tensors in the
        model's output (``"logits"``, ``"0"`` of a tuple, ``"losses.ce"``; ``"output"`` if it is one tensor),
        metrics of ``loss_fn``, and ``"loss"`` and ``"count"``, those of each microbatch.
    evaluation: also make the programs of ``pipe.evaluate``, the forward in eval mode alone, for the same
        ranks, which hold its tensors already.  The model is traced once more.
    seed: of the random ops; their numbers depend on it, the step and the microbatch alone.
    fixed: names of tensors of the example whose values are part of the program, for models whose Python code
        decides by them in ways that a trace cannot follow (``["image_grid_thw"]``).  Every microbatch must
        hold the same values, else RunError.

    schedule: the name of a family (``fxpipe simulate --help`` lists them); ``auto``, the one with the
        shortest simulated step over all families, placements and one, two or four stages per rank; a
        Schedule; or the path of a schedule as text or as torch's CSV.
    stages_per_rank, placement: ``plain`` (stage s on rank s mod ranks) or ``v`` (down the ranks and back
        up).  By default the schedule's own.
    split_points: module paths that begin the second and later stages, instead of cuts by cost.
    effort: of the search for a schedule, about the seconds of one core; it uses all cores.  By default two
        milliseconds for every op (stage, phase, microbatch) of all placements, and 8 seconds at most.
    costs: the times that the schedule is made for: ``analytic`` (FLOPs and bytes on a described device) or
        ``measured`` (each section timed on the device at hand).
    dimensions: names for lengths of the example, ``{"sequence": 256}``, so that ``pipe.simulate`` can predict
        costs for other lengths: every dimension that is 256 long gets that name, but the leading one is
        ``microbatch``.  The model is traced twice more, at other lengths; raises SizeError if its ops differ.

    memory_limit: of each rank, in bytes or as ``"16GiB"``: for its parameters, gradients and buffers, and
        the values saved between ops.  Leave room for the optimizer's state and for the memory of a single op.
    vocab_parallel: split the output layer with its cross-entropy, and the input embedding, over all ranks:
        ``"1-barrier"`` (or True) or ``"2-barrier"`` (ranks wait for each other once or twice a microbatch;
        the second needs less work before the first barrier and holds a microbatch more), or ``"auto"``.
    recompute: recompute forward values in the backward instead of saving them; gradients are bit-identical.
        ``"norms"`` (all but matrix products, convolutions and attention), ``"full"``, or ``"auto"``, the
        fastest of none and these within ``memory_limit``, as simulated.
    offload: move saved activations off the rank until the backward needs them: an :class:`fxpipe.Offload`, or
        its ``share`` alone (True, ``0.5``, ``"auto"``).
    old_spellings: ``offload_tier``, ``offload_directory``, ``offload_bandwidth`` and ``ranks_per_link``, now
        fields of ``Offload``; accepted with a DeprecationWarning in this version.

    Where the forward branches on other data, the example decides, and each microbatch is checked to decide
    alike, else RunError, which names the line.

    Under torchrun all ranks must call it with the same arguments; rank 0 compiles and the others receive the
    programs.
    Raises CaptureError, PartitionError, VocabularyError or ScheduleError, each with what to do, and RunError
    where the number of processes is not ``ranks``.
    """
    # Imported here, as ``load`` needs neither the compiler nor the schedule search with its compiled kernels.
    from fxpipe.compiler import compile_evaluation, compile_model
    from fxpipe.options import Options, as_offload, check, parse_bytes
    from fxpipe.progress import Phases
    from fxpipe.schedule.handwritten import read_schedule

    if not isinstance(model, nn.Module):
        raise CaptureError(f"The model is a {type(model).__name__}; fxpipe compiles an nn.Module.")
    if isinstance(split_points, str):
        raise PartitionError(f"split_points is a list of module paths: give [{split_points!r}].")
    if isinstance(outputs, str) or not all(isinstance(name, str) for name in outputs):
        names = [outputs] if isinstance(outputs, str) else [str(name) for name in outputs]
        raise CaptureError(f"outputs is a list of names: give {names}.")
    if isinstance(fixed, str):
        raise CaptureError(f"fixed is a list of names: give [{fixed!r}].")
    device = _device_of(model)
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
        offload=as_offload(offload, old_spellings, device),
        dimensions=dimensions,
        fixed=tuple(fixed),
        outputs=tuple(dict.fromkeys(outputs)),
        evaluation=evaluation,
        effort=effort,
    )
    check(options)
    if options.offload.share is not None:
        check_tier(options.tier, device, options.offload_directory)
    process = Process.join(ranks, device) if under_torchrun() else None
    compiled: Compiled | None = None
    forward: Artifact | None = None
    if process is None or process.rank == 0:
        phases = Phases(f"fxpipe {type(model).__name__}")
        given = model, example, loss_fn, options, device, phases
        try:
            compiled = compile_model(*given)
            forward = compile_evaluation(*given, compiled) if evaluation else None
        except FxpipeError as error:
            if process is not None:
                process.broadcast_bytes(json.dumps({"error": str(error)}).encode())
            raise
    artifact = compiled.artifact if compiled is not None else None
    if process is not None:
        artifact = _shared(artifact, process)
        forward = _shared(forward, process) if evaluation else None
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
    return pipe if forward is None else pipe.with_evaluation(forward)


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
    pipe = Pipeline(
        Artifact(plan, programs, constants),
        parameters,
        buffers,
        device,
        process,
        directory=directory,
        offload_directory=None if offload_directory is None else Path(offload_directory),
    )
    forward = files.read_evaluation(directory, plan, ranks)
    return pipe if forward is None else pipe.with_evaluation(forward)


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
