"""A captured step at other sizes: the counterparts of its tensors in each of the other captures."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from fxpipe.errors import SizeError
from fxpipe.ir.compat import pytree
from fxpipe.ir.graph import Origin
from fxpipe.ir.size import Size
from fxpipe.ir.storage import tensors


@dataclass(frozen=True, eq=False)
class ResizedTraces:
    """The step captured at several points, each a length for every named dimension.

    ``points``: the example's first.
    ``resized_values``: a tensor of the example's graph -> the tensors in its place, one a point.
    ``graphs``: the captures at the other points.  ``leading``: the name of the leading dimension.
    """

    names: tuple[str, ...]
    points: tuple[tuple[int, ...], ...]
    resized_values: dict[torch.Tensor, tuple[torch.Tensor, ...]]
    graphs: tuple[fx.Graph, ...]
    leading: str = ""

    def after_rewrite(self, graph: fx.Graph, graphs: Sequence[fx.Graph]) -> ResizedTraces:
        """The traces of a rewritten graph, given the other captures after the same rewrite."""
        like = [dict(_matched(graph, other)) for other in graphs]
        resized_values = {
            t: (t, *(other[t] for other in like)) for node in graph.nodes for t in tensors(node)
        }
        return replace(self, resized_values=self.resized_values | resized_values, graphs=tuple(graphs))

    def with_values_of(self, graph: fx.Graph) -> ResizedTraces:
        """The traces with the values that passes have added to a graph: their ops, run on the resized values
        of their inputs.  An input that a pass added is an accumulator, as large at every length."""
        values = dict(self.resized_values)
        for node in graph.nodes:
            if all(t in values for t in tensors(node)):
                continue
            if node.op == "placeholder":
                values[node.meta["val"]] = (node.meta["val"],) * len(self.points)
                continue
            others = (_result(node, values, self, point) for point in range(1, len(self.points)))
            for like in zip(tensors(node), *others, strict=True):
                values[like[0]] = like
        return replace(self, resized_values=values)


def value_key(node: fx.Node, args: object, kwargs: object, resized: ResizedTraces | None) -> Hashable:
    """A key that ops have in common which do the same with the same arguments, at other sizes as well.

    The arguments count as text, in which 0.0, -0.0 and False differ.
    """
    sizes_of = {} if resized is None else resized.resized_values
    sizes = tuple(other.shape for t in tensors(node) for other in sizes_of.get(t, ())) if sizes_of else ()
    return node.target, repr(args), repr(kwargs), sizes


def _result(
    node: fx.Node,
    values: Mapping[torch.Tensor, tuple[torch.Tensor, ...]],
    traces: ResizedTraces,
    point: int,
) -> list[torch.Tensor]:
    """The tensors that a node gives at a point."""
    lengths = dict(zip(traces.names, traces.points[point], strict=True))

    def there(value: object) -> object:
        if isinstance(value, Size):
            return value.at(lengths) if {*value.names} <= lengths.keys() else int(value)
        return values[value][point] if isinstance(value, torch.Tensor) else value

    inputs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta.get("val"))
    args, kwargs = pytree.tree_map(there, inputs)
    leaves = pytree.tree_leaves(node.target(*args, **kwargs))  # type: ignore[operator]
    return [x for x in leaves if isinstance(x, torch.Tensor)]


def _matched(graph: fx.Graph, other: fx.Graph) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The tensors of two graphs, side by side."""
    same: dict[fx.Node, fx.Node] = {}
    # Traces of the same ops have them in the same order.
    for a, b in itertools.zip_longest(graph.nodes, other.nodes):
        if (
            a is None
            or b is None
            or a.target != b.target
            or [same[n] for n in a.all_input_nodes] != b.all_input_nodes
            or len(tensors(a)) != len(tensors(b))
            or any(x.dim() != y.dim() for x, y in zip(tensors(a), tensors(b), strict=True))
        ):
            origin = (a or b).meta.get("origin", Origin())
            here, there = (
                sum(node.meta.get("origin", Origin()).source == origin.source for node in each.nodes)
                for each in (graph, other)
            )
            loops = origin.source and here and there and here != there
            loop = f" That line has {here} ops, and {there} at another length, as of a loop over it."
            raise SizeError(
                f"The step is made of other ops at other sizes, from {(a or b).target} on, in "
                f"{origin.module} ({origin.source}).{loop if loops else ''}"
            )
        same[a] = b
        yield from zip(tensors(a), tensors(b), strict=True)
