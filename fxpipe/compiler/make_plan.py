"""Makes the plan of a compilation: its decisions and predictions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import fx

from fxpipe.capture.reads.documents import mixes_documents
from fxpipe.capture.reads.table_rows import boundaries_of
from fxpipe.capture.trace import Captured
from fxpipe.compiler.buckets import with_buckets
from fxpipe.compiler.choice.cut import Cut
from fxpipe.compiler.compilation import Compilation
from fxpipe.compiler.tensor_ownership import (
    layouts_of,
    leaves_used,
    outputs_of,
    state_names,
    tensor_ownership,
    tied_gradients,
)
from fxpipe.errors import OptionError, PartitionError, suggested
from fxpipe.ir.compat import OpOverload, registrar
from fxpipe.ir.graph import Kind, Section
from fxpipe.ir.storage import call_nodes, graph_outputs
from fxpipe.plan.artifact import FORMAT, Plan, Prediction, RankTensors, StagePlan
from fxpipe.plan.step import POSITIONS, StepSpec
from fxpipe.plan.version import __version__
from fxpipe.runtime.batch.microbatches import batch_leaves, batch_spec
from fxpipe.schedule.lowering.channels import in_rounds
from fxpipe.schedule.lowering.instructions import Collective
from fxpipe.schedule.ops import Phase, order_text
from fxpipe.schedule.simulation.timeline import Timeline


def make_plan(
    request: Compilation,
    captured: Captured,
    cut: Cut,
    timeline: Timeline,
    collectives: tuple[Collective, ...],
) -> Plan:
    """The plan of a cut under a simulated schedule, without the optional fields, which the compiler adds.

    captured: with the constants that the model made itself, and its lanes.  collectives: the messages that
    are sent as collectives.
    """
    model, options, mesh = request.model, request.options, request.options.mesh
    loss, count = graph_outputs(cut.graph).loss, graph_outputs(cut.graph).count
    schedule, placement = timeline.schedule, timeline.schedule.placement
    tensors = tensor_ownership(
        model, cut.sections, placement, mesh.ranks, options.on_ranks, options.has_on_ranks
    )
    joint = {(a, b) for collective in collectives for a in collective.sources for b in collective.targets}
    channels = {
        (placement[edge.source.stage], placement[edge.target.stage])
        for edge in cut.edges
        if (edge.source, edge.target) not in joint
    }
    for tied in tied_gradients(tensors):
        # The first rank gets the others' gradients, and sends the sum back.
        channels |= {(a, b) for r in tied.ranks[1:] for a, b in ((r, tied.ranks[0]), (tied.ranks[0], r))}
    layouts = layouts_of(model, tensors, captured.constants)
    return Plan(
        format=FORMAT,
        version=__version__,
        model=type(model).__name__,
        schedule=schedule.name,
        placement=placement,
        order=tuple(order_text(schedule.order).splitlines()),
        step=StepSpec(
            ranks=mesh.ranks,
            microbatches=mesh.microbatches,
            batch=batch_spec(request.example, captured.asked, captured.written, captured.unread),
            loss_rank=placement[-1 if loss is None else loss.meta["color"].stage],
            loss_dtype=str(torch.get_default_dtype() if loss is None else loss.meta["val"].dtype),
            has_count=count is not None,
            seed=options.seed,
            default_dtype=str(torch.get_default_dtype()),
            leaves=leaves_used(cut.sections, placement, mesh.ranks),
            outputs=outputs_of(cut.graph, placement),
            has_loss=loss is not None,
            totals=captured.means.totals,
            mixes=POSITIONS in dict(batch_leaves(request.example)) and mixes_documents(captured.graph),
            boundaries=boundaries_of([captured.graph], (), ((),)),
        ),
        stages=_stage_plans(cut.graph, cut.sections, placement),
        costs=timeline.costs,
        channels=in_rounds((a, b) for a, b in channels if a != b),
        vocabulary=cut.step.vocabulary,
        collectives=max((1 + each.group for each in collectives), default=0),
        tensors=with_buckets(
            tensors,
            cut.sections,
            schedule,
            layouts,
            options.grad_dtype,
            shard=mesh.shard,
            per_use=options.per_use,
            lanes=captured.lanes,
        ),
        layouts=layouts,
        prediction=Prediction(
            timeline.seconds, timeline.span_bubble, timeline.makespan_bubble, timeline.peak_memory
        ),
        recompute=cut.recompute,
        head_chunks=cut.options.head_chunks,
        transfers=schedule.transfers,
        replicas=mesh.replicas,
        shard=mesh.shard,
        undivided=_matched(options.undivided, tensors),
        state=state_names(model),
        lanes=captured.lanes,
        own_hooks=captured.own_hooks,
        changed=tuple(sorted(graph_outputs(cut.graph).buffers)),
        grad_dtype="" if options.grad_dtype is None else str(options.grad_dtype),
        validation=options.validation,
        replay=options.replays,
        batch_means=captured.means.exact,
        own_means=captured.means.apart,
        libraries=_libraries(cut.graph),
    )


def _matched(patterns: Sequence[str], tensors: Sequence[RankTensors]) -> tuple[str, ...]:
    """The parameters that these patterns name.  Raises OptionError for one that names none."""
    known = sorted({name.tensor for rank in tensors for name in rank.parameters})
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            meant = suggested(pattern, known)
            raise OptionError(f"undivided has {pattern!r}, which no parameter of the model matches.{meant}")
    return tuple(name for name in known if any(fnmatchcase(name, pattern) for pattern in patterns))


def _libraries(graph: fx.Graph) -> dict[str, str]:
    """The ops of others than torch, with the modules that register them."""
    targets = (target for node in call_nodes(graph) for target in (node.target, *node.args))
    ops = {target for target in targets if isinstance(target, OpOverload)}
    modules = {f"{op.namespace}.{op.overloadpacket.__name__}": registrar(op) for op in ops}
    return {op: module for op, module in sorted(modules.items()) if module is not None}


def with_tensors_of(plan: Plan, sections: Sequence[Section], trained: Plan) -> Plan:
    """The plan without tensors that its sections do not use, for ranks that hold those of ``trained``.

    Raises PartitionError for a tensor that its rank does not hold.
    """
    used = [
        {(v.kind, v.name) for s in sections if plan.placement[s.stage] == rank for v in s.step_inputs}
        for rank in range(plan.ranks)
    ]
    tensors = []
    for rank, (rank_tensors, theirs) in enumerate(zip(plan.tensors, trained.tensors, strict=True)):
        parameters = tuple(n for n in rank_tensors.parameters if (Kind.PARAMETER, n) in used[rank])
        buffers = tuple(n for n in rank_tensors.buffers if (Kind.BUFFER, n) in used[rank])
        missing = {*parameters} - {*theirs.parameters} | {*buffers} - {*theirs.buffers}
        if missing:
            raise PartitionError(
                f"The forward in eval mode needs {min(missing)!r} on rank {rank}, which does not hold it in "
                "training. Compile it by itself, with gradients=False."
            )
        tensors.append(replace(rank_tensors, parameters=parameters, buffers=buffers))
    names = {each for rank_tensors in tensors for name in rank_tensors.names for each in (name, name.tensor)}
    layouts = {name: layout for name, layout in plan.layouts.items() if name in names}
    return replace(plan, tensors=tuple(tensors), layouts=layouts, state=())


def _stage_plans(
    graph: fx.Graph, sections: tuple[Section, ...], placement: tuple[int, ...]
) -> tuple[StagePlan, ...]:
    paths: defaultdict[int, list[str]] = defaultdict(list)
    for node in call_nodes(graph):
        color, path = node.meta["color"], node.meta["origin"].path
        if color.phase is Phase.F and path:
            paths[color.stage].append(path)
    parameters: defaultdict[int, set[str]] = defaultdict(set)
    for section in sections:
        parameters[section.stage].update(v.name for v in section.step_inputs if v.kind is Kind.PARAMETER)
    return tuple(
        StagePlan(stage, rank, modules[0], modules[-1], tuple(sorted(parameters[stage])))
        for stage, rank in enumerate(placement)
        # A stage may be of the model's own ops alone, which are in no module.
        for modules in [paths[stage] or [""]]
    )
