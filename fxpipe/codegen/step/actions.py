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
from fxpipe.schedule.ops import Color, Direction, arrival


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
    name, doc = _told(plan, together)
    return Action(
        unused(name, used.__contains__),
        doc,
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


def _told(plan: StepPlan, together: Sequence[OfMicrobatch]) -> tuple[str, str]:
    """The name of an action, with an upper-case letter, as no variable has, and what it does, as a
    docstring."""
    first = together[0]
    match first:
        case ins.Compute(op):
            return f"{op.kind}{op.stage}", ""
        case ins.PostRecv(messages) | ins.Wait(messages):
            verb, does = ("receive", "Start to receive") if isinstance(first, ins.PostRecv) else _WAIT
            sources = " and ".join(dict.fromkeys(plan.op_name(m.edge.source) for m in messages))
            edge = messages[0].edge
            name, rank = plan.op_name(arrival(edge.target)), plan.placement[edge.source.stage]
            return f"{verb}_{name}", f"{does} what {sources} on rank {rank} sends."
        case ins.Send(messages):
            edge = messages[0].edge
            return f"send_{plan.op_name(edge.source)}", f"Send to rank {plan.placement[edge.target.stage]}."
        case ins.StartCollective(collective) | ins.WaitCollective(collective):
            verb, does = ("start", "Join") if isinstance(first, ins.StartCollective) else _WAIT
            source, kind = plan.op_name(plan.own_end(collective.sources)), collective.kind
            return f"{verb}_{kind.replace('-', '_')}_{source}", f"{does} the {kind} of {source}."
        case ins.StartTransfer(transfer) | ins.WaitTransfer(transfer):
            transfers = (i.transfer for i in together if isinstance(i, ins.StartTransfer | ins.WaitTransfer))
            users = [plan.op_name(Color(t.stage, t.user)) for t in transfers]
            saved = f"what F{transfer.stage} saved for {' and '.join(dict.fromkeys(users))}"
            name = f"{transfer.direction}_{transfer.stage if len(users) > 1 else users[0]}"
            if isinstance(first, ins.StartTransfer):
                return name, f"Start to {transfer.direction} {saved}."
            if transfer.direction is Direction.OUT:
                return f"wait_{name}", f"Wait until {saved} is offloaded, and free its memory."
            return f"wait_{name}", f"Wait until {saved} is reloaded."


_WAIT = "wait", "Wait for"
