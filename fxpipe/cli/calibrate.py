"""``fxpipe calibrate``: measures the device at hand; the file that it writes stands for a device's name."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import mean

import torch
from rich.console import Console
from rich.table import Table

from fxpipe.compiler.progress import Phases
from fxpipe.cost.calibration.background_load import busy_threads
from fxpipe.cost.calibration.calibrate import with_curves
from fxpipe.cost.devices.describe import described_here
from fxpipe.cost.devices.device import Device, Interconnect
from fxpipe.cost.devices.device_file import CALIBRATED, write_device
from fxpipe.cost.kinds import COMPUTING, MOVING
from fxpipe.cost.profile import measured_bandwidth
from fxpipe.errors import OptionError
from fxpipe.plan.curve import Curve
from fxpipe.plan.saved.files import writing
from fxpipe.plan.step import Tier
from fxpipe.runtime.job.process import Process
from fxpipe.runtime.program.accelerator import default_device, is_accelerator
from fxpipe.runtime.ranks.message_rates import message_rates
from fxpipe.strict import structure, unstructure


def calibrate(options: argparse.Namespace) -> None:
    device = default_device()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1 and options.busy:
        raise OptionError("--busy is for one process: under torchrun the ranks keep each other busy.")
    if not is_accelerator(device):
        torch.set_num_threads(options.threads)
    default = ("float32", "tf32", "bfloat16") if is_accelerator(device) else ("float32",)
    arithmetic = tuple(dict.fromkeys(("float32", *(options.arithmetic or default))))
    phase = Phases(f"fxpipe calibrate {device.type}", ends=False)
    phase.expect(len(MOVING) + len(arithmetic) * len(COMPUTING) + 2 + (ranks > 1))
    process = Process.join(device) if ranks > 1 else None
    with busy_threads(options.busy):
        calibrated = _measured(device, arithmetic, phase, process)
    phase.finish("measured")
    if options.name is not None:
        calibrated = replace(calibrated, name=options.name)
    if process is None or process.leads:
        conditions = {
            "ranks": str(ranks),
            "busy": str(options.busy),
            "threads": str(torch.get_num_threads()),
            "torch": torch.__version__,
        }
        with writing(options.file):
            write_device(options.file, calibrated, conditions)
        if options.json:
            print(
                json.dumps({"file": str(options.file), "conditions": conditions, **unstructure(calibrated)})
            )
            return
        console = Console()
        console.print(device_table(calibrated))
        console.print(f"{options.file}", highlight=False, soft_wrap=True)


def _measured(
    device: torch.device, arithmetic: Sequence[str], phase: Phases, process: Process | None
) -> Device:
    base = described_here(device)
    measured = with_curves(replace(base, name=f"{base.name}{CALIBRATED}"), device, arithmetic, phase)
    with phase("copies"):
        tier: Tier = "host" if is_accelerator(device) else "disk"
        measured = replace(measured, offload_bandwidth=measured_bandwidth(tier, None, device))
    if process is None:
        return measured
    with phase("messages"):
        rates = message_rates(process, device)
    texts = process.gather(json.dumps(unstructure(measured)).encode())
    link = Interconnect(rates.bandwidth, rates.latency)
    measured = mean_of([structure(json.loads(text), Device) for text in texts])
    return replace(measured, intra=link, stage_overhead=rates.posting)


def mean_of(devices: Sequence[Device]) -> Device:
    """What ranks measured on equal devices, as one: the mean of each rate."""

    def over(rate: Callable[[Device], float]) -> float:
        return mean(map(rate, devices))

    def curve(kind: str) -> Curve:
        # All have measured the same sizes.
        points = zip(*(device.curves[kind].points for device in devices), strict=True)
        return Curve(tuple((same[0][0], mean(seconds for _, seconds in same)) for same in points))

    kinds = [kind for kind in devices[0].curves if all(kind in device.curves for device in devices)]
    return replace(
        devices[0],
        flops={name: over(lambda d, name=name: d.flops[name]) for name in devices[0].flops},  # type: ignore[misc]
        memory_bandwidth=over(lambda d: d.memory_bandwidth),
        launch=over(lambda d: d.launch),
        offload_bandwidth=over(lambda d: d.offload_bandwidth),
        curves={kind: curve(kind) for kind in kinds},
    )


def device_table(device: Device) -> Table:
    """List of each kind of op the seconds of the smallest, and the rate of the largest."""
    table = Table("op", "smallest", "largest", title=device.name)
    for kind, curve in device.curves.items():
        size, seconds = curve.points[-1]
        unit = "FLOP/s" if kind not in MOVING else "B/s"
        rate = f"{size / seconds / 1e9:.3g} G{unit}" if size else ""
        table.add_row(kind, f"{curve.points[0][1] * 1e6:.3g} µs", rate)
    link = device.intra
    table.add_row("message", f"{link.latency * 1e6:.3g} µs", f"{link.bandwidth / 1e9:.3g} GB/s")
    table.add_row("beside the ops of a section", f"{device.stage_overhead * 1e6:.3g} µs", "")
    table.add_row("copy to the offload store", "", f"{device.offload_bandwidth / 1e9:.3g} GB/s")
    return table
