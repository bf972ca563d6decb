"""Calibrated devices: the seconds of ops by kind and size, their files, and plans with them."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import sympy
import torch
from small_samples import SMALL
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import fxpipe
from fxpipe.cli import main
from fxpipe.cli.calibrate import mean_of
from fxpipe.cost.calibration import samples
from fxpipe.cost.calibration.background_load import busy_threads
from fxpipe.cost.devices.device_file import read_device, write_device
from fxpipe.cost.devices.known_devices import CPU, device_named, is_cpu, tier_of
from fxpipe.cost.kinds import COMPUTING, MOVING, kind_of
from fxpipe.cost.nodes import node_seconds
from fxpipe.errors import OptionError, ScheduleError
from fxpipe.ir.ops import node_flops
from fxpipe.ir.storage import call_nodes
from fxpipe.plan.curve import Curve

LINE = Curve(((100.0, 1.0), (200.0, 2.0), (400.0, 6.0)))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Of a device on which a product takes a second a FLOP, and any other op three."""
    curves = {kind: Curve(((0.0, 3.0),)) for kind in MOVING}
    curves |= {f"{kind} float32": Curve(((0.0, 0.0), (1.0, 1.0))) for kind in COMPUTING}
    path = tmp_path_factory.mktemp("device") / "slow.json"
    write_device(path, replace(CPU, name="slow", curves=curves, stage_overhead=7.0), {"ranks": "1"})
    return path


def test_a_curve_goes_straight_from_point_to_point():
    sizes = (0, 100, 150, 200, 300, 400, 500)
    assert [LINE.seconds(size) for size in sizes] == pytest.approx([1, 1, 1.5, 2, 4, 6, 8])
    x = sympy.Symbol("x")
    expression = LINE.seconds(x, sympy.Max)
    assert [expression.subs(x, size) for size in sizes] == pytest.approx([LINE.seconds(s) for s in sizes])


def kinds(function, *arguments):
    graph = make_fx(function)(*arguments).graph
    return {kind_of(node) for node in call_nodes(graph)}


def test_kinds_of_ops():
    x, image = torch.randn(64, 64), torch.randn(1, 2, 4, 4)
    assert kinds(lambda x: x @ x, x) == {"product"}
    assert kinds(lambda x: x @ x[:, :8], x) >= {"thin product", "view"}
    assert kinds(lambda x: torch.bmm(x[None], x[None]), x) >= {"batched product"}
    assert kinds(lambda x: x.tanh() + 1, x) == {"function", "move"}
    assert kinds(lambda x: x.t() + x, x) == {"view", "strided"}
    assert kinds(lambda x: x.sum(0), x) == {"reduction"}
    assert kinds(lambda x: x.softmax(0), x) == {"norm"}
    assert kinds(lambda x: x[torch.tensor([1, 2])], x) >= {"lookup"}
    assert kinds(nn.functional.conv2d, image, torch.randn(2, 2, 3, 3)) == {"convolution"}
    assert kinds(torch.rand_like, x) == {"random"}
    heads = image.expand(3, 2, 4, 4).contiguous()
    attention = nn.functional.scaled_dot_product_attention
    assert "attention" in kinds(attention, heads, heads, heads)


def test_attention_on_a_cpu_has_flops():
    q = torch.randn(2, 4, 8, 16, requires_grad=True)

    def step(q):
        return torch.autograd.grad(nn.functional.scaled_dot_product_attention(q, q, q).sum(), q)

    graph = make_fx(step)(q).graph
    found = {kind_of(n): node_flops(n) for n in call_nodes(graph) if "attention" in kind_of(n)}
    product = 2 * 2 * 4 * 8 * 8 * 16
    assert found == {"attention": 2 * product, "attention backward": 5 * product}


def test_a_calibrated_device_costs_ops_by_their_curves(file):
    device = device_named(str(file))
    graph = make_fx(lambda x: (x @ x.t()).tanh())(torch.randn(64, 64)).graph
    assert [node_seconds(node, device) for node in call_nodes(graph)] == [3, 2 * 64**3, 3]
    assert [node_seconds(node, CPU) > 0 for node in call_nodes(graph)] == [False, True, True]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))

    def forward(self, x):
        return self.layers(x).square().mean()


def test_plans_are_made_and_simulated_with_a_file(file, capsys, tmp_path):
    def compiled(costs):
        return fxpipe.compile(
            Net(), {"x": torch.randn(64, 64)}, ranks=2, microbatches=2, schedule="1f1b",
            split_points=["layers.2"], dimensions={}, costs=costs, check=False,
        )  # fmt: skip

    planned, other = compiled(str(file)), compiled("H100")
    assert planned.plan.device == "slow"
    assert other.simulate(device=str(file)).seconds == pytest.approx(planned.simulate().seconds)
    doubled = planned.simulate({"microbatch": 128}).costs.stages[0].forward
    assert doubled == pytest.approx(planned.plan.costs.stages[0].forward + 2 * 64**3)
    other.save(tmp_path / "pipe")
    assert main(["simulate", "--costs", str(tmp_path / "pipe"), "--device", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seconds"] == pytest.approx(planned.simulate().seconds)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (lambda data: data.update(format=2), "format is 2 and must be 1"),
        (lambda data: data["device"].update(memory_bandwidth=0), "device.memory_bandwidth is 0"),
        (lambda data: data["device"]["flops"].pop("float32"), "device.flops is .* with a rate of float32"),
        (
            lambda data: data["device"]["curves"]["move"].update(points=[[2, 1], [1, 1]]),
            "sizes in order",
        ),
        (lambda data: data["device"].pop("launch"), "device.launch is missing"),
    ],
)
def test_a_damaged_file_is_refused(file, tmp_path, change, wrong):
    data = json.loads(file.read_text())
    change(data)
    damaged = tmp_path / "damaged.json"
    damaged.write_text(json.dumps(data))
    with pytest.raises(ScheduleError, match=rf"describes no device: .*{wrong}.*fxpipe calibrate"):
        device_named(str(damaged))


def test_a_file_that_is_not_there():
    with pytest.raises(ScheduleError, match=r"nowhere.json describes no device: cannot be read"):
        fxpipe.compile(Net(), {"x": torch.randn(4, 64)}, ranks=2, microbatches=2, costs="nowhere.json")


@pytest.fixture
def small(monkeypatch):
    """Samples of few sizes."""
    for name, sizes in SMALL.items():
        monkeypatch.setattr(samples, name, sizes)


@pytest.mark.slow
def test_the_command_measures_every_kind(small, tmp_path, capsys):
    path = tmp_path / "cpu.json"
    threads = torch.get_num_threads()
    try:
        assert main(["calibrate", str(path), "--name", "this machine", "--json"]) == 0
    finally:
        torch.set_num_threads(threads)
    found = read_device(path)
    assert found.conditions["ranks"] == "1"
    assert found.device.name == "this machine"
    assert found.device.curves.keys() == {*MOVING, *(f"{kind} float32" for kind in COMPUTING)}
    for curve in found.device.curves.values():
        assert all(0 < a[1] <= b[1] < 1 for a, b in pairwise(curve.points))
    assert found.device.intra == CPU.intra  # of one process
    told = json.loads(capsys.readouterr().out)
    assert (told["file"], told["conditions"]["ranks"]) == (str(path), "1")
    assert told["curves"].keys() == found.device.curves.keys()
    assert [*tmp_path.iterdir()] == [path]


def test_the_mean_of_what_ranks_measured():
    slow = replace(CPU, curves={"move": Curve(((1.0, 1.0), (2.0, 4.0)))}, launch=1.0)
    fast = replace(CPU, curves={"move": Curve(((1.0, 0.5), (2.0, 1.0)))}, launch=3.0)
    found = mean_of([slow, fast])
    assert (found.curves["move"].points, found.launch) == (((1.0, 0.75), (2.0, 2.5)), 2.0)


def test_other_threads_are_busy_until_the_end():
    before = torch.get_rng_state()
    with busy_threads(2) as threads:
        assert all(thread.is_alive() for thread in threads)
    assert not any(thread.is_alive() for thread in threads)
    assert torch.equal(torch.get_rng_state(), before)


def test_busy_threads_are_not_for_ranks(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["calibrate", str(tmp_path / "cpu.json"), "--busy", "1"]) == 2
    assert "under torchrun the ranks keep each other busy" in capsys.readouterr().err


def test_the_name_of_the_file():
    assert main(["calibrate", "cpu.toml"]) == 2
    with pytest.raises(OptionError, match=r"'cpu.toml'"):
        fxpipe.compile(Net(), {"x": torch.randn(4, 64)}, ranks=2, microbatches=2, costs="cpu.toml")


@pytest.mark.parametrize(("name", "tier"), [("cpu", "disk"), ("H100", "host")])
def test_what_was_calibrated_offloads_as_the_device_does(tmp_path, name, tier):
    device = device_named(name)
    path = tmp_path / "measured.json"
    write_device(path, replace(device, name=f"{device.name} (calibrated)"), {})
    assert tier_of(name) == tier_of(str(path)) == tier
    assert is_cpu(str(path)) == (tier == "disk")
    write_device(path, replace(device, name="mine"), {})
    assert tier_of(str(path)) is None
