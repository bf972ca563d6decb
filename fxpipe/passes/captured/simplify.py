"""Leaves out ops that compute nothing new, by the rules of ``identities.py``.

before: k2 = cat([nothing, k]);  attention(q, k2, …);  view(view(x, [64, 8]), [2, 32, 8])
after:  attention(q, k, …);                            x

Bits of all results stay.  The bytes saved for the backward do not grow: a view takes the place of a copy
only if its storage is not larger, or is saved anyway.  The traces at other sizes lose the same ops: a rule
must hold in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from fxpipe.ir.storage import call_nodes, drop_dead
from fxpipe.passes.captured.identities import RULES, Instead

RULES_OF: dict[object, list[Callable[[fx.Node], Instead]]] = {}
"""The functions of ``RULES`` by the op that they look at."""
for _rule in RULES:
    for _op in _rule.ops:
        RULES_OF.setdefault(_op, []).append(_rule.find)


def simplify(graphs: Sequence[fx.Graph]) -> None:
    """Apply the rules until none applies.  graphs: a step and its traces, whose nodes match in order."""
    labels = {node: k for graph in graphs for k, node in enumerate(graph.nodes)}
    changed = True
    while changed:
        changed = False
        for nodes in zip(*map(call_nodes, graphs), strict=True):
            changed |= any(_apply(find, nodes, labels) for find in RULES_OF.get(nodes[0].target, ()))
    for graph in graphs:
        drop_dead(graph)


def _apply(find: Any, nodes: Sequence[fx.Node], labels: dict[fx.Node, int]) -> bool:
    """Apply a rule to an op in all graphs, where it does the same to each."""
    if not nodes[0].users or any(user.op == "output" for user in nodes[0].users):
        return False
    replacements: list[Instead] = [find(node) for node in nodes]
    if any(instead is None for instead in replacements):
        return False
    if len({repr(_operands(instead, labels)) for instead in replacements}) > 1:
        return False
    for node, instead in zip(nodes, replacements, strict=True):
        rewrite(node, instead)
    return True


def rewrite(node: fx.Node, instead: Instead) -> None:
    """Do what a rule says, and erase what has no use then."""
    before = node.all_input_nodes
    if isinstance(instead, tuple):
        node.args = instead
    elif instead is not None:
        node.replace_all_uses_with(instead)
        before = [node]
    # An op whose last user goes is dead then, too.
    dead = [source for source in before if _is_dead(source)]
    while dead:
        source = dead.pop()
        sources = source.all_input_nodes
        source.graph.erase_node(source)
        dead += filter(_is_dead, sources)


def _operands(instead: Instead, labels: dict[fx.Node, int]) -> list[int]:
    operands: list[int] = []
    fx.map_arg(instead, lambda node: operands.append(labels[node]))
    return operands


def _is_dead(node: fx.Node) -> bool:
    return node.op == "call_function" and not node.users
