"""The example's real values, where a trace must know one: a Python branch on data, a number read from it.

    part of the graph that is being traced, real inputs  ──►  the value of one of its nodes

Only the ops that lead to the value are run, in-place ops on it included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxpipe.capture.functional import is_mutating
from fxpipe.errors import CaptureError
from fxpipe.ir import compat
from fxpipe.ir.graph import Kind
from fxpipe.ir.storage import draws_numbers, storage_root, written_arguments


class Example:
    """inputs: the kind of each placeholder of the graph, and its real tensor, in order."""

    def __init__(self, inputs: Sequence[tuple[Kind, torch.Tensor]]):
        self._inputs = inputs
        self._known: dict[fx.Node, Any] = {}

    def value(self, node: fx.Node, root: torch.nn.Module, place: str) -> tuple[torch.Tensor, frozenset[Kind]]:
        """The node's value, and the kinds of inputs that it depends on (none: it is the same for all data).

        root: where the graph's constants hang.  place: of the code that asks, for messages.
        Raises CaptureError where a random number or a tensor without values leads to it.
        """
        needed = _needed(node)
        # Ops that write are run again for every question, on copies.
        writes = any(is_mutating(n) for n in needed)
        values = {} if writes else self._known
        kinds = set()
        with compat.no_modes(), torch.no_grad():
            placeholders = iter(self._inputs)
            for n in node.graph.nodes:
                kind, given = next(placeholders) if n.op == "placeholder" else (None, None)
                if n in needed and kind is not None:
                    kinds.add(kind)
                if n in needed and n not in values:
                    values[n] = _run(n, values, root, place) if given is None else _real(given, place)
                    if writes and n.op != "call_function":
                        values[n] = values[n].clone()
        return values[node], frozenset(kinds)


def _real(given: torch.Tensor, place: str) -> torch.Tensor:
    if given.is_meta:
        raise CaptureError(
            f"The model's code reads a value of the data, at {place}, and the model or the example is on the "
            "meta device, which has none. Give both values, or take the branch out of the model."
        )
    return given.detach()


def _run(node: fx.Node, values: dict[fx.Node, Any], root: torch.nn.Module, place: str) -> Any:
    if node.op == "get_attr":
        return getattr(root, node.target)  # type: ignore[arg-type]
    if draws_numbers(node):
        raise CaptureError(
            f"The model's code branches on a random number, at {place}. A pipeline program takes the same "
            "branch at every step: switch the randomness off there (layerdrop=0 where whole layers are left "
            "out at random, validate_args=False for a distribution), or multiply by a random mask instead."
        )
    return node.target(*fx.map_arg(node.args, values.get), **fx.map_arg(node.kwargs, values.get))  # type: ignore


def _needed(node: fx.Node) -> set[fx.Node]:
    """The ops that lead to a node, with the ops that write to their inputs."""
    needed, roots = {node}, {storage_root(node)}
    while node.op != "root":
        if node in needed or any(storage_root(x) in roots for x in _overwritten(node)):
            needed.add(node)
            needed.update(node.all_input_nodes)
            roots.update(storage_root(x) for x in node.all_input_nodes)
        node = node.prev
    return needed


def _overwritten(node: fx.Node) -> list[fx.Node]:
    """The values that a node writes to."""
    found = written_arguments(node.target, node.args, node.kwargs)
    return [x for x in found if isinstance(x, fx.Node)]
