"""Ranks with different devices: each stage has the costs, and the share of the model, of its rank's own."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import fxpipe
from fxpipe.cost.devices.cluster import Cluster, slowest_of_each
from fxpipe.cost.devices.describe import described_everywhere
from fxpipe.cost.devices.known_devices import device_named
from fxpipe.cost.plan_costs import costs_of
from fxpipe.plan.saved.check import plan_of
from fxpipe.strict import unstructure

pytestmark = pytest.mark.slow

H100, A100 = device_named("H100"), device_named("A100")
ROWS, WIDTH = 4096, 4096


class Layers(nn.Module):
    def __init__(self, layers: int = 12):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])

    def forward(self, x):
        return self.layers(x).square().mean()


def compiled(costs, ranks=2, rows=ROWS, **options):
    with torch.device("meta"):
        model, example = Layers(), {"x": torch.randn(rows, WIDTH)}
    given = {"schedule": "1f1b", "dimensions": {}} | options
    return fxpipe.compile(model, example, ranks=ranks, microbatches=4, costs=costs, **given)


def weights(pipe) -> list[int]:
    """Per rank the number of layers."""
    return [sum(name.endswith("weight") for name in held.parameters) for held in pipe.plan.tensors]


def test_a_stage_costs_what_it_does_on_its_ranks_device():
    here = {"split_points": ["layers.8"]}
    mixed, fast, slow = (compiled(costs, **here) for costs in (["H100", "A100"], "H100", "A100"))
    first, second = mixed.plan.costs.stages
    assert first == fast.plan.costs.stages[0]
    assert second == slow.plan.costs.stages[1]
    assert second.total > 2 * fast.plan.costs.stages[1].total
    for edge, other in zip(mixed.plan.costs.edges, slow.plan.costs.edges, strict=True):
        assert edge == other, "the A100's links are the slower ones"
    assert mixed.plan.device == "H100 SXM (rank 0); A100 SXM 80GB (rank 1)"


@pytest.mark.in_ci("H100-expected0")
@pytest.mark.parametrize(("costs", "expected"), [("H100", [6, 6]), (["H100", "A100"], [10, 2])])
def test_stages_are_cut_for_the_speed_of_their_ranks(costs, expected):
    """46.9 and 13.7 TFLOP/s in float32: 10 layers of the one take as long as 2.9 of the other."""
    assert weights(compiled(costs)) == expected


@pytest.mark.variation
@pytest.mark.parametrize("placement", ["plain", "v"])
def test_each_placement_has_cuts_of_its_own(placement):
    """Rank 1 has stages 1 and 3, or 1 and 2."""
    options = {"schedule": "zb-h1", "stages_per_rank": 2, "placement": placement}
    pipe = compiled(["H100", "A100"], **options)
    assert weights(pipe) == [10, 2]
    even = compiled(["H100", "A100"], split_points=["layers.3", "layers.6", "layers.9"], **options)
    assert weights(even) == [6, 6]
    assert pipe.simulate().seconds < 0.6 * even.simulate().seconds


@pytest.mark.variation
def test_costs_at_other_sizes_are_those_of_a_compilation():
    """Also of a plan that was saved."""
    options = {"split_points": ["layers.3"]}
    made, half = (compiled(["A100", "H100"], rows=rows, **options).plan for rows in (ROWS, ROWS // 2))
    plan = plan_of(made.to_json(), "a plan")
    assert plan == made
    found = costs_of(plan, {"microbatch": ROWS // 2})
    assert found.edges == half.costs.edges
    for stage, own in zip(found.stages, half.costs.stages, strict=True):
        assert stage.total == pytest.approx(own.total)
    alike = compiled("H100", **options).plan.costs
    assert [s.total for s in costs_of(plan, device="H100").stages] == pytest.approx(
        [s.total for s in alike.stages]
    )


def test_a_cluster_of_equal_devices_has_one_name_and_one_speed():
    cluster = Cluster((H100, H100))
    assert cluster.name == "H100 SXM"
    assert cluster.node_seconds(0) is cluster.node_seconds(1)
    assert cluster.message_seconds(1e9, 0, 1) == (H100.intra.seconds(1e9), H100.inter.seconds(1e9))
    mixed = Cluster((H100, A100, H100))
    assert mixed.name == "H100 SXM (ranks 0, 2); A100 SXM 80GB (rank 1)"
    assert mixed.message_seconds(1e9, 0, 1) == (A100.intra.seconds(1e9), A100.inter.seconds(1e9))
    assert mixed.offload_bandwidth == A100.offload_bandwidth


def test_a_rank_counts_as_its_slowest_replica():
    x = torch.ones(4096, 1024)
    graph = make_fx(lambda x: x.t() @ x, tracing_mode="fake")(x).graph
    assert slowest_of_each([[H100, A100], [A100, A100], [H100, H100]], graph).devices == (A100, A100, H100)
    assert slowest_of_each([[A100, A100], [H100]], graph).devices == (A100, H100)


def test_a_device_for_each_rank_and_no_others():
    with pytest.raises(fxpipe.OptionError, match="costs names 2 devices for 3 ranks"):
        compiled(["H100", "A100"], ranks=3)
    with pytest.raises(
        fxpipe.OptionError, match=r"costs has 'measured' and must have names of devices\. Known: cpu, "
    ):
        compiled(["H100", "measured"])


def test_ranks_describe_their_devices_to_each_other():
    def gather(own):
        assert json.loads(own)["name"] == "cpu"
        calibrated_again = replace(H100, launch=2 * H100.launch)
        return [json.dumps(unstructure(each)).encode() for each in (H100, A100, calibrated_again)]

    assert described_everywhere(torch.device("cpu"), gather) == (H100, A100, H100)
