"""Simulated steps as an SVG: a row per rank with ops as rectangles, and the rank's memory below."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import dataclass
from typing import NamedTuple

from fxpipe.errors import number_of
from fxpipe.schedule.ops import Direction, Phase
from fxpipe.schedule.simulation.steps import Step, Steps
from fxpipe.schedule.simulation.timeline import ExchangeSpan, Span, Timeline, TransferSpan
from fxpipe.schedule.units import PHYSICAL, Units, bubble_text, ticks
from fxpipe.viz import seam_marks
from fxpipe.viz.palette import EXCHANGED, OFFLOADED, PHASES, tint
from fxpipe.viz.roles import MEANING, Role, color, role
from fxpipe.viz.svg import add_text, frame, text_width

BAR = 22  # heights, in pixels
MEMORY = 26
LINK = 7  # each direction of a rank's link, if it has transfers; its exchanges with other replicas
TOP = 84  # above the rows of ranks, if the legend is one line
LEGEND = 18  # from one line of the legend to the next
FONT = 11
BOX = 18  # width of a box of the legend, with the room behind it
LEFT, RIGHT = 64, 110
LETTER = 5.6  # width of a digit in a rectangle, in the widest of common fonts
OP_WIDTH = 30  # average width of an op, if the maximum width of the picture permits
NARROWEST, WIDEST = 900, 4800

COLORS = {shown: "url(#BW)" if shown is Role.BW else color(shown) for shown in Role}
EXCHANGES = {"sum": "gradients summed", "gather": "parameters gathered"}  # over replicas
ON_LANES = "gather"  # drawn alike, in a row of its own
STYLE = (
    f"text{{font:{FONT}px Helvetica,Arial,sans-serif;fill:#222}}.n{{font-size:9px;text-anchor:middle}}"
    "rect{stroke:#fff;stroke-width:.5}.idle{fill:#ececec;stroke:none}.held{fill:#c9b8d8;stroke:#7a5c99}"
    f".offload{{fill:{OFFLOADED}}}.reload{{fill:{tint(OFFLOADED, 0.45)}}}"
    f".sum{{fill:{EXCHANGED}}}.gather{{fill:{tint(EXCHANGED, 0.45)}}}"
    + "".join(f".{shown}{{fill:{fill}}}" for shown, fill in COLORS.items())
    + ".late{opacity:.62}"
    + seam_marks.STYLE
)


@dataclass(frozen=True, slots=True)
class Scale:
    """Converts seconds to pixels."""

    start: float
    seconds: float
    pixels: float

    def __call__(self, time: float) -> float:
        return round((time - self.start) / self.seconds * self.pixels, 2) if self.seconds else 0.0


def timeline_svg(shown: Timeline | Steps, title: str, units: Units = PHYSICAL) -> str:
    """The source of the picture: of one step, or of some with the updates behind them.

    title: the name of the model or the costs; schedule, sizes, bubbles and peaks are added to it.
    units: the units of times and memory (``fxpipe.schedule.units.PLAIN`` for times without a unit).
    Memory has one scale for all ranks: the largest peak fills its strip.
    """
    steps = shown.steps if isinstance(shown, Steps) else (Step(shown, (), ()),)
    timeline = steps[0].timeline
    ranks = timeline.schedule.ranks
    longest = len(steps) * max(map(len, timeline.spans), default=0)
    # Wide enough for the numbers in the ops, up to what a browser still draws fast.
    pixels = min(max(NARROWEST, longest * OP_WIDTH), WIDEST)
    scale = _scale(steps, pixels)
    pitch = BAR + _links(timeline) + MEMORY + 14  # from one rank's row to the next
    width = LEFT + pixels + RIGHT
    legend = _legend(timeline, shown if isinstance(shown, Steps) else None, width)
    top = TOP + LEGEND * legend[-1].line
    height = top + ranks * pitch + 26
    svg = frame(width, height, STYLE)
    _stripes(svg)
    _head(svg, timeline, shown if isinstance(shown, Steps) else None, title, units)
    for key in legend:
        _key(svg, key)
    _axis(svg, scale, top, top + ranks * pitch, units)
    for rank in range(ranks):
        row = ET.SubElement(svg, "g", {"transform": f"translate({LEFT} {top + rank * pitch})"})
        _row(row, steps, rank, scale, units)
    return ET.tostring(svg, encoding="unicode") + "\n"


def _scale(steps: tuple[Step, ...], pixels: float) -> Scale:
    """The scale from the first start to the last end, over all ranks."""
    starts = [spans[0].start for spans in steps[0].timeline.spans if spans]
    # Replicas may gather parameters before the first op.
    starts += [spans[0].start for spans in steps[0].timeline.exchanges if spans]
    start = min(starts, default=0.0)
    ends = [update.end for update in steps[-1].updates]
    return Scale(start, max(ends) - start if ends else steps[0].timeline.seconds, pixels)


def _links(timeline: Timeline) -> int:
    """The height of the transfers and exchanges below a rank's ops."""
    rows = 2 * any(timeline.transfers) + any(timeline.exchanges) + any(timeline.lane_exchanges)
    return rows * LINK + 2 if rows else 0


def _head(svg: ET.Element, timeline: Timeline, steps: Steps | None, title: str, units: Units) -> None:
    schedule, peaks = timeline.schedule, timeline.peak_memory
    fullest = max(range(len(peaks)), key=peaks.__getitem__)
    stages = f", {schedule.stages} stages" if schedule.stages != schedule.ranks else ""
    add_text(
        svg,
        12,
        22,
        f"{title}: {schedule.name}, {number_of(schedule.ranks, 'rank')}{stages}, "
        f"{number_of(schedule.microbatches, 'microbatch')}",
        style="font-size:15px;font-weight:bold",
    )
    peak = f"peak memory {units.memory(peaks[fullest])} (rank {fullest})"
    if steps is None:
        figures = (
            f"step {units.time(timeline.seconds)}, span bubble {bubble_text(timeline.span_bubble)}, "
            f"makespan bubble {bubble_text(timeline.makespan_bubble)}, {peak}"
        )
    else:
        how = seam_marks.NAME[steps.validation]
        figures = f"{len(steps.steps)} steps of many with {how}: {units.time(steps.period)} a step, {peak}"
    add_text(svg, 12, 42, figures)


class _Key(NamedTuple):
    """An entry of the legend, from ``x`` on; without a style it is text alone."""

    style: str
    text: str
    x: float
    line: int


def _legend(timeline: Timeline, steps: Steps | None, width: float) -> list[_Key]:
    """The entries in as many lines as hold them in a picture of this width."""
    schedule = timeline.schedule
    roles = {role(span.op, schedule) for spans in timeline.spans for span in spans}
    keys = [(str(shown), f"{shown} {MEANING[shown]}") for shown in Role if shown in roles]
    keys += [("idle", "idle"), ("held", "memory held between ops")]
    if any(timeline.transfers):
        keys += [("offload", "offload"), ("reload", "reload")]
    if any(timeline.exchanges):
        exchanged = {span.what for rank_spans in timeline.exchanges for span in rank_spans}
        keys += [(what, text) for what, text in EXCHANGES.items() if what in exchanged]
    if any(timeline.lane_exchanges):
        keys += [(ON_LANES, "exchanged between lanes")]
    if steps is not None:
        keys += seam_marks.keys(steps.steps)
    if schedule.stages != schedule.ranks:
        note = "a number is stage.microbatch, or the microbatch; paler: a later stage of its rank"
    else:
        note = "a number is the microbatch"
    x, line, placed = 12.0, 0, list[_Key]()
    for style, text in [*keys, ("", note)]:
        end = x + BOX * bool(style) + text_width(text, FONT)
        # An entry that does not fit begins the next line.
        if placed and end > width - 12:
            x, end, line = 12.0, end - x + 12, line + 1
        placed.append(_Key(style, text, x, line))
        x = end + 16
    return placed


def _key(svg: ET.Element, key: _Key) -> None:
    y = 52 + LEGEND * key.line
    if key.style:
        box = {"x": f"{key.x:g}", "y": f"{y}", "width": "14", "height": "12", "class": key.style}
        ET.SubElement(svg, "rect", box)
    add_text(svg, key.x + BOX * bool(key.style), y + 10, key.text)


def _axis(svg: ET.Element, scale: Scale, top: int, bottom: int, units: Units) -> None:
    for tick in ticks(scale.seconds, int(scale.pixels / 90)):
        x = LEFT + scale(scale.start + tick)
        line = {"x1": f"{x}", "x2": f"{x}", "y1": f"{top - 4}", "y2": f"{bottom}", "stroke": "#ccc"}
        ET.SubElement(svg, "line", line)
        add_text(svg, x, bottom + 14, units.time(tick), style="text-anchor:middle")


def _row(row: ET.Element, steps: tuple[Step, ...], rank: int, scale: Scale, units: Units) -> None:
    add_text(row, -LEFT + 12, 15, f"rank {rank}")
    ET.SubElement(row, "rect", {"width": f"{scale.pixels}", "height": f"{BAR}", "class": "idle"})
    schedule = steps[0].timeline.schedule
    stages = [stage for stage, home in enumerate(schedule.placement) if home == rank]
    model_stages = [stage for stage in stages if not schedule.is_vocabulary(stage)]
    for step in steps:
        for span in step.timeline.spans[rank]:
            late = span.op.stage in model_stages[1:]
            look = f"{role(span.op, schedule)} late" if late else str(role(span.op, schedule))
            _op(row, span, scale, look, len(stages), units)
        for moved in step.timeline.transfers[rank]:
            direction = moved.transfer.direction
            y = BAR + 1 + LINK * (direction is Direction.IN)
            _on_link(row, moved, y, str(direction), str(moved.transfer), scale, units)
        for exchanged in step.timeline.exchanges[rank]:
            y, tip = BAR + 1 + 2 * LINK * any(step.timeline.transfers), EXCHANGES[exchanged.what]
            _on_link(row, exchanged, y, exchanged.what, f"{tip}, stage {exchanged.stage},", scale, units)
        for between in step.timeline.lane_exchanges[rank]:
            y, tip = BAR - 1 + _links(step.timeline) - LINK, f"lanes exchange of stage {between.stage},"
            _on_link(row, between, y, ON_LANES, tip, scale, units)
        if step.updates:
            seam_marks.draw_seam(row, step, rank, BAR, scale, scale.start, units)
    _memory(row, [step.timeline for step in steps], rank, scale, units)


def _op(row: ET.Element, span: Span, scale: Scale, look: str, chunks: int, units: Units) -> None:
    x, end = scale(span.start), scale(span.end)
    rect = {"x": f"{x:g}", "width": f"{end - x:.4g}", "height": f"{BAR}", "class": look}
    drawn = ET.SubElement(row, "rect", rect)
    start = units.time(span.start - scale.start)
    ET.SubElement(drawn, "title").text = f"{span.op} from {start}, {units.time(span.end - span.start)}"
    # The longest text that fits; the tip has all of it.
    texts = [f"{span.op.stage}.{span.op.microbatch}"] * (chunks > 1) + [f"{span.op.microbatch}"]
    text = next((text for text in texts if len(text) * LETTER <= end - x - 1), "")
    if text:
        ET.SubElement(row, "text", {"x": f"{(x + end) / 2:.5g}", "y": "15", "class": "n"}).text = text


def _on_link(
    row: ET.Element,
    span: TransferSpan | ExchangeSpan,
    y: int,
    look: str,
    tip: str,
    scale: Scale,
    units: Units,
) -> None:
    x, width = scale(span.start), scale(span.end) - scale(span.start)
    place = {"x": f"{x:g}", "y": f"{y}", "width": f"{width:.4g}", "height": f"{LINK}"}
    drawn = ET.SubElement(row, "rect", place | {"class": look})
    time = f"from {units.time(span.start - scale.start)}, {units.time(span.end - span.start)}"
    ET.SubElement(drawn, "title").text = f"{tip} {time}"


def _memory(row: ET.Element, timelines: list[Timeline], rank: int, scale: Scale, units: Units) -> None:
    # One scale for all ranks, so that they compare.
    top, peak = max(timelines[0].peak_memory), timelines[0].peak_memory[rank]
    base = BAR + _links(timelines[0]) + 4 + MEMORY

    def y(live: float) -> float:
        return round(base - MEMORY * (live / top if top else 0.0), 2)

    # Memory that is freed and allocated at one moment leaves no notch: the last level at a place counts.
    levels = {scale(time): y(live) for timeline in timelines for time, live in timeline.memory[rank]}
    path = f"M0 {base}" + "".join(f"H{x:g}V{level:g}" for x, level in levels.items())
    path += f"H{scale.pixels:g}V{base}Z"
    drawn = ET.SubElement(row, "path", {"d": path, "class": "held"})
    ET.SubElement(drawn, "title").text = f"memory of rank {rank}, peak {units.memory(peak)}"
    add_text(row, scale.pixels + 8, base - 6, f"peak {units.memory(peak)}")


def _stripes(svg: ET.Element) -> None:
    """The pattern of BW: the color of B above that of W."""
    fill = {"id": "BW", "x1": "0", "y1": "0", "x2": "0", "y2": "1"}
    gradient = ET.SubElement(ET.SubElement(svg, "defs"), "linearGradient", fill)
    for phase in (Phase.B, Phase.W):
        ET.SubElement(gradient, "stop", {"offset": "0.5", "stop-color": tint(PHASES[phase], 0.1)})
