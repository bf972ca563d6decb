"""The contents of a rank's program, for its docstring: sections, messages, and the order of its ops."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from fxpipe.codegen.actions import kind_of
from fxpipe.codegen.lines import color_text
from fxpipe.codegen.rank_plan import RankPlan
from fxpipe.codegen.wrapping import WIDTH
from fxpipe.ir.once import once_bytes
from fxpipe.schedule.lowering.instructions import (
    Collective,
    Compute,
    Instruction,
    Message,
    PostRecv,
    Send,
    StartCollective,
)
from fxpipe.schedule.ops import Color, Phase
from fxpipe.schedule.units import bytes_text, seconds_text

#: An order of more ops is shortened to its beginning and its end.
MOST_OPS = 64


def contents(plan: RankPlan) -> list[str]:
    lines = ["Sections, as predicted for a microbatch:", *_table(_section(plan, s.color) for s in plan.own)]
    if plan.once:
        lines += ["", f"Once a step: once_a_step, holds {bytes_text(once_bytes(plan.once))}"]
    kinds: dict[object, Instruction] = {}
    for i in plan.instructions:
        if isinstance(i, PostRecv | Send | StartCollective):
            kinds.setdefault(kind_of(i), i)
    messages = list(dict.fromkeys(row for i in kinds.values() for row in _messages(plan, i)))
    if messages:
        lines += ["", "Messages, of a microbatch:", *_table(messages)]
    ops = [str(i.op) for i in plan.instructions if isinstance(i, Compute)]
    return [*lines, "", "Order:", *_order(ops)]


def _section(plan: RankPlan, color: Color) -> tuple[str, ...]:
    cost = plan.costs.stages[color.stage]
    if all(section.color != Color(color.stage, Phase.W) for section in plan.own):  # B and W are one op
        cost = replace(cost, backward=cost.backward + cost.weight, saved_for_weight=0.0)
    seconds, kept, user = {
        Phase.F: (cost.forward, cost.saved_activations, Phase.B),
        Phase.B: (cost.backward, cost.saved_for_weight, Phase.W),
        Phase.W: (cost.weight, 0, None),
    }[color.phase]
    keeps = f"keeps {bytes_text(kept)} until {user}{color.stage}" if kept else ""
    return color_text(color), plan.calls[color].name, seconds_text(seconds), keeps


def _messages(plan: RankPlan, instruction: Instruction) -> Iterator[tuple[str, ...]]:
    match instruction:
        case PostRecv(messages):
            yield from (row for message in messages for row in _message(plan, message, "from", 0))
        case Send(messages):
            yield from (row for message in messages for row in _message(plan, message, "to", 1))
        case StartCollective(collective):
            yield from _collective(plan, collective)


def _message(plan: RankPlan, message: Message, word: str, end: int) -> Iterator[tuple[str, ...]]:
    ends = message.edge.source, message.edge.target
    rank = plan.placement[ends[end].stage]
    for name in plan.names(message.edge):
        yield (
            f"{color_text(ends[0])} -> {color_text(ends[1])}",
            f"{word} rank {rank}",
            name,
            _size(plan, name),
        )


def _collective(plan: RankPlan, collective: Collective) -> Iterator[tuple[str, ...]]:
    given = plan.collected[collective]
    ends = _arrow(collective.sources[0], collective.targets[0])
    for name in given[0] if len(given) == 1 else given[plan.rank]:
        yield ends, str(collective.kind), name, _size(plan, name)


def _arrow(source: Color, target: Color) -> str:
    return f"{color_text(source)} -> {color_text(target)}"


def _size(plan: RankPlan, name: str) -> str:
    tensor = plan.tensors[name]
    return bytes_text(tensor.numel() * tensor.element_size())


def _table(rows: Iterable[Sequence[str]]) -> list[str]:
    """The rows with their cells in columns."""
    found = list(rows)
    widths = [max(map(len, column)) for column in zip(*found, strict=True)]
    cells = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in found)
    return [f"  {'  '.join(row)}".rstrip() for row in cells]


def _order(ops: Sequence[str]) -> list[str]:
    if len(ops) > MOST_OPS:
        half = MOST_OPS // 2
        ops = [*ops[:half], f"… {len(ops) - MOST_OPS} more …", *ops[-half:]]
    return textwrap.wrap(" ".join(ops), WIDTH, initial_indent="  ", subsequent_indent="  ")
