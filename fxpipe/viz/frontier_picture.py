"""Bubble against memory as an SVG: a dot for each schedule, and a line along the Pareto frontier."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass

from fxpipe.errors import printable
from fxpipe.schedule.ops import Phase
from fxpipe.schedule.units import PHYSICAL, Units, bubble_text, ticks
from fxpipe.viz.palette import PHASES
from fxpipe.viz.svg import add_text, frame, text_width

WIDTH, HEIGHT = 760, 420  # of the plot, in pixels
LEFT, TOP, RIGHT, BOTTOM = 76, 64, 130, 56
LINE = 13  # height of a label
FONT = 11
STYLE = (
    f"text{{font:{FONT}px Helvetica,Arial,sans-serif;fill:#222}}"
    ".end{text-anchor:end}.middle{text-anchor:middle}"
    f".grid{{stroke:#ddd}}.best{{fill:none;stroke:{PHASES[Phase.F]};stroke-width:2}}"
    f".dot{{fill:#999}}.on{{fill:{PHASES[Phase.F]}}}.lead{{stroke:#999;stroke-width:.7}}"
)


@dataclass(frozen=True)
class FrontierPoint:
    """One schedule: the fullest rank's peak memory, and a bubble from 0 to 1."""

    name: str
    memory: float
    bubble: float


def frontier(points: Sequence[FrontierPoint]) -> tuple[FrontierPoint, ...]:
    """The Pareto frontier, sorted by memory: no other point is better in one and as good in the other."""
    best: list[FrontierPoint] = []
    # In this order, a point is on the frontier if its bubble is the smallest so far.
    for point in sorted(points, key=lambda p: (p.memory, p.bubble)):
        equal = best and (point.memory, point.bubble) == (best[-1].memory, best[-1].bubble)
        if not best or point.bubble < best[-1].bubble or equal:
            best.append(point)
    return tuple(best)


def frontier_svg(points: Sequence[FrontierPoint], title: str, bubble: str, units: Units = PHYSICAL) -> str:
    """The source of the picture.  bubble: the name of the bubble, for the axis."""
    most, worst = max(p.memory for p in points), max(p.bubble for p in points)
    across, up = ticks(most * 1.05 or 1.0, 10), ticks(worst * 1.1 or 1.0, 8)
    # A little beyond the last point, and not zero where all points are.
    right, top = max(across[-1], most * 1.05) or 1.0, max(up[-1], worst * 1.1) or 1.0
    svg = frame(LEFT + WIDTH + RIGHT, TOP + HEIGHT + BOTTOM, STYLE)
    add_text(svg, 12, 24, title, style="font-size:15px;font-weight:bold")
    add_text(
        svg, 12, 44, f"{bubble} against peak memory of the fullest rank; the line is the Pareto frontier"
    )

    def x(memory: float) -> float:
        return round(LEFT + WIDTH * memory / right, 1)

    def y(rate: float) -> float:
        return round(TOP + HEIGHT * (1 - rate / top), 1)

    for tick in across:
        _line(svg, "grid", x(tick), TOP, x(tick), TOP + HEIGHT)
        add_text(svg, x(tick), TOP + HEIGHT + 18, units.memory(tick), "middle")
    for tick in up:
        _line(svg, "grid", LEFT, y(tick), LEFT + WIDTH, y(tick))
        add_text(svg, LEFT - 8, y(tick) + 4, f"{100 * tick:g}%", "end")
    add_text(svg, LEFT + WIDTH / 2, TOP + HEIGHT + 40, "peak memory", "middle")
    best = frontier(points)
    steps = "".join(f"H{x(p.memory):g}V{y(p.bubble):g}" for p in best)
    path = f"M{x(best[0].memory):g} {TOP}{steps}H{LEFT + WIDTH}"
    ET.SubElement(svg, "path", {"d": path, "class": "best"})
    _dots(svg, [(x(p.memory), y(p.bubble), p) for p in points], set(best), units)
    return ET.tostring(svg, encoding="unicode") + "\n"


def _dots(
    svg: ET.Element, places: list[tuple[float, float, FrontierPoint]], best: set[FrontierPoint], units: Units
) -> None:
    """The dots, those of the frontier on top, with labels to their right that do not overlap."""
    occupied = [(x - 4, x + 4, y + 4) for x, y, _ in places]  # left, right, baseline
    # What is drawn later lies on top.
    for x, y, point in sorted(places, key=lambda place: (place[2] in best, place[1], place[0])):
        look = {"cx": f"{x:g}", "cy": f"{y:g}", "r": "4", "class": "on" if point in best else "dot"}
        figures = f"{point.name}: {units.memory(point.memory)}, bubble {bubble_text(point.bubble)}"
        ET.SubElement(ET.SubElement(svg, "circle", look), "title").text = printable(figures)
        left, right, base = x + 8, x + 8 + text_width(point.name, FONT), y - 3
        # Down until it is free: the dots are above, so a line can lead there.
        while any(left < end and right > begin and abs(base - at) < LINE for begin, end, at in occupied):
            base += 1
        occupied.append((left, right, base))
        if base > y + LINE:
            _line(svg, "lead", x, y, left - 1, base - 4)
        add_text(svg, left, base, point.name)


def _line(svg: ET.Element, look: str, x1: float, y1: float, x2: float, y2: float) -> None:
    ends = {"x1": f"{x1:g}", "y1": f"{y1:g}", "x2": f"{x2:g}", "y2": f"{y2:g}"}
    ET.SubElement(svg, "line", {**ends, "class": look})
