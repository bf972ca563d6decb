"""The devices of ``devices.toml``, by the names that users give and by those that torch reports."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path

from fxpipe.cost.devices.device import Device, Interconnect
from fxpipe.cost.devices.device_file import CALIBRATED, is_device_file, read_device
from fxpipe.errors import ScheduleError, suggested
from fxpipe.plan.step import Tier
from fxpipe.strict import structure

#: Memory that torch reports, relative to that of the data sheet, which counts in GB or in GiB.
_FULL_SIZE = 0.85, 1.15


@dataclass(frozen=True)
class _Link:
    bandwidth: float
    latency: float
    source: str


@dataclass(frozen=True)
class DataSheet:
    """An entry of ``devices.toml``, which describes the fields."""

    name: str
    peak: dict[str, float]
    memory_bandwidth: float
    memory_size: float
    intra: str
    inter: str
    host: str
    source: str
    also: tuple[str, ...] = ()
    reported: tuple[str, ...] = ()
    reached: dict[str, float] = field(default_factory=dict)
    launch: float = 5e-6
    stage_overhead: float = 20e-6

    def is_reported_as(self, name: str, memory: float) -> bool:
        """Whether torch reports this device as ``name``, with so many bytes of memory."""
        least, most = (share * self.memory_size for share in _FULL_SIZE)
        return least <= memory <= most and any(re.fullmatch(p, name, re.IGNORECASE) for p in self.reported)


@dataclass(frozen=True)
class _Table:
    reached: dict[str, float]
    largest: dict[str, float]
    link: dict[str, _Link]
    device: tuple[DataSheet, ...]


def device_names() -> tuple[str, ...]:
    """The names of all known devices."""
    return tuple(sheet.name for sheet in data_sheets())


def data_sheets() -> tuple[DataSheet, ...]:
    return _table().device


def device_named(name: str) -> Device:
    """The device that a user calls ``name``, in any case of letters, or that of a file (``device_file.py``).

    Raises ScheduleError, listing the known ones, for another name, and as ``read_device`` does.
    """
    return read_device(Path(name)).device if is_device_file(name) else _described(_known_sheet(name))


def _known_sheet(name: str) -> DataSheet:
    sheet = _sheet_named(name)
    if sheet is None:
        names = device_names()
        raise ScheduleError(
            f"No device is called {name!r}.{suggested(name, names)} Known: {', '.join(names)}."
        )
    return sheet


def peak_rate(name: str, arithmetic: str) -> float:
    """FLOPs a second on the data sheet of a device, or of the largest product that was measured on it; an
    arithmetic that it lacks counts as float32.

    Raises ScheduleError as ``device_named`` does.
    """
    peak = device_named(name).flops if is_device_file(name) else _known_sheet(name).peak
    return peak.get(arithmetic, peak["float32"])


def tier_of(name: str) -> Tier | None:
    """The offload store of a device, named as for ``device_named``; None if no data sheet has the name."""
    if is_device_file(name):
        name = read_device(Path(name)).device.name.removesuffix(CALIBRATED)
    sheet = _sheet_named(name)
    return None if sheet is None else "disk" if sheet.host == "disk" else "host"


def is_cpu(name: str) -> bool:
    """Whether a device, named as for ``device_named``, is a CPU."""
    return tier_of(name) == "disk"


def is_device_name(name: str) -> bool:
    """Whether a name is that of a known device, or of a file."""
    return is_device_file(name) or _sheet_named(name) is not None


def _sheet_named(name: str) -> DataSheet | None:
    names = ((_plain(n), sheet) for sheet in data_sheets() for n in (sheet.name, *sheet.also))
    return next((sheet for plain, sheet in names if plain == _plain(name)), None)


def reported_device(name: str, memory: float) -> Device | None:
    """The device that torch reports under ``name`` with so many bytes of memory; None for an unknown one."""
    for sheet in data_sheets():
        if sheet.is_reported_as(name, memory):
            return _described(sheet)
    return None


def share_of_largest(rate: str) -> float:
    """The rate that plans count on, relative to that of one large kernel; ``rate``: compute or memory."""
    return _table().reached[rate] / _table().largest[rate]


def _plain(name: str) -> str:
    return " ".join(name.casefold().replace("-", " ").split())


def _described(sheet: DataSheet) -> Device:
    reached = _table().reached | sheet.reached
    return Device(
        name=sheet.name,
        flops={arithmetic: reached["compute"] * peak for arithmetic, peak in sheet.peak.items()},
        memory_bandwidth=reached["memory"] * sheet.memory_bandwidth,
        memory_size=sheet.memory_size,
        intra=_link(sheet.intra, reached["link"]),
        inter=_link(sheet.inter, reached["network"]),
        offload_bandwidth=_link(sheet.host, reached["link"]).bandwidth,
        launch=sheet.launch,
        stage_overhead=sheet.stage_overhead,
        attention=reached.get("attention", reached["compute"]) / reached["compute"],
    )


def _link(name: str, reached: float) -> Interconnect:
    link = _table().link[name]
    return Interconnect(reached * link.bandwidth, link.latency)


@cache
def _table() -> _Table:
    text = files("fxpipe.cost.devices").joinpath("devices.toml").read_text(encoding="utf-8")
    return structure(tomllib.loads(text), _Table)


CPU = device_named("cpu")
