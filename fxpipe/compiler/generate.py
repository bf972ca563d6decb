"""The end of a compilation, for a cut with its schedule: the last passes, the plan and the programs."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import MappingProxyType

from torch import fx

from fxpipe.capture.lengths import LengthTraces
from fxpipe.capture.reads.documents import documents_of
from fxpipe.capture.reads.table_rows import boundaries_of, tables_of
from fxpipe.capture.trace import Captured
from fxpipe.certificate.check import check
from fxpipe.codegen.collectives import collectives
from fxpipe.codegen.program import program_source
from fxpipe.codegen.rank_plan import OnceNodes, RankPlan, Sizes
from fxpipe.codegen.signatures import Result, signatures
from fxpipe.codegen.step.step_plan import StepParts
from fxpipe.compiler.captured import captured_step
from fxpipe.compiler.choice.cut import Cut, finished
from fxpipe.compiler.compilation import Compilation
from fxpipe.compiler.lengths import crossing_sizes
from fxpipe.compiler.make_plan import make_plan
from fxpipe.compiler.progress import Phases
from fxpipe.compiler.step_writer import as_text, instructions, writer
from fxpipe.cost.batch_order import prices_documents
from fxpipe.errors import ArtifactError, ScheduleError, SizeError, VerifyError, number_of
from fxpipe.ir.compiled import is_compiled
from fxpipe.ir.liveness import Liveness
from fxpipe.ir.nodes import copy_graph
from fxpipe.ir.resized import ResizedTraces
from fxpipe.ir.sections import requested_outputs
from fxpipe.ir.size import without_names
from fxpipe.ir.storage import call_nodes, graph_outputs, node_bytes
from fxpipe.plan.artifact import Artifact, OffloadSlot, Plan
from fxpipe.plan.captured import AtLengths, CapturedOps, CapturedStep
from fxpipe.runtime.program.offload import aligned
from fxpipe.schedule.lowering.instructions import Programs
from fxpipe.schedule.lowering.lower import lower
from fxpipe.schedule.offload.memory_pool import Pool
from fxpipe.schedule.offload.memory_pool import pools as make_pools
from fxpipe.schedule.ops import PHASES, Phase, Schedule
from fxpipe.schedule.simulation.timeline import Timeline

#: Problems of the certificate that an error shows.
MOST_SHOWN = 8
NO_LENGTHS: Mapping[str, str] = MappingProxyType({})
NO_SIZES: Mapping[str, Sizes] = MappingProxyType({})


def generate(
    request: Compilation,
    captured: Captured,
    cut: Cut,
    live: Liveness,
    timeline: Timeline,
    completed: Callable[[Plan], Plan],
    phase: Phases,
    lengths: LengthTraces | str = "",
) -> tuple[Cut, Artifact]:
    """The last passes, now that the schedule says which values are offloaded; the plan and the programs.

    completed: the plan with its optional fields.  lengths: the step at those that programs may take, or why
    they take the example's alone.
    """
    schedule, options = timeline.schedule, request.options
    # Before the passes: an error of the schedule needs no program.
    _check_buffer_order(cut.graph, schedule)
    joint = collectives(cut.edges, schedule)
    cut, pools, slots = _finished(cut, live, schedule)
    plan = completed(make_plan(request, captured, cut, timeline, joint))
    if pools:
        plan = replace(plan, tier=options.tier, pools=tuple(pool.bytes for pool in pools), slots=slots)
    lowered = lower(schedule, timeline.costs.edges, joint, timeline.spans)
    write = partial(_programs, cut, schedule, lowered, pools, options.per_use)
    plan, parts, programs, others = _of_lengths(plan, lengths, cut, write)
    steps, write_step = "", None
    if plan.step.lengths:
        steps, write_step = as_text(parts, programs), writer(plan, parts)
    with phase("check"):
        step = _captured_as_data(captured, cut)
        if step is not None and options.check:
            _check_programs(plan, programs, CapturedStep(**vars(step)))
    # At other lengths the programs were checked before.
    text = "" if step is None else CapturedStep(**vars(step), others=others).to_json()
    return cut, Artifact(
        plan, programs, captured.constants, plan.number, captured=text, steps=steps, write_step=write_step
    )


def _check_buffer_order(graph: fx.Graph, schedule: Schedule) -> None:
    """Raise ScheduleError if microbatches would change a buffer out of order."""
    for name, value in graph_outputs(graph).buffers.items():
        stage, phase = value.meta["color"].stage, value.meta["color"].phase
        rank = schedule.placement[stage]
        ops = [op for op in schedule.order[rank] if op.stage == stage and phase in PHASES[op.kind]]
        for before, op in pairwise(ops):
            # The buffer would have what an earlier microbatch had left.
            if op.microbatch < before.microbatch:
                raise ScheduleError(
                    f"The schedule {schedule.name} runs {before} before {op}, and stage {stage} "
                    f"changes the buffer {name!r}: its microbatches must come in their order."
                )


def _finished(
    cut: Cut, live: Liveness, schedule: Schedule
) -> tuple[Cut, tuple[Pool, ...], tuple[OffloadSlot, ...]]:
    """The cut with the offloads of its schedule in the graph, each rank's pool of offloaded values, and what
    is moved there."""
    moved = {(t.stage, t.user) for t in schedule.transfers}
    roots = {(stage, user): live.offloadable[stage][user] for stage, user in sorted(moved)}
    slots = {
        key: OffloadSlot(*key, sum(aligned(node_bytes(root)) for root in values), len(values))
        for key, values in roots.items()
    }
    joined = frozenset() if Phase.B in cut.options.compiled else joined_stages(schedule)
    pools = make_pools(schedule, lambda t: slots[t.stage, t.user].bytes) if moved else ()
    return finished(cut, joined, roots), pools, tuple(slots.values())


def joined_stages(schedule: Schedule) -> frozenset[int]:
    """The stages that run every B and W as one op, and reload nothing for W alone."""
    return schedule.joined - {transfer.stage for transfer in schedule.transfers if transfer.user is Phase.W}


def _of_lengths(
    plan: Plan,
    lengths: LengthTraces | str,
    cut: Cut,
    write: Callable[..., tuple[StepParts, tuple[str, ...]]],
) -> tuple[Plan, StepParts, tuple[str, ...], tuple[AtLengths, ...]]:
    """The programs, for microbatches of many lengths if possible, with their plan, what their steps are
    written from, and the step at other lengths.  Else the plan says why, and the cut's graphs compute in the
    example's lengths from then on."""
    traces = cut.step.lengths
    why = next((each for each in (lengths, traces) if isinstance(each, str)), "")
    if isinstance(lengths, LengthTraces) and isinstance(traces, ResizedTraces):
        crossing = {name for edge in cut.edges for name in edge.names}
        documents = documents_of(cut.graph) if prices_documents(plan) else None
        graphs = [each.graph for each in lengths.captured]
        boundaries = boundaries_of(graphs, lengths.traces.names, lengths.traces.points)
        of_data = replace(plan.step, documents=documents, tables=tables_of(graphs), boundaries=boundaries)
        named = replace(plan, step=replace(of_data, lengths=lengths.lengths, fewer=lengths.fewer))
        try:
            sizes = crossing_sizes(cut.graph, crossing, traces)
            variables = dict(zip(traces.names, (each.name for each in lengths.lengths), strict=True))
            parts, programs = write(named, variables, sizes)
            points = zip(lengths.points[1:], lengths.captured[1:], strict=True)
            others = [_checked_at(named, programs, point, step, cut) for point, step in points]
            if lengths.one_row:
                of_one = zip(lengths.points_of_one_row, lengths.one_row, strict=True)
                with contextlib.suppress(SizeError):  # then they take two rows or more
                    others += [_checked_at(named, programs, point, step, cut) for point, step in of_one]
                    named = replace(named, step=replace(named.step, lengths=lengths.with_one_row))
            return named, parts, programs, tuple(others)
        except SizeError as error:
            why = str(error)
    for graph in _graphs(cut) if why else ():  # else no dimension has a name
        without_names(graph)
    plan = replace(plan, step=replace(plan.step, one_length=why))
    return plan, *write(plan), ()


def _graphs(cut: Cut) -> list[fx.Graph]:
    """The graphs that programs are written from."""
    graphs = {section.graph: None for section in cut.sections}
    inputs = (n.meta.get("input") for graph in [*graphs] for n in graph.find_nodes(op="placeholder"))
    once = {x.computed.graph: None for x in inputs if x is not None and x.computed is not None}
    return [cut.graph, *graphs, *once]


def _checked_at(
    plan: Plan, programs: tuple[str, ...], point: dict[str, int], captured: Captured, cut: Cut
) -> AtLengths:
    """The step at other lengths as data.  Raises SizeError if programs are another one there, whatever the
    option ``check`` says: a pass may have written the example's length as a number."""
    step = _captured_as_data(captured, cut)
    if step is None:
        raise SizeError("the programs cannot be checked against the captured step at other lengths")
    try:
        certificate = check(replace(plan, step=plan.step.at(point)), programs, CapturedStep(**vars(step)))
    except ArtifactError as error:
        raise SizeError(f"the programs cannot be checked at other lengths: {error}") from error
    if not certificate.holds:
        raise SizeError(f"the programs are not the captured step at {point}: {certificate.problems[0]}")
    return AtLengths(point, step)


def _programs(
    cut: Cut,
    schedule: Schedule,
    lowered: Programs,
    pools: tuple[Pool, ...],
    per_use: bool,
    plan: Plan,
    variables: Mapping[str, str] = NO_LENGTHS,
    sizes: Mapping[str, Sizes] = NO_SIZES,
) -> tuple[StepParts, tuple[str, ...]]:
    """What steps are written from, and the programs.

    lowered: the ops and messages of the schedule.  variables: of lengths, with their names.  sizes: of what
    crosses between stages, in these.
    """
    crossing = {name for edge in cut.edges for name in edge.names}
    # For the receives: shape, strides and dtype of each value that crosses.
    fakes = {n.name: n.meta["val"] for n in call_nodes(cut.graph) if n.name in crossing}
    compiled = frozenset(s.color for s in cut.sections if is_compiled(s, cut.options.compiled))
    ranks, placement = range(plan.ranks), plan.placement
    nodes = [OnceNodes.of(s for s in cut.sections if placement[s.stage] == rank) for rank in ranks]
    requested = requested_outputs(cut.graph).items()
    parts = StepParts(
        calls=tuple(signatures(cut.sections).values()),
        edges=cut.edges,
        outputs={name: Result(value.kind, value.name) for name, value in requested},
        before=tuple(each.calls for each in nodes),
        lengths=dict(variables),
        per_use=per_use,
    )
    of_ranks, programs = instructions(plan, parts, schedule, lowered), []
    for rank in ranks:
        stages = ", ".join(
            f"{s.stage} ({s.modules})" if s.modules else f"{s.stage}" for s in plan.stages if s.rank == rank
        )
        title = (
            f"Rank {rank} of {plan.ranks}: {plan.model}, stage {stages}.",
            "",
            f"Schedule {plan.schedule}, {number_of(plan.step.microbatches, 'microbatch')}.",
            *([f"Gradients are accumulated in {plan.grad_dtype}."] if plan.grad_dtype else []),
            *_about_lengths(plan),
        )
        rank_plan = RankPlan(
            rank=rank,
            parts=parts,
            placement=placement,
            instructions=of_ranks[rank],
            joined=plan.ordered.joined,
            places=pools[rank].offsets if pools else {},
            title=title,
            sections=cut.sections,
            nodes=nodes[rank],
            tensors=fakes,
            costs=plan.costs,
            buckets=tuple(
                (bucket, sum(plan.layouts[name].nbytes for name in bucket.gradients))
                for bucket in plan.tensors[rank].exchanged
            ),
            compiled=compiled,
            sizes=sizes,
        )
        programs.append(program_source(rank_plan))
    return parts, tuple(programs)


def _about_lengths(plan: Plan) -> list[str]:
    """What a program says of the lengths of its microbatches."""
    texts = [f"{each.name} = {each.example}" for each in plan.step.lengths]
    return [f"Shapes, costs and bytes in comments are those of {', '.join(texts)}."] if texts else []


def _captured_as_data(captured: Captured, cut: Cut) -> CapturedOps | None:
    """The captured graph as data, with its vocabulary layers split if those of the cut are; None, with a
    warning, where an argument of an op has no form as data."""
    graph, barriers, in_parts = captured.graph, cut.options.barriers, cut.options.head_chunks > 1
    if barriers is not None or in_parts:
        from fxpipe.vocabulary.prepare import prepare_head  # imported here, as few models split a head

        graph = copy_graph(graph)
        prepare_head(graph, in_parts)
    if barriers is not None:
        from fxpipe.vocabulary.split import split_vocabulary

        split_vocabulary(graph, cut.options.ranks, barriers)
    try:
        return captured_step(graph, captured.constants, split=barriers is not None)
    except TypeError as error:
        warnings.warn(f"The programs cannot be checked against the captured step: {error}.", stacklevel=2)
        return None


def _check_programs(plan: Plan, programs: tuple[str, ...], captured: CapturedStep) -> None:
    """Raise VerifyError if the certificate of the programs does not hold; warn where it is not understood."""
    try:
        certificate = check(plan, programs, captured)
    except ArtifactError as error:
        warnings.warn(f"The programs cannot be checked against the captured step: {error}", stacklevel=2)
        return
    if not certificate.holds:
        lines = "\n".join(f"  {problem}" for problem in certificate.problems[:MOST_SHOWN])
        raise VerifyError(
            "The programs are not the captured step. This is an error of fxpipe: please report it, with the "
            "model (check=False compiles without this check). Of a pass of your own the certificate may need "
            "an identity (CONTRIBUTING.md, A pass)."
            f"\n{lines}"
        )
