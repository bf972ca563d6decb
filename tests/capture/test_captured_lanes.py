"""One graph for all lanes, and what is refused, by name and line."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace

import pytest
import torch
from tensor_parallel import Words, batch, parallelized
from torch import distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from zoo import relative_error

import fxpipe
import fxpipe.cost.profile
from fxpipe.certificate.check import check_artifact
from fxpipe.cost.devices.describe import described_here
from fxpipe.cost.devices.known_devices import device_named
from fxpipe.cost.nodes import node_seconds
from fxpipe.errors import CaptureError, RunError
from fxpipe.ir.ops import is_between_lanes
from fxpipe.ir.storage import call_nodes
from fxpipe.runtime.torch_private import fake_store
from fxpipe.schedule.ops import Color, Phase


class Net(nn.Module):
    """``between``: what the forward does between two layers, on a share of the neurons."""

    def __init__(self, between=lambda x: x, width: int = 8):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, width), nn.Linear(width, 4), nn.LayerNorm(4)
        self.between = between

    def forward(self, x):
        return self.norm(self.down(self.between(self.up(x)))).square().mean()


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


@pytest.fixture
def mesh():
    with fxpipe.local_lanes(2) as found:
        yield found


def compiled(model, **options):
    given = {"ranks": 2, "microbatches": 2, "schedule": "zb-h1"} | options
    return fxpipe.compile(model, (torch.randn(2, 4),), **given)


def refused(model, match, error=CaptureError, **options):
    with pytest.raises(error, match=match):
        compiled(model, **options)


@pytest.mark.slow
def test_b_has_the_sum_of_the_input_gradient_and_w_no_communication(mesh):
    pipe = compiled(parallelize_module(Net(torch.relu), mesh, PLAN))
    found = [n for n in call_nodes(pipe.graph) if n.target is torch.ops.lanes.all_reduce.default]
    assert [n.meta["color"].phase for n in found] == [Phase.F]  # there is nothing before ``up``
    with parallelized(model := Words(), mesh, "columns and rows"):
        pipe = fxpipe.compile(model, batch(2), ranks=2, microbatches=2, schedule="zb-h1")
    found = [n for n in call_nodes(pipe.graph) if n.target is torch.ops.lanes.all_reduce.default]
    assert [n.meta["color"].phase for n in found] == [Phase.F] * 2 + [Phase.B] * 2
    assert pipe.check().holds


def test_equal_groups_have_one_meaning_and_others_are_refused():
    """With several meshes of the same processes torch uses the groups of any of them."""
    dist.init_process_group("fake", rank=0, world_size=4, store=fake_store())
    try:
        mesh, equal, other = (
            init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "pp", "tp"))["tp"]
            for sizes in ((1, 2, 2), (2, 1, 2), (1, 1, 4))
        )

        def summed_over(group):
            between = lambda x: x + all_reduce(x.detach(), "sum", group)  # noqa: E731
            return parallelize_module(Net(between), mesh, PLAN)

        compiled(summed_over(equal.get_group()), ranks=1)
        refused(summed_over(other.get_group()), r"processes \[0, 1, 2, 3\], and the mesh .* of \[0, 1\]")
    finally:
        dist.destroy_process_group()


def test_communication_is_not_recomputed(mesh):
    plain, again = (
        compiled(parallelize_module(Net(torch.relu), mesh, PLAN), ranks=1, recompute=level)
        for level in (False, "full")
    )
    calls = [pipe.artifact.programs[0].count("all_reduce(") for pipe in (plain, again)]
    assert calls == [1, 1]


def test_an_op_between_lanes_takes_the_time_of_its_link(mesh):
    pipe = compiled(parallelize_module(Net(), mesh, PLAN), ranks=1)
    node = next(n for n in call_nodes(pipe.graph) if n.target is torch.ops.lanes.all_reduce.default)
    device = device_named("H100 SXM")
    sent = 2 * (1 / 2) * node.meta["val"].nbytes  # a half to the other lane, twice
    assert node_seconds(node, device) == device.intra.seconds(sent)


def test_what_lanes_compute_with_their_number_is_one_program(mesh):
    numbers = {
        "local rank": lambda: mesh.get_local_rank(),
        "coordinate": lambda: mesh.get_coordinate()[0],
        "process": lambda: torch.distributed.get_rank(),
    }
    for lane in numbers.values():
        pipe = compiled(parallelize_module(Net(lambda x, lane=lane: x + lane()), mesh, PLAN))
        assert "number(0, 1" in "".join(pipe.artifact.programs)


def test_lanes_that_run_other_ops_are_refused_with_the_line(mesh):
    def dropped(x):
        return nn.functional.dropout(x, 0.1 + 0.2 * mesh.get_local_rank())

    def skipped(x):
        return x.sin() if mesh.get_local_rank() else x

    for between in (dropped, skipped):
        refused(parallelize_module(Net(between), mesh, PLAN), r"lane 1 .*test_captured_lanes.py:\d+")


def test_constants_that_differ_are_refused(mesh):
    def scaled(x):
        return x * torch.tensor([1.0, 2.0][mesh.get_local_rank()])

    refused(parallelize_module(Net(scaled), mesh, PLAN), r"another constant.*test_captured_lanes.py:\d+")


def test_a_branch_on_what_lanes_have_summed_is_refused(mesh):
    model = Net(lambda x: x)
    model.norm.register_forward_pre_hook(lambda module, args: (args[0] * 2,) if args[0].sum() > 0 else None)
    refused(
        parallelize_module(model, mesh, PLAN),
        r"lanes have summed or gathered, at .*test_captured_lanes.py:\d+",
    )


def test_results_that_lanes_have_not_alike_are_refused(mesh):
    class Unreduced(Net):
        def forward(self, x):
            return self.up(x).square().mean()

    refused(
        parallelize_module(Unreduced(), mesh, {"up": ColwiseParallel()}), "On each lane the loss is another"
    )

    class Counting(Net):
        def forward(self, x):
            self.seen.add_(1)
            return super().forward(x) + 0 * self.seen.to_local().sum()

    model = parallelize_module(Counting(), mesh, PLAN)
    model.register_buffer("seen", distribute_tensor(torch.zeros(2), mesh, [Shard(0)]))
    refused(model, "changes the buffer 'seen', of which each lane has a share")

    class Apart(Net):
        """A norm on shares of the rows that the plan does not name: its gradient is a part of a sum."""

        def forward(self, x):
            part = self.norm(self.down(self.up(x)))
            return DTensor.from_local(part, mesh, [Shard(0)]).full_tensor().square().mean()

    plan = PLAN | {"down": RowwiseParallel(output_layouts=Shard(0))}
    refused(parallelize_module(Apart(), mesh, plan), "the gradient of 'norm.weight' is another")


def test_placements_and_meshes_that_lanes_do_not_have(mesh):
    model = Net()
    partial = DTensor.from_local(model.norm.weight.detach(), mesh, [Partial()])
    model.norm.weight = nn.Parameter(partial)
    refused(model, r"'norm.weight' is a DTensor with the placement")
    refused(parallelize_module(Net(width=7), mesh, PLAN), r"'up.weight' of shape \(7, 4\).*evenly by 2 lanes")
    two = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    model = parallelize_module(Net(), mesh, PLAN)
    model.norm.weight = nn.Parameter(distribute_tensor(model.norm.weight.detach(), two["b"], [Replicate()]))
    refused(model, "'up.weight' and 'norm.weight' are DTensors on two meshes")


@pytest.mark.variation
@pytest.mark.slow
def test_measured_costs_have_the_time_of_the_link(mesh, monkeypatch):
    def a_second(sections, device):
        for section in sections:
            section.run()
        return [1.0] * len(sections)

    monkeypatch.setattr(fxpipe.cost.profile, "medians_in_turns", a_second)
    with parallelized(model := Words(), mesh, "sequence"):
        pipe = fxpipe.compile(model, batch(2), ranks=2, microbatches=2, schedule="zb-h1", costs="measured")
    device, between = described_here(torch.device("cpu")), dict[Color, float]()
    for node in call_nodes(pipe.graph):
        if is_between_lanes(node.target):
            color = node.meta["color"]
            between[color] = between.get(color, 0.0) + node_seconds(node, device)
    assert len({color.phase for color in between}) == len(Phase)
    for stage, cost in enumerate(pipe.plan.costs.stages):
        for phase, found in zip(Phase, (cost.forward, cost.backward, cost.weight), strict=True):
            expected = between.get(Color(stage, phase), 0.0)
            assert found == pytest.approx(1.0 + device.stage_overhead + expected), (stage, phase)


@pytest.mark.variation
@pytest.mark.slow
def test_costs_of_lanes_at_other_sizes(mesh):
    def costs(rows: int, length: int, sizes=None, **options):
        model = parallelize_module(Net(torch.relu), mesh, PLAN)
        given = {"ranks": 2, "microbatches": 2, "schedule": "1f1b", "split_points": ["norm"], **options}
        pipe = fxpipe.compile(model, (torch.randn(rows, length, 4),), **given)
        return pipe.simulate(sizes=sizes).costs

    sizes = {"microbatch": 640, "sequence": 3000}  # ops take longer than their launch
    found = costs(2, 24, sizes, dimensions={"sequence": 24})
    for own, expected in zip(found.stages, costs(*sizes.values()).stages, strict=True):
        assert own.forward == pytest.approx(expected.forward)
        assert own.backward == pytest.approx(expected.backward)
        assert own.saved_activations == expected.saved_activations


def test_a_process_of_all_lanes_needs_the_whole_values_and_writes_no_checkpoints(mesh, tmp_path):
    pipe = compiled(parallelize_module(Net(), mesh, PLAN))
    for use in (lambda: pipe.run_local((torch.randn(4, 4),)), lambda: pipe.save(tmp_path / "saved")):
        with pytest.raises(RunError, match=r"one lane's share of .* before parallelize_module"):
            use()
    with pytest.raises(RunError, match="of a pipeline of one rank"):
        fxpipe.Checkpointer(pipe, tmp_path / "checkpoints")
    with pytest.raises(RunError, match=r"2 ranks of 2 lanes.*nproc-per-node 4"):
        pipe.step((torch.randn(4, 4),))


def test_one_mesh_of_lanes_at_a_time(mesh):
    with pytest.raises(RunError, match="init_device_mesh"), contextlib.ExitStack() as stack:
        stack.enter_context(fxpipe.local_lanes(2))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        return self.o(self.q(x) * self.k(x) + self.v(x)).square().mean()


def test_sums_that_are_added_are_one(mesh):
    """The input gradients of three layers of columns: one sum in the backward, where something is before."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), Attention()).double()
    state = copy.deepcopy(plain.state_dict())
    x = torch.randn(4, 4, dtype=torch.float64)
    plain(x).backward()
    plan = {f"1.{name}": ColwiseParallel() for name in "qkv"} | {"1.o": RowwiseParallel()}
    for without, sums in (((), 2), (("joined-sums",), 4)):
        model = parallelize_module(copy.deepcopy(plain), mesh, plan)
        pipe = fxpipe.compile(model, (x[:2],), ranks=1, microbatches=2, without=without)
        pipe.load_state_dict(state)
        result = pipe.run_local((x,))
        assert pipe.artifact.programs[0].count("all_reduce(") == sums
        assert {each.rule: each.ops for each in pipe.plan.rewrites} == ({} if without else {"joined-sums": 2})
        for name, parameter in plain.named_parameters():
            assert relative_error(result.grads[name], parameter.grad) < 1e-14
        assert pipe.check().holds
    edited = pipe.artifact.programs[0].replace('"sum", 2)', '"max", 2)', 1)
    assert not check_artifact(replace(pipe.artifact, programs=(edited,))).holds
