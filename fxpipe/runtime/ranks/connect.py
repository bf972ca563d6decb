"""Connects the ranks before the first step: a process group for each channel and each collective.

A receive that is posted early must not block a later send.  Over gloo nothing blocks, and one group serves
all.  The backends of accelerators make a communicator at the first use of a group, which blocks both ranks
until the other one is there, and connect the two within their first message.  In a step ranks come to the
first uses of different channels in different orders, so they would wait for each other for ever.  So all
groups are made here, each with one message of a byte, by all ranks in one order.

What a communicator connects for a collective depends on its kind, its root and its size (nccl gathers by
sends, and takes another algorithm for large tensors), so the collectives of a step run once as they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from fxpipe.errors import RunError
from fxpipe.plan.lanes import LaneGroup
from fxpipe.runtime.job.last_works import lasting
from fxpipe.runtime.job.numbering import Connection, Summing
from fxpipe.runtime.job.process import Process
from fxpipe.runtime.program.accelerator import (
    STREAMS,
    communicator_options,
    communicator_settings,
    queues,
    synchronize,
)
from fxpipe.runtime.program.comm import NoAnswer, answered
from fxpipe.runtime.program.load_program import CollectiveCall
from fxpipe.runtime.ranks.distributed import DistributedComm
from fxpipe.runtime.ranks.lanes import DistributedLanes
from fxpipe.runtime.ranks.replicas import DistributedReplicas
from fxpipe.runtime.ranks.send_buffers import SentByThread, SentOnStreams
from fxpipe.runtime.torch_private import communicator_error

#: The most that CUDA_DEVICE_MAX_CONNECTIONS can be.
MOST_QUEUES = 32
#: Streams of a rank beside those of its communicators: of ops, offloads, reloads, the loss; and one of sums.
OWN_STREAMS = 4
REPLICAS: Connection = "replicas"


def connect(
    process: Process,
    device: torch.device,
    channels: Sequence[tuple[int, int]],
    groups: int,
    collectives: Sequence[CollectiveCall] = (),
    lanes: Sequence[LaneGroup] = (),
    summing: Sequence[LaneGroup] = (),
) -> DistributedComm:
    """Connect the ranks of a plan, as far as another plan has not.  All ranks must call it.

    channels: the ordered pairs of ranks that communicate, in the same order on all ranks; the sooner disjoint
    pairs follow each other, the more of them connect at once.
    groups: the number of those that collectives have; collectives: those of a step, in the same order on all
    ranks.  lanes: of each dimension of their mesh; summing: those that have gradients, or own rows, of the
    same parameters.
    Raises RunError where a rank needs more streams than torch has, or more queues than its device gives it.
    """
    backend, numbers = process.backend(device), range(groups)
    known = process.groups
    place = device, process.ranks, process.lanes
    wanted = [*channels, *numbers, *([REPLICAS] if process.replicas > 1 else [])]
    all_lanes = LaneGroup(process.lanes)
    along = [group for group in dict.fromkeys([all_lanes, *lanes]) if group.number > 1]
    wanted += [*along, *map(Summing, summing)]
    new = [what for what in wanted if (*place, what) not in known]
    if backend == "gloo":
        known |= {(*place, pair): process.control for pair in channels}
    elif new:
        all_of_device = [what for *other, what in known if tuple(other) == place] + new
        _check_streams(all_of_device, process.ranks, queues(device))
        _warn_of_few_queues(device)
        with process.watch.collective(), answered(), communicator_settings(), _unbound(process.users_group):
            _make_communicators(process, backend, device, new)
            _wait_for_all(process, device)  # so that no step begins before all connections stand

    # Messages of gloo have tags, and its collectives have none: two pipelines share no group of them.
    made: list[dist.ProcessGroup] = []

    def by_gloo(what: Connection) -> dist.ProcessGroup:
        group = process.group_of_each(process.members(what))
        assert group is not None
        made.append(group)
        return group

    def joint(what: Connection) -> dist.ProcessGroup:
        group = by_gloo(what) if backend == "gloo" else known[*place, what]
        assert group is not None
        return group

    comm = DistributedComm(
        device=device,
        wire=torch.device("cpu") if backend == "gloo" else device,
        rank=process.rank,
        ranks=process.ranks,
        processes=process.of_replica(process.replica),
        channels={pair: group for pair in channels if (group := known[*place, pair]) is not None},
        joint=[joint(number) for number in numbers],
        pipeline=process.pipeline,
        sent=SentByThread() if backend == "gloo" else SentOnStreams(),
        on_streams=backend != "gloo",
        tag=process.tag,
    )
    if process.replicas > 1:
        abreast = by_gloo(REPLICAS)
        comm.abreast = DistributedReplicas(
            process.replica, process.replicas, comm.wire, joint(REPLICAS), abreast, comm.on_streams
        )
    if process.lanes > 1:
        _connect_lanes(comm, process.lane, all_lanes, along, summing, joint)
    process.drop_with(comm, made)
    if backend != "gloo" and collectives:
        with process.watch.collective():
            _run_once(comm, collectives)
            _wait_for_all(process, device)
    return comm


def _connect_lanes(
    comm: DistributedComm,
    lane: int,
    all_lanes: LaneGroup,
    along: Sequence[LaneGroup],
    summing: Sequence[LaneGroup],
    joint: Callable[[Connection], dist.ProcessGroup],
) -> None:
    """Give a rank its lanes: all, those along each dimension of their mesh, and those that sum.

    joint: the process group of a connection.
    """
    each = {
        group: DistributedLanes(group.index(lane), group.number, comm.wire, joint(group)) for group in along
    }
    comm.lanes = replace(each[all_lanes], groups=each)
    comm.summing_lanes = {
        group: DistributedReplicas(
            group.index(lane), group.number, comm.wire, joint(Summing(group)), None, comm.on_streams
        )
        for group in summing
    }


@contextmanager
def _unbound(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Keep the groups that a block makes apart from the user's default group.

    One that is bound to a device is split for each new group, by all of its ranks, also for a pair of them:
    a collective of all ranks for each channel.
    """
    bound = None if group is None else group.bound_device_id
    if group is None or bound is None:
        yield
        return
    group.bound_device_id = None
    try:
        yield
    finally:
        group.bound_device_id = bound


def _make_communicators(
    process: Process, backend: str, device: torch.device, connections: Sequence[Connection]
) -> None:
    one = torch.zeros(1, dtype=torch.uint8, device=device)
    for what in connections:
        members = process.members(what)
        group = process.group_of_each(members, backend, **communicator_options(device))
        process.groups[device, process.ranks, process.lanes, what] = group
        if group is None:
            continue
        _follow(process, group, device, _described(process, what, backend))
        if isinstance(what, tuple):
            ends = next(pair for pair in members if process.world_rank in pair)
            _first_message(group, one, process.world_rank, *ends)
        else:
            lasting(dist.broadcast(one, group=group, async_op=True, group_src=0), group).wait()


def _wait_for_all(process: Process, device: torch.device) -> None:
    synchronize(device)
    dist.barrier(process.control)


def _run_once(comm: DistributedComm, collectives: Sequence[CollectiveCall]) -> None:
    for collective in collectives:
        shape, stride, dtype = layout = collective.layout
        value = torch.empty_strided(shape, stride, dtype=dtype, device=comm.device).zero_()
        verb, root = collective.verb, collective.root
        sent = None if verb == "broadcast" and comm.rank != root else value
        pending = comm.collective(verb, sent, layout, root, collective.group)
        if pending is not None:
            comm.wait(pending)
        comm.flush()


def _described(process: Process, what: Connection, backend: str) -> str:
    if isinstance(what, int):
        return f"collective {what} of all ranks, by {backend},"
    if not isinstance(what, tuple):
        of = "lanes" if isinstance(what, LaneGroup | Summing) else what
        return f"an operation of the {of} of this rank, by {backend},"
    source, target = (process.number(process.replica, rank, process.lane) for rank in what)
    return f"a message from rank {source} to rank {target}, by {backend},"


def _follow(process: Process, group: dist.ProcessGroup, device: torch.device, what: str) -> None:
    """Let the watch of this rank end the run where the communicator of a group reports an error.

    No wait of the host does: it waits for the device, where a message that has failed is never over.  torch's
    own watchdog would end the process a minute later, on the ranks that saw the error.
    """
    error = communicator_error(group, device)
    if error is not None:
        process.watch.connections.append(partial(_failure, error, what, process.timeout))


def _failure(error: Callable[[], str], what: str, limit: timedelta) -> NoAnswer | None:
    """The failure that a communicator reports, with what to do."""
    match error():
        case "":
            return None
        case "TIMEOUT":
            return NoAnswer(f"{what} has not ended after {limit}; timeout= of fxpipe.compile allows more")
        case kind:
            return NoAnswer(
                f"{what} failed with {kind}, whose cause is printed above (NCCL_DEBUG=WARN prints more); go "
                "on from the last checkpoint"
            )


def _first_message(group: dist.ProcessGroup, one: torch.Tensor, rank: int, source: int, target: int) -> None:
    begin, peer = (group.send, target) if rank == source else (group.recv, source)
    begin([one], dist.get_group_rank(group, peer), 0).wait()


def _check_streams(connections: Sequence[Connection], ranks: int, queues: int | None) -> None:
    """Raise RunError where streams of a rank would have to share a stream, or a queue of its device."""
    for rank in range(ranks):
        of_rank = [what for what in connections if not isinstance(what, tuple) or rank in what]
        number = len(of_rank)
        fewer = "Use fewer stages a rank, or tie fewer parameters."
        if number > STREAMS:
            raise RunError(
                f"Rank {rank} has {number} communicators, and torch has {STREAMS} streams for them: two "
                f"would share one, and wait for each other. {fewer}"
            )
        needed = number + OWN_STREAMS + len({type(what) for what in of_rank if not isinstance(what, tuple)})
        if queues is not None and queues < needed:
            raise RunError(
                f"CUDA_DEVICE_MAX_CONNECTIONS={queues} makes the {needed} streams of rank {rank} share "
                "queues of its GPU, in which ops and messages can wait for each other for ever. "
                + (f"Unset it: fxpipe sets it to {MOST_QUEUES}." if needed <= MOST_QUEUES else fewer)
            )


def _warn_of_few_queues(device: torch.device) -> None:
    if device.type == "cuda" and queues(device) is None:
        warnings.warn(
            "CUDA was used before fxpipe was imported, with CUDA_DEVICE_MAX_CONNECTIONS unset: streams share "
            "the few queues of a GPU, in which ops and messages can wait for each other for ever. Import "
            f"fxpipe first, or set CUDA_DEVICE_MAX_CONNECTIONS={MOST_QUEUES}.",
            stacklevel=3,
        )
