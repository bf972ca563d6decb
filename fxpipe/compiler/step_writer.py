"""Writes the function ``step`` of each rank for a batch whose microbatches have lengths of their own.

What it is written from is data (``codegen/step/step_plan.py``): a saved pipeline keeps it, as ``steps.json``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fxpipe.codegen.collectives import collectives
from fxpipe.codegen.step.step import called_ops, step_calls, step_source
from fxpipe.codegen.step.step_plan import StepParts, StepPlan
from fxpipe.compiler.buckets import bucket_uses
from fxpipe.compiler.tensor_ownership import tied_gradients
from fxpipe.cost.batch_order import BatchPlanner, OfReplica
from fxpipe.errors import ArtifactError
from fxpipe.plan.artifact import Artifact, Plan
from fxpipe.plan.saved.as_json import from_json, to_json
from fxpipe.plan.step import OrderedStep
from fxpipe.schedule.lowering.deadlock import prove
from fxpipe.schedule.lowering.instructions import Programs
from fxpipe.schedule.lowering.lower import lower, with_gradients
from fxpipe.schedule.lowering.validation import with_validation
from fxpipe.schedule.ops import Schedule

STEPS_FORMAT = 1


@dataclass(frozen=True, eq=False)
class StepWriter:
    """Writes ``step`` in the order that is the fastest for the lengths of the microbatches; no text for the
    plan's own order, which the programs have.

    Replicas run one order, so that their messages to each other do not cross.  Its microbatches are places,
    in which each replica has one of its own; one with fewer leaves out the ops of the last places.
    """

    plan: Plan
    parts: StepParts
    orders: BatchPlanner

    def __call__(
        self,
        lengths: Sequence[Mapping[str, int]],
        shares: Sequence[float] = (),
        others: Sequence[OfReplica] = (),
        by_place: bool = False,
    ) -> OrderedStep:
        """others: lengths and shares of other replicas, which may have fewer or more microbatches.

        by_place: whether some replica has another microbatch in a place than that of its number, or none.
        """
        timeline, planned = self.orders.timeline(lengths, shares, others), self.plan.ordered
        schedule = timeline.schedule
        if not by_place and (schedule.order, schedule.transfers) == (planned.order, planned.transfers):
            return OrderedStep((), (), timeline.span_bubble)
        pools = self.orders.pools_of(timeline)
        joint = collectives(self.parts.edges, schedule)
        lowered = lower(schedule, self.plan.costs.edges, joint, timeline.spans)
        programs = instructions(self.plan, self.parts, schedule, lowered)
        texts, ops = [], []
        for rank, of_rank in enumerate(programs):
            step = StepPlan(
                rank=rank,
                parts=self.parts,
                placement=self.plan.placement,
                instructions=of_rank,
                joined=planned.joined,
                places=pools[rank].offsets if pools else {},
                by_place=by_place,
            )
            calls = step_calls(step)
            texts.append(step_source(step, calls))
            ops.append(tuple(called_ops(step, calls)))
        return OrderedStep(tuple(texts), tuple(ops), timeline.span_bubble)


def writer(plan: Plan, parts: StepParts) -> StepWriter:
    return StepWriter(plan, parts, BatchPlanner.of(plan))


@dataclass(frozen=True)
class _Saved:
    """What a saved pipeline keeps.  ``texts``: the digests of ``step`` in each program, as it was saved."""

    format: int
    texts: tuple[str, ...]
    parts: StepParts


def as_text(parts: StepParts, programs: Sequence[str]) -> str:
    """The parts of a pipeline as JSON."""
    return to_json(_Saved(STEPS_FORMAT, tuple(map(_digest, programs)), parts))


def with_writer(artifact: Artifact, where: str) -> Artifact:
    """The artifact of a saved pipeline with the writer of its steps, of which it keeps what they are written
    from.

    A program whose ``step`` was edited has none: an edited program runs as edited.  Raises ArtifactError for
    a text that is damaged, naming ``where`` and the field.
    """
    saved = from_json(artifact.steps, _Saved, where)
    if not _fits(saved, artifact.plan):
        raise ArtifactError(f"{where} does not fit plan.json. Save the pipeline again.")
    if saved.texts != tuple(map(_digest, artifact.programs)):
        return artifact
    return replace(artifact, write_step=writer(artifact.plan, saved.parts))


def _fits(saved: _Saved, plan: Plan) -> bool:
    """Whether the parts are of this format, and of the stages and messages of a plan."""
    parts, ranks, stages = saved.parts, plan.ranks, range(len(plan.placement))
    ends = ({(edge.source, edge.target) for edge in edges} for edges in (parts.edges, plan.costs.edges))
    return (
        saved.format == STEPS_FORMAT
        and len(parts.before) == ranks
        and all(call.color.stage in stages for call in parts.calls)
        and len({*map(frozenset, ends)}) == 1
    )


def _digest(program: str) -> str:
    """The digest of the function ``step``, which ends a program."""
    return hashlib.sha256(program.partition("\ndef step(")[2].encode()).hexdigest()


def instructions(plan: Plan, parts: StepParts, schedule: Schedule, lowered: Programs) -> Programs:
    """The instructions of all ranks for a schedule, proved to end.  lowered: its ops and messages."""
    buckets = bucket_uses(plan, parts.calls, schedule, per_use=parts.per_use)
    # After the lowering, which knows ops and messages alone.
    divides = plan.step.has_count and plan.trains
    programs = with_gradients(lowered, buckets, tied_gradients(plan.tensors), divides)
    # Without an update there is no verdict to wait for.
    if plan.trains:
        programs = with_validation(programs, schedule.placement)
    # What is proved is what the programs are written from.
    prove(programs, schedule.placement)
    return programs
