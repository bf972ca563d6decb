"""Runs a forward again without recording it, for as long as it runs the ops of the first run.

    first run    addmm(bias, x, w) → a     relu(a) → b     mean(b) → loss
    second run   addmm(bias, x, w) → a'    relu(a') → b'   sin(b')
                 no nodes: a' and b' have those of a, b    recorded from here on, behind copies of the nodes

To record an op costs several times what it costs to run it on fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from fxpipe.capture.reads.varying_values import Values, same_numbers
from fxpipe.ir import compat
from fxpipe.ir.nodes import copy_node


@dataclass(frozen=True, eq=False)
class RunOp:
    """An op of a run.

    key: the op, the grad mode, and the arguments in a row, with nodes in the place of traced tensors.
    nodes: those that the trace recorded for it.
    proxies: of the tensors in the result.
    number: the result, if it is a number.
    """

    key: list[Any]
    nodes: list[fx.Node]
    proxies: list[Any]
    number: bool | int | float | complex | None

    @staticmethod
    def of(key: list[object], nodes: list[fx.Node], result: object) -> RunOp:
        number = result if isinstance(result, (bool, int, float, complex)) else None
        known = compat.proxies()
        return RunOp(key, nodes, [known.get(x) for x in _tensors(result)], number)


@dataclass(frozen=True)
class ForwardRun:
    """One run: its ops in order, and its results by name: loss, outputs, new buffers, gradients."""

    calls: list[RunOp]
    results: Mapping[str, fx.Node | None]

    @property
    def ops(self) -> list[fx.Node]:
        return [node for call in self.calls for node in call.nodes]


@dataclass(eq=False)
class Replay:
    """Runs ops for those of the first run, ``calls``, and adds these to ``done``.

    inputs: the tensors that both runs are given.  find_values: gives those of the first run.
    """

    calls: Sequence[RunOp]
    done: list[RunOp]
    inputs: Sequence[torch.Tensor]
    find_values: Callable[[], Values]

    def __post_init__(self) -> None:
        inputs = set(map(id, self.inputs))
        #: The first run's own, by id.  A second run that reads them does not compute them.
        self._of_first = {id(x): x for x in compat.proxies() if id(x) not in inputs}

    def run(self, func: Any, key: list[object], args: Any, kwargs: Any) -> object:
        """The result of an op; NotImplemented if it is not the next one of the first run, but for values
        that are the same in all steps, which need not be computed again."""
        place = len(self.done)
        while place < len(self.calls) and not _alike(key, self.calls[place].key):
            if not all(map(self._values.is_fixed, self.calls[place].nodes)):
                return NotImplemented
            place += 1
        of_first = [compat.traced_node(x) for x in _tensors((args, kwargs)) if id(x) in self._of_first]
        if place == len(self.calls) or not all(x is not None and self._values.is_fixed(x) for x in of_first):
            return NotImplemented
        call = self.calls[place]
        result: object = call.number
        if result is None:
            try:
                with compat.untraced():
                    result = func(*args, **kwargs)
            except compat.DATA_DEPENDENT:
                return NotImplemented
        known = compat.proxies()
        pairs = zip(_tensors(result), call.proxies, strict=True)
        known.update((x, proxy) for x, proxy in pairs if proxy is not None)
        self.done += self.calls[len(self.done) : place + 1]
        return result

    @cached_property
    def _values(self) -> Values:
        return self.find_values()

    def record(self) -> None:
        """Copy the nodes of the ops so far for this run, whose tensors get the copies."""
        graph, copies = compat.traced_graph(), dict[fx.Node, fx.Node]()
        for place, call in enumerate(self.done):
            for node in call.nodes:
                copies[node] = copy_node(graph, node, lambda n: copies.get(n, n))
            self.done[place] = replace(call, nodes=[copies[node] for node in call.nodes])
        for x in [*compat.proxies()]:
            traced = compat.traced_node(x)
            if traced in copies and id(x) not in self._of_first:
                compat.track(x, copies[traced])


def key_of(func: object, args: object, kwargs: object) -> list[object]:
    """The key of a ``RunOp`` that is to be made."""
    known, key = compat.proxies(), [func, torch.is_grad_enabled()]
    for x in _leaves((args, kwargs)):
        tracked = known.get(x) if isinstance(x, torch.Tensor) else None
        key.append(x if tracked is None else tracked.proxy.node)
    return key


def _alike(a: list[object], b: list[object]) -> bool:
    return len(a) == len(b) and all(x is y or _equal(x, y) for x, y in zip(a, b, strict=True))


def _equal(a: Any, b: Any) -> bool:
    """Compare arguments: numbers, or tensors that the trace holds as constants."""
    if type(a) is not type(b):
        return False
    if not isinstance(a, torch.Tensor):
        return bool(a == b or (a != a and b != b))
    dense = a.layout is b.layout is torch.strided and compat.is_real(a) and not a.is_meta
    return dense and a.device == b.device and same_numbers(a, b)


def _leaves(value: object) -> list[object]:
    """What a value consists of, with the lengths of its containers."""
    leaves, todo = list[object](), [value]
    while todo:
        x = todo.pop()
        if isinstance(x, dict):
            x = [*x.items()]
        if isinstance(x, (tuple, list)):
            leaves += (list, len(x))
            todo += x
        else:
            leaves.append(x)
    return leaves


def _tensors(value: object) -> list[torch.Tensor]:
    return [x for x in _leaves(value) if isinstance(x, torch.Tensor)]
