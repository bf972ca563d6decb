"""Descriptions of devices in files: ``fxpipe calibrate`` writes them, and they stand for a device's name."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from fxpipe.cost.devices.device import Device
from fxpipe.errors import ScheduleError
from fxpipe.plan.version import __version__
from fxpipe.strict import MEBIBYTE, Mismatch, parse_json, read_text, refused, shown, structure, unstructure

FORMAT = 1
#: Behind the name of a device that was measured.
CALIBRATED = " (calibrated)"
SUFFIX = ".json"
MOST_BYTES = MEBIBYTE


@dataclass(frozen=True)
class DeviceFile:
    """``device``, and how it was measured: ``conditions``, such as the number of ranks that were busy."""

    format: int
    device: Device
    conditions: dict[str, str]
    version: str = __version__


def write_device(path: Path, device: Device, conditions: dict[str, str]) -> None:
    """Write a file that ``read_device`` reads; who reads it meanwhile finds it whole, or as before.

    Raises OSError where that fails.
    """
    text = json.dumps(unstructure(DeviceFile(FORMAT, device, conditions)), indent=1)
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        beside.write_text(text + "\n", encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def is_device_file(name: str) -> bool:
    """Whether the name of a device is that of a file."""
    return name.endswith(SUFFIX)


def read_device(path: Path) -> DeviceFile:
    """The description in a file.  Raises ScheduleError for a file that is not there, or that is none."""
    remedy = f"Write one with fxpipe calibrate {path}, or give the name of a known device."
    with refused(ScheduleError, f"{path} describes no device:", remedy):
        data = parse_json(read_text(path, MOST_BYTES))
        version = data.get("format") if isinstance(data, dict) else None
        if version != FORMAT:
            raise Mismatch(f"is {shown(version)} and must be {FORMAT}", "format")
        return structure(data, DeviceFile)
