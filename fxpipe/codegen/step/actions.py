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
from fxpipe.schedule.lowering.instructions import (
    AtEnd,
    Collective,
    Compute,
    FreeParameters,
    GatherParameters,
    Instruction,
    OfBucket,
    PostRecv,
    ReduceGradients,
    Send,
    StartCollective,
    StartTransfer,
    SumOverLanes,
    Validate,
    Wait,
    WaitCollective,
    WaitParameters,
    WaitTransfer,
    number_at_head,
)
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
        if isinstance(together, Validate):
            done.append(VALIDATED)
            continue
        if not isinstance(together, list):
            lanes = together.lanes if isinstance(together, SumOverLanes) else ()
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
        (GatherParameters, "gather_parameters"),
        (WaitParameters, "wait_parameters"),
        (FreeParameters, "free_parameters"),
        (SumOverLanes, "sum_over_lanes"),
        (ReduceGradients, "reduce_gradients"),
    )
}


def _together(
    instructions: Sequence[Instruction],
) -> Iterator[list[OfMicrobatch] | OfBucket | Validate]:
    """The instructions of each action: one, or the transfers of a stage's microbatch that come together.

    Without those at the head and the end of a step.
    """
    instructions = instructions[number_at_head(instructions) :]

    def which(numbered: tuple[int, Instruction]) -> tuple[object, ...]:
        number, i = numbered
        if isinstance(i, StartTransfer | WaitTransfer):
            return type(i), i.transfer.direction, i.transfer.stage, i.transfer.microbatch
        return (number,)

    for _, group in groupby(enumerate(instructions), which):
        together = []
        for _, i in group:
            if isinstance(i, OfBucket | Validate):
                yield i
            elif not isinstance(i, AtEnd):
                together.append(i)
        if together:
            yield together


def kind_of(instruction: OfMicrobatch) -> tuple[object, ...]:
    """The same for instructions that differ only in the microbatch, or in where in the pool they offload."""
    match instruction:
        case Compute(op):
            return Compute, op.kind, op.stage
        case PostRecv(messages) | Wait(messages) | Send(messages):
            return type(instruction), *(message.edge for message in messages)
        case StartCollective(collective) | WaitCollective(collective):
            return type(instruction), collective.number
        case StartTransfer(t) | WaitTransfer(t):
            return type(instruction), t.direction, t.stage, t.user


def _microbatch(instruction: OfMicrobatch) -> int:
    match instruction:
        case Compute(op):
            return op.microbatch
        case PostRecv(messages) | Wait(messages) | Send(messages):
            return messages[0].microbatch
        case StartCollective(_, m) | WaitCollective(_, m):
            return m
        case StartTransfer(transfer) | WaitTransfer(transfer):
            return transfer.microbatch


def _arguments(plan: StepPlan, together: Sequence[OfMicrobatch]) -> tuple[int, ...]:
    if not isinstance(together[0], StartTransfer):
        return ()
    offloads = (i.transfer for i in together if isinstance(i, StartTransfer))
    return tuple(plan.places[t.activation] for t in offloads if t.direction is Direction.OUT)


def _action(plan: StepPlan, together: Sequence[OfMicrobatch], used: set[str]) -> Action:
    offloads = [i.transfer for i in together if isinstance(i, StartTransfer)]
    return Action(
        unused(_name(plan, together), used.__contains__),
        _doc(plan, together),
        _role(together[0]),
        tuple(line for i in together for line in lines_of(plan, i)),
        tuple(place(t) for t in offloads if t.direction is Direction.OUT),
    )


def _role(instruction: OfMicrobatch) -> ActionPlace:
    match instruction:
        case Compute():
            return ActionPlace.OP
        case Wait() | WaitCollective():
            return ActionPlace.BEFORE
        case WaitTransfer(transfer) if transfer.direction is Direction.IN:
            return ActionPlace.BEFORE
        case Send() | StartCollective():
            return ActionPlace.AFTER
    return ActionPlace.APART


def _name(plan: StepPlan, together: Sequence[OfMicrobatch]) -> str:
    """A name with an upper-case letter, as no variable has."""
    match together[0]:
        case Compute(Op(kind, stage)):
            return f"{kind}{stage}"
        case PostRecv((message, *_)):
            return f"receive_{plan.op_name(arrival(message.edge.target))}"
        case Wait((message, *_)):
            return f"wait_{plan.op_name(arrival(message.edge.target))}"
        case Send((message, *_)):
            return f"send_{plan.op_name(message.edge.source)}"
        case StartCollective(collective):
            return f"start_{_named(plan, collective)}"
        case WaitCollective(collective):
            return f"wait_{_named(plan, collective)}"
        case StartTransfer(transfer):
            verb = str(transfer.direction)
        case WaitTransfer(transfer):
            verb = f"wait_{transfer.direction}"
    users = _users(together)
    return f"{verb}_{users[0].stage if len(users) > 1 else plan.op_name(users[0])}"


def _users(together: Sequence[OfMicrobatch]) -> list[Color]:
    """The sections for which transfers move what F saved."""
    transfers = (i.transfer for i in together if isinstance(i, StartTransfer | WaitTransfer))
    return [Color(t.stage, t.user) for t in transfers]


def _named(plan: StepPlan, collective: Collective) -> str:
    """The kind of a collective with its source, of several sources that of this rank."""
    return f"{collective.kind.replace('-', '_')}_{plan.op_name(plan.own_end(collective.sources))}"


def _doc(plan: StepPlan, together: Sequence[OfMicrobatch]) -> str:
    """What an action does, as a docstring."""
    first = together[0]
    match first:
        case Compute():
            return ""
        case PostRecv(messages) | Wait(messages):
            sources = " and ".join(dict.fromkeys(plan.op_name(m.edge.source) for m in messages))
            rank = plan.placement[messages[0].edge.source.stage]
            verb = "Start to receive" if isinstance(first, PostRecv) else "Wait for"
            return f"{verb} what {sources} on rank {rank} sends."
        case Send(messages):
            return f"Send to rank {plan.placement[messages[0].edge.target.stage]}."
        case StartCollective(collective):
            return f"Join the {collective.kind} of {plan.op_name(plan.own_end(collective.sources))}."
        case WaitCollective(collective):
            return f"Wait for the {collective.kind} of {plan.op_name(plan.own_end(collective.sources))}."
    users = _users(together)
    saved = f"what F{users[0].stage} saved for {' and '.join(dict.fromkeys(map(plan.op_name, users)))}"
    match first:
        case StartTransfer(transfer):
            return f"Start to {transfer.direction} {saved}."
        case WaitTransfer(transfer) if transfer.direction is Direction.OUT:
            return f"Wait until {saved} is offloaded, and free its memory."
        case _:
            return f"Wait until {saved} is reloaded."
