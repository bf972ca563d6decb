"""The compiler, from top to bottom: a model and an example microbatch in, a program for each rank out.

capture ► (vocabulary ► partition ► passes ► extract) ► choose ► lower ► prove ► offload ► codegen

The phases in brackets are run for every candidate: number of stages, barriers, level of recomputation.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
from torch import fx, nn

from fxpipe.capture.resized import ResizedTraces, named_lengths, sample
from fxpipe.capture.trace import Captured, capture
from fxpipe.choose import Choice, choose
from fxpipe.codegen.collectives import collectives
from fxpipe.codegen.program import RankPlan, program_source
from fxpipe.cost.analytic import work_for_any_size
from fxpipe.cost.device import Device, describe
from fxpipe.cost.profile import measured_bandwidth
from fxpipe.cost.symbolic import PlanWork
from fxpipe.errors import PartitionError, ScheduleError, VocabularyError
from fxpipe.ir.graph import Color, Kind, Phase, Section
from fxpipe.ir.storage import call_nodes, node_bytes, output_dict
from fxpipe.options import AUTO, Options, barriers_tried, levels_tried, stage_counts
from fxpipe.passes.run import Cut, Setting, cut, cut_phases, with_offload
from fxpipe.plan.artifact import FORMAT, Artifact, Attempt, Plan, Prediction, StagePlan
from fxpipe.plan.tensor_ownership import (
    check_names,
    layouts_of,
    tensor_ownership,
    tied_parameters,
    weight_bytes,
)
from fxpipe.progress import Phases
from fxpipe.runtime.batch import BatchSpec
from fxpipe.runtime.offloader import Tier, aligned, default_tier
from fxpipe.runtime.rank import StepSpec
from fxpipe.schedule.deadlock import prove
from fxpipe.schedule.lowering import Exchange, Programs, lower
from fxpipe.schedule.ops import PHASES, order_text
from fxpipe.schedule.pool import Pool, pools
from fxpipe.schedule.simulator import simulate
from fxpipe.version import __version__


@dataclass(frozen=True, eq=False)
class Compiled:
    """The artifact, with the colored graph and the sections that it was made from."""

    artifact: Artifact
    graph: fx.Graph
    sections: tuple[Section, ...]


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Without Python's cyclic garbage collector.  Graphs are many small objects that refer to each other and
    live until the end: repeated scans of them take a sixth of the time and find no garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_collector_paused()
def compile_model(
    model: nn.Module,
    example: Any,
    loss_fn: Callable[..., Any] | None,
    options: Options,
    device: torch.device,
    phase: Phases,
) -> Compiled:
    check_names(model)
    hardware = describe(device)

    def traced(example: Any) -> Captured:
        scale = 1 / options.microbatches
        return capture(model, example, loss_fn, scale, device, options.gradients, options.fixed)

    with phase("capture"):
        lengths = None if options.dimensions is None else named_lengths(example, options.dimensions)
        captured = traced(example)
        resized = None
        if lengths is not None:
            resized = sample(captured.graph, example, lengths, lambda resized: traced(resized).graph)
    cuts = _cuts(captured.graph, resized, options, hardware, phase)
    with phase("schedule"):
        bandwidth = _bandwidth(options, hardware, device)
        choice = choose(options, cuts, hardware, device, partial(_weights, model), 1 / bandwidth)
        _check_buffer_order(choice)
        collectives = _collectives(choice)
        instructions = lower(choice.schedule, choice.costs.edges, collectives)
        prove(instructions, choice.schedule.placement)
        work = None
        if choice.cut.resized is not None:
            work = work_for_any_size(choice.ledger, choice.cut.graph, choice.cut.resized, hardware)
    with phase("codegen"):
        choice, kept = _offloaded(choice)
        plan = _plan(model, example, options, choice, collectives, work, captured.constants)
        if kept:
            plan = replace(plan, tier=_tier(options, device), pools=tuple(pool.bytes for pool in kept))
        programs = _programs(plan, choice, instructions, kept)
    return Compiled(Artifact(plan, programs, captured.constants), choice.cut.graph, choice.cut.sections)


def phases(options: Options) -> int:
    """How many phases ``compile_model`` goes through."""
    ways = product(stage_counts(options), barriers_tried(options))
    return 3 + cut_phases(len(levels_tried(options))) * len(list(ways))


def _cuts(
    captured: fx.Graph, resized: ResizedTraces | None, options: Options, hardware: Device, phase: Phases
) -> list[Cut]:
    """A cut for every candidate: number of stages, barriers, level of recomputation."""
    cuts: list[Cut] = []
    ways = barriers_tried(options)
    for stages in stage_counts(options):
        found: list[list[Cut]] = []  # per way, those of all levels
        for barriers in ways:
            try:
                setting = Setting(stages, options.ranks, hardware, options.split_points, barriers)
                found.append(cut(captured, resized, setting, levels_tried(options), phase))
            except PartitionError:
                if barriers is not None and options.vocab_parallel == AUTO:
                    ways = tuple(way for way in ways if way != barriers)  # nor does it fit more stages
                    continue
                if not (cuts or found):
                    raise
                # More stages than there are places to cut: the fastest of the fewer is found.
                return [*cuts, *_by_level(found)]
            except VocabularyError as error:
                if options.vocab_parallel != AUTO:
                    raise
                ways = tuple(way for way in ways if way != barriers)
                if ways == (None,):
                    warnings.warn(f"vocab_parallel='auto' goes on without: {error}", stacklevel=2)
        cuts += _by_level(found)
    return cuts


def _by_level(found: list[list[Cut]]) -> list[Cut]:
    return [cut for of_level in zip(*found, strict=True) for cut in of_level]


def _check_buffer_order(choice: Choice) -> None:
    """Raise ScheduleError if microbatches would change a buffer out of order."""
    for name, value in output_dict(choice.cut.graph)["buffers"].items():
        stage, phase = value.meta["color"].stage, value.meta["color"].phase
        rank = choice.schedule.placement[stage]
        ops = [op for op in choice.schedule.order[rank] if op.stage == stage and phase in PHASES[op.kind]]
        for before, op in pairwise(ops):
            if op.microbatch < before.microbatch:
                raise ScheduleError(
                    f"The schedule {choice.schedule.name} runs {before} before {op}, and stage {stage} "
                    f"changes the buffer {name!r}: its microbatches must come in their order."
                )


def _weights(model: nn.Module, cut: Cut, placement: tuple[int, ...]) -> tuple[int, ...]:
    return weight_bytes(model, tensor_ownership(model, cut.sections, placement, max(placement) + 1))


def _collectives(choice: Choice) -> tuple[Exchange, ...]:
    vocabulary = choice.cut.vocabulary
    if vocabulary is None:
        return ()
    stages = len(choice.schedule.placement)
    special = frozenset((*range(vocabulary.lookups), *range(stages - vocabulary.heads, stages)))
    return collectives(choice.cut.messages, choice.schedule.placement, special)


def _tier(options: Options, device: torch.device) -> Tier:
    return options.offloading.tier or default_tier(device)


def _bandwidth(options: Options, hardware: Device, device: torch.device) -> float:
    """Bytes a second, one way, to the offload store."""
    if options.offloading.bandwidth is not None:
        return options.offloading.bandwidth
    if options.offload is None or options.costs != "measured":
        return hardware.offload_bandwidth
    return measured_bandwidth(_tier(options, device), options.offload_directory, device)


def _offloaded(choice: Choice) -> tuple[Choice, tuple[Pool, ...]]:
    """The choice with the offloads of its schedule in the graph, and each rank's pool of offloaded values."""
    moved = {(t.stage, t.user) for t in choice.schedule.transfers}
    if not moved:
        return choice, ()
    roots = {(stage, user): choice.ledger.offloadable[stage][user] for stage, user in sorted(moved)}
    sizes = {key: sum(aligned(node_bytes(root)) for root in found) for key, found in roots.items()}
    return replace(choice, cut=with_offload(choice.cut, roots)), pools(choice.schedule, sizes)


def _plan(
    model: nn.Module,
    example: Any,
    options: Options,
    choice: Choice,
    collectives: tuple[Exchange, ...],
    work: PlanWork | None,
    constants: dict[str, torch.Tensor],
) -> Plan:
    graph, schedule = choice.cut.graph, choice.schedule
    named = output_dict(graph)
    placement = schedule.placement
    timeline = simulate(schedule, choice.costs)
    joint = {(a, b) for exchange in collectives for a in exchange.sources for b in exchange.targets}
    channels = {
        (placement[m.source.stage], placement[m.target.stage])
        for m in choice.cut.messages
        if (m.source, m.target) not in joint
    }
    tensors = tensor_ownership(model, choice.cut.sections, placement, options.ranks)
    for tied in tied_parameters(tensors):
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
            batch=BatchSpec.from_example(example),
            loss_rank=placement[named["loss"].meta["color"].stage],
            loss_dtype=str(named["loss"].meta["val"].dtype),
            has_count=named["count"] is not None,
            seed=options.seed,
            default_dtype=str(torch.get_default_dtype()),
        ),
        stages=_stage_plans(graph, choice.cut.sections, placement),
        costs=choice.costs,
        channels=tuple(sorted((a, b) for a, b in channels if a != b)),
        vocabulary=choice.cut.vocabulary,
        collectives=len(collectives),
        tensors=tensors,
        layouts=layouts_of(model, tensors, constants),
        prediction=Prediction(
            timeline.seconds, timeline.span_bubble, timeline.makespan_bubble, timeline.peak_memory
        ),
        work=work,
        tried=_attempts(choice),
        recompute=choice.cut.recompute or "",
        transfers=schedule.transfers,
    )


def _attempts(choice: Choice) -> tuple[Attempt, ...]:
    return tuple(
        Attempt(
            schedule=t.name,
            stages_per_rank=t.setting.stages_per_rank,
            placement=t.setting.placement,
            seconds=t.seconds,
            span_bubble=t.span_bubble,
            peak_memory=t.peak_memory,
            why=t.why,
            barriers=cut.vocabulary.ahead if cut.vocabulary else 0,
            recompute=cut.recompute or "",
            moved=t.moved,
        )
        for t, cut in choice.tried
    )


def _stage_plans(
    graph: fx.Graph, sections: tuple[Section, ...], placement: tuple[int, ...]
) -> tuple[StagePlan, ...]:
    plans = []
    for stage, rank in enumerate(placement):
        paths = [n.meta["origin"].path for n in call_nodes(graph) if n.meta["color"] == Color(stage, Phase.F)]
        paths = [p for p in paths if p] or [""]
        held = {v.name for s in sections if s.stage == stage for v in s.inputs if v.kind is Kind.PARAMETER}
        plans.append(StagePlan(stage, rank, paths[0], paths[-1], tuple(sorted(held))))
    return tuple(plans)


def _programs(plan: Plan, choice: Choice, instructions: Programs, kept: tuple[Pool, ...]) -> tuple[str, ...]:
    graph, sections, passing = choice.cut.graph, choice.cut.sections, choice.cut.messages
    crossing = {name for m in passing for name in m.names}
    fakes = {n.name: n.meta["val"] for n in call_nodes(graph) if n.name in crossing}
    programs = []
    for rank in range(plan.ranks):
        stages = ", ".join(f"{s.stage} ({s.first} … {s.last})" for s in plan.stages if s.rank == rank)
        title = (
            f"Rank {rank} of {plan.ranks}: {plan.model}, stage {stages}.",
            "",
            f"Schedule {plan.schedule}, {plan.step.microbatches} microbatches.",
        )
        programs.append(
            program_source(
                RankPlan(
                    rank=rank,
                    title=title,
                    sections=sections,
                    messages=passing,
                    placement=plan.placement,
                    instructions=instructions[rank],
                    tied=tied_parameters(plan.tensors),
                    has_count=plan.step.has_count,
                    tensors=fakes,
                    places=kept[rank].places if kept else {},
                )
            )
        )
    return tuple(programs)
