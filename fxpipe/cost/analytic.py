"""What sections cost: the bridge from the coloured graph to the scheduler."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from fxpipe.capture.resized import Samples
from fxpipe.cost.device import Device
from fxpipe.cost.nodes import bytes_moved, dtype_of, is_free, node_cost, node_flops
from fxpipe.cost.polynomials import Polynomial, Sizes, Terms
from fxpipe.cost.symbolic import PlanWork, Rates, StageWork, Work
from fxpipe.ir.graph import Colour, Kind, Phase, Section
from fxpipe.ir.liveness import may_leave
from fxpipe.ir.sections import Message
from fxpipe.ir.storage import call_nodes, node_bytes, root_within
from fxpipe.schedule.costs import Costs, Edge, StageCost


@dataclass(frozen=True, eq=False)
class Ledger:
    """Which nodes count where.  ``ops``: those that a section runs.  ``saved``, ``kept``: per stage, the
    owners of the storages that are live from F to B and from B to W.  ``sent``: per message, those that it
    carries.  ``away``: per stage, those that may leave the rank until B, and until W.

    What two stages of one rank both save, or both keep, counts for the first of them, which holds it the
    longest.
    """

    ops: defaultdict[Colour, list[fx.Node]]
    saved: tuple[set[fx.Node], ...]
    kept: tuple[set[fx.Node], ...]
    sent: tuple[set[fx.Node], ...]
    away: tuple[dict[Phase, list[fx.Node]], ...]
    messages: tuple[Message, ...]

    def held(self, stage: int) -> tuple[Iterable[fx.Node], ...]:
        """What counts for the bytes of a ``StageCost``, in their order."""
        away = self.away[stage]
        return self.saved[stage], self.kept[stage], away[Phase.B], away[Phase.W]


def ledger(
    graph: fx.Graph,
    sections: tuple[Section, ...],
    messages: tuple[Message, ...],
    placement: tuple[int, ...],
) -> Ledger:
    ops: defaultdict[Colour, list[fx.Node]] = defaultdict(list)
    nodes = {n.name: n for n in call_nodes(graph)}
    for node in nodes.values():
        ops[node.meta["colour"]].append(node)
    all_saved, all_kept, sent = [], [], []
    # Per rank, of the storages made there, those that its stages save and keep.
    owned: dict[int, set[fx.Node]] = defaultdict(set)
    counted: dict[int, set[fx.Node]] = defaultdict(set)
    for stage in sorted({s.stage for s in sections}):
        rank = placement[stage]
        saved, kept = _held(nodes, [s for s in sections if s.stage == stage])
        all_saved.append(saved - owned[rank])
        all_kept.append(kept - counted[rank])
        for held, known in ((saved, owned), (kept, counted)):
            known[rank] |= {n for n in held if placement[n.meta["colour"].stage] == rank}
    for message in messages:
        values = {nodes[name] for name in message.names}
        rank = placement[message.source.stage]
        sent.append(values - owned[rank] if rank == placement[message.target.stage] else values)
    away = may_leave(list(nodes.values()), all_saved, placement)
    return Ledger(ops, tuple(all_saved), tuple(all_kept), tuple(sent), away, messages)


def analytic_costs(entries: Ledger, device: Device) -> Costs:
    """Seconds and bytes of every section and message, from shapes and the device's description."""

    def seconds(stage: int, phase: Phase) -> float:
        return sum((node_cost(n, device).seconds for n in entries.ops[Colour(stage, phase)]), start=0.0)

    def size(roots: Iterable[fx.Node]) -> int:
        return sum(node_bytes(r) for r in roots)

    stages = [
        StageCost(*(seconds(stage, phase) for phase in Phase), *map(size, entries.held(stage)))
        for stage in range(len(entries.saved))
    ]
    edges = []
    for message, values in zip(entries.messages, entries.sent, strict=True):
        moved = size(values)
        edges.append(Edge(message.source, message.target, moved, device.transfer_seconds(moved)))
    return Costs(tuple(stages), tuple(edges))


def work_for_any_size(entries: Ledger, graph: fx.Graph, samples: Samples, device: Device) -> PlanWork:
    """The same as expressions of the named lengths; raises SizeError where a size is no polynomial."""
    sizes = Sizes(graph, samples)

    def work(stage: int, phase: Phase) -> tuple[Work, ...]:
        alike: Counter[tuple[Polynomial, Polynomial, float]] = Counter()
        for node in entries.ops[Colour(stage, phase)]:
            if not is_free(node):
                flops, moved = node_flops(node, sizes.shapes), bytes_moved(node, sizes.bytes)
                alike[flops, moved, device.rate(dtype_of(node))] += 1
        return tuple(Work(n, sizes.terms(f), sizes.terms(b), rate) for (f, b, rate), n in alike.items())

    def size(roots: Iterable[fx.Node]) -> Terms:
        return sizes.terms(sum(sizes.bytes(r) for r in roots))

    stages = [
        StageWork(
            work(stage, Phase.F), work(stage, Phase.B), work(stage, Phase.W), *map(size, entries.held(stage))
        )
        for stage in range(len(entries.saved))
    ]
    return PlanWork(
        lengths=dict(zip(samples.names, samples.points[0], strict=True)),
        stages=tuple(stages),
        edges=tuple(size(values) for values in entries.sent),
        rates=Rates(device.memory, device.link, device.launch, device.latency),
    )


def _held(nodes: dict[str, fx.Node], sections: Iterable[Section]) -> tuple[set[fx.Node], set[fx.Node]]:
    """The owners of the storages that one stage holds from F to B, and from B to W.

    What another stage sends for W alone has arrived when B begins (see :func:`fxpipe.ir.graph.arrival`).
    """
    saved: set[fx.Node] = set()
    kept: set[fx.Node] = set()
    for section in sections:
        for value in section.inputs:
            if value.kind is Kind.VALUE and value.producer:
                root = root_within(nodes[value.name], section.stage)
                if root.op != "placeholder":
                    if value.producer == Colour(section.stage, Phase.F):
                        saved.add(root)
                    if section.phase is Phase.W:
                        kept.add(root)
    return saved, kept
