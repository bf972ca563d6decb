"""Computes a projection to the vocabulary, its loss and their gradients for one part of the tokens at a time.

before: logits = x @ table.T ──► log_softmax ──► loss;   d_logits ──► d_x, d_table
after:  of each part of the rows of x: its logits, its loss, its d_logits, its d_x, its d_table
        loss = the sum of the parts,  d_x = their rows,  d_table: each part is added to the gradient

What has an entry for each token and each word is never there as a whole.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import fx

from fxpipe.errors import VocabularyError
from fxpipe.ir.builder import Builder, node_arg
from fxpipe.ir.dims import dims_of
from fxpipe.ir.nodes import input_nodes, rename, take_name
from fxpipe.ir.storage import (
    call_nodes,
    drop_dead,
    graph_outputs,
    node_bytes,
    place_of,
    set_outputs,
    storage_root,
)
from fxpipe.vocabulary.axes import RESHAPES
from fxpipe.vocabulary.layers import picked_losses, projection_of
from fxpipe.vocabulary.part_builder import PartBuilder, Shape, is_elementwise

aten = torch.ops.aten
_SHAPES = RESHAPES | {aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default}
_TRANSPOSES = {aten.t.default, aten.transpose.int, aten.permute.default}
_SAME = {aten.clone.default, aten.detach.default, aten.alias.default}
_ALONG = {  # the words, or, as sums, the tokens
    aten._log_softmax.default, aten._log_softmax_backward_data.default, aten._softmax.default,
    aten._softmax_backward_data.default, aten.amax.default, aten.argmax.default, aten.logsumexp.default,
    aten.mean.dim, aten.sum.dim_IntList,
}  # fmt: skip
_EACH, _MEAN, _SUM = 0, 1, 2  # reductions of a loss

Part = Callable[[PartBuilder, Mapping[fx.Node, fx.Node]], fx.Node]
"""Makes an op on the tokens of a part.  The mapping has what the ops of the head before it give there."""
Total = Callable[[Builder, Sequence[fx.Node]], fx.Node]
"""Makes a value of all tokens from those of the parts."""


#: The fewest tokens of a part that the planner takes: products of fewer rows run far below full rate.
FEWEST = 128


def chunks_for(graph: fx.Graph) -> int:
    """The parts at which the logits of one are no larger than the hidden states of all tokens: a power of
    two that leaves each part ``FEWEST`` tokens; 1 where no layer gives a cross-entropy its logits."""
    try:
        products = [projection_of(loss) for loss in picked_losses(graph)]
    except VocabularyError:
        return 1
    chunks = 1
    for product in products:
        tokens, words = product.meta["val"].shape
        hidden = node_arg(product, 1 if product.target is aten.addmm.default else 0).meta["val"].shape[1]
        while chunks * hidden < words and tokens // (2 * chunks) >= FEWEST:
            chunks *= 2
    return chunks


def chunk_head(graph: fx.Graph, chunks: int) -> tuple[int, float, int]:
    """Rewrite a captured step.  The ops of part k have ``meta["chunk"] = k``.

    Returns the number of heads, no seconds that this saves, and the bytes that no forward keeps for its
    backward any more.

    Raises VocabularyError where there is no projection into a cross-entropy, or where an op, which it names,
    needs the logits of all tokens.
    """
    projections, saved = dict.fromkeys(map(projection_of, picked_losses(graph))), 0
    for projection in projections:
        tokens = projection.meta["val"].shape[0]
        if tokens < chunks:
            raise VocabularyError(
                f"head_chunks is {chunks}, and the head has {tokens} tokens in a microbatch."
            )
        head = _Head(graph, projection)
        saved += head.kept_bytes()
        head.rewrite([tokens * k // chunks for k in range(chunks + 1)])
    return len(projections), 0.0, saved


def _added(build: Builder, parts: Sequence[fx.Node]) -> fx.Node:
    return reduce(partial(build.call, aten.add.Tensor), parts)


def _joined(build: Builder, parts: Sequence[fx.Node]) -> fx.Node:
    return build.call(aten.cat.default, [*parts])


class _Head:
    """The ops from a projection to its gradients that work on rows of tokens.

    ``tails``: of each value with rows of tokens its dimensions behind those of the tokens; None where the
    tokens are the columns of a matrix.  ``parts``: how each op is made.  ``totals``: what leaves the head.
    """

    def __init__(self, graph: fx.Graph, projection: fx.Node) -> None:
        self.graph, self.tokens = graph, projection.meta["val"].shape[0]
        self.tails: dict[fx.Node, Shape | None] = {projection: (projection.meta["val"].shape[1],)}
        at = 1 if projection.target is aten.addmm.default else 0
        before, x, behind = projection.args[:at], node_arg(projection, at), projection.args[at + 1 :]
        self.parts: dict[fx.Node, Part] = {
            projection: lambda build, here: build.like(projection, *before, build.rows(x, 0), *behind)
        }
        self.totals: dict[fx.Node, Total] = {}
        late = set[fx.Node]()  # what depends on all parts
        for node in call_nodes(graph):
            inputs = _read(node)
            inside = [x for x in inputs if x in self.tails and node is not projection]
            part = self._part(node) if inside else None
            if part is not None:
                self.parts[node] = part
                if any(x in late or (x in self.totals and x not in self.tails) for x in inputs):
                    raise _refused(node, "depends on the loss of all tokens")
                continue
            for value in inside:
                self._let_out(value, node)
            if any(x in late or x in self.totals for x in inputs):
                late.add(node)
        named = graph_outputs(graph)
        for result in (named.loss, named.count, *named.outputs.values(), *named.buffers.values()):
            if result is not None and result in self.tails:
                self._let_out(result, result)

    def _let_out(self, value: fx.Node, user: fx.Node) -> None:
        """Let a value leave the head that has one number a token."""
        tail = self.tails[value]
        if tail is None or prod(tail) > 1:
            raise _refused(user, "takes the logits of all tokens")
        self.totals[value] = _joined

    def _part(self, node: fx.Node) -> Part | None:
        """Take an op into the head; None for one that is not known."""
        target: Any = node.target
        args: tuple[Any, ...] = node.args
        if target is aten.mm.default:
            return self._product(node)
        if target is aten.nll_loss_forward.default and args[3] in (_SUM, _EACH):
            logs, labels, *others = args
            return self._with(
                node, (), lambda build, here: build.like(node, here[logs], build.rows(labels, 0), *others)
            )
        if target is aten.nll_loss_forward.default and args[3] == _MEAN:
            raise _refused(node, "divides by the number of labels of all tokens")
        if target is aten.nll_loss_backward.default and args[1] in self.tails:
            return self._unpicked(node)
        if is_elementwise(node):
            return self._pointwise(node)
        source = args[0]
        if source not in self.tails:
            return None
        tail = self.tails[source]
        if target is operator.getitem:
            return self._item(node)
        if target in _SAME:
            return self._with(node, tail, lambda build, here: here[source])
        if target in _TRANSPOSES and node.meta["val"].dim() == 2:
            tail = None if tail is not None else (node.meta["val"].shape[1],)
            return self._with(node, tail, lambda build, here: build.like(node, here[source], *args[1:]))
        if tail is None:
            return None
        if target in _SHAPES:
            return self._shaped(node)
        if target in (aten.sum.default, aten.mean.default):
            over = source.meta["val"].numel() if target is aten.mean.default else 1
            dtype = dict(node.kwargs)
            return self._total(
                node, over, lambda build, here: build.like(node, here[source], op=aten.sum.default, **dtype)
            )
        return self._along(node) if target in _ALONG else None

    def _with(self, node: fx.Node, tail: Shape | None, part: Part) -> Part:
        self.tails[node] = tail
        return part

    def _total(self, node: fx.Node, over: int, part: Part) -> Part:
        def total(build: Builder, parts: Sequence[fx.Node]) -> fx.Node:
            added = _added(build, parts)
            return added if over == 1 else build.call(aten.div.Scalar, added, over)

        self.totals[node] = total
        return part

    def _tail(self, node: fx.Node) -> Shape | None:
        """The dimensions behind those of the tokens."""
        shape = tuple(node.meta["val"].shape)
        at = next((k for k in range(len(shape) + 1) if prod(shape[:k]) == self.tokens), None)
        return None if at is None else shape[at:]

    # -- kinds of ops -------------------------------------------------------------------------------------

    def _product(self, node: fx.Node) -> Part | None:
        """The end of the head: the gradient of x, or of a table, which is a sum over the tokens."""
        left, right = node_arg(node, 0), node_arg(node, 1)
        if left in self.tails and right in self.tails:
            return None
        if left not in self.tails:
            if self.tails[right] is None:
                return None
            return self._total(
                node, 1, lambda build, here: build.like(node, build.rows(left, 1), here[right])
            )
        if self.tails[left] is None:
            return self._total(
                node, 1, lambda build, here: build.like(node, here[left], build.rows(right, 0))
            )
        self.totals[node] = _joined
        return lambda build, here: build.like(node, here[left], right)

    def _unpicked(self, node: fx.Node) -> Part:
        args: tuple[Any, ...] = node.args
        gradient, logs, labels, *others, count = args
        each = others[1] == _EACH

        def part(build: PartBuilder, here: Mapping[fx.Node, fx.Node]) -> fx.Node:
            above = here.get(gradient) or (build.rows(gradient, 0) if each else gradient)
            return build.like(node, above, here[logs], build.rows(labels, 0), *others, here.get(count, count))

        return self._with(node, self.tails[logs], part)

    def _pointwise(self, node: fx.Node) -> Part | None:
        tail, shape = self._tail(node), tuple(node.meta["val"].shape)
        inside = [x for x in input_nodes(node) if x in self.tails]
        if tail is None or any(self.tails[x] is None or x.meta["val"].dim() != len(shape) for x in inside):
            return None
        tokens = shape[: len(shape) - len(tail)]

        def part(build: PartBuilder, here: Mapping[fx.Node, fx.Node]) -> fx.Node:
            args, kwargs = fx.map_arg(
                (node.args, dict(node.kwargs)), lambda x: here.get(x) or build.operand(x, tokens, len(tail))
            )
            return build.like(node, *args, **kwargs)

        return self._with(node, tail, part)

    def _item(self, node: fx.Node) -> Part:
        """Take an item of a loss: that of each token, or a sum."""
        pick = node_arg(node, 0)
        part: Part = lambda build, here: build.like(node, here[pick], node.args[1])  # noqa: E731
        is_each = node.args[1] == 0 and pick.args[3] == _EACH
        return self._with(node, (), part) if is_each else self._total(node, 1, part)

    def _shaped(self, node: fx.Node) -> Part | None:
        source, tail = node_arg(node, 0), self._tail(node)
        expands = node.target is aten.expand.default
        if tail is None or (expands and source.meta["val"].dim() != node.meta["val"].dim()):
            return None
        op = aten.expand.default if expands else aten.view.default

        def part(build: PartBuilder, here: Mapping[fx.Node, fx.Node]) -> fx.Node:
            x, shape = here[source], [build.end - build.begin, *tail]
            return x if list(x.meta["val"].shape) == shape else build.like(node, x, shape, op=op)

        return self._with(node, tail, part)

    def _along(self, node: fx.Node) -> Part | None:
        """An op along the words, such as a softmax or a sum, or a sum over the tokens."""
        inputs, after = [*input_nodes(node)], node.meta["val"]
        tail, rank = self.tails[inputs[0]], inputs[0].meta["val"].dim()
        over = dims_of(node, rank)
        if not tail or not all(self.tails.get(x) for x in inputs):
            return None

        def along(dim: int) -> Part:
            at = place_of(node, "dim")
            dims = dim if isinstance(node.args[at], int) else [dim]

            def part(build: PartBuilder, here: Mapping[fx.Node, fx.Node]) -> fx.Node:
                args = fx.map_arg((*node.args[:at], dims, *node.args[at + 1 :]), here.__getitem__)
                return build.like(node, *args, **node.kwargs)

            return part

        if over == {rank - 1}:
            left = (*tail[:-1], after.shape[-1]) if after.dim() == rank else tail[:-1]
            return self._with(node, left, along(len(tail)))
        is_sum = node.target is aten.sum.dim_IntList
        return self._total(node, 1, along(0)) if is_sum and over == {*range(rank - len(tail))} else None

    def kept_bytes(self) -> int:
        """The bytes that its backward reads of its forward."""
        read = {storage_root(x) for node in self.parts if _is_backward(node) for x in _read(node)}
        return sum(node_bytes(x) for x in read if x in self.parts and not _is_backward(x))

    # -- the parts ----------------------------------------------------------------------------------------

    def rewrite(self, bounds: Sequence[int]) -> None:
        """Let parts take the place of the head, one behind the other, where it begins."""
        first = next(iter(self.parts))
        self._move_operands(first)
        grads = graph_outputs(self.graph).grads
        set_outputs(
            self.graph, grads={k: tuple(y for x in xs for y in self._summands(x)) for k, xs in grads.items()}
        )
        build = Builder(self.graph)
        before = {*self.graph.nodes}
        values: dict[fx.Node, list[fx.Node]] = {node: [] for node in self.totals}
        for number, (begin, end) in enumerate(pairwise(bounds)):
            part, here = PartBuilder(self.graph, number, begin, end), dict[fx.Node, fx.Node]()
            for node, make in self.parts.items():
                here[node] = make(part, here)
            for node, of_parts in values.items():
                of_parts.append(here[node])
        for node, of_parts in values.items():
            self._replace(node, of_parts, build)
        for node in [node for node in self.graph.nodes if node not in before]:
            first.prepend(node)
        drop_dead(self.graph)

    def _move_operands(self, first: fx.Node) -> None:
        """Move what the head takes in front of it."""
        wanted, todo = set[fx.Node](), [x for node in self.parts for x in input_nodes(node)]
        while todo:
            node = todo.pop()
            if node.op == "call_function" and node not in self.parts and node not in wanted:
                wanted.add(node)
                todo += input_nodes(node)
        nodes = list(self.graph.nodes)
        for node in nodes[nodes.index(first) :]:
            if node in wanted:
                first.prepend(node)

    def _summands(self, gradient: fx.Node) -> list[fx.Node]:
        """The summands of a gradient of a table, each of which is added by itself: it has one of the head,
        and one of each other use of a tied table."""
        is_sum = gradient.target is aten.add.Tensor and not gradient.kwargs and len(gradient.users) == 1
        inputs = [x for x in gradient.args if isinstance(x, fx.Node)]
        alike = len(inputs) == 2 and all(x.meta["val"].shape == gradient.meta["val"].shape for x in inputs)
        summands = [y for x in inputs for y in self._summands(x)] if is_sum and alike else []
        return summands if any(x in self.totals for x in summands) else [gradient]

    def _replace(self, old: fx.Node, parts: Sequence[fx.Node], build: Builder) -> None:
        """Let what the parts give take the place of a value of all tokens."""
        build.origin = old.meta["origin"]
        if "gradient" in old.meta:
            for part in parts:
                rename(part, f"{old.name}_part")
        drop = [user for user in old.users if not user.users and user.op != "output"]
        for user in drop:  # a sum of summands
            self.graph.erase_node(user)
        grads = graph_outputs(self.graph).grads
        if {*old.users} == {self.graph.output_node()} and any(old in summands for summands in grads.values()):
            # Each part is added to the gradient by itself.
            alone = {k: tuple(y for x in xs for y in (parts if x is old else [x])) for k, xs in grads.items()}
            set_outputs(self.graph, grads=alone)
            return
        total = self.totals[old](build, parts)
        if total.meta["val"].shape != old.meta["val"].shape:
            total = build.call(aten.view.default, total, list(old.meta["val"].shape))
        assert total.meta["val"].dtype == old.meta["val"].dtype, old
        old.replace_all_uses_with(total, delete_user_cb=lambda user: user not in self.parts)
        take_name(total, old)


def _read(node: fx.Node) -> list[fx.Node]:
    """The operands of an op that it reads: the backward of a loss that is no mean reads no count."""
    inputs = input_nodes(node)
    counts = node.target is aten.nll_loss_backward.default and node.args[4] != _MEAN
    return [x for x in inputs if not counts or x is not node.args[6]]


def _is_backward(node: fx.Node) -> bool:
    return bool(node.meta["origin"].backward)


def _refused(node: fx.Node, why: str) -> VocabularyError:
    remedy = "leave that use out"
    if node.target is aten.slice.Tensor:
        remedy = "shift the labels instead of the logits, F.pad(labels, (0, 1), value=-100)[:, 1:]"
    return VocabularyError(
        f"The head cannot be computed in parts of the tokens: {node.target} in {node.meta['origin']} {why}. "
        f"Compile without head_chunks, or {remedy}."
    )
