"""Captures the training step again at other sizes, to find which numbers in it are lengths of the example.

    captured graph, {"sequence": 256}  ──►  each fake tensor of the graph at a few other sizes

Sizes in the graph stay plain numbers, which makes capture robust.  Each tensor has a
counterpart in each of the other captures, found by its node's position.  Passes keep the tensors of
``meta["val"]``, so that counterparts are found after them as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
import torch
from torch import fx

from fxpipe.capture.trace import Captured
from fxpipe.errors import CaptureError, SizeError
from fxpipe.ir.compat import pytree
from fxpipe.ir.fake_op_cache import give_own_values
from fxpipe.ir.resized import ResizedTraces
from fxpipe.ir.size import monomials
from fxpipe.runtime.batch.microbatches import batch_leaves

MICROBATCH = "microbatch"
#: Minimum determinant of three terms at the points, each relative to its value in the example.
INDEPENDENT = 1e-7
T = TypeVar("T")


def leading_name(example: object, dimensions: Mapping[str, int]) -> str | None:
    """The name among these of the leading dimension: the one that is as long as no other dimension is; None
    if it is not named."""
    shapes = [tuple(x.shape) for _, x in batch_leaves(example) if isinstance(x, torch.Tensor) and x.dim()]
    rows, others = {shape[0] for shape in shapes}, {n for shape in shapes for n in shape[1:]}
    named = (name for name, n in dimensions.items() if n in rows and (n not in others or name == MICROBATCH))
    return next(named, None)


def named_lengths(example: object, dimensions: Mapping[str, int]) -> dict[str, int]:
    """The length of every named dimension, the leading one first, which is ``microbatch`` where it is not
    named.

    A microbatch of one row is no named length: ops on a length of one are others than on two or more.
    Raises SizeError for names and lengths that do not tell the example's dimensions apart.
    """
    if not isinstance(dimensions, Mapping) or not all(isinstance(name, str) for name in dimensions):
        raise SizeError(
            f"dimensions maps names to lengths, as {{'sequence': 256}} does; it is {dimensions!r}."
        )
    shapes = {n: tuple(x.shape) for n, x in batch_leaves(example) if isinstance(x, torch.Tensor) and x.dim()}
    example_has = (
        f"The example has {', '.join(f'{name} {shape}' for name, shape in shapes.items()) or 'no tensors'}."
    )
    rows = {shape[0] for shape in shapes.values()}
    if len(rows) != 1:
        raise SizeError(
            f"There is no one leading length to call {MICROBATCH!r}: leave dimensions out. {example_has}"
        )
    leading = leading_name(example, dimensions)
    lengths = {n for shape in shapes.values() for n in shape[1:] if n > 1}
    for name, length in dimensions.items():
        if type(length) is not int:
            raise SizeError(f"{name!r} is to be {length!r} long and must be a whole number. {example_has}")
        if name == leading and length == 1:
            raise SizeError(
                f"{name!r} is one row, on which ops are others than on two or more: give an example of two "
                f"rows or more; the programs take microbatches of one row, too. {example_has}"
            )
        if name == MICROBATCH != leading:
            raise SizeError(f"{MICROBATCH!r} is always the leading dimension. {example_has}")
        if name != leading and length not in lengths:
            raise SizeError(
                f"{name!r} is to be {length!r} long, and no dimension behind the rows is, or that is 1. "
                f"{example_has}"
            )
    if len(set(dimensions.values())) < len(dimensions):
        raise SizeError(
            f"Two names for one length cannot be told apart: {dict(dimensions)}. Give an example in which "
            f"these lengths differ. {example_has}"
        )
    first = leading or MICROBATCH
    named = {first: rows.pop(), **{name: length for name, length in dimensions.items() if name != first}}
    if named[first] == 1:
        del named[first]
    if not named:
        raise SizeError(f"There is no length to name: give an example of two rows or more. {example_has}")
    return named


def sample(
    graph: fx.Graph,
    example: object,
    lengths: Mapping[str, int],
    capture: Callable[[object], fx.Graph],
) -> ResizedTraces:
    """Capture the step at other lengths and match the graphs node by node.

    capture: an example -> the graph.  Raises SizeError, naming op, module path and source line, where the
    step is not made of the same ops at other lengths.
    """
    give_own_values(graph)  # values of one layout may differ at other lengths
    first, failure = tuple(lengths.values()), None
    leading = leading_name(example, lengths) or MICROBATCH
    for parts, smaller in itertools.product((4, 1), (True, False)):
        if parts == 1 and not isinstance(failure, CaptureError):
            break  # the model runs, and another multiple of what divides the length would be no better
        try:
            others = _points(lengths, leading, smaller, parts)
            points = [dict(zip(lengths, point, strict=True)) for point in others]
            graphs = tuple(traced_at(at, _resized(example, lengths, leading, at), capture) for at in points)
            return ResizedTraces(tuple(lengths), (first, *others), {}, (), leading).after_rewrite(
                graph, graphs
            )
        except (CaptureError, SizeError) as error:
            failure = failure or error
    named = [name for name in lengths if name != leading]
    remedy = "Leave dimensions out."
    if named:
        remedy = (
            f"Leave {' and '.join(named)} out of dimensions, and pad to one length, or to a few, each with a "
            "pipeline of its own (like=)."
        )
    if named and isinstance(failure, CaptureError):
        remedy = (
            f"That is with other lengths of {', '.join(named)}. Leave what the model's weights or code fix "
            "out of dimensions: no batch has another. Of a model that takes multiples of a number alone give "
            "an example of three of them or more."
        )
        alike = [name for name in named if lengths[name] == lengths.get(leading)]
        if alike:
            remedy += (
                f" {alike[0]!r} is not the leading dimension, as another one is as long: give an example of "
                f"other rows, or call it {MICROBATCH!r}."
            )
    raise SizeError(f"The step is known at the example's sizes alone. {failure} {remedy}") from failure


def traced_at(sizes: Mapping[str, int], example: object, capture: Callable[[object], T]) -> T:
    """Capture an example of other sizes, which an error names."""
    try:
        return capture(example)
    except CaptureError as error:
        where = ", ".join(f"{name} {n}" for name, n in sizes.items())
        raise CaptureError(f"At {where}, traced beside the example: {error}", error.fixable) from error


def with_other_rows(
    graph: fx.Graph, example: object, dimensions: Mapping[str, int], capture: Callable[[object], Captured]
) -> ResizedTraces:
    """The step of one row more, where an example has several; as ``sample``."""
    lengths = named_lengths(example, dimensions)
    leading = leading_name(example, lengths) or MICROBATCH
    points = [tuple(lengths.values())]
    graphs: list[fx.Graph] = []
    if leading in lengths:
        more = {**lengths, leading: lengths[leading] + 1}
        points.append(tuple(more.values()))
        graphs.append(capture(_resized(example, lengths, leading, more)).graph)
    return ResizedTraces(tuple(lengths), tuple(points), {}, (), leading).after_rewrite(graph, graphs)


def _resized(example: object, old: Mapping[str, int], leading: str, new: Mapping[str, int]) -> object:
    """The example with other lengths."""
    lengths = {length: new[name] for name, length in old.items() if name != leading}

    def resize(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim():
            return tensor
        order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        shape = (new.get(leading, 1), *(lengths.get(n, n) for n in tensor.shape[1:]))
        return torch.empty_permuted(shape, order, dtype=tensor.dtype, device=tensor.device).zero_()

    return pytree.tree_map_only(torch.Tensor, resize, example)


def _points(lengths: Mapping[str, int], leading: str, smaller: bool, parts: int) -> list[tuple[int, ...]]:
    """Two points that, with the example's, make sizes of one term distinct and any three terms independent.

    smaller: use fewer positions than the example, as a model may have a table of them.  parts: how often what
        lengths are multiples of stands at least in the example's.
    """
    choices = []
    for name, length in lengths.items():
        if name == leading:
            some = (
                [n for n in (3, 5, 7, 11, 13) if n != length] if smaller else [length * k for k in (2, 3, 5)]
            )
        else:
            # Keep divisors of the length first, as strided ops require.
            steps = [(length & -length) >> k for k in range(length.bit_length())]
            steps = [k for k in steps if k and parts * k <= length] or [1]
            below = [n for k in steps for n in range(length - k, 2, -k)]
            above = [length + n * k for k in steps for n in range(1, 9)]
            some = [*dict.fromkeys([*below, *above] if smaller else above)][:8]
        choices.append(some)
    high, low = (monomials(len(lengths), terms) for terms in (1, 2))
    triples = np.array([*itertools.combinations(range(len(low)), 3)])
    # The number of rows varies first, as any number works.
    for pairs in itertools.product(*(itertools.permutations(c, 2) for c in reversed(choices))):
        points = list(zip(*reversed(pairs), strict=True))
        growth = np.array([tuple(lengths.values()), *points]) / tuple(lengths.values())
        grown = np.array([(growth**e).prod(axis=1) for e in [*high, *low]]).round(9)
        distinct = len(np.unique(grown[: len(high)], axis=0)) == len(high)
        if distinct and np.abs(np.linalg.det(grown[len(high) :][triples])).min() > INDEPENDENT:
            return points
    raise SizeError(f"No other sizes were found that tell {', '.join(lengths)} apart.")
