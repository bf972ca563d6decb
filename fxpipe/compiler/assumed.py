"""The step once more, for some batches: each step runs the programs of one or the other, as its batch is.

- For those that answer a question of the model's code (``if (labels == -100).any():``) in the other way than
  the example.
- For those in which the leaves that masks are made from are one number.  A collator gives ``attention_mask``
  to each batch, and most have no padding.  The programs for these call kernels that know causality.

The first comes before the second, as it is not about time alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any, Literal

import torch

from fxpipe.compiler.compilation import Compilation
from fxpipe.compiler.compile import Compiled, compile_model
from fxpipe.compiler.options import Settings
from fxpipe.compiler.progress import Phases
from fxpipe.compiler.tensor_ownership import tensors_in_stages
from fxpipe.cost.devices.device import Device
from fxpipe.errors import CaptureError, PartitionError, ScheduleError, VocabularyError
from fxpipe.ir.ops import is_masked
from fxpipe.ir.storage import call_nodes
from fxpipe.passes.level.recompute import Level
from fxpipe.plan.artifact import Artifact, Plan
from fxpipe.plan.rewrites import Rewrite
from fxpipe.runtime.batch.microbatches import batch_leaves

#: The share of a microbatch's work that these programs must save: to compile them takes as long once more.
LEAST = 0.02


def with_assumed(
    request: Compilation, phase: Phases, trained: Compiled, devices: Sequence[Sequence[Device]]
) -> tuple[Compiled, list[Artifact]]:
    """The compiled step, and its programs for some batches, on the same ranks, in the same order.

    No such programs where the step cannot be compiled for them; for batches without masks also where they
    would save little by analytic costs.

    devices: as for ``compile_model``.
    """
    options, plan = request.options, trained.artifact.plan
    if not options.gradients or options.on_ranks or plan.lanes.shared:
        return trained, []
    # Several questions have more than two answers together.
    if "batch-branches" in options.rules and len(trained.captured.branches) == 1:
        (branch,) = trained.captured.branches
        branch = replace(branch, answer=not branch.answer)
        other = _compiled(request, trained, phase, devices, branch=branch)
        # Behind the other answer the code may ask more, which its programs check.
        if other is not None and branch in other.captured.branches:
            apart = abs(_seconds(trained) - _seconds(other))
            trained = _with_rewrite(trained, Rewrite("batch-branches", 1, apart))
            return _with_peaks_of(trained, other.artifact.plan), [_with(other, branch=branch).artifact]
    return _without_masks(request, phase, trained, devices)


def _without_masks(
    request: Compilation, phase: Phases, trained: Compiled, devices: Sequence[Sequence[Device]]
) -> tuple[Compiled, list[Artifact]]:
    options, masks = request.options, trained.captured.masks
    saved, share = _saved(trained)
    if "batch-masks" not in options.rules or not masks.leaves or share < LEAST:
        return trained, []
    leaves = dict(batch_leaves(request.example))
    numbers = {name: _number(leaves[name]) for name in sorted(masks.leaves - {*options.fixed})}
    assumed = {name: number for name, number in numbers.items() if number is not None}
    if not assumed:
        return trained, []
    other = _compiled(request, trained, phase, devices, assumed=assumed)
    calls = 0 if other is None else masks.needed.count("dense") - other.captured.masks.needed.count("dense")
    if other is None or calls <= 0:
        return trained, []
    freed = sum(other.captured.masks.freed(mask) - masks.freed(mask) for mask in ("causal", "none"))
    trained = _with_rewrite(trained, Rewrite("batch-masks", calls, saved, max(freed, 0)))
    return trained, [_with(other, assumed=assumed).artifact]


def _compiled(
    request: Compilation,
    trained: Compiled,
    phase: Phases,
    devices: Sequence[Sequence[Device]],
    **batches: Any,
) -> Compiled | None:
    """The step for some batches; None where it cannot be compiled for them, or needs more than there is."""
    request = replace(request, options=replace(_like(request.options, trained), **batches))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they were given of the same code
            other = compile_model(request, phase, devices)
    except (CaptureError, PartitionError, ScheduleError, VocabularyError):
        return None  # nothing is lost: the others run these batches, too, or refuse them
    other = _with_buffers_of(other, trained.artifact.plan)
    return other if _fits(other.artifact.plan, trained.artifact.plan) else None


def _with(compiled: Compiled, **changes: Any) -> Compiled:
    """The compilation with these fields of its plan."""
    artifact = compiled.artifact
    return replace(compiled, artifact=replace(artifact, plan=replace(artifact.plan, **changes)))


def _with_rewrite(compiled: Compiled, rewrite: Rewrite) -> Compiled:
    return _with(compiled, rewrites=(*compiled.artifact.plan.rewrites, rewrite))


def _with_buffers_of(compiled: Compiled, other: Plan) -> Compiled:
    """The compilation, on ranks that also hold the buffers that other programs alone read there."""
    tensors = [
        replace(ours, buffers=theirs.buffers) if {*ours.buffers} < {*theirs.buffers} else ours
        for ours, theirs in zip(compiled.artifact.plan.tensors, other.tensors, strict=True)
    ]
    return _with(compiled, tensors=(*tensors,))


def _with_peaks_of(compiled: Compiled, other: Plan) -> Compiled:
    """The compilation, with the memory that ranks need for either programs."""
    prediction = compiled.artifact.plan.prediction
    peaks = map(max, prediction.peak_memory, other.prediction.peak_memory)
    return _with(compiled, prediction=replace(prediction, peak_memory=(*peaks,)))


def _saved(compiled: Compiled) -> tuple[float, float]:
    """The seconds that a microbatch takes less where its attentions need no masks, and their share: a kernel
    that knows causality does half of the work."""
    seconds = compiled.cluster.node_seconds()
    saved = sum(seconds(node) for node in call_nodes(compiled.cut.graph) if is_masked(node)) / 2
    return saved, saved / max(_seconds(compiled), 1e-30)


def _seconds(compiled: Compiled) -> float:
    """The seconds of a microbatch, op by op."""
    return sum(map(compiled.cluster.node_seconds(), call_nodes(compiled.cut.graph)))


def _number(leaf: torch.Tensor) -> float | None:
    """The number that all elements of a leaf are where nothing is masked: the example's, or 1 where that has
    zeros beside ones; None for a leaf of other numbers, which is no mask."""
    if leaf.is_meta or not leaf.numel():
        return 1.0 if leaf.dtype is torch.bool else None
    first = leaf.reshape(-1)[0]
    if bool((leaf == first).all()):
        return float(first)
    return 1.0 if bool(((leaf == 0) | (leaf == 1)).all()) else None


def _like(options: Settings, trained: Compiled) -> Settings:
    """The settings with the decisions of the step that was compiled first."""
    plan = trained.artifact.plan
    levels: dict[str, Level | Literal[False]] = {"": False, "norms": "norms", "full": "full"}
    ways: dict[int | None, Literal["1-barrier", "2-barrier", False]]
    ways = {None: False, 1: "1-barrier", 2: "2-barrier"}
    return replace(
        options,
        in_stages=tensors_in_stages(trained.cut.sections, plan.ordered.model_stages),
        schedule=replace(plan.ordered, transfers=()),
        recompute=levels[plan.recompute],
        vocab_parallel=ways[None if plan.vocabulary is None else plan.vocabulary.barriers],
        head_chunks=plan.head_chunks,
        split_points=None,
        parts=1,  # the schedule has them as stages
        # The order is known: nothing has to be timed once more.
        costs="analytic" if options.costs == "measured" else options.costs,
        evaluation=False,
        print_after=None,
    )


def _fits(other: Plan, plan: Plan) -> bool:
    """Whether a plan trains as another one, and needs no more memory than that is allowed."""
    allowed = map(max, plan.prediction.peak_memory, plan.limits or [inf] * plan.ranks)
    is_within = all(a <= b for a, b in zip(other.prediction.peak_memory, allowed, strict=True))
    return is_within and other.trains_as(plan)
