"""Runs a forward again without recording it, for as long as it runs the ops of the first run.

    first run    addmm(bias, x, w) → a     relu(a) → b     mean(b) → loss
    second run   addmm(bias, x, w) → a'    relu(a') → b'   sin(b')
                 no nodes: a' and b' have those of a, b    recorded from here on, behind copies of the nodes

To record an op costs several times what it costs to run it on fake tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxpipe.ir import compat

_NUMBERS = (bool, int, float, complex)


@dataclass(frozen=True, eq=False)
class Call:
    """An op of a run.

    ``key``: the op, the grad mode and the arguments in a row, with nodes in the place of traced tensors.
    ``nodes``: those that the trace recorded for it.  ``proxies``: of the tensors in ``result``, which is None
    if it has any.
    """

    key: list[Any]
    nodes: list[fx.Node]
    proxies: list[Any]
    result: Any

    @staticmethod
    def of(key: list[Any], nodes: list[fx.Node], result: Any) -> Call:
        tensors = [*_tensors(result)]
        return Call(key, nodes, [compat.proxy(x) for x in tensors], None if tensors else result)


class Replay:
    """calls: the ops of the first run.  inputs: the tensors that both runs are given."""

    def __init__(self, calls: Sequence[Call], inputs: Sequence[torch.Tensor]):
        self._calls, self._done = calls, 0
        given = set(map(id, inputs))
        #: Those of the first run.  A second run that reads one does not read a result of its own.
        self._kept = {id(x): x for x in compat.traced_tensors() if id(x) not in given}

    def run(self, key: list[Any], func: Any, args: Any, kwargs: Any) -> Any:
        """The result of the next op; NotImplemented if it is another one than that of the first run."""
        call = self._calls[self._done] if self._done < len(self._calls) else None
        if call is None or not _alike(key, call.key) or self._reads_kept((args, kwargs)):
            return NotImplemented
        result = call.result
        if not isinstance(result, _NUMBERS):  # those are read from the data
            try:
                with compat.untraced():
                    result = func(*args, **kwargs)
            except compat.DATA_DEPENDENT:
                return NotImplemented
        for x, proxy in zip(_tensors(result), call.proxies, strict=True):
            compat.set_proxy(x, proxy)
        self._done += 1
        self.last = call
        return result

    def _reads_kept(self, value: Any) -> bool:
        return any(id(x) in self._kept for x in _tensors(value))

    def record(self) -> list[Call]:
        """Copy the nodes of the ops so far, which then belong to this run; the ops with the copies."""
        graph, copies = compat.traced_graph(), dict[fx.Node, fx.Node]()
        calls = []
        for call in self._calls[: self._done]:
            for node in call.nodes:
                copies[node] = compat.copy_node(graph, node, lambda n: copies.get(n, n))
            calls.append(replace(call, nodes=[copies[node] for node in call.nodes]))
        for x in compat.traced_tensors():
            node = compat.traced_node(x)
            if node in copies and id(x) not in self._kept:
                compat.track(x, copies[node])
        return calls


def key_of(func: Any, args: Any, kwargs: Any) -> list[Any]:
    key = [func, torch.is_grad_enabled()]
    todo = [args, kwargs]
    while todo:
        x = todo.pop()
        if isinstance(x, torch.Tensor):
            key.append(compat.traced_node(x) or x)
        elif isinstance(x, (tuple, list)):
            key += (list, len(x))
            todo += x
        elif isinstance(x, dict):
            key += (dict, *x)
            todo += x.values()
        else:
            key.append(x)
    return key


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for x in value:
            yield from _tensors(x)
    elif isinstance(value, dict):
        for x in value.values():
            yield from _tensors(x)


def _alike(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(x is y or _equal(x, y) for x, y in zip(a, b, strict=True))


def _equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if not isinstance(a, torch.Tensor):
        return bool(a == b or (a != a and b != b))
    if a.is_meta or not compat.is_real(a) or (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    with compat.no_modes():
        return bool(((a == b) | ((a != a) & (b != b))).all())
