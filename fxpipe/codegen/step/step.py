"""The function ``step``: a function for each kind of op, and the schedule, one line for each op.

The function of a kind of op has what all ops of the kind do: wait for values, call the section's function,
send.  What depends on the place in the order (receives that are posted ahead, transfers, collectives) stands
before the op of its line, in functions of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import takewhile

from fxpipe.codegen.step.actions import VALIDATED, Action, ActionPlace, Done, actions
from fxpipe.codegen.step.instruction_text import Hole
from fxpipe.codegen.step.lifetimes import Lifetimes, OpFunction, lifetimes
from fxpipe.codegen.step.step_plan import StepPlan
from fxpipe.codegen.wrapping import WIDTH, wrapped
from fxpipe.ir.graph import Kind
from fxpipe.ir.names import text_literal
from fxpipe.ir.size import Share
from fxpipe.schedule.lowering import instructions as ins


@dataclass(frozen=True)
class _Slot:
    """An op with the actions between it and its neighbors in the order."""

    before: list[Done]
    op: Done
    after: list[Done]


@dataclass(frozen=True, eq=False)
class _Call:
    """A call of a function for a microbatch."""

    function: OpFunction
    microbatch: int
    arguments: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.function.name}({', '.join(map(str, (self.microbatch, *self.arguments)))})"


@dataclass(frozen=True)
class StepCalls:
    """By line, those of the warm-up, and those behind it."""

    warm_up: list[list[_Call]]
    schedule: list[list[_Call]]

    def __iter__(self) -> Iterator[_Call]:
        return (call for line in (*self.warm_up, *self.schedule) for call in line)


def called_ops(plan: StepPlan, calls: StepCalls) -> list[str]:
    """The ops of the order for which the step calls a function: on this rank, others have nothing to do."""
    names = {f"{i.op.kind}{i.op.stage}" for i in plan.instructions if isinstance(i, ins.Compute)}
    return [f"{call.function.name}.{call.microbatch}" for call in calls if call.function.name in names]


def step_source(plan: StepPlan, called: StepCalls) -> str:
    warm_up, schedule, calls = called.warm_up, called.schedule, [*called]
    functions = list(dict.fromkeys(call.function for call in calls if call.function.lines))
    of_microbatch: defaultdict[int, list[OpFunction]] = defaultdict(list)
    for call in calls:
        if call.function.lines:
            of_microbatch[call.microbatch].append(call.function)
    lives = lifetimes(dict.fromkeys(map(tuple, of_microbatch.values())))
    dicts = (
        f"    {', '.join(names)} = {', '.join('{}' for _ in names)}  # by microbatch"
        for names in _rows(_in_dicts(functions, lives), WIDTH - 25)
    )
    lines = [*_head(plan), *dicts, ""]
    for function in functions:
        parameters = ", ".join(("m", *function.parameters))
        lines.append(f"    def {function.name}({parameters}):")
        if function.doc:
            lines.append(f'        """{function.doc}"""')
        if plan.by_place:
            lines += ["        if m >= len(rt.places): return", "        m = rt.places[m]"]
        lines += [*(f"        {line}" for line in lives.written(function)), ""]
    lines = [wrapped(line) for line in lines]
    if ins.Validate() in plan.instructions:
        lines += _warm_up(plan, warm_up, lives)
    lines += [text for line in schedule for text in _joined(map(str, line))]
    ends = [f"    {_at_end(i)}" for i in plan.instructions if isinstance(i, ins.AtEnd)]
    return "\n".join([*lines, *(["", *ends] if ends else []), "    return rt.finish()"])


def _warm_up(plan: StepPlan, schedule: Sequence[Sequence[_Call]], lives: Lifetimes) -> Iterator[str]:
    """The loop over the lines that run again where the last update is undone."""
    functions = dict.fromkeys(call.function for line in schedule for call in line if call.function.lines)
    made = ", ".join(_in_dicts(functions, lives))
    yield wrapped(f"    for _ in rt.warm_up({made}):")
    body = _once(plan)
    yield from (f"        {text}" for text in body)
    yield from (text for line in schedule for text in _joined(map(str, line), "        "))
    if not body and not schedule:
        yield "        pass"
    if "grads" in _used(plan):
        yield "    grads = rt.grads"


def _once(plan: StepPlan) -> list[str]:
    once, counts = plan.before.once, plan.before.counts
    if once is None:
        return []
    return [f"once = rt.once({', '.join(['once_a_step', *once])}){'' if counts is None else ' | means'}"]


def _means(plan: StepPlan) -> list[str]:
    """The exchange over replicas must not run twice, so this stands before a warm-up."""
    once, counts = plan.before.once, plan.before.counts
    if counts is None:
        return []
    # Of a number of the whole batch each microbatch of this replica has a share, whatever others have.
    containers = ("rt.own_count" if name in Share.used else name for name in counts)
    arguments = ", ".join(["counts", "batches", *containers])
    return [f"{'once' if once is None else 'means'} = rt.batch_means({arguments})"]


def _used(plan: StepPlan) -> set[str]:
    """The containers that the functions of this rank read or write."""
    calls = [call for call in plan.parts.calls if plan.placement[call.color.stage] == plan.rank]
    used = {c for call in calls for c in call.containers}
    once, counts = plan.before.once, plan.before.counts
    used.update(once or (), () if counts is None else {"batch", *counts} - Share.used)
    if any(value.kind is Kind.BUFFER for call in calls for value in call.results):
        used.add("buffers")  # written, whether or not it is read
    return used


def _head(plan: StepPlan) -> list[str]:
    trains = any(call.gradients for call in plan.parts.calls)
    what = "one training step; return the loss of the whole batch"
    if not trains:
        what = "the forward; return the loss of the whole batch, if there is one"
    lines = ["def step(rt, batch):", f'    """Run this rank\'s part of {what}."""']
    head = plan.instructions[: ins.number_at_head(plan.instructions)]
    lines += [f"    rt.gather_parameters({i.bucket})" for i in head if isinstance(i, ins.GatherParameters)]
    used, validates = _used(plan), ins.Validate() in plan.instructions
    known = ("params", "buffers", "constants", *(() if validates else ("grads",)))
    containers = [c for c in known if c in used]
    if containers:
        lines.append(f"    {', '.join(containers)} = {', '.join(f'rt.{c}' for c in containers)}")
    if "batch" in used:
        lines.append("    batches = rt.microbatches(batch)")
    lines += _lengths(plan, used)
    lines += (f"    {text}" for text in _means(plan))
    if Share.used <= used:  # behind the means, with which an evaluation counts its rows
        lines.append("    microbatches = rt.microbatch_count")
    lines += (f"    {text}" for text in ([] if validates else _once(plan)))
    return lines


def _lengths(plan: StepPlan, used: AbstractSet[str]) -> Iterator[str]:
    """What the lengths of the microbatches decide, in lists by microbatch."""
    for variable, name in plan.lengths.items():
        if variable in used:
            yield f"    {variable} = rt.lengths({text_literal(name)})  # by microbatch"
    if plan.lengths and plan.layouts():
        yield "    layouts = rt.layouts(messages)  # by microbatch"


def _in_dicts(functions: Iterable[OpFunction], lives: Lifetimes) -> list[str]:
    """The values of functions that are in dicts by microbatch."""
    holes = {
        part.name: None
        for function in functions
        for line in function.lines
        for part in line
        if isinstance(part, Hole) and (function, part.name) not in lives.local
    }
    return list(holes)


def _rows(names: Sequence[str], width: int) -> list[list[str]]:
    """The names in rows that are at most so wide, with six characters beside each: ``, `` and ``, {}``."""
    rows: list[list[str]] = []
    for name in names:
        if not rows or sum(len(other) + 6 for other in (*rows[-1], name)) > width:
            rows.append([])
        rows[-1].append(name)
    return rows


def step_calls(plan: StepPlan) -> StepCalls:
    done = actions(plan)
    slots = _slots(done)
    regular = _regular(slots)
    functions: dict[Action, OpFunction] = {}
    for action in dict.fromkeys(d.action for d in done):
        before, after = regular.get(action, ((), ()))
        body = tuple(line for a in (*before, action, *after) for line in a.lines)
        functions[action] = OpFunction(action.name, action.doc, action.parameters, body)
    lines: list[list[Done]] = []
    begin = 0  # of what stands before the op: the functions of two ops do the rest themselves
    for slot in slots:
        before, after = regular[slot.op.action]
        lines.append([*slot.before[begin : len(slot.before) - len(before)], slot.op])
        begin = len(after)
    lines.append([*(slots[-1].after[begin:] if slots else done)])
    warm_up, rest = ([_calls(line, functions) for line in part] for part in _at_verdict(lines))
    return StepCalls([line for line in warm_up if line], [line for line in rest if line])


def _at_verdict(lines: list[list[Done]]) -> tuple[list[list[Done]], list[list[Done]]]:
    """The lines before the wait for the verdict on the last update, and those behind it."""
    for k, line in enumerate(lines):
        if VALIDATED in line:
            at = line.index(VALIDATED)
            return [*lines[:k], line[:at]], [line[at + 1 :], *lines[k + 1 :]]
    return [], lines


def _calls(line: Sequence[Done], functions: Mapping[Action, OpFunction]) -> list[_Call]:
    """The calls of functions that do anything."""
    calls = [_Call(functions[d.action], d.microbatch, d.arguments) for d in line]
    return [call for call in calls if call.function.lines or call.function.name.startswith("rt.")]


def _slots(done: Sequence[Done]) -> list[_Slot]:
    slots: list[_Slot] = []
    between: list[Done] = []
    for d in done:
        if d.action.role is ActionPlace.OP:
            slots.append(_Slot(between, d, between := []))
        else:
            between.append(d)
    return slots


def _regular(slots: Sequence[_Slot]) -> dict[Action, tuple[tuple[Action, ...], tuple[Action, ...]]]:
    """Find for each kind of op what all of its ops do directly before, and directly after."""
    before: dict[Action, list[Action]] = {}
    after: dict[Action, list[Action]] = {}
    for slot in slots:
        kind = slot.op.action
        actions = [d.action for d in _of_microbatch(reversed(slot.before), slot.op, ActionPlace.BEFORE)]
        before[kind] = _common(before.get(kind, actions), actions)
        actions = [d.action for d in _of_microbatch(slot.after, slot.op, ActionPlace.AFTER)]
        after[kind] = _common(after.get(kind, actions), actions)
    return {kind: (tuple(reversed(before[kind])), tuple(after[kind])) for kind in before}


def _of_microbatch(done: Iterable[Done], op: Done, role: ActionPlace) -> Iterator[Done]:
    return takewhile(lambda d: d.action.role is role and d.microbatch == op.microbatch, done)


def _common(first: list[Action], second: list[Action]) -> list[Action]:
    """What both begin with."""
    return [a for a, _ in takewhile(lambda pair: pair[0] is pair[1], zip(first, second, strict=False))]


def _joined(statements: Iterable[str], indent: str = "    ") -> list[str]:
    """The statements on as few lines as hold them."""
    lines = [""]
    for statement in statements:
        longer = f"{lines[-1]}; {statement}" if lines[-1] else f"{indent}{statement}"
        if len(longer) <= WIDTH or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(f"{indent}{statement}")
    return lines


def _at_end(instruction: ins.AtEnd) -> str:
    match instruction:
        case ins.WaitGradients():
            return "rt.wait_gradients()"
        case ins.AllReduceGradient(name, ranks):
            return f"rt.all_reduce_gradient({text_literal(name)}, ranks={ranks})"
        case ins.DivideGradients():
            return "rt.divide_gradients_by_count()"
