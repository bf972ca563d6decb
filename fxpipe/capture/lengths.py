"""Captures the training step again at other lengths of its microbatches, so that its programs take all.

    captured step, {"sequence": 512}  ──►  the same step for microbatches of 511, 257 and 2 tokens

The lengths reach from the shortest for which the model runs the same ops up to the example's: a branch of the
model at a length in between would make the traces at the two ends differ.  Those of a program lie in between.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Any

import torch
from torch import fx

from fxpipe.capture.reads.length_reads import SIGNS
from fxpipe.capture.resized import leading_name, traced_at
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

#: What lengths may be multiples of where the model does not run at any; where it runs other ops fewer are
#: tried, as each takes several traces.
STEPS, STEPS_OF_OTHER_OPS = (1, 2, 4, 8, 16, 32, 64), (1, 8, 64)
#: Most lengths for which a comparison is evaluated; of one name this is all of them.
MOST_TRIED = 1 << 16


@dataclass(frozen=True, eq=False)
class LengthTraces:
    """The step at a few points, each a length for every name.

    ``lengths``: those that a program may take.  ``captured``: the step at each point, the example's first.
    ``traces``: the graphs that the passes rewrite alike.  ``one_row``: where rows have a name, the steps of
    one, which may be made of other ops (a gradient that is broadcast is no sum then): programs take one row
    if they are proved to be those.  ``fewer``: why they take no more lengths, where something is in the way.
    """

    lengths: tuple[NamedLength, ...]
    captured: tuple[Captured, ...]
    traces: ResizedTraces
    one_row: tuple[Captured, ...] = ()
    fewer: str = ""

    @property
    def points(self) -> list[dict[str, int]]:
        names = [each.name for each in self.lengths]
        return [dict(zip(names, point, strict=True)) for point in self.traces.points]

    @property
    def points_of_one_row(self) -> list[dict[str, int]]:
        """Lengths of one row that is as long as the example, and as short as possible."""
        longest = {each.name: 1 if each.leading else each.example for each in self.lengths}
        shortest = {each.name: 1 if each.leading else each.least for each in self.lengths}
        return [longest] if shortest == longest else [longest, shortest]

    @property
    def with_one_row(self) -> tuple[NamedLength, ...]:
        """The lengths that a program may take that takes one row."""
        return tuple(replace(each, least=1) if each.leading else each for each in self.lengths)


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
    nearest = failure  # of the lengths that are the least shorter
    leading = leading_name(example, dimensions)

    @cache
    def captured_at(*point: int) -> Captured:
        at = dict(zip(dimensions, point, strict=True))
        return traced_at(at, resized(example, dimensions, at, leading), capture)

    for lengths in _ranges(dimensions, leading):
        if not isinstance(failure, CaptureError) and _step(lengths) not in STEPS_OF_OTHER_OPS:
            continue
        points = _points(lengths)
        try:
            least = captured_at(*points[0].values())
            if captured.masks.needed == least.masks.needed:
                _matched(captured, [least], [dimensions, points[0]], variables)  # before more are traced
            others = [captured_at(*point.values()) for point in points]
            _check_masks([captured, *others])
            traces = _matched(captured, others, [dimensions, *points], variables)
            for _ in _arguments(captured.graph, traces):
                pass  # raises where a number is no expression
            steps = [captured, *others]
            _check_comparisons(steps, traces, lengths)
            fewer = "" if failure.__traceback__ is None else str(failure)
            traced = LengthTraces(lengths, (captured, *others), traces, fewer=fewer)
        except (CaptureError, SizeError) as error:
            failure = error if failure.__traceback__ is None else failure
            nearest = error if _step(lengths) == 1 else nearest
            continue
        if leading is None:
            return traced
        try:
            one_row = tuple(captured_at(*point.values()) for point in traced.points_of_one_row)
            for step in one_row:
                _check_constants(captured, step)
            _check_one_row(one_row, steps, traces, traced.with_one_row)
        except (CaptureError, SizeError):
            return traced
        return replace(traced, one_row=one_row)
    remedy = "\nIf the model takes multiples of a number alone, give an example of two of them or more."
    raise SizeError(f"{nearest}{remedy if isinstance(nearest, CaptureError) else ''}") from nearest


def _matched(
    captured: Captured,
    others: Sequence[Captured],
    points: Sequence[Mapping[str, int]],
    variables: Sequence[str],
) -> ResizedTraces:
    """The steps at these points, of which the first is the example's, side by side.  Raises SizeError where
    they are made of other ops or constants."""
    for other in others:
        _check_constants(captured, other)
    traces = ResizedTraces(tuple(variables), tuple(tuple(point.values()) for point in points), {}, ())
    try:
        return traces.after_rewrite(captured.graph, [other.graph for other in others])
    except SizeError as error:
        raise SizeError(_branch(captured, others, points[1:]) + str(error)) from error


def _step(lengths: Sequence[NamedLength]) -> int:
    return max(each.step for each in lengths)


def resized(
    example: object, old: Mapping[str, int], new: Mapping[str, int], leading: str | None = None
) -> object:
    """The first part of an example, in each dimension that has a name.  leading: that of its rows, which come
    again where more are wanted; without a name all stay."""
    lengths = {length: new[name] for name, length in old.items() if name != leading}

    def first(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or (tensor.dim() == 1 and leading is None):
            return tensor
        rows = len(tensor) if leading is None else new[leading]
        index = tuple(slice(lengths.get(n, n)) for n in tensor.shape[1:])
        values = tensor.detach()[torch.arange(rows, device=tensor.device) % len(tensor)][:, *index]
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
    for sign, source, size in _compared(steps, traces):
        outcome = bool(SIGNS[sign](int(size), 0))
        for point, there in _outcomes(sign, size, traces.names, lengths):
            if there != outcome:
                raise SizeError(_otherwise(source, point))


def _branch(captured: Captured, others: Sequence[Captured], points: Sequence[Mapping[str, int]]) -> str:
    """Where the model's Python first decides otherwise than for the example, as a sentence; empty if it
    does not."""
    for other, point in zip(others, points, strict=True):
        for ours, theirs in zip(captured.comparisons, other.comparisons, strict=False):
            sign, source = ours.sign, ours.source
            if (sign, source) != (theirs.sign, theirs.source):
                break
            if SIGNS[sign](ours.difference, 0) != SIGNS[sign](theirs.difference, 0):
                return f"{_otherwise(source, point)} "
    return ""


def _check_one_row(
    one_row: Sequence[Captured],
    steps: Sequence[Captured],
    traces: ResizedTraces,
    lengths: Sequence[NamedLength],
) -> None:
    """Raise SizeError where the steps of one row do not tell what that of another length is: where Python
    compares there what it does not in ``steps``, or decides otherwise at some lengths than at others."""
    known = {each.source for step in steps for each in step.comparisons}
    if any(each.source not in known for step in one_row for each in step.comparisons):
        raise SizeError("The model's Python compares lengths of one row alone.")
    rows = next(each.name for each in lengths if each.leading)
    for sign, source, size in _compared(steps, traces):
        outcomes = {there for at, there in _outcomes(sign, size, traces.names, lengths) if at[rows] == 1}
        if len(outcomes) > 1:
            raise SizeError(f"{_where(source)}, and decides otherwise for other lengths of one row.")


def _otherwise(source: str, point: Mapping[str, int]) -> str:
    text = ", ".join(f"{name} {length}" for name, length in point.items())
    return f"{_where(source)}, and decides otherwise for {text} than for the example."


def _where(source: str) -> str:
    return f"The model's Python compares a length at {source}"


def _compared(steps: Sequence[Captured], traces: ResizedTraces) -> Iterator[tuple[str, str, Size]]:
    """What is compared with 0 of the lengths: by what sign, and at which line."""
    by_line: list[dict[tuple[str, str], list[Fraction]]] = []
    for step in steps:
        by_line.append({})
        for each in step.comparisons:
            by_line[-1].setdefault((each.sign, each.source), []).append(each.difference)
    decided: set[tuple[str, str, int]] = set()
    for sign, source in dict.fromkeys(key for each in by_line for key in each):
        of_each = [each.get((sign, source), []) for each in by_line]
        if len({difference for differences in of_each for difference in differences}) <= 1:
            continue  # however often: a cache that knows a size compares it once more
        if len({*map(len, of_each)}) > 1:
            raise SizeError(f"{_where(source)} more often at some lengths than at others.")
        for values in zip(*of_each, strict=True):
            scale = math.lcm(*(value.denominator for value in values))
            size = sized([int(value * scale) for value in values], traces.names, traces.points)
            if size is None:
                raise SizeError(f"{_where(source)} in a way that says nothing of lengths in between.")
            if isinstance(size, Size) and (sign, source, size) not in decided:
                decided.add((sign, source, size))
                yield sign, source, size


def _outcomes(
    sign: str, size: Size, variables: Sequence[str], lengths: Sequence[NamedLength]
) -> Iterator[tuple[dict[str, int], bool]]:
    """Evaluate a comparison of a size with 0, at lengths that programs may take.  Of several names a part of
    all lengths is tried, the ends among them."""
    for point in _tried(lengths):
        at = {variable: point[each.name] for variable, each in zip(variables, lengths, strict=True)}
        yield point, bool(SIGNS[sign](size.at(at), 0))


def _tried(lengths: Sequence[NamedLength]) -> Iterator[dict[str, int]]:
    most = MOST_TRIED if len(lengths) == 1 else round(MOST_TRIED ** (1 / len(lengths)))

    def some(least: int, longest: int, step: int) -> list[int]:
        all_of_it = range(least, longest + 1, step)
        return [*all_of_it[:: -(-len(all_of_it) // most)], longest]

    others = [each for each in lengths if not each.leading]
    for values in itertools.product(*(some(each.least, each.example, each.step) for each in others)):
        point = {each.name: value for each, value in zip(others, values, strict=True)}
        rows = next((each for each in lengths if each.leading), None)
        for number in (0,) if rows is None else some(rows.least, rows.most(lengths, point), 1):
            yield point if rows is None else {**point, rows.name: number}


def _check_constants(captured: Captured, other: Captured) -> None:
    """Raise SizeError where a tensor that the model made itself is another one at another length."""
    for name, constant in captured.constants.items():
        there = other.constants.get(name)
        if there is None or there.shape != constant.shape or digest(there) != digest(constant):
            raise SizeError(
                f"The constant {name!r}, a tensor that the model's Python makes or holds, is another one at "
                "other lengths. Compute it in the forward, with torch's functions of a length (torch.arange)."
            )


def _ranges(dimensions: Mapping[str, int], leading: str | None) -> Iterator[tuple[NamedLength, ...]]:
    """Lengths that a program may take: first the most, down to few.  Of rows any number."""
    others = {name: length for name, length in dimensions.items() if name != leading}
    for step in STEPS if others else STEPS[:1]:
        if any(length % step for length in others.values()):
            continue
        units = {name: length // step for name, length in others.items()}
        # A length of one is broadcast, which is another op; so it is of x[:, :-1] at two.
        shortest = ((2, 0.0), (4, 0.0), (2, 0.5)) if step == 1 else ((1, 0.0), (1, 0.5))
        for few, part in shortest:
            least = {name: max(few, int(n * part)) for name, n in units.items()}
            # Of fewer than three lengths beside the example's each is traced.
            if all(units[name] > least[name] for name in units):
                yield tuple(
                    NamedLength(name, length, max(2, int(length * part)), 1, leading=True)
                    if name == leading
                    else NamedLength(name, length, least[name] * step, step)
                    for name, length in dimensions.items()
                )


def _points(lengths: Sequence[NamedLength]) -> list[dict[str, int]]:
    """Lengths beside the example's: the least, the next to the example's, and some in between, as many as
    tell the terms of an expression apart; no tensor is larger than in the example.  The shortest microbatch
    has the most rows."""
    count = 3 if len(lengths) == 1 else 3 + 2 * len(lengths)
    points: list[dict[str, int]] = []
    for k in range(count):
        point: dict[str, int] = {}
        for j, each in sorted(enumerate(lengths), key=lambda pair: not pair[1].leading):
            beside = _rows_beside if each.leading and len(lengths) > 1 else _beside
            known = beside(each, _share_of_rows(lengths, point))
            # The least of all are traced together.  Each name has another order of its lengths, and the
            # second time these come in other pairs.
            turn = k * _ORDERS[j % 4] + k // 5 * j
            point[each.name] = known[turn % len(known)]
        if k == 0 and len(lengths) > 1:
            point |= {each.name: each.most(lengths, point) for each in lengths if each.leading}
        point = {each.name: point[each.name] for each in lengths}
        if point not in points:
            points.append(point)
    return points


_ORDERS = 1, 3, 2, 4  # of five lengths


def _share_of_rows(lengths: Sequence[NamedLength], point: Mapping[str, int]) -> Fraction:
    """How long a microbatch may be relative to the example, by its rows."""
    rows = next((each for each in lengths if each.name in point and each.leading), None)
    return Fraction(1) if rows is None else min(Fraction(1), Fraction(rows.example, point[rows.name]))


def _beside(length: NamedLength, share: Fraction) -> list[int]:
    if length.leading and length.example - length.least < 3:
        return _rows_beside(length, share)
    first, last = length.least // length.step, length.example // length.step
    last = max(first + 1, min(last, int(last * share) + 1))
    middle = (first + last) // 2
    quarter, more = (first + middle) // 2, (middle + last) // 2
    units = dict.fromkeys([first, last - 1, middle, quarter, more])
    return [unit * length.step for unit in units if unit < last]


def _rows_beside(rows: NamedLength, share: Fraction) -> list[int]:
    """Other numbers of rows than the example's, larger ones among them."""
    least, example = rows.least, rows.example
    some = [least, example + 1, least + 1, 2 * example + 1, example + 3, least + 3, example + 5, example + 6]
    return [n for n in dict.fromkeys(some) if n != example][:5]
