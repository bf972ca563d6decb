"""Proves that lowered programs come to their end, before anything runs.

The semantics is rendezvous: sends and posted receives do not block their rank, a transfer takes place
when both are issued and all earlier ones of its channel are done, and only a wait blocks.  An exchange
takes place when all ranks have joined it and all earlier ones of its number.  Nothing else is shared by
two ranks, so if one way of running the programs ends, all do.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import zip_longest

from fxpipe.errors import DeadlockError
from fxpipe.schedule.costs import Edge
from fxpipe.schedule.lowering.lower import (
    Collect,
    Compute,
    Exchange,
    Instruction,
    Join,
    Local,
    Post,
    Programs,
    Send,
    Wait,
)

Channel = tuple[int, int]


def prove(programs: Programs, placement: tuple[int, ...]) -> None:
    """Returns if the programs end; linear in their length.

    Raises DeadlockError where a channel's receives are not posted in the order of its sends (it names
    the first that differs), or where ranks are stuck (it lists what each waits for, and from whom).
    """
    turns = _match_channels(programs, placement)
    _run(programs, placement, turns, _match_exchanges(programs))


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


def _match_exchanges(programs: Programs) -> dict[tuple[Exchange, int], int]:
    """The position of every exchange among those of its number."""
    joins: list[dict[Exchange, list[int]]] = []
    for program in programs:
        own: dict[Exchange, list[int]] = {}
        for instruction in program:
            if isinstance(instruction, Join):
                own.setdefault(instruction.exchange, []).append(instruction.microbatch)
        joins.append(own)
    for rank, own in enumerate(joins):
        for exchange in joins[0].keys() | own.keys():
            if own.get(exchange) != joins[0].get(exchange):
                raise DeadlockError(
                    f"{exchange}: rank 0 joins it for microbatches {joins[0].get(exchange, [])}, "
                    f"rank {rank} for {own.get(exchange, [])}; the order must be the same on all ranks"
                )
    return {(e, m): turn for e, microbatches in joins[0].items() for turn, m in enumerate(microbatches)}


def _run(
    programs: Programs,
    placement: tuple[int, ...],
    turns: dict[tuple[Edge, int], int],
    rounds: dict[tuple[Exchange, int], int],
) -> None:
    at = [0] * len(programs)
    joined: defaultdict[Exchange, list[int]] = defaultdict(lambda: [0] * len(programs))
    sent: defaultdict[Channel, int] = defaultdict(int)
    posted: defaultdict[Channel, int] = defaultdict(int)
    runnable = list(range(len(programs)))
    while runnable:
        rank = runnable.pop()
        program = programs[rank]
        while at[rank] < len(program):
            instruction = program[at[rank]]
            if isinstance(instruction, Join):
                counts = joined[instruction.exchange]
                counts[rank] += 1
                if counts[rank] == min(counts):
                    runnable += [other for other in range(len(programs)) if other != rank]
            elif isinstance(instruction, Collect):
                exchange = instruction.exchange
                if min(joined[exchange]) <= rounds.get((exchange, instruction.microbatch), len(rounds)):
                    break
            elif not isinstance(instruction, Local):
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
        if isinstance(wait, Wait):
            whom = f"from rank {_channel(wait, placement)[0]}"
        else:
            assert isinstance(wait, Collect)
            missing = [r for r, program in enumerate(programs) if not _has_joined(program[: at[r]], wait)]
            whom = f"which rank {', '.join(map(str, missing))} has not joined"
        lines.append(f"  rank {rank}, before {_next_compute(program[at[rank] :])}: {wait}, {whom}")
    return "\n".join(lines)


def _has_joined(done: tuple[Instruction, ...], wait: Collect) -> bool:
    return Join(wait.exchange, wait.microbatch) in done


def _next_compute(program: tuple[Instruction, ...]) -> str:
    return next((str(i.op) for i in program if isinstance(i, Compute)), "its end")
