"""The invariants of the colored graph between any two passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import fx

from fxpipe.errors import VerifyError
from fxpipe.ir.graph import Color, Input, Kind, Phase, offload, read_buffer, reload
from fxpipe.ir.storage import call_nodes, draws_numbers, last_uses, output_dict, storage_root, written


def verify(graph: fx.Graph, after: str) -> None:
    """Raise VerifyError, naming the pass and the node, unless

    - the graph is well formed, every op has a color, and stages and phases have no cycle: F feeds the
      same and later stages, B the same and earlier ones, W nothing but itself;
    - only tensors cross from stage to stage;
    - a value offloaded in a stage's F is reloaded once, in its B or W, and used by nothing else;
    - a buffer that the step changes is read once, in the section that gives its new value;
    - ops write only to gradient accumulators and to dead values of the same stage;
    - no random op is without a key.
    """
    _check_order(graph, after)
    ops = call_nodes(graph)
    for node in ops:
        if "color" not in node.meta:
            raise VerifyError(f"After {after}: {node} has no color.")
    writing = [node for node in ops if written(node.target)]
    last = last_uses(graph) if writing else {}
    for node in writing:
        _check_writes(node, last, after)
    for node in ops:
        _check_op(node, after)
        for source in node.all_input_nodes:
            if source.op == "call_function":
                _check_edge(source, node, after)
    for name, value in output_dict(graph)["buffers"].items():
        _check_buffer(graph, name, value, after)
    for name, parts in output_dict(graph)["grads"].items():
        if not parts:
            raise VerifyError(f"After {after}: the gradient of {name} has no summand.")


def _check_order(graph: fx.Graph, after: str) -> None:
    """Check that each node follows its arguments and has a unique name."""
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        for source in node.all_input_nodes:
            if source not in seen:
                raise VerifyError(f"After {after}: {node} uses {source}, which does not come before it.")
        seen.add(node)
    if len({node.name for node in seen}) < len(seen):
        names = Counter(node.name for node in seen)
        raise VerifyError(f"After {after}: {names.most_common(1)[0][0]} is the name of several nodes.")


def _check_op(node: fx.Node, after: str) -> None:
    if draws_numbers(node):
        raise VerifyError(f"After {after}: the random op {node} has no key.")
    if node.target is offload:
        _check_offload(node, after)
    if node.target is reload and getattr(node.args[0], "target", None) is not offload:
        raise VerifyError(f"After {after}: {node} reloads {node.args[0]}, which was not offloaded.")


def _check_writes(node: fx.Node, last: Mapping[fx.Node, fx.Node | None], after: str) -> None:
    for argument in written(node.target):
        root = storage_root(node.kwargs.get(argument, node.args[0]))  # type: ignore[arg-type]
        accumulator = root.op == "placeholder" and root.meta["input"].kind is Kind.GRADIENT
        if not accumulator and last.get(root) is not node:
            raise VerifyError(f"After {after}: {node} ({node.target}) writes over {root}, which is needed.")


def _check_buffer(graph: fx.Graph, name: str, value: fx.Node, after: str) -> None:
    for node in graph.find_nodes(op="placeholder"):
        if node.meta["input"] == Input(Kind.BUFFER, name):
            for user in node.users:
                if user.target is not read_buffer or user.meta["color"] != value.meta["color"]:
                    raise VerifyError(
                        f"After {after}: {user} reads the buffer {name}, which {value} "
                        f"({value.meta['color']}) gives another value."
                    )
            if len(node.users) > 1:
                raise VerifyError(f"After {after}: the buffer {name} is read {len(node.users)} times.")


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
    return a == b
