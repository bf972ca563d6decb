"""Makes the traced graph functional: no node writes to a value that another one reads.

The first trace has the ops that autograd ran, including in-place ops.  An op that writes to a value whose
memory nothing else shares (the mask of a dropout), or that is the last use of the buffer that it writes to (a
batch norm), is replaced by its functional form.  If other in-place ops are left, the ops on the memory that
they write to are traced once more through ``torch.func.functionalize``; all others are copied.  A write to a
buffer becomes an output of the step.

before: native_batch_norm(x, …, mean, var, training)     which moves mean and var and does not say so
        native_batch_norm_backward(…, mean, var, …)      which reads them in evaluation alone
after:  _native_batch_norm_legit_functional(…)           which returns the new mean and var
        native_batch_norm_backward(…, None, None, …)
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fxpipe.capture.gradient_names import MARKS
from fxpipe.capture.traced_nodes import nodes_after
from fxpipe.errors import CaptureError
from fxpipe.ir import compat
from fxpipe.ir.fake_op_cache import give_own_values
from fxpipe.ir.nodes import copy_node
from fxpipe.ir.storage import call_nodes, is_view, storage_root, written, written_arguments
from fxpipe.runtime.torch_private import schema_of

aten = torch.ops.aten


class KeepsState(CaptureError):
    """A trace has state among its constants: ``tensor``, to which it writes, or one that a later run reads.

    ``names``: of such tensors in plain attributes -> whether the forward keeps their gradient's history.
    """

    def __init__(self, text: str, tensor: torch.Tensor | None = None):
        super().__init__(text)
        self.tensor, self.names = tensor, dict[str, bool]()


def is_mutating(node: fx.Node) -> bool:
    return bool(written(node.target))


def overwritten(node: fx.Node) -> list[fx.Node]:
    """The values that a node writes to."""
    values = written_arguments(node.target, node.args, node.kwargs)
    return [x for x in values if isinstance(x, fx.Node)]


def functionalize(module: fx.GraphModule, inputs: list[Any]) -> fx.GraphModule:
    """Return an equivalent module without in-place ops; the last use of a placeholder may be a ``copy_``."""
    declare_writes(module.graph)
    check_unwritten(module.graph, module)
    for node in module.graph.nodes:
        if is_mutating(node) and node.target.namespace != "aten":
            raise CaptureError(
                f"{node.target} writes to its arguments, which can be followed for torch's own ops alone "
                f"({node.meta['origin']}). Let the op return what it would write."
            )
        # Functionalization computes both new values from the old one, and the last of them stays.
        if len({*overwritten(node)}) < len(overwritten(node)):
            raise CaptureError(
                f"{node.target} writes to one tensor twice, which cannot be followed "
                f"({node.meta['origin']}). Let it write to each tensor once."
            )
    known: dict[str, fx.Graph | None] = {}
    for node in _mutating(module.graph):
        if _writes_to_unshared(node):
            _replace_alone(node, known)
    left = _mutating(module.graph)
    if all(_writes_to_inputs_last(node) and _functional_form(node, known) for node in left):
        for node in left:
            _replace_alone(node, known)
        return module
    # Torch's own functionalization last: it traces every op that meets a write again, which takes the
    # longest.
    give_own_values(module.graph)  # by which the new trace finds the nodes
    retrace = _Retrace(module)
    with torch.no_grad():
        return compat.make_fx(torch.func.functionalize(retrace.run))(*inputs)


def declare_writes(graph: fx.Graph) -> None:
    """Replace batch norms by the form whose schema marks the running statistics that they write to."""
    for node in graph.nodes:
        if node.target is aten.native_batch_norm.default:
            mean, training = node.args[3], node.args[5]
            if training and mean is not None:
                node.target = aten._native_batch_norm_legit.default
        elif node.target is aten.native_batch_norm_backward.default:
            mean, training = node.args[3], node.args[7]
            if training and mean is not None:
                node.args = (*node.args[:3], None, None, *node.args[5:])


def check_unwritten(graph: fx.Graph, root: torch.nn.Module) -> None:
    """Raise KeepsState for an op that writes to a constant; ``root`` has the constants."""
    for node in graph.nodes:
        for constant in map(storage_root, overwritten(node)):
            if constant.op == "get_attr":
                raise writes_to_a_constant(node.meta["origin"], getattr(root, constant.target))  # type: ignore


def _mutating(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if is_mutating(node)]


def _replace_alone(node: fx.Node, known: dict[str, fx.Graph | None]) -> None:
    """Put an op's functional form in its place, if it has one, with the writes to placeholders behind it."""
    form = _functional_form(node, known)
    if form is None:
        return
    graph = node.graph
    copies = dict(zip(form.find_nodes(op="placeholder"), node.all_input_nodes, strict=True))
    result: object = form.output_node().args[0]
    with graph.inserting_before(node):
        for op in call_nodes(form):
            if op.target is aten.copy_.default and copies[op.args[0]].op != "placeholder":
                continue  # back to the argument, which nobody reads any more
            copies[op] = graph.node_copy(op, copies.__getitem__)
            copies[op].meta = {**node.meta, "val": op.meta["val"]}
    if isinstance(result, (tuple, list)):
        for item in list(node.users):
            item.replace_all_uses_with(copies[result[item.args[1]]])  # type: ignore[index]
            graph.erase_node(item)
    else:
        value: Any = node.args[0]
        for user in list(value.users):
            if user > node:  # in the graph's order
                user.replace_input_with(value, copies[result])
        node.replace_all_uses_with(copies[result])
    graph.erase_node(node)


def _functional_form(node: fx.Node, known: dict[str, fx.Graph | None]) -> fx.Graph | None:
    """An op in functional form, with a placeholder per argument; None if its result has another layout.

    known: the forms so far; those of ops that are alike are the same.
    """
    kind = _kind(node)
    if kind not in known:
        known[kind] = _of_twin(node) or _traced_alone(node)
    return known[kind]


def _of_twin(node: fx.Node) -> fx.Graph | None:
    """The op without the ``_`` in its name, and a ``copy_`` of its result: what torch's functionalization
    gives, in a fraction of the time.  None if there is none, or it gives another layout or dtype."""
    op: Any = node.target
    name, sources = op.overloadpacket.__name__, node.all_input_nodes
    twin: Any = getattr(getattr(aten, name[:-1], None), op._overloadname, None) if name[-1] == "_" else None
    if twin is None or name == "copy_" or torch.Tag.inplace_view in op.tags:
        return None
    if written(twin) or _parameters(twin) != _parameters(op):
        return None
    if not all(isinstance(source.meta.get("val"), torch.Tensor) for source in sources):
        return None
    graph = fx.Graph()
    arguments = {source: graph.placeholder(source.name) for source in sources}
    for source, argument in arguments.items():
        argument.meta["val"] = source.meta["val"]
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), arguments.__getitem__)
    result = graph.call_function(twin, args, kwargs)
    values, named = fx.map_arg((args, kwargs), lambda x: x.meta["val"])
    with torch.no_grad():
        result.meta["val"] = twin(*values, **named)
    graph.call_function(aten.copy_.default, (args[0], result)).meta["val"] = node.meta["val"]
    graph.output(result)
    return graph if _layout(result.meta["val"]) == _layout(node.meta["val"]) else None


def _parameters(op: object) -> list[tuple[str, str]]:
    """The name and the type of each argument of an op."""
    schema = schema_of(op)
    assert schema is not None
    return [(x.name, str(x.type)) for x in schema.arguments]


def _writes_to_unshared(node: fx.Node) -> bool:
    """Whether the op writes only to its first argument, which another op computed and which has no views."""
    value = node.args[0]
    if not isinstance(value, fx.Node) or value.op != "call_function" or storage_root(value) is not value:
        return False
    maker = value.args[0] if value.target is operator.getitem else value
    first = schema_of(node.target).arguments[0].name
    return (
        written(node.target) == (first,)
        and _returns_argument(node.target)
        and not _returns_argument(maker.target)  # type: ignore[union-attr]
        and not any(is_view(user) for user in value.users)
    )


def _writes_to_inputs_last(node: fx.Node) -> bool:
    """Whether the op writes to placeholders alone, which have no views and are not used any more."""
    inputs = overwritten(node)
    if not inputs:
        return False
    if _returns_argument(node.target) and any(
        is_view(user) or is_mutating(user) or user.target is operator.getitem for user in node.users
    ):
        return False
    return all(
        value.op == "placeholder" and not any(is_view(user) or user > node for user in value.users)
        for value in inputs
    )


def _returns_argument(target: object) -> bool:
    """Whether what an op returns is an argument that it wrote to."""
    schema = schema_of(target)
    return schema is not None and any(
        r.alias_info is not None and r.alias_info.is_write for r in schema.returns
    )


def _kind(node: fx.Node) -> str:
    """The op and its arguments, with the position, the layout and the type of those that are tensors."""
    places = {
        source: f"{k}: {_layout(source.meta.get('val'))}" for k, source in enumerate(node.all_input_nodes)
    }
    return repr((str(node.target), fx.map_arg((node.args, node.kwargs), places.get)))


def _layout(value: object) -> tuple[object, ...] | None:
    if not isinstance(value, torch.Tensor):
        return None
    bits = value.is_conj(), value.is_neg()
    return value.shape, value.stride(), value.storage_offset(), value.dtype, value.device, bits


def _traced_alone(node: fx.Node) -> fx.Graph | None:
    """The form that torch's functionalization gives an op."""
    sources = node.all_input_nodes
    values: list[Any] = [n.meta.get("val") for n in sources]
    if not all(isinstance(value, torch.Tensor) for value in values):
        return None

    def op(*values: torch.Tensor) -> object:
        by_node = dict(zip(sources, values, strict=True))
        return node.target(*fx.map_arg(node.args, by_node.get), **fx.map_arg(node.kwargs, by_node.get))  # type: ignore

    with torch.no_grad():  # a trace tells its arguments apart by their tensors
        traced = compat.make_fx(torch.func.functionalize(op))(*(x.detach() for x in values)).graph
    results, before = _listed(traced.output_node().args[0]), _listed(node.meta["val"])
    made = all(isinstance(result, fx.Node) and result.op == "call_function" for result in results)
    if traced.find_nodes(op="get_attr") or not made:
        return None
    after = [result.meta["val"] for result in results]
    alike = [[(x.dtype, x.shape, x.stride()) for x in values] for values in (before, after)]
    return traced if alike[0] == alike[1] else None


def _listed(results: object) -> list[Any]:
    return list(results) if isinstance(results, (tuple, list)) else [results]


def writes_to_a_constant(place: object, tensor: torch.Tensor) -> KeepsState:
    return KeepsState(
        f"The forward writes to a tensor that is no buffer ({place}). A program cannot carry it from step to "
        "step: make it a buffer of the model, or write to a clone.",
        tensor,
    )


def writes_to_a_parameter(name: str, place: object) -> CaptureError:
    return CaptureError(
        f"The forward writes to the parameter {name!r} ({place}), which is trained. Make it a buffer, or "
        "move the write out of the forward; or, if the first batch alone sets it, run the model on one batch "
        "before you compile it."
    )


class _Retrace(fx.Interpreter):
    """Traces the ops that meet in-place ops once more, and copies all others to the running trace.

    The nodes of the trace get the metadata of the node that they come from.
    """

    def __init__(self, module: fx.GraphModule):
        super().__init__(module, garbage_collect_values=False)
        roots = memory_roots(module.graph)
        last = {roots[value]: node for node in module.graph.nodes for value in overwritten(node)}
        #: The ops whose result shares memory with a value that is written to; these with the users of such.
        self._written = {node for node, root in roots.items() if root in last}
        self._again = self._written.union(*(node.users for node in self._written))
        #: The placeholders that are written to -> the last op that writes to their memory.
        self._last_writes = {root: node for root, node in last.items() if root.op == "placeholder"}
        self._copies: dict[fx.Node, fx.Node] = {}  # what was copied -> its node in the running trace
        self._seen: fx.Node | None = None

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> object:
        # Functionalization follows writes to what is made of a constant only where it knows the constant.
        return aten.lift_fresh.default(super().get_attr(target, args, kwargs))

    def run_node(self, n: fx.Node) -> object:
        if n.op == "output":
            self._finish(n)
        graph = compat.traced_graph()
        item_of_copy = n.target is operator.getitem and n.args[0] in self._copies
        if n.op == "call_function" and (item_of_copy or n not in self._again):
            self._copies[n] = self._seen = copy_node(graph, n, self._node)
            return None  # until an op that is traced needs the value
        for source in n.all_input_nodes:
            if source in self._copies and self.env[source] is None:
                self.env[source] = _value(source, self._copies[source])
        try:
            result = super().run_node(n)
        except RuntimeError as error:
            raise CaptureError(
                f"What {n.target} writes cannot be followed ({n.meta.get('origin', 'an unknown line')}): "
                f"{str(error).strip().splitlines()[0]}"
            ) from error
        self._label_new_nodes(n)
        before, after = (list(map(_layout, _listed(x))) for x in (n.meta.get("val"), result))
        if before != after and n not in self._written and _same_but_for_strides(n.meta.get("val"), result):
            # A functional form may predict another layout than the op that ran. What autograd has left out
            # where layouts agree, a copy before the gradient of a group norm, holds for that of the trace.
            self._copies[n] = compat.functional_node(result)
            self._copies[n].meta["val"] = n.meta["val"]
            return None
        self._again.update(u for u in n.users if u.target is operator.getitem or before != after)
        return result

    def _finish(self, output: fx.Node) -> None:
        """Bring results and placeholders up to date with the writes to their memory.

        ``functionalize`` does so after the run, where new nodes would have no origin.  A view is read again
        at the origin of the view; a placeholder gets its new value at the origin of the last write.
        """
        for n in output.all_input_nodes:
            if n not in self._copies or self.env[n] is not None:
                compat.apply_pending_writes(self.env[n])
                self._label_new_nodes(n)
        for n, write in self._last_writes.items():
            compat.apply_pending_writes(self.env[n])
            self._label_new_nodes(write)

    def _label_new_nodes(self, n: fx.Node) -> None:
        marks = () if n in self._written else MARKS  # of the memory before or behind a write
        for node in nodes_after(self._seen, compat.traced_graph()):
            for key in ("origin", "random_position", *marks):
                if key in n.meta:
                    node.meta[key] = n.meta[key]
            self._seen = node

    def _node(self, n: fx.Node) -> fx.Node:
        return self._copies.get(n) or compat.functional_node(self.env[n])


def _value(n: fx.Node, copy: fx.Node) -> object:
    """The value of a copied op, for ops that are traced."""
    value = n.meta["val"]
    if not isinstance(value, torch.Tensor):
        return value
    compat.track(value, copy)
    return aten.lift_fresh.default(value)


def _same_but_for_strides(a: object, b: object) -> bool:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    return (a.shape, a.dtype, a.device, a.is_conj(), a.is_neg()) == (
        b.shape, b.dtype, b.device, b.is_conj(), b.is_neg()
    )  # fmt: skip


def memory_roots(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The op in whose memory each op's result lies; itself, if it made memory of its own."""
    roots: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        shared = memory_of(node)
        roots[node] = roots[shared] if shared else node
    return roots


def memory_of(node: fx.Node) -> fx.Node | None:
    """The value in whose memory a node's result lies: one that it writes to, or views."""
    shared = overwritten(node) or (node.all_input_nodes if is_view(node) else [])
    return shared[0] if shared else None
