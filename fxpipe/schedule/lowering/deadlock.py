"""The deadlock proof: lowered programs end, before anything runs.

Messages and collectives must match; then the programs end if the graph of their execution
(:mod:`.execution`) has no cycle.  Ranks share nothing but messages, so there is one graph, whatever the times
of the ops.  It is made for CPUs, whose hosts wait for each op and message: what comes behind another node on
devices, whose streams wait, does so there as well, so programs that end on CPUs end on devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import zip_longest

from fxpipe.errors import DeadlockError
from fxpipe.schedule.lowering import instructions as ins
from fxpipe.schedule.lowering.channels import Channel, channel_of, channels_of
from fxpipe.schedule.lowering.execution import Connections, Rank, execution


def prove(programs: ins.Programs, placement: tuple[int, ...]) -> None:
    """Return if the programs end; linear in their length.

    Raises DeadlockError if a channel's receives are not posted in the order of its sends (naming the first
    difference), or if ranks are stuck (listing what each rank waits for, and from which rank).
    """
    _check_channels(programs, placement)
    _check_collectives(programs)
    stuck = stuck_at(programs, placement, connections_of(programs, placement))
    if stuck is not None:
        raise DeadlockError(_stuck(programs, placement, stuck))


def connections_of(programs: ins.Programs, placement: Sequence[int]) -> Connections:
    """The connections of each rank before the first step: its channels, in one order, and collectives."""
    channels = channels_of(programs, placement)
    joint = sorted(
        {i.collective for i in programs[0] if isinstance(i, ins.StartCollective)}, key=lambda c: c.number
    )
    return [[*(c for c in channels if rank in c), *joint] for rank in range(len(programs))]


def stuck_at(
    programs: ins.Programs,
    placement: Sequence[int],
    connections: Connections | None = None,
    rank: Callable[..., Rank] = Rank,
) -> list[int] | None:
    """The position of each rank's first instruction that is never over (its length, if all are); None if all
    programs end."""
    graph = execution(programs, placement, connections, rank)
    done = set(graph.order())
    if len(done) == len(graph.before):
        return None
    positions = [len(program) for program in programs]
    for node in reversed(graph.hosts):  # so that the first of each rank stays
        at, position = graph.at[node]
        if node not in done:
            positions[at] = max(position, 0)
    return positions


def _check_channels(programs: ins.Programs, placement: tuple[int, ...]) -> None:
    """Receives must be posted in the order in which the messages are sent."""
    sends: defaultdict[Channel, list[ins.Message]] = defaultdict(list)
    posts: defaultdict[Channel, list[ins.Message]] = defaultdict(list)
    for program in programs:
        for instruction in program:
            match instruction:
                case ins.Send(messages):
                    sends[channel_of(messages[0], placement)] += messages
                case ins.PostRecv(messages):
                    posts[channel_of(messages[0], placement)] += messages
    for channel in sends.keys() | posts.keys():
        for turn, (send, post) in enumerate(zip_longest(sends[channel], posts[channel])):
            if send != post:
                source, target = channel
                raise DeadlockError(
                    f"message {turn} from rank {source} to rank {target}: rank {source} has "
                    f"'{f'send {send}' if send else 'no send'}', rank {target} has "
                    f"'{f'post {post}' if post else 'no post'}'"
                )


def _check_collectives(programs: ins.Programs) -> None:
    """All ranks must join the collectives of a communicator in the same order."""
    joins = [[i for i in program if isinstance(i, ins.StartCollective)] for program in programs]
    for group in {i.collective.group for joined in joins for i in joined}:
        first, *others = ([i for i in joined if i.collective.group == group] for joined in joins)
        for rank, joined in enumerate(others, 1):
            for turn, (a, b) in enumerate(zip_longest(first, joined)):
                if a != b:
                    raise DeadlockError(
                        f"collective {turn} of communicator {group}: rank 0 has '{a or 'none'}', rank {rank} "
                        f"has '{b or 'none'}'; the order must be the same on all ranks"
                    )


def _stuck(programs: ins.Programs, placement: tuple[int, ...], at: list[int]) -> str:
    lines = ["the programs of the ranks block each other:"]
    for rank, program in enumerate(programs):
        if at[rank] == len(program):
            lines.append(f"  rank {rank} has finished")
            continue
        instruction = program[at[rank]]
        op = next((str(i.op) for i in program[at[rank] :] if isinstance(i, ins.Compute)), "its end")
        what = f"  rank {rank}, before {op}: {instruction}"
        match instruction:
            case ins.Wait(messages):
                what += f", from rank {channel_of(messages[0], placement)[0]}"
            case ins.WaitCollective(collective, m):
                joined = ins.StartCollective(collective, m)
                missing = [r for r, program in enumerate(programs) if joined not in program[: at[r]]]
                what += f", which rank {', '.join(map(str, missing))} has not joined" if missing else ""
        lines.append(what)
    return "\n".join(lines)
