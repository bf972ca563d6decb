"""Finds where the programs of a pipeline run each op: lines of their text, which is read and never run."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fxpipe.plan.program import records as r
from fxpipe.plan.program.parse import parse
from fxpipe.plan.program.performed import Performed

MOST_LINES = 14
"""Of the text of a function that is shown."""

_OP = re.compile(r"(?:F|BW|B|W)[0-9]{1,9}")


@dataclass(frozen=True)
class OpLines:
    """The function of ``step`` that runs the ops of one stage and kind.

    ``line``: its first one.  ``text``: it and the lines below, at most ``MOST_LINES``.  ``calls``: microbatch
    -> the line in which the function is called for it; without those of loops.  ``section``: the line of the
    function that computes, 0 if there is none of that name.
    """

    line: int
    text: str
    calls: dict[int, int]
    section: int


def places(program: str) -> dict[str, OpLines]:
    """Tell by stage and kind (``"F1"``) where a program runs its ops; empty for a text without them."""
    read = parse(program)
    if read.step is None:
        return {}
    lines, calls = program.splitlines(), _calls(read.step)
    return {
        name: OpLines(
            function.lineno,
            _shown(lines[function.lineno - 1 : function.end_lineno]),
            calls.get(name, {}),
            _section(function, read.functions),
        )
        for name, function in Performed(read.step).functions.items()
        if _OP.fullmatch(name)
    }


def _calls(step: r.Function) -> dict[str, dict[int, int]]:
    """List by function the lines of its calls with a number."""
    calls: dict[str, dict[int, int]] = {}
    for each in r.parts(step):
        match each:
            case ast.Call(ast.Name(name), [ast.Constant(int(microbatch)), *_], lineno=line):
                calls.setdefault(name, {}).setdefault(microbatch, line)
    return calls


def _section(function: r.Function, functions: Mapping[str, r.Function]) -> int:
    names = (each.id for each in r.parts(function) if isinstance(each, ast.Name))
    return next((functions[name].lineno for name in names if name in functions), 0)


def _shown(lines: Sequence[str]) -> str:
    return "\n".join([line[4:] for line in lines[:MOST_LINES]] + ["…"] * (len(lines) > MOST_LINES))
