"""The cross-entropies of one rank: statistics of its part, and the losses from the statistics of all ranks.

Of every token a rank finds the maximum of its logits, the sum of the exponentials of their distances to it,
and the label's logit, if it has that one.  From the statistics of all ranks,
each computes the log-sum-exp and the losses.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from fxpipe.ir.builder import Builder, cast, node_arg
from fxpipe.ir.storage import operands_first
from fxpipe.plan.tensors import accum_dtype
from fxpipe.schedule.ops import Phase
from fxpipe.vocabulary.axes import EACH, MEAN, RESHAPES, whole
from fxpipe.vocabulary.shard import Shard

aten = torch.ops.aten


class Softmax:
    """Statistics per token have size one in the vocabulary's dimension.  A loss is a log-softmax, or a
    log-sum-exp beside it.

    ``maxima``, ``exponentials``: of the shard's logits, per loss.  ``logsums``: of all logits.
    """

    def __init__(self, shard: Shard) -> None:
        self.shard, self.layers = shard, shard.layers
        self.maxima: dict[fx.Node, fx.Node] = {}
        self.exponentials: dict[fx.Node, fx.Node] = {}
        self.logsums: dict[fx.Node, fx.Node] = {}
        self._entries: dict[fx.Node, fx.Node] = {}  # per pick, the log-probability of the label
        self._others: dict[fx.Node, fx.Node] = {}
        self._after = self._following()
        same = {each: self._with_statistics_of(each) for each in self.layers.logsumexps}
        self._same = {each: loss for each, loss in same.items() if loss is not None}
        self._losses = [each for each in (*same, *self.layers.losses) if each not in self._same]
        shard.copy_of = lambda node: self.local_copy(node) if node in self._after else node
        # A part of a log-softmax stands for the logits: the missing term is the same for all entries.
        shard.makers[aten._log_softmax.default] = lambda node: shard.local(node_arg(node, 0))

    def scores(self, logs: fx.Node) -> fx.Node:
        """The shard's logits in the shape of a log-softmax or a view of it, in single precision at least."""
        local = self.shard.local(logs)
        return cast(self.shard.at(Phase.F, logs.meta["origin"]), local, accum_dtype(local.meta["val"].dtype))

    def statistics(self) -> fx.Node:
        """All that the shard finds, in one tensor."""
        layers, results = self.layers, list[fx.Node]()
        for pick in layers.label_gathers:
            scores, axis = self.scores(node_arg(pick, 0)), layers.axes[node_arg(pick, 0)]
            build = self.shard.at(Phase.F, pick.meta["origin"])
            label = self.shard.labels(pick.args[1], axis, pick.args[4], build)  # type: ignore[arg-type]
            row, outside = self.shard.nearest_rows(label, build)
            entry = build.call(aten.gather.default, scores, axis, row)
            # One rank has the label; the others add zero, so a sum over the ranks finds it.
            results.append(build.call(aten.masked_fill.Scalar, entry, outside, 0))
        for total in layers.vocab_sums:
            scores, axis = self.scores(node_arg(total, 0)), layers.axes[node_arg(total, 0)]
            build = self.shard.at(Phase.F, total.meta["origin"])
            end = layers.entries(node_arg(total, 0)) - self.shard.begin
            if end < self.shard.size:  # the logits of the others are -inf
                scores = build.call(aten.slice.Tensor, scores, axis, 0, max(0, end))
            results.append(build.call(aten.sum.dim_IntList, scores, [axis], True))
        for argmax in layers.argmaxes:
            logits = node_arg(argmax, 0)
            scores, axis = self.scores(logits), layers.axes[logits]
            build = self.shard.at(Phase.F, argmax.meta["origin"])
            row = build.call(aten.argmax.default, scores, axis, True)
            # The index in the whole vocabulary.
            row = build.call(aten.add.Tensor, row, self.shard.begin)
            results += [
                build.call(aten.amax.default, scores, [axis], True),
                cast(build, row, scores.meta["val"].dtype),
            ]
        for loss in self._losses:  # last, so that the exponentials can take the memory of the logits
            logits = loss if loss in layers.axes else node_arg(loss, 0)
            scores, axis = self.scores(logits), layers.axes[logits]
            build = self.shard.at(Phase.F, loss.meta["origin"])
            least = torch.finfo(scores.meta["val"].dtype).min  # of a part that is all -inf
            top = build.call(
                aten.clamp_min.default, build.call(aten.amax.default, scores, [axis], True), least
            )
            each = build.call(aten.exp.default, build.call(aten.sub.Tensor, scores, top))
            # The backward needs the exponentials again.  Op by op they are saved, not recomputed.
            self.maxima[loss], self.exponentials[loss] = top, each
            results += [top, build.call(aten.sum.dim_IntList, each, [axis], True)]
        for each, loss in self._same.items():
            build = self.shard.at(Phase.F, each.meta["origin"])
            self.maxima[each] = self._viewed(build, self.maxima[loss], each, 1)
            self.exponentials[each] = self._viewed(build, self.exponentials[loss], each, self.shard.size)
        build = self.shard.at(Phase.F, layers.losses[0].meta["origin"])
        # One tensor, and so one message at the barrier.
        return build.call(aten.cat.default, [build.call(aten.reshape.default, f, [-1]) for f in results])

    def combine(self, statistics: list[fx.Node]) -> None:
        """Combine the statistics of all shards."""
        build = self.shard.at(Phase.B, self.layers.losses[0].meta["origin"])
        table, position = build.call(aten.stack.default, statistics), 0

        # Parts come in the order in which ``statistics`` has put them there.
        def take(node: fx.Node) -> fx.Node:
            nonlocal position
            shape = list(node.meta["val"].shape)
            shape[self.layers.axes[node]] = 1
            begin, position = position, position + math.prod(shape)
            part = build.call(aten.slice.Tensor, table, 1, begin, position)
            return build.call(aten.reshape.default, part, [len(statistics), *shape])

        picked = {pick: take(node_arg(pick, 0)) for pick in self.layers.label_gathers}
        summed = {total: take(node_arg(total, 0)) for total in self.layers.vocab_sums}
        largest = {
            argmax: (take(node_arg(argmax, 0)), take(node_arg(argmax, 0))) for argmax in self.layers.argmaxes
        }
        for loss in self._losses:
            logits = loss if loss in self.layers.axes else node_arg(loss, 0)
            tops, sums = take(logits), take(logits)
            top = build.call(aten.amax.default, tops, [0])
            # Each shard has subtracted its own maximum; this brings its sum to that of all.
            share = build.call(aten.exp.default, build.call(aten.sub.Tensor, tops, top))
            scaled = build.call(aten.mul.Tensor, sums, share)
            of_all = build.call(aten.sum.dim_IntList, scaled, [0])
            self.logsums[loss] = build.call(aten.add.Tensor, top, build.call(aten.log.default, of_all))
        for each, loss in self._same.items():
            self.logsums[each] = self._viewed(build, self.logsums[loss], each, 1)
        for each in self.layers.logsumexps:
            value = build.call(aten.view.default, self.logsums[each], list(each.meta["val"].shape))
            self._others[each] = cast(build, value, each.meta["val"].dtype)
        for pick, entries in picked.items():
            logs = node_arg(pick, 0)
            entry = build.call(aten.sum.dim_IntList, entries, [0])
            self._entries[pick] = build.call(aten.sub.Tensor, entry, self._logsum(logs))
        for total, sums in summed.items():
            logs = node_arg(total, 0)
            entry = build.call(aten.sum.dim_IntList, sums, [0])
            size = float(self.layers.entries(logs))
            value = build.call(aten.sub.Tensor, entry, build.call(aten.mul.Tensor, self._logsum(logs), size))
            value = build.call(aten.view.default, value, list(total.meta["val"].shape))
            self._others[total] = cast(build, value, total.meta["val"].dtype)
        for argmax, (tops, rows) in largest.items():  # the first of several, as without shards
            first = build.call(aten.argmax.default, tops, 0, True)
            value = build.call(aten.gather.default, rows, 0, first)
            value = build.call(aten.view.default, value, list(argmax.meta["val"].shape))
            self._others[argmax] = cast(build, value, torch.int64)

    def _with_statistics_of(self, logsumexp: fx.Node) -> fx.Node | None:
        """A log-softmax of the same logits in another shape."""

        def root(node: fx.Node) -> fx.Node:
            return root(node_arg(node, 0)) if node.target in RESHAPES else node

        logits = root(node_arg(logsumexp, 0))
        return next((loss for loss in self.layers.losses if root(node_arg(loss, 0)) is logits), None)

    def _viewed(self, build: Builder, value: fx.Node, logsumexp: fx.Node, size: int) -> fx.Node:
        """A value of the same tokens in the shape of a log-sum-exp's logits, with so many words."""
        logits = node_arg(logsumexp, 0)
        shape = list(logits.meta["val"].shape)
        shape[self.layers.axes[logits]] = size
        return build.call(aten.view.default, value, shape)

    def _logsum(self, logs: fx.Node) -> fx.Node:
        """The log-sum-exp of a loss, in the shape of a view of it."""
        if logs in self.logsums:
            return self.logsums[logs]
        return self.shard.per_token(logs, self._logsum(node_arg(logs, 0)), Phase.B)

    def local_copy(self, node: fx.Node) -> fx.Node:
        """This rank's own copy of a value that follows from the losses or is a part of the backward; the
        value itself where it is neither."""
        for each in operands_first(node, self._others, self._operands):
            self._others[each] = self._copied(each)
        return self._others[node]

    def _is_own(self, node: fx.Node) -> bool:
        # What comes before the losses is the model's own: each rank gets it as a message.
        return node.op == "call_function" and (node in self._after or node.meta["origin"].backward)

    def _is_of_pick(self, node: fx.Node) -> bool:
        """Whether a value is one of a pick's two results."""
        return bool(node.args) and node.args[0] in self._entries

    def _operands(self, node: fx.Node) -> list[fx.Node]:
        """The values of which this rank makes its own copies for one of a value."""
        if self._is_own(node) and (node in self.layers.axes or node in self.layers.products):
            raise whole(node)
        return node.all_input_nodes if self._is_own(node) and not self._is_of_pick(node) else []

    def _copied(self, node: fx.Node) -> fx.Node:
        if not self._is_own(node):
            return node
        if self._is_of_pick(node):
            return self._picked(node_arg(node, 0))[node.args[1]]  # type: ignore[index]
        # Every rank computes it from the statistics of all, instead of waiting for one that does.
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._others.__getitem__)
        return self.shard.at(Phase.B, node.meta["origin"]).copy(node, args, kwargs)

    def _picked(self, pick: fx.Node) -> tuple[fx.Node, fx.Node]:
        """The loss and the number of labels that count, as nll_loss gives them."""
        logs, (label, _, reduction, ignored) = node_arg(pick, 0), pick.args[1:]
        build = self.shard.at(Phase.B, pick.meta["origin"])
        dtype = logs.meta["val"].dtype
        each = build.call(aten.squeeze.dim, self._entries[pick], self.layers.axes[logs])
        each = build.call(aten.neg.default, each)
        counts = build.call(aten.ne.Scalar, label, ignored)
        # Not a product with zero: the entry of an ignored label may be infinite.
        each = build.call(aten.where.self, counts, each, build.call(aten.zeros_like.default, each))
        count = cast(build, build.call(aten.sum.default, counts), each.meta["val"].dtype)
        if reduction != EACH:
            each = build.call(aten.sum.default, each)
        if reduction == MEAN:
            each = build.call(aten.div.Tensor, each, count)
        return cast(build, each, dtype), cast(build, count, dtype)

    def give_the_rest(self) -> None:
        """Give values that follow from the losses to the model's other ops, from this rank."""
        for node in self._after:
            for user in list(node.users):
                if user.op != "call_function" or user in self._after or "color" in user.meta:
                    continue
                # Ops on values with a vocabulary dimension have copies on every rank.
                if user not in self.layers.axes and not any(
                    n in self.layers.axes for n in user.all_input_nodes
                ):
                    user.replace_input_with(node, self.local_copy(node))

    def _following(self) -> dict[fx.Node, None]:
        """The values that follow from the losses and have no vocabulary dimension."""
        following: dict[fx.Node, None] = {}
        layers = self.layers
        todo = [*layers.label_gathers, *layers.vocab_sums, *layers.argmaxes, *layers.logsumexps]
        while todo:
            node = todo.pop()
            other = node.op == "output" or node in self.layers.axes or node in self.layers.products
            if node not in following and not other:
                following[node] = None
                todo += node.users
        return following
