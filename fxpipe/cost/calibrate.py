"""The description of a device that no table has: its rates are measured, in about 50 ms."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch

from fxpipe.cost.clock import median_seconds
from fxpipe.cost.device import Device
from fxpipe.cost.known_devices import device_named, share_of_largest

#: The known device with the links of an unknown one: a PCIe card.
CARD = "L40S"

#: The rows of the square matrices, and seconds of a product that are long enough to be timed.
SMALLEST, LARGEST, LONG_ENOUGH = 256, 8192, 2e-3
COPIED = 1 << 28  # bytes, several times the largest cache
RUNS, SECONDS = 3, 0.01

#: Tensors of float8 have no plain product: it counts as one of bfloat16, which is slower.
_DTYPES = {
    "tf32": torch.float32,
    "float8": torch.bfloat16,
    **{str(d).removeprefix("torch."): d for d in (torch.float64, torch.float32, torch.bfloat16, torch.half)},
}


def calibrated(device: torch.device, name: str, memory_size: float, arithmetic: Iterable[str]) -> Device:
    """The device with measured rates of matrix products and copies, less what smaller ones do not reach.

    arithmetic: what is computed in; others count as float32, which is always measured.  Links cannot be
    measured from one device: they are those of a card.
    """
    measured = sorted({"float32", *arithmetic} & _DTYPES.keys())
    compute, memory = share_of_largest("compute"), share_of_largest("memory")
    return replace(
        device_named(CARD),
        name=name,
        flops={kind: compute * product_rate(device, kind) for kind in measured},
        memory_bandwidth=memory * copy_rate(device),
        memory_size=memory_size,
    )


def product_rate(device: torch.device, arithmetic: str) -> float:
    """FLOPs a second of a large matrix product."""
    rows, seconds = SMALLEST // 2, 0.0
    own = torch.Generator(device)  # the user's random numbers stay as they are
    with _tf32(arithmetic == "tf32"):
        while seconds < LONG_ENOUGH and rows < LARGEST:
            rows *= 2
            a, b = torch.randn(2, rows, rows, generator=own, dtype=_DTYPES[arithmetic], device=device)
            seconds = median_seconds(partial(torch.mm, a, b), device, runs=RUNS, seconds=SECONDS)
    return 2 * rows**3 / seconds


def copy_rate(device: torch.device) -> float:
    """Bytes a second, read and written, of a large copy within the device's memory."""
    source = torch.zeros(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED / median_seconds(partial(target.copy_, source), device, runs=RUNS, seconds=SECONDS)


@contextlib.contextmanager
def _tf32(wanted: bool) -> Iterator[None]:
    setting = torch.backends.cuda.matmul
    before = setting.fp32_precision
    setting.fp32_precision = "tf32" if wanted else "ieee"
    try:
        yield
    finally:
        setting.fp32_precision = before
