"""Proves that lowered programs come to their end, before anything runs.

The semantics is rendezvous: sends and posted receives do not block their rank, a transfer takes place
when both are issued and all earlier ones of its channel are done, and only a wait blocks.  Nothing
else is shared by two ranks, so if one way of running the programs ends, all do.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import zip_longest

from fxpipe.errors import DeadlockError
from fxpipe.schedule.costs import Edge
from fxpipe.schedule.lowering import Compute, Instruction, Post, Programs, Send, Wait

Channel = tuple[int, int]


def prove(programs: Programs, placement: tuple[int, ...]) -> None:
    """Returns if the programs end; linear in their length.

    Raises DeadlockError where a channel's receives are not posted in the order of its sends (it names
    the first that differs), or where ranks are stuck (it lists what each waits for, and from whom).
    """
    turns = _match_channels(programs, placement)
    _run(programs, placement, turns)


def _channel(instruction: Post | Wait | Send, placement: tuple[int, ...]) -> Channel:
    edge = instruction.edge
    return placement[edge.source.stage], placement[edge.target.stage]


def _match_channels(programs: Programs, placement: tuple[int, ...]) -> dict[tuple[Edge, int], int]:
    """The position of every message in its channel."""
    sends: defaultdict[Channel, list[Send]] = defaultdict(list)
    posts: defaultdict[Channel, list[Post]] = defaultdict(list)
    for program in programs:
        for instruction in program:
            if isinstance(instruction, Send):
                sends[_channel(instruction, placement)].append(instruction)
            elif isinstance(instruction, Post):
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


def _run(programs: Programs, placement: tuple[int, ...], turns: dict[tuple[Edge, int], int]) -> None:
    at = [0] * len(programs)
    sent: defaultdict[Channel, int] = defaultdict(int)
    posted: defaultdict[Channel, int] = defaultdict(int)
    runnable = list(range(len(programs)))
    while runnable:
        rank = runnable.pop()
        program = programs[rank]
        while at[rank] < len(program):
            instruction = program[at[rank]]
            if not isinstance(instruction, Compute):
                channel = _channel(instruction, placement)
                if isinstance(instruction, Post):
                    posted[channel] += 1
                elif isinstance(instruction, Send):
                    sent[channel] += 1
                    runnable.append(channel[1])
                else:
                    turn = turns.get((instruction.edge, instruction.microbatch))
                    if turn is None or turn >= min(sent[channel], posted[channel]):
                        break
            at[rank] += 1
    if any(position < len(program) for position, program in zip(at, programs, strict=True)):
        raise DeadlockError(_stuck(programs, placement, at))


def _stuck(programs: Programs, placement: tuple[int, ...], at: list[int]) -> str:
    lines = ["the programs of the ranks block each other:"]
    for rank, program in enumerate(programs):
        if at[rank] == len(program):
            lines.append(f"  rank {rank} has finished")
            continue
        wait = program[at[rank]]
        assert isinstance(wait, Wait)
        source, _ = _channel(wait, placement)
        lines.append(
            f"  rank {rank}, before {_next_compute(program[at[rank] :])}: {wait}, from rank {source}"
        )
    return "\n".join(lines)


def _next_compute(program: tuple[Instruction, ...]) -> str:
    return next((str(i.op) for i in program if isinstance(i, Compute)), "its end")
