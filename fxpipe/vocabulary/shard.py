"""One rank's rows of the tables, and the ops on values with a vocabulary dimension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxpipe.errors import VocabularyError
from fxpipe.ir.builder import Builder
from fxpipe.ir.dims import is_pointwise
from fxpipe.ir.graph import Input, Kind, Origin
from fxpipe.ir.storage import operands_first
from fxpipe.plan.rows import ShardName
from fxpipe.schedule.ops import Color, Phase
from fxpipe.vocabulary.axes import RESHAPES, is_of_batch
from fxpipe.vocabulary.layers import VocabularyLayers

aten = torch.ops.aten
_WITH_SIZES = RESHAPES | {aten.expand.default, aten.slice_backward.default, aten.select_backward.default}


class Shard:
    """One rank's part of the vocabulary layers.  ``makers``: how the part of a value is made that is not the
    same op on parts, by the op's target.  ``copy_of``: this rank's own copy of a number of each token that
    follows from the losses.

    ``phase``: that of backward ops that are made from now on.
    """

    def __init__(
        self, graph: fx.Graph, layers: VocabularyLayers, begin: int, end: int, lookup: int, head: int
    ) -> None:
        self.graph, self.layers = graph, layers
        self.begin, self.end = begin, end
        self.lookup_stage, self.head_stage = lookup, head
        self.phase = Phase.B
        self.makers: dict[object, Callable[[fx.Node], fx.Node]] = {}
        self.copy_of: Callable[[fx.Node], fx.Node] = lambda node: node
        self._build = Builder(graph)
        self._tables: dict[fx.Node, fx.Node] = {}
        self._locals: dict[fx.Node, fx.Node] = {}
        self._of_tables = set[fx.Node]()  # made of them alone
        for node in layers.axes:
            if self._of_tables.issuperset(node.all_input_nodes):
                self._of_tables.add(node)

    @property
    def size(self) -> int:
        return self.end - self.begin

    def rows(self, table: str) -> ShardName:
        return ShardName.of_rows(table, self.begin, self.end)

    def at(self, phase: Phase, origin: Origin, stage: int | None = None) -> Builder:
        """A builder of ops in a phase of the head's stage, or of another one."""
        self._build.color = Color(self.head_stage if stage is None else stage, phase)
        self._build.origin = origin
        return self._build

    def table(self, node: fx.Node) -> fx.Node:
        """The shard's rows of a table."""
        if node not in self._tables:
            name, val = node.meta["input"].name, node.meta["val"]
            # Beside the whole table, which is dropped when nothing reads it any more.
            with self.graph.inserting_before(node):
                new = self.graph.placeholder(f"{node.name}_{self.begin}_{self.end}")
            new.meta.update(node.meta, input=Input(Kind.PARAMETER, self.rows(name)))
            new.meta["val"] = val.new_empty((self.size, *val.shape[1:]))
            self._tables[node] = new
        return self._tables[node]

    def local(self, node: fx.Node) -> fx.Node:
        """The shard's part of a value with a vocabulary dimension."""
        for each in operands_first(node, self._locals, self._operands):
            self._locals[each] = self._local(each)
        return self._locals[node]

    def _operands(self, node: fx.Node) -> list[fx.Node]:
        """The operands of which the shard's part of a value is made."""
        operands = [] if node.target in self.makers else node.all_input_nodes
        return [n for n in operands if n in self.layers.axes]

    def _local(self, node: fx.Node) -> fx.Node:
        if node in self.layers.tables:
            return self.table(node)
        if node.target in self.makers:
            return self.makers[node.target](node)
        args, kwargs = self.arguments(node, self.size, self.local)
        # A backward value made of the table alone is there from the start, so F can make it.
        late = node.meta["origin"].backward and node not in self._of_tables
        build = self.at(self.phase if late else Phase.F, node.meta["origin"])
        return build.copy(node, args, kwargs)

    def arguments(
        self,
        node: fx.Node,
        size: int,
        local: Callable[[fx.Node], fx.Node],
        masked: Callable[[fx.Node, int], fx.Node] = lambda part, place: part,
    ) -> tuple[tuple[object, ...], dict[str, Any]]:
        """An op's arguments for another size of the vocabulary; ``local`` gives those that have one.

        ``masked``: what to take of the shard's part of a mask, which every rank has as a whole; its dimension
        is counted from the last.
        """
        if node not in self.layers.axes:
            raise VocabularyError(
                f"vocab_parallel cannot split {node.target} in {node.meta['origin']}: it is not known along "
                "which of its dimensions the vocabulary is (build an embedding without sparse=True). Compile "
                "without vocab_parallel."
            )
        axis = self.layers.axes[node]
        place = axis - node.meta["val"].dim() if is_pointwise(node) else 0

        def part(n: fx.Node) -> fx.Node:
            if n in self.layers.axes:
                return local(n)
            if is_pointwise(node) and self._is_mask(n, place):
                return masked(self._part_of_mask(n, node, place), place)
            # An op without inputs, such as an arange, costs less than a message.
            return self.copy_of(n) if n.all_input_nodes else self._computed_here(n)

        args, kwargs = list(fx.map_arg(node.args, part)), dict(fx.map_arg(node.kwargs, part))
        if node.target in _WITH_SIZES:
            # These ops name the sizes of their result, which are those of all columns.
            changed = list(args[1])  # type: ignore[arg-type]
            changed[axis] = size
            args[1] = changed
        return tuple(args), kwargs

    def _computed_here(self, node: fx.Node) -> fx.Node:
        """The shard's own copy of a value that depends on the batch and constants alone."""
        return self.at(Phase.F, node.meta["origin"]).copy_of(node, self._locals)

    def _is_mask(self, n: fx.Node, place: int) -> bool:
        """Whether a value has an entry for each word, and all ranks have it or can compute it."""
        val = n.meta["val"]
        # A size of one is broadcast: it is the same on all ranks.
        is_large = val.dim() >= -place and val.shape[place] == self.layers.size
        return is_large and (n.op == "placeholder" or is_of_batch(n))

    def _part_of_mask(self, n: fx.Node, user: fx.Node, place: int) -> fx.Node:
        whole = self._computed_here(n)
        build = self.at(Phase.F, user.meta["origin"])
        return build.call(aten.slice.Tensor, whole, place, self.begin, self.end)

    def per_token(self, node: fx.Node, value: fx.Node, phase: Phase) -> fx.Node:
        """The op applied to a value with size one in place of the vocabulary."""
        args, kwargs = self.arguments(node, 1, lambda _: value)
        return self.at(phase, node.meta["origin"]).copy(node, args, kwargs)

    def nearest_rows(self, index: fx.Node, build: Builder) -> tuple[fx.Node, fx.Node]:
        """The rows of the shard that are nearest to the indices, and which indices are outside of the shard.

        What is computed of a row for an index outside is filled with zeros, not multiplied by them: it may be
        infinite or NaN.  An index that no shard has stays as it is on the first or the last one: the op that
        reads the row fails there, as that of the whole table does.
        """
        shifted = build.call(aten.sub.Tensor, index, self.begin) if self.begin else index
        least = 0 if self.begin else None
        most = self.size - 1 if self.end < self.layers.size else None
        row = shifted if least is most is None else build.call(aten.clamp.default, shifted, least, most)
        return row, build.call(aten.ne.Tensor, row, shifted)

    def labels(self, label: fx.Node, axis: int, ignored: int, build: Builder) -> fx.Node:
        """The labels of a loss, with size one for the vocabulary; in place of one that is ignored, and no
        index, any one that is."""
        label = build.call(aten.unsqueeze.default, label, axis)
        is_before, is_behind = ignored < 0, ignored >= self.layers.size
        if (is_before and not self.begin) or (is_behind and self.end == self.layers.size):
            is_ignored = build.call(aten.eq.Scalar, label, ignored)
            label = build.call(aten.masked_fill.Scalar, label, is_ignored, self.begin)
        return label
