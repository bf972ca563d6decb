"""The gradient of the logits, from the gradient of the log-softmax.

That one has two parts, both one number a token: one for the label's entry, one for every entry (label
smoothing).  d_logits = pick · onehot + all - softmax · (pick + size · all)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from fxpipe.ir.builder import cast, node_arg
from fxpipe.plan.tensors import accum_dtype
from fxpipe.schedule.ops import Phase
from fxpipe.vocabulary.axes import EACH, LINEAR, MEAN, RESHAPES, UNPICKS, is_uniform, whole
from fxpipe.vocabulary.shard import Shard
from fxpipe.vocabulary.softmax import Softmax

aten = torch.ops.aten


@dataclass(frozen=True)
class LossGrad:
    """The two parts, with size one for the vocabulary; ``label_grad`` goes to the entry of ``label``."""

    label_grad: fx.Node | None = None
    uniform_grad: fx.Node | None = None
    label: fx.Node | None = None


class Gradients:
    def __init__(self, shard: Shard, softmax: Softmax) -> None:
        self.shard, self.softmax, self.axes = shard, softmax, shard.layers.axes
        self._parts: dict[fx.Node, LossGrad] = {}
        self._shares: dict[fx.Node, fx.Node] = {}
        shard.makers[aten._log_softmax_backward_data.default] = self._of_logits

    def parts(self, node: fx.Node) -> LossGrad:
        """The parts of the gradient that a log-softmax's backward takes."""
        if node not in self._parts:
            grad = self._collapsed(node_arg(node, 0))
            build = self.shard.at(Phase.B, node.meta["origin"])
            dtype = accum_dtype(node_arg(node, 1).meta["val"].dtype)
            self._parts[node] = replace(
                grad,
                label_grad=None if grad.label_grad is None else cast(build, grad.label_grad, dtype),
                uniform_grad=None if grad.uniform_grad is None else cast(build, grad.uniform_grad, dtype),
            )
        return self._parts[node]

    def total(self, node: fx.Node) -> fx.Node:
        """The sum of the gradient over the vocabulary."""
        parts = self.parts(node)
        build = self.shard.at(Phase.B, node.meta["origin"])
        if parts.uniform_grad is None:
            assert parts.label_grad is not None, "a gradient has at least one part"
            return parts.label_grad
        everywhere = build.call(
            aten.mul.Tensor, parts.uniform_grad, float(self.shard.layers.entries(node_arg(node, 1)))
        )
        return (
            everywhere
            if parts.label_grad is None
            else build.call(aten.add.Tensor, parts.label_grad, everywhere)
        )

    def softmax_scale(self, node: fx.Node) -> fx.Node:
        """The factor of a token's exponentials: their product is the softmax times -total."""
        if node not in self._shares:
            loss, total = node_arg(node, 1), self.total(node)
            build = self.shard.at(Phase.B, node.meta["origin"])
            # exp(x - log-sum-exp) is exp(x - the shard's maximum), which is there, times this.
            below = build.call(aten.sub.Tensor, self.softmax.maxima[loss], self.softmax.logsums[loss])
            share = build.call(aten.mul.Tensor, build.call(aten.exp.default, below), total)
            self._shares[node] = build.call(aten.neg.default, share)
        return self._shares[node]

    def _of_logits(self, node: fx.Node) -> fx.Node:
        phase, loss = self.shard.phase, node_arg(node, 1)
        parts, share = self.parts(node), self.softmax_scale(node)
        build = self.shard.at(phase, node.meta["origin"])
        result = build.call(aten.mul.Tensor, self.softmax.exponentials[loss], share)
        if parts.uniform_grad is not None:
            result = build.call(aten.add.Tensor, result, parts.uniform_grad)
        if parts.label is not None:
            row, outside = self.shard.nearest_rows(parts.label, build)
            entry = build.call(aten.masked_fill.Scalar, parts.label_grad, outside, 0)
            result = build.call(aten.scatter_add.default, result, self.axes[node], row, entry)
        return cast(build, result, node.meta["val"].dtype)

    def _collapsed(self, node: fx.Node) -> LossGrad:
        if node.target in UNPICKS:
            return self._of_pick(node)
        if is_uniform(node, self.axes[node] - node.meta["val"].dim()):
            value = self.softmax.local_copy(node_arg(node, 0))
            shape = list(node.meta["val"].shape)
            shape[self.axes[node]] = 1
            build = self.shard.at(Phase.B, node.meta["origin"])
            return LossGrad(uniform_grad=build.call(aten.expand.default, value, shape))
        if node.target not in RESHAPES | LINEAR | {aten.add.Tensor}:
            raise whole(node)
        inputs = [self._collapsed(n) for n in node.all_input_nodes if n in self.axes]
        if node.target is aten.add.Tensor and not node.kwargs and len(inputs) == 2:
            return self._sum(node, *inputs)
        if len(inputs) != 1 or node.target is aten.add.Tensor:
            raise whole(node)
        (inner,), per_token = inputs, self.shard.per_token
        return LossGrad(
            label_grad=None if inner.label_grad is None else per_token(node, inner.label_grad, Phase.B),
            uniform_grad=None if inner.uniform_grad is None else per_token(node, inner.uniform_grad, Phase.B),
            label=per_token(node, inner.label, Phase.F)
            if inner.label is not None and node.target in RESHAPES
            else inner.label,
        )

    def _sum(self, node: fx.Node, one: LossGrad, other: LossGrad) -> LossGrad:
        if one.label is not None and other.label is not None:
            raise whole(node)
        everywhere = one.uniform_grad if other.uniform_grad is None else other.uniform_grad
        if one.uniform_grad is not None and other.uniform_grad is not None:
            build = self.shard.at(Phase.B, node.meta["origin"])
            everywhere = build.call(aten.add.Tensor, one.uniform_grad, other.uniform_grad)
        return LossGrad(one.label_grad or other.label_grad, everywhere, one.label or other.label)

    def _of_pick(self, node: fx.Node) -> LossGrad:
        """The gradient at the label's entry, as nll_loss's backward gives it; 0 for an ignored label."""
        label, _, reduction, ignored, count = node.args[2:]
        axis = self.axes[node]
        above, number = self.softmax.local_copy(node_arg(node, 0)), self.softmax.local_copy(count)  # type: ignore[arg-type]
        build = self.shard.at(Phase.F, node.meta["origin"])
        labels = self.shard.labels(label, axis, ignored, build)  # type: ignore[arg-type]
        label = build.call(aten.unsqueeze.default, label, axis)
        build = self.shard.at(Phase.B, node.meta["origin"])
        value = build.call(aten.neg.default, above)
        if reduction == EACH:
            value = build.call(aten.unsqueeze.default, value, axis)
        elif reduction == MEAN:
            value = build.call(aten.div.Tensor, value, number)
        counts = build.call(aten.ne.Scalar, label, ignored)
        # Not a product with zero, as the number may be infinite or NaN where no label counts.
        value = build.call(aten.where.self, counts, value, build.call(aten.zeros_like.default, value))
        return LossGrad(label_grad=value, label=labels)
