"""The rules of ``simplify``: ops whose result is one of their operands, bit for bit, or that give the same
result with simpler arguments.

Each row of ``RULES`` is what an op looks like, what takes its place, and the function that finds it.  A rule
looks at one op of one graph, and changes nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import fx

from fxpipe.ir.graph import Kind
from fxpipe.ir.storage import is_view, node_bytes, storage_root

aten = torch.ops.aten
#: What torch raises of strides that have no such view; its predictions raise the second.
_NO_VIEW = RuntimeError, ValueError

Instead = fx.Node | tuple[Any, ...] | None
"""A node: use it instead of the result.  A tuple: the arguments to use instead.  None: leave the op."""


class Rule(NamedTuple):
    before: str
    after: str
    ops: tuple[object, ...]
    find: Callable[[fx.Node], Instead]


def _view_of_all(node: fx.Node) -> Instead:
    """A view of views of a value, each element of which is where it was.  As for ``_view_of_view``, those
    between have no other use, but permutations, which serve ops within a layer."""
    views, source = list[fx.Node](), node
    while _is_tensor(node) and source.target in _VIEWS and len(source.all_input_nodes) == 1:
        views.append(source)
        source = source.all_input_nodes[0]
        if _is_tensor(source) and _is_alike(source, node) and _moves_nothing(views, source):
            return source
        # Then both this view and the one between would be sent where a cut falls between them.
        if _is_tensor(source) and source.target not in _PERMUTES and len(source.users) > 1:
            return None
    return None


def _moves_nothing(views: list[fx.Node], source: fx.Node) -> bool:
    """Whether the last of these views first have all elements of ``source`` in their places: by the strides
    of a tensor without gaps, as those of ``val`` may be others in another step, or stale."""
    val = source.meta["val"]
    # On the meta device: only strides are asked for.
    dense = value = torch.empty(val.shape, dtype=val.dtype, device="meta")
    try:
        for view in reversed(views):
            value = view.target(value, *view.args[1:], **view.kwargs)  # type: ignore[operator]
    except _NO_VIEW:  # a view of other strides alone
        return False
    return _strides(value) == _strides(dense)


def _own_shape(node: fx.Node) -> Instead:
    """It is a view of any strides, unlike a ``reshape`` between other views, which may copy."""
    source = _operand(node)
    return source if source is not None and _is_alike(source, node) else None


def _copy_of_all(node: fx.Node) -> Instead:
    """The op copies its operand; no op needs the copy, as none writes to a value."""
    source = _operand(node)
    return source if source is not None and _can_stand_for(source, node) else None


def _view_of_view(node: fx.Node) -> Instead:
    """The first view must have no other use: else a cut between the two would send both."""
    inner = _operand(node)
    # Only where elements keep their order are two reshapes one.
    if inner is None or inner.target not in _REGROUPS or len(inner.users) > 1:
        return None
    source, val = _operand(inner), node.meta["val"]
    if source is None or not _has_strides(source, inner, val):
        return None
    return (source, *node.args[1:])


def _has_strides(source: fx.Node, inner: fx.Node, val: torch.Tensor) -> bool:
    """Whether a view of ``source`` has the layout of ``val``, as the view of ``inner`` has."""
    outer = source.meta["val"]
    # The usual case, without a trial.
    if outer.is_contiguous() and inner.meta["val"].is_contiguous():
        return val.is_contiguous()
    try:
        return _strides(outer.view(val.shape)) == _strides(val)
    except _NO_VIEW:  # the strides of the first view are those of a copy
        return False


def _cat_with_nothing(node: fx.Node) -> Instead:
    """The other operands must have the result's dtype, as an empty one takes part in the promotion."""
    operands: Any = node.args[0]
    full: list[fx.Node] = [n for n in operands if n.meta["val"].numel()]
    if not full or any(n.meta["val"].dtype != node.meta["val"].dtype for n in full):
        return None
    source = full[0]
    if len(full) == 1 and (_can_stand_for(source, node) or _is_attended(source, node)):
        return source
    if len(full) == len(operands):
        return None
    joined = aten.cat.default([n.meta["val"] for n in full], *node.args[1:])
    return (full, *node.args[1:]) if _strides(joined) == _strides(node.meta["val"]) else None


def _with_neutral(neutral: Callable[[object, torch.dtype], bool]) -> Callable[[fx.Node], Instead]:
    """The rule for ``op(x, number)`` where the number is neutral for ``x``, and does not promote it: of
    numbers, not of booleans, and without a factor of the number (``alpha``) or a way to round."""

    def find(node: fx.Node) -> Instead:
        source, number = _operand(node), node.args[1]
        if source is None or type(number) not in (bool, int, float) or node.kwargs:
            return None
        dtype = node.meta["val"].dtype
        if dtype is torch.bool or not neutral(number, dtype):
            return None
        return source if _can_stand_for(source, node) else None

    return find


def _is_zero(number: object, dtype: torch.dtype) -> bool:
    """-0.0 + 0 is 0.0: a float needs -0.0, which a trace has nowhere."""
    return number == 0 and not (dtype.is_floating_point or dtype.is_complex)


def _is_minus_zero(number: object, dtype: torch.dtype) -> bool:
    """x - 0 is x for all floats, -0.0 included, and for integers."""
    return number == 0 and str(number) != "-0.0" and not dtype.is_complex


def _is_one(number: object, dtype: torch.dtype) -> bool:
    """A complex product with 1 + 0j makes NaN of infinities."""
    return number == 1 and not dtype.is_complex


def _undone(node: fx.Node) -> Instead:
    inner = _operand(node)
    if inner is None or inner.target is not node.target:
        return None
    source = _operand(inner)
    return source if source is not None and _can_stand_for(source, node) else None


# -- what the rules ask ----------------------------------------------------------------------------------


def _operand(node: fx.Node) -> fx.Node | None:
    """The first argument, if it is a tensor's node."""
    first = node.args[0] if node.args else None
    return first if _is_tensor(first) else None


def _is_tensor(argument: object) -> TypeGuard[fx.Node]:
    return isinstance(argument, fx.Node) and isinstance(argument.meta.get("val"), torch.Tensor)


def _strides(value: torch.Tensor) -> list[int]:
    """The strides of dimensions with several elements; those of one element say nothing."""
    return [stride for stride, length in zip(value.stride(), value.shape, strict=True) if length != 1]


def _is_alike(source: fx.Node, node: fx.Node) -> bool:
    """Whether two values have the same shape, dtype, device and layout."""
    a, b = source.meta["val"], node.meta["val"]
    same = a.shape == b.shape and (a.dtype, a.device, a.layout) == (b.dtype, b.device, b.layout)
    return same and _strides(a) == _strides(b) and not _is_parameter(source)


def _is_parameter(node: fx.Node) -> bool:
    """A parameter in place of a value that one stage computes from it would be held by several."""
    root = storage_root(node)
    return root.op == "placeholder" and root.meta["input"].kind is Kind.PARAMETER


def _can_stand_for(source: fx.Node, copy: fx.Node) -> bool:
    return _is_alike(source, copy) and _holds_no_more(source, copy)


def _holds_no_more(source: fx.Node, copy: fx.Node) -> bool:
    """Whether saving ``source`` takes no more bytes than saving its copy.  A view keeps all of its storage:
    that is no loss if it is an input, or kept for the backward anyway."""
    root = storage_root(source)
    # An input is there for the whole step.
    if root.op == "placeholder" or node_bytes(root) <= node_bytes(copy):
        return True
    return any(user is not copy and user.meta["origin"].backward for user in _readers(root))


def _readers(root: fx.Node) -> Iterator[fx.Node]:
    """The ops that read a value or a view of it."""
    todo = [root]
    while todo:
        for user in todo.pop().users:
            if user.op == "call_function":
                yield user
                if is_view(user) or not isinstance(user.meta["val"], torch.Tensor):
                    todo.append(user)


def _is_attended(source: fx.Node, copy: fx.Node) -> bool:
    """Whether a value in another layout than its copy gives the same results.  Attention reads keys and
    values by their strides, and its results have the queries' layout.  A copy to one layout reads any."""
    value = source.meta["val"]
    rows = value.dim() > 0 and value.stride(-1) == 1 and value.shape == copy.meta["val"].shape
    return rows and _holds_no_more(source, copy) and all(_reads_by_stride(u, copy) for u in copy.users)


def _reads_by_stride(user: fx.Node, value: fx.Node) -> bool:
    if user.op != "call_function":
        return False
    if user.target in _ANY_STRIDES:
        return all(_reads_by_stride(reader, user) for reader in user.users)
    if user.target is aten.clone.default:
        return user.kwargs.get("memory_format") is torch.contiguous_format
    return _is_attention(user.target) and value in user.args[1:]


def _is_attention(target: object) -> bool:
    name = getattr(target, "__name__", "")
    return name.startswith("_scaled_dot_product_") and "_attention" in name and "_math" not in name


_RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
#: Views that keep the order of all elements.
_REGROUPS = (*_RESHAPES, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
_ANY_STRIDES = (
    aten.unsqueeze.default,
    aten.expand.default,
    aten.transpose.int,
    aten.permute.default,
    aten.slice.Tensor,
)

_PERMUTES = (aten.t.default, aten.transpose.int, aten.permute.default)
#: Views that never copy, and whose elements do not depend on strides.
_VIEWS = (
    aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.t.default, aten.transpose.int, aten.permute.default, aten.expand.default,
    aten.slice.Tensor, aten.select.int, aten.diagonal.default, aten.unfold.default,
    aten.view_as_real.default, aten.view_as_complex.default,
    aten.alias.default, aten.detach.default, aten.lift_fresh.default,
    aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int,
    aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default, operator.getitem,
)  # fmt: skip

RULES = (
    Rule("view(… view(x, …) …), all of it in its places", "x", _VIEWS, _view_of_all),
    Rule("view(view(x, …), shape)", "view(x, shape)", _RESHAPES, _view_of_view),
    Rule("reshape(x, shape of x)", "x", (aten.reshape.default,), _own_shape),
    Rule("slice_backward(x, …), all of it", "x", (aten.slice_backward.default,), _copy_of_all),
    Rule("clone(x), in x's layout", "x", (aten.clone.default,), _copy_of_all),
    Rule("_to_copy(x, dtype of x)", "x", (aten._to_copy.default,), _copy_of_all),
    Rule("cat([x, empty], …)", "x", (aten.cat.default,), _cat_with_nothing),
    Rule("x + 0, integers", "x", (aten.add.Tensor, aten.add.Scalar), _with_neutral(_is_zero)),
    Rule("x - 0", "x", (aten.sub.Tensor, aten.sub.Scalar), _with_neutral(_is_minus_zero)),
    Rule("x * 1", "x", (aten.mul.Tensor, aten.mul.Scalar), _with_neutral(_is_one)),
    Rule("x / 1", "x", (aten.div.Tensor, aten.div.Scalar), _with_neutral(_is_one)),
    Rule("x ** 1", "x", (aten.pow.Tensor_Scalar,), _with_neutral(_is_one)),
    Rule("-(-x)", "x", (aten.neg.default,), _undone),
    Rule("not not x", "x", (aten.logical_not.default, aten.bitwise_not.default), _undone),
)
