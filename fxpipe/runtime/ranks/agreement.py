"""Checks, before the first step, that the ranks' programs agree on the messages that they exchange.

Messages carry no headers, which would cost time in every step, and gloo and nccl do not compare sizes: they
deliver whatever bytes arrive, or end the process.  The messages of a program are found in its source: the
layouts in ``MESSAGES``, and the calls of ``rt`` in ``step`` and in its functions, in order.

Each rank gives three short numbers.  In the sum over all ranks a channel counts with its digest where it is
sent on, and against it where it is received, so the sum is 0 if all pairs of ranks agree.  Only where it is
not do ranks gather what they send and receive: the digest of each channel, and of the two ranks of a channel
whose digests differ the messages, whose number grows with the microbatches, for the error.

Replicas run the same program for a rank: they sum the same buckets in the same order.  That is compared
first, so that all of them go on alike.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest

from fxpipe.errors import RunError
from fxpipe.runtime.program.program_text import ProgramTraffic, RuntimeCall

_Pair = tuple[tuple[int, str], tuple[int, str]]
"""Two ranks whose messages should be the same, each with the key of these in its summary."""


@dataclass(frozen=True)
class TrafficSummary:
    """The traffic of a rank, as others compare it with theirs; it does not grow with the microbatches.

    ``is_known``: whether the calls are.  ``digests``: those of the messages sent to a rank ("send 0 1" of
    rank 0), received from one ("receive 0 1" of rank 1), or of a group of collectives ("group 0").
    """

    layouts: dict[str, str]
    is_known: bool
    digests: dict[str, str]


def check_agreement(here: Mapping[int, ProgramTraffic], gather: Callable[[list[str]], list[str]]) -> bool:
    """Raise RunError, naming the message, both ranks and both layouts, if the programs do not agree.

    here: the traffic of the ranks of this process.  gather: takes a text of each of them, and gives
    those of all ranks.  Returns whether the calls of all ranks are known.
    """
    messages = {rank: _messages(rank, traffic) for rank, traffic in here.items()}
    summaries = [_summary(here[rank], messages[rank]) for rank in here]
    known, balances, groups = zip(*map(json.loads, gather([*map(_in_short, summaries)])), strict=True)
    if all(known) and not sum(balances) and len({*groups}) == 1:
        return True
    ranks = [
        TrafficSummary(**json.loads(text)) for text in gather([json.dumps(asdict(s)) for s in summaries])
    ]
    _check_layouts(ranks)
    for what, pair in _differences(ranks):
        asked = [{key: messages[rank].get(key, []) for r, key in pair if r == rank} for rank in here]
        lists = [json.loads(text) for text in gather([*map(json.dumps, asked)])]
        (rank, sent), (other, received) = pair
        for k, (a, b) in enumerate(zip_longest(lists[rank][sent], lists[other][received], fillvalue="none")):
            if a != b:
                raise RunError(
                    f"{what.format(k)} is {a} in the program of rank {rank}, and {b} in that of rank "
                    f"{other}. Edit both programs alike."
                )
    return all(rank.is_known for rank in ranks)


def check_programs(
    program: str, process: int, ranks: int, lanes: int, gather: Callable[[bytes], list[bytes]]
) -> None:
    """Raise RunError on all processes, naming the first line that differs, if replicas or lanes run other
    programs.

    program: the text that this process runs; process: its number.  ranks, lanes: of a replica, and of a rank.
    gather: gives the bytes of all processes.
    """
    digests = gather(hashlib.sha256(program.encode()).digest())
    like = [number // lanes % ranks * lanes for number in range(len(digests))]  # which runs the same
    other = next((number for number, digest in enumerate(digests) if digest != digests[like[number]]), None)
    if other is None:
        return
    first = like[other]
    texts = gather(program.encode() if process in (first, other) else b"")
    line, line_here, expected = first_difference(texts[other], texts[first])

    def named(number: int) -> str:
        lane = f", lane {number % lanes}" if lanes > 1 else ""
        return f"{number}, of replica {number // (ranks * lanes)}{lane}"

    raise RunError(
        f"Rank {named(other)}, runs another rank{first // lanes}.py than rank {named(first)}: line {line} is "
        f"{line_here}, and there {expected}. Give all machines the same files: replicas and "
        "lanes run the same programs."
    )


def first_difference(one: bytes, other: bytes) -> tuple[int, str, str]:
    """The number of the first line in which two texts differ, and that line of each, in quotes."""
    both = (text.decode().splitlines(keepends=True) for text in (one, other))
    lines = enumerate(zip_longest(*both, fillvalue="its end"), 1)
    return next((k, f"{a[:100]!r}", f"{b[:100]!r}") for k, (a, b) in lines if a != b)


def _messages(rank: int, traffic: ProgramTraffic) -> dict[str, list[str]]:
    """The messages of a rank as text, in order; the keys are as in a TrafficSummary."""
    messages: defaultdict[str, list[str]] = defaultdict(list)
    for call in traffic.calls or ():
        if call.group >= 0:
            messages[f"group {call.group}"].append(_joined(call, traffic))
        elif call.verb == "send":
            messages[f"send {rank} {call.peer}"].extend(_described(call, traffic))
        else:
            messages[f"receive {call.peer} {rank}"].extend(_described(call, traffic))
    return messages


def _summary(traffic: ProgramTraffic, messages: Mapping[str, list[str]]) -> TrafficSummary:
    return TrafficSummary(
        traffic.layouts, traffic.calls is not None, {key: _digest(texts) for key, texts in messages.items()}
    )


def _in_short(summary: TrafficSummary) -> str:
    """Whether the calls are known, the sum over channels, and a digest of the collectives."""
    balance, groups = 0, []
    for key, digest in summary.digests.items():
        kind, _, ends = key.partition(" ")
        if kind == "group":
            groups.append(f"{key} {digest}")
        else:
            number = int(_digest([ends, digest]), 16)
            balance += number if kind == "send" else -number
    return json.dumps([summary.is_known, balance, _digest(sorted(groups))])


def _digest(messages: list[str]) -> str:
    return hashlib.sha256("\n".join(messages).encode()).hexdigest()


def _differences(ranks: Sequence[TrafficSummary]) -> Iterator[tuple[str, _Pair]]:
    """The channels and groups whose messages differ, as text, among the ranks whose calls are known."""
    known = [rank for rank, summary in enumerate(ranks) if summary.is_known]
    none = _digest([])
    for key in dict.fromkeys(key for rank in known for key in ranks[rank].digests):
        kind, *numbers = key.split()
        pairs: list[_Pair]
        if kind == "group":
            what = f"Collective {{}} of a step in group {numbers[0]}"
            pairs = [((known[0], key), (rank, key)) for rank in known[1:]]
        else:
            source, target = map(int, numbers)
            what = f"Message {{}} of a step from rank {source} to rank {target}"
            pairs = [((source, f"send {source} {target}"), (target, f"receive {source} {target}"))]
        for pair in pairs:
            if {rank for rank, _ in pair} <= {*known}:
                first, second = (ranks[rank].digests.get(name, none) for rank, name in pair)
                if first != second:
                    yield what, pair


def _check_layouts(ranks: Sequence[TrafficSummary]) -> None:
    first: dict[str, tuple[int, str]] = {}
    for rank, summary in enumerate(ranks):
        for name, layout in summary.layouts.items():
            other, known = first.setdefault(name, (rank, layout))
            if known != layout:
                raise RunError(
                    f"Message {name!r} is {known} in the program of rank {other}, and {layout} in that of "
                    f"rank {rank} (shape, strides, dtype). Edit MESSAGES alike in both programs."
                )


def _joined(call: RuntimeCall, traffic: ProgramTraffic) -> str:
    """A collective as text, without the name of a value of all ranks, which each calls by another."""
    named = f" {call.names[0]!r}" if call.verb == "broadcast" else ""
    peer = f" of rank {call.peer}" if call.peer >= 0 else ""
    return f"a {call.verb.replace('_', '-')}{peer}{named}, {traffic.layouts[call.names[0]]}"


def _described(call: RuntimeCall, traffic: ProgramTraffic) -> list[str]:
    """The values of a message; the other rank may send or receive them in other groups."""
    return [f"{name!r}, {traffic.layouts[name]}," for name in call.names]
