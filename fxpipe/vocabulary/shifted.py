"""Chooses rows of hidden states, where a model chooses rows of logits: a head has the rows of its loss.

before: x ──► logits = x @ table.T ──► logits[:, :-1] ──► loss
        d_logits = slice_backward(d_shifted) ──► d_x = d_logits @ table,  d_table = d_logits.T @ x
after:  x[:, :-1] ──► shifted = x[:, :-1] @ table.T ──► loss
        d_x = slice_backward(d_shifted @ table),  d_table = d_shifted.T @ x[:, :-1]

The gradient of the table is a sum without the rows of zeros.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from fxpipe.ir.builder import Builder, in_order, node_arg
from fxpipe.ir.nodes import rename, take_name
from fxpipe.ir.ops import summands_of
from fxpipe.ir.storage import argument, drop_dead
from fxpipe.vocabulary.axes import RESHAPES
from fxpipe.vocabulary.part_builder import is_elementwise

aten = torch.ops.aten
_PROJECTIONS = {aten.mm.default: 0, aten.addmm.default: 1}  # where x is among the arguments


def shift_hidden_states(graph: fx.Graph) -> None:
    """Move the choices of rows of logits, with their backwards, in front of the projection, where nothing
    else reads these logits.  Several choices of other rows have a projection each."""
    slices = graph.find_nodes(op="call_function", target=aten.slice.Tensor)
    for logits in dict.fromkeys(node_arg(x, 0) for x in slices if not x.meta["origin"].backward):
        head = _Shifted.of(logits)
        if head is not None:
            head.rewrite()
    in_order(graph)
    drop_dead(graph)


class _Shifted:
    """A projection, the ops on rows of logits behind it, and slices of these rows.

    ``x``: what is projected.  ``forward``: from the projection to what is sliced.  ``choices``: the slices,
    by their rows.  ``puts``: the gradients of what is sliced, from those of the slices, by these rows.
    ``backward``: from the sum of those to the gradient of the projection's result, of which parameters and
    hidden states get theirs; empty without one.
    """

    def __init__(self, x: fx.Node, forward: list[fx.Node], choices: _ByRows) -> None:
        self.x, self.forward, self.choices = x, forward, choices
        self.puts: _ByRows = {}
        self.backward: list[fx.Node] = []
        self.build = Builder(x.graph)
        self.new: dict[fx.Node, fx.Node] = {}
        """What takes the place of a value, on the chosen rows alone."""
        self.named = set[fx.Node]()
        """The values whose names others have got."""

    @staticmethod
    def of(logits: fx.Node) -> _Shifted | None:
        """The head of sliced values; None where they are others, or where others read the logits."""
        forward = [logits]
        while forward[0].target not in _PROJECTIONS:
            if len(forward[0].all_input_nodes) != 1 or not _is_of_rows(forward[0]):
                return None
            forward.insert(0, forward[0].all_input_nodes[0])
        choices = [user for user in logits.users if user.target is aten.slice.Tensor]
        if logits.meta["val"].dim() != 3 or any(choice.args[1] not in (0, 1) for choice in choices):
            return None
        x = node_arg(forward[0], _PROJECTIONS[forward[0].target])
        head = _Shifted(x, forward, _by_rows(choices))
        if not head._has_gradient_of(logits):
            return None
        readers = {user for value in forward for user in value.users}
        return head if readers <= {*choices, *forward, *head.backward} else None

    def _has_gradient_of(self, logits: fx.Node) -> bool:
        """Find the gradient of what is sliced, if there is any; False where it is made in another way."""
        of_slices = logits.graph.find_nodes(op="call_function", target=aten.slice_backward.default)
        alike = [node for node in of_slices if node.meta["val"].shape == logits.meta["val"].shape]
        puts = [node for node in alike if _rows(node) in self.choices]
        for total in dict.fromkeys(map(_sum_with, puts)):
            summands = summands_of([total])
            if {*summands} <= {*puts}:
                self.puts, self.backward = _by_rows(summands), [total]
                if self._leads_to_ends():
                    return True
        # A gradient that is made in another way would be of logits that nobody makes any more.
        self.puts, self.backward = {}, []
        return not puts

    def _leads_to_ends(self) -> bool:
        while self.backward[-1].meta["val"].dim() != 2:
            (user, *others) = self.backward[-1].users
            if others or not _is_of_rows(user):
                return False
            if not {*user.all_input_nodes} <= {*self.forward, *self.backward}:
                return False
            self.backward.append(user)
        gradient = self.backward[-1]
        return all(_gives_gradient(user, gradient, self.x) for user in gradient.users)

    def rewrite(self) -> None:
        ends = [end for value in self.backward[-1:] for end in value.users]
        ends += [product for end in ends if end.target is aten.t.default for product in end.users]
        parts: dict[fx.Node, list[fx.Node]] = {end: [] for end in ends}
        for rows, choices in self.choices.items():
            self._make_logits(choices)
            if rows in self.puts:
                self._make_gradients(self.puts[rows], choices[0], parts)
        for end, summands in parts.items():
            total = summands[0]
            # A transposed gradient is read by products alone, each of which has summands of its own.
            for summand in summands[1:] if end.target is not aten.t.default else ():
                self.build.origin = end.meta["origin"]
                total = self.build.call(aten.add.Tensor, total, summand)
            if total is not summands[0]:
                take_name(total, summands[0])
                rename(summands[0], f"{total.name}_part")
            end.replace_all_uses_with(total)

    def _make_logits(self, choices: list[fx.Node]) -> None:
        x, call, choice = self.x, self.build.call, choices[0]
        batch, length, _ = node_arg(choice, 0).meta["val"].shape
        self.build.origin, self.choice, self.new = choice.meta["origin"], choice, {}
        of_all = call(aten.view.default, x, [batch, length, -1])
        chosen = call(aten.slice.Tensor, of_all, *choice.args[1:])
        self.new[x] = call(aten.reshape.default, chosen, [-1, x.meta["val"].shape[1]])
        for node in self.forward:
            self._make(node)
        for choice in choices:
            choice.replace_all_uses_with(self.new[self.forward[-1]])

    def _make_gradients(
        self, puts: list[fx.Node], choice: fx.Node, parts: dict[fx.Node, list[fx.Node]]
    ) -> None:
        """Make the gradients of a slice of rows, for all that gets one of the projection."""
        call = self.build.call
        batch, length, _ = node_arg(choice, 0).meta["val"].shape
        self.build.origin = puts[0].meta["origin"]
        above = node_arg(puts[0], 0)
        for put in puts[1:]:
            above = call(aten.add.Tensor, above, put.args[0])
        self.new[self.backward[0]] = above
        for node in self.backward[1:]:
            self._make(node)
        for end, summands in parts.items():
            self._make(end)
            if end.target is aten.mm.default and end.args[0] is self.backward[-1]:  # it has a row for each
                rows = call(aten.view.default, self.new[end], [*choice.meta["val"].shape[:2], -1])
                shape = [batch, length, end.meta["val"].shape[1]]
                put = call(aten.slice_backward.default, rows, shape, *puts[0].args[2:])
                of_rows, self.new[end] = self.new[end], call(aten.view.default, put, [*end.meta["val"].shape])
                take_name(self.new[end], of_rows)
            summands.append(self.new[end])

    def _make(self, node: fx.Node) -> None:
        """Make an op on the chosen rows."""
        self.build.origin = node.meta["origin"]
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda x: self.new.get(x, x))
        if node.target in RESHAPES:
            shape = node.meta["val"].shape
            rows = [-1] if len(shape) == 2 else self.choice.meta["val"].shape[:2]
            args = args[0], [*rows, shape[-1]]
        self.new[node] = self.build.call(node.target, *args, **kwargs)  # type: ignore[arg-type]
        if node not in self.named:
            take_name(self.new[node], node)
            self.named.add(node)


_ByRows = dict[tuple[int, range], list[fx.Node]]
"""Slices, or their gradients, by their dimension and the numbers in it."""


def _by_rows(nodes: Iterable[fx.Node]) -> _ByRows:
    by_rows: _ByRows = {}
    for node in nodes:
        by_rows.setdefault(_rows(node), []).append(node)
    return by_rows


def _rows(node: fx.Node) -> tuple[int, range]:
    """The dimension of a slice, or of its gradient, and the numbers in it."""
    of_all = node_arg(node, 0) if node.target is aten.slice.Tensor else node
    arguments: Any = [argument(node, name) for name in ("dim", "start", "end", "step")]
    dim, *bounds = arguments
    return dim, range(of_all.meta["val"].shape[dim])[slice(*bounds)]


def _sum_with(summand: fx.Node) -> fx.Node:
    """The sum of gradients of one value that a gradient is part of."""
    while len(summand.users) == 1:
        (user,) = summand.users
        if user.target is not aten.add.Tensor or user.kwargs:
            break
        summand = user
    return summand


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
