"""Descriptions of devices: by the names that users give, by those that torch reports, and by calibration."""

import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import fx, nn

from fxpipe.cost.arithmetic import arithmetic_of
from fxpipe.cost.calibration import calibrate
from fxpipe.cost.devices import describe
from fxpipe.cost.devices.known_devices import (
    CPU,
    data_sheets,
    device_named,
    device_names,
    is_device_name,
    reported_device,
)
from fxpipe.cost.nodes import node_seconds
from fxpipe.errors import ScheduleError
from fxpipe.ir.compat import make_fx
from fxpipe.ir.storage import call_nodes

GIB = 2**30


@pytest.fixture
def _settings():
    """The settings of TF32 as they are without a user's change, before and after the test."""
    matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = matmul.fp32_precision, convolution.fp32_precision
    matmul.fp32_precision, convolution.fp32_precision = "none", "tf32"
    yield
    matmul.fp32_precision, convolution.fp32_precision = before


# -- the table -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sheet", data_sheets(), ids=lambda sheet: sheet.name)
def test_every_data_sheet_is_whole(sheet):
    """No rate above the data sheet's, none missing, and a source."""
    device = device_named(sheet.name)
    assert {"float32", "float64"} <= device.flops.keys() == sheet.peak.keys()
    for arithmetic, peak in sheet.peak.items():
        assert 0.3 * peak <= device.rate(arithmetic) <= peak
    assert 0.5 * sheet.memory_bandwidth <= device.memory_bandwidth <= sheet.memory_bandwidth
    assert device.intra.bandwidth >= 0.9 * device.inter.bandwidth
    assert device.intra.latency <= device.inter.latency
    assert sheet.source
    peaks = [sheet.peak[a] for a in ("float64", "float32", "tf32", "bfloat16", "float8") if a in sheet.peak]
    assert peaks == sorted(peaks)


def test_names_are_of_one_device_each():
    names = [name.casefold() for sheet in data_sheets() for name in (sheet.name, *sheet.also)]
    assert len(set(names)) == len(names)


def test_the_page_lists_the_devices():
    text = (Path(__file__).parents[2] / "docs" / "costs.md").read_text()
    assert f"\n{', '.join(device_names())}.\n" in text.replace(",\n", ", ")


@pytest.mark.parametrize(
    ("reported", "gib", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100 SXM 40GB"),
        ("A100-SXM4-40GB", 39.6, "A100 SXM 40GB"),  # by older drivers
        ("NVIDIA A100-SXM4-80GB", 79.3, "A100 SXM 80GB"),
        ("NVIDIA A100-PCIE-40GB", 39.4, "A100 PCIe 40GB"),
        ("NVIDIA A100 80GB PCIe", 79.3, "A100 PCIe 80GB"),
        ("NVIDIA H100 80GB HBM3", 79.1, "H100 SXM"),
        ("NVIDIA H100 PCIe", 79.2, "H100 PCIe"),
        ("NVIDIA H100 NVL", 93.1, "H100 NVL"),
        ("NVIDIA H200", 139.8, "H200 SXM"),
        ("NVIDIA B200", 178.4, "B200"),
        ("AMD Instinct MI300X", 192.0, "MI300X"),
        ("AMD Instinct MI300X VF", 191.7, "MI300X"),
        ("NVIDIA L40S", 44.4, "L40S"),
        ("NVIDIA GeForce RTX 4090", 23.6, "RTX 4090"),
    ],
)
def test_devices_by_what_torch_reports(reported, gib, name):
    assert reported_device(reported, gib * GIB) == device_named(name)


@pytest.mark.parametrize(
    ("reported", "gib"),
    [
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9.8),
        ("NVIDIA H100 80GB HBM3 MIG 7g.80gb", 79.1),
        ("AMD Instinct MI300X", 24.0),  # one of the eight parts of a GPU
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.6),
        ("NVIDIA GeForce RTX 4090 D", 23.6),
        ("NVIDIA H200 NVL", 139.8),
        ("NVIDIA GH200 480GB", 94.5),
        ("NVIDIA L40", 44.4),
        ("Tesla V100-SXM2-16GB", 15.8),
        ("cpu", 8.0),
    ],
)
def test_devices_that_only_seem_to_be_known(reported, gib):
    assert reported_device(reported, gib * GIB) is None


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("H100", "H100 SXM"),
        ("h100-sxm", "H100 SXM"),
        ("A100", "A100 SXM 80GB"),
        ("a100 40gb", "A100 SXM 40GB"),
        ("B200", "B200"),
        ("4090", "RTX 4090"),
        ("CPU", "cpu"),
    ],
)
def test_names_that_a_user_gives(asked, name):
    assert is_device_name(asked)
    assert device_named(asked).name == name


def test_an_unknown_name():
    assert not is_device_name("H1000")
    with pytest.raises(
        ScheduleError, match=r"called 'H1000'\. Did you mean 'H100 SXM'\? Known: cpu, .*H100 SXM.*RTX 4090"
    ):
        device_named("H1000")
    assert {"cpu", "H100 SXM", "H100 PCIe", "H200 SXM", "B200", "MI300X", "L40S"} <= {*device_names()}


def test_rates_are_those_that_large_kernels_reach():
    h100, a100 = device_named("H100"), device_named("A100")
    assert h100.rate("bfloat16") == pytest.approx(693e12, rel=0.01)
    assert h100.rate("float32") == pytest.approx(47e12, rel=0.01)
    assert h100.rate("tf32") == pytest.approx(346e12, rel=0.01)
    assert a100.rate("float32") == pytest.approx(13.7e12, rel=0.01)
    assert h100.intra.bandwidth == pytest.approx(300e9, rel=0.02)
    assert h100.inter.bandwidth == pytest.approx(45e9, rel=0.02)
    assert h100.offload_bandwidth == pytest.approx(43e9, rel=0.02)
    assert a100.rate("float8") == a100.rate("int8") == a100.rate("float32")  # which it does not have


def test_roofline():
    device = replace(CPU, flops={"float32": 100.0, "float64": 50.0}, memory_bandwidth=10.0, launch=0.5)
    assert device.seconds(400, 1, "float32") == 4.5
    assert device.seconds(400, 1, "float64") == 8.5
    assert device.seconds(400, 100, "float32") == 10.5
    assert device.seconds(0, 0, "float32") == 0.5
    assert replace(device, attention=0.5).seconds(400, 1, "float32", "attention backward") == 8.5


def test_larger_kernels_are_more_efficient():
    """In FLOPs and in bytes a second, up to the device's rates."""
    device = device_named("H200")
    flops = [n / device.seconds(n, 0, "bfloat16") for n in (10**8, 10**10, 10**12, 10**14)]
    assert flops == sorted(flops)
    assert flops[0] < 0.1 * flops[-1]
    assert flops[-1] == pytest.approx(device.rate("bfloat16"), rel=1e-2)
    moved = [n / device.seconds(0, n, "float32", "move") for n in (10**5, 10**7, 10**9, 10**11)]
    assert moved == sorted(moved)
    assert moved[-1] == pytest.approx(device.memory_bandwidth, rel=1e-2)


def test_attention_on_hopper_is_slower_than_products():
    hopper, ada = device_named("H200"), device_named("RTX 4090")
    assert hopper.rate("bfloat16", "attention") == pytest.approx(0.35 * 989.4e12)
    assert hopper.rate("bfloat16", "product") == pytest.approx(0.7 * 989.4e12)
    assert ada.rate("bfloat16", "attention") == ada.rate("bfloat16")


# -- arithmetic ----------------------------------------------------------------------------------------


def products(dtype: torch.dtype) -> dict[str, fx.Node]:
    """A matrix product and a convolution."""

    def step(x, image, weight):
        return x @ x.mT, nn.functional.conv2d(image, weight)

    given = (torch.randn(64, 64), torch.randn(1, 8, 8, 8), torch.randn(8, 8, 3, 3))
    graph = make_fx(step)(*(x.to(dtype) for x in given)).graph
    nodes = {str(n.target).split(".")[1]: n for n in call_nodes(graph)}
    return {"product": nodes["mm"], "convolution": nodes["convolution"]}


@pytest.mark.usefixtures("_settings")
def test_float32_follows_the_settings_of_tf32():
    nodes = products(torch.float32)
    assert {name: arithmetic_of(n) for name, n in nodes.items()} == {
        "product": "float32",
        "convolution": "tf32",  # as torch's defaults are
    }
    torch.backends.cuda.matmul.allow_tf32 = True  # the older setting
    assert arithmetic_of(nodes["product"]) == "tf32"
    torch.set_float32_matmul_precision("highest")
    assert arithmetic_of(nodes["product"]) == "float32"
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    assert arithmetic_of(nodes["product"]) == "tf32"
    assert arithmetic_of(nodes["convolution"]) == "float32"


@pytest.mark.usefixtures("_settings")
@pytest.mark.parametrize("arithmetic", ["tf32", "float32"])
def test_a_calibration_measures_convolutions_in_its_arithmetic_too(arithmetic, monkeypatch):
    """TF32 is the default of convolutions alone."""
    timed = []

    def seconds(op, device, **options):
        timed.append({name: arithmetic_of(node) for name, node in products(torch.float32).items()})
        return 1.0

    monkeypatch.setattr(calibrate, "median_seconds", seconds)
    calibrate.product_rate(torch.device("cpu"), arithmetic)
    assert timed == [{"product": arithmetic, "convolution": arithmetic}]
    nodes = products(torch.float32)
    assert [arithmetic_of(nodes[name]) for name in ("product", "convolution")] == ["float32", "tf32"]


@pytest.mark.usefixtures("_settings")
def test_the_time_of_a_product_by_the_setting():
    device = replace(device_named("H100"), launch=0.0, memory_bandwidth=1e30)
    node = products(torch.float32)["product"]
    slow = node_seconds(node, device)
    assert slow == pytest.approx(2 * 64**3 / (0.7 * 67e12))
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert slow / node_seconds(node, device) == pytest.approx(494.7 / 67)
    without = replace(device_named("MI300X"), launch=0.0, memory_bandwidth=1e30)  # no TF32
    assert node_seconds(node, without) == 2 * 64**3 / without.flops["float32"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_do_not_follow_it(dtype):
    assert {arithmetic_of(n) for n in products(dtype).values()} == {str(dtype).removeprefix("torch.")}


def test_a_product_with_a_wider_result_or_wider_scales():
    def step(a, b, scale):
        return torch.ops.aten._scaled_mm(a, b, scale, scale, out_dtype=torch.bfloat16)

    a = torch.randn(16, 16).to(torch.float8_e4m3fn)
    (node,) = call_nodes(make_fx(step)(a, a.mT, torch.ones(())).graph)[-1:]
    assert "_scaled_mm" in str(node.target)
    assert arithmetic_of(node) == "float8"


# -- devices that no table has -------------------------------------------------------------------------


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, memory: float) -> None:
    """Let the CPU be reported as a GPU."""
    monkeypatch.setattr(describe, "is_accelerator", lambda device: True)
    monkeypatch.setattr(describe, "identity", lambda device: (name, "0"))
    monkeypatch.setattr(describe, "memory_size", lambda device: memory)


def test_an_unknown_device_is_calibrated(monkeypatch, caplog):
    """On the CPU, under the name of a GPU."""
    pretend(monkeypatch, "NVIDIA X1", 16 * GIB)
    graph = make_fx(lambda x: x.double() @ x.double().mT)(torch.randn(8, 8)).graph
    with caplog.at_level(logging.WARNING, logger="fxpipe"):
        found = describe.describe("analytic", torch.device("cpu"), graph)
    assert found.name == "NVIDIA X1 (calibrated)"
    assert found.flops.keys() == {"float32", "float64"}
    told = re.search(r"No description of NVIDIA X1: .*float32 (\S+) TFLOP/s.*memory (\S+) GB/s", caplog.text)
    assert told is not None
    rates = found.flops["float32"] / 1e12, found.memory_bandwidth / 1e9
    assert [*map(float, told.groups())] == pytest.approx(rates, rel=0.01)
    assert 1e9 < found.flops["float64"] < found.flops["float32"] < 1e13
    assert 1e8 < found.memory_bandwidth < 1e12
    assert found.memory_size == 16 * GIB
    assert found.intra == device_named("L40S").intra


def test_a_calibrated_device_counts_as_a_known_one(monkeypatch):
    """An H100 whose largest kernels reach what they do counts as the described one does."""
    monkeypatch.setattr(calibrate, "product_rate", lambda device, kind: 0.8 * 989.4e12)
    monkeypatch.setattr(calibrate, "copy_rate", lambda device: 0.9 * 3.35e12)
    found = calibrate.calibrated(torch.device("cpu"), "X", 80e9, ["bfloat16"])
    described = device_named("H100")
    assert found.rate("bfloat16") == pytest.approx(described.rate("bfloat16"))
    assert found.memory_bandwidth == pytest.approx(described.memory_bandwidth)


def test_a_known_device_is_not_calibrated(monkeypatch):
    pretend(monkeypatch, "NVIDIA H200", 139.8 * GIB)
    monkeypatch.setattr(describe, "calibrated", None)
    here, graph = torch.device("cpu"), fx.Graph()
    assert describe.describe("measured", here, graph) == device_named("H200")
    assert describe.describe("A100", here, graph) == device_named("A100")


def test_the_cpu_is_described_as_one_core():
    assert describe.describe("analytic", torch.device("cpu"), fx.Graph()) is CPU


def test_calibration_leaves_the_random_numbers_as_they_are():
    before = torch.get_rng_state()
    calibrate.product_rate(torch.device("cpu"), "float32")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.usefixtures("_settings")
def test_calibration_of_tf32_sets_it_and_restores_the_setting(monkeypatch):
    seen = []

    def seconds(run, device, **limits):
        seen.append(torch.backends.cuda.matmul.fp32_precision)
        return 1.0

    monkeypatch.setattr(calibrate, "median_seconds", seconds)
    here = torch.device("cpu")
    assert calibrate.product_rate(here, "tf32") == 2 * calibrate.SMALLEST**3
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    calibrate.product_rate(here, "float32")
    assert seen == ["tf32", "ieee"]
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


def test_a_fast_device_gets_larger_products(monkeypatch):
    """Until one takes long enough to be timed, or is as large as it may be."""
    rows = []

    def seconds(run, device, **limits):
        rows.append(len(run.args[0]))
        return 2 * rows[-1] ** 3 / 1e12

    monkeypatch.setattr(calibrate, "median_seconds", seconds)
    assert calibrate.product_rate(torch.device("cpu"), "bfloat16") == pytest.approx(1e12)
    assert rows == [256, 512, 1024]
