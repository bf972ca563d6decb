"""Computes a projection to the vocabulary, its loss and their gradients for one part of the tokens at a time.

before: logits = x @ table.T ──► log_softmax ──► loss;   d_logits ──► d_x, d_table
after:  of each part of the rows of x: its logits, its loss, its d_logits, its d_x, its d_table
        loss = the sum of the parts,  d_x = their rows,  d_table: each part is added to the gradient

What has an entry for each token and each word is never there as a whole.

A shard of the vocabulary knows the log-sum-exp of a token only when all ranks have told theirs, so its parts
are made in two rounds, and the logits of a part twice:
  with one barrier   S  logits, statistics, both parts of d_x, which R scales by one number a token
                     T  logits, d_logits, d_table
  with two barriers  S  logits, statistics
                     R  logits, d_logits, d_x, d_table
d_table is a sum over tokens, each of which has a scale of its own: no number makes that of local statistics
right.  Four products instead of three is the least without the logits: to make d_table in T with two
barriers would be a fifth, and to exchange the statistics of each part a barrier for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import fx

from fxpipe.errors import VocabularyError
from fxpipe.ir.builder import Builder, node_arg
from fxpipe.ir.graph import Origin
from fxpipe.ir.nodes import copy_graph, input_nodes, rename, take_name
from fxpipe.ir.ops import adds_values, summands_of
from fxpipe.ir.storage import call_nodes, drop_dead, graph_outputs, node_bytes, set_outputs, storage_root
from fxpipe.schedule.ops import Color, Phase
from fxpipe.vocabulary.axes import MEAN
from fxpipe.vocabulary.layers import picked_losses, projection_of
from fxpipe.vocabulary.part_builder import PartBuilder
from fxpipe.vocabulary.prepare import prepare_head
from fxpipe.vocabulary.row_ops import RowOps, joined, refused

aten = torch.ops.aten
_PRODUCTS = (aten.mm.default, aten.addmm.default)

#: The fewest tokens of a part that the planner takes: products of fewer rows run far below full rate.
FEWEST = 128


def chunks_for(graph: fx.Graph, shards: int) -> int:
    """The parts at which the logits of one are no larger than the hidden states of all tokens: a power of
    two that leaves each part ``FEWEST`` tokens; 1 where no layer gives a cross-entropy its logits.

    shards: among which the words are split.
    """
    graph = copy_graph(graph)
    prepare_head(graph, in_parts=True)
    try:
        products = [projection_of(loss) for loss in picked_losses(graph)]
    except VocabularyError:
        return 1
    chunks = 1
    for product in products:
        tokens, words = product.meta["val"].shape
        hidden = node_arg(product, 1 if product.target is aten.addmm.default else 0).meta["val"].shape[1]
        while chunks * hidden * shards < words and tokens // (2 * chunks) >= FEWEST:
            chunks *= 2
    return chunks


def chunk_head(graph: fx.Graph, chunks: int, split: bool) -> tuple[int, float, int]:
    """Rewrite a step behind ``prepare_head``.  The ops of part k have ``meta["chunk"] = k`` where they belong
    to B.

    split: whether ``split_vocabulary`` has rewritten it.

    Returns the number of heads, no seconds that this saves, and the bytes that no forward keeps for its
    backward any more, on all ranks.

    Raises VocabularyError where there is no projection into a cross-entropy, or where an op, which it names,
    needs the logits of all tokens.
    """
    whole = [] if split else [*dict.fromkeys(map(projection_of, picked_losses(graph)))]
    projections, saved = whole or _of_shards(graph), 0
    for projection in projections:
        tokens = projection.meta["val"].shape[0]
        if tokens < chunks:
            raise VocabularyError(
                f"head_chunks is {chunks}, and the head has {tokens} tokens in a microbatch."
            )
        head = _Head(graph, projection)
        saved += head.kept_bytes()
        head.rewrite([tokens * k // chunks for k in range(chunks + 1)])
    shards = len({projection.meta["color"] for projection in projections}) if split else 1
    return len(projections) // shards, 0.0, saved


def _of_shards(graph: fx.Graph) -> list[fx.Node]:
    """The projections of shards: products in S with what the model gives, which is of no shard."""
    forward = [
        node
        for node in call_nodes(graph)
        if node.target in _PRODUCTS
        and (color := node.meta.get("color")) is not None
        and color.phase is Phase.F
    ]
    return [node for node in forward if "color" not in node_arg(node, len(node.args) - 2).meta]


class _Head:
    """The ops from a projection to its gradients that work on rows of tokens, in rounds: what is made before
    the loss of all tokens is known, and behind that.

    ``rounds``: of each op; all are in one where the head is on one rank.
    """

    def __init__(self, graph: fx.Graph, projection: fx.Node) -> None:
        self.graph, self.ops = graph, RowOps(projection)
        self.parts, self.totals = self.ops.parts, self.ops.totals
        self.color: Color | None = projection.meta.get("color")
        self._phases = self._phases_of_rounds(projection)
        self.rounds = {projection: 0}
        tails, late = self.ops.tails, dict[fx.Node, int]()  # what depends on all parts of a round
        for node in call_nodes(graph):
            inputs = _read(node)
            inside = [x for x in inputs if x in tails and node is not projection]
            at = self._round_of(node)
            if inside and at is not None and self._may_take(node, inside, at) and self.ops.take(node):
                self.rounds[node] = at
                totals = [self.rounds[x] for x in inputs if x in self.totals and x not in tails]
                if max([*totals, *(late[x] for x in inputs if x in late)], default=-1) >= at:
                    raise refused(node, "depends on the loss of all tokens")
                continue
            for value in inside:
                self.ops.let_out(value, node)
            waited = [self.rounds[x] for x in inputs if x in self.totals]
            waited += [late[x] for x in inputs if x in late]
            if waited:
                late[node] = max(waited)
        named = graph_outputs(graph)
        for result in (named.loss, named.count, *named.outputs.values(), *named.buffers.values()):
            if result is not None and result in tails:
                self.ops.let_out(result, result)
        for at in range(len(self._phases)):
            for value in self._before(at)[1]:
                self.totals.setdefault(value, joined)

    def _phases_of_rounds(self, projection: fx.Node) -> tuple[tuple[Phase, ...], ...]:
        if self.color is None:
            return ((*Phase,),)
        of_words = any(node.meta["color"].phase is Phase.B for node in self._with_words(projection))
        # What B makes of all words W would have to make again.
        return ((Phase.F,), (Phase.B, Phase.W)) if of_words else ((Phase.F,), (Phase.B,), (Phase.W,))

    def _with_words(self, projection: fx.Node) -> set[fx.Node]:
        """The values of this rank that have an entry for each token and each word.  A product with the table
        may be as wide as a row of logits, and has none."""
        assert self.color is not None, "of a shard"
        size, wide = projection.meta["val"].numel(), {projection}
        for node in call_nodes(self.graph):
            color, val = node.meta.get("color"), node.meta["val"]
            if color is None or color.stage != self.color.stage or node.target in _PRODUCTS:
                continue
            if isinstance(val, torch.Tensor) and val.numel() == size and wide.intersection(_read(node)):
                wide.add(node)
        return wide

    def _round_of(self, node: fx.Node) -> int | None:
        """The round of an op; None for one of another rank."""
        if self.color is None:
            return 0
        color: Color | None = node.meta.get("color")
        if color is None or color.stage != self.color.stage:
            return None
        return next(at for at, phases in enumerate(self._phases) if color.phase in phases)

    def _may_take(self, node: fx.Node, inside: Iterable[fx.Node], at: int) -> bool:
        """Whether an op has to be made of parts; one on single numbers of tokens can be made of all."""
        if self.color is None or any(map(self.ops.is_wide, inside)):
            return True
        return at == 0 and self.ops.tail(node) is not None and _numbers(node) == self.ops.tokens

    def _before(self, at: int) -> tuple[list[fx.Node], list[fx.Node]]:
        """What a round makes again of earlier ones, and the numbers of tokens that it takes from them."""
        again, taken = set[fx.Node](), dict[fx.Node, None]()
        todo = [node for node in self.parts if self.rounds[node] == at]
        while todo:
            for x in _read(todo.pop()):
                if x not in self.ops.tails or self.rounds[x] == at or x in again:
                    continue
                if self.ops.is_wide(x):
                    again.add(x)
                    todo.append(x)
                else:
                    taken[x] = None
        return [node for node in self.parts if node in again], [*taken]

    def kept_bytes(self) -> int:
        """The bytes that its backward reads of its forward."""
        read = {storage_root(x) for node in self.parts if self._is_late(node) for x in _read(node)}
        return sum(node_bytes(x) for x in read if x in self.parts and not self._is_late(x))

    def _is_late(self, node: fx.Node) -> bool:
        return bool(node.meta["origin"].backward) if self.color is None else self.rounds[node] > 0

    # -- the parts ----------------------------------------------------------------------------------------

    def rewrite(self, bounds: Sequence[int]) -> None:
        """Let parts take the place of the head, one behind the other, where each round begins."""
        # Each summand of a table's gradient is added by itself: it has one of the head, and one of each other
        # use of a tied table.
        sums = set[fx.Node]()
        for node in self.graph.nodes:
            of_head = any(x in self.totals or x in sums for x in node.all_input_nodes)
            if of_head and len(node.users) == 1 and adds_values(node):
                sums.add(node)
        grads = graph_outputs(self.graph).grads
        set_outputs(self.graph, grads={k: summands_of(xs, sums.__contains__) for k, xs in grads.items()})
        before = [self._before(at) for at in range(len(self._phases))]
        rows: dict[fx.Node, fx.Node] = {}  # value of a round -> the same of all tokens
        for at, (again, taken) in enumerate(before):
            nodes = [node for node in self.parts if self.rounds[node] == at]
            if nodes:
                here = {x: rows[x] for x in taken}
                rows |= self._rewrite_round(at, nodes, again, here, [*pairwise(bounds)])
        drop_dead(self.graph)

    def _rewrite_round(
        self,
        at: int,
        nodes: Sequence[fx.Node],
        again: Sequence[fx.Node],
        taken: Mapping[fx.Node, fx.Node],
        bounds: Sequence[tuple[int, int]],
    ) -> dict[fx.Node, fx.Node]:
        """Make the ops of a round.  Returns what its parts give, of all tokens.

        again: ops of earlier rounds that it repeats.  taken: value of an earlier round -> that of all tokens.
        """
        first, build = nodes[0], Builder(self.graph)
        self._move_operands(first, [*again, *nodes])
        in_b = self.color is None or self._phases[at][0] is Phase.B
        if self.color is not None:
            build.color = Color(self.color.stage, self._phases[at][0])
        before = {*self.graph.nodes}
        values: dict[fx.Node, list[fx.Node]] = {node: [] for node in nodes if node in self.totals}
        for number, (begin, end) in enumerate(bounds):
            part = PartBuilder(self.graph, number, begin, end, build.color, in_b)
            here = {x: part.rows(of_all, 0) for x, of_all in taken.items()}
            for node in (*again, *nodes):
                here[node] = self.parts[node](part, here)
            for node, of_parts in values.items():
                of_parts.append(here[node])
        totals = {node: self._replace(node, of_parts, build) for node, of_parts in values.items()}
        for node in [node for node in self.graph.nodes if node not in before]:
            first.prepend(node)
        return {node: total for node, total in totals.items() if total is not None}

    def _move_operands(self, first: fx.Node, nodes: Iterable[fx.Node]) -> None:
        """Move what a round takes in front of it."""
        wanted, todo = set[fx.Node](), [x for node in nodes for x in input_nodes(node)]
        while todo:
            node = todo.pop()
            if node.op == "call_function" and node not in self.parts and node not in wanted:
                wanted.add(node)
                todo += input_nodes(node)
        order, stays = list(self.graph.nodes), set[int | None]()
        for node in order[order.index(first) :]:
            origin = node.meta.get("origin", Origin(backward=True))
            if node in wanted:
                first.prepend(node)
                # It has the number of an op before it where autograd does not record it: the partition takes
                # the first op of a number for the one that autograd differentiates.
                if origin.seq in stays and not origin.backward:
                    node.meta["origin"] = replace(origin, seq=None)
            elif not origin.backward:
                stays.add(origin.seq)

    def _replace(self, old: fx.Node, parts: Sequence[fx.Node], build: Builder) -> fx.Node | None:
        """Let what the parts give take the place of a value of all tokens.

        Returns it as it is without the value's shape; None where each part is added to a gradient.
        """
        build.origin = old.meta["origin"]
        if "gradient" in old.meta:
            for part in parts:
                rename(part, f"{old.name}_part")
        drop = [user for user in old.users if not user.users and user.op != "output"]
        for user in drop:  # a sum of summands
            if user not in self.parts:
                self.graph.erase_node(user)
        grads = graph_outputs(self.graph).grads
        if {*old.users} == {self.graph.output_node()} and any(old in summands for summands in grads.values()):
            alone = {k: tuple(y for x in xs for y in (parts if x is old else [x])) for k, xs in grads.items()}
            set_outputs(self.graph, grads=alone)
            return None
        total = of_all = self.totals[old](build, parts)
        if total.meta["val"].shape != old.meta["val"].shape:
            total = build.call(aten.view.default, total, list(old.meta["val"].shape))
        assert total.meta["val"].dtype == old.meta["val"].dtype, old

        def reads_total(user: fx.Node) -> bool:
            """Parts have their own numbers of tokens, but those of later rounds read a sum of all."""
            is_later = self.rounds.get(user, -1) > self.rounds[old]
            return user not in self.parts or (is_later and old not in self.ops.tails)

        old.replace_all_uses_with(total, delete_user_cb=reads_total)
        take_name(total, old)
        return of_all


def _read(node: fx.Node) -> list[fx.Node]:
    """The operands of an op that it reads: the backward of a loss that is no mean reads no count."""
    inputs = input_nodes(node)
    counts = node.target is aten.nll_loss_backward.default and node.args[4] != MEAN
    return [x for x in inputs if not counts or x is not node.args[6]]


def _numbers(node: fx.Node) -> int:
    val = node.meta["val"]
    return val.numel() if isinstance(val, torch.Tensor) else 0
