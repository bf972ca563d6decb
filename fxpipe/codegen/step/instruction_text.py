"""Instructions as lines of Python in which the microbatch is open: ``m``, an argument of the function around.

A line has holes for the values that it reads and gives; :mod:`.lifetimes` decides how they are written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import NamedTuple

from fxpipe.codegen.expressions import KEY, variable
from fxpipe.codegen.signatures import LISTS, Signature
from fxpipe.codegen.step.step_plan import StepPlan
from fxpipe.ir.graph import Kind
from fxpipe.ir.names import text_literal
from fxpipe.schedule.lowering import instructions as ins
from fxpipe.schedule.ops import PHASES, Color, Direction, Op, Phase, Transfer

OfMicrobatch = (
    ins.Compute
    | ins.PostRecv
    | ins.Wait
    | ins.Send
    | ins.StartCollective
    | ins.WaitCollective
    | ins.StartTransfer
    | ins.WaitTransfer
)


class Use(Enum):
    """``PENDING``: the line uses what a receive or a collective returned in the place of a value to come."""

    READ = "read"
    GIVE = "give"
    PENDING = "pending"


class Hole(NamedTuple):
    """The place of a value in a line."""

    use: Use
    name: str


Line = tuple["str | Hole", ...]


def lines_of(plan: StepPlan, instruction: OfMicrobatch) -> list[Line]:
    match instruction:
        case ins.Compute(op):
            return _op(plan, op)
        case ins.PostRecv(messages) | ins.Wait(messages) | ins.Send(messages):
            return [_message(plan, instruction, messages)]
        case ins.StartCollective(collective):
            return _start(plan, collective)
        case ins.WaitCollective(collective):
            return _wait(plan, collective)
        case ins.StartTransfer(transfer) | ins.WaitTransfer(transfer):
            return [_transfer(instruction, transfer)]


def _read(name: str) -> Hole:
    return Hole(Use.READ, name)


def _give(name: str) -> Hole:
    return Hole(Use.GIVE, name)


def _joined(items: Iterable[str | Hole]) -> Line:
    """The items with commas between them."""
    return tuple(part for item in items for part in (", ", item))[1:]


def _listed(items: list[str | Hole]) -> Line:
    return _joined(items) if len(items) == 1 else ("[", *_joined(items), "]")


def _layout(plan: StepPlan, name: str) -> str:
    return f"{'layouts[m]' if plan.lengths else 'MESSAGES'}[{text_literal(name)}]"


def _arrives(pending: str) -> Line:
    return _give(pending), " = rt.wait(", Hole(Use.PENDING, pending), ")"


def _message(
    plan: StepPlan, instruction: ins.PostRecv | ins.Wait | ins.Send, messages: tuple[ins.Message, ...]
) -> Line:
    """The line that posts messages, waits for them or sends them: of one value, or of several."""
    edge = messages[0].edge
    named = [(name, message.edge.target) for message in messages for name in plan.names(message.edge)]
    arriving = [plan.arriving(name, target.stage) for name, target in named]
    layouts = _listed([_layout(plan, name) for name, _ in named])
    pending = f"from_{plan.op_name(edge.source)}_to_{plan.op_name(edge.target)}"
    match instruction:
        case ins.PostRecv():
            left = Hole(Use.PENDING, arriving[0]) if len(named) == 1 else _give(pending)
            return left, " = rt.receive(", *layouts, f", source={plan.placement[edge.source.stage]})"
        case ins.Wait() if len(named) == 1:
            return _arrives(arriving[0])
        case ins.Wait():
            return *_joined(map(_give, arriving)), " = rt.wait_all(", _read(pending), ")"
        case ins.Send():
            sent = _listed([_read(variable(name)) for name, _ in named])
            return "rt.send(", *sent, ", ", *layouts, f", to={plan.placement[edge.target.stage]})"


def handles(transfer: Transfer) -> str:
    """The variable of the list that is offloaded, and its place."""
    return f"{LISTS[Phase.F, transfer.user, Kind.OFFLOADED]}{transfer.stage}"


def place(transfer: Transfer) -> str:
    """The parameter for the place in the pool."""
    return f"at_{transfer.user}"


def _transfer(instruction: ins.StartTransfer | ins.WaitTransfer, transfer: Transfer) -> Line:
    values = Hole(Use.PENDING, handles(transfer))
    match instruction, transfer.direction:
        case ins.WaitTransfer(), _:
            return f"rt.wait_{transfer.direction}(", values, ")"
        case _, Direction.IN:
            return "rt.reload(", values, ")"
        case _:
            return "rt.offload(", values, f", at={place(transfer)})"


def _start(plan: StepPlan, collective: ins.Collective) -> list[Line]:
    of_ranks = plan.collected[collective]
    if collective.kind is ins.CollectiveKind.BROADCAST:
        return [_broadcast(plan, collective, name) for name in of_ranks[0]]
    return [
        _give_own(plan, collective, name, f"collective{collective.number}_{k}")
        for k, name in enumerate(of_ranks[plan.rank])
    ]


def _broadcast(plan: StepPlan, collective: ins.Collective, name: str) -> Line:
    source = plan.placement[collective.sources[0].stage]
    call = f", {_layout(plan, name)}, source={source}, group={collective.group})"
    if source == plan.rank:
        return "rt.broadcast(", _read(variable(name)), call
    return Hole(Use.PENDING, _broadcasted(plan, collective, name)), f" = rt.broadcast(None{call}"


def _broadcasted(plan: StepPlan, collective: ins.Collective, name: str) -> str:
    """The variable of a value that a broadcast brings to this rank."""
    return plan.arriving(name, plan.own_end(collective.targets).stage)


def _give_own(plan: StepPlan, collective: ins.Collective, name: str, pending: str) -> Line:
    """The line with which this rank gives its own value to a collective of all."""
    value, group = _read(variable(name)), f"group={collective.group})"
    if collective.kind is ins.CollectiveKind.ALL_GATHER:
        return _give(pending), " = rt.all_gather(", value, f", {_layout(plan, name)}, {group}"
    target = plan.placement[collective.targets[0].stage]
    call: Line = "rt.reduce(", value, f", {_layout(plan, name)}, to={target}, {group}"
    total = Hole(Use.PENDING, variable(plan.sums[name]))
    return (total, " = ", *call) if target == plan.rank else call


def _wait(plan: StepPlan, collective: ins.Collective) -> list[Line]:
    of_ranks = plan.collected[collective]
    if collective.kind is ins.CollectiveKind.BROADCAST:
        return [_arrives(_broadcasted(plan, collective, name)) for name in of_ranks[0]]
    if collective.kind is ins.CollectiveKind.REDUCE:
        return [_arrives(variable(plan.sums[name])) for name in of_ranks[0]]
    lines: list[Line] = []
    for k in range(len(of_ranks[0])):
        arrived = [
            _give(variable(names[k])) if rank != plan.rank else "_" for rank, names in enumerate(of_ranks)
        ]
        pending = _read(f"collective{collective.number}_{k}")
        lines.append((*_joined(arrived), " = rt.wait_all(", pending, ")"))
    return lines


def _op(plan: StepPlan, op: Op) -> list[Line]:
    colors = [Color(op.stage, phase) for phase in PHASES[op.kind]]
    calls = [line for c in colors if c in plan.calls for line in _call(plan, plan.calls[c], op.stage)]
    return [(f'rt.op(f"{op.kind}{op.stage}.{{m}}")',), *calls] if calls else []


def _key(container: str) -> str:
    """A container, or the call that gives a key of random numbers."""
    if (key := KEY.fullmatch(container)) is None:
        return container
    lanes = "".join(f", {number}" for number in key.groups() if number is not None)
    return f"rt.{'key' if container == 'key' else 'lane_key'}(m{lanes})"


def _call(plan: StepPlan, call: Signature, stage: int) -> Iterator[Line]:
    """The call of one section's function."""
    by_microbatch = {"batch": "batches[m]"} | {name: f"{name}[m]" for name in plan.lengths}
    arguments: list[str | Hole] = [by_microbatch.get(name) or _key(name) for name in call.containers]
    arguments += [_read(f"{name}{stage}") for name in call.lists_in]
    arguments += [_read(plan.arriving(name, stage)) for name in call.values_in]
    targets: list[str | Hole] = [_give(variable(name)) for name in call.values_out]
    for value in call.results:
        is_buffer = value.kind is Kind.BUFFER
        targets.append(f"buffers[{text_literal(value.name)}]" if is_buffer else _give(value.name))
    targets += [_give(f"{name}{stage}") for name in call.lists_out]
    left = (*_joined(targets), " = ") if targets else ()
    yield *left, f"{call.name}(", *_joined(arguments), ")"
    results = [_read(v.name) for v in call.results if v.kind in (Kind.LOSS, Kind.COUNT)]
    if results:
        yield "rt.add_loss(", *_joined(results), ")"
    for name, value in plan.parts.outputs.items():
        is_result = value in call.results
        if is_result or (value.kind is Kind.OUTPUT and value.name in call.values_out):
            output = _read(value.name if is_result else variable(value.name))
            yield f"rt.add_output({text_literal(name)}, ", output, ", microbatch=m)"
