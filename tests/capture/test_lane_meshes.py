"""Lanes as a mesh of two dimensions: one program, with ops between the lanes along each of them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from zoo import relative_error

import fxpipe
from fxpipe.certificate.check import check_artifact
from fxpipe.errors import CaptureError, OptionError
from fxpipe.plan.lanes import LaneAxis, LaneGroup, LanePlan
from fxpipe.plan.rows import ShardName
from fxpipe.plan.saved.check import plan_of
from fxpipe.plan.spans import place_of, spans_of

NAMES = ("ep", "tp")


class Layer(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(dropout)

    def forward(self, x):
        return x + self.down(self.dropout(self.up(x).relu()))


class Table(nn.Module):
    """Parameters that are on both dimensions of a mesh."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(8, 16) / 3), nn.Parameter(torch.randn(16, 8) / 4)
        self.scale, self.mesh = nn.Parameter(torch.randn(16)), None

    def distribute(self, mesh, **placements):
        self.mesh = mesh
        for name, placement in placements.items():
            whole = getattr(self, name).detach()
            setattr(self, name, nn.Parameter(distribute_tensor(whole, mesh, placement)))

    def forward(self, x):
        h = x if self.mesh is None else DTensor.from_local(x, self.mesh, [Replicate()] * 2)
        y = (h @ self.up * self.scale).relu() @ self.down
        return x + (y if self.mesh is None else y.full_tensor())


class Net(nn.Module):
    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.words, self.layers, self.head = nn.Embedding(12, 8), nn.Sequential(*layers), nn.Linear(8, 4)

    def forward(self, ids):
        return self.head(self.layers(self.words(ids))).square().mean()


@pytest.fixture
def mesh():
    with fxpipe.local_lanes((2, 2), names=NAMES) as made:
        yield made


def compiled(model, **options):
    given = {"ranks": 2, "microbatches": 2, "schedule": "zb-h1"} | options
    return fxpipe.compile(model, (torch.zeros(2, 4, dtype=torch.int64),), **given)


def alternating(mesh, dropout=0.0):
    """Layers on one dimension and on the other."""
    net = Net(Layer(dropout), Layer(dropout))
    state = {name: value.clone() for name, value in net.state_dict().items()}
    for layer, name in zip(net.layers, NAMES, strict=True):
        parallelize_module(layer, mesh[name], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return net, state


WHOLE = [Replicate(), Replicate()]
PLACEMENTS = {
    "each on one": {"up": [Replicate(), Shard(1)], "down": [Shard(0), Replicate()], "scale": WHOLE},
    "two dimensions of a tensor": {"up": [Shard(0), Shard(1)], "down": [Shard(1), Shard(0)], "scale": WHOLE},
    "one dimension twice": {"up": [Shard(1)] * 2, "down": [Shard(0)] * 2, "scale": [Shard(0)] * 2},
}


@pytest.mark.in_ci("one dimension twice")
@pytest.mark.parametrize("name", PLACEMENTS)
def test_gradients_are_those_of_the_plain_model(mesh, name):
    torch.manual_seed(0)
    net = Net(Layer(), Table()).double()
    state = {key: value.clone() for key, value in net.state_dict().items()}
    ids = torch.randint(12, (4, 4))
    net(ids).backward()
    expected = {key: parameter.grad for key, parameter in net.named_parameters()}
    net.zero_grad()
    net.layers[1].distribute(mesh, **PLACEMENTS[name])
    parallelize_module(net.layers[0], mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    pipe = compiled(net)
    pipe.load_state_dict(state)
    result = pipe.run_local((ids,))
    assert max(relative_error(result.grads[key], expected[key]) for key in expected) < 1e-14
    assert pipe.check().holds


def test_a_lane_draws_the_numbers_of_its_share(mesh):
    """Lanes that have the same share draw the same."""
    net, state = alternating(mesh, dropout=0.5)
    pipe = compiled(net, ranks=1)
    (program,) = pipe.artifact.programs
    assert "rt.lane_key(m, 2, 2), rt.lane_key(m, 2, 1)" in " ".join(program.split())
    pipe.load_state_dict(state)
    runtimes = pipe.run_local((torch.randint(12, (4, 4)),)).runtimes
    keys = [(rt.lane_key(0, 2, 2), rt.lane_key(0, 2, 1)) for rt in runtimes]
    assert keys[0][0] == keys[1][0] != keys[2][0] == keys[3][0]
    assert keys[0][1] == keys[2][1] != keys[1][1] == keys[3][1]
    assert pipe.check().holds


@pytest.mark.variation
def test_a_program_that_sums_over_other_lanes_is_told(mesh):
    net, _ = alternating(mesh)
    pipe = compiled(net, ranks=1)
    (program,) = pipe.artifact.programs
    along = '[2, 4, 8]), "sum", 2, 2)'
    assert program.count(along) == 2  # in the forward, and in the backward
    for other in ('[2, 4, 8]), "sum", 2)', '[2, 4, 8]), "sum", 4)'):
        edited = replace(pipe.artifact, programs=(program.replace(along, other, 1),))
        assert not check_artifact(edited).holds, other


def test_a_share_of_a_dimension_that_is_not_even_is_refused(mesh):
    net = Net(Table())
    net.layers[0].scale = nn.Parameter(torch.ones(6))
    net.layers[0].distribute(mesh, scale=[Shard(0), Shard(0)])
    with pytest.raises(CaptureError, match=r"scale' of shape \(6,\) is .*shared evenly by 4 lanes"):
        compiled(net)


def test_a_gradient_that_differs_along_a_dimension_is_refused(mesh):
    """The layer is on one dimension of the mesh, and its input is another share along the other one."""

    class Divided(Layer):
        def forward(self, x):
            shares = DTensor.from_local(x, mesh["ep"], [Replicate()]).redistribute(placements=[Shard(0)])
            y = super().forward(shares.to_local())
            return DTensor.from_local(y, mesh["ep"], [Shard(0)]).full_tensor()

    net = Net(Divided(), Layer())
    for layer, name in zip(net.layers, ("tp", "ep"), strict=True):
        parallelize_module(layer, mesh[name], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    with pytest.raises(CaptureError, match=r"On each lane the gradient of 'layers\.0"):
        compiled(net)


def test_a_dimension_of_one_lane_shares_nothing():
    with fxpipe.local_lanes((2, 1), names=NAMES) as mesh:
        net, state = alternating(mesh, dropout=0.5)
        pipe = compiled(net, ranks=1)
        assert pipe.plan.lanes.shared == {f"layers.0.{x}" for x in ("up.weight", "up.bias", "down.weight")}
        pipe.load_state_dict(state)
        assert pipe.run_local((torch.randint(12, (4, 4)),)).loss > 0


class Drawn(Table):
    """Draws numbers for a value that two of three dimensions share out."""

    def forward(self, x):
        h = DTensor.from_local(x, self.mesh, [Replicate()] * 3)
        shares = (h @ self.up * self.scale).redistribute(placements=[Shard(0), Replicate(), Shard(2)])
        return x + (nn.functional.dropout(shares) @ self.down).full_tensor()


@pytest.mark.variation
def test_numbers_for_a_share_of_two_of_three_dimensions_are_refused():
    with fxpipe.local_lanes((2, 2, 2), names=("a", "b", "c")) as mesh:
        net, whole = Net(Drawn()), [Replicate()] * 2
        placements = {"up": [*whole, Shard(1)], "down": [*whole, Shard(0)], "scale": [*whole, Replicate()]}
        net.layers[0].distribute(mesh, **placements)
        with pytest.raises(
            CaptureError, match=r"bernoulli.p at .* over several dimensions of a mesh of more"
        ):
            compiled(net)


def test_parts_of_two_meshes_are_refused(mesh):
    net, _ = alternating(mesh)
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
    net.head.weight = nn.Parameter(distribute_tensor(net.head.weight.detach(), other, [Replicate()]))
    with pytest.raises(CaptureError, match=r"are DTensors on two meshes.*mesh\[\"ep\"\] and mesh\[\"tp\"\]"):
        compiled(net)


def test_a_mesh_needs_a_name_for_each_dimension():
    with (
        pytest.raises(OptionError, match=r"a name for each of \[2, 2\], and names is \['tp'\]"),
        fxpipe.local_lanes((2, 2)),
    ):
        pass


#: Over meshes of three dimensions: none, each one, and one of a tensor's over several.
SHARES = LanePlan(
    (LaneAxis(2, {"w": 0, "v": 1}), LaneAxis(3, {"w": 0, "u": 1}), LaneAxis(4, {"v": 1, "w": 1}))
)


def test_shares_make_the_whole():
    whole = torch.arange(24 * 24).view(24, 24)
    assert SHARES.groups == (LaneGroup(2, 12), LaneGroup(3, 4), LaneGroup(4, 1))
    for name, different in {"w": 24, "v": 8, "u": 3, "other": 1}.items():
        shares = [SHARES.share(name, whole, lane) for lane in range(24)]
        assert SHARES.whole_shape(name, tuple(shares[0].shape)) == (24, 24)
        assert SHARES.joined(name, shares).equal(whole)
        assert (
            len(SHARES.holders(name))
            == different
            == len({share.tobytes() for share in map(bytes_of, shares)})
        )
        for lane, share in enumerate(shares):
            assert shares[SHARES.holder(name, lane)].equal(share)


def bytes_of(tensor):
    return tensor.contiguous().numpy()


def test_the_place_of_rows_of_a_share(mesh):
    net = Net(Table())
    net.layers[0].distribute(mesh, **PLACEMENTS["one dimension twice"])
    plan = compiled(net).artifact.plan
    whole = torch.arange(16 * 8).view(16, 8)
    for lane in range(4):
        share = plan.lanes.share("layers.0.down", whole, lane)
        rows = ShardName.of_rows("layers.0.down", 1, 3)
        assert place_of(whole, spans_of(plan, rows, lane)).equal(share[1:3])


def test_a_plan_of_an_earlier_version_has_lanes_of_one_dimension():
    with fxpipe.local_lanes(2) as mesh:
        net = parallelize_module(Net(Layer()), mesh, {"layers.0.up": ColwiseParallel(use_local_output=False)})
        plan = compiled(parallelize_module(net, mesh, {"layers.0.down": RowwiseParallel()})).artifact.plan
    data = json.loads(plan.to_json())
    (axis,) = data["lanes"]["axes"]
    assert axis == {"number": 2, "shards": plan.lanes.axes[0].shards, "summed": []}
    data["lanes"] = axis
    assert plan_of(json.dumps(data), "plan.json") == plan
