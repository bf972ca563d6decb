"""Brings logits into one layout: all rows at once, and the words in the last dimension.

Loops over the rows of a batch become ops on all rows, and their backwards likewise.
before: logits ──► unbind ──► log_softmax(row) ──► … of each row ──► stack
after:  logits ──► log_softmax(logits) ──► …

Losses of images, and of logits that a model turns for them, become those of tokens.
before: logits.transpose(1, 2) ──► log_softmax(…, 1) ──► view(…) ──► nll_loss2d_forward
after:  logits ──► log_softmax(…, 2) ──► view(tokens, words) ──► nll_loss_forward
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxpipe.ir.builder import Builder, in_order, node_arg
from fxpipe.ir.compat import pytree
from fxpipe.ir.nodes import take_name
from fxpipe.ir.storage import call_nodes, drop_dead, place_of
from fxpipe.vocabulary.axes import EACH, RESHAPES
from fxpipe.vocabulary.part_builder import is_elementwise

aten = torch.ops.aten
_ALONG = {  # a dimension, which they name
    aten._log_softmax.default, aten._log_softmax_backward_data.default, aten.logsumexp.default,
    aten.gather.default, aten.scatter_add.default, aten.unsqueeze.default, aten.squeeze.dim,
}  # fmt: skip
_SIZED = {aten.new_zeros.default, aten.expand.default}  # by their second argument

Nodes = tuple[fx.Node, ...]


def rows_at_once(graph: fx.Graph) -> None:
    """Write stacks of what is computed of each row as ops on all rows, where these are known."""
    layout = _AllRows(graph)
    for stack in graph.find_nodes(op="call_function", target=aten.stack.default):
        rows: Any = stack.args[0]
        whole = layout.made((*rows,)) if stack.args[1:] in ((), (0,)) else None
        if whole is not None:
            _replace(stack, whole)
    in_order(graph)
    drop_dead(graph)


def words_last(graph: fx.Graph) -> None:
    """Write losses of images of one line, with their backwards, as losses of tokens."""
    layout, shapes = _WordsLast(graph), set[torch.Size]()
    for pick in graph.find_nodes(op="call_function", target=aten.nll_loss2d_forward.default):
        arguments: tuple[Any, ...] = pick.args
        image, labels, *others = arguments
        logs = layout.logs_of(image)
        if logs is None:
            continue
        shapes.add(logs.meta["val"].shape)
        operands = layout.of_tokens(pick, image, labels)
        loss = layout.call(pick, aten.nll_loss_forward.default, *operands, *others)
        for item in [*pick.users]:
            value = layout.call(item, operator.getitem, loss, item.args[1])
            if item.meta["val"].dim():
                value = layout.call(item, aten.reshape.default, value, [*item.meta["val"].shape])
            _replace(item, value)
        for total in [user for user in logs.users if user.target is aten.sum.dim_IntList]:
            if total.args[1:] == ([1],):
                words = layout.made((logs,))
                _replace(total, layout.call(total, total.target, words, [2], **total.kwargs))
    for node in [node for node in call_nodes(graph) if _swaps(node) and node.meta["origin"].backward]:
        turned = node_arg(node, 0)
        if turned.meta["val"].shape in shapes:
            _replace(node, layout.made((turned,)))
    in_order(graph)
    drop_dead(graph)


class _Layout:
    """Makes values again in another layout, each once."""

    def __init__(self, graph: fx.Graph) -> None:
        self._build, self._made = Builder(graph), dict[Nodes, fx.Node | None]()

    def call(self, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """An op of another one's origin."""
        self._build.origin = like.meta["origin"]
        return self._build.call(target, *args, **kwargs)

    def made(self, nodes: Nodes) -> Any:
        """What stands for these values in the other layout; None where that is not known."""
        if nodes not in self._made:
            whole = self._source(nodes)
            self._made[nodes] = self._same_op(nodes) if whole is None else whole
        return self._made[nodes]

    def _source(self, nodes: Nodes) -> fx.Node | None:
        """A value that is there already, or is made in another way; None for what the same op gives."""
        raise NotImplementedError

    def _dim(self, dim: int) -> int:
        raise NotImplementedError

    def _sizes(self, sizes: Sequence[int]) -> list[int]:
        raise NotImplementedError

    def _same_op(self, nodes: Nodes) -> fx.Node | None:
        first, target, rank = nodes[0], nodes[0].target, nodes[0].meta["val"].dim()
        alone = is_elementwise(first)
        if not (alone or target in _ALONG | _SIZED) or any(x.target is not target for x in nodes):
            return None
        leaves, specs = zip(*(pytree.tree_flatten((x.args, dict(x.kwargs))) for x in nodes), strict=True)
        if any(spec != specs[0] for spec in specs):
            return None
        new = list[Any]()
        for each in zip(*leaves, strict=True):
            if not isinstance(each[0], fx.Node):
                if any(isinstance(x, fx.Node) or x != each[0] for x in each):
                    return None
                new.append(each[0])
                continue
            if not all(isinstance(x, fx.Node) for x in each):
                return None
            number = len({*each}) == 1 and not each[0].meta["val"].dim()
            # What is broadcast to more dimensions would have them elsewhere.
            if not number and (alone or target is aten.expand.default) and each[0].meta["val"].dim() != rank:
                return None
            new.append(each[0] if number else self.made(each))
            if new[-1] is None:
                return None
        args, kwargs = pytree.tree_unflatten(new, specs[0])
        args = [*args]
        if target in _ALONG:
            at, dims = place_of(first, "dim"), node_arg(first, 0).meta["val"].dim()
            dims += target is aten.unsqueeze.default
            many = isinstance(args[at], Sequence)
            moved = [self._dim(dim % dims) for dim in (args[at] if many else [args[at]])]
            args[at] = moved if many else moved[0]
        elif target in _SIZED:
            args[1] = self._sizes(args[1])
        return self.call(first, target, *args, **kwargs)


class _AllRows(_Layout):
    """The values of all rows, of one value for each row."""

    def _source(self, nodes: Nodes) -> fx.Node | None:
        rows = [_row(node) for node in nodes]
        whole = None if rows[0] is None else rows[0][0]
        is_all = whole is not None and rows == [(whole, k) for k in range(whole.meta["val"].shape[0])]
        return whole if is_all else None

    def _same_op(self, nodes: Nodes) -> fx.Node | None:
        self._count = len(nodes)
        alike = len({(node.meta["val"].shape, node.meta["val"].dtype) for node in nodes}) == 1
        return super()._same_op(nodes) if alike else None

    def _dim(self, dim: int) -> int:
        return dim + 1

    def _sizes(self, sizes: Sequence[int]) -> list[int]:
        return [self._count, *sizes]


class _WordsLast(_Layout):
    """A value of three dimensions with its last two swapped."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__(graph)
        self._tokens: dict[Nodes, tuple[fx.Node, fx.Node]] = {}

    def logs_of(self, image: fx.Node) -> fx.Node | None:
        """The log-softmax in a loss of images, [rows, words, tokens]; None where the images have more lines,
        or come from elsewhere."""
        rows, words, lines, tokens = image.meta["val"].shape
        is_view = image.target in RESHAPES and lines == 1
        logs = node_arg(image, 0) if is_view else image
        return logs if logs.meta["val"].shape == (rows, words, tokens) else None

    def of_tokens(self, pick: fx.Node, image: fx.Node, labels: fx.Node) -> tuple[fx.Node, fx.Node]:
        """The log-softmax and the labels of all tokens, for a loss and its backward."""
        if (image, labels) not in self._tokens:
            logs, words = self.made((self.logs_of(image),)), image.meta["val"].shape[1]  # type: ignore[arg-type]
            of_logs = self.call(pick, aten.reshape.default, logs, [-1, words])
            self._tokens[image, labels] = of_logs, self.call(pick, aten.reshape.default, labels, [-1])
        return self._tokens[image, labels]

    def _source(self, nodes: Nodes) -> fx.Node | None:
        (node,) = nodes
        if _swaps(node):
            return node_arg(node, 0)
        put = node_arg(node, 0) if node.target in RESHAPES else node
        if put.target is not aten.nll_loss2d_backward.default or node.meta["val"].dim() != 3:
            return None
        operands: tuple[Any, ...] = put.args
        gradient, image, labels, *others = operands
        if self.logs_of(image) is None:
            return None
        if others[1] == EACH:
            gradient = self.call(put, aten.reshape.default, gradient, [-1])
        of_tokens = self.of_tokens(put, image, labels)
        made = self.call(put, aten.nll_loss_backward.default, gradient, *of_tokens, *others)
        rows, words, tokens = node.meta["val"].shape
        return self.call(put, aten.reshape.default, made, [rows, tokens, words])

    def _same_op(self, nodes: Nodes) -> fx.Node | None:
        (node,) = nodes
        dims = {x.meta["val"].dim() for x in node.all_input_nodes if isinstance(x.meta["val"], torch.Tensor)}
        same = super()._same_op(nodes) if dims <= {0, 3} else None
        return self.call(node, aten.transpose.int, node, 1, 2) if same is None else same

    def _dim(self, dim: int) -> int:
        return (0, 2, 1)[dim]

    def _sizes(self, sizes: Sequence[int]) -> list[int]:
        rows, words, tokens = sizes
        return [rows, tokens, words]


def _row(node: fx.Node) -> tuple[fx.Node, int] | None:
    """The value of which a node is a row, and the number of the row; None if it is none."""
    args: tuple[Any, ...] = node.args
    if node.target is aten.select.int and args[1] == 0:
        return args[0], args[2]
    if node.target is operator.getitem and args[0].target is aten.unbind.int:
        return (args[0].args[0], args[1]) if args[0].args[1:] in ((), (0,)) else None
    return None


def _swaps(node: fx.Node) -> bool:
    """Whether an op swaps the last two of three dimensions."""
    args: Any = node.args[1:]
    if node.target is aten.permute.default:
        return [dim % len(args[0]) for dim in args[0]] == [0, 2, 1]
    return (
        node.target is aten.transpose.int
        and node.meta["val"].dim() == 3
        and {dim % 3 for dim in args} == {1, 2}
    )


def _replace(old: fx.Node, new: fx.Node) -> None:
    """Let a new value take the place of another one, and its name."""
    old.replace_all_uses_with(new)
    take_name(new, old)
