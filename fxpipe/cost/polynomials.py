"""Sizes as polynomials of the named lengths, read from a few captures of the same step.

A size is one number in each capture.  It becomes the simplest polynomial with these values: one term
(``32·microbatch·sequence``), else a sum of two (``sequence - 1``, ``source + target``).
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import torch
from torch import fx

from fxpipe.errors import SizeError
from fxpipe.ir.compat import pytree
from fxpipe.ir.graph import Origin
from fxpipe.ir.resized import ResizedTraces
from fxpipe.ir.size import monomials, solved
from fxpipe.ir.storage import tensors
from fxpipe.plan.field_types import Terms

Polynomial = Any  #: an element of a sympy polynomial ring, or a whole number
Numbers = tuple[int | Fraction, ...]  #: one a point


class Shape(tuple[Polynomial, ...]):
    """A shape that the formulas of ``torch.utils.flop_counter`` take in place of a tensor."""

    @property
    def shape(self) -> Shape:
        return self


class Sizes:
    """Shapes and bytes, as polynomials, of the values of a graph that passes have rewritten.

    Raises SizeError for a size that no polynomial explains, naming op, module path and source line.
    """

    def __init__(self, graph: fx.Graph, resized: ResizedTraces):
        # Imported here, as it takes a quarter of a second and few pipelines need it.
        from sympy import QQ, Symbol
        from sympy.polys.rings import ring

        self._points = resized.points
        self._ring = ring([Symbol(name) for name in resized.names], QQ)[0]
        self._monomials = [
            {
                e: tuple(math.prod(map(pow, point, e)) for point in resized.points)
                for e in monomials(len(resized.names), terms)
            }
            for terms in (1, 2)
        ]
        self._read: dict[Numbers, Polynomial | None] = {}
        self._resized_values = resized.with_values_of(graph).resized_values

    def shapes(self, node: fx.Node) -> object:
        """The node's value, with a Shape for each tensor."""

        def shape(tensor: torch.Tensor) -> Shape:
            lengths = zip(*(t.shape for t in self._resized_values[tensor]), strict=True)
            return Shape(self._polynomial(n, node) for n in lengths)

        return pytree.tree_map_only(torch.Tensor, shape, node.meta.get("val"))

    def bytes(self, node: fx.Node) -> Polynomial:
        """The bytes of a node's value (``node_bytes``) for any lengths."""
        return sum(self._span(self._resized_values[t], node) * t.element_size() for t in tensors(node))

    def terms(self, polynomial: Polynomial) -> Terms:
        terms = self._ring(polynomial).terms()
        return tuple((int(c.numerator), int(c.denominator), *powers) for powers, c in terms)

    def _span(self, like: tuple[torch.Tensor, ...], node: fx.Node) -> Polynomial:
        """The elements that a tensor spans (``storage_bytes``).  Each stride is a polynomial times the one
        below it, or one of its own: that of a part of rows which are read in another width."""
        if any(t.numel() == 0 for t in like):
            return 0
        last = like[-1]
        wide = [d for d in range(last.dim()) if any(t.shape[d] > 1 and t.stride(d) for t in like)]
        total, step, below = 1, 1, [1] * len(like)
        for d in sorted(wide, key=last.stride):
            strides = [t.stride(d) for t in like]
            ratio = self._fitted(tuple(map(Fraction, strides, below)))
            step = self._polynomial(tuple(strides), node) if ratio is None else step * ratio
            total += (self._polynomial(tuple(t.shape[d] for t in like), node) - 1) * step
            below = strides
        return total

    def _fitted(self, values: Numbers) -> Polynomial | None:
        if values not in self._read:
            self._read[values] = self._explained(values)
        return self._read[values]

    def _polynomial(self, values: Numbers, node: fx.Node) -> Polynomial:
        polynomial = self._fitted(values)
        if polynomial is None:
            origin = node.meta.get("origin", Origin())
            values_at = " and ".join(f"{v} at {p}" for v, p in zip(values, self._points, strict=True))
            raise SizeError(
                f"The step is known at the example's sizes alone: {node.target}, in "
                f"{origin.module} ({origin.source}), has a size that is no simple polynomial of "
                f"{', '.join(map(str, self._ring.symbols))}: {values_at}. Leave dimensions out."
            )
        return polynomial

    def _explained(self, values: Numbers) -> Polynomial | None:
        """The polynomial with the fewest terms, and among those the one with the simplest numbers."""
        if len(set(values)) == 1 and values[0] == int(values[0]):
            return int(values[0])
        # Few terms first: with enough of them, any numbers have a polynomial.
        for terms, monomials_at in enumerate(self._monomials, start=1):
            candidates = []
            for powers in itertools.combinations(monomials_at, terms):
                coefficients = solved([monomials_at[e] for e in powers], values)
                if coefficients is not None:
                    candidates.append(dict(zip(powers, coefficients, strict=True)))
            if candidates:
                # Of several that fit all points, the plain one is what the model's code says.
                simplest = min(candidates, key=_complexity)
                rational = self._ring.domain
                return self._ring.from_dict(
                    {e: rational(c.numerator, c.denominator) for e, c in simplest.items()}
                )
        return None


def _complexity(polynomial: dict[tuple[int, ...], Fraction]) -> int:
    """Degrees plus digits; a term that shrinks when the lengths grow counts as less simple."""
    far = 8 if polynomial[max(polynomial, key=sum)] < 0 else 0
    digits = (abs(c.numerator).bit_length() + c.denominator.bit_length() for c in polynomial.values())
    return sum(map(sum, polynomial)) + sum(digits) + far
