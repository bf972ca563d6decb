"""Lets the kernels of B, which a compiler fuses, repeat what is elementwise instead of reading saved values.

before: act = tanh(x) (F) ──► tanh_backward(d, act) (B)
after:  act' = tanh(x) (B) ──► tanh_backward(d, act') (B), in one kernel, which reads x

Such a kernel reads its inputs once, whatever it computes of them, so a repeated op costs nothing; what counts
are the bytes that are saved.  They are a minimum cut between the forward and the elementwise ops of B.  Not
repeated: what another op of B reads (a product, attention), as it would have to be written to memory, and
what W reads, which is saved for it.

Random zeros and ones, which dropout on a CPU draws as floating-point numbers, go through truth values, which
are saved in a quarter of the bytes:  bernoulli(x)  becomes  to(to(bernoulli(x), bool), float32).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import fx

from fxpipe.ir.builder import Calls
from fxpipe.ir.graph import read_buffer
from fxpipe.ir.ops import is_elementwise
from fxpipe.ir.storage import drop_dead, is_view, node_bytes
from fxpipe.passes.level.mincut import to_repeat
from fxpipe.passes.rewrite import by_stage, repeat_for
from fxpipe.runtime.program.random import keyed
from fxpipe.schedule.ops import Color, Phase

aten = torch.ops.aten
_ZERO_OR_ONE = {aten.bernoulli.default, aten.bernoulli.p}
#: Of equally small cuts the one that repeats the least is taken: bytes count this much more than ops.
_SCALE = 1000


def repeat_in_kernels(graph: fx.Graph) -> int:
    """Returns the number of ops that are repeated."""
    _draw_truth_values(graph)
    repeated = 0
    for stage, users in sorted(by_stage(graph, (Phase.B,)).items()):
        for clone in repeat_for(users, _to_repeat(users, Color(stage, Phase.F))):
            clone.meta["fused"] = True
            repeated += not is_view(clone)
    drop_dead(graph)
    return repeated


def _draw_truth_values(graph: fx.Graph) -> None:
    calls = Calls(graph)
    for node in graph.find_nodes(op="call_function", target=keyed):
        val = node.meta["val"]
        if node.args[2] not in _ZERO_OR_ONE or not val.is_floating_point():
            continue
        meta = {"origin": node.meta["origin"], "color": node.meta["color"]}
        with graph.inserting_before(node.next):
            truth = calls(aten._to_copy.default, (node,), {"dtype": torch.bool}, **meta)
        with graph.inserting_before(truth.next):
            back = calls(aten._to_copy.default, (truth,), {"dtype": val.dtype}, **meta, val=val)
        truth.meta["val"] = val.to(torch.bool)
        node.replace_all_uses_with(back, lambda user, truth=truth: user is not truth)


def _to_repeat(users: list[fx.Node], forward: Color) -> set[fx.Node]:
    """The ops of the forward that B repeats."""
    size = cache(node_bytes)

    @cache
    def is_read(node: fx.Node) -> bool:
        """Whether W, or an op of B that is no kernel of elementwise ops, reads the value or a view of it."""
        behind = [user for user in node.users if user.op == "call_function"]
        others = [user for user in behind if user.meta["color"] != forward]
        return any(user.meta["color"].phase is not Phase.B or not _is_kernel(user) for user in others) or any(
            is_read(user) for user in behind if is_view(user) and user.meta["color"].stage == forward.stage
        )

    def may(node: fx.Node) -> bool:
        return node.meta["color"] == forward and _is_kernel(node) and (is_view(node) or not is_read(node))

    def keep(node: fx.Node) -> int | None:
        if is_view(node) and may(node):  # a view keeps its base alive
            return None
        return 0 if is_read(node) else _SCALE * size(node)

    def repeat(node: fx.Node) -> int | None:
        if not may(node):
            return None
        return 0 if is_view(node) else size(node)

    needed = [node for user in users if _is_kernel(user) for node in user.all_input_nodes]
    return to_repeat([node for node in needed if node.meta.get("color") == forward], keep, repeat)


def _is_kernel(node: fx.Node) -> bool:
    return node.target is not read_buffer and is_elementwise(node)
