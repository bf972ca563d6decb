"""Fuses weight gradients with their accumulation, without a temporary of their size.

before: g = mm(a, b);             grads[w] = (g,)
after:  addmm_(grad_w, a, b)      grad_w: the accumulator of w, an input of W

A product of float16 or bfloat16 is added to an accumulator of float32 by ``addmm.dtype_out``, without being
rounded, where the device has that op.  Casts to the accumulator's dtype are left out, as additions promote.
An embedding's gradient adds only the rows that were looked up.  Other gradients are added as they are.  These
are the only nodes that write to an input.  Each stands where its gradient is ready, so that the operands die
at once; several for one accumulator keep their order, on which its bits depend.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import fx

from fxpipe.ir.builder import Calls, node_arg
from fxpipe.ir.compat import has_kernel
from fxpipe.ir.graph import Input, Kind, Origin
from fxpipe.ir.names import identifier
from fxpipe.ir.nodes import new_node
from fxpipe.ir.storage import drop_dead, graph_outputs, is_view, set_outputs
from fxpipe.plan.tensors import gradient_dtype
from fxpipe.schedule.ops import Color, Phase

aten = torch.ops.aten
_ADDMM = aten.addmm.dtype_out


def fuse_accumulation(graph: fx.Graph, grad_dtype: torch.dtype | None = None, lookups: int = 0) -> None:
    """lookups: the first stages, which are shards of an embedding."""
    first = next(n for n in graph.nodes if n.op != "placeholder")
    calls, fused = Calls(graph), dict[str, tuple[fx.Node, ...]]()
    # A gradient of two parameters is needed twice, so it cannot be a part of one addition.
    times = Counter(part for parts in graph_outputs(graph).grads.values() for part in parts)
    for name, parts in graph_outputs(graph).grads.items():
        with graph.inserting_before(first):
            accumulator = identifier(f"grad_{name}")
            into = new_node(graph, "placeholder", accumulator, (), {}, accumulator)
        val = parts[0].meta["val"]
        val = val.to(gradient_dtype(val.dtype, grad_dtype))
        into.meta.update(input=Input(Kind.GRADIENT, name), val=val, origin=Origin())
        last: dict[Color, fx.Node] = {}
        for part in parts:
            color = _color(part, lookups)
            # In the order of the summands, as sums of floats depend on it.
            with graph.inserting_before(max(part, last.get(color, part)).next):
                last[color] = _accumulated(calls, into, part, color, times[part] == 1)
            fused[name] = (*fused.get(name, ()), last[color])
    set_outputs(graph, grads=fused)
    drop_dead(graph)


def _color(part: fx.Node, lookups: int) -> Color:
    """The color of the addition of a part: W, but B where it is of a head in parts or of a lookup, whose
    backward is B, or a matrix that an op of B gives with its other gradients: until W it would be held for
    each microbatch, as large as the parameter."""
    color: Color = part.meta["color"]
    if "chunk" in part.meta or color.stage < lookups:
        return color
    chain = [part]
    while is_view(chain[-1]) or chain[-1].target is aten._to_copy.default:
        chain.append(node_arg(chain[-1], 0))
    made = chain[-1].meta.get("color")  # none of an input
    if made != Color(color.stage, Phase.B) or part.meta["val"].dim() < 2:
        return Color(color.stage, Phase.W)
    for node in chain:
        node.meta["color"] = made
    return Color(color.stage, Phase.B)


def _accumulated(calls: Calls, into: fx.Node, part: fx.Node, color: Color, once: bool) -> fx.Node:
    """Add ``part`` to ``into``; a part that is added only ``once`` is fused with the addition."""
    total = into.meta["val"]

    def call(target: object, *args: object, **kwargs: object) -> fx.Node:
        return calls(target, args, kwargs, color=color, origin=part.meta["origin"], val=total)

    source, transposed = _source(part, total.dtype) if once else (part, False)
    target = into
    if transposed:
        target = call(aten.t.default, into)
        target.meta["val"] = total.t()
    if once and len(source.users) == 1 and source.meta["color"] == color:
        if source.target is aten.mm.default:
            # ``addmm_`` computes and adds in one kernel, without memory for the product.
            if source.meta["val"].dtype == total.dtype:
                return call(aten.addmm_.default, target, *source.args)
            if _is_widened(source.meta["val"], total):
                return call(_ADDMM, target, *source.args, out_dtype=total.dtype, out=target)
        if source.target is aten.embedding_dense_backward.default and _plain_lookup(source):
            return _add_rows(call, target, source)
    return call(aten.add_.Tensor, target, source)


def _source(part: fx.Node, dtype: torch.dtype) -> tuple[fx.Node, bool]:
    """The value that casts and transpositions lead from to ``part``, if it has no other use, and whether it
    is transposed.  A cast that rounds is left out where the accumulator's ``dtype`` has more bits than the
    parameter's: sums are meant to be more exact then."""
    source, transposed, rounded = part, False, part.meta["val"].dtype == dtype
    while len(source.users) == 1 and source.target in (aten.t.default, aten._to_copy.default):
        before = node_arg(source, 0)
        if source.target is aten.t.default:
            transposed = not transposed
        else:
            old, new = before.meta["val"], source.meta["val"]
            if old.device != new.device or not _holds(new.dtype if rounded else dtype, old.dtype):
                break
        source = before
    return source, transposed


def _holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether the numbers of another dtype are numbers of ``dtype``, and additions promote them to it (floats
    of eight bits are not promoted)."""
    return other.itemsize > 1 and torch.promote_types(other, dtype) == dtype


def _is_widened(product: torch.Tensor, total: torch.Tensor) -> bool:
    """Whether ``_ADDMM`` adds a product of this dtype to the accumulator."""
    low = product.dtype in (torch.float16, torch.bfloat16)
    return low and total.dtype == torch.float32 and has_kernel(_ADDMM, total.device.type)


def _add_rows(call: Callable[..., fx.Node], into: fx.Node, part: fx.Node) -> fx.Node:
    """Add to the accumulator the rows that an embedding looked up; ``index_add_`` does not promote."""
    gradient, index = node_arg(part, 0), node_arg(part, 1)
    width, dtype = part.meta["val"].shape[1], into.meta["val"].dtype
    rows = call(aten.reshape.default, index, [-1])
    rows.meta["val"] = index.meta["val"].reshape(-1)
    values = call(aten.reshape.default, gradient, [-1, width])
    values.meta["val"] = gradient.meta["val"].reshape(-1, width)
    if values.meta["val"].dtype != dtype:
        narrow, values = values, call(aten._to_copy.default, values, dtype=dtype)
        values.meta["val"] = narrow.meta["val"].to(dtype)
    return call(aten.index_add_.default, into, 0, rows, values)


def _plain_lookup(node: fx.Node) -> bool:
    """Whether an embedding has neither a padding row nor scaling by frequency."""
    padding, scaled = node.args[3:5]
    return bool(padding == -1 and not scaled)
