"""A split lookup: each rank computes the rows that it holds, and zeros in place of the others."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import fx

from fxpipe.errors import VocabularyError
from fxpipe.ir.builder import node_arg
from fxpipe.schedule.ops import Phase
from fxpipe.vocabulary.shard import Shard

aten = torch.ops.aten


class Lookups:
    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        # One copy of each value, else as many as there are ways to it: a hash reads each of its steps twice.
        self._copies: defaultdict[Phase, dict[fx.Node, fx.Node]] = defaultdict(dict)
        shard.makers[aten.embedding_dense_backward.default] = self.gradient

    def part(self, node: fx.Node) -> fx.Node:
        """The shard's summand of an embedding."""
        index = self._index(node_arg(node, 1), Phase.F)
        build = self.shard.at(Phase.F, node.meta["origin"], self.shard.lookup_stage)
        row, outside = self.shard.nearest_rows(index, build)
        rows = build.call(aten.embedding.default, self.shard.table(node_arg(node, 0)), row)
        return build.call(aten.masked_fill.Scalar, rows, build.call(aten.unsqueeze.default, outside, -1), 0)

    def gradient(self, node: fx.Node) -> fx.Node:
        above, _, _, padding, scaled = node.args
        if scaled:
            raise VocabularyError(
                "vocab_parallel cannot split an embedding whose gradient is scaled by frequency "
                f"({node.meta['origin'].path}). Build it without scale_grad_by_freq."
            )
        index = self._index(node_arg(node, 1), Phase.B)
        build = self.shard.at(Phase.B, node.meta["origin"], self.shard.lookup_stage)
        row, left_out = self.shard.nearest_rows(index, build)
        if padding != -1:
            padded = build.call(aten.eq.Scalar, index, padding)
            left_out = build.call(aten.bitwise_or.Tensor, left_out, padded)
        mask = build.call(aten.unsqueeze.default, left_out, -1)
        summands = build.call(aten.masked_fill.Scalar, above, mask, 0)
        return build.call(aten.embedding_dense_backward.default, summands, row, self.shard.size, -1, False)

    def _index(self, node: fx.Node, phase: Phase) -> fx.Node:
        """Copies, for the lookups, of values computed from the batch alone."""
        build = self.shard.at(phase, node.meta["origin"], self.shard.lookup_stage)
        return build.copy_of(node, self._copies[phase])
