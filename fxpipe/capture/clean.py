"""Converts the traced graph to fxpipe's form.

before: flat placeholders, constants as attributes
after:  placeholders with an ``Input``, a named output dict, constants as placeholders, nodes named after
        their module, nothing dead

The first passes (``compiler/passes.py``) do the rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpipe.capture.functional import is_mutating, writes_to_a_parameter
from fxpipe.capture.gradient_names import GradientNames, root
from fxpipe.capture.state.changed_buffers import check_buffers
from fxpipe.errors import CaptureError
from fxpipe.ir.builder import node_arg
from fxpipe.ir.graph import Input, Kind, Origin, Outputs, module_around, origin_of
from fxpipe.ir.names import identifier
from fxpipe.ir.node_names import node_name, short_paths
from fxpipe.ir.nodes import new_node
from fxpipe.ir.storage import drop_dead
from fxpipe.runtime.program.checks import expect, expect_op

aten = torch.ops.aten

_FACTORIZED = aten._linalg_check_errors.default
_ASSERTS = (aten._assert_async.msg, aten._assert_async.default, _FACTORIZED)


def clean(
    module: fx.GraphModule, inputs: list[Input], aliases: Sequence[tuple[str, str]], frozen: Set[str]
) -> tuple[fx.Graph, dict[str, torch.Tensor]]:
    """Return the rebuilt graph and the constants that its CONSTANT placeholders stand for.

    frozen: names of parameters that are not trained.  One that the forward writes to is a buffer by another
    name (the key encoder of a momentum encoder).
    """
    short = short_paths({n.meta["origin"].path for n in module.graph.nodes if "origin" in n.meta})
    results: Any = module.graph.output_node().args[0]  # as ``StepFunction`` returns them
    gradients = GradientNames(module.graph, results["grads"], short)
    _place_sums(module.graph)
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    written: dict[str, fx.Node] = {}  # buffer name -> its last value
    checks: list[fx.Node] = []
    remaining = iter(inputs)
    by_placeholder: dict[fx.Node, Input] = {}

    changed = {n.args[0] for n in module.graph.find_nodes(op="call_function", target=aten.copy_.default)}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            source = next(remaining)
            is_changed = node in changed or source.name in results["buffers"]
            if source.kind is Kind.PARAMETER and source.name in frozen and is_changed:
                source = Input(Kind.BUFFER, source.name)
            by_placeholder[node] = source
            new[node] = _placeholder(graph, source, node.meta.get("val"))
    constants = _constants(module, graph, {source.name for source in inputs}, new)
    for node in module.graph.nodes:
        if node.op != "call_function" or node.target is aten._assert_tensor_metadata.default:
            continue
        if node.target is expect_op:
            new[node] = _copied(graph, node, new, node_name(node, origin_of(node), short))
            new[node].target = expect
            checks.append(new[node])
            continue
        if node.target in _ASSERTS:
            checks.append(_asserted(graph, node, new, node_name(node, origin_of(node), short)))
            continue
        viewed = root(node)
        if viewed != node:
            new[node] = new[viewed]
        elif node.target is aten.copy_.default and node.args[0] in by_placeholder:
            target = by_placeholder[node.args[0]]
            if target.kind is Kind.PARAMETER:
                raise writes_to_a_parameter(target.name, origin_of(node.args[1]))
            if target.kind is Kind.BUFFER:
                written[target.name] = new[node.args[1]]
            new[node] = new[node.args[1]]
        elif is_mutating(node):
            raise CaptureError(
                f"{node.target} writes in place and could not be made functional ({node.meta['origin']})."
            )
        else:
            gradient = gradients.of(node, new)
            name = node_name(node, origin_of(node), short) if gradient is None else gradient.name
            new[node] = _copied(graph, node, new, name)
            if gradient is not None:
                new[node].meta["gradient"] = gradient

    written = {x.name: written[x.name] for x in by_placeholder.values() if x.name in written}
    for pair in aliases:
        if not written.keys().isdisjoint(pair):
            raise CaptureError(
                f"The forward gives the buffers {pair[0]!r} and {pair[1]!r} the same memory and writes "
                "to it. Give one of them a copy: .clone()."
            )
    graph.output(_outputs(fx.map_arg(results, new.__getitem__), written, tuple(checks)))
    drop_dead(graph)
    check_buffers(graph)
    return graph, constants


def _constants(
    module: fx.GraphModule, graph: fx.Graph, names: Set[str], new: dict[fx.Node, fx.Node]
) -> dict[str, torch.Tensor]:
    """Give the graph a placeholder for each constant of a trace; return their values, by name.

    names: of the other inputs.  new: gets the placeholders, by the nodes of the trace.
    """
    constants: dict[str, torch.Tensor] = {}
    known: dict[int, fx.Node] = {}
    for node in module.graph.find_nodes(op="get_attr"):
        constant = getattr(module, node.target)
        if id(constant) not in known:
            name = f"constant_{len(constants)}"
            while name in names:  # a file of weights has one place for each name
                name += "_"
            constants[name] = constant.detach().clone()  # the model may go on to write to its own
            known[id(constant)] = _placeholder(graph, Input(Kind.CONSTANT, name), constants[name])
        new[node] = known[id(constant)]
    return constants


def _placeholder(graph: fx.Graph, source: Input, val: object) -> fx.Node:
    node = graph.placeholder(identifier(source.name))
    node.meta.update(input=source, val=val, origin=Origin())
    return node


def _copied(graph: fx.Graph, node: fx.Node, new: dict[fx.Node, fx.Node], name: str) -> fx.Node:
    args, kwargs = (fx.map_arg(x, new.__getitem__) for x in (node.args, node.kwargs))
    copy: fx.Node = new_node(graph, "call_function", node.target, args, kwargs, name)
    copy.meta.update(origin=origin_of(node), val=node.meta.get("val"))
    if "random_position" in node.meta:
        copy.meta["random_position"] = node.meta["random_position"]
    return copy


def _asserted(graph: fx.Graph, node: fx.Node, new: dict[fx.Node, fx.Node], name: str) -> fx.Node:
    """The check that the model's own assert of a tensor holds, or that matrices have been factorized."""
    value, *message = fx.map_arg(node.args, new.__getitem__)
    says, holds = message[0] if message else "An assert of the model does not hold of this microbatch", True
    if node.target is _FACTORIZED:
        says, holds = f"{says}: a matrix of this microbatch is singular or not positive-definite", False
        failed = new_node(graph, "call_function", aten.any.default, (value,), {}, f"{name}_any")
        failed.meta.update(origin=origin_of(node), val=new[node_arg(node, 0)].meta["val"].any())
        value = failed
    args = value, [holds], f"{says} ({origin_of(node)})."
    check: fx.Node = new_node(graph, "call_function", expect, args, {}, name)
    check.meta.update(origin=origin_of(node), val=None)
    return check


def _place_sums(graph: fx.Graph) -> None:
    """Give a sum of autograd's engine, the gradient of a value, the path and line of the op that computes the
    value; if that is no part of the module with all ops that read the value, which is an input of the module
    then, or its parameter, the path of this module."""
    forward, added = defaultdict[int, list[fx.Node]](list), dict[fx.Node, list[str]]()
    for node in graph.nodes:
        origin = origin_of(node)
        if origin.is_of_autograd:
            # Each path once: sums of sums that have summands in common would double them at each step.
            each = (p for n in node.all_input_nodes for p in added.get(n, [origin_of(n).path]))
            added[node] = [*dict.fromkeys(each)]
        elif not origin.backward and origin.seq is not None:
            forward[origin.seq].append(node)
    for node, paths in reversed(added.items()):
        users = [origin_of(user) for user in sorted(node.users) if user.op == "call_function"]
        user = next((user for user in users if user.seq is not None), users[0] if users else None)
        if user is None:
            place = Origin(module_around(paths))
        else:
            read_in = _read_in(forward, user.seq)
            is_inside = not read_in or f"{user.path}.".startswith(f"{read_in}.")
            place = user if is_inside else Origin(read_in)
        node.meta["origin"] = replace(origin_of(node), path=place.path, source=place.source)


def _read_in(forward: Mapping[int, list[fx.Node]], seq: int | None) -> str:
    """The innermost module with all ops that read the result of an op, or what the next ops make of it: those
    up to the first that several ops read, as the gradient of that is the sum."""
    ops = [] if seq is None else forward.get(seq, [])
    for _ in forward:
        readers = [user for op in ops for user in op.users if user not in ops and _is_forward(user)]
        if len(readers) != 1:
            return module_around(origin_of(reader).path for reader in readers)
        after = origin_of(readers[0]).seq
        ops = readers if after is None else forward[after]
    return ""


def _is_forward(node: fx.Node) -> bool:
    return node.op == "call_function" and not origin_of(node).backward


def _outputs(results: Any, written: dict[str, fx.Node], checks: tuple[fx.Node, ...]) -> Outputs:
    grads: dict[str, tuple[fx.Node, ...]] = {name: (node,) for name, node in results["grads"].items()}
    # A buffer that was written to and then replaced has the later value, or its own again.
    buffers = written | results["buffers"]
    buffers = {n: v for n, v in buffers.items() if v.meta.get("input") != Input(Kind.BUFFER, n)}
    return Outputs(results["loss"], results["count"], dict(results["outputs"]), grads, buffers, checks)
