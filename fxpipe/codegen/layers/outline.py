"""Analyses the runs of a section: what each period takes from outside of itself, and what it gives.

The periods of a run are calls of one function.  What all periods take alike is given to each; what a period
takes of the one before is *carried*; tensors of the rank (parameters, …), and the values that another phase
of the stage or ops before the run computed, differ from period to period.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise

from torch import fx

from fxpipe.codegen.layers.repeats import FEWEST, Run, leaves, repeats
from fxpipe.codegen.nodes import is_unpacked
from fxpipe.ir.graph import Kind, Section
from fxpipe.ir.storage import call_nodes

_OF_RANK = {Kind.PARAMETER, Kind.ONCE, Kind.BUFFER, Kind.CONSTANT, Kind.GRADIENT}
LATER = "collected"  # the list of values that are used behind their run in the same section


class Source(StrEnum):
    SHARED = "shared"  # the same node for all periods
    CARRIED = "carried"  # computed by the period before; for the first, before the run
    OF_RANK = "of the rank"  # one of the rank's tensors
    LISTED = "listed"  # a value of another phase of the stage, or of ops before the run


@dataclass(frozen=True)
class Slot:
    """A value that the periods of a run take from outside of themselves.

    ``nodes``: by period.  ``result``: of a carried one, its position in the period that computes it.
    ``container``: of a listed one, the name of its list.
    """

    source: Source
    nodes: tuple[fx.Node, ...]
    result: int = -1
    container: str = ""

    @property
    def is_local(self) -> bool:
        """Whether ops of the same section compute it, before the run."""
        return self.source is Source.LISTED and self.container == LATER

    @property
    def example(self) -> fx.Node:
        """The node in the second period, the first that all others are like."""
        return self.nodes[1]


@dataclass(frozen=True, eq=False)
class Repeated:
    """A run with its ``slots``, in order of use.

    ``given``: the lists in which values of each period travel, with ``LATER`` if they are used behind the
    run: by the position of a result, or by the slot of a carried value, which the period that takes it gives.
    ``single``: how many of these values, and of those that come from ops before the run, have lines of their
    own, since no other run takes or gives them.
    """

    nodes: Sequence[fx.Node]
    run: Run
    slots: tuple[Slot, ...]
    given: Mapping[int | Slot, frozenset[str]]
    single: int

    def period(self, number: int) -> Sequence[fx.Node]:
        begin = self.run.begin + number * self.run.period
        return self.nodes[begin : begin + self.run.period]

    @property
    def body(self) -> Sequence[fx.Node]:
        """The period that stands for all: the second, since the first takes no values of another."""
        return self.period(1)

    def values(self, of: int | Slot) -> tuple[fx.Node, ...]:
        """The nodes at a position, or those of a slot, by period."""
        if isinstance(of, Slot):
            return of.nodes
        return tuple(self.period(k)[of] for k in range(self.run.times))

    def has_alone(self, slot: Slot, number: int, giver: Repeated | None) -> bool:
        """Whether nothing else uses what a period takes there, behind the run that gives it.

        giver: asked of where it is in the same section; None if there is none.
        """
        nodes = set(self.period(number))
        return all(
            user in nodes or (slot.is_local and giver is not None and user in giver.until_end)
            for user in slot.nodes[number].users
        )

    @cached_property
    def until_end(self) -> frozenset[fx.Node]:
        """The nodes of the section up to the end of the run."""
        return frozenset(self.nodes[: self.run.end])

    @cached_property
    def carried(self) -> tuple[Slot, ...]:
        return tuple(slot for slot in self.slots if slot.source is Source.CARRIED)

    @property
    def saved(self) -> int:
        """About how many lines the program is shorter by."""
        return (self.run.times - 1) * self.run.period - self.run.times * self.single

    def is_moved(self, slot: Slot) -> bool:
        """Whether a carried value is used by the next period alone, which may then free it."""
        return not self.given[slot.result] and slot not in self.given


class Analysis:
    """Analyses one section.

    ``lists_in`` and ``lists_out``: the lists of its signature, by value.  ``results``: what it returns beside
    lists.
    """

    def __init__(
        self,
        section: Section,
        lists_in: Mapping[str, str],
        lists_out: Mapping[str, tuple[str, ...]],
        results: AbstractSet[fx.Node],
    ) -> None:
        self.nodes = call_nodes(section.graph)
        self.index = {node: k for k, node in enumerate(self.nodes)}
        self.lists_in, self.lists_out, self.results = lists_in, lists_out, results

    def runs(self) -> list[Repeated]:
        return [self._repeated(run) for run in repeats(self.nodes, self._times)]  # type: ignore[misc]

    def _times(self, run: Run) -> int:
        """The periods that can be written as calls of one function."""
        while run.times > 1:  # the first periods alone, as long as the last of them is unlike the others
            outlined = self._repeated(run)
            if isinstance(outlined, Repeated):
                return run.times if outlined.saved >= FEWEST else 0
            run = run._replace(times=outlined)
        return 0

    def _repeated(self, run: Run) -> Repeated | int:
        """The run, or the number of its periods that are alike."""
        slots: dict[tuple[fx.Node, ...], Slot] = {}
        for position in range(run.period):
            alike = [self.nodes[run.begin + k * run.period + position] for k in range(run.times)]
            rows = [[x for x in leaves(node) if isinstance(x, fx.Node)] for node in alike]
            for nodes in zip(*rows, strict=True):
                slot = self._slot(run, nodes)
                if isinstance(slot, int):
                    return slot
                if slot is not None:
                    slots[nodes] = slot
        if len({slot.example for slot in slots.values()}) < len(slots):
            return 0  # two that differ in the first period alone
        carried = {slot.result: slot for slot in slots.values() if slot.source is Source.CARRIED}
        uses_by_value: dict[int | Slot, frozenset[str]] = {}
        for position in range(run.period):
            uses = [self._uses(run, k, position) for k in range(run.times)]
            if position in carried:
                *uses, last = uses  # there behind the run, for any use
            unlike = next((k for k, use in enumerate(uses) if use is None or use != uses[0]), None)
            if unlike is not None:
                return unlike
            uses_by_value[position] = uses[0] or frozenset()
            if position in carried and uses_by_value[position]:
                slot, lists = carried[position], uses_by_value[position]
                # What the value from before the run is used for behind it.
                first = {*self.lists_out.get(slot.nodes[0].name, ())}
                if lists <= first | ({LATER} if self._behind(run, slot.nodes[0]) else set()):
                    uses_by_value[position] -= lists
                    uses_by_value |= {slot: lists}
                elif last is None or not lists <= last:
                    return run.times - 1
        outlined = Repeated(self.nodes, run, tuple(slots.values()), uses_by_value, 0)
        later = [value for value, uses in uses_by_value.items() if LATER in uses]
        places = [[self._behind(run, node) for node in outlined.values(value)] for value in later]
        places += [[[self.index[node]] for node in slot.nodes] for slot in outlined.slots if slot.is_local]
        return replace(outlined, single=sum(not _advance(by_period) for by_period in places))

    def _slot(self, run: Run, nodes: tuple[fx.Node, ...]) -> Slot | int | None:
        """A value by period; None if each period computes its own; the number of periods that are alike."""
        places = [self._place(run, node) for node in nodes]
        period, result = places[1]
        if period == 1 or places[0][0] == 0:
            return next((k for k, (giver, at) in enumerate(places) if (giver - k, at) != (0, result)), None)
        if any(map(is_unpacked, nodes)):
            return 0  # the variables of its items are those of the line that computes it
        if all(node is nodes[0] for node in nodes):
            return Slot(Source.SHARED, nodes)
        if period == 0:
            later = list(enumerate(places))[1:]
            alike = next((k for k, (giver, at) in later if (giver - k, at) != (-1, result)), None)
            return Slot(Source.CARRIED, nodes, result) if alike is None else alike
        kinds = [
            self._kind(node) if giver == -2 else None for node, (giver, _) in zip(nodes, places, strict=True)
        ]
        alike = next((k for k, kind in enumerate(kinds) if kind is None or kind != kinds[0]), None)
        if alike is not None:
            return alike or next(k for k, node in enumerate(nodes) if node is not nodes[0])
        if isinstance(kinds[0], Kind):
            return Slot(Source.OF_RANK, nodes)
        return Slot(Source.LISTED, nodes, container=kinds[0] or "")

    def _place(self, run: Run, node: fx.Node) -> tuple[int, int]:
        """The period that computes a node, and its position there; -2 for a node outside of the run."""
        where = self.index.get(node, -1) - run.begin
        if not 0 <= where < run.period * run.times:
            return -2, 0
        return divmod(where, run.period)

    def _kind(self, node: fx.Node) -> Kind | str | None:
        """Say of a value from outside of the run the kind of a tensor of the rank, a list's name, or None."""
        if node in self.index:
            return LATER
        if node.name in self.lists_in:
            return self.lists_in[node.name]
        source = node.meta.get("input")
        return source.kind if source is not None and source.kind in _OF_RANK else None

    def _uses(self, run: Run, period: int, position: int) -> frozenset[str] | None:
        """The uses of a period's value outside of it and of the next one; None if there is one in another."""
        node = self.nodes[run.begin + period * run.period + position]
        uses = set(self.lists_out.get(node.name, ()))
        if node in self.results:
            uses.add(LATER)
        for user in node.users:
            if user.op == "output":
                continue
            where, _ = self._place(run, user)
            if where == -2:
                uses.add(LATER)
            elif where not in (period, period + 1):
                return None
        return None if uses and is_unpacked(node) else frozenset(uses)

    def _behind(self, run: Run, node: fx.Node) -> list[int]:
        """The positions of the ops behind a run that use a value."""
        return sorted(where for user in node.users if (where := self.index.get(user, -1)) >= run.end)


def _advance(rows: Sequence[Sequence[int]]) -> bool:
    """Whether positions by period advance evenly, but for those at one end, as those of another run do."""
    if len({len(row) for row in rows}) > 1 or not rows[0]:
        return False
    steps = Counter(b - a for row, other in pairwise(rows) for a, b in zip(row, other, strict=True))
    return steps.total() - max(steps.values()) <= len(rows[0])
