"""Tells of several problems which one the others follow from, and the line where it began."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace

from fxpipe.certificate.problems import LAYOUT, NAME, ORDER, Line, Problem
from fxpipe.certificate.ranks.memory import Ranks, out_of_order, planned_ops, unlike_order
from fxpipe.certificate.ranks.runtime import TermRuntime
from fxpipe.certificate.ranks.world import WAITS
from fxpipe.errors import number_of
from fxpipe.plan.artifact import Plan
from fxpipe.plan.program import records as r


def causes(
    plan: Plan, ranks: Ranks, programs: Sequence[r.Program], problems: Sequence[Problem]
) -> list[Problem]:
    """One problem for each cause.  problems: in the order in which they arose; none of them alone is left
    out."""
    if not problems:
        return []
    return _folded(_placed(each, programs[each.rank]) for each in _of_order(plan, ranks, problems))


def _folded(problems: Iterator[Problem]) -> list[Problem]:
    """Give of the problems of a cause the first, with the number of the others."""
    by_cause: dict[object, list[Problem]] = {}
    # A line that runs for each microbatch gives the same problem each time.
    for problem in dict.fromkeys(problems):
        by_cause.setdefault(problem.cause or problem, []).append(problem)
    return [
        replace(first, text=f"{first.text} (and {number_of(len(others), 'problem')} from it)", cause="")
        if others
        else replace(first, cause="")
        for first, *others in by_cause.values()
    ]


def _of_order(plan: Plan, ranks: Ranks, problems: Sequence[Problem]) -> Iterator[Problem]:
    """What an op out of order may have led to is told where that op runs: a rank waits for what another has
    not sent, or takes one message for the next."""
    began: Problem | None = None
    for rt in ranks:
        planned = planned_ops(plan, rt.rank)
        number = out_of_order(rt, planned)
        if number is not None and began is None:
            line = rt.log.calls[number]
            began = Problem(rt.rank, line.number, unlike_order(rt, planned, number), ORDER)
    if began is None:
        # A rank that waits though all has run that its next op needs is the cause; the others wait for it.
        ran = {str(op) for rt in ranks for op in rt.log.ops}
        stuck = {rt.rank for rt in ranks if not rt.ended and _is_ready(rt, planned_ops(plan, rt.rank), ran)}
        problems = sorted(problems, key=lambda each: each.text.startswith(WAITS) and each.rank not in stuck)
    for problem in problems:
        if problem.cause == ORDER and began is not None:
            line = Line(problem.rank, problem.line)
            where = "" if line == (began.rank, began.line) else f"{line} "
            yield replace(began, text=f"{began.text}: {where}{problem.text}")
        else:
            yield problem


def _is_ready(rt: TermRuntime, planned: Sequence[str], ran: Set[str]) -> bool:
    """Whether the ops have run that a rank's next op needs of other stages: what it waits for should be
    there."""
    if len(rt.log.ops) >= len(planned):
        return False
    kind, stage, microbatch = re.findall(r"\d+|[A-Z]+", planned[len(rt.log.ops)])
    before = int(stage) - 1 if kind == "F" else int(stage) + 1
    kinds = ("F",) if kind == "F" else ("B", "BW")
    return any(f"{each}{before}.{microbatch}" in ran for each in kinds)


def _is_name_of(name: str, op: str) -> bool:
    """Whether an alias is made of an op's name: ``sum_dim_intlist`` of ``aten.sum.dim_IntList``."""
    letters = [re.sub(r"\W|_", "", part).lower() for part in op.split(".") if part != "default"]
    plain = re.sub(r"_\d+$", "", name)
    # With the namespace or without it, with the overload or without it.
    ways = {"".join(letters), "".join(letters[1:]), *letters[1:2]}
    return not ways.isdisjoint(re.sub("_", "", each).lower() for each in (name, plain))


def _placed(problem: Problem, program: r.Program) -> Problem:
    """A problem of a line that another line of the program made so: one that names another op, has the layout
    of a message, or deletes a variable."""
    kind, _, name = problem.cause.partition(" ")
    names = program.names.get(problem.line, frozenset())
    aliases = {alias: op for alias, op in program.aliases.items() if alias in names}
    wrong = sorted(
        (op.lineno, op.name, alias) for alias, op in aliases.items() if not _is_name_of(alias, op.name)
    )
    # An alias of another op makes each line wrong that calls it: the alias is the fault.
    if wrong and wrong[0][0] != problem.line:
        line, op, alias = wrong[0]
        return _moved(problem, line, f"calls {op} {alias}", f"alias {alias} of rank {problem.rank}")
    if kind == LAYOUT and name in program.message_lines:
        return _moved(problem, program.message_lines[name], f"has the layout of {name}", problem.cause)
    if kind == NAME:
        deleted = (x for x in program.nodes() if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Del))
        before = [x.lineno for x in deleted if x.id == name and x.lineno < problem.line]
        if before:
            return _moved(problem, max(before), f"deletes {name}", problem.cause)
    return problem


def _moved(problem: Problem, line: int, does: str, cause: str) -> Problem:
    return Problem(problem.rank, line, f"{does}, and line {problem.line} {problem.text}", cause)
