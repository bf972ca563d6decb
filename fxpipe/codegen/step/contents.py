"""The contents of a rank's program, for its docstring: sections, messages, and the order of its ops."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from fxpipe.codegen.rank_plan import RankPlan
from fxpipe.codegen.step.actions import kind_of
from fxpipe.codegen.wrapping import WIDTH
from fxpipe.ir.graph import Kind, Value
from fxpipe.ir.step_invariants import once_bytes
from fxpipe.ir.storage import node_bytes
from fxpipe.schedule.lowering import instructions as ins
from fxpipe.schedule.ops import Color, Direction, Phase, arrival
from fxpipe.schedule.units import bytes_text, seconds_text

#: An order of more ops is shortened to its beginning and its end.
MOST_OPS = 32

_Row = tuple[str, ...]


def contents(plan: RankPlan, ops: Sequence[str]) -> list[str]:
    """ops: those that the step calls."""
    lines = ["Sections, as predicted for a microbatch:", *_table(_section(plan, s.color) for s in plan.own)]
    if once := plan.nodes.once:
        lines += ["", f"Once a step: once_a_step, holds {bytes_text(once_bytes(once))}"]
    kinds: dict[object, ins.Instruction] = {}
    for i in plan.instructions:
        if isinstance(i, ins.PostRecv | ins.Send | ins.StartCollective):
            kinds.setdefault(kind_of(i), i)
    called = {op.partition(".")[0] for op in ops}
    messages = list(dict.fromkeys(row for i in kinds.values() for row in _messages(plan, i, called)))
    if messages:
        lines += ["", "Messages, of a microbatch:", *_table(messages)]
    sums = [_sum(plan, i) for i in plan.instructions if isinstance(i, ins.AllReduceGradient)]
    if sums:
        lines += ["", "Sums over ranks, at the end of the step:", *_table(sums)]
    if offloaded := list(_offloaded(plan)):
        lines += ["", "Offloaded, of a microbatch:", *_table(offloaded)]
    if buckets := list(_buckets(plan)):
        lines += ["", "Buckets of parameters, over the replicas of a job that has several:", *_table(buckets)]
    return [*lines, "", "Order:", *_order(ops)]


def _section(plan: RankPlan, color: Color) -> _Row:
    cost = plan.costs.stages[color.stage]
    if all(section.color != Color(color.stage, Phase.W) for section in plan.own):  # B and W are one op
        cost = replace(cost, backward=cost.backward + cost.weight, saved_for_weight=0.0)
    seconds, kept, user = {
        Phase.F: (cost.forward, cost.saved_activations, Phase.B),
        Phase.B: (cost.backward, cost.saved_for_weight, Phase.W),
        Phase.W: (cost.weight, 0, None),
    }[color.phase]
    op, until = plan.op_name(color), "" if user is None else plan.op_name(Color(color.stage, user))
    keeps = f"keeps {bytes_text(kept)} until {until}" if kept and until != op else ""
    return op, plan.calls[color].name, seconds_text(seconds), keeps


def _messages(plan: RankPlan, instruction: ins.Instruction, called: AbstractSet[str]) -> Iterator[_Row]:
    """called: the names of the ops that the step calls."""
    match instruction:
        case ins.PostRecv(messages):
            yield from (row for message in messages for row in _message(plan, message, "from", 0))
        case ins.Send(messages):
            yield from (row for message in messages for row in _message(plan, message, "to", 1))
        case ins.StartCollective(collective):
            yield from _collective(plan, collective, called)


def _message(plan: RankPlan, message: ins.Message, word: str, end: int) -> Iterator[_Row]:
    ends = message.edge.source, arrival(message.edge.target)
    rank = plan.placement[ends[end].stage]
    for name in plan.names(message.edge):
        yield _arrow(plan, *ends), f"{word} rank {rank}", name, _size(plan, name)


def _collective(plan: RankPlan, collective: ins.Collective, called: AbstractSet[str]) -> Iterator[_Row]:
    of_ranks = plan.collected[collective]
    source, target = map(plan.own_end, (collective.sources, collective.targets))
    if plan.placement[target.stage] == plan.rank and plan.op_name(target) not in called:
        target = Color(target.stage, Phase.W)  # a B that need not wait, as its own rank sends the value
    for name in of_ranks[0] if len(of_ranks) == 1 else of_ranks[plan.rank]:
        yield _arrow(plan, source, target), str(collective.kind), name, _size(plan, name)


def _arrow(plan: RankPlan, source: Color, target: Color) -> str:
    return f"{plan.op_name(source)} -> {plan.op_name(target)}"


def _sum(plan: RankPlan, instruction: ins.AllReduceGradient) -> _Row:
    others = [str(rank) for rank in instruction.ranks if rank != plan.rank]
    gradient = Value(Kind.GRADIENT, instruction.name)
    size = next(  # of a rank that adds to it, which this one need not
        node_bytes(node)
        for section in plan.sections
        for node, value in zip(section.graph.find_nodes(op="placeholder"), section.inputs, strict=True)
        if value == gradient
    )
    with_ranks = f"with {'rank' if len(others) == 1 else 'ranks'} {', '.join(others)}"
    return "all-reduce", with_ranks, f"the gradient of {instruction.name}", bytes_text(size)


def _offloaded(plan: RankPlan) -> Iterator[_Row]:
    """What of a stage's activation waits in the pool for B or W, and of how many microbatches."""
    out = (i.transfer for i in plan.instructions if isinstance(i, ins.StartTransfer))
    count = Counter((t.stage, t.user) for t in out if t.direction is Direction.OUT)
    sizes: Counter[tuple[str, int]] = Counter()
    for section in plan.own:
        ends = _arrow(plan, Color(section.stage, Phase.F), section.color)
        nodes = section.graph.find_nodes(op="placeholder")
        pairs = zip(nodes, section.inputs, strict=True)
        size = sum(node_bytes(node) for node, value in pairs if value.kind is Kind.OFFLOADED)
        sizes[ends, count[section.stage, section.phase]] += size
    for (ends, moved), size in sizes.items():
        if moved:
            yield ends, bytes_text(size), f"microbatches: {moved}"


def _buckets(plan: RankPlan) -> Iterator[_Row]:
    gathered = {i.bucket for i in plan.instructions if isinstance(i, ins.GatherParameters)}
    summed = {i.bucket for i in plan.instructions if isinstance(i, ins.ReduceGradients)}
    for k in sorted(gathered | summed):
        bucket, size = plan.buckets[k]
        begun = [f"gathered before {bucket.before}"] if k in gathered else []
        ended = [f"summed after {bucket.after}"] if k in summed else []
        names = f"parameters: {len(bucket.gradients)}"
        yield str(k), ", ".join(begun + ended), names, bytes_text(size)


def _size(plan: RankPlan, name: str) -> str:
    return bytes_text(plan.tensors[name].nbytes)


def _table(rows: Iterable[Sequence[str]]) -> list[str]:
    """The rows with their cells in columns."""
    lines = list(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    cells = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in lines)
    return [f"  {'  '.join(row)}".rstrip() for row in cells]


def _order(ops: Sequence[str]) -> list[str]:
    if len(ops) > MOST_OPS:
        half = MOST_OPS // 2
        ops = [*ops[:half], f"… {len(ops) - MOST_OPS} more …", *ops[-half:]]
    return textwrap.wrap(" ".join(ops), WIDTH, initial_indent="  ", subsequent_indent="  ")
