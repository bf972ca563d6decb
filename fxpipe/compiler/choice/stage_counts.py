"""The step cut into stages, once for each number of them that is tried; and the devices that costs are of."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Sequence
from itertools import product

import torch
from torch import fx

from fxpipe.compiler.choice.candidates import Candidates, Head
from fxpipe.compiler.choice.cut import Cuts, Stages
from fxpipe.compiler.options import Settings
from fxpipe.compiler.passes import CutOptions, StepGraphs
from fxpipe.compiler.progress import Phases
from fxpipe.cost.devices.cluster import Cluster, slowest_of_each
from fxpipe.cost.devices.describe import describe
from fxpipe.cost.devices.device import Device
from fxpipe.cost.devices.known_devices import device_named
from fxpipe.cost.profile import measured_bandwidth
from fxpipe.errors import PartitionError, VocabularyError
from fxpipe.ir.storage import call_nodes
from fxpipe.partition.parts import PartsOfStage
from fxpipe.passes.captured.begin_exchanges import is_exchange
from fxpipe.schedule.search.fastest import AUTO

WORTH_HIDING = 0.05
"""Of the step's time: if exchanges between lanes take less, stages are not cut at them unless asked to."""

UsableTensors = tuple[frozenset[str], ...] | None
"""The tensors that may be used in each stage, if other pipelines have them on their ranks."""


def cluster_of(
    options: Settings, device: torch.device, devices: Sequence[Sequence[Device]], graph: fx.Graph
) -> Cluster:
    """The devices that the costs are of.  devices: of the processes of each rank, if they are known."""
    if isinstance(options.costs, tuple):
        return Cluster(tuple(map(device_named, options.costs)))
    if devices and options.costs == "analytic":
        return slowest_of_each(devices, graph)
    return Cluster((describe(options.costs, device, graph),) * options.mesh.ranks)


def offload_bandwidth(options: Settings, cluster: Cluster, device: torch.device) -> float:
    """Bytes a second, one way, to the offload store."""
    offload = options.offload
    if offload.bandwidth is not None:
        return offload.bandwidth
    if offload.share is None or options.costs != "measured":
        return cluster.offload_bandwidth
    return measured_bandwidth(options.tier, options.offload_directory, device)


def all_stages(
    captured: StepGraphs, tried: Candidates, options: Settings, cluster: Cluster, shared: Cuts, phase: Phases
) -> list[Stages]:
    """The step cut into stages, for each number of them and of barriers, and where ranks have different
    devices for each placement.

    shared: the cuts of the step so far.
    """
    cuts: list[Stages] = []
    misfits: list[PartitionError] = []
    ways, parts_tried = tried.heads, tried.parts
    if len(parts_tried) > 1:
        node_seconds, ops = cluster.node_seconds(), call_nodes(captured.graph)
        exchanged = sum(node_seconds(node) for node in ops if is_exchange(node))
        if exchanged < WORTH_HIDING * sum(map(node_seconds, ops)):
            parts_tried = (1,)
    measured = options.costs == "measured"
    slowness = cluster.slowness(captured.graph)
    steps: dict[tuple[Head, PartsOfStage], StepGraphs] = {}  # for any number of stages
    for stages, placements in tried.placements.items():
        cuts_here: list[Stages] = []
        alike: defaultdict[tuple[tuple[float, ...], UsableTensors], list[str]] = defaultdict(list)
        for name, placement in placements.items():
            tensors_of = options.in_stages or None
            if options.on_ranks:
                tensors_of = tuple(frozenset(options.on_ranks[rank]) for rank in placement)
            # Placements in which each stage is as fast are cut alike, and need one cut.
            alike[tuple(slowness[rank] for rank in placement), tensors_of].append(name)
        every = product(ways, parts_tried, alike.items())
        for head, parts, ((slowness_here, tensors_of), names) in every:
            if head not in ways:
                continue  # it did not fit other placements either
            cut_options = CutOptions(
                stages,
                options.mesh.ranks,
                cluster.node_seconds(),
                options.split_points,
                head.barriers,
                measured,
                tensors_of=tensors_of,
                slowness=slowness_here,
                placements=tuple(names),
                grad_dtype=options.grad_dtype,
                compiled=options.compiled,
                print_after=options.print_after,
                head_chunks=head.chunks,
                rules=options.rules,
                parts=parts,
            )
            try:
                if (head, parts) not in steps:
                    with phase("vocabulary"):
                        # Once for all numbers of stages.
                        steps[head, parts] = shared.split(captured, cut_options)
                cuts_here.append(shared.stages_of(steps[head, parts], cut_options, phase))
            except PartitionError as error:
                if _is_free(head, options):
                    ways = tuple(way for way in ways if way != head)  # nor does it fit more stages
                    continue
                if parts != 1 and options.parts == AUTO:
                    continue  # too many for these stages
                if options.on_ranks:  # other placements may fit
                    misfits.append(error)
                    continue
                if not (cuts or cuts_here):
                    raise
                # More stages than there are places to cut: the fastest of the fewer is found.
                return [*cuts, *cuts_here]
            except VocabularyError as error:
                if not _is_free(head, options):
                    raise
                ways = tuple(way for way in ways if way != head)
                if head.barriers is not None and all(way.barriers is None for way in ways):
                    warnings.warn(f"vocab_parallel='auto' goes on without: {error}", stacklevel=2)
        cuts += cuts_here
    if misfits and not cuts:
        raise misfits[0]
    return cuts


def _is_free(head: Head, options: Settings) -> bool:
    """Whether an output layer may be computed in another way than this."""
    return (head.barriers is not None and options.vocab_parallel == AUTO) or (
        head.chunks > 1 and options.head_chunks == AUTO
    )
