"""Where the programs of a pipeline run each op: lines of their text, found in its syntax, never run."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

MOST_LINES = 14
"""Of the text of a function that is shown."""

_OP = re.compile(r"(?:F|BW|B|W)[0-9]{1,9}")
_CALL = re.compile(rf"\b({_OP.pattern})\(([0-9]{{1,9}})\b")


@dataclass(frozen=True)
class Place:
    """The function of ``step`` that runs the ops of one stage and kind.

    ``line``: its first one.  ``text``: it and the lines below, at most ``MOST_LINES``.  ``calls``: microbatch
    -> the line in which the function is called for it; without those of loops.  ``section``: the line of the
    function that computes, 0 if there is none of that name.
    """

    line: int
    text: str
    calls: dict[int, int]
    section: int


def places(program: str) -> dict[str, Place]:
    """By stage and kind (``"F1"``) where a rank's program runs its ops.

    Empty for a text that is no Python, or has no function ``step``.
    """
    try:
        module = ast.parse(program)
    except SyntaxError:
        return {}
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    if "step" not in functions:
        return {}
    lines, step = program.splitlines(), functions["step"]
    calls: dict[str, dict[int, int]] = {}
    for number in range(step.lineno, step.end_lineno or step.lineno):  # the line behind has this index
        for name, microbatch in _CALL.findall(lines[number]):
            calls.setdefault(name, {}).setdefault(int(microbatch), number + 1)
    found = [node for node in step.body if isinstance(node, ast.FunctionDef) and _OP.fullmatch(node.name)]
    return {
        node.name: Place(node.lineno, _text(lines, node), calls.get(node.name, {}), _section(node, functions))
        for node in found
    }


def _text(lines: list[str], node: ast.FunctionDef) -> str:
    end = node.end_lineno or node.lineno
    own = lines[node.lineno - 1 : min(end, node.lineno - 1 + MOST_LINES)]
    margin = min(len(line) - len(line.lstrip()) for line in own if line.strip())
    cut = ["…"] if end > node.lineno - 1 + MOST_LINES else []
    return "\n".join([line[margin:] for line in own] + cut)


def _section(node: ast.FunctionDef, functions: dict[str, ast.FunctionDef]) -> int:
    """The line of the first function of the program that it calls."""
    for inner in ast.walk(node):
        match inner:
            case ast.Call(func=ast.Name(id=name)) if name in functions:
                return functions[name].lineno
    return 0
