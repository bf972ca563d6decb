"""The deadlock proof: lowered programs end, before anything runs.

The semantics is rendezvous: sends and posted receives do not block their rank; a message is delivered when
its send and its receive are issued and all earlier messages of its channel are delivered; only a wait blocks.
A collective completes when all ranks have joined it and all earlier collectives of its number.  Ranks share
nothing else, so if one interleaving of the programs ends, all interleavings end.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import zip_longest

from fxpipe.errors import DeadlockError
from fxpipe.schedule.costs import Edge
from fxpipe.schedule.lowering.lower import (
    Collective,
    Compute,
    Instruction,
    PostRecv,
    Programs,
    Send,
    StartCollective,
    Wait,
    WaitCollective,
)
from fxpipe.schedule.simulation.run_loop import RunLoop

Channel = tuple[int, int]
Event = tuple[Channel | Collective, int]
"""The delivery of a channel's message, or the completion of a collective, with its position."""


def prove(programs: Programs, placement: tuple[int, ...]) -> None:
    """Return if the programs end; linear in their length.

    Raises DeadlockError if a channel's receives are not posted in the order of its sends (naming the first
    difference), or if ranks are stuck (listing what each rank waits for, and from which rank).
    """
    turns = _match_channels(programs, placement)
    _run(programs, placement, turns, _match_collectives(programs))


def _channel(instruction: PostRecv | Wait | Send, placement: tuple[int, ...]) -> Channel:
    edge = instruction.edge
    return placement[edge.source.stage], placement[edge.target.stage]


def _match_channels(programs: Programs, placement: tuple[int, ...]) -> dict[tuple[Edge, int], int]:
    """The position of every message in its channel."""
    sends: defaultdict[Channel, list[Send]] = defaultdict(list)
    posts: defaultdict[Channel, list[PostRecv]] = defaultdict(list)
    for program in programs:
        for instruction in program:
            if isinstance(instruction, Send):
                sends[_channel(instruction, placement)].append(instruction)
            elif isinstance(instruction, PostRecv):
                posts[_channel(instruction, placement)].append(instruction)
    turns = {}
    for channel in sends.keys() | posts.keys():
        for turn, (send, post) in enumerate(zip_longest(sends[channel], posts[channel])):
            if send is None or post is None or (send.edge, send.microbatch) != (post.edge, post.microbatch):
                source, target = channel
                raise DeadlockError(
                    f"message {turn} from rank {source} to rank {target}: rank {source} has "
                    f"'{send or 'no send'}', rank {target} has '{post or 'no post'}'"
                )
            turns[send.edge, send.microbatch] = turn
    return turns


def _match_collectives(programs: Programs) -> dict[tuple[Collective, int], int]:
    """The position of every collective among those of its number."""
    joins: list[dict[Collective, list[int]]] = []
    for program in programs:
        own: dict[Collective, list[int]] = {}
        for instruction in program:
            if isinstance(instruction, StartCollective):
                own.setdefault(instruction.collective, []).append(instruction.microbatch)
        joins.append(own)
    for rank, own in enumerate(joins):
        for collective in joins[0].keys() | own.keys():
            if own.get(collective) != joins[0].get(collective):
                raise DeadlockError(
                    f"{collective}: rank 0 joins it for microbatches {joins[0].get(collective, [])}, "
                    f"rank {rank} for {own.get(collective, [])}; the order must be the same on all ranks"
                )
    return {(e, m): turn for e, microbatches in joins[0].items() for turn, m in enumerate(microbatches)}


def _run(
    programs: Programs,
    placement: tuple[int, ...],
    turns: dict[tuple[Edge, int], int],
    rounds: dict[tuple[Collective, int], int],
) -> None:
    at = [0] * len(programs)
    joined: defaultdict[Collective, list[int]] = defaultdict(lambda: [0] * len(programs))
    sent: defaultdict[Channel, int] = defaultdict(int)
    posted: defaultdict[Channel, int] = defaultdict(int)
    loop = RunLoop[Event](len(programs))

    def advance(rank: int) -> Event | None:
        while at[rank] < len(programs[rank]):
            match instruction := programs[rank][at[rank]]:
                case StartCollective():
                    counts = joined[instruction.collective]
                    before = min(counts)
                    counts[rank] += 1
                    if min(counts) > before:
                        loop.happened((instruction.collective, before))
                case WaitCollective():
                    turn = rounds.get((instruction.collective, instruction.microbatch), len(rounds))
                    if min(joined[instruction.collective]) <= turn:
                        return instruction.collective, turn
                case PostRecv():
                    posted[_channel(instruction, placement)] += 1
                case Send():
                    channel = _channel(instruction, placement)
                    loop.happened((channel, sent[channel]))
                    sent[channel] += 1
                case Wait():
                    channel = _channel(instruction, placement)
                    turn = turns.get((instruction.edge, instruction.microbatch), -1)
                    if turn < 0 or turn >= min(sent[channel], posted[channel]):
                        return channel, turn
            at[rank] += 1
        return None

    if loop.run(advance):
        raise DeadlockError(_stuck(programs, placement, at))


def _stuck(programs: Programs, placement: tuple[int, ...], at: list[int]) -> str:
    lines = ["the programs of the ranks block each other:"]
    for rank, program in enumerate(programs):
        if at[rank] == len(program):
            lines.append(f"  rank {rank} has finished")
            continue
        wait = program[at[rank]]
        if isinstance(wait, Wait):
            whom = f"from rank {_channel(wait, placement)[0]}"
        else:
            assert isinstance(wait, WaitCollective)
            missing = [r for r, program in enumerate(programs) if not _has_joined(program[: at[r]], wait)]
            whom = f"which rank {', '.join(map(str, missing))} has not joined"
        lines.append(f"  rank {rank}, before {_next_compute(program[at[rank] :])}: {wait}, {whom}")
    return "\n".join(lines)


def _has_joined(done: tuple[Instruction, ...], wait: WaitCollective) -> bool:
    return StartCollective(wait.collective, wait.microbatch) in done


def _next_compute(program: tuple[Instruction, ...]) -> str:
    return next((str(i.op) for i in program if isinstance(i, Compute)), "its end")
