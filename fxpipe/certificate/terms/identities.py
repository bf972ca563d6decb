"""The identities on terms that the certificate trusts: all of them, one function an op.

Each gives the same bits on both sides, for every input; where that depends on a dtype or a shape, it looks at
it.  Beside these, terms are equal only if the same ops are applied to equal operands.  Those of values that
are made in parts, which hold for real numbers, are in ``parts.py``.

    one value           clone, contiguous, alias, detach, lift_fresh, read_buffer of x = x
                        a cast to x's own dtype = x;  casts of bernoulli to bool and back = bernoulli
                         _conj = conj_physical;  _neg_view = neg
                        _efficientzerotensor = zeros
    reshapes            view, _unsafe_view, reshape, squeeze, unsqueeze … = reshape to the shape of the result
                        so is select of a dimension of one element
                        reshape(reshape(x)) = reshape(x);  reshape to x's own shape = x
    permutations        t, transpose = permute;  permute(permute(x)) = one;  one that moves none = x
    views               of the same elements of x, in one order = one;  of all of x, in its order = x
                        a sum over dimensions of one element = reshape, but for the sign of zeros
    parts and joins     a slice of all, or its backward = x;  expand to x's own shape = x;  of two one counts
                        cat without empty parts;  cat of one = x
    arithmetic          x * 1 = x / 1 = x - 0 = x ** 1 = -(-x) = not not x = x;  x + 0 = x for integers
                        a + b = b + a, a * b = b * a but for complex (also bitwise and logical ones)
    embeddings          embedding_dense_backward(g, i) = rows of g, added at i (as ``index_add_`` does)
    masks of results    a result of an op with ``output_mask`` does not depend on the others of the mask
    lanes               all_reduce(x) + all_reduce(y) = all_reduce(x + y), for sums of the same lanes
                        end(begin_all_to_all(x)) = all_to_all(x), end(begin_all_gather(x)) = all_gather(x)
                        sum_shares(all_to_all(x)) = reduce_scatter(x)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, reduce
from math import prod
from typing import Any

import torch

from fxpipe.certificate.terms.layouts import Unknown, layout_of
from fxpipe.certificate.terms.terms import NUMBER, Layout, Named, Term, Terms, canonical

Rule = Callable[[Terms, str, dict[str, object]], Term | None]
_Step = tuple[str, tuple[tuple[str, object], ...], int | None]
"""An op of torch that makes a view, its other arguments, and the number of the part."""

IN_ANY_ORDER = (
    "aten.add",
    "aten.mul",
    "aten.bitwise_and",
    "aten.bitwise_or",
    "aten.bitwise_xor",
    "aten.logical_and",
    "aten.logical_or",
)
RESHAPE, PERMUTE, CAST, ROWS = "reshape", "permute", "cast", "rows_added"
#: The arguments of ops between lanes that name these.
_GROUP = ("n", "stride")
_PARTS = ("select", "diagonal", "unfold", "view_as_real", "view_as_complex")
_DIVIDE = ("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "unbind")
#: Views that never copy -> the op of torch.
_VIEWS = {RESHAPE: "view", PERMUTE: "permute"} | {
    f"aten.{name}": name for name in ("expand", "slice", *_PARTS, *_DIVIDE)
}


def _same(terms: Terms, op: str, args: dict[str, object]) -> Term | None:
    first = next(iter(args.values()))
    return first if isinstance(first, Term) else None


def _drawn_truth(term: Any) -> Term | None:
    """The random zeros and ones of which a term has the truth values."""
    # Nothing but zeros and ones is drawn, so that the way through truth values loses nothing.
    drawn = term["self"] if term.op == CAST and term["dtype"] == canonical(torch.bool) else None
    is_random = isinstance(drawn, Term) and drawn.op == "keyed" and drawn["op"] == ("op", "aten.bernoulli")
    return drawn if is_random else None


def _cast(terms: Terms, op: str, args: Named) -> Term | None:
    source, dtype, device = args["self"], args.get("dtype"), args.get("device")
    if device is not None and terms.line() is None:
        terms.devices.add(device)
    elif device is not None and device not in terms.devices:
        raise Unknown(f"moves {source} to the device {device[1]}: the captured step moves nothing there")
    if dtype is None or dtype == canonical(layout_of(terms, source).dtype):
        return source  # type: ignore[no-any-return]
    if (drawn := _drawn_truth(source)) and dtype == canonical(layout_of(terms, drawn).dtype):
        return drawn
    cast = terms.plain(CAST, {"self": source, "dtype": dtype})
    if cast.layout is None:
        cast.layout = Layout(layout_of(terms, source).shape, getattr(torch, dtype[1].removeprefix("torch.")))
    return cast


# -- shapes -----------------------------------------------------------------------------------------------


def _dimension(dim: int, rank: int) -> int:
    """The dimension, counted from the first.  Raises Unknown where torch would say that there is none."""
    rank = max(rank, 1)
    if not -rank <= dim < rank:
        raise Unknown(f"a tensor of {rank} dimensions has no dimension {dim}")
    return dim % rank


def _step_of(term: Term) -> tuple[Term, _Step] | None:
    """What a view, or one of the parts into which an op divides a value, is a view of, and how."""
    view, part = (term["of"], term["index"]) if term.op == "item" else (term, None)
    if view.op not in _VIEWS:
        return None
    args = dict(view.arguments)
    return args.pop("self"), (_VIEWS[view.op], tuple(args.items()), part)


def _view(terms: Terms, op: str, args: Named, layout: Layout | None = None) -> Term:
    """The first term that has the same elements of the same value: in memory without gaps, to which shape,
    strides and offset are the same."""
    term = terms.plain(op, args)
    term.layout = term.layout or layout
    steps, values = list[_Step](), [term]
    while (step := _step_of(values[-1])) is not None:
        values.append(step[0])
        steps.append(step[1])
    if not steps:
        return term
    copies, is_all, *place = _place(layout_of(terms, values[-1]), tuple(reversed(steps)))
    root = values[len(steps) - copies]
    return root if is_all else terms.views.setdefault((root, *place), term)


@lru_cache(maxsize=1 << 14)
def _place(layout: Layout, steps: tuple[_Step, ...]) -> tuple[Any, ...]:
    """The place of a view of views of a value: how many of them give the memory that it is in, since the
    last of these is a reshape that copies; whether it is all of that; its dtype, shape, strides and offset
    there."""
    value = whole = torch.empty(layout.shape, dtype=layout.dtype, device="meta")
    copies = 0
    for number, (name, args, part) in enumerate(steps):
        view = getattr(torch.ops.aten, name)
        try:
            result = view(value, **dict(args))
        except RuntimeError:
            copies = number
            whole = torch.empty(value.shape, dtype=value.dtype, device="meta")
            result = view(whole, **dict(args))
        value = result if part is None else result[part]
    strides = tuple(n for n, length in zip(value.stride(), value.shape, strict=True) if length != 1)
    is_all = (value.shape, value.dtype) == (whole.shape, whole.dtype) and value.is_contiguous()
    return copies, is_all, value.dtype, tuple(value.shape), strides, value.storage_offset()


def overlaps(terms: Terms, term: Term, root: Term | None) -> bool:
    """Whether elements of a view of the root, or of what it is itself a view of, are one in its memory, so
    that torch does not write to it."""
    steps = []
    while term is not root and (seen := _step_of(term)) is not None:
        term, step = seen
        steps.append(step)
    return bool(steps) and 0 in _place(layout_of(terms, term), tuple(reversed(steps)))[4]


def reshaped(terms: Terms, source: Term, shape: tuple[int, ...]) -> Term:
    """The value in another shape.  Raises Unknown for another number of elements."""
    while source.op == RESHAPE:
        source = source["self"]
    layout = layout_of(terms, source)
    if prod(shape) != prod(layout.shape):
        raise Unknown(f"{source} of {list(layout.shape)} cannot be {list(shape)}")
    if shape == layout.shape:
        return source
    return _view(terms, RESHAPE, {"self": source, "size": shape}, Layout(shape, layout.dtype))


def _reshape(terms: Terms, op: str, args: Named) -> Term | None:
    source, size = args["self"], list(args["size"] if "size" in args else args.get("shape", ()))
    if "dtype" in args or not isinstance(source, Term) or not all(isinstance(n, int) for n in size):
        return None  # view of another dtype
    if -1 in size:
        elements = prod(layout_of(terms, source).shape)
        others = prod(n for n in size if n != -1)
        size[size.index(-1)] = elements // others if others else 0
    return reshaped(terms, source, tuple(size))


def _unsqueeze(terms: Terms, op: str, args: Named) -> Term | None:
    shape = list(layout_of(terms, args["self"]).shape)
    shape.insert(_dimension(args["dim"], len(shape) + 1), 1)
    return reshaped(terms, args["self"], tuple(shape))


def _squeeze(terms: Terms, op: str, args: Named) -> Term | None:
    shape = layout_of(terms, args["self"]).shape
    dims = args.get("dim", tuple(range(len(shape))))
    dropped = {_dimension(d, len(shape)) for d in (dims if isinstance(dims, tuple) else (dims,))}
    lengths = tuple(n for d, n in enumerate(shape) if n != 1 or d not in dropped)
    return reshaped(terms, args["self"], lengths)


def _select(terms: Terms, op: str, args: Named) -> Term | None:
    shape = layout_of(terms, args["self"]).shape
    dim = _dimension(args["dim"], len(shape))
    if shape[dim] != 1:
        return _view(terms, op, args)
    return reshaped(terms, args["self"], shape[:dim] + shape[dim + 1 :])


def permuted(terms: Terms, source: Term, dims: tuple[int, ...]) -> Term:
    if source.op == PERMUTE:
        dims = tuple(source["dims"][d] for d in dims)
        source = source["self"]
    if dims == tuple(range(len(dims))):
        return source
    before = layout_of(terms, source)
    layout = Layout(tuple(before.shape[d] for d in dims), before.dtype)
    return _view(terms, PERMUTE, {"self": source, "dims": dims}, layout)


def _permute(terms: Terms, op: str, args: Named) -> Term | None:
    rank = len(layout_of(terms, args["self"]).shape)
    dims = tuple(_dimension(d, rank) for d in args["dims"])
    if sorted(dims) != list(range(rank)):
        raise Unknown(f"{list(dims)} is no order of {rank} dimensions")
    return permuted(terms, args["self"], dims)


def _transpose(terms: Terms, op: str, args: Named) -> Term | None:
    rank = len(layout_of(terms, args["self"]).shape)
    dims = list(range(rank))
    if rank:
        args = {"dim0": 0, "dim1": int(rank > 1)} | args
        one, other = (_dimension(args[name], rank) for name in ("dim0", "dim1"))
        dims[one], dims[other] = dims[other], dims[one]
    return permuted(terms, args["self"], tuple(dims))


def _expand(terms: Terms, op: str, args: Named) -> Term | None:
    source, size = args["self"], args["size"]
    layout = layout_of(terms, source)
    missing = len(size) - len(layout.shape)
    before = (*[1] * missing, *layout.shape)
    # With fewer sizes than dimensions they do not match, which is refused below.
    shape = tuple(had if n == -1 else n for had, n in zip(before, size, strict=missing >= 0))
    fits = all(had in (1, n) for had, n in zip(before, shape, strict=False))
    if missing < 0 or -1 in size[:missing] or not fits:
        raise Unknown(f"{source} of {list(layout.shape)} cannot be expanded to {list(size)}")
    while source.op == "aten.expand":
        source = source["self"]
    if shape == layout_of(terms, source).shape:
        return source  # type: ignore[no-any-return]
    return _view(terms, "aten.expand", {"self": source, "size": shape}, Layout(shape, layout.dtype))


def _sum(terms: Terms, op: str, args: Named) -> Term | None:
    source, dims = args["self"], args.get("dim") or ()
    layout = layout_of(terms, source)
    over = {_dimension(d, len(layout.shape)) for d in dims}
    keeps = layout.dtype.is_floating_point and args.get("dtype") in (None, canonical(layout.dtype))
    if not keeps or not over or not layout.shape or any(layout.shape[d] != 1 for d in over):
        return None
    if args.get("keepdim") == ("bool", True):
        return source  # type: ignore[no-any-return]
    return reshaped(terms, source, tuple(n for d, n in enumerate(layout.shape) if d not in over))


def _slice(terms: Terms, op: str, args: Named) -> Term | None:
    layout = layout_of(terms, args["self"])
    dim = _dimension(args.get("dim", 0), len(layout.shape))
    length, step = layout.shape[dim], args.get("step", 1)
    if step < 1:
        raise Unknown(f"a slice has no step {step}")
    begin, end = (
        min(max(n + length if n < 0 else n, 0), length)
        for n in (args.get("start") or 0, length if args.get("end") is None else args["end"])
    )
    if (begin, end, step) == (0, length, 1):
        return args["self"]  # type: ignore[no-any-return]
    parts = {"self": args["self"], "dim": dim, "start": begin, "end": end, "step": step}
    shape = (*layout.shape[:dim], max(0, -(-(end - begin) // step)), *layout.shape[dim + 1 :])
    return _view(terms, "aten.slice", parts, Layout(shape, layout.dtype))


def _cat(terms: Terms, op: str, args: Named) -> Term | None:
    parts = args["tensors"]
    layouts = [layout_of(terms, part) for part in parts]
    filled = tuple(part for part, layout in zip(parts, layouts, strict=True) if prod(layout.shape))
    promoted = reduce(torch.promote_types, (layout.dtype for layout in layouts))
    if not filled or any(layout_of(terms, part).dtype != promoted for part in filled):
        return None
    if len(filled) == 1:
        return filled[0]  # type: ignore[no-any-return]
    return None if len(filled) == len(parts) else terms.plain(op, {**args, "tensors": filled})


# -- arithmetic -------------------------------------------------------------------------------------------


def number(argument: object) -> object:
    """The number that an argument is; None for other arguments."""
    if isinstance(argument, Term):
        return number(argument["s"]) if argument.op == NUMBER else None
    if isinstance(argument, int):
        return argument
    if isinstance(argument, tuple) and argument[:1] == ("bool",):
        return int(argument[1])
    if isinstance(argument, tuple) and argument[:1] == ("float",) and argument[1] != "nan":
        return float.fromhex(argument[1])
    return None


def _is(argument: object, wanted: int) -> bool:
    """Whether an argument is this number, and not -0.0."""
    value = number(argument)
    return value is not None and value == wanted and str(value) != "-0.0"


def _keeps(terms: Terms, source: object, other: object) -> bool:
    """Whether arithmetic of ``source`` with the number ``other`` has the dtype of ``source``, and is not that
    of complex numbers, which makes NaN of infinities."""
    if not isinstance(source, Term) or number(source) is not None:
        return False
    dtype = layout_of(terms, source).dtype
    whole = isinstance(number(other), int) and dtype is not torch.bool
    return not dtype.is_complex and (dtype.is_floating_point or whole)


def _is_complex(terms: Terms, args: dict[str, object]) -> bool:
    factors = (args["self"], args["other"])
    return any(layout_of(terms, term).dtype.is_complex for term in factors if isinstance(term, Term))


def _in_any_order(terms: Terms, op: str, args: dict[str, object]) -> Term:
    one, other = args["self"], args["other"]
    if isinstance(one, Term) and isinstance(other, Term) and one.number > other.number:
        # One order for both: that in which the terms were made.
        args = {**args, "self": other, "other": one}
    return terms.plain(op, args)


def _mul(terms: Terms, op: str, args: Named) -> Term | None:
    for one, other in (("self", "other"), ("other", "self")):
        if _is(args[other], 1) and _keeps(terms, args[one], args[other]):
            return args[one]  # type: ignore[no-any-return]
    # Products of complex numbers are rounded differently: one of two products is added without rounding.
    return None if _is_complex(terms, args) else _in_any_order(terms, op, args)


def _div(terms: Terms, op: str, args: Named) -> Term | None:
    source = args["self"]
    if "rounding_mode" in args or not (_is(args["other"], 1) and _keeps(terms, source, args["other"])):
        return None
    return source if layout_of(terms, source).dtype.is_floating_point else None


def _add(terms: Terms, op: str, args: Named) -> Term | None:
    if "alpha" in args:
        return None
    for one, other in (("self", "other"), ("other", "self")):
        zero = isinstance(number(args[other]), int) and _is(args[other], 0)
        if zero and _keeps(terms, args[one], args[other]):
            source: Term = args[one]
            if not layout_of(terms, source).dtype.is_floating_point:  # -0.0 + 0 is 0.0
                return source
    one, other = args["self"], args["other"]
    sums = isinstance(one, Term) and isinstance(other, Term) and one.op == other.op == "lanes.all_reduce"
    if sums and one["op"] == other["op"] == canonical("sum") and of_lanes(one) == of_lanes(other):
        added = terms.make("aten.add", {"self": one["x"], "other": other["x"]})
        if layout_of(terms, added) == layout_of(terms, one) == layout_of(terms, other):
            return terms.plain("lanes.all_reduce", {"x": added, "op": one["op"], **of_lanes(one)})
    return _in_any_order(terms, op, args)


def _sub(terms: Terms, op: str, args: Named) -> Term | None:
    zero = "alpha" not in args and _is(args["other"], 0)
    return args["self"] if zero and _keeps(terms, args["self"], args["other"]) else None


def _pow(terms: Terms, op: str, args: Named) -> Term | None:
    base, exponent = args["self"], args["exponent"]
    return base if _is(exponent, 1) and _keeps(terms, base, exponent) else None


def _undone(terms: Terms, op: str, args: dict[str, object]) -> Term | None:
    """-(-x), not not x; ``logical_not`` makes booleans of numbers."""
    inner = args["self"]
    if not isinstance(inner, Term) or inner.op != op:
        return None
    source: Term = inner["self"]
    return source if layout_of(terms, source).dtype == layout_of(terms, inner).dtype else None


def _slice_backward(terms: Terms, op: str, args: Named) -> Term | None:
    """The gradient of a slice of all."""
    source: Term = args["grad_output"]
    whole = layout_of(terms, source).shape == args["input_sizes"] and args["step"] == 1
    return source if whole else None


def _lookup_gradient(terms: Terms, op: str, args: Named) -> Term | None:
    if args["padding_idx"] != -1 or args["scale_grad_by_freq"] != ("bool", False):
        return None
    gradient, index = args["grad_output"], args["indices"]
    layout = layout_of(terms, gradient)
    rows = reshaped(terms, index, (prod(layout_of(terms, index).shape),))
    values = reshaped(terms, gradient, (prod(layout.shape[:-1]), layout.shape[-1]))
    return rows_added(terms, rows, values, args["num_weights"])


def rows_added(terms: Terms, rows: Term, values: Term, size: int) -> Term:
    """A table of ``size`` rows of zeros, to which values are added at some rows."""
    term = terms.plain(ROWS, {"rows": rows, "values": values, "size": size})
    layout = layout_of(terms, values)
    term.layout = term.layout or Layout((size, *layout.shape[1:]), layout.dtype)
    return term


def _renamed(name: str) -> Rule:
    return lambda terms, op, args: terms.make(name, args)


def _end(terms: Terms, op: str, args: Named) -> Term | None:
    begun, group = args["x"], {name: args[name] for name in _GROUP if name in args}
    name = begun.op.removeprefix("lanes.begin_")
    # Of the same lanes: the result of another begin, or of none, is not what they have given.
    if name == begun.op or of_lanes(begun) != group:
        return None
    return terms.plain(f"lanes.{name}", {"x": begun["x"], **group})


def of_lanes(term: Term) -> dict[str, Any]:
    """The arguments of an op between lanes that name these."""
    return {name: value for name, value in term.arguments if name in _GROUP}


def _sum_shares(terms: Terms, op: str, args: Named) -> Term | None:
    shares = args["x"]
    if shares.op != "lanes.all_to_all" or shares["n"] != args["n"]:
        return None
    return terms.plain("lanes.reduce_scatter", {"x": shares["x"], "op": args["op"], **of_lanes(shares)})


RULES: dict[str, Rule] = {
    **dict.fromkeys(
        (
            "aten.clone",
            "aten.contiguous",
            "aten.alias",
            "aten.detach",
            "aten.lift_fresh",
            "aten.lift_fresh_copy",
            "read_buffer",
        ),
        _same,
    ),
    "aten._to_copy": _cast,
    "aten._conj": _renamed("aten.conj_physical"),
    "aten._neg_view": _renamed("aten.neg"),
    "aten._efficientzerotensor": _renamed("aten.zeros"),
    **dict.fromkeys(
        ("aten.view", "aten._unsafe_view", "aten.reshape", "aten._reshape_alias"),
        _reshape,
    ),
    "aten.unsqueeze": _unsqueeze,
    "aten.squeeze": _squeeze,
    "aten.permute": _permute,
    "aten.t": _transpose,
    "aten.transpose": _transpose,
    "aten.expand": _expand,
    "aten.slice": _slice,
    "aten.sum": _sum,
    **dict.fromkeys(("item", *(f"aten.{name}" for name in _PARTS)), _view),
    "aten.select": _select,
    "aten.cat": _cat,
    "aten.mul": _mul,
    "aten.div": _div,
    "aten.add": _add,
    "aten.sub": _sub,
    "aten.pow": _pow,
    **dict.fromkeys(("aten.neg", "aten.logical_not", "aten.bitwise_not"), _undone),
    "aten.slice_backward": _slice_backward,
    **dict.fromkeys(IN_ANY_ORDER[2:], _in_any_order),
    "aten.embedding_dense_backward": _lookup_gradient,
    "lanes.end": _end,
    "lanes.sum_shares": _sum_shares,
}
"""By functional name of the op."""
