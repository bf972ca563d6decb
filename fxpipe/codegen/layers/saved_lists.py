"""The lists in which values pass between two phases of a stage, where one phase repeats.

What a period of a run gives for a list is one *record*, a list of its own; the records of a run are a
*stack*.  A run that takes values takes a record a period.  Where the periods of both agree, the receiver
takes the stack as it is; other records are unpacked, and made anew.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from fxpipe.codegen.layers.outline import Repeated, Slot, Source


@dataclass(frozen=True, eq=False)
class Stack:
    """``values``: those of a record, as in ``run.given``."""

    run: Repeated
    values: tuple[int | Slot, ...]

    @cached_property
    def records(self) -> list[tuple[str, ...]]:
        """The names of the values, by period."""
        return list(zip(*([n.name for n in self.run.values(of)] for of in self.values), strict=True))


Layout = tuple["str | Stack", ...]
"""The entries of a list: values by name, and stacks."""


@dataclass(frozen=True, eq=False)
class Taken:
    """What the periods of a run take from a list, one record each.

    ``slots``: in the order of a record.  ``stack``: has the records of the periods ``first`` to ``last``, in
    their order if ``ascending``.
    """

    run: Repeated
    container: str
    slots: tuple[Slot, ...]
    stack: Stack | None = None
    first: int = 0
    last: int = -1
    ascending: bool = False

    def record(self, period: int) -> tuple[str, ...]:
        return tuple(slot.nodes[period].name for slot in self.slots)


def layout(
    values: Sequence[str], container: str, runs: Iterable[Repeated], takers: Iterable[Repeated]
) -> Layout:
    """The entries of a list.  ``runs``: of the section that gives it; ``takers``: of that which takes it."""
    runs = [*runs]
    givers = {
        node.name: run
        for run in runs
        for value, containers in run.given.items()
        if container in containers
        for node in run.values(value)
    }
    takes: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for number, taker in enumerate(takers):
        for slot in taker.slots:
            for period, node in enumerate(slot.nodes):
                if slot.source is Source.LISTED and slot.container == container:
                    alone = taker.has_alone(slot, period, givers.get(node.name))
                    # What something else uses as well counts twice: its record is not popped by one taker.
                    takes[node.name] += [(number, period)] * (1 if alone else 2)
    stacks: list[Stack] = []
    for run in runs:
        together: defaultdict[object, list[int | Slot]] = defaultdict(list)
        for value, containers in run.given.items():
            if container in containers:
                together[_relation([takes[node.name] for node in run.values(value)])].append(value)
        stacks += [Stack(run, tuple(values)) for values in together.values()]
    stacked = {name for stack in stacks for record in stack.records for name in record}
    return (*(name for name in values if name not in stacked), *stacks)


def _relation(takes: list[list[tuple[int, int]]]) -> object:
    """How the periods that take a value, by the period that gives it, follow from that."""
    pairs = [(k, *each[0]) for k, each in enumerate(takes) if len(each) == 1]
    if not pairs or any(len(each) > 1 for each in takes) or len({taker for _, taker, _ in pairs}) > 1:
        return None
    # The taker runs through the periods as the giver does (-1), or from the last one on, as a backward (1).
    for sign in (-1, 1):
        if len({period + sign * k for k, _, period in pairs}) == 1:
            return pairs[0][1], sign, pairs[0][2] + sign * pairs[0][0]
    return None


def taken(run: Repeated, layouts: Mapping[str, Layout], others: AbstractSet[Stack]) -> tuple[Taken, ...]:
    """The records that a run takes.

    layouts: of the lists that its section takes.  others: the stacks that other runs take as they are.
    """
    stacks = (entry for entries in layouts.values() for entry in entries if isinstance(entry, Stack))
    entries = {name: stack for stack in stacks for record in stack.records for name in record}
    together: defaultdict[tuple[str, Stack | None], list[Slot]] = defaultdict(list)
    for slot in run.slots:
        if slot.source is Source.LISTED:
            counts = Counter(entries.get(node.name) for node in slot.nodes)
            together[slot.container, counts.most_common(1)[0][0]].append(slot)
    return tuple(
        _taken(run, name, None if stack in others else stack, tuple(slots))
        for (name, stack), slots in together.items()
    )


def _taken(run: Repeated, container: str, stack: Stack | None, slots: tuple[Slot, ...]) -> Taken:
    """Take the slots with the stack, if it has the records of consecutive periods."""
    built = Taken(run, container, slots)
    if stack is None:
        return built
    numbers = {record: k for k, record in enumerate(map(frozenset, stack.records))}
    places = [numbers.get(frozenset(built.record(k))) for k in range(run.run.times)]
    have = [k for k, number in enumerate(places) if number is not None]
    if not have or have != list(range(have[0], have[-1] + 1)):
        return built
    if not all(run.has_alone(slot, k, stack.run) for slot in slots for k in have):
        return built
    of_stack = [number for number in places if number is not None]
    steps = {b - a for a, b in pairwise(of_stack)} or {-1}
    flat = {name for record in stack.records for name in record}
    if steps not in ({1}, {-1}) or any(
        not flat.isdisjoint(built.record(k)) for k, number in enumerate(places) if number is None
    ):
        return built
    order = {name: j for j, name in enumerate(stack.records[of_stack[0]])}
    ordered = tuple(sorted(slots, key=lambda slot: order[slot.nodes[have[0]].name]))
    direct = Taken(run, container, ordered, stack, have[0], have[-1], steps == {1})
    agree = all(direct.record(k) == stack.records[number] for k, number in zip(have, of_stack, strict=True))
    return direct if agree else built
