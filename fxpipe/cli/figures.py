"""The figures of a timeline, as a JSON object and as text for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from fxpipe.cli.sources import CostSource
from fxpipe.errors import number_of
from fxpipe.schedule.exact.order import Exact
from fxpipe.schedule.offload.planner import OffloadPlan
from fxpipe.schedule.ops import VALIDATIONS
from fxpipe.schedule.placement import stages_of
from fxpipe.schedule.simulation.steps import steady_state
from fxpipe.schedule.simulation.timeline import Timeline
from fxpipe.schedule.units import Units, bubble_text
from fxpipe.viz.gap import bound_within, gap_texts
from fxpipe.viz.seam_marks import many_steps
from fxpipe.viz.terminal import add_ends, say, timeline_text


def figures(
    timeline: Timeline,
    best: Exact | None,
    moved: OffloadPlan | None = None,
    limits: Sequence[float] | None = None,
) -> dict[str, object]:
    """The object that ``--json`` prints.  Lists have one entry per rank.

    ``steps``: a step of many.  ``memory``: (time, live memory from then on).  ``transfers`` of ``offload``:
    (transfer, start, end).
    """
    schedule = timeline.schedule
    printed = {
        "schedule": schedule.name,
        "ranks": schedule.ranks,
        "microbatches": schedule.microbatches,
        "placement": schedule.placement,
        "seconds": timeline.seconds,
        "lower_bound": timeline.lower_bound,
        "lower_bound_within_memory": bound_within(timeline, limits),
        "span_bubble": timeline.span_bubble,
        "makespan_bubble": timeline.makespan_bubble,
        "busy": timeline.busy,
        "idle": timeline.idle,
        "exposed_communication": timeline.exposed_communication,
        "peak_memory": timeline.peak_memory,
        "memory": timeline.memory,
        "critical_path": [(str(op), start, end) for op, start, end in timeline.critical_path],
    }
    if not timeline.of_each:  # another batch has another order
        printed["steps"] = {
            validation: steady_state(schedule, timeline.costs, validation)._asdict()
            for validation in VALIDATIONS
        }
    if moved is not None or any(timeline.transfers):
        counts = {} if moved is None else {"asked": moved.asked, "moved": moved.moved}
        printed["offload"] = {
            **counts,
            "link_busy": timeline.link_busy,
            "stalled": timeline.stalled,
            "transfers": [
                [(str(t), start, end) for t, start, end in transfers] for transfers in timeline.transfers
            ],
        }
    if best is not None:
        printed["exact"] = {
            "value": best.value,
            "bound": best.bound,
            "proven": best.proven,
            "seconds": best.timeline.seconds,
            "span_bubble": best.timeline.span_bubble,
            "makespan_bubble": best.timeline.makespan_bubble,
            "peak_memory": best.timeline.peak_memory,
        }
    return printed


def print_timeline(
    console: Console,
    timeline: Timeline,
    source: CostSource,
    best: Exact | None,
    moved: tuple[Timeline, OffloadPlan] | None,
    limits: Sequence[float] | None,
) -> None:
    """``moved``: what was offloaded, and the timeline before that.  ``limits``: of each rank, if any."""
    schedule, units = timeline.schedule, source.units
    stages = "" if schedule.stages == schedule.ranks else f", {schedule.stages} stages"
    ranks, microbatches = number_of(schedule.ranks, "rank"), number_of(schedule.microbatches, "microbatch")
    what = f"{schedule.name}: {ranks}{stages}, {microbatches}"
    say(console, f"{what}; {source.note}")
    colored = console.color_system is not None and not console.no_color  # NO_COLOR keeps the system
    console.print(timeline_text(timeline, console.width, colored))
    console.print(_ranks(timeline, units))
    path = Counter(str(span.op.kind) for span in timeline.critical_path)
    kinds = ", ".join(f"{count} {kind}" for kind, count in path.items())
    on_path = sum(span.end - span.start for span in timeline.critical_path)
    lines = [
        *gap_texts(timeline, limits, units),
        f"span bubble {bubble_text(timeline.span_bubble)}, "
        f"makespan bubble {bubble_text(timeline.makespan_bubble)}",
        *([] if timeline.of_each else [f"many steps: {many_steps(schedule, timeline.costs, units)}"]),
        f"critical path: {kinds}; {units.time(timeline.seconds - on_path)} of it in transfers",
    ]
    if moved is not None:
        lines.append(_moved(*moved, units))
    if best is not None:
        lines.append(_compared(best, units))
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


def _moved(before: Timeline, moved: OffloadPlan, units: Units) -> str:
    timeline = moved.timeline
    what = f"offload: {moved.moved} of {number_of(moved.asked, 'activation')}"
    if moved.moved < moved.asked:
        what += " (the others are needed too soon, or the links are busy)"
    busiest = max((max(pair) for pair in timeline.link_busy), default=0.0) / timeline.seconds
    peaks = (units.memory(max(each.peak_memory)) for each in (before, timeline))
    stalled = units.time(max(timeline.stalled))
    return (
        f"{what}; peak memory {' -> '.join(peaks)}; the busiest link is busy {busiest:.0%} of the time; "
        f"waiting for transfers: at most {stalled} on a rank"
    )


def _ranks(timeline: Timeline, units: Units) -> Table:
    table = Table("rank", "stages", "busy", "idle", "exposed communication", "peak memory")
    for column in table.columns[2:]:
        column.justify = "right"
    times = timeline.busy, timeline.idle, timeline.exposed_communication
    rows = [
        [
            str(rank),
            " ".join(map(str, stages)),
            *(units.time(seconds[rank]) for seconds in times),
            units.memory(timeline.peak_memory[rank]),
        ]
        for rank, stages in enumerate(stages_of(timeline.schedule.placement))
    ]
    add_ends(table, rows)
    return table


def _compared(best: Exact, units: Units) -> str:
    peak = units.memory(max(best.timeline.peak_memory))
    what = "proven optimal" if best.proven else f"lower bound {units.time(best.bound)}"
    return (
        f"exact: {units.time(best.value)} ({what}), span bubble {bubble_text(best.timeline.span_bubble)}, "
        f"makespan bubble {bubble_text(best.timeline.makespan_bubble)}, peak memory {peak}"
    )
