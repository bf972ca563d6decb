"""The instructions of a rank as actions on microbatches: all instructions of a kind are one action."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import NamedTuple

from fxpipe.codegen.step.instruction_text import Line, OfMicrobatch, lines_of, place
from fxpipe.codegen.step.step_plan import StepPlan
from fxpipe.ir.names import unused
from fxpipe.schedule.lowering import instructions as ins
from fxpipe.schedule.ops import Color, Direction, Op, arrival


class ActionPlace(Enum):
    """The place of an action in the function of an op, if each op of that kind has it there."""

    BEFORE = "before"
    OP = "op"
    AFTER = "after"
    APART = "apart"


@dataclass(frozen=True, eq=False)
class Action:
    """``name``, ``doc``, ``parameters``: of its function, if it has one of its own; beside the microbatch.
    One without ``lines`` does nothing, unless its name is a method of ``rt``."""

    name: str
    doc: str
    role: ActionPlace
    lines: tuple[Line, ...]
    parameters: tuple[str, ...] = ()


class Done(NamedTuple):
    """An action for one microbatch, or for one bucket of gradients."""

    action: Action
    microbatch: int
    arguments: tuple[int, ...] = ()


VALIDATED = Done(Action("", "", ActionPlace.APART, ()), 0)
"""The end of the warm-up, which does nothing itself."""


def actions(plan: StepPlan) -> list[Done]:
    """The rank's instructions in order, but those on the gradients of the whole batch."""
    known: dict[object, Action] = {}
    done = []
    for together in _together(plan.instructions):
        if isinstance(together, ins.Validate):
            done.append(VALIDATED)
            continue
        if not isinstance(together, list):
            lanes = together.lanes if isinstance(together, ins.SumOverLanes) else ()
            done.append(Done(_OF_RT[type(together)], together.bucket, lanes))
            continue
        first, key = together[0], tuple(map(kind_of, together))
        if key not in known:
            known[key] = _action(plan, together, {action.name for action in known.values()})
        done.append(Done(known[key], _microbatch(first), _arguments(plan, together)))
    return done


_OF_RT = {
    kind: Action(f"rt.{name}", "", ActionPlace.APART, ())
    for kind, name in (
        (ins.GatherParameters, "gather_parameters"),
        (ins.WaitParameters, "wait_parameters"),
        (ins.FreeParameters, "free_parameters"),
        (ins.SumOverLanes, "sum_over_lanes"),
        (ins.ReduceGradients, "reduce_gradients"),
    )
}


def _together(
    instructions: Sequence[ins.Instruction],
) -> Iterator[list[OfMicrobatch] | ins.OfBucket | ins.Validate]:
    """The instructions of each action: one, or the transfers of a stage's microbatch that come together.

    Without those at the head and the end of a step.
    """
    instructions = instructions[ins.number_at_head(instructions) :]

    def which(numbered: tuple[int, ins.Instruction]) -> tuple[object, ...]:
        number, i = numbered
        if isinstance(i, ins.StartTransfer | ins.WaitTransfer):
            return type(i), i.transfer.direction, i.transfer.stage, i.transfer.microbatch
        return (number,)

    for _, group in groupby(enumerate(instructions), which):
        together = []
        for _, i in group:
            if isinstance(i, ins.OfBucket | ins.Validate):
                yield i
            elif not isinstance(i, ins.AtEnd):
                together.append(i)
        if together:
            yield together


def kind_of(instruction: OfMicrobatch) -> tuple[object, ...]:
    """The same for instructions that differ only in the microbatch, or in where in the pool they offload."""
    match instruction:
        case ins.Compute(op):
            return ins.Compute, op.kind, op.stage
        case ins.PostRecv(messages) | ins.Wait(messages) | ins.Send(messages):
            return type(instruction), *(message.edge for message in messages)
        case ins.StartCollective(collective) | ins.WaitCollective(collective):
            return type(instruction), collective.number
        case ins.StartTransfer(t) | ins.WaitTransfer(t):
            return type(instruction), t.direction, t.stage, t.user


def _microbatch(instruction: OfMicrobatch) -> int:
    match instruction:
        case ins.Compute(op):
            return op.microbatch
        case ins.PostRecv(messages) | ins.Wait(messages) | ins.Send(messages):
            return messages[0].microbatch
        case ins.StartCollective(_, m) | ins.WaitCollective(_, m):
            return m
        case ins.StartTransfer(transfer) | ins.WaitTransfer(transfer):
            return transfer.microbatch


def _arguments(plan: StepPlan, together: Sequence[OfMicrobatch]) -> tuple[int, ...]:
    if not isinstance(together[0], ins.StartTransfer):
        return ()
    offloads = (i.transfer for i in together if isinstance(i, ins.StartTransfer))
    return tuple(plan.places[t.activation] for t in offloads if t.direction is Direction.OUT)


def _action(plan: StepPlan, together: Sequence[OfMicrobatch], used: set[str]) -> Action:
    offloads = [i.transfer for i in together if isinstance(i, ins.StartTransfer)]
    return Action(
        unused(_name(plan, together), used.__contains__),
        _doc(plan, together),
        _role(together[0]),
        tuple(line for i in together for line in lines_of(plan, i)),
        tuple(place(t) for t in offloads if t.direction is Direction.OUT),
    )


def _role(instruction: OfMicrobatch) -> ActionPlace:
    match instruction:
        case ins.Compute():
            return ActionPlace.OP
        case ins.Wait() | ins.WaitCollective():
            return ActionPlace.BEFORE
        case ins.WaitTransfer(transfer) if transfer.direction is Direction.IN:
            return ActionPlace.BEFORE
        case ins.Send() | ins.StartCollective():
            return ActionPlace.AFTER
    return ActionPlace.APART


def _name(plan: StepPlan, together: Sequence[OfMicrobatch]) -> str:
    """A name with an upper-case letter, as no variable has."""
    match together[0]:
        case ins.Compute(Op(kind, stage)):
            return f"{kind}{stage}"
        case ins.PostRecv((message, *_)):
            return f"receive_{plan.op_name(arrival(message.edge.target))}"
        case ins.Wait((message, *_)):
            return f"wait_{plan.op_name(arrival(message.edge.target))}"
        case ins.Send((message, *_)):
            return f"send_{plan.op_name(message.edge.source)}"
        case ins.StartCollective(collective):
            return f"start_{_named(plan, collective)}"
        case ins.WaitCollective(collective):
            return f"wait_{_named(plan, collective)}"
        case ins.StartTransfer(transfer):
            verb = str(transfer.direction)
        case ins.WaitTransfer(transfer):
            verb = f"wait_{transfer.direction}"
    users = _users(together)
    return f"{verb}_{users[0].stage if len(users) > 1 else plan.op_name(users[0])}"


def _users(together: Sequence[OfMicrobatch]) -> list[Color]:
    """The sections for which transfers move what F saved."""
    transfers = (i.transfer for i in together if isinstance(i, ins.StartTransfer | ins.WaitTransfer))
    return [Color(t.stage, t.user) for t in transfers]


def _named(plan: StepPlan, collective: ins.Collective) -> str:
    """The kind of a collective with its source, of several sources that of this rank."""
    return f"{collective.kind.replace('-', '_')}_{plan.op_name(plan.own_end(collective.sources))}"


def _doc(plan: StepPlan, together: Sequence[OfMicrobatch]) -> str:
    """What an action does, as a docstring."""
    first = together[0]
    match first:
        case ins.Compute():
            return ""
        case ins.PostRecv(messages) | ins.Wait(messages):
            sources = " and ".join(dict.fromkeys(plan.op_name(m.edge.source) for m in messages))
            rank = plan.placement[messages[0].edge.source.stage]
            verb = "Start to receive" if isinstance(first, ins.PostRecv) else "Wait for"
            return f"{verb} what {sources} on rank {rank} sends."
        case ins.Send(messages):
            return f"Send to rank {plan.placement[messages[0].edge.target.stage]}."
        case ins.StartCollective(collective):
            return f"Join the {collective.kind} of {plan.op_name(plan.own_end(collective.sources))}."
        case ins.WaitCollective(collective):
            return f"Wait for the {collective.kind} of {plan.op_name(plan.own_end(collective.sources))}."
    users = _users(together)
    saved = f"what F{users[0].stage} saved for {' and '.join(dict.fromkeys(map(plan.op_name, users)))}"
    match first:
        case ins.StartTransfer(transfer):
            return f"Start to {transfer.direction} {saved}."
        case ins.WaitTransfer(transfer) if transfer.direction is Direction.OUT:
            return f"Wait until {saved} is offloaded, and free its memory."
        case _:
            return f"Wait until {saved} is reloaded."
