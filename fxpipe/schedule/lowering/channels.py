"""Channels: the ordered pairs of ranks that send messages, and the order in which ranks connect."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fxpipe.schedule.lowering.instructions import AllReduceGradient, Message, PostRecv, Programs, Send

Channel = tuple[int, int]


def in_rounds(channels: Iterable[Channel]) -> tuple[Channel, ...]:
    """The channels in an order in which many connect at once: each in the first round in which neither of its
    ranks has another one.  A rank with k neighbors is done after about 2 k rounds, however many ranks there
    are."""
    rounds: list[tuple[set[int], list[Channel]]] = []
    for channel in sorted(channels):
        free = next((r for r in rounds if r[0].isdisjoint(channel)), None)
        if free is None:
            rounds.append(free := (set(), []))
        busy, members = free
        busy.update(channel)
        members.append(channel)
    return tuple(channel for _, members in rounds for channel in members)


def channel_of(message: Message, placement: Sequence[int]) -> Channel:
    edge = message.edge
    return placement[edge.source.stage], placement[edge.target.stage]


def channels_of(programs: Programs, placement: Sequence[int]) -> tuple[Channel, ...]:
    """The channels of lowered programs, in rounds."""
    channels: set[Channel] = set()
    for program in programs:
        for instruction in program:
            match instruction:
                case PostRecv(messages) | Send(messages):
                    channels.add(channel_of(messages[0], placement))
                case AllReduceGradient(_, (first, *others)):
                    channels |= {pair for other in others for pair in ((first, other), (other, first))}
    return in_rounds(channels)
