"""The rows behind products of matrices, and what is like them."""

from __future__ import annotations

import torch
from torch import fx

from fxpipe.capture.rows import families
from fxpipe.capture.rows.flow import Flow
from fxpipe.capture.rows.forms import (
    BY_PLACE,
    LOST,
    RELATIVE,
    STATISTIC,
    SUMMED,
    Form,
    Rows,
    each,
    packet_of,
    shape_of,
)
from fxpipe.capture.rows.place import Place
from fxpipe.ir.builder import node_arg
from fxpipe.ir.storage import argument

_MASKS = "attn_mask", "attn_bias"


def product(flow: Flow, node: fx.Node) -> Rows:
    """A product of matrices sums over the last dimension of one and the last but one of the other."""
    start = families.PRODUCTS[packet_of(node)]
    a, b = node_arg(node, start), node_arg(node, start + 1)
    in_a, in_b = len(shape_of(a)) - 1, max(len(shape_of(b)) - 2, 0)
    shift = len(shape_of(node)) - len(shape_of(b))
    places = [p for p in flow.of[a].places if p.dim != in_a]
    places += [p.at(p.dim + shift) if p.dim > in_b else p for p in flow.of[b].places if p.dim != in_b]
    if flow.has(a, Form.SUMMED) or flow.has(b, Form.SUMMED):
        return flow.tell(node, STATISTIC, each(places))
    if flow.has(a, Form.LOST) or flow.has(b, Form.LOST):
        return LOST
    summed = [any(p.dim == dim for p in flow.of[x].places) for x, dim in ((a, in_a), (b, in_b))]
    if not any(summed):
        return each(places)
    if places:
        return flow.tell(node, RELATIVE, each(places))
    one, dim, other, beside = (a, in_a, b, in_b) if summed[0] else (b, in_b, a, in_a)
    along = {p.at(beside) for p in flow.of[one].places if p.dim == dim}
    is_by_place = not all(summed) and any(flow.differs(other, p) for p in along)
    return flow.tell(node, BY_PLACE, SUMMED) if is_by_place else SUMMED


def distances(flow: Flow, node: fx.Node) -> Rows:
    """Distances of each row of one matrix to each of another one are pairs of both."""
    last = len(shape_of(node)) - 1
    one, other = (flow.aligned([node_arg(node, i)], last + 1) for i in range(2))
    places = [p for p in one if p.dim < last]
    places += [p.at(last) if p.dim == last - 1 else p for p in other if p.dim < last]
    return each(places) if places else flow.lost(node)


def attention(flow: Flow, node: fx.Node) -> Rows:
    """Attention keeps rows in a dimension of their own, or behind each other where a mask parts them."""
    query, key, value = (node_arg(node, i) for i in range(3))
    length = len(shape_of(key)) - 2
    if any(flow.has(x, Form.LOST) for x in (query, key, value)):
        return LOST
    behind = [p for x in (key, value) for p in flow.of[x].places]
    rows = each([*flow.of[query].places, *(p for p in behind if p.dim < length)])
    among = {p for p in behind if p.dim == length}
    if among and not flow.on_lanes and not (len(among) == 1 and _is_apart(flow, node, *among)):
        return flow.tell(node, RELATIVE, rows)
    return rows


def _is_apart(flow: Flow, node: fx.Node, keys: Place) -> bool:
    """Whether the mask of an attention is known to let the queries of each row look at its own keys alone, as
    where the images of a batch are one sequence."""
    query = node_arg(node, 0)
    queries = next((p for p in flow.of[query].places if p.dim == len(shape_of(query)) - 2), None)
    mask = next((m for name in _MASKS if isinstance(m := argument(node, name), fx.Node)), None)
    if queries is None or mask is None or {keys.outer, queries.outer, keys.group, queries.group} != {1}:
        return False
    value = flow.value_of_constants(mask)
    if value is None or value.shape[-2:] != (flow.size(queries), flow.size(keys)):
        return False
    may_look = value if value.dtype is torch.bool else value > torch.finfo(value.dtype).min
    of_rows = may_look.unflatten(-1, (flow.rows, -1)).any(-1).unflatten(-2, (flow.rows, -1))
    # [..., rows, the queries of each, rows]: each of them looks at its own row, and at no other
    return bool((of_rows == torch.eye(flow.rows, dtype=torch.bool).unsqueeze(1)).all())
