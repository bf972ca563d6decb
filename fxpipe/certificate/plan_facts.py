"""Compares what the plan says of the step's inputs and results with the captured step.

The runtime goes by the plan: it allocates accumulators, sums buckets over replicas, and takes batches apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from fxpipe.certificate.problems import Problem
from fxpipe.certificate.reference import Reference
from fxpipe.certificate.terms.terms import Layout
from fxpipe.plan.artifact import Plan
from fxpipe.plan.rows import ShardName
from fxpipe.plan.tensors import dtype_of


def unlike_captured(plan: Plan, reference: Reference) -> Iterator[Problem]:
    """What the plan has otherwise, each told once, at rank 0."""
    for text in (*_inputs(plan, reference), *_results(plan, reference), *_buckets(plan)):
        yield Problem(0, 0, text)


def _inputs(plan: Plan, reference: Reference) -> Iterator[str]:
    leaves = {leaf.name: leaf for leaf in plan.step.batch.leaves}
    for (kind, name), layout in reference.inputs.items():
        record = leaves.get(name) if kind == "batch" else plan.layouts.get(ShardName(name))
        if layout is None or record is None or record.shape is None:
            continue
        planned = Layout(tuple(record.shape), dtype_of(record.dtype))
        if planned != layout:
            has = _shown(layout)
            yield f"the plan has the {kind} {name!r} as {_shown(planned)}, and the captured step as {has}"


def _results(plan: Plan, reference: Reference) -> Iterator[str]:
    loss, step = reference.loss, plan.step
    if step.has_loss != (loss is not None):
        yield f"the plan has {'a' if step.has_loss else 'no'} loss (step.has_loss), unlike the captured step"
    elif loss is not None and loss.layout is not None and loss.layout.dtype != dtype_of(step.loss_dtype):
        yield f"the plan has a loss of {step.loss_dtype}, and the captured step one of {loss.layout.dtype}"
    if plan.changed and {*plan.changed} != reference.buffers.keys():
        yield "the plan has other buffers that the step changes than the captured step"


def _buckets(plan: Plan) -> Iterator[str]:
    """Each gradient must be in one bucket: replicas sum these."""
    for rank, tensors in enumerate(plan.tensors):
        counts = Counter(name for bucket in tensors.buckets for name in bucket.gradients)
        if counts and (counts.keys() != {*tensors.gradients} or max(counts.values()) > 1):
            wrong = [name for name in tensors.gradients if counts[name] != 1] or sorted(counts)
            yield f"the plan has the gradient of {wrong[0]} in {counts[wrong[0]]} buckets of rank {rank}"


def _shown(layout: Layout) -> str:
    return f"{str(layout.dtype).removeprefix('torch.')}{[*layout.shape]}"
