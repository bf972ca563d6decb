"""The data that a step gets done in a second, and its share of the devices' arithmetic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Any

import torch
from torch import fx

from fxpipe.cost.arithmetic import arithmetic_of
from fxpipe.cost.devices.known_devices import peak_rate
from fxpipe.cost.polynomials import Sizes
from fxpipe.ir.ops import node_flops
from fxpipe.ir.resized import ResizedTraces
from fxpipe.ir.storage import call_nodes
from fxpipe.plan.field_types import value_at
from fxpipe.plan.meshes import TriedMesh
from fxpipe.plan.step import counted
from fxpipe.plan.work import lengths_at
from fxpipe.runtime.batch.microbatches import batch_leaves


@dataclass(frozen=True)
class Throughput:
    """A microbatch at some ``lengths`` of its named dimensions.

    ``rows``: of its tensors.  ``count``: of its ``unit``, see ``counted``.  ``peak_seconds``: in which a
    device at its peak computes it.
    """

    lengths: Mapping[str, int]
    rows: int
    count: int
    unit: str
    peak_seconds: float

    def per_second(self, tried: TriedMesh) -> float:
        """The units that all replicas get done in a second of the simulated step."""
        assert tried.seconds
        return self.count * tried.mesh.microbatches * tried.mesh.replicas / tried.seconds

    def utilization(self, tried: TriedMesh) -> float:
        """The model's FLOPs (MFU), relative to what all devices could compute in the step at their peak."""
        assert tried.seconds
        return self.peak_seconds * tried.mesh.microbatches / (tried.mesh.ranks * tried.seconds)


def step_flops(
    graph: fx.Graph, value: Callable[[fx.Node], Any] = lambda node: node.meta.get("val")
) -> dict[str, Any]:
    """FLOPs of a captured step by arithmetic, as each has a peak of its own.  value: of ``node_flops``."""
    flops: defaultdict[str, Any] = defaultdict(int)
    for node in call_nodes(graph):
        if number := node_flops(node, value):
            flops[arithmetic_of(node)] += number
    return dict(flops)


def peak_seconds(flops: Mapping[str, float], device: str) -> float:
    """The time in which a device at its peak computes so many FLOPs, by arithmetic.

    device: by name.  Raises ScheduleError for an unknown one.
    """
    return sum(number / peak_rate(device, kind) for kind, number in flops.items())


def throughputs(
    graph: fx.Graph,
    resized: ResizedTraces | None,
    example: object,
    device: str,
    sizes: Sequence[Mapping[str, int]],
) -> list[Throughput]:
    """The throughput at each of the lengths, of a captured step before rewrites: FLOPs of a recomputation do
    not count.

    device: by name.  resized: the step at other lengths, which lengths other than the example's need.
    Raises SizeError for an unknown name, and for a length below one.
    """
    named = None if resized is None else Sizes(graph, resized)
    lengths = {} if resized is None else dict(zip(resized.names, resized.points[0], strict=True))
    flops = step_flops(graph) if named is None else step_flops(graph, named.shapes)
    tensors = (x for _, x in batch_leaves(example) if isinstance(x, torch.Tensor))
    unit, shape = counted((x.shape, str(x.dtype)) for x in tensors)
    leading = "" if resized is None else resized.leading
    names = {length: name for name, length in lengths.items() if name != leading}
    results = []
    for wanted in sizes:
        at = lengths_at(lengths, wanted)
        rows = at.get(leading, shape[0])
        others = [at.get(names.get(n, ""), n) for n in shape[1:]]
        values = [Fraction(n) for n in at.values()]
        numbers = {
            kind: float(n) if named is None else float(value_at(named.terms(n), values))
            for kind, n in flops.items()
        }
        seconds = peak_seconds(numbers, device)
        results.append(Throughput(at, rows, rows * prod(others), unit, seconds))
    return results
