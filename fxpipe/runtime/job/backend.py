"""Decides which backend of torch.distributed carries the messages of a step, by the devices of all ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fxpipe.errors import RunError
from fxpipe.runtime.program.accelerator import BACKENDS, identity, is_accelerator, memory_size

#: With one of these in the environment nccl runs several ranks on a GPU, for tests.
SHARING = ("NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_HOSTID")


@dataclass(frozen=True)
class RankPlace:
    """The place where a rank computes.

    ``host``: the machine.  ``kind``: of device, "cuda".  ``name``: of its model.  ``identity``: what tells it
    from others of the machine; "" for the CPU.  ``visible``: the number of devices that the process sees, and
    ``processes`` that of the ranks on its machine.  ``sharing``: whether the backend of the accelerator is
    told to let ranks share one.  ``memory``: the device's, in bytes; 0 of the CPU.
    """

    host: str
    kind: str
    name: str
    identity: str
    visible: int
    processes: int
    sharing: bool = False
    memory: int = 0

    @staticmethod
    def of(device: torch.device) -> RankPlace:
        name, mark = identity(device)
        return RankPlace(
            socket.gethostname(),
            device.type,
            name,
            mark,
            torch.accelerator.device_count(),
            int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            any(os.environ.get(name) for name in SHARING),
            memory_size(device) if is_accelerator(device) else 0,
        )


@dataclass(frozen=True)
class Choice:
    """The backend that carries messages.  ``backend``: "nccl" or "gloo".  ``warnings``: for rank 0 to say."""

    backend: str
    warnings: tuple[str, ...] = ()


def choose(places: Sequence[RankPlace], of_group: str | None = None) -> Choice:
    """The backend for ranks at these places, the same on all of them.

    of_group: that of the process group for their devices, where the user has made one.

    The backend of the accelerators needs one for each rank; where ranks share one, messages go through the
    CPU's memory by gloo.  Raises RunError if ranks have different kinds of devices, and if they share one
    although the machine has others.
    """
    kinds = {place.kind: rank for rank, place in reversed(list(enumerate(places)))}
    if len(kinds) > 1:
        (kind, rank), (other, second), *_ = sorted(kinds.items(), key=lambda item: item[1])
        raise RunError(
            f"Rank {rank} computes on {kind} and rank {second} on {other}. Put the model on the same kind of "
            "device on all ranks."
        )
    kind = places[0].kind
    if kind not in BACKENDS:
        return Choice(of_group or "gloo")
    mixed = _mixed(places)
    shared = _shared(places)
    if shared is None or places[0].sharing:
        if of_group == "gloo":
            slow = (
                f"The process group sends from {kind} by gloo, which is slow: make it with {BACKENDS[kind]}."
            )
            return Choice(of_group, (slow, *mixed))
        return Choice(of_group or BACKENDS[kind], mixed)
    first, second = shared
    place = places[first]
    which = f"Ranks {first} and {second} share one {place.name} of {place.host}"
    if place.visible >= place.processes > 1:  # there is one for each, so the script shares it by mistake
        raise RunError(
            f"{which}, which shows {place.visible} to each process. Put the model of each rank on a device "
            f"of its own: model.to(f\"{kind}:{{os.environ['LOCAL_RANK']}}\")."
        )
    if of_group is not None and of_group != "gloo":
        raise RunError(
            f"{which}, and {of_group} needs one for each rank. Start one process for each device, or make no "
            "process group: then messages go through the CPU's memory."
        )
    slow = f"{which}: messages between ranks go through the CPU's memory (gloo), which is slow."
    return Choice("gloo", (slow, *mixed))


def _shared(places: Sequence[RankPlace]) -> tuple[int, int] | None:
    """The first two ranks that have the same device."""
    seen: dict[tuple[str, str], int] = {}
    for rank, place in enumerate(places):
        first = seen.setdefault((place.host, place.identity), rank)
        if first != rank:
            return first, rank
    return None


def _mixed(places: Sequence[RankPlace]) -> tuple[str, ...]:
    """A warning for ranks with different models of devices."""
    names = {place.name: rank for rank, place in reversed(list(enumerate(places)))}
    if len(names) == 1:
        return ()
    devices = ", ".join(f"rank {rank} {name}" for rank, name in sorted((k, n) for n, k in names.items()))
    return (
        f"The ranks have different devices ({devices}). Stages are cut and scheduled for the device of each "
        "rank; with costs='measured' for that of rank 0.",
    )


def backend_of(group: dist.ProcessGroup, kind: str) -> str | None:
    """The backend of a process group for tensors on a kind of device; None if it has none."""
    return _backends(group).get(kind)


def is_gloo_alone(group: dist.ProcessGroup) -> bool:
    """Whether a group has no other backend, for tensors on any device."""
    return {*_backends(group).values()} == {"gloo"}


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """The backends of a group, by kind of device."""
    pairs = dist.get_backend_config(group).split(",")  # "cpu:gloo,cuda:nccl"
    return dict(pair.split(":", 1) for pair in pairs)
