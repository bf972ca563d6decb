"""Places the wait for the verdict on the last update in the program of each rank.

What a rank does before it, its warm-up, it may have to do once more, with other weights.  So the warm-ups are
closed: whatever one of them takes from another rank is given in a warm-up as well, and what is given in a
warm-up is asked for in one.  Then all ranks can repeat theirs, and nobody else takes part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import takewhile

from fxpipe.schedule.lowering import instructions as ins
from fxpipe.schedule.lowering.channels import channel_of
from fxpipe.schedule.ops import Color, OpKind, Phase

Joined = tuple[ins.Collective, int]
"""A collective and its microbatch."""


def with_validation(programs: ins.Programs, placement: Sequence[int]) -> ins.Programs:
    """The programs with an instruction ``Validate`` behind the warm-up of each rank.

    The warm-ups are the longest beginnings with no op but F that are closed.  Receives and collectives that
    only some of the ranks concerned have begun in their warm-ups come in all of them or behind all of them.
    """
    ranks = [_Rank(number, program) for number, program in enumerate(programs)]
    while _shortened(ranks, placement):
        pass
    early = {message for rank in ranks for message in rank.sent()}
    joined = _joined(ranks)
    return tuple(_with_validation(rank, early, joined) for rank in ranks)


class _Rank:
    """A rank's program and where its warm-up ends.  ``length``: the number of instructions in the warm-up,
    which ends behind what follows an op. ``joins``: the collectives of each communicator, in order."""

    def __init__(self, number: int, program: Sequence[ins.Instruction]) -> None:
        self.number, self.program = number, program
        self.joins: defaultdict[int, list[Joined]] = defaultdict(list)
        for i in program:
            if isinstance(i, ins.StartCollective):
                self.joins[i.collective.group].append((i.collective, i.microbatch))
        self._head = ins.number_at_head(program)
        ops = ((k, i.op) for k, i in enumerate(program) if isinstance(i, ins.Compute))
        self._ops = [k for k, _ in takewhile(lambda each: each[1].kind is OpKind.F, ops)]
        self.length = len(program)
        self.shorten(len(program))

    @property
    def warm_up(self) -> Sequence[ins.Instruction]:
        return self.program[: self.length]

    def shorten(self, end: int) -> bool:
        """End the warm-up before the op at ``end``, or the next one; whether it has become shorter."""
        before = self.length
        while self._ops and self._ops[-1] >= end:
            self._ops.pop()
        self.length = self._ops[-1] + 1 if self._ops else self._head
        follow = takewhile(
            lambda i: isinstance(i, ins.Send | ins.StartCollective | ins.StartTransfer), self.rest
        )
        self.length = min(before, self.length + sum(1 for _ in follow))
        return self.length < before

    @property
    def rest(self) -> Sequence[ins.Instruction]:
        return self.program[self.length :]

    def sent(self) -> set[ins.Message]:
        return {message for i in self.warm_up if isinstance(i, ins.Send) for message in i.messages}

    def made(self) -> set[tuple[Color, int]]:
        """The sections that run in the warm-up, with their microbatches."""
        ops = (i.op for i in self.warm_up if isinstance(i, ins.Compute))
        return {(Color(op.stage, Phase.F), op.microbatch) for op in ops}


def _shortened(ranks: Sequence[_Rank], placement: Sequence[int]) -> bool:
    """Shorten each warm-up before the first instruction that is against the rules; whether there is any."""
    early = {message for rank in ranks for message in rank.sent()}
    done = {section for rank in ranks for section in rank.made()}
    # A receive of several messages is one operation: all of them are sent in a warm-up, or none.
    torn: defaultdict[int, set[ins.Message]] = defaultdict(set)
    for rank in ranks:
        for i in rank.program:
            if isinstance(i, ins.PostRecv):
                part = early.intersection(i.messages)
                if 0 < len(part) < len(i.messages):
                    torn[channel_of(i.messages[0], placement)[0]] |= part
    able = {
        what
        for row in ranks[0].joins.values()
        for what in takewhile(lambda what: all((color, what[1]) in done for color in what[0].sources), row)
    }
    ends = [_first_wrong(rank, early, able, torn[rank.number]) for rank in ranks]
    shorter = [rank.shorten(end) for rank, end in zip(ranks, ends, strict=True)]
    return any(shorter)


def _first_wrong(rank: _Rank, early: set[ins.Message], able: set[Joined], torn: set[ins.Message]) -> int:
    """The place of the first op that may not stand in the warm-up, or of its end.

    able: collectives that can be joined in the warm-ups of all ranks, with all before them.
    """
    op = 0
    for k, i in enumerate(rank.warm_up):
        match i:
            case ins.Compute():
                op = k
            case ins.Wait(messages) if not early.issuperset(messages):
                return k
            case ins.Send(messages) if torn.intersection(messages):
                return op
            case ins.WaitCollective(collective, m) if (collective, m) not in able:
                return k
    return rank.length


def _joined(ranks: Sequence[_Rank]) -> set[Joined]:
    """The collectives that come in warm-ups: of each communicator as many as all ranks join there, or as a
    warm-up waits for, since all ranks join them in one order."""
    begun: defaultdict[Joined, int] = defaultdict(int)
    waited: set[Joined] = set()
    for rank in ranks:
        for i in rank.warm_up:
            match i:
                case ins.StartCollective(collective, m):
                    begun[collective, m] += 1
                case ins.WaitCollective(collective, m):
                    waited.add((collective, m))
    early: set[Joined] = set()
    for joins in ranks[0].joins.values():
        lengths = (k + 1 for k, what in enumerate(joins) if what in waited or begun[what] == len(ranks))
        early.update(joins[: max(lengths, default=0)])
    return early


def _with_validation(
    rank: _Rank, early: set[ins.Message], joined: set[Joined]
) -> tuple[ins.Instruction, ...]:
    def is_early(i: ins.Instruction) -> bool:
        match i:
            case ins.PostRecv(messages):
                return early.issuperset(messages)
            case ins.StartCollective(collective, m):
                return (collective, m) in joined
        return False

    def is_moved(i: ins.Instruction) -> bool:
        return isinstance(i, ins.PostRecv | ins.StartCollective)

    before, after = rank.warm_up, rank.rest
    return (
        *(i for i in before if not is_moved(i) or is_early(i)),
        *(i for i in after if is_early(i)),
        ins.Validate(),
        *(i for i in before if is_moved(i) and not is_early(i)),
        *(i for i in after if not is_early(i)),
    )
