"""The costs of sections and messages: the bridge from the colored graph to the scheduler."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from torch import fx

from fxpipe.cost.devices.cluster import Cluster
from fxpipe.cost.devices.device import Device
from fxpipe.cost.fusion import Kernel, kernels_of
from fxpipe.cost.nodes import NodeSeconds, is_free, sent_between_lanes, work_of
from fxpipe.cost.polynomials import Polynomial, Sizes
from fxpipe.ir.builder import node_arg
from fxpipe.ir.liveness import Liveness
from fxpipe.ir.ops import BEGIN_EXCHANGES, is_of_documents
from fxpipe.ir.resized import ResizedTraces
from fxpipe.ir.storage import call_nodes, node_bytes
from fxpipe.plan.field_types import Terms
from fxpipe.plan.work import PlanWork, Rates, StageWork, Work
from fxpipe.schedule.costs import Costs, Edge, StageBytes, StageCost
from fxpipe.schedule.ops import Color, Phase

_T = TypeVar("_T")

SecondsOfRanks = Sequence[Mapping[Color, float]]
"""Per rank the seconds of every section, if it runs there."""


def analytic_seconds(
    graph: fx.Graph, node_seconds: NodeSeconds, compiled: Collection[Phase] = ()
) -> dict[Color, float]:
    """The seconds of every section, from the shapes of its kernels and the device's description.

    compiled: the phases of which sections are compiled.
    """
    device = node_seconds.device
    sections = defaultdict[Color, list[fx.Node]](list)
    for node in call_nodes(graph):
        sections[node.meta["color"]].append(node)
    # The overhead once a section, whatever is in it: the call and its messages.
    return {
        color: device.stage_overhead + function_seconds(nodes, color.phase, node_seconds, compiled)
        for color, nodes in sections.items()
    }


def function_seconds(
    nodes: Sequence[fx.Node], phase: Phase, node_seconds: NodeSeconds, compiled: Collection[Phase]
) -> float:
    """The seconds of ops that one function computes, in order.  compiled: as for ``analytic_seconds``."""
    ops, fused = kernels_of(nodes, phase, compiled)
    return sum(map(node_seconds, ops)) + sum(_kernel_seconds(kernel, node_seconds.device) for kernel in fused)


def _kernel_seconds(kernel: Kernel, device: Device) -> float:
    return device.seconds(0, kernel.bytes_moved(), "float32", "move")


def seconds_of_ops(
    graph: fx.Graph, node_seconds: NodeSeconds, compiled: Collection[Phase]
) -> Callable[[fx.Node], float]:
    """The seconds of each op of a graph without stages; of several in one kernel the first has them all.

    compiled: as for ``analytic_seconds``.
    """
    if not compiled:
        return node_seconds
    nodes = call_nodes(graph)
    seconds: dict[fx.Node, float] = {}
    for phase in (Phase.F, Phase.B):
        is_backward = phase is Phase.B
        ops, fused = kernels_of(
            [n for n in nodes if n.meta["origin"].backward is is_backward], phase, compiled
        )
        seconds |= {node: node_seconds(node) for node in ops}
        for kernel in fused:
            first = min(kernel.ops)
            seconds[first] = seconds.get(first, 0.0) + _kernel_seconds(kernel, node_seconds.device)
    return lambda node: seconds.get(node, 0.0)


def seconds_on(cluster: Cluster, graph: fx.Graph, compiled: Collection[Phase] = ()) -> SecondsOfRanks:
    """The analytic seconds of every section on each rank."""
    by_device = {seconds.device: analytic_seconds(graph, seconds, compiled) for seconds in cluster.distinct}
    return tuple(by_device[device] for device in cluster.devices)


def section_costs(
    live: Liveness,
    seconds: SecondsOfRanks,
    cluster: Cluster,
    placement: Sequence[int],
    ranks_per_machine: int | None = None,
) -> Costs:
    """Seconds and bytes of every stage and message on their ranks."""

    def size(roots: Iterable[fx.Node]) -> int:
        return sum(node_bytes(r) for r in roots)

    stages = []
    for stage, rank in enumerate(placement):
        # A stage without ops of a phase has no section of it.
        times = [seconds[rank].get(Color(stage, phase), 0.0) for phase in Phase]
        stages.append(StageCost(*times, **_sized(live.held(stage), size)))
    edges = []
    for edge, values in zip(live.edges, live.sent, strict=True):
        moved = size(values)
        ends = placement[edge.source.stage], placement[edge.target.stage]
        link = cluster.devices[ends[0]].intra
        begun = [node for node in values if node.target in BEGIN_EXCHANGES]
        exchange = sum(link.seconds(sent_between_lanes(node)) for node in begun)
        # What a lane gives is there as well, until all has arrived.
        held = moved + size(node_arg(node, 0) for node in begun)
        edges.append(Edge(edge.source, edge.target, held, *cluster.message_seconds(moved, *ends), exchange))
    return Costs(tuple(stages), tuple(edges), ranks_per_machine=ranks_per_machine)


def _sized(storages: StageBytes[Iterable[fx.Node]], size: Callable[[Iterable[fx.Node]], _T]) -> dict[str, _T]:
    """The fields of a stage's memory."""
    return {name: size(roots) for name, roots in storages._asdict().items()}


def work_for_any_size(
    live: Liveness,
    graph: fx.Graph,
    resized: ResizedTraces,
    cluster: Cluster,
    placement: Sequence[int],
    compiled: Collection[Phase],
) -> PlanWork:
    """The analytic costs on their ranks as expressions of the named lengths.

    compiled: the phases of which sections are compiled.
    Raises SizeError where a size is no polynomial.
    """
    sizes = Sizes(graph, resized)
    devices = [cluster.devices[rank] for rank in placement]

    def work(stage: int, phase: Phase) -> tuple[Work, ...]:
        # Layers are alike, so a few terms with a number stand for thousands of ops.
        alike: Counter[tuple[Polynomial, Polynomial, str, str, bool]] = Counter()
        ops, fused = kernels_of(live.ops[Color(stage, phase)], phase, compiled)
        for kernel in fused:
            alike[0, kernel.bytes_moved(sizes.bytes), "float32", "move", False] += 1
        for node in ops:
            if not is_free(node):
                alike[*work_of(node, sizes.bytes, sizes.shapes), is_of_documents(node)] += 1
        return tuple(
            Work(
                count=n,
                flops=sizes.terms(f),
                bytes=sizes.terms(b),
                rate=devices[stage].rate(arithmetic, kind),
                arithmetic=arithmetic,
                kind=kind,
                packed=packed,
            )
            for (f, b, arithmetic, kind, packed), n in alike.items()
        )

    def size(roots: Iterable[fx.Node]) -> Terms:
        return sizes.terms(sum(sizes.bytes(r) for r in roots))

    stages = [
        StageWork(
            work(stage, Phase.F), work(stage, Phase.B), work(stage, Phase.W), **_sized(live.held(stage), size)
        )
        for stage in range(len(live.saved_activations))
    ]
    return PlanWork(
        lengths=dict(zip(resized.names, resized.points[0], strict=True)),
        stages=tuple(stages),
        edges=tuple(size(values) for values in live.sent),
        rates=rates_of(cluster.first),
        stage_rates=tuple(map(rates_of, devices)) if len(set(cluster.devices)) > 1 else (),
    )


def rates_of(device: Device) -> Rates:
    """The rates of a device, as plans have them."""
    return Rates(
        memory=device.memory_bandwidth,
        link=device.intra.bandwidth,
        launch=device.launch,
        latency=device.intra.latency,
        stage_overhead=device.stage_overhead,
        inter_link=device.inter.bandwidth,
        inter_latency=device.inter.latency,
        curves=dict(device.curves),
    )
