"""Lays out the boxes and flows of the collapsed graph on a grid, in points, y downwards.

before: boxes and flows
after:  a frame for each stage, in it a row for each module: F in the left column, B in the right one,
        W between them and half a row below; and a path for each flow

Neighbors are joined by straight lines.  A line that skips boxes of its own column runs beside it, in a lane
that all skipping flows of one box share.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from fxpipe.schedule.ops import Phase
from fxpipe.viz.boxes import Boxes, Flow, Place

COLUMNS = (Phase.F, Phase.W, Phase.B)
HEIGHT = 30.0  # of a box
ROW = 66.0  # from one row to the next
GAP = 56.0  # between columns: room for a label
LANE = 12.0  # from one lane to the next
MARGIN = 46.0  # between a column and its first lane: room for a label
HEAD = 56.0  # above the first row of a frame: room for its title
LETTER = 5.6  # width of a letter of a box's text


class Point(NamedTuple):
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Frame:
    left: float
    top: float
    right: float
    bottom: float


@dataclass(frozen=True, slots=True)
class Route:
    """``points``: a polygonal path from source to target.  ``label``: the center of its text."""

    flow: Flow
    points: tuple[Point, ...]
    label: Point


@dataclass(frozen=True)
class Layout:
    """``centers`` of the boxes, all of one ``width``; ``frames`` by stage."""

    width: float
    centers: dict[Place, Point]
    frames: tuple[Frame, ...]
    routes: tuple[Route, ...]


def lay_out(boxes: Boxes, stages: int, letters: int) -> Layout:
    """letters: the number of letters of the longest line of text in a box."""
    width = max(100.0, letters * LETTER + 14)
    phases = {box.place.color.phase for box in boxes.boxes}
    x_of = {phase: i * (width + GAP) for i, phase in enumerate(p for p in COLUMNS if p in phases)}
    centers, edges = _grid(boxes, stages, x_of)
    skips = [f for f in boxes.flows if _skips(f, centers)]
    lanes = _lanes(skips, centers)
    left, right = min(x_of.values()) - width / 2, max(x_of.values()) + width / 2
    outermost = {side: max((n for (_, s), n in lanes.items() if s == side), default=0) for side in (-1, 1)}
    room = {side: MARGIN + LANE * (1 + lane) for side, lane in outermost.items()}
    frames = tuple(Frame(left - room[-1], top, right + room[1], bottom) for top, bottom in edges)
    arrived: dict[tuple[Place, int], int] = defaultdict(int)
    routes = []
    for flow in boxes.flows:
        if flow in skips:
            side = _side(flow)
            routes.append(
                _beside(flow, centers, width, side, lanes[flow.source, side], arrived[flow.target, side])
            )
            arrived[flow.target, side] += 1
        else:
            routes.append(_straight(flow, centers, width))
    return Layout(width, centers, frames, tuple(routes))


def _grid(
    boxes: Boxes, stages: int, x_of: dict[Phase, float]
) -> tuple[dict[Place, Point], list[tuple[float, float]]]:
    """The centers of the boxes, and the top and bottom of the stages' frames."""
    centers: dict[Place, Point] = {}
    edges = []
    y = 0.0
    for stage in range(stages):
        top = y
        y += HEAD + HEIGHT / 2
        rows: dict[str, float] = {}
        for box in boxes.boxes:
            place = box.place
            if place.color.stage != stage:
                continue
            row = rows.setdefault(place.path, y + len(rows) * ROW)
            lowered = place.color.phase is Phase.W
            centers[place] = Point(x_of[place.color.phase], row + ROW / 2 * lowered)
        y += len(rows) * ROW
        edges.append((top, y - HEIGHT / 2))
        y += 10
    return centers, edges


def _skips(flow: Flow, centers: dict[Place, Point]) -> bool:
    """Whether the flow runs past another box of its column."""
    a, b = centers[flow.source], centers[flow.target]
    low, high = min(a.y, b.y), max(a.y, b.y)
    return a.x == b.x and any(p.x == a.x and low < p.y < high for p in centers.values())


def _side(flow: Flow) -> int:
    """The side of its column on which a skipping flow runs: -1 left, 1 right."""
    return -_way(flow)


def _lanes(skips: list[Flow], centers: dict[Place, Point]) -> dict[tuple[Place, int], int]:
    """The lane of each source of skipping flows, without overlaps; the shortest is nearest to the column."""
    spans: dict[tuple[Place, int], list[float]] = defaultdict(list)
    for flow in skips:
        spans[flow.source, _side(flow)] += [centers[flow.source].y, centers[flow.target].y]
    taken: list[tuple[float, int, int, float, float]] = []
    lanes: dict[tuple[Place, int], int] = {}
    for (place, side), ys in sorted(spans.items(), key=lambda item: max(item[1]) - min(item[1])):
        x, low, high = centers[place].x, min(ys), max(ys)
        used = {n for px, s, n, a, b in taken if (px, s) == (x, side) and a <= high and low <= b}
        lane = next(n for n in range(len(used) + 1) if n not in used)
        taken.append((x, side, lane, low, high))
        lanes[place, side] = lane
    return lanes


def _beside(
    flow: Flow, centers: dict[Place, Point], width: float, side: int, lane: int, before: int
) -> Route:
    """before: the number of flows that enter the target above this one, on the same side."""
    a, b = centers[flow.source], centers[flow.target]
    edge = a.x + side * width / 2
    x = edge + side * (MARGIN + lane * LANE)
    out, into = a.y + 8, b.y - 6 + 9 * before
    points = (Point(edge, out), Point(x, out), Point(x, into), Point(edge, into))
    return Route(flow, points, Point(edge + side * MARGIN / 2 + side * 3, into - 5))


def _way(flow: Flow) -> int:
    """The direction of most flows of the source's phase: 1 down, -1 up."""
    return 1 if flow.source.color.phase is Phase.F else -1


def _straight(flow: Flow, centers: dict[Place, Point], width: float) -> Route:
    a, b = centers[flow.source], centers[flow.target]
    half = width / 2
    if a.x == b.x:
        sign = 1 if b.y > a.y else -1
        # A flow against the direction of the column keeps to the left, with its label.
        against = sign != _way(flow)
        x = a.x - 10 * against
        start, end = Point(x, a.y + sign * HEIGHT / 2), Point(x, b.y - sign * HEIGHT / 2)
        # Between two frames, close below the upper box: the title of the lower frame is farther down.
        y = min(start.y, end.y) + 14 if flow.crosses else (start.y + end.y) / 2
        return Route(flow, (start, end), Point(x + (-22 if against else 22), y))
    sign = 1 if b.x > a.x else -1
    start, end = Point(a.x + sign * half, a.y), Point(b.x - sign * half, b.y)
    if a.y < b.y:
        start = Point(start.x, a.y + HEIGHT / 4)
    middle = Point((start.x + end.x) / 2, (start.y + end.y) / 2)
    if a.y == b.y:
        return Route(flow, (start, end), Point(start.x + sign * GAP / 2, start.y - 6))
    return Route(flow, (start, end), Point(middle.x + sign * 14, middle.y - 6))
