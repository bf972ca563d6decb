"""``fxpipe diff``: the decisions and predictions in which two saved pipelines differ."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from fxpipe.errors import number_of, printable
from fxpipe.plan.artifact import Plan
from fxpipe.plan.saved.files import read_plan
from fxpipe.schedule.units import bubble_text, bytes_text, seconds_text
from fxpipe.viz.terminal import say, terminal

#: Ranks, stages or tensors whose differences are listed one by one.
MOST = 8


def diff(options: argparse.Namespace) -> None:
    first, second = read_plan(options.first), read_plan(options.second)
    rows = [*differences(first, second)]
    if options.json:
        print(json.dumps([{"what": what, "first": a, "second": b} for what, a, b in rows]))
        return
    console = Console(markup=False, emoji=False)
    if not rows:
        say(console, f"{options.first} and {options.second} have the same plan.")
        return
    table = Table("", *(printable(str(path)) for path in (options.first, options.second)))
    for row in rows:
        table.add_row(*map(terminal, row))
    console.print(table)


def differences(first: Plan, second: Plan) -> Iterator[tuple[str, str, str]]:
    """What differs, with its text in both plans; not the candidates that were left out."""
    for name, a, b in zip(_NAMES, _facts(first), _facts(second), strict=True):
        if a != b:
            yield name, a, b
    for kind, ours, theirs in (
        ("stage {}", _stages(first), _stages(second)),
        ("order of rank {}", *_orders(first, second)),
        ("rank {} holds", _tensors(first), _tensors(second)),
    ):
        if len(ours) != len(theirs):
            continue  # the number of ranks or stages is in the table
        differ = [k for k, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
        for k in differ[:MOST]:
            yield kind.format(k), ours[k], theirs[k]
        if len(differ) > MOST:
            yield f"… and {len(differ) - MOST} more", "", ""


_NAMES = (
    "model", "ranks", "microbatches", "schedule", "stages", "placement", "recompute", "offloaded to",
    "replicas", "shard", "gradients in", "device", "step", "span bubble", "peak of activations",
)  # fmt: skip


def _facts(plan: Plan) -> tuple[str, ...]:
    prediction = plan.prediction
    return (
        plan.model,
        str(plan.ranks),
        str(plan.step.microbatches),
        plan.schedule,
        str(len(plan.stages)),
        " ".join(map(str, plan.placement)),
        plan.recompute or "nothing",
        f"{plan.tier}, {number_of(len(plan.transfers), 'transfer')}" if plan.transfers else "nowhere",
        str(plan.replicas),
        plan.shard or "nothing",
        plan.grad_dtype.removeprefix("torch.") or "the parameters' own dtype",
        plan.device or "unknown",
        seconds_text(prediction.seconds),
        bubble_text(prediction.span_bubble),
        bytes_text(max(prediction.peak_memory)),
    )


def _stages(plan: Plan) -> list[str]:
    return [
        f"{stage.modules or 'the model itself'}: {number_of(len(stage.parameters), 'parameter')}, "
        f"{seconds_text(cost.total)}"
        for stage, cost in zip(plan.stages, plan.costs.stages, strict=True)
    ]


def _tensors(plan: Plan) -> list[str]:
    return [
        f"{number_of(len(tensors.parameters), 'parameter')}, {number_of(len(tensors.buffers), 'buffer')}, "
        f"{number_of(len(tensors.gradients), 'gradient')}"
        for tensors in plan.tensors
    ]


def _orders(first: Plan, second: Plan) -> tuple[list[str], list[str]]:
    """Show of each rank the ops from the first that differs on."""
    if len(first.order) != len(second.order):
        return [], []
    pairs = [_from_first_difference(*both) for both in zip(first.order, second.order, strict=True)]
    return [a for a, _ in pairs], [b for _, b in pairs]


def _from_first_difference(ours: str, theirs: str) -> tuple[str, str]:
    first, second = ours.split(), theirs.split()
    at = next((k for k, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    if at is None:
        at = min(len(first), len(second))
        if len(first) == len(second):
            return "", ""
    show = [" ".join(ops[at : at + 4]) or "ends" for ops in (first, second)]
    return f"op {at}: {show[0]} …", f"op {at}: {show[1]} …"
