"""The seam between two steps, as text and in a timeline: updates, and the verdicts that ranks wait for."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable

from fxpipe.schedule.costs import Costs
from fxpipe.schedule.ops import Schedule, Validation
from fxpipe.schedule.simulation.steps import Interval, Step, steady_state
from fxpipe.schedule.units import Units
from fxpipe.viz.palette import UPDATE, VERDICT, tint

NAME: dict[Validation, str] = {"barrier": "a barrier", "post": "post-validation"}
STYLE = (
    f".update{{fill:{UPDATE}}}.o{{font-size:9px;text-anchor:middle;fill:#fff}}"
    f".wait{{fill:{tint(VERDICT, 0.6)}}}.verdict{{stroke:{VERDICT};stroke-width:2}}"
)
KEYS = {"update": "O update", "wait": "V wait for the verdict on the step before, to the line"}
_BEYOND = 4  # of a line, above and below the ops
_LEAST = 10  # pixels of an update with its letter
_NONE = 1e-9  # of a period: less is rounding


def many_steps(schedule: Schedule, costs: Costs, units: Units) -> str:
    """The time a step of many with each validation, and the parts of updates and verdicts in it."""
    texts = []
    for validation, name in NAME.items():
        period, updates, messages = steady_state(schedule, costs, validation)
        parts = ((updates, "updates"), (messages, "verdicts"))
        of = ", ".join(f"{units.time(part)} for {what}" for part, what in parts if part > _NONE * period)
        texts.append(f"{units.time(period)} a step with {name}{f', of it {of}' if of else ''}")
    return "; ".join(texts)


def keys(steps: tuple[Step, ...]) -> list[tuple[str, str]]:
    """The classes that the steps need, with their meaning."""
    waits = any(verdict for step in steps for verdict in step.verdicts)
    return [(style, text) for style, text in KEYS.items() if style == "update" or waits]


def draw_seam(
    row: ET.Element,
    step: Step,
    rank: int,
    bar: int,
    scale: Callable[[float], float],
    begin: float,
    units: Units,
) -> None:
    """Draw the seam in the row of a rank, whose ops are ``bar`` pixels high.  begin: that of the picture."""
    update, verdict = step.updates[rank], step.verdicts[rank]
    if update.end > update.start:
        tip = f"update from {units.time(update.start - begin)}, {units.time(update.end - update.start)}"
        x, end = _box(row, update, bar, "update", scale, tip)
        # A letter that does not fit would cover the ops beside it.
        if end - x >= _LEAST:
            ET.SubElement(row, "text", {"x": f"{(x + end) / 2:.5g}", "y": "15", "class": "o"}).text = "O"
    if verdict is None:
        return
    if verdict.end > verdict.start:
        tip = f"waits for the verdict from {units.time(verdict.start - begin)}"
        _box(row, verdict, bar, "wait", scale, f"{tip}, {units.time(verdict.end - verdict.start)}")
    # The line stands also where no rank had to wait.
    x = scale(verdict.end)
    place = {"x1": f"{x:g}", "x2": f"{x:g}", "y1": f"{-_BEYOND}", "y2": f"{bar + _BEYOND}"}
    line = ET.SubElement(row, "line", place | {"class": "verdict"})
    ET.SubElement(line, "title").text = f"the verdict is there, at {units.time(verdict.end - begin)}"


def _box(
    row: ET.Element, time: Interval, bar: int, style: str, scale: Callable[[float], float], tip: str
) -> tuple[float, float]:
    x, end = scale(time.start), scale(time.end)
    box = {"x": f"{x:g}", "width": f"{end - x:.4g}", "height": f"{bar}", "class": style}
    ET.SubElement(ET.SubElement(row, "rect", box), "title").text = tip
    return x, end
