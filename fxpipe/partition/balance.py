"""The balance of stages against the messages between them, by simulated steps.

Even stages may need cuts inside of modules, which several values cross.  What a step loses by less even
stages with lighter messages depends on the device, its links and the number of microbatches: so steps are
simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from fxpipe.cost.device import Device
from fxpipe.partition.crossing import Crossing
from fxpipe.partition.cuts import lightest_cuts
from fxpipe.schedule.costs import Costs, Edge, StageCost
from fxpipe.schedule.families.registry import one_f_one_b
from fxpipe.schedule.ops import Color, Phase
from fxpipe.schedule.problem import Problem, per_rank

#: The share by which the largest stage may exceed the smallest possible one, whatever a step loses.
SLACK = 0.02
#: All that are tried.
SLACKS = (SLACK, 0.0, 0.005, 0.01, 0.03, 0.05, 0.08, 0.12)
#: The share of the shortest simulated step that lighter messages may cost.
LOSS = 0.01
#: What one more module around a cut counts, as a share of its messages: of equal ones the outermost is taken.
INSIDE = 0.01


@dataclass(frozen=True)
class Chain:
    """The forward's ops in the order in which they ran: the seconds of each, and of the backward ops that
    differentiate it; the values that cross a cut after it, and the number of modules that the cut lies in."""

    forward: list[float]
    backward: list[float]
    crossing: Crossing
    nesting: list[int]


def best_cuts(
    chain: Chain, stages: int, microbatches: int, device: Device, slowness: Sequence[float] = ()
) -> tuple[int, ...]:
    """The positions after which to cut the chain.

    Of all cuts with the lightest messages for a slack, which are no heavier than those for ``SLACK``, the
    lightest whose step, with 1F1B and a stage a rank, is at most ``LOSS`` longer than the shortest.

    device: its links are those between all stages.  slowness: as of ``lightest_cuts``.
    Raises PartitionError if there are fewer places to cut than needed.
    """
    link, crossing = device.intra, chain.crossing
    weights = [
        (link.seconds(bytes) + (values - 1) * link.latency) * (1 + INSIDE * around)
        for bytes, values, around in zip(crossing.bytes, crossing.values, chain.nesting, strict=True)
    ]
    seconds = [sum(both) for both in zip(chain.forward, chain.backward, strict=True)]
    found = lightest_cuts(seconds, weights, stages, SLACKS, slowness)
    weight = {cuts: sum(weights[cut] for cut in cuts) for cuts in found}
    light = [cuts for cuts in weight if weight[cuts] <= weight[found[0]] * (1 + 1e-9)]
    if len(light) == 1:
        return light[0]
    step = {cuts: _step(chain, cuts, microbatches, device, slowness or (1.0,) * stages) for cuts in light}
    longest = (1 + LOSS) * min(step.values())
    return min((cuts for cuts in light if step[cuts] <= longest), key=lambda cuts: (weight[cuts], step[cuts]))


def _step(
    chain: Chain, cuts: Sequence[int], microbatches: int, device: Device, slowness: Sequence[float]
) -> float:
    """The seconds of a step with 1F1B, a stage a rank."""
    bounds = [0, *(cut + 1 for cut in cuts), len(chain.forward)]
    stages = []
    for (begin, end), slow in zip(pairwise(bounds), slowness, strict=True):
        forward, backward = (sum(part[begin:end]) for part in (chain.forward, chain.backward))
        stages.append(StageCost(slow * forward + device.stage_overhead, slow * backward, 0.0))
    edges = []
    for stage, cut in enumerate(cuts):
        seconds = device.intra.seconds(chain.crossing.bytes[cut])
        edges += [
            Edge(Color(a, phase), Color(b, phase), seconds=seconds)
            for phase, a, b in ((Phase.F, stage, stage + 1), (Phase.B, stage + 1, stage))
        ]
    costs = Costs(tuple(stages), tuple(edges))
    problem = Problem(len(stages), microbatches, 1, "plain", costs, per_rank(None, len(stages)))
    done = problem.order(one_f_one_b(problem)).run()
    assert done is not None, "1F1B can progress"
    return float(done.makespan)
