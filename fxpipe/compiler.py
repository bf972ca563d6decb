"""The compiler, from top to bottom: a model and an example microbatch in, a program for each rank out.

capture ──► partition ──► passes ──► extract ──► schedule ──► codegen
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from fxpipe.artefact import FORMAT, Artefact, Plan, Prediction, RankTensors, StagePlan
from fxpipe.capture.trace import capture
from fxpipe.codegen.program import RankPlan, Tied, program_source
from fxpipe.costing import analytic_costs
from fxpipe.errors import ScheduleError
from fxpipe.graph import Colour, Kind, Phase, Section
from fxpipe.measure import measured_costs
from fxpipe.partition.device import describe
from fxpipe.partition.stages import partition
from fxpipe.passes.run import run_passes
from fxpipe.progress import Phases
from fxpipe.runtime.batch import BatchSpec
from fxpipe.runtime.rank import StepSpec
from fxpipe.schedule.costs import Costs
from fxpipe.schedule.deadlock import prove
from fxpipe.schedule.families import FAMILIES, build
from fxpipe.schedule.lowering import Programs, lower
from fxpipe.schedule.ops import Schedule, order_text
from fxpipe.schedule.placement import place
from fxpipe.schedule.simulator import simulate
from fxpipe.sections import Message, extract, messages
from fxpipe.values import call_nodes, output_dict
from fxpipe.version import __version__

AUTO = "auto"
#: How many phases ``compile_model`` goes through.
PHASES = 6


@dataclass(frozen=True)
class Options:
    """What the user asked for; see ``fxpipe.compile``."""

    ranks: int
    microbatches: int
    schedule: str
    stages_per_rank: int
    placement: str
    split_points: tuple[str, ...] | None
    costs: str
    seed: int


@dataclass(frozen=True, eq=False)
class Compiled:
    """The artefact, and what it was made from: the coloured graph and its sections."""

    artefact: Artefact
    graph: fx.Graph
    sections: tuple[Section, ...]


def compile_model(
    model: nn.Module,
    example: Any,
    loss_fn: Callable[..., Any] | None,
    options: Options,
    device: torch.device,
    phase: Phases,
) -> Compiled:
    check(options)
    hardware = describe(device)
    stages = options.ranks * options.stages_per_rank

    with phase("capture"):
        captured = capture(model, example, loss_fn, 1 / options.microbatches, device)
        graph = captured.graph
    with phase("partition"):
        partition(graph, stages, hardware, options.split_points)
    with phase("passes"):
        run_passes(graph, hardware)
    with phase("extract"):
        sections = extract(graph)
        passing = messages(sections)
    with phase("schedule"):
        homes = place(options.placement, options.ranks, options.stages_per_rank)
        costs = analytic_costs(graph, sections, passing, homes, hardware)
        if options.costs == "measured":
            costs = measured_costs(sections, costs, device)
        schedule = _schedule(options, costs)
        instructions = lower(schedule, costs.edges)
        prove(instructions, schedule.placement)
    with phase("codegen"):
        plan = _plan(model, example, options, graph, sections, passing, schedule, costs)
        programs = _programs(plan, graph, sections, passing, schedule, instructions)
    return Compiled(Artefact(plan, programs, captured.constants), graph, sections)


def _schedule(options: Options, costs: Costs) -> Schedule:
    """The named schedule; for ``auto`` the one whose simulated step is the shortest."""
    names = FAMILIES if options.schedule == AUTO else [options.schedule]
    candidates = [
        build(
            name,
            ranks=options.ranks,
            microbatches=options.microbatches,
            costs=costs,
            stages_per_rank=options.stages_per_rank,
            placement=options.placement,
        )
        for name in names
    ]
    return min(candidates, key=lambda schedule: simulate(schedule, costs).seconds)


def check(options: Options) -> None:
    """Raise for what can be known to be wrong before anything is traced."""
    if options.schedule not in (AUTO, *FAMILIES):
        raise ScheduleError(f"Unknown schedule {options.schedule!r}. Known: {AUTO}, {', '.join(FAMILIES)}.")
    for name in ("ranks", "microbatches", "stages_per_rank"):
        value = getattr(options, name)
        if not isinstance(value, int) or value < 1:
            raise ScheduleError(f"{name} is {value!r} and must be a whole number, at least 1.")
    if options.costs not in ("analytic", "measured"):
        raise ScheduleError(f"costs is {options.costs!r} and must be 'analytic' or 'measured'.")
    place(options.placement, options.ranks, options.stages_per_rank)


def _plan(
    model: nn.Module,
    example: Any,
    options: Options,
    graph: fx.Graph,
    sections: tuple[Section, ...],
    passing: tuple[Message, ...],
    schedule: Schedule,
    costs: Costs,
) -> Plan:
    named = output_dict(graph)
    placement = schedule.placement
    timeline = simulate(schedule, costs)
    channels = {(placement[m.source.stage], placement[m.target.stage]) for m in passing}
    tensors = _tensors(model, sections, placement, options.ranks)
    for tied in _tied(tensors):
        channels |= {(a, b) for r in tied.ranks[1:] for a, b in ((r, tied.ranks[0]), (tied.ranks[0], r))}
    return Plan(
        format=FORMAT,
        version=__version__,
        model=type(model).__name__,
        schedule=schedule.name,
        placement=placement,
        order=tuple(order_text(schedule.order).splitlines()),
        step=StepSpec(
            ranks=options.ranks,
            microbatches=options.microbatches,
            batch=BatchSpec.of(example),
            loss_rank=placement[named["loss"].meta["colour"].stage],
            loss_dtype=str(named["loss"].meta["val"].dtype),
            has_count=named["count"] is not None,
            seed=options.seed,
        ),
        stages=_stage_plans(graph, sections, placement),
        costs=costs,
        channels=tuple(sorted((a, b) for a, b in channels if a != b)),
        tensors=tensors,
        shapes={n: tuple(t.shape) for n, t in (*model.named_parameters(), *model.named_buffers())},
        prediction=Prediction(
            timeline.seconds, timeline.span_bubble, timeline.makespan_bubble, timeline.peak_memory
        ),
    )


def _stage_plans(
    graph: fx.Graph, sections: tuple[Section, ...], placement: tuple[int, ...]
) -> tuple[StagePlan, ...]:
    plans = []
    for stage, rank in enumerate(placement):
        paths = [
            n.meta["origin"].path for n in call_nodes(graph) if n.meta["colour"] == Colour(stage, Phase.F)
        ]
        paths = [p for p in paths if p] or [""]
        held = {v.name for s in sections if s.stage == stage for v in s.inputs if v.kind is Kind.PARAMETER}
        plans.append(StagePlan(stage, rank, paths[0], paths[-1], tuple(sorted(held))))
    return tuple(plans)


def _tensors(
    model: nn.Module, sections: tuple[Section, ...], placement: tuple[int, ...], ranks: int
) -> tuple[RankTensors, ...]:
    """What each rank holds; what no section uses is kept by rank 0, so that nothing is lost in a save."""
    used: list[dict[Kind, set[str]]] = [{k: set() for k in Kind} for _ in range(ranks)]
    for section in sections:
        for value in (*section.inputs, *section.outputs):
            used[placement[section.stage]][value.kind].add(value.name)
    spare_parameters = {n for n, _ in model.named_parameters()} - set().union(
        *(u[Kind.PARAMETER] | u[Kind.GRADIENT] for u in used)
    )
    spare_buffers = {n for n, _ in model.named_buffers()} - set().union(*(u[Kind.BUFFER] for u in used))
    used[0][Kind.PARAMETER] |= spare_parameters
    used[0][Kind.BUFFER] |= spare_buffers
    accumulated = set().union(*(u[Kind.GRADIENT] for u in used))
    plans = []
    for u in used:
        parameters = u[Kind.PARAMETER] | u[Kind.GRADIENT]
        plans.append(
            RankTensors(
                parameters=tuple(sorted(parameters)),
                buffers=tuple(sorted(u[Kind.BUFFER])),
                constants=tuple(sorted(u[Kind.CONSTANT])),
                gradients=tuple(sorted(parameters & accumulated)),
            )
        )
    return tuple(plans)


def _tied(tensors: tuple[RankTensors, ...]) -> tuple[Tied, ...]:
    holders: dict[str, list[int]] = {}
    for rank, held in enumerate(tensors):
        for name in held.gradients:
            holders.setdefault(name, []).append(rank)
    return tuple(Tied(name, tuple(ranks)) for name, ranks in holders.items() if len(ranks) > 1)


def _programs(
    plan: Plan,
    graph: fx.Graph,
    sections: tuple[Section, ...],
    passing: tuple[Message, ...],
    schedule: Schedule,
    instructions: Programs,
) -> tuple[str, ...]:
    crossing = {name for m in passing for name in m.names}
    fakes = {n.name: n.meta["val"] for n in call_nodes(graph) if n.name in crossing}
    programs = []
    for rank in range(plan.ranks):
        stages = ", ".join(f"{s.stage} ({s.first} … {s.last})" for s in plan.stages if s.rank == rank)
        title = (
            f"Rank {rank} of {plan.ranks}: {plan.model}, stage {stages}.\n\n"
            f"Schedule {plan.schedule}, {plan.step.microbatches} microbatches."
        )
        programs.append(
            program_source(
                RankPlan(
                    rank=rank,
                    title=title,
                    sections=sections,
                    messages=passing,
                    placement=schedule.placement,
                    instructions=instructions[rank],
                    tied=_tied(plan.tensors),
                    has_count=plan.step.has_count,
                    tensors=fakes,
                )
            )
        )
    return tuple(programs)
