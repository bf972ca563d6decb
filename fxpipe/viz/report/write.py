"""Writes the report, or the trace, of a pipeline: of a live one, or of a saved one that is not loaded."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import fx

from fxpipe.ir.graph import Section
from fxpipe.plan.artifact import Plan
from fxpipe.plan.saved import files
from fxpipe.plan.saved.recorded import read_spans, recorded_ops
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.schedule.simulation.timeline import Span
from fxpipe.viz.clocks import aligned
from fxpipe.viz.report.data import Measured, report_data
from fxpipe.viz.report.graph_record import GraphRecord, graph_record, read_graph
from fxpipe.viz.report.page import page


@dataclass(frozen=True)
class ReportSource:
    """What a report is made of; see ``report_data``."""

    plan: Plan
    programs: tuple[str, ...]
    graph: GraphRecord | None
    measured: Measured


def saved_source(directory: Path) -> ReportSource:
    """The source of a saved pipeline, with its recorded step if there is one.

    Raises ArtifactError for files that are missing or damaged.
    """
    plan = files.read_plan(directory)
    programs = files.read_programs(directory, plan, range(plan.ranks))
    return ReportSource(
        plan, programs, read_graph(directory, len(plan.stages)), measured_step(plan, directory)
    )


def live_source(
    plan: Plan,
    programs: tuple[str, ...],
    graph: fx.Graph | None,
    sections: tuple[Section, ...],
    directory: Path | None,
) -> ReportSource:
    """The source of a pipeline in memory: compiled, or loaded from a directory."""
    record = None
    if graph is not None:
        record = graph_record(graph, sections, plan)
    elif directory is not None:
        record = read_graph(directory, len(plan.stages))
    return ReportSource(plan, programs, record, measured_step(plan, directory))


def measured_step(plan: Plan, directory: Path | None) -> Measured:
    """The recorded step in a directory, on one clock; None where there is none.

    A step whose ops are not those of the plan, in its order, is left out with a warning: its program was
    edited, or repeated ops.  Raises ArtifactError for files that are damaged, or of ops of other ranks.
    """
    recorded = None if directory is None else read_spans(directory, plan.ranks)
    if recorded is None:
        return None
    timeline = simulate(plan.ordered, plan.costs)
    measured = [
        _with_empty([Span(*span) for span in spans], planned)
        for spans, planned in zip(recorded_ops(plan, recorded), timeline.spans, strict=True)
    ]
    for rank, (spans, planned) in enumerate(zip(measured, timeline.spans, strict=True)):
        if [span.op for span in spans] != [span.op for span in planned]:
            warnings.warn(
                f"measured{rank}.json has other ops than the plan, or another order, so the measured step is "
                "left out. Record a run of the programs as they were saved.",
                stacklevel=3,
            )
            return None
    return aligned(timeline, measured)


def _with_empty(spans: Sequence[Span], planned: Sequence[Span]) -> list[Span]:
    """The measured spans with the ops that compute nothing, which programs leave out, in their places."""
    measured, left = list[Span](), deque(spans)
    for op, start, end in planned:
        if left and left[0].op == op:
            measured.append(left.popleft())
        elif start == end:
            # As late as it can be: what the plan lets it wait for has come by then.
            at = left[0].start if left else spans[-1].end
            measured.append(Span(op, at, at))
    return [*measured, *left]


def write_report(source: ReportSource, path: Path, lengths: Mapping[str, object] | None = None) -> Path:
    """Write one file of HTML; return it.  lengths: see ``report_data``."""
    text = page(report_data(source.plan, source.programs, source.graph, source.measured, lengths))
    with files.writing(path):
        path.write_text(text, encoding="utf-8")
    return path
