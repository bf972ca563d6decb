"""Costs as polynomials of the named lengths, which a plan stores, so that other sizes need no new trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Annotated

from fxpipe.errors import SizeError
from fxpipe.plan.curve import Amount, Curve
from fxpipe.plan.field_types import MOST_POWER, Terms, value_at
from fxpipe.schedule.costs import TIMES, Costs, Edge, StageBytes
from fxpipe.strict import NonNegative, at_least, between, entries

MOST_LENGTH, MOST_CURVES = 1 << 31, 256
#: The kind of an op that only returns memory of its argument, and of one that lanes run together.
VIEW, BETWEEN_LANES = "view", "between lanes"


Rate = Annotated[float, at_least(1)]
Length = Annotated[int, between(1, MOST_LENGTH)]


def _held(work: StageWork, lengths: Sequence[Amount]) -> dict[str, float]:
    return {name: float(value_at(getattr(work, name), lengths)) for name in StageBytes._fields}


@dataclass(frozen=True)
class Rates:
    """The rates of a device: bytes per second to memory and to another rank; seconds of an op beside its
    work, and the least of a message; seconds of a section beside its ops.

    ``inter_link``, ``inter_latency``: of a message to a rank of another machine.  ``curves``: of a calibrated
    device, as ``cost.devices.device.Device`` has them.
    """

    memory: Rate
    link: Rate
    launch: NonNegative
    latency: NonNegative
    stage_overhead: NonNegative
    inter_link: Rate
    inter_latency: NonNegative
    curves: Annotated[dict[str, Curve], entries(0, MOST_CURVES)] = field(default_factory=dict)

    def with_message(self, edge: Edge, moved: float) -> Edge:
        """The edge with a message of so many bytes."""
        seconds, inter = self.latency + moved / self.link, self.inter_latency + moved / self.inter_link
        return replace(edge, bytes=moved, seconds=seconds, inter_seconds=inter)


@dataclass(frozen=True)
class Work:
    """``count`` equal ops, each with its FLOPs and bytes; ``rate``: FLOPs per second for their arithmetic.
    ``kind``: of op, as ``cost.kinds`` has it.  ``bytes``: of an op between lanes those that a lane sends.
    ``packed``: attention of packed documents, with the FLOPs of one that has all tokens."""

    count: Length
    flops: Terms
    bytes: Terms
    rate: Rate
    arithmetic: str
    kind: str = ""
    packed: bool = False

    def seconds(
        self, lengths: Sequence[Amount], rates: Rates, largest: Callable[..., Amount], share: float = 1.0
    ) -> Amount:
        """The seconds of one of the ops.  share: of the FLOPs of packed documents."""
        flops, moved = value_at(self.flops, lengths), value_at(self.bytes, lengths)
        flops = flops * share if self.packed and share < 1 else flops
        if self.kind == BETWEEN_LANES:
            return rates.latency + moved / rates.link
        roofline = self.rate, rates.memory, rates.launch
        return op_seconds(flops, moved, self.arithmetic, self.kind, roofline, rates.curves, largest)


def op_seconds(
    flops: Amount,
    bytes: Amount,
    arithmetic: str,
    kind: str,
    roofline: tuple[float, float, float],
    curves: Mapping[str, Curve],
    largest: Callable[..., Amount] = max,
) -> Amount:
    """The seconds of an op.  roofline: FLOPs a second, bytes a second, and the seconds beside its work.

    With the curve of its kind: what that says, and of an op that computes no less than its bytes take.  A
    view without a curve takes no time, any other op that of the roofline.
    """
    rate, memory, launch = roofline
    # Ops that compute have a curve for each arithmetic, by FLOPs.
    if (curve := curves.get(f"{kind} {arithmetic}")) is not None:
        return largest(curve.seconds(flops, largest), bytes / memory)
    if (curve := curves.get(kind)) is not None:
        return curve.seconds(bytes, largest)
    return 0.0 if kind == VIEW else launch + largest(flops / rate, bytes / memory)


@dataclass(frozen=True)
class StageWork:
    """The ops of each phase of a stage, and its bytes as in ``StageCost``."""

    forward: tuple[Work, ...]
    backward: tuple[Work, ...]
    weight: tuple[Work, ...]
    saved_activations: Terms
    saved_for_weight: Terms
    offloadable: Terms = ()
    offloadable_for_weight: Terms = ()


@dataclass(frozen=True)
class Expressions:
    """One stage's costs, as sympy expressions of the named lengths: seconds of each phase, bytes as in
    ``StageCost``, FLOPs of all phases."""

    forward: Amount
    backward: Amount
    weight: Amount
    saved_activations: Amount
    saved_for_weight: Amount
    flops: Amount


@dataclass(frozen=True)
class PlanWork:
    """The work of a plan at any size.  ``lengths``: name -> length in the example.  ``edges``: the bytes of
    ``Costs.edges``, in order.

    ``rates``: of rank 0's device.  ``stage_rates``: of the device of each stage; empty if all are alike.
    """

    lengths: Annotated[dict[str, Length], entries(1, MOST_POWER)]
    stages: tuple[StageWork, ...]
    edges: tuple[Terms, ...]
    rates: Rates
    stage_rates: tuple[Rates, ...] = ()

    def analytic(self, costs: Costs, sizes: Mapping[str, int]) -> Costs:
        """The analytic costs at these lengths; ``costs`` are those at the example's, of any device.

        Raises SizeError as ``costs`` does.
        """
        lengths = [Fraction(n) for n in lengths_at(self.lengths, sizes).values()]
        stages = []
        for stage, (cost, work) in enumerate(zip(costs.stages, self.stages, strict=True)):
            seconds = self.stage(stage, lengths, max)
            times = {phase: float(getattr(seconds, phase)) for phase in TIMES.values()}
            stages.append(replace(cost, **times, **_held(work, lengths)))
        return replace(costs, stages=tuple(stages), edges=self._edges(costs, lengths))

    @property
    def has_packed(self) -> bool:
        """Whether it has attention of packed documents."""
        stages = ((*stage.forward, *stage.backward, *stage.weight) for stage in self.stages)
        return any(op.packed for ops in stages for op in ops)

    def costs(self, costs: Costs, sizes: Mapping[str, int], share: float = 1.0) -> Costs:
        """The costs at other lengths, from ``costs`` at the example's: bytes are exact, and times, analytic
        or measured, are scaled by the ratio of the analytic ones.

        share: the squares of the lengths of packed documents, relative to that of all tokens.
        Raises SizeError for an unknown name and for a length below one.
        """
        # As fractions, since bytes are to be exact.
        old, new = (
            [Fraction(n) for n in x.values()] for x in (self.lengths, lengths_at(self.lengths, sizes))
        )
        stages = []
        for stage, (cost, work) in enumerate(zip(costs.stages, self.stages, strict=True)):
            before, after = self.stage(stage, old, max), self.stage(stage, new, max, share)
            times = {
                phase: getattr(cost, phase) * (getattr(after, phase) / getattr(before, phase))
                for phase in TIMES.values()
                # A phase without ops takes no time at any size.
                if getattr(before, phase)
            }
            stages.append(replace(cost, **times, **_held(work, new)))
        return replace(costs, stages=tuple(stages), edges=self._edges(costs, new))

    def _edges(self, costs: Costs, lengths: Sequence[Fraction]) -> tuple[Edge, ...]:
        edges = []
        # By the slower of both ends, as a message needs both.
        for edge, terms in zip(costs.edges, self.edges, strict=True):
            moved = float(value_at(terms, lengths))
            ends = [self.rates_of(end.stage).with_message(edge, moved) for end in (edge.source, edge.target)]
            inter = [end.inter_seconds for end in ends if end.inter_seconds is not None]
            slower = max(end.seconds for end in ends)
            other = replace(ends[0], seconds=slower, inter_seconds=max(inter, default=None))
            if edge.exchange:
                # Within a rank, where lanes exchange some of it and hold what they give until all is there:
                # both in proportion to what the edge carries.
                before = float(value_at(terms, [Fraction(n) for n in self.lengths.values()]))
                ratio = moved / before if before else 1.0
                other = replace(other, bytes=ratio * edge.bytes, exchange=ratio * edge.exchange)
            edges.append(other)
        return tuple(edges)

    def rates_of(self, stage: int) -> Rates:
        return self.stage_rates[stage] if self.stage_rates else self.rates

    def stage(
        self, stage: int, lengths: Sequence[Amount], largest: Callable[..., Amount], share: float = 1.0
    ) -> Expressions:
        none, work, rates = 0 * lengths[0], self.stages[stage], self.rates_of(stage)

        def seconds(ops: tuple[Work, ...]) -> Amount:
            # A phase without ops is no section.
            overhead = rates.stage_overhead if ops else 0
            times = (op.count * op.seconds(lengths, rates, largest, share) for op in ops)
            return sum(times, start=none + overhead)

        ops = (*work.forward, *work.backward, *work.weight)
        return Expressions(
            seconds(work.forward),
            seconds(work.backward),
            seconds(work.weight),
            value_at(work.saved_activations, lengths),
            value_at(work.saved_for_weight, lengths),
            sum((op.count * value_at(op.flops, lengths) for op in ops), start=none),
        )


def lengths_at(lengths: Mapping[str, int], sizes: Mapping[str, int]) -> dict[str, int]:
    """The lengths of all named dimensions, those of ``sizes`` in place of the example's.

    Raises SizeError for an unknown name and for a length below one.
    """
    names = ", ".join(f"{name} ({length} in the example)" for name, length in lengths.items())
    for name, length in sizes.items():
        if name not in lengths:
            raise SizeError(
                f"No dimension is called {name!r}. Known: {names}. (microbatch exists if the example has "
                "two rows or more; name others in dimensions.)"
            )
        if not isinstance(length, int) or length < 1:
            raise SizeError(f"{name} is {length!r} and must be a whole number, at least 1. Known: {names}.")
    return {**lengths, **sizes}
