"""The step once more, for batches in which the leaves that masks are made from are one number.

A collator gives ``attention_mask`` to each batch, and most have no padding.  The programs for these call
kernels that know causality; each step runs one or the other, as its batch is (``Runner``).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import fx

from fxpipe.compiler.compilation import Compilation
from fxpipe.compiler.compile import Compiled, compile_model
from fxpipe.compiler.options import Settings
from fxpipe.compiler.progress import Phases
from fxpipe.compiler.tensor_ownership import tensors_in_stages
from fxpipe.cost.devices.cluster import Cluster
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
    request: Compilation, phase: Phases, trained: Compiled, devices: Sequence[Sequence[Device]] = ()
) -> tuple[Compiled, list[Artifact]]:
    """The compiled step, and its programs for batches without masks, on the same ranks, in the same order.

    None where they would save little by analytic costs, or where the step cannot be compiled for them.

    devices: as for ``compile_model``.
    """
    options, plan, masks = request.options, trained.artifact.plan, trained.masks
    saved, share = _saved(trained.graph, trained.cluster)
    is_able = options.gradients and not options.on_ranks and not plan.lanes.shared
    if "batch-masks" not in options.rules or not masks.leaves or share < LEAST or not is_able:
        return trained, []
    leaves = dict(batch_leaves(request.example))
    numbers = {name: _number(leaves[name]) for name in sorted(masks.leaves - {*options.fixed})}
    assumed = {name: number for name, number in numbers.items() if number is not None}
    if not assumed:
        return trained, []
    request = replace(request, options=_like(options, trained, assumed))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they were given of the same code
            other = compile_model(request, phase, devices)
    except (CaptureError, PartitionError, ScheduleError, VocabularyError):
        return trained, []  # nothing is lost: the programs for all batches run these, too
    calls = masks.needed.count("dense") - other.masks.needed.count("dense")
    if calls <= 0 or not _fits(other.artifact.plan, plan, options):
        return trained, []
    freed = sum(other.masks.freed(mask) - masks.freed(mask) for mask in ("causal", "none"))
    rewrites = *plan.rewrites, Rewrite("batch-masks", calls, saved, max(freed, 0))
    trained = replace(trained, artifact=replace(trained.artifact, plan=replace(plan, rewrites=rewrites)))
    plan = replace(other.artifact.plan, assumed=assumed)
    return trained, [replace(other.artifact, plan=plan)]


def _saved(graph: fx.Graph, cluster: Cluster) -> tuple[float, float]:
    """The seconds that a microbatch takes less where its attentions need no masks, and their share: a kernel
    that knows causality does half of the work."""
    seconds = cluster.node_seconds()
    of_each = {node: seconds(node) for node in call_nodes(graph)}
    saved = sum(time for node, time in of_each.items() if is_masked(node)) / 2
    return saved, saved / max(sum(of_each.values()), 1e-30)


def _number(leaf: torch.Tensor) -> float | None:
    """The number that all elements of a leaf are where nothing is masked: the example's, or 1 where that has
    zeros beside ones; None for a leaf of other numbers, which is no mask."""
    if leaf.is_meta or not leaf.numel():
        return 1.0 if leaf.dtype is torch.bool else None
    first = leaf.reshape(-1)[0]
    if bool((leaf == first).all()):
        return float(first)
    return 1.0 if bool(((leaf == 0) | (leaf == 1)).all()) else None


def _like(options: Settings, trained: Compiled, assumed: dict[str, float]) -> Settings:
    """The settings with the decisions of the step that is compiled for all batches."""
    plan = trained.artifact.plan
    levels: dict[str, Level | Literal[False]] = {"": False, "norms": "norms", "full": "full"}
    ways: dict[int | None, Literal["1-barrier", "2-barrier", False]]
    ways = {None: False, 1: "1-barrier", 2: "2-barrier"}
    return replace(
        options,
        assumed=assumed,
        in_stages=tensors_in_stages(trained.sections, plan.ordered.model_stages),
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


def _fits(other: Plan, plan: Plan, options: Settings) -> bool:
    """Whether a plan trains as another one, and needs no more memory where that has a limit."""
    peaks = zip(other.prediction.peak_memory, plan.prediction.peak_memory, strict=True)
    is_within = options.memory_limit is None or all(a <= b for a, b in peaks)
    return is_within and other.trains_as(plan)
