"""The rows behind products of matrices, and what is like them."""

from __future__ import annotations

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
from fxpipe.ir.builder import node_arg


def product(flow: Flow, node: fx.Node) -> Rows:
    """Of matrices: a sum over the last dimension of one and the last but one of the other."""
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
    other = (a, in_a) if not summed[0] else (b, in_b) if not summed[1] else None
    return flow.tell(node, BY_PLACE, SUMMED) if other and flow.differs(*other) else SUMMED


def distances(flow: Flow, node: fx.Node) -> Rows:
    """Of each row of one matrix to each of another one."""
    last = len(shape_of(node)) - 1
    one, other = (flow.of[node_arg(node, i)].places for i in range(2))
    places = [p for p in one if p.dim < last]
    places += [p.at(last) if p.dim == last - 1 else p for p in other if p.dim < last]
    return each(places) if places else flow.lost(node)


def attention(flow: Flow, node: fx.Node) -> Rows:
    query, key, value = (node_arg(node, i) for i in range(3))
    rows, length = Rows(*flow.of[query][:2]), len(shape_of(key)) - 2
    if any(p.dim == length for x in (key, value) for p in flow.of[x].places) and not flow.on_lanes:
        return flow.tell(node, RELATIVE, rows)
    return rows
