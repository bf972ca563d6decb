"""Which numbers in a forward follow from how many rows it gets: they are others in a trace of twice as many.

    mul(loss, 4)       and  mul(loss, 8)          len(x): the first power of the rows
    div(total, 12)     and  div(total, 24)        x.numel(), likewise
    full([], 0.25)     and  full([], 0.125)       1 / len(x): the power -1
    mul(x, 0.5)        and  mul(x, 0.5)           none

Only what is told to users depends on it: a model that takes no other number of rows has no other trace.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxpipe.capture.rows import families
from fxpipe.capture.rows.forms import packet_of, shape_of
from fxpipe.ir.compat import pytree
from fxpipe.ir.dims import is_pointwise
from fxpipe.ir.graph import Kind
from fxpipe.ir.storage import call_nodes

aten = torch.ops.aten

#: Ops that make a value of one number, with the place of that.
_FILLS = {aten.fill: 1, aten.full: 1, aten.full_like: 1, aten.new_full: 2, aten.scalar_tensor: 0}


class RowNumbers:
    """The powers of the number of rows in the numbers of a captured step and in its constants.

    twice: the trace of twice the rows; without one no number has a power.
    """

    def __init__(
        self,
        graph: fx.Graph,
        constants: Mapping[str, torch.Tensor],
        twice: tuple[fx.Graph, Mapping[str, torch.Tensor]] | None = None,
    ) -> None:
        self._of: dict[fx.Node, dict[int | str, float]] = {}
        self._others: dict[fx.Node, fx.Node] = {}
        if twice is None:
            return
        other, other_constants = twice
        groups = _by_line(other)
        for key, nodes in _by_line(graph).items():
            for node, same in zip(nodes, _counterparts(nodes, groups.get(key, [])), strict=True):
                here, there = numbers_of(node), {} if same is None else numbers_of(same)
                differ = [at for at in here if repr(here[at]) != repr(there.get(at))]
                if differ:
                    self._of[node] = {at: _power(here[at], there.get(at)) for at in differ}
                if same is not None:
                    self._others[node] = same
        for node in graph.find_nodes(op="placeholder"):
            name = node.meta["input"].name
            if node.meta["input"].kind is Kind.CONSTANT and name in other_constants:
                power = _power_of_tensor(constants[name], other_constants[name])
                if power:
                    self._of[node] = {0: power}

    def of(self, node: fx.Node) -> Mapping[int | str, float]:
        """The powers in an op's numbers by their places, or by names, or in a constant; NaN for a number that
        is no power.  Those without are left out."""
        return self._of.get(node, {})

    def is_as_long(self, node: fx.Node, dim: int) -> bool:
        """Whether a dimension of a value is known to be no longer with twice the rows."""
        other = self._others.get(node)
        return other is not None and shape_of(other)[dim : dim + 1] == shape_of(node)[dim : dim + 1]

    def summed(self, node: fx.Node) -> float:
        """The power in how many entries a sum adds up for each of its own, of values without rows."""
        other = self._others.get(node)
        return 0.0 if other is None else _power(_ratio(node), _ratio(other))


def twice_the_rows(example: Any) -> Any:
    """The example with each of its rows again behind them."""

    def twice(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim():
            return tensor
        return torch.cat([tensor, tensor]).detach().requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(torch.Tensor, twice, example)


def numbers_of(node: fx.Node) -> dict[int | str, int | float]:
    """The numbers with which an op computes, by their places or names; not those that are sizes or places."""
    packet = packet_of(node)
    of_entries = is_pointwise(node) or packet in families.POINTWISE or packet is aten.expand
    kinds: Any = int | float if of_entries or packet in _FILLS else float
    numbers = [*enumerate(node.args), *node.kwargs.items()]
    if packet in _FILLS:
        numbers = numbers[_FILLS[packet] :][:1]
    return {at: x for at, x in numbers if isinstance(x, kinds) and not isinstance(x, bool)}  # type: ignore[misc]


def _by_line(graph: fx.Graph) -> dict[Hashable, list[fx.Node]]:
    """The ops of a forward by what they are and the line that runs them, in order."""
    groups: dict[Hashable, list[fx.Node]] = {}
    for node in call_nodes(graph):
        origin = node.meta["origin"]
        if not origin.backward:
            groups.setdefault((node.target, origin.path, origin.source), []).append(node)
    return groups


def _counterparts(nodes: list[fx.Node], others: list[fx.Node]) -> Sequence[fx.Node | None]:
    """Match each op of a line with that of the other trace.  In a loop over the rows, which runs more often
    there, it is one with the number that stands in its place; none where each turn has other numbers."""
    if len(nodes) == len(others):
        return others
    here, there = ({repr(numbers_of(x)): x for x in each} for each in (nodes, others))
    like = dict(zip(here, there.values(), strict=False)) if len(here) == len(there) else {}
    return [like.get(repr(numbers_of(x))) for x in nodes]


def _power(here: float, there: float | None) -> float:
    """The power p where a number is 2ᵖ times as large with twice the rows; NaN where it is none."""
    if here == there:
        return 0.0
    if there is None or not math.isfinite(ratio := here and there / here) or ratio <= 0:
        return math.nan
    power = math.log2(ratio)
    return round(2 * power) / 2 if abs(2 * power - round(2 * power)) < 1e-6 else math.nan


def _power_of_tensor(here: torch.Tensor, there: torch.Tensor) -> float:
    """The power that all entries of a constant have; 0 of one of other sizes, with a part for each row."""
    is_same = here.shape == there.shape and (here == there) | ((here != here) & (there != there))
    if isinstance(is_same, bool) or is_same.all():
        return 0.0
    is_zero = (here == 0) & (there == 0)
    ratios = (there.double() / here.double())[~is_zero].unique()
    return _power(1.0, float(ratios[0])) if len(ratios) == 1 else math.nan


def _ratio(node: fx.Node) -> float:
    (x,) = node.all_input_nodes
    return float(x.meta["val"].numel() / max(node.meta["val"].numel(), 1))
