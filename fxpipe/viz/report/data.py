"""All that a report shows, as plain data: one entry for each part of the page.

The page computes nothing that is here; what is not known it says, by ``unknown``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import prod
from statistics import median
from typing import Any

from fxpipe.plan.artifact import Plan
from fxpipe.plan.memory import rank_memory
from fxpipe.plan.version import __version__
from fxpipe.schedule.ops import Direction, OpKind
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.schedule.simulation.steps import simulate_steps
from fxpipe.schedule.simulation.timeline import Span, Timeline
from fxpipe.schedule.units import is_decimal, units_of
from fxpipe.strict import unstructure
from fxpipe.viz.gap import gap_texts
from fxpipe.viz.memory_kinds import changes, standing
from fxpipe.viz.report.columns import (
    CAUSES,
    HELD,
    KINDS,
    Ticks,
    change_columns,
    exchange_rows,
    op_columns,
    passed_rows,
    transfer_rows,
    update_rows,
)
from fxpipe.viz.report.graph_record import GraphRecord
from fxpipe.viz.report.misfits import beyond_limit
from fxpipe.viz.report.program_lines import places
from fxpipe.viz.seam_marks import many_steps
from fxpipe.viz.summary import throughput_text
from fxpipe.viz.waits import measured_waits, passed, waits

Measured = Sequence[Sequence[Span]] | None
"""The spans of a recorded step on one clock; None where no step was recorded."""


def report_data(
    plan: Plan,
    programs: Sequence[str],
    graph: GraphRecord | None,
    measured: Measured = None,
    lengths: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """The report's data as JSON.  programs: of each rank, empty where it is not known.  graph: None for a
    pipeline that was saved by an earlier version.  lengths: steps of samples, as ``cli.ways`` has them."""
    timeline = simulate(plan.ordered, plan.costs)
    updates = simulate_steps(plan.ordered, plan.costs, plan.validation, 1).steps[0].updates
    ends = (update.end - timeline.begin for update in updates if update.end > update.start)
    # Both timelines in one scale, so that they can be laid one over the other.
    longest = max(timeline.seconds, _makespan(measured), *ends)
    ticks = Ticks(timeline.begin, longest)
    return {
        "head": _head(plan, timeline),
        "names": {
            "kinds": [str(kind) for kind in KINDS],
            "causes": [str(cause) for cause in CAUSES],
            "held": [str(memory) for memory in HELD],
        },
        "tick": ticks.seconds,
        "predicted": _predicted(timeline, ticks) | {"updates": update_rows(updates, ticks)},
        "measured": None if measured is None else _measured(timeline, measured, longest),
        "differences": [] if measured is None else _differences(timeline, measured),
        "memory": _memory(plan, timeline, ticks),
        "stages": _stages(plan, timeline, graph),
        "edges": _edges(plan, graph),
        "links": _links(timeline),
        "candidates": _candidates(plan),
        "lengths": lengths,
        "programs": [
            {name: asdict(place) for name, place in places(program).items()} for program in programs
        ],
        "graph": None if graph is None else _graph(graph),
        "unknown": _unknown(plan, programs, graph, measured),
    }


def _candidates(plan: Plan) -> list[dict[str, object]]:
    """List them with ``beyond``: what one that the limit left out would take without it, where known."""
    beyond = beyond_limit(plan)
    return [
        unstructure(tried) | {"beyond": asdict(beyond[k]) if k in beyond else None}
        for k, tried in enumerate(plan.tried)
    ]


def _makespan(measured: Measured) -> float:
    return max((row[-1].end for row in measured or () if row), default=0.0)


def _head(plan: Plan, timeline: Timeline) -> dict[str, object]:
    units, limits = units_of(plan.memory_limit), plan.limits if len(plan.limits) == plan.ranks else None
    memory = rank_memory(plan, timeline.peak_memory)
    return {
        "model": plan.model,
        "schedule": plan.schedule,
        "ranks": plan.ranks,
        "stages": len(plan.stages),
        "microbatches": plan.step.microbatches,
        "placement": list(plan.placement),
        "vocabulary": [s for s in range(len(plan.placement)) if timeline.schedule.is_vocabulary(s)],
        "device": plan.device,
        "recompute": plan.recompute,
        "tier": plan.tier or "",
        "replicas": plan.replicas,
        "shard": plan.shard,
        "lanes": plan.lanes.number,
        "seconds": timeline.seconds,
        "throughput": throughput_text(plan, timeline.seconds),
        "span_bubble": timeline.span_bubble,
        "peak_memory": list(timeline.peak_memory),
        "limit": min(limits) if limits else None,
        "bounds": f"{plan.schedule}: {'; '.join(gap_texts(timeline, limits, units))}",
        "memory": max((total.peak, rank) for rank, total in enumerate(memory)),
        "memory_with_adamw": max((total.peak + total.adamw, rank) for rank, total in enumerate(memory)),
        "memory_limit": plan.memory_limit,
        "decimal": is_decimal(plan.memory_limit),
        "idle": list(timeline.idle),
        "exposed_communication": list(timeline.exposed_communication),
        "exposed_exchange": timeline.exposed_exchange,
        "stalled": list(timeline.stalled),
        "many_steps": many_steps(plan.ordered, plan.costs, units) if plan.costs.update.seconds else "",
        "version": __version__,
    }


def _predicted(timeline: Timeline, ticks: Ticks) -> dict[str, object]:
    position = {span.op: at for row in timeline.spans for at, span in enumerate(row)}
    placement, peaks = timeline.schedule.placement, timeline.peak_memory
    return {
        "ranks": [
            op_columns(spans, why, ticks) for spans, why in zip(timeline.spans, waits(timeline), strict=True)
        ],
        "transfers": [transfer_rows(row, ticks) for row in timeline.transfers],
        "exchanges": [exchange_rows(row, ticks) for row in timeline.exchanges],
        "lane_exchanges": [exchange_rows(row, ticks) for row in timeline.lane_exchanges],
        "passed": [passed_rows(row, peaks[rank], ticks) for rank, row in enumerate(passed(timeline))],
        "critical": [[placement[span.op.stage], position[span.op]] for span in timeline.critical_path],
        "seconds": timeline.seconds,
        "busy": list(timeline.busy),
    }


def _measured(timeline: Timeline, spans: Sequence[Sequence[Span]], longest: float) -> dict[str, object]:
    ticks, why = Ticks(0.0, longest), measured_waits(timeline, spans)
    return {
        "ranks": [op_columns(row, causes, ticks) for row, causes in zip(spans, why, strict=True)],
        "seconds": _makespan(spans),
        "busy": [sum(span.end - span.start for span in row) for row in spans],
    }


def _differences(timeline: Timeline, measured: Sequence[Sequence[Span]]) -> list[dict[str, object]]:
    """The predicted seconds of each stage and kind of op, and of those measured the least, the median and the
    largest.

    ``expected``: the prediction at the pace of the step, the median ratio of all, since plans for one device
    run on another.  The op that differs the most from it, in a step, comes first.
    """
    durations: defaultdict[tuple[int, OpKind], list[float]] = defaultdict(list)
    predicted = {
        (span.op.stage, span.op.kind): span.end - span.start for spans in timeline.spans for span in spans
    }
    for spans in measured:
        for op, start, end in spans:
            if predicted[op.stage, op.kind]:  # else it computes nothing
                durations[op.stage, op.kind].append(end - start)
    pace = median(median(times) / predicted[key] for key, times in durations.items())

    def off(key: tuple[int, OpKind]) -> float:
        return abs(median(durations[key]) - pace * predicted[key])

    return [
        {
            "stage": key[0],
            "kind": str(key[1]),
            "predicted": predicted[key],
            "expected": pace * predicted[key],
            "least": min(durations[key]),
            "median": median(durations[key]),
            "largest": max(durations[key]),
        }
        for key in sorted(durations, key=off, reverse=True)
    ]


def _memory(plan: Plan, timeline: Timeline, ticks: Ticks) -> list[dict[str, object]]:
    return [
        asdict(fixed) | change_columns(rank_changes, ticks)
        for fixed, rank_changes in zip(standing(plan), changes(timeline), strict=True)
    ]


def _stages(plan: Plan, timeline: Timeline, graph: GraphRecord | None) -> list[dict[str, object]]:
    flops = [[0, 0, 0] for _ in plan.stages]
    if graph is not None:
        for home, phase, count in zip(graph.stage, graph.phase, graph.flops, strict=True):
            flops[home][phase] += count
    rows = []
    for stage, cost in zip(plan.stages, plan.costs.stages, strict=True):
        elements = [prod(plan.layouts[name].shape) for name in stage.parameters]
        rows.append(
            {
                "stage": stage.stage,
                "rank": stage.rank,
                "first": stage.first,
                "last": stage.last,
                "tensors": len(stage.parameters),
                "parameters": sum(elements),
                "flops": None if graph is None else flops[stage.stage],
                "vocabulary": timeline.schedule.is_vocabulary(stage.stage),
            }
            | unstructure(cost)
        )
    return rows


def _edges(plan: Plan, graph: GraphRecord | None) -> list[dict[str, object]]:
    """The messages of a microbatch; ``values``: [name, shape, bytes, op] of each, None if not known."""
    values: defaultdict[tuple[str, str], list[list[object]]] = defaultdict(list)
    for value in graph.sent if graph is not None else ():
        values[value.source, value.target].append([value.name, value.shape, value.bytes, value.op])
    rows = []
    for edge in plan.costs.edges:
        source, target = (f"{end.phase}{end.stage}" for end in (edge.source, edge.target))
        rows.append(
            {
                "source": source,
                "target": target,
                "from": plan.placement[edge.source.stage],
                "to": plan.placement[edge.target.stage],
                "bytes": edge.bytes,
                "seconds": plan.costs.message_seconds(edge, plan.placement),
                "values": None if graph is None else values[source, target],
            }
        )
    return rows


def _links(timeline: Timeline) -> dict[str, object]:
    """Per pair of ranks the messages of a step, and per rank what its other links carry."""
    placement = timeline.schedule.placement
    pairs = defaultdict[tuple[int, int], list[float]](lambda: [0, 0, 0])
    for edge in timeline.costs.edges:
        ends = placement[edge.source.stage], placement[edge.target.stage]
        if ends[0] != ends[1]:
            pair, seconds = pairs[ends], timeline.costs.message_seconds(edge, placement)
            for k, more in enumerate((1, edge.bytes, seconds)):
                pair[k] += more * timeline.schedule.microbatches
    return {
        "messages": [[*ends, *pair] for ends, pair in sorted(pairs.items())],
        "transfers": [list(busy) for busy in timeline.link_busy],
        "moved": timeline.moved,
        "offloads": sum(t.direction is Direction.OUT for t in timeline.schedule.transfers),
        "exchanges": [sum(end - start for *_, start, end in spans) for spans in timeline.exchanges],
    }


def _graph(graph: GraphRecord) -> dict[str, object]:
    data: dict[str, Any] = unstructure(graph)
    data["kept"] = [[k["stage"], k["op"], k["bytes"], k["until"]] for k in data["kept"]]
    del data["sent"], data["format"]
    return data


def _unknown(plan: Plan, programs: Sequence[str], graph: GraphRecord | None, measured: Measured) -> list[str]:
    """What the report cannot show, and how it could."""
    said = []
    if measured is None:
        said.append(
            "No recorded step, so no measured times. Record one: torchrun … -m fxpipe run DIR --record."
        )
    if graph is None:
        said.append(
            "No graph: the names and shapes of messages, FLOPs and the modules of saved values are unknown. "
            "Compile and save the pipeline with this version."
        )
    if not all(programs):
        said.append("The programs of some ranks are not known here: rank 0 alone has all of them.")
    if plan.replicas > 1:
        said.append(
            f"Weights and gradients are those of one replica that holds all of its rank's; {plan.replicas} "
            "replicas may divide them (docs/mesh.md)."
        )
    said.append(
        "The optimizer is no part of the plan: its update and its state are taken for AdamW's. A recorded "
        "step ends before the update."
    )
    if not plan.tried:
        said.append("The schedule was named, so that there are no other candidates.")
    return said
