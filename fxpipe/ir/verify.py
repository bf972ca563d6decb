"""The invariants of the graph between groups of passes."""

from __future__ import annotations

from collections import Counter
from functools import cache

import torch
from torch import fx

from fxpipe.errors import VerifyError
from fxpipe.ir.graph import Kind, offload, read_buffer, reload
from fxpipe.ir.nodes import call_targets, input_nodes
from fxpipe.ir.storage import (
    draws_numbers,
    graph_outputs,
    last_uses,
    may_draw_numbers,
    storage_root,
    storage_roots,
    written,
    written_arguments,
)
from fxpipe.schedule.ops import Color, Phase


def verify(graph: fx.Graph, after: str, colored: bool = True) -> None:
    """Raise VerifyError, naming the node and the passes that ran (``after``), unless

    - the graph is well formed, and each node has its metadata;
    - every op has a color, and stages and phases have no cycle: F feeds the same and later stages, B the same
      and earlier ones, W nothing but itself;
    - only tensors cross from stage to stage;
    - a value offloaded in a stage's F is reloaded once, in its B or W, and used by nothing else;
    - a buffer that the step changes is read once, in the section that gives its new value;
    - ops write only to gradient accumulators and to dead values of the same stage;
    - no random op is without a key.

    colored: False for a graph before the partition, of which the first holds, and in which no op writes.
    """
    _check_nodes(graph, after, colored)
    # By target, as most ops have no rules.
    special = [
        node
        for target in call_targets(graph)
        if _has_rules(target)
        for node in graph.find_nodes(op="call_function", target=target)
    ]
    writing = [node for node in special if written(node.target)]
    named = graph_outputs(graph)
    for name, parts in named.grads.items():
        if not parts:
            raise VerifyError(f"After {after}: the gradient of {name} has no summand.")
    if not colored:
        for node in writing:
            raise VerifyError(f"After {after}: {node} ({node.target}) writes to an argument.")
        return
    for node in special:
        _check_op(node, after)
    _check_writes(writing, after)
    changed = named.buffers
    for node in graph.find_nodes(op="placeholder") if changed else ():
        step_input = node.meta["input"]
        if step_input.kind is Kind.BUFFER and step_input.name in changed:
            _check_buffer(node, changed[step_input.name], after)


def _check_nodes(graph: fx.Graph, after: str, colored: bool) -> None:
    """Check that each node follows its arguments and has a unique name and its metadata, of a colored graph
    also a color that its arguments' colors may feed."""
    colors = dict[fx.Node, Color | None]()  # of the nodes so far
    required = ("val", "origin", "color") if colored else ("val", "origin")
    for node in graph.nodes:
        meta = node.meta
        if node.op == "call_function":
            for name in required:
                if name not in meta:
                    raise VerifyError(f"After {after}: {node} has no {name}.")
        color = meta.get("color") if colored else None
        for source in input_nodes(node):
            try:
                source_color = colors[source]
            except KeyError:
                raise VerifyError(
                    f"After {after}: {node} uses {source}, which does not come before it."
                ) from None
            # Colors are one object a section, so most edges need no comparison.
            if source_color is not color and source_color is not None and color is not None:
                _check_edge(source, node, after)
        colors[node] = color
    if len({node.name for node in colors}) < len(colors):
        names = Counter(node.name for node in colors)
        raise VerifyError(f"After {after}: {names.most_common(1)[0][0]} is the name of several nodes.")


@cache
def _has_rules(target: fx.node.Target) -> bool:
    """Whether an op may have to be checked by itself."""
    return target in (offload, reload) or bool(written(target)) or may_draw_numbers(target)


def _check_op(node: fx.Node, after: str) -> None:
    if draws_numbers(node):
        raise VerifyError(f"After {after}: the random op {node} has no key.")
    if node.target is offload:
        _check_offload(node, after)
    if node.target is reload and getattr(node.args[0], "target", None) is not offload:
        raise VerifyError(f"After {after}: {node} reloads {node.args[0]}, which was not offloaded.")


def _check_writes(writing: list[fx.Node], after: str) -> None:
    """Ops write to accumulators, and to values that they are the last to use."""
    over = [
        (node, root)
        for node in writing
        for root in map(storage_root, written_arguments(node.target, node.args, node.kwargs))
        if root.op != "placeholder" or root.meta["input"].kind is not Kind.GRADIENT
    ]
    if not over:
        return
    graph = over[0][0].graph
    last = last_uses(graph, storage_roots(graph))
    for node, root in over:
        # A later reader would get the new value; a reader of another stage may run at any time.
        if last.get(root) is not node:
            raise VerifyError(f"After {after}: {node} ({node.target}) writes over {root}, which is needed.")


def _check_buffer(buffer: fx.Node, value: fx.Node, after: str) -> None:
    """Check the reads of a buffer that the step changes; ``value``: its new value."""
    for user in buffer.users:
        if user.target is not read_buffer or user.meta["color"] != value.meta["color"]:
            raise VerifyError(
                f"After {after}: {user} reads the buffer {buffer.meta['input'].name}, which {value} "
                f"({value.meta['color']}) gives another value."
            )
    if len(buffer.users) > 1:
        raise VerifyError(
            f"After {after}: the buffer {buffer.meta['input'].name} is read {len(buffer.users)} times."
        )


def _check_offload(node: fx.Node, after: str) -> None:
    stage, users = node.meta["color"].stage, list(node.users)
    if node.meta["color"].phase is not Phase.F or len(users) != 1 or users[0].target is not reload:
        raise VerifyError(f"After {after}: {node} must be offloaded in F and reloaded once.")
    if users[0].meta["color"] not in (Color(stage, Phase.B), Color(stage, Phase.W)):
        raise VerifyError(f"After {after}: {node} is reloaded in {users[0].meta['color']}.")


def _check_edge(source: fx.Node, target: fx.Node, after: str) -> None:
    a, b = source.meta["color"], target.meta["color"]
    if not may_feed(a, b):
        raise VerifyError(f"After {after}: {source} ({a}) feeds {target} ({b}).")
    if a.stage != b.stage and not isinstance(source.meta.get("val"), torch.Tensor):
        raise VerifyError(f"After {after}: {source}, which is no tensor, crosses from {a} to {b}.")


def may_feed(a: Color, b: Color) -> bool:
    """Whether a value of section ``a`` may be used in section ``b``."""
    if a.phase is Phase.F:
        return b.phase is not Phase.F or a.stage <= b.stage
    if a.phase is Phase.B:
        return b.phase is not Phase.F and a.stage >= b.stage
    # W feeds nothing else: it may run at any later time.
    return a == b
