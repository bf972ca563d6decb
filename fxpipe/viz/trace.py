"""The step as trace events, for Perfetto (ui.perfetto.dev) and chrome://tracing.

    process 1, "predicted"; process 2, "measured" (if a step was recorded)
      thread r + 1, "rank r"                     ops, and idle spans "waits for F2.3 of rank 2"
      threads behind these, "rank r, offloads" … transfers and exchanges
      counters "memory of rank r"                bytes by kind
    flows from an op to the ops that take its messages, with the names and bytes of their tensors

Times are in microseconds, from 0, the begin of the step, on.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from fxpipe.plan.saved import files
from fxpipe.schedule.dependencies import index
from fxpipe.schedule.ops import Color, Direction, arrival
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.schedule.simulation.timeline import Span, Timeline
from fxpipe.viz.memory_kinds import changes, standing
from fxpipe.viz.report.graph_record import GraphRecord
from fxpipe.viz.report.write import ReportSource
from fxpipe.viz.roles import MEANING
from fxpipe.viz.waits import Cause, IdleWait, measured_waits, runs, waits

Event = dict[str, object]
PREDICTED, MEASURED = 1, 2  # processes
_LEAST = 1e-3  # microseconds: a shorter idle span is rounding


def write_trace(source: ReportSource, path: Path) -> Path:
    """Write the trace of ``trace_events`` as JSON; return the file."""
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": trace_events(source)}, separators=(",", ":"))
    with files.writing(path):
        path.write_text(text, encoding="utf-8")
    return path


def trace_events(source: ReportSource) -> list[Event]:
    """All events: names of processes and threads, ops, idle spans, links, counters, flows."""
    plan, measured = source.plan, source.measured
    timeline = simulate(plan.ordered, plan.costs)
    events = [
        *_names(PREDICTED, f"predicted: {plan.model}, {plan.schedule}", plan.ranks),
        *_step(PREDICTED, timeline, timeline.spans, waits(timeline), source.graph),
        *_links(timeline),
        *_memory(source, timeline),
    ]
    if measured is not None:
        events += _names(MEASURED, f"measured: {plan.model}, {plan.schedule}", plan.ranks)
        events += _step(MEASURED, timeline, measured, measured_waits(timeline, measured), source.graph)
    return events


def _names(process: int, name: str, ranks: int) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    for rank in range(ranks):
        yield from _thread(process, rank + 1, f"rank {rank}", rank)


def _thread(process: int, thread: int, name: str, order: int) -> Iterator[Event]:
    place = {"pid": process, "tid": thread}
    yield {"ph": "M", "name": "thread_name", **place, "args": {"name": name}}
    yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": order}}


def _span(process: int, thread: int, name: str, start: float, end: float, kind: str, **args: object) -> Event:
    return {"ph": "X", "name": name, "cat": kind, "pid": process, "tid": thread,
            "ts": _micro(start), "dur": _micro(end) - _micro(start), "args": args}  # fmt: skip


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _step(
    process: int,
    timeline: Timeline,
    spans: Sequence[Sequence[Span]],
    causes: Sequence[Sequence[IdleWait]],
    graph: GraphRecord | None,
) -> Iterator[Event]:
    for rank, rank_spans in enumerate(spans):
        free = 0.0
        for (op, start, end), wait in zip(rank_spans, causes[rank], strict=True):
            # Shorter gaps are rounding, and would be most of the events.
            if _micro(start - free) > _LEAST:
                name = _waiting(wait, spans)
                yield _span(process, rank + 1, name, free, start, "idle", cause=str(wait.cause))
            args = {"stage": op.stage, "microbatch": op.microbatch, "does": MEANING[op.kind]}
            yield _span(process, rank + 1, str(op), start, end, str(op.kind), **args)
            free = end
    yield from _flows(process, timeline, spans, graph)


def _waiting(wait: IdleWait, spans: Sequence[Sequence[Span]]) -> str:
    match wait.cause:
        case Cause.MESSAGE:
            return f"waits for {spans[wait.rank][wait.position].op} of rank {wait.rank}"
        case Cause.TRANSFER:
            return f"waits for {wait.transfer}"
        case Cause.EXCHANGE:
            return "waits for the other replicas"
    return "between ops"


def _flows(
    process: int, timeline: Timeline, spans: Sequence[Sequence[Span]], graph: GraphRecord | None
) -> Iterator[Event]:
    """The arrows from the end of the op that sends to the begin of the one that takes the message."""
    ran = runs(spans)
    values: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for value in graph.sent if graph is not None else ():
        # Where the graph was saved, arrows tell the tensors that they carry.
        values[value.source, value.target].append(f"{value.name} {value.shape}")
    number = 0
    for edge in timeline.costs.edges:
        named = values[_text(edge.source), _text(edge.target)]
        for microbatch in range(timeline.schedule.microbatches):
            home, _, source = ran[index(edge.source), microbatch]
            rank, _, target = ran[index(arrival(edge.target)), microbatch]
            if home == rank:
                continue
            number += 1
            name = f"{_text(edge.source)} to {_text(edge.target)}"
            args = {"bytes": int(edge.bytes), "tensors": ", ".join(named) or "not known"}
            # An id of the file, not of the process: those of the two steps must not meet.
            flow = {"cat": "message", "name": name, "pid": process, "id": process * 10**9 + number,
                    "args": args}  # fmt: skip
            yield {"ph": "s", **flow, "tid": home + 1, "ts": _inside(source, last=True)}
            yield {"ph": "f", "bp": "e", **flow, "tid": rank + 1, "ts": _inside(target, last=False)}


def _text(color: Color) -> str:
    return f"{color.phase}{color.stage}"


def _inside(span: Span, last: bool) -> float:
    """A time within a span, near its end or its begin: a flow belongs to the span around its time."""
    start, end = _micro(span.start), _micro(span.end)
    # A thousandth, so that it is inside after rounding, too.
    near = (end - start) / 1000
    return round(end - near if last else start + near, 3)


def _links(timeline: Timeline) -> Iterator[Event]:
    """Transfers and exchanges, in a thread for each rank and kind that has any."""
    ranks = timeline.schedule.ranks
    for rank in range(ranks):
        transfers, exchanges = timeline.transfers[rank], timeline.exchanges[rank]
        named = {
            f"{direction}s": [(str(t), s, e) for t, s, e in transfers if t.direction is direction]
            for direction in Direction
        }
        named["other replicas"] = [(f"{x}, stage {stage}", s, e) for x, stage, s, e in exchanges]
        for k, (kind, spans) in enumerate(named.items(), 1):
            # Threads of ops come first, so each kind has its own block of numbers.
            thread = k * ranks + rank + 1
            if spans:
                yield from _thread(PREDICTED, thread, f"rank {rank}, {kind}", rank)
            for name, start, end in spans:
                yield _span(PREDICTED, thread, name, start, end, kind)


def _memory(source: ReportSource, timeline: Timeline) -> Iterator[Event]:
    """A counter for each rank, with a series for each kind of memory."""
    for rank, (fixed, rank_changes) in enumerate(zip(standing(source.plan), changes(timeline), strict=True)):
        levels: dict[str, float] = {
            name: size for name, size in asdict(fixed).items() if size and name != "pool"
        }
        levels |= {str(change.kind): 0.0 for change in rank_changes}
        name = f"memory of rank {rank}"
        at = {0.0: dict(levels)}
        for time, kind, _, size in rank_changes:
            levels[str(kind)] += size
            # Of several changes at one moment the last level counts.
            at[_micro(time)] = dict(levels)
        for time, sizes in at.items():
            args = {kind: round(size) for kind, size in sizes.items()}
            yield {"ph": "C", "name": name, "pid": PREDICTED, "ts": time, "args": args}
