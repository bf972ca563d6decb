"""Converts the traced graph to fxpipe's form.

before: flat placeholders and outputs, constants as attributes, random ops on torch's hidden generator
after:  placeholders with an ``Input``, a named output dict, constants as placeholders, random ops that
        take an explicit key, no lazy conjugates, nodes named after their module, nothing dead
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpipe.capture.buffers import check_branches, read_once
from fxpipe.capture.functional import is_mutating, writes_to_a_parameter
from fxpipe.errors import CaptureError
from fxpipe.ir import compat
from fxpipe.ir.graph import Input, Kind, Origin, Outputs
from fxpipe.ir.names import identifier
from fxpipe.ir.storage import draws_numbers, drop_dead
from fxpipe.runtime.program.checks import expect, expect_op
from fxpipe.runtime.program.random import keyed

aten = torch.ops.aten

_SAME_VALUE = {aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, aten.lift_fresh.default}
#: Views that only mark a tensor as conjugated or negated. Views of such a tensor rely on the mark, which a
#: message, an offload or another copy of it removes.
_MARKED: dict[Any, Any] = {
    aten._conj.default: aten.conj_physical.default,
    aten._neg_view.default: aten.neg.default,
}
#: Python's numbers -> the dtype that torch gives them where they meet tensors.
_NUMBERS: dict[type, torch.dtype] = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}
_NO_VALUE = {aten._assert_tensor_metadata.default, aten._assert_async.msg, aten._assert_async.default}


def clean(
    module: fx.GraphModule, inputs: list[Input], layout: dict[str, Any], frozen: Set[str]
) -> tuple[fx.Graph, dict[str, torch.Tensor]]:
    """Return the rebuilt graph and the constants that its CONSTANT placeholders stand for.

    frozen: names of parameters that are not trained.  One that the forward writes to is a buffer by another
    name (the key encoder of a momentum encoder).
    """
    _place_sums(module.graph)
    short = _short_paths({n.meta["origin"].path for n in module.graph.nodes if "origin" in n.meta})
    graph = fx.Graph()
    constants: dict[str, torch.Tensor] = {}
    names = {given.name for given in inputs}
    new: dict[fx.Node, fx.Node] = {}
    written: dict[str, fx.Node] = {}  # buffer name -> its last value
    checks: list[fx.Node] = []
    remaining = iter(inputs)
    by_placeholder: dict[fx.Node, Input] = {}
    flat: Any = ()

    changed = {n.args[0] for n in module.graph.find_nodes(op="call_function", target=aten.copy_.default)}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            given = next(remaining)
            is_changed = node in changed or given.name in layout["buffers"]
            if given.kind is Kind.PARAMETER and given.name in frozen and is_changed:
                given = Input(Kind.BUFFER, given.name)
            by_placeholder[node] = given
            new[node] = _placeholder(graph, given, node.meta.get("val"))
    key = _placeholder(graph, Input(Kind.KEY, "key"), None)
    known: dict[int, fx.Node] = {}
    for node in module.graph.find_nodes(op="get_attr"):
        held = getattr(module, node.target)
        if id(held) not in known:
            name = f"constant_{len(constants)}"
            while name in names:  # a file of weights has one place for each name
                name += "_"
            constants[name] = held.detach().clone()  # the model may go on to write to its own
            known[id(held)] = _placeholder(graph, Input(Kind.CONSTANT, name), constants[name])
        new[node] = known[id(held)]

    for node in module.graph.nodes:
        if node.op == "output":
            (flat,) = node.args
        if node.op != "call_function" or node.target in _NO_VALUE:
            continue
        if node.target is expect_op:
            new[node] = _copied(graph, node, new, key, short)
            new[node].target = expect
            checks.append(new[node])
            continue
        if node.target in _SAME_VALUE:
            new[node] = fx.map_arg(node.args[0], new.__getitem__)
        elif node.target is aten.t.default and new[node.args[0]].target is aten.t.default:
            new[node] = new[node.args[0]].args[0]  # type: ignore[assignment]
        elif node.target is aten.copy_.default and node.args[0] in by_placeholder:
            given = by_placeholder[node.args[0]]
            if given.kind is Kind.PARAMETER:
                raise writes_to_a_parameter(given.name, _origin(node.args[1]))
            if given.kind is Kind.BUFFER:
                written[given.name] = new[node.args[1]]
            new[node] = new[node.args[1]]
        elif is_mutating(node):
            raise CaptureError(
                f"{node.target} writes in place and could not be made functional ({node.meta['origin']})."
            )
        else:
            new[node] = _copied(graph, node, new, key, short)

    written = {x.name: written[x.name] for x in by_placeholder.values() if x.name in written}
    for pair in layout["aliases"]:
        if not written.keys().isdisjoint(pair):
            raise CaptureError(
                f"The forward gives the buffers {pair[0]!r} and {pair[1]!r} the same memory and writes "
                "to it. Give one of them a copy: .clone()."
            )
    graph.output(_outputs([new[n] for n in flat], layout, written, tuple(checks)))
    read_once(graph)
    check_branches(graph)
    drop_dead(graph)
    return graph, constants


def _placeholder(graph: fx.Graph, given: Input, val: Any) -> fx.Node:
    node = graph.placeholder(identifier(given.name))
    node.meta.update(input=given, val=val, origin=Origin())
    return node


def _copied(
    graph: fx.Graph, node: fx.Node, new: dict[fx.Node, fx.Node], key: fx.Node, short: dict[str, str]
) -> fx.Node:
    args = fx.map_arg(node.args, new.__getitem__)
    kwargs = fx.map_arg(node.kwargs, new.__getitem__)
    target = _MARKED.get(node.target, node.target)
    if draws_numbers(node):
        args = (key, node.meta["random_position"], target, *args)
        target = keyed
    origin = node.meta.get("origin", Origin())
    args = _without_numbers(graph, target, args, origin)
    copy = graph.create_node("call_function", target, args, kwargs, name=_name(node, origin, short))
    copy.meta.update(origin=origin, val=node.meta.get("val"))
    return copy


def _without_numbers(graph: fx.Graph, target: Any, args: tuple[Any, ...], origin: Origin) -> tuple[Any, ...]:
    """The arguments of an op, with a tensor for each number where the op takes tensors alone.

    A trace has numbers for the tensors that torch makes of Python's numbers: ``conj(1j)``.
    """
    if not isinstance(target, compat.OpOverload) or compat.takes_numbers(target):
        return args
    new = list(args)
    for k, (value, given) in enumerate(zip(args, target._schema.arguments, strict=False)):
        if type(value) in _NUMBERS and isinstance(given.type, torch.TensorType):
            dtype = _NUMBERS[type(value)]
            new[k] = graph.call_function(aten.scalar_tensor.default, (value,), {"dtype": dtype})
            new[k].meta.update(origin=origin, val=torch.scalar_tensor(value, dtype=dtype))
    return tuple(new)


def _place_sums(graph: fx.Graph) -> None:
    """Give a sum of autograd's engine the path and line of the op whose result it is the gradient of."""
    for node in reversed(graph.nodes):
        origin = node.meta.get("origin")
        if origin is not None and origin.backward and not origin.path and not origin.source:
            user = next((u.meta["origin"] for u in sorted(node.users) if "origin" in u.meta), origin)
            node.meta["origin"] = replace(origin, path=user.path, source=user.source)


def _short_paths(paths: set[str]) -> dict[str, str]:
    """Module paths for names: without the first component if the rest is unambiguous."""
    owners: dict[str, set[str]] = {}
    for path in paths:
        first, _, rest = path.partition(".")
        owners.setdefault((rest or first).partition(".")[0], set()).add(first)
    short = {}
    for path in paths:
        first, _, rest = path.partition(".")
        unambiguous = rest and len(owners[rest.partition(".")[0]]) == 1
        short[path] = rest if unambiguous else path
    return short


def _name(node: fx.Node, origin: Origin, short: dict[str, str]) -> str:
    op = "item" if not hasattr(node.target, "overloadpacket") else node.target.overloadpacket.__name__
    path = short.get(origin.path) or "model"
    return identifier(f"{'d_' if origin.backward else ''}{path}.{op.strip('_')}")


def _outputs(
    flat: list[fx.Node], layout: dict[str, Any], written: dict[str, fx.Node], checks: tuple[fx.Node, ...]
) -> Outputs:
    values = iter(flat)
    loss, count = (next(values) if layout[key] else None for key in ("loss", "count"))
    outputs = {name: next(values) for name in layout["outputs"]}
    grads: dict[str, tuple[fx.Node, ...]] = {name: (next(values),) for name in layout["grads"]}
    # A buffer that was written to and then replaced has the later value.
    buffers = written | {name: next(values) for name in layout["buffers"]}
    return Outputs(loss, count, outputs, grads, buffers, checks)


def _origin(node: Any) -> Origin:
    origin: Origin = node.meta.get("origin", Origin())
    return origin
