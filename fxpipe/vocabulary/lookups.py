"""A split lookup: each rank computes the rows that it holds, and zeros in place of the others."""

from __future__ import annotations

import torch
from torch import fx

from fxpipe.errors import VocabularyError
from fxpipe.ir.builder import cast, node_arg
from fxpipe.schedule.ops import Phase
from fxpipe.vocabulary.shard import Shard

aten = torch.ops.aten


class Lookups:
    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        shard.makers[aten.embedding_dense_backward.default] = self.gradient

    def part(self, node: fx.Node) -> fx.Node:
        """The shard's summand of an embedding."""
        index = self._index(node_arg(node, 1), Phase.F)
        build = self.shard.at(Phase.F, node.meta["origin"], self.shard.lookup_stage)
        row, inside = self.shard.inside(index, build)
        rows = build.call(aten.embedding.default, self.shard.table(node_arg(node, 0)), row)
        mask = build.call(aten.unsqueeze.default, inside, -1)
        return build.call(aten.mul.Tensor, rows, cast(build, mask, rows.meta["val"].dtype))

    def gradient(self, node: fx.Node) -> fx.Node:
        above, _, _, padding, scaled = node.args
        if scaled:
            raise VocabularyError(
                "vocab_parallel cannot split an embedding whose gradient is scaled by frequency "
                f"({node.meta['origin'].path}). Build it without scale_grad_by_freq."
            )
        index = self._index(node_arg(node, 1), Phase.W)
        build = self.shard.at(Phase.W, node.meta["origin"], self.shard.lookup_stage)
        row, inside = self.shard.inside(index, build)
        if padding != -1:
            kept = build.call(aten.ne.Scalar, index, padding)
            inside = build.call(aten.bitwise_and.Tensor, inside, kept)
        mask = build.call(aten.unsqueeze.default, inside, -1)
        own = build.call(aten.mul.Tensor, above, cast(build, mask, node_arg(node, 0).meta["val"].dtype))
        return build.call(aten.embedding_dense_backward.default, own, row, self.shard.size, -1, False)

    def _index(self, node: fx.Node, phase: Phase) -> fx.Node:
        """Copies, for the lookups, of values computed from the batch alone."""
        if node.op != "call_function":
            return node
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self._index(n, phase))
        return self.shard.at(phase, node.meta["origin"], self.shard.lookup_stage).copy(node, args, kwargs)
