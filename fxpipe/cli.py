"""``fxpipe …``: one function a subcommand.

A subcommand takes its parsed arguments; errors of fxpipe become one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from fxpipe.errors import FxpipeError
from fxpipe.schedule.costs import StageCost, chain
from fxpipe.schedule.families import FAMILIES, build
from fxpipe.schedule.placement import PLACEMENTS
from fxpipe.schedule.simulator import simulate
from fxpipe.schedule.timeline import Timeline
from fxpipe.train import train


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code; ``arguments`` default to those of the process."""
    parser = _Parser(prog="fxpipe", description="A pipeline-parallel compiler for PyTorch.")
    commands = parser.add_subparsers(metavar="command", required=True, parser_class=_Parser)
    _add_simulate(commands)
    _add_run(commands)
    options = parser.parse_args(arguments)
    try:
        options.command(options)
    except FxpipeError as error:
        print(f"fxpipe: error: {error}", file=sys.stderr)
        return 2
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without the usage."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def _add_simulate(commands: Any) -> None:
    parser = commands.add_parser(
        "simulate",
        help="predict bubble and memory of a schedule",
        description="Predicts bubble and memory of a schedule from the times of one rank.",
        epilog="Times are per microbatch and per rank: a chunk of V costs 1/V of them. "
        "Memory is in units of one microbatch's activations on one rank.",
    )
    parser.set_defaults(command=_simulate)
    add = parser.add_argument
    add("--schedule", required=True, metavar="NAME", help=f"one of: {', '.join(FAMILIES)}")
    add("--ranks", required=True, type=_positive_int, metavar="P")
    add("--microbatches", required=True, type=_positive_int, metavar="M")
    add("--forward", required=True, type=_positive, metavar="TF", help="seconds, or any unit of time")
    add("--backward-input", required=True, type=_positive, metavar="TB")
    add("--backward-weight", required=True, type=_positive, metavar="TW")
    add("--comm", type=_non_negative, default=0.0, metavar="TC", help="one transfer between two ranks (0)")
    add("--stages-per-rank", type=_positive_int, default=1, metavar="V", help="chunks a rank holds (1)")
    add("--placement", choices=sorted(PLACEMENTS), default="plain", help="of the chunks on the ranks (plain)")
    add(
        "--weight-memory",
        type=_share,
        default=1.0,
        metavar="X",
        help="share of the activations that W still needs (1: B frees nothing)",
    )
    add("--json", action="store_true", help="print one JSON object")


def _simulate(options: argparse.Namespace) -> None:
    chunks = options.stages_per_rank
    stage = StageCost(
        forward=options.forward / chunks,
        backward=options.backward_input / chunks,
        weight=options.backward_weight / chunks,
        saved=1 / chunks,
        kept=options.weight_memory / chunks,
    )
    costs = chain([stage] * (options.ranks * chunks), seconds=options.comm)
    schedule = build(
        options.schedule,
        ranks=options.ranks,
        microbatches=options.microbatches,
        costs=costs,
        stages_per_rank=chunks,
        placement=options.placement,
    )
    timeline = simulate(schedule, costs)
    if options.json:
        print(json.dumps(_figures(timeline)))
    else:
        _print_table(timeline)


def _add_run(commands: Any) -> None:
    parser = commands.add_parser(
        "run",
        help="train a saved pipeline (under torchrun)",
        description="Trains a saved pipeline: torchrun --nproc-per-node RANKS -m fxpipe run DIR --data FILE",
    )
    parser.set_defaults(command=_run)
    add = parser.add_argument
    add("directory", type=Path, help="what pipe.save wrote")
    add("--data", required=True, type=Path, metavar="FILE", help="safetensors, a tensor for each batch leaf")
    add("--steps", type=_positive_int, metavar="N", help="(once through the data)")
    add("--lr", type=_positive, default=3e-4, metavar="X", help="of AdamW (3e-4)")
    add("--clip-grad-norm", type=_positive, metavar="X", help="of the whole model (no clipping)")
    add("--save", type=Path, metavar="DIR", help="save the trained pipeline there")


def _run(options: argparse.Namespace) -> None:
    train(options.directory, options.data, options.steps, options.lr, options.clip_grad_norm, options.save)


def _figures(timeline: Timeline) -> dict[str, Any]:
    return {
        "schedule": timeline.schedule.name,
        "placement": timeline.schedule.placement,
        "microbatches": timeline.schedule.microbatches,
        "seconds": timeline.seconds,
        "lower_bound": timeline.lower_bound,
        "span_bubble": timeline.span_bubble,
        "makespan_bubble": timeline.makespan_bubble,
        "busy": timeline.busy,
        "peak_memory": timeline.peak_memory,
    }


def _print_table(timeline: Timeline) -> None:
    schedule = timeline.schedule
    table = Table("rank", "stages", "busy", "idle", "peak memory")
    for column in table.columns[2:]:
        column.justify = "right"
    for rank, (busy, peak) in enumerate(zip(timeline.busy, timeline.peak_memory, strict=True)):
        stages = " ".join(str(s) for s, home in enumerate(schedule.placement) if home == rank)
        table.add_row(str(rank), stages, f"{busy:.6g}", f"{timeline.seconds - busy:.6g}", f"{peak:.6g}")
    console = Console()
    console.print(f"{schedule.name}: {schedule.ranks} ranks, {schedule.microbatches} microbatches")
    console.print(table)
    console.print(
        f"time {timeline.seconds:.6g}, lower bound {timeline.lower_bound:.6g}\n"
        f"span bubble {timeline.span_bubble:.4f}, makespan bubble {timeline.makespan_bubble:.4f}"
    )


def _positive_int(text: str) -> int:
    number = _number(text, int, "a whole number")
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return int(number)


def _positive(text: str) -> float:
    number = _non_negative(text)
    if number == 0:
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return number


def _non_negative(text: str) -> float:
    number = _number(text, float, "a number")
    if not isfinite(number) or number < 0:
        raise argparse.ArgumentTypeError(f"{text} must be finite and not negative")
    return number


def _share(text: str) -> float:
    number = _non_negative(text)
    if number > 1:
        raise argparse.ArgumentTypeError(f"{text} must be from 0 to 1")
    return number


def _number(text: str, of: type[int] | type[float], what: str) -> float:
    try:
        return of(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from None
