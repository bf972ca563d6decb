"""Splits the vocabulary layers over all ranks: every rank has some rows of the tables.

before: logits = x @ table.T ──► log_softmax ──► loss;   d_logits ──► d_x, d_table
after:  on every rank, of its rows:
  S  local logits, their maximum, the sum of their exponentials, the labels' logits; with one barrier also
     both parts of d_x, not yet scaled
     ── barrier: each rank gets the statistics of all ──
  R  the loss; the rank's part of d_x; the last stage adds the parts up
  T  d_table, at any later time

S, R and T are the F, B and W of a *vocabulary stage*, one a rank behind the model's stages.  The lookups of
such tables are spread over vocabulary stages before them.  (Vocabulary parallelism, arXiv 2411.05288.)
"""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import fx

from fxpipe.errors import VocabularyError
from fxpipe.ir.builder import Builder, in_order, node_arg
from fxpipe.ir.graph import Origin
from fxpipe.ir.nodes import rename, take_name
from fxpipe.ir.ops import adds_values, summands_of
from fxpipe.ir.storage import call_nodes, drop_dead, graph_outputs, set_outputs
from fxpipe.plan.tensors import sum_over_ranks
from fxpipe.schedule.ops import Phase
from fxpipe.schedule.stages import Vocabulary
from fxpipe.vocabulary.gradients import Gradients
from fxpipe.vocabulary.layers import VocabularyLayers, find_layers
from fxpipe.vocabulary.lookups import Lookups
from fxpipe.vocabulary.products import OneBarrier, Products, TwoBarriers
from fxpipe.vocabulary.shard import Shard
from fxpipe.vocabulary.softmax import Softmax

aten = torch.ops.aten
_UNIT = 64  # rows of a shard are a multiple of it where the table is large: matrix products like that
_EVEN = 0.01  # by how much a shard may be larger than the mean


def split_vocabulary(
    graph: fx.Graph, ranks: int, barriers: int, shares: Set[str] = frozenset()
) -> Vocabulary:
    """Rewrite a step behind ``prepare_head``.  The colors of output shards have negative stages, counted from
    the last one, which ``partition`` replaces.

    shares: the tensors of which each lane of a rank has a share.
    Raises VocabularyError if there is no vocabulary layer, or one that cannot be split.
    """
    layers = find_layers(graph)
    if both := shares & {table.meta["input"].name for table in layers.tables}:
        raise VocabularyError(
            "A vocabulary is split once: over ranks by vocab_parallel, or over lanes by the plan of "
            f"parallelize_module, as this one is ({', '.join(sorted(both))}). Take its module out of the "
            "plan, or leave out vocab_parallel."
        )
    bounds = shard_bounds(layers.size, ranks)
    embedding_shards = ranks if layers.lookups else 0
    parts = [
        _Part(Shard(graph, layers, bounds[r], bounds[r + 1], r, r - ranks), barriers) for r in range(ranks)
    ]
    # Lookups first: what they give is what the other layers start from.
    for lookup in layers.lookups:
        _add_up(graph, lookup, [p.lookups.part(lookup) for p in parts], lookup.meta["origin"])
    # Of all ranks before any combines them, as each of them needs all.
    statistics = [p.softmax.statistics() for p in parts]
    for p in parts:
        p.softmax.combine(statistics)
    for product in layers.products:
        for p in parts:
            p.products.before(product)
    for product in layers.products:
        # Only then: it takes the product out of the graph, which ``before`` of another one may read.
        _add_up(graph, product, [p.products.after(product) for p in parts], _before_projection(product))
    for total in layers.totals:
        _add_up(graph, total, [p.total(total) for p in parts], total.meta["origin"])
    _set_outputs(graph, layers, parts)
    in_order(graph)
    drop_dead(graph)
    return Vocabulary(embedding_shards, output_shards=ranks, barriers=barriers)


def shard_bounds(size: int, ranks: int) -> list[int]:
    """The begin of each rank's rows, and the end of the last.

    Raises VocabularyError for fewer rows than ranks.
    """
    if size < ranks:
        raise VocabularyError(
            f"vocab_parallel spreads the vocabulary over all ranks, and it has {size} entries for {ranks} "
            "ranks. Compile without vocab_parallel, or with fewer ranks."
        )
    unit = _UNIT
    # A unit more or less must be a small share of a rank's rows.
    while unit > 1 and unit * ranks > _EVEN * size:
        unit //= 2
    units = -(-size // unit)
    return [min(size, unit * (units * r // ranks)) for r in range(ranks)] + [size]


class _Part:
    """The ops of one rank's shard."""

    def __init__(self, shard: Shard, barriers: int) -> None:
        self.shard = shard
        self.lookups = Lookups(shard)
        self.softmax = Softmax(shard)
        gradients = Gradients(shard, self.softmax)
        one = barriers == 1
        # With one barrier the products come before it, unscaled; with two, they wait for the statistics.
        self.products: Products = OneBarrier(shard, self.softmax, gradients) if one else TwoBarriers(shard)

    def total(self, node: fx.Node) -> fx.Node:
        """The shard's summand of a sum of gradients over tokens and vocabulary."""
        self.shard.phase = Phase.B
        summands = self.shard.local(node_arg(node, 0))
        return self.shard.at(Phase.B, node.meta["origin"]).copy(node, (summands, *node.args[1:]), node.kwargs)


def _add_up(graph: fx.Graph, old: fx.Node, parts: list[fx.Node], origin: Origin) -> None:
    """Let the sum of the ranks' parts take the place of a value, and its name; it is made on the way to its
    use."""
    build = Builder(graph)
    build.origin = origin
    total = parts[0] if len(parts) == 1 else build.call(sum_over_ranks, *parts)
    # Later ops need a node of the model's own.
    view = build.call(aten.view.default, total, list(old.meta["val"].shape))
    old.replace_all_uses_with(view)
    if "gradient" in old.meta:
        for part in parts:
            rename(part, f"{old.name}_part")
    has_shape = total not in parts and total.meta["val"].shape == view.meta["val"].shape
    take_name(total if has_shape else view, old)


def _before_projection(product: fx.Node) -> Origin:
    """The origin of the gradient of the projected value: the op that made that value."""
    projection: Origin = product.meta["origin"]
    source: fx.Node | None = next(
        n
        for n in call_nodes(product.graph)
        if n.meta["origin"].seq == projection.seq and not n.meta["origin"].backward
    )
    while source is not None:
        source = next((n for n in source.all_input_nodes if n.op == "call_function"), None)
        if source is not None and source.meta["origin"].seq != projection.seq:
            origin = source.meta["origin"]
            return Origin(origin.path, origin.source, origin.seq, backward=True)
    return projection


def _set_outputs(graph: fx.Graph, layers: VocabularyLayers, parts: list[_Part]) -> None:
    """Loss, count and outputs that follow from the loss come from the last rank, the tables' gradients from
    each."""
    named, last = graph_outputs(graph), parts[-1].softmax
    tables = {table.meta["input"].name for table in layers.tables}
    grads: dict[str, tuple[fx.Node, ...]] = {}

    def of_words(node: fx.Node) -> bool:
        return adds_values(node) and all(x in layers.axes for x in node.all_input_nodes)

    for name, summands in named.grads.items():
        if name not in tables:
            grads[name] = summands
            continue
        leaves = summands_of(summands, of_words)
        for part in parts:
            part.shard.phase = Phase.W
            # Each rank trains its own rows, as a parameter of its own.
            grads[part.shard.rows(name)] = tuple(part.shard.local(leaf) for leaf in leaves)
    set_outputs(
        graph,
        loss=None if named.loss is None else last.local_copy(named.loss),
        count=None if named.count is None else last.local_copy(named.count),
        outputs={name: last.local_copy(node) for name, node in named.outputs.items()},
        grads=grads,
    )
    last.give_the_rest()
