"""A graph as text, one line a node, to read and to compare.

    B1  d_second_mm = mm(d_model_mul_1, second_weight) : f32[2, 16]

Inputs and results have no color: ``x = batch["x"] : f32[2, 8]``, ``grads["first.weight"] = (d_first_mm,)``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxpipe.ir.compat import OpOverload
from fxpipe.ir.names import text_literal
from fxpipe.ir.storage import graph_outputs
from fxpipe.runtime.torch_private import overload_name


def graph_text(graph: fx.Graph) -> str:
    """The nodes in their order, then the results; the same text for the same graph."""
    return "\n".join([_node(node) for node in graph.nodes if node.op != "output"] + _results(graph))


def _node(node: fx.Node) -> str:
    color = node.meta.get("color")
    place = "" if color is None else f"{color.phase}{color.stage}"
    if node.op == "placeholder":
        step_input = node.meta["input"]
        value = f"{step_input.kind}[{text_literal(step_input.name)}]"
    else:
        named = [f"{name}={_argument(value)}" for name, value in node.kwargs.items()]
        value = f"{_argument(node.target)}({', '.join([*map(_argument, node.args), *named])})"
    result = node.meta.get("val")
    return f"{place:3} {node.name} = {value}" + ("" if result is None else f" : {shape_text(result)}")


def _results(graph: fx.Graph) -> list[str]:
    results: dict[str, object] = {}
    for key, value in graph_outputs(graph)._asdict().items():
        several = value if isinstance(value, dict) else {}
        results |= {f"{key}[{text_literal(name)}]": part for name, part in several.items()}
        if value is not several and value not in (None, ()):
            results[key] = value
    return [f"{'':3} {name} = {_argument(value)}" for name, value in results.items()]


def _argument(value: Any) -> str:
    match value:
        case fx.Node():
            return value.name
        case OpOverload():
            return f"{value.overloadpacket.__name__}.{overload_name(value)}".removesuffix(".default")
        case list():
            return f"[{', '.join(map(_argument, value))}]"
        case tuple():
            return f"({', '.join(map(_argument, value))}{',' if len(value) == 1 else ''})"
        case torch.dtype() | torch.layout() | torch.memory_format():
            return str(value).removeprefix("torch.")
        case torch.device():
            return value.type
    return value.__name__ if callable(value) else repr(value)


def shape_text(value: object) -> str:
    """``f32[2, 16]`` for a tensor; the parts of a tuple in order; the type's name for other values."""
    if isinstance(value, torch.Tensor):
        return f"{_SHORT.get(value.dtype, _argument(value.dtype))}{list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return ", ".join(map(shape_text, value))
    return type(value).__name__


def target_text(node: fx.Node) -> str:
    """``aten.mm.default``; the name of a function that is no op."""
    is_op = isinstance(node.target, OpOverload)
    return str(node.target) if is_op else getattr(node.target, "__name__", str(node.target))


_SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
}
