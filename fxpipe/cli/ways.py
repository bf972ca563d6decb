"""Steps of samples, padded and packed: as a table, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from rich.console import Console

from fxpipe.cli.lengths import Lengths, Listed
from fxpipe.cost.samples import Way
from fxpipe.errors import number_of
from fxpipe.schedule.units import Units, number_text
from fxpipe.viz.explanation import plain_table
from fxpipe.viz.terminal import terminal


def ways_as_json(
    lengths: Lengths, seed: int, steps: Sequence[Sequence[int]], ways: Sequence[Way]
) -> dict[str, object]:
    """``seconds``: of one step, the mean of all."""
    tokens = sum(map(sum, steps))
    rows = [
        {
            "way": way.name,
            "microbatches": fmean(map(len, way.steps)),
            "longest": max(each.length for step in way.steps for each in step),
            "filled": tokens / way.places,
            "seconds": None if way.seconds is None else way.seconds / len(steps),
            "tokens_per_second": None if way.seconds is None else tokens / way.seconds,
            "limit": way.limit,
        }
        for way in ways
    ]
    drawn = {} if isinstance(lengths, Listed) and len(steps) == 1 else {"seed": seed}
    return {"lengths_of": lengths.text, **drawn, "steps": len(steps), "samples": len(steps[0]), "ways": rows}


#: The most bars of a picture of lengths.
BARS = 48


def ways_as_page(
    lengths: Lengths, seed: int, steps: Sequence[Sequence[int]], ways: Sequence[Way]
) -> dict[str, object]:
    """``ways_as_json`` with what the report draws.  ``bars``: of each the tokens up to which samples are in
    it, their number and their tokens; ``first``: rows and lengths of the microbatches of the first step."""
    record = ways_as_json(lengths, seed, steps, ways)
    samples = [n for step in steps for n in step]
    width = -(-max(samples) // BARS)
    bars = [[width * (k + 1), 0, 0] for k in range(-(-max(samples) // width))]
    for n in samples:
        bars[(n - 1) // width][1] += 1
        bars[(n - 1) // width][2] += n
    rows: list[dict[str, object]] = record["ways"]  # type: ignore[assignment]
    for row, way in zip(rows, ways, strict=True):
        row["first"] = [[each.rows, each.length] for each in way.steps[0]]
    tokens = {"least": min(samples), "longest": max(samples), "mean": fmean(samples)}
    return record | tokens | {"bars": bars}


def large(number: float) -> str:
    """``1_234_567`` to ``1.23 M``."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size:  # from here on three digits of the smaller unit would be 1000
            return f"{number_text(number / size)} {unit}"
    return number_text(number)


def print_ways(
    console: Console,
    lengths: Lengths,
    seed: int,
    steps: Sequence[Sequence[int]],
    ways: Sequence[Way],
    units: Units,
) -> None:
    samples, is_drawn = [n for step in steps for n in step], len(steps) > 1 or not isinstance(lengths, Listed)
    drawn = f"{number_of(len(steps), 'step')} drawn from {lengths.text}, seed {seed}: " if is_drawn else ""
    each = "each of " if len(steps) > 1 else ""
    text = (
        f"{drawn}{each}{number_of(len(steps[0]), 'sample')} of {min(samples)} to {max(samples)} tokens, "
        f"{number_text(fmean(samples))} on average"
    )
    console.print(terminal(text), highlight=False, soft_wrap=True)
    table = plain_table("", "microbatches", "filled", "step", "tokens/s", "limit")
    table.caption = "limit: what keeps the step from being shorter; *: the fastest"
    for column in table.columns[1:5]:
        column.justify, column.no_wrap = "right", True
    best = min((way.seconds for way in ways if way.seconds is not None), default=None)
    for way in ways:
        figures = ["", ""]
        if way.seconds is not None:
            figures = [units.time(way.seconds / len(steps)), large(sum(samples) / way.seconds)]
        row = (
            f"{way.name}{' *' * (way.seconds is not None and way.seconds == best)}",
            f"{fmean(map(len, way.steps)):g}",
            f"{sum(samples) / way.places:.0%}",
            *figures,
            way.limit,
        )
        table.add_row(*map(terminal, row))
    console.print(table)
