"""Where the programs of a pipeline run each op: lines of their text, which is searched and never run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

MOST_LINES = 14
"""Of the text of a function that is shown."""

_OP = r"(?:F|BW|B|W)[0-9]{1,9}"
_FUNCTION = re.compile(r"def (\w+)\(")
_OF_OP = re.compile(rf"    def ({_OP})\(")
_CALL = re.compile(rf"\b({_OP})\(([0-9]{{1,9}})\b")


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
    """By stage and kind (``"F1"``) where a rank's program runs its ops; empty for a text without them."""
    lines = program.splitlines()
    functions = {match[1]: k for k, line in enumerate(lines) if (match := _FUNCTION.match(line))}
    if "step" not in functions:
        return {}
    step = range(
        functions["step"] + 1, functions["step"] + 1 + len([*_body(lines, functions["step"], "    ")])
    )
    calls: dict[str, dict[int, int]] = {}
    for k in step:
        for name, microbatch in _CALL.findall(lines[k]):
            calls.setdefault(name, {}).setdefault(int(microbatch), k + 1)
    found = {}
    for k in step:
        if match := _OF_OP.match(lines[k]):
            own = [lines[k], *_body(lines, k, "        ")]
            called = (functions[name] + 1 for name in re.findall(r"\w+", "\n".join(own)) if name in functions)
            found[match[1]] = OpLines(k + 1, _shown(own), calls.get(match[1], {}), next(called, 0))
    return found


def _body(lines: Sequence[str], head: int, margin: str) -> Iterator[str]:
    """The lines behind a function's first one that belong to it."""
    return takewhile(lambda line: not line.strip() or line.startswith(margin), lines[head + 1 :])


def _shown(own: Sequence[str]) -> str:
    text = "\n".join([line[4:] for line in own[:MOST_LINES]] + ["…"] * (len(own) > MOST_LINES))
    return text.rstrip()
