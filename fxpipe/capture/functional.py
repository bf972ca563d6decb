"""The traced graph made functional: no node writes to a value that another one reads.

The first trace shows what autograd really ran, in-place ops included.  Where there are any, the
graph is run once more through ``torch.func.functionalize``; node metadata is carried across.  A write
to a buffer becomes an output of the step.

before: native_batch_norm(x, …, mean, var, training)     which moves mean and var and does not say so
        native_batch_norm_backward(…, mean, var, …)      which reads them in evaluation alone
after:  _native_batch_norm_legit_functional(…)           which returns the new mean and var
        native_batch_norm_backward(…, None, None, …)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxpipe import compat
from fxpipe.errors import CaptureError
from fxpipe.values import storage_root, written_arguments

aten = torch.ops.aten


def is_mutating(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def functionalize(module: fx.GraphModule, inputs: list[Any]) -> fx.GraphModule:
    """Return an equal module without in-place ops, but for ``copy_`` to placeholders at the end."""
    module.graph.eliminate_dead_code()  # what was folded, and could not be run again on fake tensors
    _declare_writes(module.graph)
    for node in module.graph.nodes:
        for argument in written_arguments(node.target, node.args, node.kwargs):
            if isinstance(argument, fx.Node) and storage_root(argument).op == "get_attr":
                raise writes_to_a_constant(node.meta["origin"])
        if is_mutating(node) and node.target.namespace != "aten":
            raise CaptureError(
                f"{node.target} writes to its arguments, which can be followed for torch's own ops alone "
                f"({node.meta['origin']}). Let the op return what it would write."
            )
    if not any(is_mutating(node) for node in module.graph.nodes):
        return module
    interpreter = _Carrying(module)
    with torch.no_grad():
        return make_fx(torch.func.functionalize(interpreter.run), _allow_non_fake_inputs=True)(*inputs)


def _declare_writes(graph: fx.Graph) -> None:
    """Batch norms of running statistics in the form whose schema says that they write to them."""
    for node in graph.nodes:
        if node.target is aten.native_batch_norm.default:
            mean, training = node.args[3], node.args[5]
            if training and mean is not None:
                node.target = aten._native_batch_norm_legit.default
        elif node.target is aten.native_batch_norm_backward.default:
            mean, training = node.args[3], node.args[7]
            if training and mean is not None:
                node.args = (*node.args[:3], None, None, *node.args[5:])


def writes_to_a_constant(place: Any) -> CaptureError:
    return CaptureError(
        f"The forward writes to a tensor that is no buffer ({place}). A program cannot carry it from step to "
        "step: make it a buffer of the model, or write to a clone."
    )


class _Carrying(fx.Interpreter):
    """Gives the nodes of the running trace the metadata of the node that is being interpreted."""

    def __init__(self, module: fx.GraphModule):
        super().__init__(module)
        self._seen: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        try:
            result = super().run_node(n)
        except RuntimeError as error:
            raise CaptureError(
                f"What {n.target} writes cannot be followed ({n.meta.get('origin', 'an unknown line')}): "
                f"{str(error).strip().splitlines()[0]}"
            ) from error
        graph = compat.traced_graph()
        for node in compat.nodes_after(self._seen, graph):
            for key in ("origin", "random_position"):
                if key in n.meta:
                    node.meta[key] = n.meta[key]
            self._seen = node
        return result
