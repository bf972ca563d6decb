"""Lays out the boxes of the collapsed graph on a grid, in points, y downwards.

before: boxes
after:  a frame for each stage, in it a row for each module: F in the left column, B in the right one,
        W between them and half a row below

graphviz routes the flows between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fxpipe.schedule.ops import Phase
from fxpipe.viz.graph.boxes import Boxes, BoxKey

COLUMNS = (Phase.F, Phase.W, Phase.B)
HEIGHT = 30.0  # of a box
ROW = 66.0  # from one row to the next
GAP = 66.0  # between columns: room for a label
MARGIN = 82.0  # beside the columns: room for flows and their labels
HEAD = 56.0  # above the first row of a frame: room for its title
LETTER = 5.6  # width of a letter of a box's text


class Position(NamedTuple):
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Frame:
    left: float
    top: float
    right: float
    bottom: float


@dataclass(frozen=True)
class GraphLayout:
    """``centers`` of the boxes, all of one ``width``; ``frames`` by stage."""

    width: float
    centers: dict[BoxKey, Position]
    frames: tuple[Frame, ...]


def lay_out(boxes: Boxes, stages: int, letters: int) -> GraphLayout:
    """letters: the number of letters of the longest line of text in a box."""
    width = max(100.0, letters * LETTER + 14)
    phases = {box.place.color.phase for box in boxes.boxes}
    x_of = {phase: i * (width + GAP) for i, phase in enumerate(p for p in COLUMNS if p in phases)}
    left, right = min(x_of.values()) - width / 2 - MARGIN, max(x_of.values()) + width / 2 + MARGIN
    centers: dict[BoxKey, Position] = {}
    frames = []
    y = 0.0
    for stage in range(stages):
        top = y
        y += HEAD + HEIGHT / 2
        rows: dict[str, float] = {}
        for place in (box.place for box in boxes.boxes if box.place.color.stage == stage):
            row = rows.setdefault(place.path, y + len(rows) * ROW)
            lowered = place.color.phase is Phase.W
            centers[place] = Position(x_of[place.color.phase], row + ROW / 2 * lowered)
        y += len(rows) * ROW
        frames.append(Frame(left, top, right, y - HEIGHT / 2))
        y += 10
    return GraphLayout(width, centers, tuple(frames))
