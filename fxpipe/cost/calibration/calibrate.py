"""Descriptions of devices by measurement: in about 50 ms of one that no table has, when a model is compiled;
in less than a minute of any one, with the seconds of each kind of op by size, for ``fxpipe calibrate``.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from statistics import mean
from typing import Any

import torch

from fxpipe.cost.calibration.clock import median_seconds
from fxpipe.cost.calibration.samples import Maker, samples
from fxpipe.cost.devices.device import Device
from fxpipe.cost.devices.known_devices import device_named, share_of_largest
from fxpipe.cost.kinds import COMPUTING, MOVING
from fxpipe.errors import OptionError
from fxpipe.plan.curve import Curve
from fxpipe.runtime.program.accelerator import is_accelerator

#: The known device with the links of an unknown one: a PCIe card.
CARD = "L40S"

#: The rows of the square matrices, and seconds of a product that are long enough to be timed.
SMALLEST, LARGEST, LONG_ENOUGH = 256, 8192, 2e-3
COPIED = 1 << 28  # bytes, several times the largest cache
RUNS, SECONDS = 3, 0.01
#: Of a sample: calls in a run take so many seconds, so many runs, and at most so many seconds together.
BATCH, BATCHES, SAMPLE_SECONDS, MOST_CALLS = 0.5e-3, 9, 0.15, 500
TURNS = 30  # of an op behind others

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


def with_curves(
    base: Device,
    device: torch.device,
    arithmetic: Sequence[str],
    phase: Callable[[str], contextlib.AbstractContextManager[object]],
) -> Device:
    """The description with the measured seconds of each kind of op, and rates that follow from them.

    base: has the links.  arithmetic: that is measured.  phase: the progress of each kind, by its name.
    A kind that the device lacks in an arithmetic (attention in float64 on a GPU, say) has no curve.
    """
    curves: dict[str, Curve] = {}
    with phase("ops in turns"):
        extra = _in_turns(device)
    for kind in MOVING:
        with phase(kind):
            curves[kind] = _curve(device, kind, "float32", extra[kind])
    for name in arithmetic:
        for kind in COMPUTING:
            # Some devices lack products or convolutions in some arithmetic.
            with phase(f"{kind} {name}"), contextlib.suppress(NotImplementedError):
                curves[f"{kind} {name}"] = _curve(device, kind, name, extra["product"])
    if missing := [name for name in arithmetic if f"product {name}" not in curves]:
        raise OptionError(f"{device} has no {', '.join(missing)} products: leave it out of --arithmetic.")
    moved, product = curves["move"], {name: curves[f"product {name}"] for name in arithmetic}
    return replace(
        base,
        flops={name: 1 / _slope(curve) for name, curve in product.items()},
        memory_bandwidth=1 / _slope(moved),
        launch=moved.points[0][1],
        curves=curves,
    )


def _slope(curve: Curve) -> float:
    """The seconds of a unit of size, among large ones."""
    (start, least), (end, most) = curve.points[-2:]
    return max(most - least, 1e-12) / (end - start)


def _in_turns(device: torch.device) -> dict[str, float]:
    """Measure by kind the seconds that an op takes longer where others run between its calls, as in a step:
    their code and operands have then taken the place of its own in the caches.

    0 on an accelerator, whose host is ahead of it.
    """
    make = Maker(device, torch.float32, torch.Generator(device).manual_seed(0))
    kinds = {kind: samples(kind, make)[0][1] for kind in (*MOVING, "product")}
    if is_accelerator(device):
        return dict.fromkeys(kinds, 0.0)

    def others() -> None:
        for ops in kinds.values():
            for op in ops:
                op()

    def behind_others(op: Callable[[], object]) -> float:
        return median_seconds(op, device, before=others, runs=TURNS)

    with torch.no_grad():
        clock = behind_others(lambda: None)
        return {
            kind: mean(max(0.0, behind_others(op) - clock - _op_seconds(op, device)) for op in ops)
            for kind, ops in kinds.items()
        }


def _curve(device: torch.device, kind: str, arithmetic: str, extra: float) -> Curve:
    make = Maker(device, _DTYPES[arithmetic], torch.Generator(device).manual_seed(0))
    with _tf32(arithmetic == "tf32"), torch.no_grad():
        samples_seconds = [
            (size, extra + mean(_op_seconds(op, device) for op in ops)) for size, ops in samples(kind, make)
        ]
    # What is measured of a larger op may be less, by noise.
    longest = accumulate((seconds for _, seconds in samples_seconds), max)
    return Curve(tuple((float(size), t) for (size, _), t in zip(samples_seconds, longest, strict=True)))


def _op_seconds(op: Callable[[], object], device: torch.device) -> float:
    """The seconds of one of many calls, one behind the other, as in a step."""
    once = median_seconds(op, device, runs=RUNS, seconds=SECONDS)
    calls = min(MOST_CALLS, max(1, math.ceil(BATCH / max(once, 1e-9))))

    def batch() -> None:
        for _ in range(calls):
            op()

    return median_seconds(batch, device, runs=BATCHES, seconds=SAMPLE_SECONDS) / calls


def product_rate(device: torch.device, arithmetic: str) -> float:
    """FLOPs a second of a large matrix product."""
    rows, seconds = SMALLEST // 2, 0.0
    generator = torch.Generator(device)  # the user's random numbers stay as they are
    with _tf32(arithmetic == "tf32"):
        while seconds < LONG_ENOUGH and rows < LARGEST:
            rows *= 2
            a, b = torch.randn(2, rows, rows, generator=generator, dtype=_DTYPES[arithmetic], device=device)
            seconds = median_seconds(partial(torch.mm, a, b), device, runs=RUNS, seconds=SECONDS)
    return 2 * rows**3 / seconds


def copy_rate(device: torch.device) -> float:
    """Bytes a second, read and written, of a large copy within the device's memory."""
    source = torch.zeros(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED / median_seconds(partial(target.copy_, source), device, runs=RUNS, seconds=SECONDS)


@contextlib.contextmanager
def _tf32(wanted: bool) -> Iterator[None]:
    """Compute float32 products and convolutions, whose default is TF32, as it is wanted."""
    settings: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)  # type: ignore[attr-defined]
    before = [setting.fp32_precision for setting in settings]
    for setting in settings:
        setting.fp32_precision = "tf32" if wanted else "ieee"
    try:
        yield
    finally:
        for setting, value in zip(settings, before, strict=True):
            setting.fp32_precision = value
