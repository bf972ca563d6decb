"""A captured step at other sizes: the counterparts of its tensors in each of the other captures."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from fxpipe.errors import SizeError
from fxpipe.ir.graph import Origin
from fxpipe.ir.storage import tensors


@dataclass(frozen=True, eq=False)
class ResizedTraces:
    """The step captured at several points, each a length for every named dimension.

    ``points``: the example's first.
    ``resized_values``: a tensor of the example's graph -> the tensors in its place, one a point.
    ``graphs``: the captures at the other points.
    """

    names: tuple[str, ...]
    points: tuple[tuple[int, ...], ...]
    resized_values: dict[torch.Tensor, tuple[torch.Tensor, ...]]
    graphs: tuple[fx.Graph, ...]

    def after_rewrite(self, graph: fx.Graph, graphs: Sequence[fx.Graph]) -> ResizedTraces:
        """The traces of a rewritten graph, given the other captures after the same rewrite."""
        like = [dict(_matched(graph, other)) for other in graphs]
        resized_values = {
            t: (t, *(other[t] for other in like)) for node in graph.nodes for t in tensors(node)
        }
        return replace(self, resized_values=self.resized_values | resized_values, graphs=tuple(graphs))


def value_key(node: fx.Node, args: object, kwargs: object, resized: ResizedTraces | None) -> Hashable:
    """A key that ops have in common which do the same with the same arguments, at other sizes as well.

    The arguments count as text, in which 0.0, -0.0 and False differ.
    """
    sizes_of = {} if resized is None else resized.resized_values
    sizes = tuple(other.shape for t in tensors(node) for other in sizes_of.get(t, ())) if sizes_of else ()
    return node.target, repr(args), repr(kwargs), sizes


def monomials(count: int, terms: int) -> list[tuple[int, ...]]:
    """The exponents of the monomials of ``count`` lengths that a size of one term or two may have."""
    # Fewer for sums of two terms of many lengths, whose pairs would be too many to try.
    degree = max(3, count) if terms == 1 or count <= 3 else 2
    return [e for e in itertools.product(range(degree + 1), repeat=count) if sum(e) <= degree]


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
            raise SizeError(
                f"The step is made of other ops at other sizes, from {(a or b).target} on, in "
                f"{origin.module} ({origin.source})."
            )
        same[a] = b
        yield from zip(tensors(a), tensors(b), strict=True)
