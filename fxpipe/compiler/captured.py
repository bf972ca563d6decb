"""The captured graph as data (``plan/captured.py``); ``certificate/reference.py`` reads it."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from math import isfinite
from typing import Any

import torch
from torch import fx

from fxpipe.ir.graph import Input, Outputs
from fxpipe.plan.captured import CAPTURED_FORMAT, CapturedInput, CapturedOp, CapturedOps, digest
from fxpipe.runtime.torch_private import schema_of


def captured_step(graph: fx.Graph, constants: Mapping[str, torch.Tensor], *, split: bool) -> CapturedOps:
    """A captured graph as data.  ``split``: whether its vocabulary layers are split over the ranks.

    Raises TypeError for an argument that has no form as data.
    """
    numbers: dict[fx.Node, int] = {}
    inputs, ops = [], []
    for node in sorted(graph.nodes, key=lambda node: node.op != "placeholder"):
        if node.op == "placeholder":
            entry: Input = node.meta["input"]
            inputs.append(CapturedInput(str(entry.kind), entry.name, *_layout(node.meta.get("val"))))
        elif node.op == "call_function":
            ops.append(_op(node, numbers))
        numbers[node] = len(numbers)
    named: Outputs = graph.output_node().args[0]  # type: ignore[assignment]
    return CapturedOps(
        format=CAPTURED_FORMAT,
        inputs=tuple(inputs),
        ops=tuple(ops),
        loss=None if named.loss is None else numbers[named.loss],
        count=None if named.count is None else numbers[named.count],
        outputs={name: numbers[node] for name, node in named.outputs.items()},
        grads={name: tuple(numbers[n] for n in nodes) for name, nodes in named.grads.items()},
        buffers={name: numbers[node] for name, node in named.buffers.items()},
        checks=tuple(numbers[node] for node in named.checks),
        split=split,
        constants={name: digest(constants[name]) for name in sorted(constants)},
    )


def _layout(value: object) -> tuple[tuple[int, ...] | None, str | None]:
    if not isinstance(value, torch.Tensor):
        return None, None
    return tuple(int(size) for size in value.shape), str(value.dtype)


def _op(node: fx.Node, numbers: dict[fx.Node, int]) -> CapturedOp:
    value = node.meta.get("val")
    return CapturedOp(
        node.name,
        _target(node.target),
        tuple(encoded(argument, numbers) for argument in node.args),
        {name: encoded(argument, numbers) for name, argument in node.kwargs.items()},
        *_layout(value),
        results=len(value) if isinstance(value, tuple | list) else None,
        position=node.meta.get("random_position"),
    )


def _target(target: Any) -> str:
    if target is operator.getitem:
        return "getitem"
    return str(target) if schema_of(target) else str(target.__name__)


def encoded(argument: object, numbers: dict[fx.Node, int]) -> object:
    """An op's argument as JSON."""
    match argument:
        case fx.Node():
            return {"value": numbers[argument]}
        case list() | tuple():
            return [encoded(each, numbers) for each in argument]
        case float() if not isfinite(argument):
            return {"float": str(argument)}
        case float():
            return float(argument)  # of a share, the number
        case complex():
            return {"complex": [encoded(argument.real, numbers), encoded(argument.imag, numbers)]}
        case None | bool() | int() | str():
            return argument
        case torch.device():
            return {"device": argument.type}
        case torch.dtype() | torch.layout() | torch.memory_format():
            return {"torch": str(argument)}
        case _ if schema_of(argument):
            return {"op": str(argument)}
    raise TypeError(f"No data for an argument of type {type(argument).__name__}: {argument!r}")
