"""What of a stage's saved values may leave its rank between F and B or W."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence, Set

import torch
from torch import fx

from fxpipe.ir.graph import Phase
from fxpipe.ir.storage import is_dense, node_bytes, root_within, storage_root

SMALLEST = 4096
"""Bytes: for less a transfer is not worth its while."""


def may_leave(
    nodes: Sequence[fx.Node], saved: Sequence[Set[fx.Node]], placement: tuple[int, ...]
) -> tuple[dict[Phase, list[fx.Node]], ...]:
    """Per stage the owners of such storages, in the graph's order: under B those that B needs, under W those
    that W alone needs.

    A storage stays where another stage of the same rank uses it as well, where it is small, or where its
    elements do not fill it.
    """
    users: defaultdict[fx.Node, set[tuple[int, Phase]]] = defaultdict(set)  # storage -> who uses it
    phases: defaultdict[tuple[int, fx.Node], set[Phase]] = defaultdict(set)
    for node in nodes:
        stage, phase = node.meta["colour"].stage, node.meta["colour"].phase
        for value in node.all_input_nodes:
            if value.op == "call_function":
                users[storage_root(value)].add((stage, phase))
                phases[stage, root_within(value, stage)].add(phase)
    position = {node: k for k, node in enumerate(nodes)}
    found = []
    for stage, roots in enumerate(saved):
        own: dict[Phase, list[fx.Node]] = {Phase.B: [], Phase.W: []}
        for root in sorted(roots, key=position.__getitem__):
            used = phases[stage, root]
            shared = any(
                other != stage and placement[other] == placement[stage]
                for other, _ in users[storage_root(root)]
            )
            made_here = root.meta["colour"].stage == stage or Phase.F in used
            if made_here and not shared and _is_worth(root):
                own[Phase.B if Phase.B in used else Phase.W].append(root)
        found.append(own)
    return tuple(found)


def _is_worth(root: fx.Node) -> bool:
    value = root.meta["val"]
    return isinstance(value, torch.Tensor) and is_dense(value) and node_bytes(root) >= SMALLEST
