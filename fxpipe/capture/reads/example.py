"""Computes real values of the example if a trace needs one: for a Python branch on data, or a number.

    part of the graph that is being traced, real inputs  ──►  the value of one of its nodes

Only the ops that lead to the value are run, including in-place ops on it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fxpipe.capture.functional import is_mutating, memory_of, overwritten
from fxpipe.capture.reads.branches import question
from fxpipe.errors import CaptureError
from fxpipe.ir import compat
from fxpipe.ir.graph import Input, Kind
from fxpipe.ir.nodes import call_targets
from fxpipe.ir.storage import draws_numbers, written

aten = torch.ops.aten

#: Number of draws of random numbers that code reads; the value must be the same each time.
DRAWS = 32
RANDOM = Input(Kind.KEY, "key")
_META = torch.device("meta")
#: Elements of a value that is computed in blocks of as many.
BLOCK = 1 << 26


class Example:
    """Computes values of the example.  inputs: the placeholders' kinds and real tensors, in order."""

    def __init__(self, inputs: Sequence[tuple[Input, torch.Tensor]]):
        self._inputs = inputs
        self._known: dict[fx.Node, object] = {}

    def sources(self, node: fx.Node) -> frozenset[Input]:
        """The inputs on which the node's value depends, ``RANDOM`` among them."""
        needed = _needed(node)
        inputs = frozenset(x for x, _ in self._inputs_of(needed).values())
        return inputs | {RANDOM} if any(draws_numbers(n) for n in needed) else inputs

    def is_made_from_nothing(self, node: fx.Node) -> bool:
        """Whether the value is computed from literals and constants alone."""
        return all(n.op != "placeholder" and not draws_numbers(n) for n in _needed(node))

    def recipe(self, node: fx.Node) -> str:
        """The ops that make a value from literals alone: equal texts, equal values.  "" where a tensor of the
        model leads to it."""
        needed = sorted(_needed(node))
        if any(n.op != "call_function" for n in needed):
            return ""
        names = {n: f"%{number}" for number, n in enumerate(needed)}
        ops = [(str(n.target), *fx.map_arg((n.args, n.kwargs), names.get)) for n in needed]
        return repr((names[node], torch.get_default_dtype(), ops))

    def question(self, node: fx.Node) -> tuple[str, tuple[str, ...]] | None:
        """The leaf of the microbatch that a value is asked of, and the ops; None for other values."""
        needed = _needed(node)
        asked, inputs = question(node, needed), self._inputs_of(needed)
        if asked is None or inputs[asked[0]][0].kind is not Kind.BATCH:
            return None
        return inputs[asked[0]][0].name, asked[1]

    def _inputs_of(self, needed: set[fx.Node]) -> dict[fx.Node, tuple[Input, torch.Tensor]]:
        graph = next(iter(needed)).graph
        placeholders = zip(graph.find_nodes(op="placeholder"), self._inputs, strict=False)
        return {n: x for n, x in placeholders if n in needed}

    def blocks(self, node: fx.Node, root: torch.nn.Module, place: str) -> Iterator[torch.Tensor]:
        """A value that is made from nothing, in blocks of its rows, the dimension before the last.

        So a mask of many tokens is never whole in memory.  Where an op does more than to combine elements at
        the same place, it is one block.
        """
        needed, val = _needed(node), node.meta["val"]
        rows = val.shape[-2] if val.dim() > 1 else 0
        large: dict[Any, None] = {n: None for n in sorted(needed) if _elements(n) > BLOCK}
        if not all(_is_by_rows(n, rows) for n in large) or any(map(is_mutating, needed)):
            yield self.value(node, root, place)[0]
            return
        small = {x: self.value(x, root, place)[0] for n in large for x in n.all_input_nodes if x not in large}
        each = max(1, rows * BLOCK // _elements(node)) if large else rows
        for first in range(0, rows, each) if large else ():
            parts: dict[fx.Node, torch.Tensor] = {}

            def part(x: fx.Node, at: slice = slice(first, first + each)) -> torch.Tensor:
                known = parts.get(x)  # noqa: B023 - called in this round
                if known is not None:
                    return known
                whole = small[x]
                return whole[..., at, :] if whole.dim() > 1 and whole.shape[-2] == rows else whole

            with compat.no_modes():
                for n in large:
                    args = list(fx.map_arg(n.args, part))
                    if n.target is aten.expand.default:
                        args[1] = [*args[1][:-2], min(each, rows - first), args[1][-1]]
                    parts[n] = n.target(*args, **fx.map_arg(n.kwargs, part))
            yield parts[node]
        if not large:
            yield self.value(node, root, place)[0]

    def value(
        self, node: fx.Node, root: torch.nn.Module, place: str, at: fx.Node | None = None
    ) -> tuple[torch.Tensor, frozenset[Input]]:
        """The node's value, and the inputs on which it depends; none if it is the same for all data.

        root: the module with the graph's constants.  place: of the code that reads the value, for messages.
        at: the op that reads it; earlier ones may write to its memory.
        Raises CaptureError for a value that varies with random numbers, and for tensors without values.
        """
        needed = _needed(node, at)
        if any(getattr(n.target, "namespace", "") == "_c10d_functional" for n in needed):
            raise CaptureError(
                f"The model's code reads a value that lanes have summed or gathered, at {place}. A trace has "
                "the values of one of them: keep it a tensor (no .item(), no Python branch there)."
            )
        inputs = self._inputs_of(needed)
        sources = frozenset(x for x, _ in inputs.values())
        with compat.no_modes(), torch.no_grad():
            reals = {n: _real(tensor, place) for n, (_, tensor) in inputs.items()}
            if not any(draws_numbers(n) for n in needed):
                # Values that are written to are recomputed for every read.
                writes = any(is_mutating(n) for n in needed)
                return _run(node, needed, {} if writes else self._known, reals, root), sources
            with torch.random.fork_rng(devices={x.get_device() for x in reals.values() if x.is_cuda}):
                first = _drawn(0, node, needed, reals, root)
                for seed in range(1, DRAWS):
                    if not torch.equal(_drawn(seed, node, needed, reals, root), first):
                        raise _random_branch(first, place)
                return first, sources | {RANDOM}


def _elements(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else 0


def _is_by_rows(node: fx.Node, rows: int) -> bool:
    """Whether an op gives so many rows, each of them from the same rows of its operands."""
    if node.meta["val"].dim() < 2 or node.meta["val"].shape[-2] != rows:
        return False
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or node.target in (aten.expand.default, aten.alias.default)


def _random_branch(value: torch.Tensor, place: str) -> CaptureError:
    # Of a comparison of tensors the trace sees whether all draws agree; not of one of Python's numbers.
    first = ""
    if value.is_floating_point():
        first = "compare the number as a tensor (no .item(), no float() there) and "
    return CaptureError(
        f"The model's code branches on a random number, at {place}. A pipeline program takes the same branch "
        f"at every step: {first}switch the randomness off there (layerdrop=0 where whole layers are left out "
        "at random, validate_args=False for a distribution), or multiply by a random mask instead."
    )


def _real(tensor: torch.Tensor, place: str) -> torch.Tensor:
    if tensor.is_meta:
        raise CaptureError(
            f"The model's code reads a value of the data, at {place}, and the model or the example is on the "
            "meta device, which has none. Give both values, or take the branch out of the model."
        )
    return tensor.detach()


def _drawn(
    seed: int, node: fx.Node, needed: set[fx.Node], reals: dict[fx.Node, torch.Tensor], root: torch.nn.Module
) -> Any:
    torch.default_generator.manual_seed(seed)
    return _run(node, needed, {}, reals, root)


def _run(
    node: fx.Node,
    needed: set[fx.Node],
    values: dict[fx.Node, Any],
    reals: dict[fx.Node, torch.Tensor],
    root: torch.nn.Module,
) -> Any:
    """The node's value.  values: known values, to which those that lead to it are added."""
    writes = any(is_mutating(n) for n in needed)
    n: Any
    for n in sorted(needed - values.keys()):
        if n.op == "call_function":
            kwargs = {**fx.map_arg(n.kwargs, values.get)}
            if kwargs.get("device") == _META:  # of a model without values, whose constants have some
                kwargs["device"] = torch.device("cpu")
            values[n] = n.target(*fx.map_arg(n.args, values.get), **kwargs)
        else:
            value = reals[n] if n.op == "placeholder" else getattr(root, n.target)
            values[n] = value.clone() if writes else value
    return values[node]


def _needed(node: fx.Node, at: fx.Node | None = None) -> set[fx.Node]:
    """The ops that lead to a node, with those that write to its memory or to their inputs: before ``at``, or
    all of them up to now, as an older view sees what was written after it was made."""
    graph, writes = node.graph, defaultdict[fx.Node, list[fx.Node]](list)
    for target in filter(written, call_targets(graph)):  # few of many ops, which are not looked at one by one
        for op in graph.find_nodes(op="call_function", target=target):
            for x in overwritten(op):
                writes[_memory(x)].append(op)
    needed, todo = set[fx.Node](), [(node, at)]
    while todo:
        value, reader = todo.pop()
        before = (op for op in writes.get(_memory(value), ()) if reader is None or op < reader)
        for op in {value, *before} - needed:
            needed.add(op)
            todo += ((x, op) for x in op.all_input_nodes)
    return needed


def _memory(node: fx.Node) -> fx.Node:
    """``memory_roots`` of one node: the trace grows between two questions."""
    while shared := memory_of(node):
        node = shared
    return node
