"""Compares the memory that programs hold, and the order of their ops, with the plan.

Neither changes a result, so a certificate holds where they differ, and says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, zip_longest

from fxpipe.certificate.problems import Problem
from fxpipe.certificate.ranks.runtime import TermRuntime
from fxpipe.plan.artifact import Plan
from fxpipe.schedule.ops import PHASES, Direction, Op, Phase

Ranks = Sequence[TermRuntime]
THE_END = "the end"
ACCURACY = 1.05
"""Of the plan's memory: a storage that two stages of a rank save counts for one of them there."""


def unlike_plan(plan: Plan, ranks: Ranks) -> Iterator[Problem]:
    """Tell where ranks hold more memory than the plan, or do what it has in another order."""
    if not all(rt.ended for rt in ranks):  # a program that was rejected frees nothing behind that line
        return
    for rt in ranks:
        planned = planned_ops(plan, rt.rank)
        if (first := out_of_order(rt, planned)) is not None:
            yield Problem(rt.rank, rt.log.calls[first].number, unlike_order(rt, planned, first))
        yield from _transfers(rt, plan)
        yield from _dead(rt)
        most, op = rt.log.peak
        predicted = plan.prediction.peak_memory[rt.rank]
        if most > ACCURACY * predicted:
            number = rt.log.lines[rt.log.ops.index(op)].number
            yield Problem(
                rt.rank, number, f"holds {most} bytes before {op}, and the plan has {predicted:.0f}"
            )


def planned_ops(plan: Plan, rank: int) -> list[str]:
    """The ops of a rank that have code, in the plan's order."""
    return [str(op) for op in plan.ordered.order[rank] if _takes_time(plan, op)]


def _takes_time(plan: Plan, op: Op) -> bool:
    """Whether an op has code: the backward of tokens, say, has none."""
    cost = plan.costs.stages[op.stage]
    seconds = {Phase.F: cost.forward, Phase.B: cost.backward, Phase.W: cost.weight}
    return any(seconds[phase] for phase in PHASES[op.kind])


def out_of_order(rt: TermRuntime, planned: Sequence[str]) -> int | None:
    """The number of the first op that is not the plan's, of what a program has run so far; at the end that
    of its end, if ops are missing."""
    ops = rt.log.ops if rt.ended else [*rt.log.ops, *planned[len(rt.log.ops) :]]
    # A program in the midst of a run may still do what is left, but not something else before it.
    due = [*planned, THE_END] if rt.ended else planned
    return next((k for k, (op, other) in enumerate(zip_longest(ops, due)) if op != other), None)


def unlike_order(rt: TermRuntime, planned: Sequence[str], number: int) -> str:
    due = planned[number] if number < len(planned) else "nothing"
    op = rt.log.ops[number]
    return f"runs {'nothing' if op == THE_END else op} where the plan has {due}"


def _transfers(rt: TermRuntime, plan: Plan) -> Iterator[Problem]:
    """Offloads and reloads that begin or are waited for elsewhere than in the plan, or not at all."""
    due: Counter[tuple[str, int]] = Counter()
    ops = plan.ordered.order[rt.rank]
    number_of = [0, *accumulate(_takes_time(plan, op) for op in ops)]  # in the plan -> in the program
    for transfer in plan.transfers:
        if plan.placement[transfer.stage] == rt.rank:
            verb = "offload" if transfer.direction is Direction.OUT else "reload"
            due[verb, number_of[transfer.begin]] += 1
            due[f"wait_{verb}", number_of[transfer.end]] += 1
    for more, unlike in (("more", rt.log.transfers - due), ("fewer", due - rt.log.transfers)):
        for verb in dict.fromkeys(verb for verb, _ in sorted(unlike)):
            times = {number: times for (of, number), times in unlike.items() if of == verb}
            first, total = min(min(times), len(rt.log.ops) - 1), sum(times.values())
            text = f"calls rt.{verb} {total} times {more} than the plan, first before {rt.log.ops[first]}"
            yield Problem(rt.rank, rt.log.lines[first].number, text)


def _dead(rt: TermRuntime) -> Iterator[Problem]:
    """Tell the values that a program keeps through an op though nothing reads them again."""
    log = rt.log
    for term, used, freed in log.dead:
        last, until = log.ops[max(used - 1, 0)], log.ops[freed - 1]
        line = log.lines[max(used - 1, 0)].number
        yield Problem(rt.rank, line, f"keeps {term}, which {last} is the last to read, until {until}")
    yield from (Problem(rt.rank, line, text) for text, line in log.otherwise.items())
    for op in log.ops[:-1]:
        if op in log.idle:
            yield Problem(rt.rank, log.idle[op], f"runs no section in {op}")
