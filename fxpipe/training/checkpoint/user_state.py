"""The user's state in a checkpoint: of schedulers, which all ranks have alike, and of loaders, of which each
replica may have its own, as it takes rows of its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from fxpipe.runtime.job.process import Process
from fxpipe.training.checkpoint.plain import to_json
from fxpipe.training.checkpoint.training_state import USER, UserState


@dataclass(frozen=True)
class Own:
    """The state of this process's replica, by name: as JSON has it, its tensors, and digests of both."""

    encoded: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)


def own_state(process: Process | None, user: Mapping[str, Stateful]) -> Own:
    """On the first rank of each replica; the others keep none.  Raises RunError as ``to_json`` does."""
    found = Own()
    if process is not None and process.world_rank != process.number(process.replica, 0, 0):
        return found
    replica = 0 if process is None else process.replica
    for k, (name, thing) in enumerate(user.items()):
        state, what = thing.state_dict(), f"state[{name!r}]"
        found.tensors[name] = {}
        found.encoded[name] = to_json(state, found.tensors[name], f"{USER}{replica}.{k}.", what)
        found.digests[name] = _digest(state)
    return found


def kept_state(process: Process | None, own: Own) -> UserState:
    """What the checkpoint keeps of the state of all replicas.  All ranks must call it.

    A replica that lacks an object of rank 0 gets the state of that.
    """
    leads = process is None or process.leads
    by_replica: dict[str, tuple[Any, ...]] = {}
    if process is not None and process.replicas > 1:
        first, *others = _of_replicas(process, own.digests)
        differ = [
            name for name in first if {found.get(name, first[name]) for found in others} - {first[name]}
        ]
        if differ:
            given = _of_replicas(process, {name: own.encoded[name] for name in differ if name in own.encoded})
            by_replica = {name: tuple(x.get(name, given[0][name]) for x in given) for name in differ}
    tensors = [held for name, held in own.tensors.items() if leads or name in by_replica]
    return UserState(
        own.encoded if leads else {}, by_replica, {n: t for held in tensors for n, t in held.items()}
    )


def _of_replicas(process: Process, own: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    """What the first rank of each replica gives."""
    texts = process.gather(json.dumps(own).encode())
    return [json.loads(text) for text in texts[:: process.ranks * process.lanes]]


def _digest(state: Any) -> str:
    tensors: dict[str, torch.Tensor] = {}
    found = hashlib.sha256(json.dumps(to_json(state, tensors, "", "")).encode())
    for tensor in tensors.values():
        found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
