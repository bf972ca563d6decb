"""A simulated step as text for a terminal: a row per rank, ops as colored blocks with their microbatch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from fxpipe.errors import number_of, printable
from fxpipe.schedule.ops import Op
from fxpipe.schedule.simulation.timeline import Timeline
from fxpipe.viz import palette
from fxpipe.viz.roles import MEANING, Role, color, role

ROWS = 32
"""Maximum number of rows: the first and the last ranks."""


def terminal(text: str) -> Text:
    """Text for rich, without markup, emoji codes or control characters other than line breaks."""
    return Text("\n".join(map(printable, text.split("\n"))))


def say(console: Console, *lines: str, style: str | None = None) -> None:
    """Print lines, which the terminal wraps if it is too narrow."""
    for line in lines:
        console.print(terminal(line), soft_wrap=True, style=style)


def add_ends(table: Table, rows: Sequence[Sequence[str]]) -> None:
    """Add a row for each rank; of many, the first and the last."""
    half = ROWS // 2
    for row in rows if len(rows) <= ROWS else [*rows[:half], ("…",), *rows[-half:]]:
        table.add_row(*row)


def timeline_text(timeline: Timeline, width: int, colored: bool) -> Text:
    """The step in ``width`` cells; a cell shows the op that its rank runs in the middle of the cell's time.

    Neighboring microbatches, and the stages of one rank, differ in shade.  Without color, a block begins
    with its letter: ``F0··F1··B0··``.
    """
    ranks = range(timeline.schedule.ranks)
    # The first and the last ranks: those between look like their neighbors.
    shown = ranks if len(ranks) <= ROWS else [*ranks[: ROWS // 2], *ranks[-ROWS // 2 :]]
    label = len(str(ranks[-1])) + 1
    text = Text(no_wrap=True, overflow="crop")
    for before, rank in pairwise([-1, *shown]):
        if rank != before + 1:
            text.append(f"{'…':<{label}}{number_of(rank - before - 1, 'more rank')}\n", "dim")
        text.append(f"{rank:<{label}}", "dim")
        for op, cells in _blocks(timeline, rank, max(1, width - label)):
            text.append(*_block(timeline, op, cells, colored))
        text.append("\n")
    shown_roles = {role(span.op, timeline.schedule) for spans in timeline.spans for span in spans}
    text.append(" " * label)
    for what in sorted(shown_roles, key=list(Role).index):
        key = f" {what} " if colored else f"{_letter(what)} "
        text.append(key, Style(color="black", bgcolor=color(what)) if colored else "")
        text.append(f" {MEANING[what]}   " if colored else f"{MEANING[what]}   ")
    return text


def _blocks(timeline: Timeline, rank: int, width: int) -> Iterator[tuple[Op | None, int]]:
    """The ops with their numbers of cells; None for idle cells."""
    begin = min(spans[0].start for spans in timeline.spans if spans)
    spans = timeline.spans[rank]

    def ops() -> Iterator[Op | None]:
        position = 0
        for cell in range(width):
            # By its middle, a cell belongs to one op; ops shorter than a cell may not show.
            time = begin + (cell + 0.5) / width * timeline.seconds
            while position < len(spans) and spans[position].end <= time:
                position += 1
            running = position < len(spans) and spans[position].start <= time
            yield spans[position].op if running else None

    for op, cells in groupby(ops()):
        yield op, sum(1 for _ in cells)


def _block(timeline: Timeline, op: Op | None, cells: int, colored: bool) -> tuple[str, Style]:
    if op is None:
        return " " * cells, Style()
    number, schedule = str(op.microbatch), timeline.schedule
    shown = role(op, schedule)
    if not colored:
        text = f"{_letter(shown)}{number}"
        return (text if len(text) <= cells else _letter(shown)).ljust(cells, "·"), Style()
    # By shade alone: the letters of two stages are the same.
    earlier = [s for s in range(op.stage) if schedule.placement[s] == schedule.placement[op.stage]]
    late = not schedule.is_vocabulary(op.stage) and any(not schedule.is_vocabulary(s) for s in earlier)
    # Two shades for neighboring microbatches, which later stages of the rank have paler.
    shade = palette.tint(color(shown), 0.22 * (op.microbatch % 2) + 0.4 * late)
    return (number if len(number) <= cells else "").center(cells), Style(color="black", bgcolor=shade)


def _letter(shown: Role) -> str:
    return str(shown)[0]
