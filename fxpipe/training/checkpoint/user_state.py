"""The user's state in a checkpoint: of schedulers, which all ranks have alike, and of loaders, of which each
replica may have its own, as it takes rows of its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.stateful import Stateful

from fxpipe.runtime.job.process import Process
from fxpipe.training.checkpoint.plain import to_json
from fxpipe.training.checkpoint.training_state import USER, UserState


@dataclass(frozen=True)
class ReplicaState:
    """The state of this process's replica, by name: as JSON has it, its tensors, and digests of both."""

    encoded: dict[str, object] = field(default_factory=dict)
    tensors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)


def replica_state(process: Process | None, user: Mapping[str, Stateful]) -> ReplicaState:
    """The user's state on the first rank of each replica.  Raises RunError as ``to_json`` does."""
    ours = ReplicaState()
    if process is not None and process.world_rank != process.number(process.replica, 0, 0):
        return ours
    replica = 0 if process is None else process.replica
    for k, (name, thing) in enumerate(user.items()):
        state, what = thing.state_dict(), f"state[{name!r}]"
        ours.tensors[name] = {}
        ours.encoded[name] = to_json(state, ours.tensors[name], f"{USER}{replica}.{k}.", what)
        ours.digests[name] = _digest(state)
    return ours


def state_of_replicas(process: Process | None, ours: ReplicaState) -> UserState:
    """The state of all replicas as the checkpoint keeps it.  All ranks must call it.

    A replica that lacks an object of rank 0 gets the state of that.
    """
    leads = process is None or process.leads
    by_replica: dict[str, tuple[object, ...]] = {}
    if process is not None and process.replicas > 1:
        first, *others = _of_replicas(process, ours.digests)  # states travel only where their digests differ
        differ = [
            name for name in first if {digests.get(name, first[name]) for digests in others} - {first[name]}
        ]
        if differ:
            encoded = _of_replicas(
                process, {name: ours.encoded[name] for name in differ if name in ours.encoded}
            )
            by_replica = {name: tuple(x.get(name, encoded[0][name]) for x in encoded) for name in differ}
    tensors = [named for name, named in ours.tensors.items() if leads or name in by_replica]
    return UserState(
        ours.encoded if leads else {}, by_replica, {n: t for named in tensors for n, t in named.items()}
    )


def _of_replicas(process: Process, values: Mapping[str, object]) -> Sequence[dict[str, object]]:
    """The values of the first rank of each replica, by name."""
    texts = process.gather(json.dumps(values).encode())
    return [json.loads(text) for text in texts[:: process.ranks * process.lanes]]


def _digest(state: object) -> str:
    tensors: dict[str, torch.Tensor] = {}
    sha = hashlib.sha256(json.dumps(to_json(state, tensors, "", "")).encode())
    for tensor in tensors.values():
        sha.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()
