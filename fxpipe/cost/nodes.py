"""The analytic cost of a node: floating-point operations and bytes moved, from its shapes alone."""

from __future__ import annotations

import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any, cast

import torch
from torch import fx

from fxpipe.cost.arithmetic import arithmetic_of
from fxpipe.cost.devices.device import Device
from fxpipe.cost.kinds import kind_of
from fxpipe.ir.nodes import input_nodes
from fxpipe.ir.ops import ENDS_EXCHANGE, lane_group, node_flops
from fxpipe.ir.storage import node_bytes
from fxpipe.plan.tensors import sum_over_ranks
from fxpipe.plan.work import BETWEEN_LANES, VIEW

aten = torch.ops.aten


#: Ops that move fewer bytes once they write over their first argument.
CHEAPER_IN_PLACE = (aten.index_add.default,)


def node_seconds(node: fx.Node, device: Device) -> float:
    """The seconds of an op on the device, by its FLOPs (of matrix products and convolutions, as
    ``torch.utils.flop_counter`` counts them) and its bytes; of an op between lanes those of the link.
    Placeholders and sums over ranks cost nothing, and views only on a calibrated device; of an exchange that
    is divided the begin, its copies alone."""
    if is_free(node):
        return 0.0
    if node.target is aten._foreach_add_.List:  # as apart: plans do not depend on what is added together
        sizes = [3 * node_bytes(part) for part in cast(list[fx.Node], node.args[1])]
        return sum(device.seconds(0, moved, "float32", "move") for moved in sizes)
    flops, moved, arithmetic, kind = work_of(node)
    if kind == BETWEEN_LANES:
        return device.intra.seconds(moved)
    return device.seconds(flops, moved, arithmetic, kind)


def work_of(
    node: fx.Node,
    size: Callable[[fx.Node], Any] = node_bytes,
    value: Callable[[fx.Node], Any] = lambda node: node.meta.get("val"),
) -> tuple[Any, Any, str, str]:
    """The FLOPs of an op that is not free, the bytes that it moves, of one between lanes those that it sends,
    its arithmetic and its kind.

    size, value: of a node, as for ``bytes_moved`` and ``node_flops``.
    """
    kind = kind_of(node)
    # Nothing moves, but Python and the dispatcher take time, which a calibration has measured.
    if kind == VIEW:
        return 0, 0, "float32", kind
    if kind == BETWEEN_LANES:
        return 0, sent_between_lanes(node, size), "float32", kind
    return node_flops(node, value), bytes_moved(node, size), arithmetic_of(node), kind


class NodeSeconds:
    """The seconds of ops on a device, computed once for all copies of a node, and for alike ops.

    The graphs of all candidates are copies of one, with the same targets and fake tensors, and ops with the
    same literals on the same layouts share theirs (``ir/fake_op_cache.py``): two nodes with one target,
    whose value and inputs are the same fake tensors, cost the same.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._known: dict[tuple[object, ...], tuple[float, list[object]]] = {}

    def __call__(self, node: fx.Node) -> float:
        if "fused" in node.meta:  # as other copies of the node are not
            return 0.0
        inputs = input_nodes(node)
        # By identity: to compare shapes and strides takes as long as to compute the cost.
        key = (id(node.target), id(node.meta.get("val")), *[id(n.meta.get("val")) for n in inputs])
        entry = self._known.get(key)
        if entry is None:  # with the values, whose ids are theirs as long as they live
            values = [n.meta.get("val") for n in (node, *inputs)]
            entry = self._known[key] = node_seconds(node, self.device), values
        return entry[0]


def sent_between_lanes(node: fx.Node, size: Callable[[fx.Node], Any] = node_bytes) -> Any:
    """The bytes that a lane sends to the others, each of which has a share: twice for a sum that all get.

    Lanes are neighbors, so the link is that within a machine.  size: as for ``bytes_moved``.
    """
    lanes, bytes_in = lane_group(node).number, size(cast(fx.Node, node.args[0]))
    all_shares: dict[object, int] = {
        torch.ops.lanes.all_reduce.default: 2,
        torch.ops.lanes.all_gather.default: lanes,
        torch.ops.lanes.begin_all_gather.default: lanes,
    }
    return bytes_in * Fraction(all_shares.get(node.target, 1) * (lanes - 1), lanes)


def is_free(node: fx.Node) -> bool:
    """Whether no op runs: of a tuple's item, of what the ranks do together, of the end of an exchange, or of
    what is repeated in the kernel of another op (``recompute``, ``repeat_in_kernels``)."""
    free = (operator.getitem, sum_over_ranks, ENDS_EXCHANGE)
    is_call = node.op == "call_function" and node.target not in free
    return not is_call or "fused" in node.meta


def bytes_moved(node: fx.Node, size: Callable[[fx.Node], Any] = node_bytes) -> Any:
    """The bytes that the op reads and writes; of a table only the rows that are looked up or added to.

    size: the bytes of a node's value, a number or a polynomial; the result is of the same type.
    """
    match node.target:
        case aten.embedding.default:
            return 2 * size(node) + size(node.args[1])  # type: ignore[arg-type]
        case aten.embedding_dense_backward.default:  # to be added by index_add_
            return 3 * size(node.args[0])  # type: ignore[arg-type]
        case aten.index_add_.default:
            return 3 * size(node.args[3])  # type: ignore[arg-type]
    return size(node) + sum(size(n) for n in node.all_input_nodes)
