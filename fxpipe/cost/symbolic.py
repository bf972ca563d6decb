"""Costs as polynomials of the named lengths, which a plan stores, so that other sizes need no new trace.

microbatch · (sequence² / 2 - 1)  is stored as  ((1, 2, 1, 2), (-1, 1, 1, 0))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod
from typing import Any

from fxpipe.errors import SizeError
from fxpipe.schedule.costs import Costs, RenamedFields

#: A polynomial for a file, term by term: numerator, denominator, the exponent of each named length.
Terms = tuple[tuple[int, ...], ...]


def _at(terms: Terms, lengths: Sequence[Any]) -> Any:
    """The polynomial's value for lengths that are fractions or symbols; exact."""
    values = (n * prod(x**k for x, k in zip(lengths, powers, strict=True)) / d for n, d, *powers in terms)
    return sum(values, start=0 * lengths[0])


@dataclass(frozen=True)
class Rates:
    """The rates of a device: bytes per second to memory and to another rank; minimum seconds of an op and a
    message; seconds of a section beside its ops."""

    memory: float
    link: float
    launch: float
    latency: float
    stage_overhead: float = 0.0


@dataclass(frozen=True)
class Work:
    """``count`` equal ops, each with its FLOPs and bytes; ``rate``: FLOPs per second for their dtype."""

    count: int
    flops: Terms
    bytes: Terms
    rate: float


@dataclass(frozen=True)
class StageWork(RenamedFields):
    """The ops of each phase of a stage, and its bytes as in ``StageCost``."""

    forward: tuple[Work, ...]
    backward: tuple[Work, ...]
    weight: tuple[Work, ...]
    saved_activations: Terms
    saved_for_weight: Terms
    offloadable: Terms = ()
    offloadable_for_weight: Terms = ()


@dataclass(frozen=True)
class Expressions(RenamedFields):
    """One stage's costs, as sympy expressions of the named lengths: seconds of each phase, bytes as in
    ``StageCost``, FLOPs of all phases."""

    forward: Any
    backward: Any
    weight: Any
    saved_activations: Any
    saved_for_weight: Any
    flops: Any


@dataclass(frozen=True)
class PlanWork:
    """``lengths``: name -> length in the example.  ``edges``: the bytes of ``Costs.edges``, in order."""

    lengths: dict[str, int]
    stages: tuple[StageWork, ...]
    edges: tuple[Terms, ...]
    rates: Rates

    def expressions(self, stage: int) -> Expressions:
        import sympy  # here, as it takes a quarter of a second and few pipelines need it

        symbols = [sympy.Symbol(name) for name in self.lengths]
        return self._stage(self.stages[stage], symbols, sympy.Max)

    def costs(self, costs: Costs, sizes: Mapping[str, int]) -> Costs:
        """The costs at other lengths, from ``costs`` at the example's: bytes are exact, and times, analytic
        or measured, are scaled by the ratio of the analytic ones.

        Raises SizeError for an unknown name and for a length below one.
        """
        old, new = ([Fraction(n) for n in x.values()] for x in (self.lengths, self._checked(sizes)))
        stages, edges = [], []
        for cost, work in zip(costs.stages, self.stages, strict=True):
            before, after = (self._stage(work, lengths, max) for lengths in (old, new))
            times = {
                phase: getattr(cost, phase) * (getattr(after, phase) / getattr(before, phase))
                for phase in ("forward", "backward", "weight")
                if getattr(before, phase)
            }
            names = ("saved_activations", "saved_for_weight", "offloadable", "offloadable_for_weight")
            held = {name: float(_at(getattr(work, name), new)) for name in names}
            stages.append(replace(cost, **times, **held))
        for edge, terms in zip(costs.edges, self.edges, strict=True):
            moved = float(_at(terms, new))
            edges.append(replace(edge, bytes=moved, seconds=self.rates.latency + moved / self.rates.link))
        return Costs(tuple(stages), tuple(edges), costs.link)

    def _stage(self, work: StageWork, lengths: Sequence[Any], largest: Callable[..., Any]) -> Expressions:
        none = 0 * lengths[0]

        def seconds(ops: tuple[Work, ...]) -> Any:
            overhead = self.rates.stage_overhead if ops else 0
            return sum((op.count * largest(*self._bounds(op, lengths)) for op in ops), start=none + overhead)

        ops = (*work.forward, *work.backward, *work.weight)
        return Expressions(
            seconds(work.forward),
            seconds(work.backward),
            seconds(work.weight),
            _at(work.saved_activations, lengths),
            _at(work.saved_for_weight, lengths),
            sum((op.count * _at(op.flops, lengths) for op in ops), start=none),
        )

    def _bounds(self, op: Work, lengths: Sequence[Any]) -> tuple[Any, Any, float]:
        """The lower bounds of the roofline in ``cost.device``."""
        computing, moving = _at(op.flops, lengths) / op.rate, _at(op.bytes, lengths) / self.rates.memory
        return computing, moving, self.rates.launch

    def _checked(self, sizes: Mapping[str, int]) -> dict[str, int]:
        known = ", ".join(f"{name} ({length} in the example)" for name, length in self.lengths.items())
        for name, length in sizes.items():
            if name not in self.lengths:
                raise SizeError(
                    f"No dimension is called {name!r}. Known: {known}. (microbatch exists if the example has "
                    "two rows or more; name others in dimensions.)"
                )
            if not isinstance(length, int) or length < 1:
                raise SizeError(
                    f"{name} is {length!r} and must be a whole number, at least 1. Known: {known}."
                )
        return {**self.lengths, **sizes}
