"""Connects the ranks before the first step: a process group for each channel and each collective.

A receive that is posted early must not block a later send.  Over gloo nothing blocks, and one group serves
all.  The backends of accelerators make a communicator at the first use of a group, which blocks both ranks
until the other one is there, and connect the two within their first message.  In a step ranks come to the
first uses of different channels in different orders, so they would wait for each other for ever.  So all
groups are made here, each with one message of a byte, by all ranks in one order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fxpipe.errors import RunError
from fxpipe.runtime.accelerator import STREAMS, communicator_options, synchronize
from fxpipe.runtime.comm import answered
from fxpipe.runtime.distributed import DistributedComm
from fxpipe.runtime.process import Process
from fxpipe.runtime.sent import SentByThread, SentOnStreams


def connect(
    process: Process, device: torch.device, channels: Sequence[tuple[int, int]], collectives: int
) -> DistributedComm:
    """Connect the ranks of a plan.  All ranks must call it.

    channels: the ordered pairs of ranks that communicate, in the same order on all ranks; the sooner disjoint
    pairs follow each other, the more of them connect at once.  collectives: their number.
    Raises RunError where a rank needs more streams than its device has.
    """
    backend, limit, rank = process.backend(device), process.timeout, process.rank
    if backend == "gloo":
        groups = dict.fromkeys(channels, process.control)
        joint = [dist.new_group(backend=backend, timeout=limit) for _ in range(collectives)]
        wire, sent = torch.device("cpu"), SentByThread()
        return DistributedComm(device, wire, rank, process.ranks, groups, joint, process.control, sent)
    _check_streams(channels, collectives, process.ranks)
    groups, joint = {}, []
    one = torch.zeros(1, dtype=torch.uint8, device=device)
    with process.watch.collective(), answered():
        for pair in channels:
            group = dist.new_group(list(pair), limit, backend, **communicator_options(device))
            if rank in pair:
                groups[pair] = group
                _first_message(group, one, rank, *pair)
        for _ in range(collectives):
            joint.append(dist.new_group(None, limit, backend, **communicator_options(device)))
            _first_broadcast(joint[-1], one)
        synchronize(device)
        dist.barrier(process.control)
    return DistributedComm(
        device, device, rank, process.ranks, groups, joint, process.control, SentOnStreams()
    )


def _first_message(group: dist.ProcessGroup, one: torch.Tensor, rank: int, source: int, target: int) -> None:
    if rank == source:
        group.send([one], dist.get_group_rank(group, target), 0).wait()
    else:
        group.recv([one], dist.get_group_rank(group, source), 0).wait()


def _first_broadcast(group: dist.ProcessGroup, one: torch.Tensor) -> None:
    dist.broadcast(one, 0, group)


def _check_streams(channels: Sequence[tuple[int, int]], collectives: int, ranks: int) -> None:
    for rank in range(ranks):
        number = sum(rank in pair for pair in channels) + collectives
        if number > STREAMS:
            raise RunError(
                f"Rank {rank} has {number} communicators, and torch has {STREAMS} streams for them: two "
                "would share one, and wait for each other. Use fewer stages a rank, or tie fewer parameters."
            )
