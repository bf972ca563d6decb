"""``fxpipe.load``: a saved pipeline, with its weights and its programs as they are now."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn

from fxpipe.api.pipeline import Pipeline
from fxpipe.plan.artifact import Artifact, Plan
from fxpipe.plan.libraries import check_libraries
from fxpipe.plan.rows import joined
from fxpipe.plan.saved import files
from fxpipe.plan.tensors import in_strides
from fxpipe.runtime.job.process import Process, agreed, as_timeout, own_ranks, under_torchrun
from fxpipe.runtime.job.tracebacks import brief
from fxpipe.runtime.program.accelerator import default_device
from fxpipe.training.model import parts
from fxpipe.training.model.accumulators import check_buckets


@brief
def load(
    path: str | Path, *, offload_directory: str | Path | None = None, timeout: float | timedelta | None = None
) -> Pipeline:
    """Load a saved pipeline with its weights; its programs run as they are now, edits included.

    A saved pipeline is a program: run only what you trust.  Loading checks all of its files and runs none of
    them; ``step`` and ``run_local`` run the programs with all that your user may do.

    offload_directory: as for ``compile``, where the pipeline offloads to disk.
    timeout: as for ``compile``.

    Under torchrun all ranks must call it, and each loads the weights that it holds.  Warns of a program that
    was edited since it was saved.  Raises ArtifactError, naming file and field, for a directory that holds no
    pipeline, is cut short or damaged, or was written by another version, for weights that are not those that
    were saved, and naming the op for one whose library is not installed.
    """
    directory, limit = files.as_path(path, "fxpipe.load").absolute(), as_timeout(timeout)
    device = default_device()
    process = Process.join(device, limit) if under_torchrun() else None
    if process is not None:
        process.backend(device)
    leads = process is None or process.leads
    # Rank 0 checks the plans, and gives each rank its own.
    with agreed(process, f"load {directory}"):
        texts = files.plan_texts(directory)
        plans = files.checked_plans(texts) if leads else []
    if process is None:
        artifacts = [Artifact(plan, (), {}, plan.number) for plan in plans]
    else:
        # Each rank reads files of its own disk.
        process.check_same(files.checksum_of(texts), f"{directory / 'plan.json'}")
        artifacts = parts.share_plans(plans, process)
        process = process.with_ranks(artifacts[0].plan.ranks, lanes=artifacts[0].plan.lanes.number)
    plan = artifacts[0].plan
    ranks = own_ranks(process, plan.ranks)
    with agreed(process, f"load {directory}"):
        check_libraries(plan.libraries, str(directory))
        programs = range(plan.ranks) if leads else ranks  # rank 0 saves those of all
        artifact, *others = (
            _with_writer(
                replace(
                    artifact,
                    programs=files.read_programs(path, artifact.plan, programs),
                    captured=files.read_beside(path, files.CAPTURED) if leads else "",
                    steps=files.read_beside(path, files.STEPS) if leads else "",
                ),
                str(path / files.STEPS),
            )
            for path, artifact in zip(texts, artifacts, strict=True)
        )
        parameters, buffers, constants = _read_tensors(directory, plan, process, device)
        step_number = files.read_step_number(directory, ranks[0])
        if process is not None and process.replicas > 1:
            check_buckets(plan)
        others = [
            replace(each, constants=files.read_constants(path, each.plan, ranks))
            for path, each in zip([*texts][1:], others, strict=True)
        ]
    pipe = Pipeline(
        artifact=replace(artifact, constants=constants),
        parameters=parameters,
        buffers=buffers,
        device=device,
        process=None if process is None else process.for_pipeline(plan.model),
        directory=directory,
        offload_directory=None if offload_directory is None else Path(offload_directory),
        first_step=step_number,
    )
    pipe = pipe.with_others(others)
    pipe.let_model_go()  # rows become parameters of their own, before any are compared by name
    pipe.share_values()
    return pipe


def _with_writer(artifact: Artifact, where: str) -> Artifact:
    if not artifact.steps:
        return artifact
    from fxpipe.compiler.step_writer import with_writer  # a part of the compiler, which others train without

    return with_writer(artifact, where)


def _read_tensors(
    directory: Path, plan: Plan, process: Process | None, device: torch.device
) -> tuple[dict[str, nn.Parameter], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The parameters, buffers and constants of this rank; of all ranks without torchrun."""
    parameters: dict[str, nn.Parameter] = {}
    buffers: dict[str, torch.Tensor] = {}
    constants: dict[str, torch.Tensor] = {}
    for rank in own_ranks(process, plan.ranks):
        names = plan.tensors[rank]
        tensors = files.read_tensors(directory, plan, rank, lane=None if process is None else process.lane)
        for name in names.parameters:
            trained = name in names.gradients
            parameters.setdefault(name, nn.Parameter(tensors[name].to(device), requires_grad=trained))
        buffers |= {name: tensors[name].to(device) for name in names.buffers}
        constants |= {name: tensors[name] for name in names.constants}
    if process is None:
        parameters = {
            name: nn.Parameter(in_strides(t.detach(), plan.whole_layout(name).stride), t.requires_grad)
            for name, t in joined(parameters).items()
        }
    return parameters, buffers, constants
