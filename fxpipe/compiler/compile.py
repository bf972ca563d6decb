"""The compiler, from top to bottom: a model and an example microbatch in, a program for each rank out.

capture ► (vocabulary ► partition ► passes ► extract) ► choose ► lower ► prove ► offload ► codegen ► check

The phases in brackets are run for every candidate: number of stages, barriers, level of recomputation (a
level only where it may give the fastest step).
"""

from __future__ import annotations

import contextlib
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import torch
from torch import fx, nn

from fxpipe.capture.dtensors import mesh_of
from fxpipe.capture.lanes import capture_lanes, lane_as_text
from fxpipe.capture.resized import named_lengths, sample
from fxpipe.capture.trace import Captured, capture
from fxpipe.capture.underflow import warn_of_float16
from fxpipe.codegen.collectives import collectives
from fxpipe.codegen.program import program_source
from fxpipe.codegen.rank_plan import RankPlan
from fxpipe.codegen.signatures import signatures
from fxpipe.compiler.buckets import bucket_uses
from fxpipe.compiler.certify import captured_as_data, certified
from fxpipe.compiler.choose import Costing, choose, with_uses
from fxpipe.compiler.cut import Cut, Cuts, Stages, finished, split, stages_of
from fxpipe.compiler.cut import cut as cut_at_level
from fxpipe.compiler.make_plan import make_plan, with_tensors_of
from fxpipe.compiler.options import Candidates, Offload, Options, candidates, check_lanes
from fxpipe.compiler.passes import CutOptions, Step
from fxpipe.compiler.progress import Phases
from fxpipe.compiler.tensor_ownership import check_names, check_state_of_replicas, tied_gradients
from fxpipe.cost.analytic import seconds_on, section_costs, work_for_any_size
from fxpipe.cost.cluster import Cluster, of_stages
from fxpipe.cost.describe import describe
from fxpipe.cost.device import Device
from fxpipe.cost.known_devices import device_named
from fxpipe.cost.profile import known_tensors, measured_bandwidth
from fxpipe.errors import PartitionError, ScheduleError, VocabularyError
from fxpipe.garbage import collector_paused
from fxpipe.ir.casts import parameter_of
from fxpipe.ir.graph import Kind, Section
from fxpipe.ir.liveness import Liveness, liveness
from fxpipe.ir.resized import ResizedTraces
from fxpipe.ir.sections import compiles, is_compiled, requested_outputs
from fxpipe.ir.storage import call_nodes, graph_outputs, node_bytes
from fxpipe.plan.artifact import Artifact, Plan
from fxpipe.plan.meshes import Mesh, TriedMesh
from fxpipe.runtime.program.offload import aligned
from fxpipe.schedule.costs import Costs
from fxpipe.schedule.lowering.deadlock import prove
from fxpipe.schedule.lowering.instructions import Collective, Programs
from fxpipe.schedule.lowering.lower import lower, with_gradients
from fxpipe.schedule.lowering.validation import with_validation
from fxpipe.schedule.offload.memory_pool import Pool
from fxpipe.schedule.offload.memory_pool import pools as make_pools
from fxpipe.schedule.ops import PHASES, OpKind, Phase, Schedule
from fxpipe.schedule.placement import PLACEMENTS, place
from fxpipe.schedule.search.build import build
from fxpipe.schedule.search.fastest import AUTO
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.schedule.simulation.timeline import Timeline


@dataclass(frozen=True, eq=False)
class Compiled:
    """The artifact, with the colored graph and the sections that it was made from, and the devices that its
    costs are of."""

    artifact: Artifact
    cluster: Cluster
    graph: fx.Graph
    sections: tuple[Section, ...]


@dataclass(frozen=True, eq=False)
class CapturedStep:
    """One graph of the training step, and its traces at other sizes, if its dimensions have names."""

    captured: Captured
    resized: ResizedTraces | None


def capture_step(
    model: nn.Module,
    example: Any,
    loss_fn: Callable[..., Any] | None,
    options: Options,
    device: torch.device,
    phase: Phases,
) -> CapturedStep:
    """The step for any number of ranks and replicas; the gradient of its loss is 1 / microbatches."""
    check_names(model)

    def traced(example: Any) -> Captured:
        return _traced(model, example, loss_fn, options, device)

    phase.expect(1)
    with phase("capture"):
        lengths = None if options.dimensions is None else named_lengths(example, options.dimensions)
        captured = capture_lanes(model, lambda: traced(example))
        check_lanes(options, captured.lanes)
        warn_of_float16(captured.graph)
        resized = None
        if lengths is not None:
            resized = sample(captured.graph, example, lengths, lambda resized: traced(resized).graph)
    return CapturedStep(captured, resized)


@collector_paused()
def compile_model(
    model: nn.Module,
    example: Any,
    loss_fn: Callable[..., Any] | None,
    options: Options,
    device: torch.device,
    phase: Phases,
    devices: Sequence[Device] = (),
    step: CapturedStep | None = None,
    meshes: tuple[TriedMesh, ...] = (),
) -> Compiled:
    """devices: of the ranks, if they differ and the user names none.  step: if it is captured already.
    meshes: those that were compared.
    """
    tried = candidates(options)
    ways = len(tried.barriers)
    phase.expect(2 + ways + 4 * len(tried.placements) * ways)
    step = step or capture_step(model, example, loss_fn, options, device, phase)
    captured, resized = step.captured, step.resized
    if options.replicas > 1:
        check_state_of_replicas(model, captured.graph)

    cluster = cluster_of(options, device, devices, captured.graph)
    # Cut into stages, once for each number of them and of barriers (compiler/passes.py has all rewrites).
    cuts = Cuts()
    stages = all_stages(Step(captured.graph, resized), tried, options, cluster, cuts, phase)
    phase.expect(3 + 2 * len(stages))

    with phase("schedule"):
        # Rewritten and extracted with each level of recomputation that may be the fastest; the candidate and
        # the schedule with the shortest simulated step.
        known = known_tensors(model, example, captured.constants)
        bandwidth = offload_bandwidth(options, cluster, device)
        costing = Costing(options, tried, cuts, model, cluster, device, known, bandwidth, phase)
        options, chosen = with_uses(options, lambda own: choose(own, stages, costing))
        cut, live, found = chosen.placed.cut, chosen.placed.live, chosen.found
        work = None
        if cut.resized is not None:
            work = work_for_any_size(live, cut.graph, cut.resized, cluster, found.schedule.placement)

    def completed(plan: Plan) -> Plan:
        measured = ", sections measured" if options.costs == "measured" else ""
        own = Mesh(options.ranks, options.replicas, options.microbatches, options.shard or "")
        now = TriedMesh(
            own,
            found.seconds,
            chosen.memory,
            found.schedule.name,
            found.problem.stages_per_rank,
            cut.recompute or "",
        )
        compared = tuple(now if each.mesh == own else each for each in meshes)
        device = cluster.name + measured
        plan = replace(plan, work=work, tried=found.tried, meshes=compared, device=device)
        if options.memory_limit is None:
            return plan
        return replace(plan, memory_limit=options.limit_text, limits=found.problem.limits)

    with phase("codegen"):
        cut, artifact = _generate(
            model, example, captured, options, cut, live, found.timeline, completed, phase
        )
    return Compiled(artifact, cluster, cut.graph, cut.sections)


def _traced(
    model: nn.Module, example: Any, loss_fn: Callable[..., Any] | None, options: Options, device: torch.device
) -> Captured:
    scale = 1 / options.microbatches
    return capture(model, example, loss_fn, scale, device, options.gradients, options.fixed, options.outputs)


@collector_paused()
def last_lane_as_text(
    model: nn.Module, example: Any, loss_fn: Callable[..., Any] | None, options: Options, device: torch.device
) -> str:
    """What the last lane runs of a model with DTensors, on this process."""
    number = mesh_of(model).size()
    return lane_as_text(model, lambda: _traced(model, example, loss_fn, options, device), number - 1)


@collector_paused()
def compile_evaluation(
    model: nn.Module,
    example: Any,
    loss_fn: Callable[..., Any] | None,
    options: Options,
    device: torch.device,
    phase: Phases,
    trained: Compiled,
) -> Artifact:
    """The forward in eval mode for the ranks of a training pipeline: each tensor is used where that has it.

    Raises PartitionError where the forward cannot be cut as the training step was.
    """
    cluster, plan = trained.cluster, trained.artifact.plan
    options = replace(
        options,
        gradients=False,
        grad_dtype=None,
        shard=None,
        offload=Offload(share=None),
        recompute=False,
        validation="barrier",
    )
    own = _model_stages(plan.ordered)
    asked = CutOptions(
        len(own),
        options.ranks,
        cluster.node_seconds(),
        None,
        plan.vocabulary.barriers if plan.vocabulary is not None else None,
        held=[_tensors_of(stage, trained.sections) for stage in own],
        backend=options.backend,
        print_after=options.print_after,
    )
    phase.expect(6)
    with phase("evaluation"), _in_eval_mode(model):
        scale = 1 / options.microbatches
        kept = {name for held in plan.tensors for name in held.buffers}
        captured = capture_lanes(
            model,
            lambda: capture(
                model, example, loss_fn, scale, device, False, options.fixed, options.outputs, kept
            ),
        )
    cut = cut_at_level(stages_of(split(Step(captured.graph, None), asked), asked, phase), None, phase)
    live = liveness(cut.graph, cut.sections, cut.edges, plan.placement)
    seconds = seconds_on(cluster, cut.graph)
    costs = section_costs(live, seconds, cluster, plan.placement, options.ranks_per_machine)
    timelines = [simulate(schedule, costs) for schedule in _forward_schedules(plan.ordered, costs)]
    timeline = min(timelines, key=lambda found: found.seconds)

    def of_training(made: Plan) -> Plan:
        made = replace(made, model=f"{made.model}, evaluation", device=cluster.name)
        return with_tensors_of(made, cut.sections, plan)

    return _generate(model, example, captured, options, cut, live, timeline, of_training, phase)[1]


def _generate(
    model: nn.Module,
    example: Any,
    captured: Captured,
    options: Options,
    cut: Cut,
    live: Liveness,
    timeline: Timeline,
    completed: Callable[[Plan], Plan],
    phase: Phases,
) -> tuple[Cut, Artifact]:
    """The last passes, now that the schedule says which values are offloaded; the plan and the programs.

    completed: the plan with its optional fields.
    """
    schedule = timeline.schedule
    _check_buffer_order(cut.graph, schedule)
    joint = _collectives(cut, schedule)
    cut, pools = _finished(cut, live, schedule)
    plan = completed(make_plan(model, example, captured, options, cut, timeline, joint))
    if pools:
        plan = replace(plan, tier=options.tier, pools=tuple(pool.bytes for pool in pools))
    # The instructions of all ranks, proved to end.
    instructions = lower(schedule, timeline.costs.edges, joint, timeline.spans)
    divides = plan.step.has_count and options.gradients
    buckets = bucket_uses(plan, cut.sections, schedule, per_use=options.per_use)
    instructions = with_gradients(instructions, buckets, tied_gradients(plan.tensors), divides)
    if any(held.gradients for held in plan.tensors):
        instructions = with_validation(instructions, schedule.placement)
    prove(instructions, schedule.placement)
    programs = _programs(plan, cut, instructions, pools)
    with phase("check"):
        step = captured_as_data(captured.graph, cut)
        if step is not None and options.check:
            certified(plan, programs, step)
    text = "" if step is None else step.to_json()
    return cut, Artifact(plan, programs, captured.constants, plan.number, captured=text)


def _forward_schedules(trained: Schedule, costs: Costs) -> Iterator[Schedule]:
    """Schedules for a step without a backward: the training step's, and all microbatches stage by stage."""
    yield replace(trained, transfers=())
    own = tuple(trained.placement[stage] for stage in _model_stages(trained))
    chunks = len(own) // trained.ranks
    for name in PLACEMENTS:
        if place(name, trained.ranks, chunks) == own:
            yield build(
                "gpipe",
                ranks=trained.ranks,
                microbatches=trained.microbatches,
                costs=costs,
                stages_per_rank=chunks,
                placement=name,
                vocabulary=trained.vocabulary,
            )
            return


def _model_stages(schedule: Schedule) -> list[int]:
    return [stage for stage in range(schedule.stages) if not schedule.is_vocabulary(stage)]


def _tensors_of(stage: int, sections: Sequence[Section]) -> frozenset[str]:
    """The parameters and buffers of a stage."""
    values = [v for s in sections if s.stage == stage for v in (*s.inputs, *s.outputs)]
    buffers = {v.name for v in values if v.kind is Kind.BUFFER}
    return frozenset(buffers | {name for v in values if (name := parameter_of(v))})


@contextlib.contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def cluster_of(options: Options, device: torch.device, devices: Sequence[Device], graph: fx.Graph) -> Cluster:
    """The devices that the costs are of."""
    if isinstance(options.costs, tuple):
        return Cluster(tuple(map(device_named, options.costs)))
    if devices and options.costs == "analytic":
        return Cluster(tuple(devices))
    return Cluster((describe(options.costs, device, graph),) * options.ranks)


def all_stages(
    captured: Step, tried: Candidates, options: Options, cluster: Cluster, made: Cuts, phase: Phases
) -> list[Stages]:
    """The step cut into stages, for each number of them and of barriers, and where ranks have different
    devices for each placement.

    made: the cuts of the step so far.
    """
    cuts: list[Stages] = []
    ways = tried.barriers
    measured = options.costs == "measured"
    slowness = cluster.slowness(captured.graph)
    steps: dict[int | None, Step] = {}  # for any number of stages
    for stages, placements in tried.placements.items():
        found: list[Stages] = []
        alike: defaultdict[tuple[float, ...], list[str]] = defaultdict(list)
        for name, placement in placements.items():
            alike[of_stages(slowness, placement)].append(name)
        for barriers, (own, names) in product(ways, alike.items()):
            if barriers not in ways:
                continue  # it did not fit other placements either
            asked = CutOptions(
                stages,
                options.ranks,
                cluster.node_seconds(),
                options.split_points,
                barriers,
                measured,
                slowness=own,
                placements=tuple(names),
                grad_dtype=options.grad_dtype,
                backend=options.backend,
                print_after=options.print_after,
            )
            try:
                if barriers not in steps:
                    with phase("vocabulary"):
                        steps[barriers] = made.split(captured, asked)
                found.append(made.stages_of(steps[barriers], asked, phase))
            except PartitionError:
                if barriers is not None and options.vocab_parallel == AUTO:
                    ways = tuple(way for way in ways if way != barriers)  # nor does it fit more stages
                    continue
                if not (cuts or found):
                    raise
                # More stages than there are places to cut: the fastest of the fewer is found.
                return [*cuts, *found]
            except VocabularyError as error:
                if options.vocab_parallel != AUTO:
                    raise
                ways = tuple(way for way in ways if way != barriers)
                if ways == (None,):
                    warnings.warn(f"vocab_parallel='auto' goes on without: {error}", stacklevel=2)
        cuts += found
    return cuts


def _check_buffer_order(graph: fx.Graph, schedule: Schedule) -> None:
    """Raise ScheduleError if microbatches would change a buffer out of order."""
    for name, value in graph_outputs(graph).buffers.items():
        stage, phase = value.meta["color"].stage, value.meta["color"].phase
        rank = schedule.placement[stage]
        ops = [op for op in schedule.order[rank] if op.stage == stage and phase in PHASES[op.kind]]
        for before, op in pairwise(ops):
            if op.microbatch < before.microbatch:
                raise ScheduleError(
                    f"The schedule {schedule.name} runs {before} before {op}, and stage {stage} "
                    f"changes the buffer {name!r}: its microbatches must come in their order."
                )


def _collectives(cut: Cut, schedule: Schedule) -> tuple[Collective, ...]:
    if cut.vocabulary is None:
        return ()
    shards = frozenset(stage for stage in range(schedule.stages) if schedule.is_vocabulary(stage))
    return collectives(cut.edges, schedule.placement, shards)


def offload_bandwidth(options: Options, cluster: Cluster, device: torch.device) -> float:
    """Bytes a second, one way, to the offload store."""
    offload = options.offload
    if offload.bandwidth is not None:
        return offload.bandwidth
    if offload.share is None or options.costs != "measured":
        return cluster.offload_bandwidth
    return measured_bandwidth(options.tier, options.offload_directory, device)


def _finished(cut: Cut, live: Liveness, schedule: Schedule) -> tuple[Cut, tuple[Pool, ...]]:
    """The cut with the offloads of its schedule in the graph, and each rank's pool of offloaded values."""
    moved = {(t.stage, t.user) for t in schedule.transfers}
    roots = {(stage, user): live.offloadable[stage][user] for stage, user in sorted(moved)}
    sizes = {key: sum(aligned(node_bytes(root)) for root in found) for key, found in roots.items()}
    joined = frozenset() if compiles(cut.options.backend, Phase.B) else joined_stages(schedule)
    return finished(cut, joined, roots), make_pools(schedule, sizes) if moved else ()


def joined_stages(schedule: Schedule) -> frozenset[int]:
    """The stages that run every B and W as one op, and reload nothing for W alone."""
    apart = {op.stage for ops in schedule.order for op in ops if op.kind in (OpKind.B, OpKind.W)}
    apart |= {transfer.stage for transfer in schedule.transfers if transfer.user is Phase.W}
    return frozenset(range(schedule.stages)) - apart


def _programs(plan: Plan, cut: Cut, instructions: Programs, pools: tuple[Pool, ...]) -> tuple[str, ...]:
    crossing = {name for edge in cut.edges for name in edge.names}
    fakes = {n.name: n.meta["val"] for n in call_nodes(cut.graph) if n.name in crossing}
    compiled = frozenset(s.color for s in cut.sections if is_compiled(s, cut.options.backend))
    calls, programs = signatures(cut.sections), []
    for rank in range(plan.ranks):
        stages = ", ".join(f"{s.stage} ({s.first} … {s.last})" for s in plan.stages if s.rank == rank)
        title = (
            f"Rank {rank} of {plan.ranks}: {plan.model}, stage {stages}.",
            "",
            f"Schedule {plan.schedule}, {plan.step.microbatches} microbatches.",
            *([f"Gradients are accumulated in {plan.grad_dtype}."] if plan.grad_dtype else []),
        )
        programs.append(
            program_source(
                RankPlan(
                    rank=rank,
                    title=title,
                    sections=cut.sections,
                    calls=calls,
                    edges=cut.edges,
                    placement=plan.placement,
                    instructions=instructions[rank],
                    outputs=requested_outputs(cut.graph),
                    tensors=fakes,
                    places=pools[rank].offsets if pools else {},
                    costs=plan.costs,
                    compiled=compiled,
                )
            )
        )
    return tuple(programs)
