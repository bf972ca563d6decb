"""Numbers of a graph that are expressions of the named lengths of a microbatch.

    reshape(x, [2, 512, 64])  ──►  reshape(x, [2, sequence, 64])

A number is known at a few *points*, each a length for every name; it is the polynomial with these values, if
one of few terms has them all.  There are more points than coefficients, so some of them confirm the rest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache

from torch import fx

from fxpipe.plan.field_types import Terms, value_at

#: Most terms of an expression, and its largest denominator: few points have to tell it from other functions.
MOST_TERMS, MOST_DENOMINATOR = 3, 2


class Size(int):
    """A number of an op's arguments: for passes and for torch that of the example; as text the expression.

    ``names``: of the lengths.  ``terms``: the polynomial.  Two of them are equal if their expressions are; a
    plain number may equal both, as the example's value.
    """

    names: tuple[str, ...]
    terms: Terms

    def __new__(cls, value: int, names: Sequence[str], terms: Terms) -> Size:
        size = super().__new__(cls, value)
        size.names, size.terms = tuple(names), terms
        return size

    def __repr__(self) -> str:
        scale = math.lcm(*(denominator for _, denominator, *_ in self.terms))
        rows = [(n * scale // d, powers) for n, d, *powers in self.terms]
        # What is subtracted stands behind the rest.
        rows.sort(key=lambda row: (row[0] < 0, [-power for power in row[1]]))
        text = ""
        for number, powers in rows:
            factors = [name for name, power in zip(self.names, powers, strict=True) for _ in range(power)]
            if abs(number) != 1 or not factors:
                factors = [str(abs(number)), *factors]
            sign = ("-" if number < 0 else "") if not text else (" - " if number < 0 else " + ")
            text += sign + " * ".join(factors)
        return text if scale == 1 else f"({text}) // {scale}" if len(rows) > 1 else f"{text} // {scale}"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Size):
            return (self.names, self.terms) == (other.names, other.terms)
        return int(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__

    def __reduce__(self) -> tuple[object, ...]:
        return Size, (int(self), self.names, self.terms)

    @property
    def used(self) -> frozenset[str]:
        """The names that stand in the expression."""
        return frozenset(name for k, name in enumerate(self.names) if any(term[2 + k] for term in self.terms))

    def at(self, lengths: Mapping[str, int]) -> int:
        """The number for other lengths.  Raises ValueError where it is no whole one."""
        value = value_at(self.terms, [Fraction(lengths[name]) for name in self.names])
        if value != int(value):
            raise ValueError(f"{self} is {value} for {dict(lengths)}")
        return int(value)


class Share(float):
    """1 / microbatches, for the number of them that a step has: for passes and for torch that of the compiled
    step, as text the expression."""

    names = ("microbatches",)
    used = frozenset(names)

    def __repr__(self) -> str:
        return "1 / microbatches"


def sized(values: Sequence[int], names: Sequence[str], points: Sequence[Sequence[int]]) -> int | None:
    """The number that has these values at the points, the first that of the example; None if no polynomial of
    few terms has them."""
    if len(set(values)) == 1:
        return values[0]
    terms = _terms(tuple(values), tuple(map(tuple, points)))
    return None if terms is None else Size(values[0], names, terms)


@lru_cache(maxsize=4096)
def _terms(values: tuple[int, ...], points: tuple[tuple[int, ...], ...]) -> Terms | None:
    """Most numbers of a step are one of a few functions of its lengths: each is found once."""
    # Of several lengths also products of three, as rows · sequence², in expressions of one term or two.
    degrees = range(4 if len(points[0]) > 1 else 3)
    powers = [e for e in itertools.product(degrees, repeat=len(points[0])) if sum(e) in degrees]
    powers.sort(key=lambda e: (sum(e), [-x for x in e]))
    columns = {e: [math.prod(map(pow, point, e)) for point in points] for e in powers}
    for terms in range(1, MOST_TERMS + 1):
        able = powers if terms < MOST_TERMS else [e for e in powers if sum(e) <= 2]
        for chosen in itertools.combinations(able, terms):
            numbers = solved([columns[e] for e in chosen], values)
            largest = max((x.denominator for x in numbers or ()), default=0)
            if numbers is not None and (terms == 1 or largest <= MOST_DENOMINATOR):
                return tuple((x.numerator, x.denominator, *e) for x, e in zip(numbers, chosen, strict=True))
    return None


def solved(columns: Sequence[Sequence[int]], values: Sequence[int | Fraction]) -> list[Fraction] | None:
    """The coefficients, none of them 0, with which the columns add up to the values at all points; None also
    where the points do not tell the columns apart."""
    rows = [[*map(Fraction, row), Fraction(v)] for *row, v in zip(*columns, values, strict=True)]
    for k in range(len(columns)):
        pivot = next((row for row in rows[k:] if row[k]), None)
        if pivot is None:
            return None
        rows.remove(pivot)
        pivot = [x / pivot[k] for x in pivot]
        rows = [[x - row[k] * p for x, p in zip(row, pivot, strict=True)] for row in rows]
        rows.insert(k, pivot)
    solution = [rows[k][-1] for k in range(len(columns))]
    is_exact = not any(row[-1] for row in rows[len(columns) :])
    return solution if is_exact and all(solution) and len(rows) > len(columns) else None


def size_names(nodes: Iterable[fx.Node]) -> list[str]:
    """The names of the lengths, and of the number of microbatches, on which arguments of the nodes depend, in
    their order."""
    used: set[str] = set()
    names: dict[str, None] = {}
    for node in nodes:
        for size in sizes_in([*node.args, *node.kwargs.values()]):
            names |= dict.fromkeys(size.names)
            used |= size.used
    return sorted((name for name in names if name in used), key=lambda name: name in Share.used)


def sizes_in(argument: object) -> Iterator[Size | Share]:
    """The expressions in an op's arguments."""
    if isinstance(argument, Size | Share):
        yield argument
    elif isinstance(argument, list | tuple):
        for each in argument:
            yield from sizes_in(each)


def monomials(count: int, terms: int) -> list[tuple[int, ...]]:
    """The exponents of the monomials of ``count`` lengths that a size of one term or two may have."""
    # Fewer for sums of two terms of many lengths, whose pairs would be too many to try.
    degree = max(3, count) if terms == 1 or count <= 3 else 2
    return [e for e in itertools.product(range(degree + 1), repeat=count) if sum(e) <= degree]


def without_names(graph: fx.Graph) -> None:
    """Let a graph compute with the example's lengths alone."""
    for node in graph.nodes:
        if size_names([node]):
            node.args, node.kwargs = _plain(node.args), _plain(dict(node.kwargs))


def _plain(value: object) -> object:
    match value:
        case Size():
            return int(value)
        case Share():
            return float(value)
        case dict():
            return {key: _plain(each) for key, each in value.items()}
        case list() | tuple():
            items = [_plain(each) for each in value]
            return items if isinstance(value, list) else tuple(items)
    return value
