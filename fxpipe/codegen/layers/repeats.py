"""Finds runs of nodes that repeat: the layers of a model, in the code of a section.

Two nodes are *alike* if their ops, their literals but for some numbers, and the shapes and dtypes of operands
and results agree.  A *run* is a stretch of nodes that are alike to those one *period* later, for at least two
periods.  Module names play no part in it, but that of all rotations of a run one is preferred that begins at
the border of a module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import fx

from fxpipe.ir.graph import modules_around
from fxpipe.runtime.program.random import keyed

#: Fewest nodes that a run must save: a function and a loop of its calls have lines of their own.
FEWEST = 12
#: How many nodes of runs are looked at, for each node of a section.  Layers need one or two; a long chain of
#: equal ops, which cannot be written as calls, has a run for each position and period.
_MOST_LOOKS = 100


class Run(NamedTuple):
    """``times`` periods of ``period`` nodes from the position ``begin`` on."""

    begin: int
    period: int
    times: int

    @property
    def end(self) -> int:
        return self.begin + self.period * self.times


_Tokens = npt.NDArray[np.int64]
Check = Callable[[Run], int]
"""The number of periods of a run, from its first on, that can be written as calls of one function."""


def repeats(nodes: Sequence[fx.Node], check: Check) -> list[Run]:
    """The runs that do not overlap and save most nodes, in order."""
    numbers: dict[object, int] = {}
    tokens = np.array([numbers.setdefault(_token(n), len(numbers)) for n in nodes], dtype=np.int64)
    left = _MOST_LOOKS * len(nodes)

    def within_reason(run: Run) -> int | None:
        nonlocal left
        left -= run.end - run.begin
        return check(run) if left > 0 else None

    return sorted(_best(nodes, tokens, Run(0, len(nodes), 1), within_reason))


def _best(
    nodes: Sequence[fx.Node], tokens: _Tokens, within: Run, check: Callable[[Run], int | None]
) -> Iterator[Run]:
    """The best run within a stretch of nodes, and then those beside it.  check: None to look no further."""
    for run in _candidates(tokens, within.begin, within.end):
        for rotated in _rotations(nodes, tokens, run, within.end):
            times = check(rotated)
            if times is None:
                return
            if (times - 1) * run.period >= FEWEST:
                best = rotated._replace(times=times)
                yield best
                yield from _best(nodes, tokens, Run(within.begin, best.begin - within.begin, 1), check)
                yield from _best(nodes, tokens, Run(best.end, within.end - best.end, 1), check)
                return


def _candidates(tokens: _Tokens, begin: int, end: int) -> list[Run]:
    """Runs of equal tokens: first those that save most, of those the shortest periods."""
    runs = []
    for period in range(2, (end - begin) // 2 + 1):
        # A stretch of n nodes that are as those a period later is a run of n // period + 1 periods.
        same = tokens[begin : end - period] == tokens[begin + period : end]
        edges = np.flatnonzero(np.diff(np.concatenate(([False], same, [False])).astype(np.int8)))
        for start, stop in edges.reshape(-1, 2):
            times = int(stop - start) // period + 1
            if (times - 1) * period >= FEWEST:
                runs.append(Run(begin + int(start), period, times))
    return sorted(runs, key=lambda run: (-(run.times - 1) * run.period, run.period, run.begin))


def _rotations(nodes: Sequence[fx.Node], tokens: _Tokens, run: Run, end: int) -> Iterator[Run]:
    """The same run from other positions that lose at most one period: first those whose periods are modules.

    A node of another module than most of its period counts as four that are not part of the run, since other
    phases repeat by modules, too.
    """
    alike = run.begin
    while alike + run.period < end and tokens[alike] == tokens[alike + run.period]:
        alike += 1
    origins = [node.meta["origin"] for node in nodes[run.begin : alike + run.period]]
    # One level below the modules around all of a period: there its layers have other names.
    depth = 1 + min(modules_around(*pair) for pair in pairwise(origins[: run.period + 1]))
    modules = [tuple(origin.path.split(".")[:depth]) for origin in origins]
    rotated = []
    for begin in range(run.begin, min(run.begin + 2 * run.period, alike)):
        times = (alike - begin) // run.period + 1
        if times >= max(2, run.times - 1):
            in_period = Counter(modules[begin - run.begin :][: run.period])
            strange = run.period - max(in_period.values())
            rotated.append((4 * strange - times * run.period, begin, times))
    return (Run(begin, run.period, times) for _, begin, times in sorted(rotated))


def free_numbers(node: fx.Node) -> list[float | int]:
    """The numbers among the arguments in which alike nodes may differ: the position of a random op, and
    floats, in the order of a call."""
    position: list[Any] = [node.args[1]] if node.target is keyed else []
    return position + [x for x in leaves(node) if isinstance(x, float)]


def leaves(node: fx.Node) -> Iterator[object]:
    """The arguments of a node, those in lists one by one."""
    todo = [*node.args, *node.kwargs.values()][::-1]
    while todo:
        value = todo.pop()
        if isinstance(value, (list, tuple)):
            todo += value[::-1]
        else:
            yield value


def _token(node: fx.Node) -> object:
    is_random = node.target is keyed
    args = (int if is_random and k == 1 else _fixed(x) for k, x in enumerate(node.args))
    kwargs = ((name, _fixed(x)) for name, x in node.kwargs.items())
    return node.target, _layout(node.meta.get("val")), *args, *kwargs


def _fixed(value: object) -> object:
    """What must agree of an argument."""
    match value:
        case fx.Node():
            return _layout(value.meta.get("val"))
        case list() | tuple():
            return tuple(map(_fixed, value))
        case float():
            return float
    return type(value), value


def _layout(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_layout, value))
    return type(value)
