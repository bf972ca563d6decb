"""Chooses rows of hidden states, where a model chooses rows of logits: a head has the rows of its loss.

before: x ──► logits = x @ table.T ──► logits[:, :-1] ──► loss
        d_logits = slice_backward(d_shifted) ──► d_x = d_logits @ table,  d_table = d_logits.T @ x
after:  x[:, :-1] ──► shifted = x[:, :-1] @ table.T ──► loss
        d_x = slice_backward(d_shifted @ table),  d_table = d_shifted.T @ x[:, :-1]

The gradient of the table is a sum without the rows of zeros.
"""

from __future__ import annotations

import torch
from torch import fx

from fxpipe.ir.builder import Builder, in_order, node_arg
from fxpipe.ir.nodes import take_name
from fxpipe.ir.storage import drop_dead
from fxpipe.vocabulary.axes import RESHAPES
from fxpipe.vocabulary.part_builder import is_elementwise

aten = torch.ops.aten
_PROJECTIONS = {aten.mm.default: 0, aten.addmm.default: 1}  # where x is among the arguments


def shift_hidden_states(graph: fx.Graph) -> None:
    """Move every choice of rows of logits, with its backward, in front of the projection, where nothing else
    reads these logits."""
    for choice in graph.find_nodes(op="call_function", target=aten.slice.Tensor):
        head = None if choice.meta["origin"].backward else _Shifted.of(choice)
        if head is not None:
            head.rewrite()
    in_order(graph)
    drop_dead(graph)


class _Shifted:
    """A projection, the ops on rows of logits behind it, and a slice of these rows.

    ``x``: what is projected.  ``forward``: from the projection to what is sliced.  ``backward``: from the
    gradient of that to the gradient of the projection's result, of which parameters and hidden states get
    theirs; empty without one.
    """

    def __init__(self, choice: fx.Node, x: fx.Node, forward: list[fx.Node], backward: list[fx.Node]) -> None:
        self.choice, self.x, self.forward, self.backward = choice, x, forward, backward
        self.build = Builder(choice.graph)
        self.new: dict[fx.Node, fx.Node] = {}
        """What takes the place of a value, on the chosen rows alone."""

    @staticmethod
    def of(choice: fx.Node) -> _Shifted | None:
        """The head of a slice; None where it slices other values, or where others read the logits."""
        logits = node_arg(choice, 0)
        forward = [logits]
        while forward[0].target not in _PROJECTIONS:
            if len(forward[0].all_input_nodes) != 1 or not _is_of_rows(forward[0]):
                return None
            forward.insert(0, forward[0].all_input_nodes[0])
        if logits.meta["val"].dim() != 3 or choice.args[1] not in (0, 1):
            return None
        seq = choice.meta["origin"].seq
        slices = choice.graph.find_nodes(op="call_function", target=aten.slice_backward.default)
        backward = [node for node in slices if node.meta["origin"].seq == seq]
        while backward and backward[-1].meta["val"].dim() != 2:
            (user, *others) = backward[-1].users
            if others or not _is_of_rows(user) or not {*user.all_input_nodes} <= {*forward, *backward}:
                return None
            backward.append(user)
        readers = {user for value in forward for user in value.users}
        is_alone = readers <= {choice, *forward, *backward}
        x = node_arg(forward[0], _PROJECTIONS[forward[0].target])
        is_alone &= all(_gives_gradient(user, value, x) for value in backward[-1:] for user in value.users)
        return _Shifted(choice, x, forward, backward) if is_alone else None

    def rewrite(self) -> None:
        x, call = self.x, self.build.call
        batch, length, _ = node_arg(self.choice, 0).meta["val"].shape
        self.build.origin = self.choice.meta["origin"]
        of_all = call(aten.view.default, x, [batch, length, -1])
        chosen = call(aten.slice.Tensor, of_all, *self.choice.args[1:])
        self.new[x] = call(aten.reshape.default, chosen, [-1, x.meta["val"].shape[1]])
        for node in self.forward:
            self._make(node)
        for node in self.backward[1:]:
            self.new.setdefault(self.backward[0], node_arg(self.backward[0], 0))
            self._make(node)
        ends = [end for value in self.backward[-1:] for end in value.users]
        ends += [product for end in ends if end.target is aten.t.default for product in end.users]
        for end in ends:
            self._make(end)
            if end.target is aten.mm.default and end.args[0] is self.backward[-1]:  # it has a row for each
                rows = call(aten.view.default, self.new[end], [*self.choice.meta["val"].shape[:2], -1])
                shape = [batch, length, end.meta["val"].shape[1]]
                put = call(aten.slice_backward.default, rows, shape, *self.backward[0].args[2:])
                of_rows, self.new[end] = self.new[end], call(aten.view.default, put, [*end.meta["val"].shape])
                take_name(self.new[end], of_rows)
            end.replace_all_uses_with(self.new[end])
        self.choice.replace_all_uses_with(self.new[self.forward[-1]])

    def _make(self, node: fx.Node) -> None:
        """Make an op on the chosen rows."""
        self.build.origin = node.meta["origin"]
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda x: self.new.get(x, x))
        if node.target in RESHAPES:
            shape = node.meta["val"].shape
            rows = [-1] if len(shape) == 2 else self.choice.meta["val"].shape[:2]
            args = args[0], [*rows, shape[-1]]
        self.new[node] = self.build.call(node.target, *args, **kwargs)  # type: ignore[arg-type]
        take_name(self.new[node], node)


def _is_of_rows(node: fx.Node) -> bool:
    """Whether an op works on each row by itself: a view that keeps them, or one on single elements."""
    if node.target in RESHAPES:
        return bool(node.meta["val"].shape[-1] == node_arg(node, 0).meta["val"].shape[-1])
    return is_elementwise(node)


def _gives_gradient(node: fx.Node, gradient: fx.Node, x: fx.Node) -> bool:
    """Whether an op gives a table, a bias or the hidden states theirs.  gradient: of the projection's result.
    x: what is projected."""
    if node.target is aten.t.default:
        return all(user.target is aten.mm.default and user.args == (node, x) for user in node.users)
    if node.target is aten.mm.default:
        return node.args[0] is gradient and node.args[1] is not gradient
    return node.target is aten.sum.dim_IntList and node.args[1] == [0]
