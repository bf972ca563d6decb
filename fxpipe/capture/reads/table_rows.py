"""Checks that tables have the rows that a step takes whatever its data are, as those of positions; and finds
what data take as they are, for a check of each batch.

A trace looks at shapes alone, so a table that is too short would fail in a step, amidst its messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import fx

from fxpipe.capture.reads.example import Example
from fxpipe.errors import CaptureError, number_of
from fxpipe.ir.builder import node_arg
from fxpipe.ir.graph import Kind, Origin
from fxpipe.ir.ops import boundaries_of_documents
from fxpipe.ir.size import Size, sized
from fxpipe.ir.storage import argument, call_nodes, is_view
from fxpipe.plan.step import Boundaries, Table

aten = torch.ops.aten

_CASTS, _PAD = (aten._to_copy.default, aten.clone.default), aten.constant_pad_nd.default
_LOSSES = aten.nll_loss_forward.default, aten.nll_loss2d_forward.default
_RAISES = aten.clamp.default, aten.clamp_min.default
_WHOLE = torch.int64, torch.int32


def check_table_rows(graph: fx.Graph, root: torch.nn.Module) -> None:
    """Raise CaptureError, naming module and line, for rows that the example takes and a table lacks.

    root: the module with the graph's constants.
    """
    example = Example(())
    for node in call_nodes(graph):
        if node.target is not torch.ops.aten.embedding.default:
            continue
        table, rows = node.args[:2]
        if not (isinstance(table, fx.Node) and isinstance(rows, fx.Node)) or not rows.meta["val"].numel():
            continue
        if example.is_made_from_nothing(rows):
            origin, number = node.meta.get("origin", Origin()), table.meta["val"].shape[0]
            last = int(example.value(rows, root, origin.source)[0].max())
            if last >= number:
                raise CaptureError(
                    f"The example takes row {last} of a table with {number_of(number, 'row')}, in "
                    f"{origin.module} ({origin.source}): give a shorter example, or a longer table."
                )


def tables_of(graphs: Sequence[fx.Graph]) -> tuple[Table, ...]:
    """What leaves of the batch are rows or classes of, as the step at each of several lengths reads them."""
    first, *others = (dict.fromkeys(_tables(graph)) for graph in graphs)
    return tuple(table for table in first if all(table in other for other in others))


def boundaries_of(
    graphs: Sequence[fx.Graph], names: Sequence[str], points: Sequence[Sequence[int]]
) -> tuple[Boundaries, ...]:
    """The leaves of the batch that say where documents begin and end, by the step at each of several points,
    which gives the names their lengths."""
    found = dict[Boundaries, None]()
    for leaves, margins, tokens in (
        zip(*each, strict=True) for each in zip(*map(_divided, graphs), strict=True)
    ):
        number = sized(tokens, names, points)
        if number is not None and len({*leaves}) == len({*margins}) == 1:
            terms = number.terms if isinstance(number, Size) else ((number, 1, *[0] * len(names)),)
            found[Boundaries(leaves[0], terms, margins[0])] = None
    return tuple(found)


def _divided(graph: fx.Graph) -> Iterator[tuple[str, tuple[tuple[int, int], ...], int]]:
    """Of boundaries that attention is given the leaf, what of it is not read, and the number of tokens."""
    for node in call_nodes(graph):
        for tokens, ends in boundaries_of_documents(node):
            way = _way(ends)
            if way and (margins := _margins(way)) is not None:
                yield way[0].meta["input"].name, margins, tokens.meta["val"].shape[0]


def _tables(graph: fx.Graph) -> Iterator[Table]:
    for node in call_nodes(graph):
        for rows, taken, least, ignored in _reads(node):
            way = _way(taken)
            if way and (margins := _margins(way)) is not None:
                is_raised = any(each.target in _RAISES for each in way)
                yield Table(way[0].meta["input"].name, rows, None if is_raised else least, ignored, margins)


def _reads(node: fx.Node) -> Iterator[tuple[int, fx.Node, int, int | None]]:
    """The whole numbers by which an op takes rows or classes: how many there are, the least one, and which
    value is none."""
    if node.target is aten.embedding.default:
        yield node_arg(node, 0).meta["val"].shape[0], node_arg(node, 1), 0, None
    elif node.target in _LOSSES:
        shape = node_arg(node, 0).meta["val"].shape
        ignored = argument(node, "ignore_index")
        assert isinstance(ignored, int), "a number of the trace"
        yield shape[min(1, len(shape) - 1)], node_arg(node, 1), 0, ignored
    elif node.target is aten.gather.default:
        yield node_arg(node, 0).meta["val"].shape[node.args[1]], node_arg(node, 2), 0, None
    elif node.target is aten.index.Tensor:
        indices = node.args[1]
        assert isinstance(indices, Sequence), "one for each dimension"
        for rows, taken in zip(node_arg(node, 0).meta["val"].shape, indices, strict=False):
            if isinstance(taken, fx.Node) and taken.meta["val"].dtype in _WHOLE:
                yield rows, taken, -rows, None


def _way(taken: fx.Node) -> list[fx.Node]:
    """The nodes from a leaf of whole numbers to what an op reads of it: views, copies, what it pads, and
    negative numbers as 0; none from elsewhere."""
    way = [taken]
    while way[-1].op == "call_function":
        node = way[-1]
        is_zero_at_least = node.target in _RAISES and argument(node, "min") == 0
        is_known = is_view(node) or is_zero_at_least or node.target in (*_CASTS, _PAD)
        if not is_known or node.target is aten.as_strided.default:  # of a layout that is not known here
            return []
        way.append(node_arg(node, 0))
    leaf = way[-1]
    is_leaf = leaf.op == "placeholder" and leaf.meta["input"].kind is Kind.BATCH
    return way[::-1] if is_leaf and leaf.meta["val"].dtype in _WHOLE else []


def _margins(way: Sequence[fx.Node]) -> tuple[tuple[int, int], ...] | None:
    """What of a leaf is not read, as of labels without their first column; None of another part."""
    leaf, *others = way
    shape = leaf.meta["val"].shape
    places = torch.arange(leaf.meta["val"].numel(), device="cpu").reshape(shape)
    for node in others:
        if node.target is _PAD:
            places = _PAD(places, node.args[1], -1)
        elif is_view(node):
            places = node.target(places, *node.args[1:], **node.kwargs)  # type: ignore[operator]
        else:
            places = places.contiguous()
    read = torch.zeros(shape, dtype=torch.bool, device="cpu")
    read.view(-1)[places[places >= 0]] = True
    if not read.any():
        return None
    at = read.nonzero()
    ends = [(int(a), n - 1 - int(b)) for a, b, n in zip(at.amin(0), at.amax(0), shape, strict=True)]
    inside = read[tuple(slice(a, n - b) for (a, b), n in zip(ends, shape, strict=True))]
    return tuple(ends) if bool(inside.all()) else None
