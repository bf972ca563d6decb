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
from fxpipe.errors import PartitionError, ScheduleError, VocabularyError
from fxpipe.ir.graph import Section
from fxpipe.ir.storage import call_nodes, node_bytes, output_dict
from fxpipe.options import AUTO, Options, barriers_tried, levels_tried, stage_counts
from fxpipe.passes.run import Cut, Setting, cut_phases, with_offload
from fxpipe.passes.run import cut as cut_into_stages
from fxpipe.plan.artifact import Artifact, Attempt, Plan
from fxpipe.plan.make_plan import make_plan
from fxpipe.plan.tensor_ownership import (
    check_names,
    tensor_ownership,
    tied_parameters,
    weight_bytes,
)
from fxpipe.progress import Phases
from fxpipe.runtime.offloader import Tier, aligned, default_tier
from fxpipe.schedule.lowering.deadlock import prove
from fxpipe.schedule.lowering.lower import Collective, Programs, lower
from fxpipe.schedule.offload.memory_pool import Pool
from fxpipe.schedule.offload.memory_pool import pools as make_pools
from fxpipe.schedule.ops import PHASES


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

    # One graph of the training step, and its traces at other sizes.
    with phase("capture"):
        lengths = None if options.dimensions is None else named_lengths(example, options.dimensions)
        captured = traced(example)
        resized = None
        if lengths is not None:
            resized = sample(captured.graph, example, lengths, lambda resized: traced(resized).graph)

    # Partitioned, rewritten (passes/run.py) and extracted, once for each candidate.
    cuts = _cuts(captured.graph, resized, options, hardware, phase)

    with phase("schedule"):
        # The candidate and the schedule with the shortest simulated step.
        bandwidth = _bandwidth(options, hardware, device)
        choice = choose(options, cuts, hardware, device, partial(_weights, model), 1 / bandwidth)
        _check_buffer_order(choice)
        # Its messages, proved to end.
        exchanged = _collectives(choice)
        instructions = lower(choice.schedule, choice.costs.edges, exchanged)
        prove(instructions, choice.schedule.placement)
        work = None
        if choice.cut.resized is not None:
            work = work_for_any_size(choice.ledger, choice.cut.graph, choice.cut.resized, hardware)

    with phase("codegen"):
        # The last pass, now that the schedule says which values are offloaded.
        cut, pools = _offloaded(choice)
        plan = make_plan(
            model, example, captured.constants, options, cut, choice.schedule, choice.costs, exchanged
        )
        plan = replace(plan, work=work, tried=_attempts(choice))
        if pools:
            plan = replace(plan, tier=_tier(options, device), pools=tuple(pool.bytes for pool in pools))
        programs = _programs(plan, cut, instructions, pools)
    return Compiled(Artifact(plan, programs, captured.constants), cut.graph, cut.sections)


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
                found.append(cut_into_stages(captured, resized, setting, levels_tried(options), phase))
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


def _collectives(choice: Choice) -> tuple[Collective, ...]:
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


def _offloaded(choice: Choice) -> tuple[Cut, tuple[Pool, ...]]:
    """The cut with the offloads of its schedule in the graph, and each rank's pool of offloaded values."""
    moved = {(t.stage, t.user) for t in choice.schedule.transfers}
    if not moved:
        return choice.cut, ()
    roots = {(stage, user): choice.ledger.offloadable[stage][user] for stage, user in sorted(moved)}
    sizes = {key: sum(aligned(node_bytes(root)) for root in found) for key, found in roots.items()}
    return with_offload(choice.cut, roots), make_pools(choice.schedule, sizes)


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


def _programs(plan: Plan, cut: Cut, instructions: Programs, pools: tuple[Pool, ...]) -> tuple[str, ...]:
    crossing = {name for m in cut.messages for name in m.names}
    fakes = {n.name: n.meta["val"] for n in call_nodes(cut.graph) if n.name in crossing}
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
                    sections=cut.sections,
                    messages=cut.messages,
                    placement=plan.placement,
                    instructions=instructions[rank],
                    tied=tied_parameters(plan.tensors),
                    has_count=plan.step.has_count,
                    tensors=fakes,
                    places=pools[rank].places if pools else {},
                )
            )
        )
    return tuple(programs)
