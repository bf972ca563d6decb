"""Captures the training step again at other lengths of its microbatches, so that its programs take all.

    captured step, {"sequence": 512}  ──►  the same step for microbatches of 511, 257 and 2 tokens

The lengths reach from the shortest for which the model runs the same ops up to the example's: a branch of the
model at a length in between would make the traces at the two ends differ.  Those of a program lie in between.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import fx

from fxpipe.capture.reads.length_reads import SIGNS
from fxpipe.capture.trace import Captured
from fxpipe.errors import CaptureError, SizeError
from fxpipe.ir.compat import pytree
from fxpipe.ir.graph import Origin, Outputs
from fxpipe.ir.nodes import rename
from fxpipe.ir.ops import begins_backward
from fxpipe.ir.resized import ResizedTraces
from fxpipe.ir.size import Share, Size, sized
from fxpipe.ir.storage import graph_outputs
from fxpipe.plan.captured import digest
from fxpipe.plan.rewrites import Mask
from fxpipe.plan.step import NamedLength
from fxpipe.runtime.program.checks import expect

#: What lengths may be multiples of, where the model does not run the same ops at any.
STEPS = (1, 8, 64)
#: Most lengths for which a comparison is evaluated; of one name this is all of them.
MOST_TRIED = 1 << 16


@dataclass(frozen=True, eq=False)
class LengthTraces:
    """The step at a few points, each a length for every name, with as many rows as the example.

    ``lengths``: those that a program may take.  ``captured``: the step at each point, the example's first.
    ``traces``: the graphs that the passes rewrite alike.
    """

    lengths: tuple[NamedLength, ...]
    captured: tuple[Captured, ...]
    traces: ResizedTraces

    @property
    def points(self) -> list[dict[str, int]]:
        names = [each.name for each in self.lengths]
        return [dict(zip(names, point, strict=True)) for point in self.traces.points]


class OtherMasks(Exception):
    """The masks of attention say other things at other lengths.  ``masks``: by length, those of all calls."""

    def __init__(self, masks: Sequence[tuple[Mask, ...]]) -> None:
        super().__init__("the masks of attention say other things at other lengths")
        self.masks = masks


def agreed_masks(masks: Sequence[tuple[Mask, ...]]) -> tuple[Mask, ...]:
    """What the masks of all traces are: what only some lengths allow is left to the kernel of any mask, so
    that all traces have the same ops."""
    return tuple(a if all(a == b for b in others) else "dense" for a, *others in zip(*masks, strict=True))


def at_other_lengths(
    captured: Captured,
    example: object,
    dimensions: Mapping[str, int],
    variables: Sequence[str],
    capture: Callable[[object], Captured],
) -> LengthTraces:
    """Capture the step of microbatches of other lengths.

    dimensions: the lengths of the example, for which expressions have these ``variables``.  capture: an
    example -> the step.  Raises SizeError, naming op, module path and source line, where the step is no
    function of the lengths; OtherMasks where an agreement on what masks say may help.
    """
    failure: Exception = SizeError(f"an example of {dict(dimensions)} is too short to tell lengths apart")
    for lengths in _ranges(dimensions):
        points = _points(lengths)
        try:
            others = [capture(shortened(example, dimensions, point)) for point in points]
            _check_masks([captured, *others])
            for other in others:
                _check_constants(captured, other)
            at = tuple(tuple(point.values()) for point in (dimensions, *points))
            traces = ResizedTraces(tuple(variables), at, {}, ())
            traces = traces.after_rewrite(captured.graph, [other.graph for other in others])
            for _ in _arguments(captured.graph, traces):
                pass  # raises where a number is no expression
            _check_comparisons([captured, *others], traces, lengths)
            return LengthTraces(lengths, (captured, *others), traces)
        except (CaptureError, SizeError) as error:
            failure = error if failure.__traceback__ is None else failure
    raise SizeError(str(failure)) from failure


def shortened(example: object, old: Mapping[str, int], new: Mapping[str, int]) -> object:
    """The first part of an example, in each dimension that has a name.  Lengths of the leading one stay."""
    lengths = {length: new[name] for name, length in old.items()}

    def first(tensor: torch.Tensor) -> torch.Tensor:
        index = tuple(slice(lengths.get(n, n)) for n in tensor.shape[1:])
        if not index:
            return tensor
        values = tensor.detach()[:, *index]
        order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        part = torch.empty_permuted(values.shape, order, dtype=tensor.dtype, device=tensor.device)
        return part.copy_(values).requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(torch.Tensor, first, example)


def name_sizes(graph: fx.Graph, traces: ResizedTraces, reserved: Collection[str]) -> None:
    """Let each number among the arguments of ops that is another one at other lengths be their expression,
    and what the gradient of a mean begins with that of the number of microbatches.

    No node keeps a name that is ``reserved`` for lengths.  Raises SizeError for a number that is no
    expression of few terms, naming the op with its line.
    """
    for node, (args, kwargs) in [*_arguments(graph, traces)]:
        node.args, node.kwargs = args, kwargs
    is_mean = graph_outputs(graph).count is None
    for node in graph.nodes:
        if is_mean and begins_backward(node):
            node.update_arg(1, Share(node.args[1]))
        if node.name in reserved:
            rename(node, f"{node.name}_")


def _arguments(graph: fx.Graph, traces: ResizedTraces) -> Iterator[tuple[fx.Node, Any]]:
    """The nodes with other numbers at other lengths, and their arguments with an expression for each."""
    for nodes in zip(graph.nodes, *(each.nodes for each in traces.graphs), strict=True):
        node = nodes[0]
        if node.op == "output":
            _check_outputs([each.args[0] for each in nodes])
        elif node.op == "call_function":
            arguments = _named(node, [(each.args, dict(each.kwargs)) for each in nodes], traces)
            if arguments is not None:
                yield node, arguments


def _named(node: fx.Node, values: Sequence[object], traces: ResizedTraces) -> object:
    """An argument of which the values at all points are given; None if they are alike."""
    first = values[0]
    if isinstance(first, fx.Node):
        return None
    if isinstance(first, list | tuple | dict):
        if not first and not any(values):
            return None
        items = [_items(value) for value in values]
        if {len(each) for each in items} != {len(items[0])}:
            raise _unlike(node, values, traces)
        named = [_named(node, each, traces) for each in zip(*items, strict=True)]
        if all(each is None for each in named):
            return None
        new = [old if each is None else each for old, each in zip(items[0], named, strict=True)]
        if isinstance(first, dict):
            return dict(zip(first, new, strict=True))
        return new if isinstance(first, list) else tuple(new)
    # As text, in which 0.0 and -0.0 differ, and NaN is NaN.
    if all(value is first or (type(value) is type(first) and repr(value) == repr(first)) for value in values):
        return None
    if not all(type(value) is int for value in values) or node.target is expect:
        raise _unlike(node, values, traces)
    size = sized(values, traces.names, traces.points)  # type: ignore[arg-type]
    if not isinstance(size, Size):
        raise _unlike(node, values, traces)
    return size


def _items(value: object) -> list[object]:
    if isinstance(value, dict):
        return [*value.values()]
    return [*value] if isinstance(value, list | tuple) else [value]


def _unlike(node: fx.Node, values: Sequence[object], traces: ResizedTraces) -> SizeError:
    origin = node.meta.get("origin", Origin())
    at = ", ".join(f"{value} at {_point(point)}" for value, point in zip(values, traces.points, strict=True))
    what = "checks" if node.target is expect else "computes with"
    return SizeError(
        f"The step {what} a number that is no polynomial of {', '.join(traces.names)}: {at}, in "
        f"{node.target} of {origin.module} ({origin.source})."
    )


def _point(point: Sequence[int]) -> str:
    return " × ".join(map(str, point))


def _check_masks(steps: Sequence[Captured]) -> None:
    """Raise OtherMasks where the calls of attention are alike but for what their masks say."""
    masks = [tuple(each.masks.needed) for each in steps]
    if len({*masks}) > 1 and len({*map(len, masks)}) == 1:
        raise OtherMasks(masks)


def _check_outputs(results: Sequence[Outputs]) -> None:
    if len({(tuple(r.outputs), tuple(r.grads), tuple(r.buffers), len(r.checks)) for r in results}) > 1:
        raise SizeError("The step gives other results at other lengths.")


def _check_comparisons(
    steps: Sequence[Captured], traces: ResizedTraces, lengths: Sequence[NamedLength]
) -> None:
    """Raise SizeError where the model's Python compares a size with a number, and would decide otherwise at a
    length that programs may take."""
    by_line: list[dict[tuple[str, str], list[Fraction]]] = []
    for step in steps:
        by_line.append({})
        for each in step.comparisons:
            by_line[-1].setdefault((each.sign, each.source), []).append(each.difference)
    decided: set[tuple[str, str, int | None]] = set()
    for sign, source in dict.fromkeys(key for each in by_line for key in each):
        of_each = [each.get((sign, source), []) for each in by_line]
        if len({difference for differences in of_each for difference in differences}) <= 1:
            continue  # however often: a cache that knows a size compares it once more
        where = f"The model's Python compares a length at {source}"
        if len({*map(len, of_each)}) > 1:
            raise SizeError(f"{where} more often at some lengths than at others.")
        for values in zip(*of_each, strict=True):
            scale = math.lcm(*(value.denominator for value in values))
            size = sized([int(value * scale) for value in values], traces.names, traces.points)
            if (sign, source, size) in decided:
                continue
            decided.add((sign, source, size))
            if size is None:
                raise SizeError(f"{where} in a way that says nothing of lengths in between.")
            other = _other_outcome(sign, size, traces.names, lengths) if isinstance(size, Size) else None
            if other is not None:
                text = ", ".join(f"{name} {length}" for name, length in other.items())
                raise SizeError(f"{where}, and decides otherwise for {text} than for the example.")


def _other_outcome(
    sign: str, size: Size, variables: Sequence[str], lengths: Sequence[NamedLength]
) -> dict[str, int] | None:
    """Lengths at which a comparison of a size with 0 has another outcome than at the example's; None if there
    are none.  Of several names a part of all lengths is tried, the ends among them."""
    most = MOST_TRIED if len(lengths) == 1 else round(MOST_TRIED ** (1 / len(lengths)))
    tried = []
    for each in lengths:
        all_of_it = range(each.least, each.example + 1, each.step)
        tried.append([*all_of_it[:: -(-len(all_of_it) // most)], each.example])
    for point in itertools.product(*tried):
        value = size.at(dict(zip(variables, point, strict=True)))
        if bool(SIGNS[sign](value, 0)) != bool(SIGNS[sign](int(size), 0)):
            return dict(zip((each.name for each in lengths), point, strict=True))
    return None


def _check_constants(captured: Captured, other: Captured) -> None:
    """Raise SizeError where a tensor that the model made itself is another one at another length."""
    for name, constant in captured.constants.items():
        there = other.constants.get(name)
        if there is None or there.shape != constant.shape or digest(there) != digest(constant):
            raise SizeError(
                f"The constant {name!r}, a tensor that the model's Python makes or holds, is another one at "
                "other lengths. Compute it in the forward, with torch's functions of a length (torch.arange)."
            )


def _ranges(dimensions: Mapping[str, int]) -> Iterator[tuple[NamedLength, ...]]:
    """Lengths that a program may take: first the most, down to few."""
    for step in STEPS:
        if any(length % step for length in dimensions.values()):
            continue
        units = {name: length // step for name, length in dimensions.items()}
        # A length of one is broadcast, which is another op.
        shortest = 2 if step == 1 else 1
        for part in (0.0, 0.5):
            least = {name: max(shortest, int(n * part)) for name, n in units.items()}
            if all(units[name] - least[name] >= 3 for name in units):
                yield tuple(
                    NamedLength(name, length, least[name] * step, step) for name, length in dimensions.items()
                )


def _points(lengths: Sequence[NamedLength]) -> list[dict[str, int]]:
    """Lengths beside the example's: the least, the next to the example's, and some in between, as many as
    tell the terms of an expression apart.  Of several names each has another order of these."""
    known = []
    for each in lengths:
        first, last = each.least // each.step, each.example // each.step
        middle = (first + last) // 2
        quarter, more = (first + middle) // 2, (middle + last) // 2
        units = [first, last - 1, middle, quarter, more]
        known.append([unit * each.step for unit in dict.fromkeys(units) if unit < last])
    count = 3 if len(lengths) == 1 else 3 + 2 * len(lengths)
    points: list[dict[str, int]] = []
    for k in range(count):
        # The least of all are traced together: the shortest microbatch.
        chosen = [values[(k * (1 + 2 * j)) % len(values)] for j, values in enumerate(known)]
        point = {each.name: value for each, value in zip(lengths, chosen, strict=True)}
        if point not in points:
            points.append(point)
    return points
