"""Costs on a GPU: ``pytest -m gpu``."""

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.cost.calibration.calibrate import calibrated, copy_rate, product_rate
from fxpipe.cost.devices.known_devices import data_sheets, reported_device
from fxpipe.runtime.program.accelerator import identity, memory_size

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

GPU = torch.device("cuda", 0)


def test_a_known_gpu_is_as_described():
    """Large kernels reach what plans count on, and no more than the data sheet's peak."""
    known = reported_device(identity(GPU)[0], memory_size(GPU))
    if known is None:
        pytest.skip(f"no description of {identity(GPU)[0]}")
    (sheet,) = (sheet for sheet in data_sheets() if sheet.name == known.name)
    for kind in ("float32", "tf32", "bfloat16"):
        if kind in sheet.peak:
            assert known.rate(kind) <= product_rate(GPU, kind) <= 1.1 * sheet.peak[kind]
    assert known.memory_bandwidth <= copy_rate(GPU) <= 1.1 * sheet.memory_bandwidth


def test_the_calibration_of_any_gpu():
    found = calibrated(GPU, "this GPU", memory_size(GPU), ["bfloat16"])
    assert found.flops["float32"] < found.flops["bfloat16"]
    assert 1e11 < found.memory_bandwidth < 1e14


class Wide(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Linear(4096, 4096, bias=False) for _ in range(8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).float().mean()


def test_sections_of_matrix_products_take_the_analytic_time():
    example = {"x": torch.randn(8192, 4096, dtype=torch.bfloat16, device=GPU)}
    model = Wide().to(GPU, torch.bfloat16)
    analytic, measured = (
        fxpipe.compile(model, example, ranks=2, microbatches=2, schedule="1f1b", costs=costs)
        for costs in ("analytic", "measured")
    )
    for one, other in zip(analytic.stages, measured.stages, strict=True):
        assert other.costs.total == pytest.approx(one.costs.total, rel=0.15)
