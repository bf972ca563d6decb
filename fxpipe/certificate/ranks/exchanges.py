"""The parameters of which replicas have rows, on terms: where they are, and what they take.

    away ──gather──► coming ──wait──► here ──free──► away

All replicas run the same program, so that one of them stands for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from fxpipe.certificate.problems import Line, Problem, Rejected
from fxpipe.certificate.programs.calls import Calls
from fxpipe.certificate.programs.values import OpLog
from fxpipe.plan.artifact import Plan

AWAY, COMING, HERE = "away", "coming", "here"
ACCURACY = 1.05
"""Of the plan's bytes: shards are as long as the longest of them."""


@dataclass(eq=False, repr=False)
class ParameterRows:
    """The buckets of one rank: the state of each, and the line that gathered it last.  ``frees``: whether the
    program frees any.

    Without ``plan.shard`` all replicas have all parameters, and the verbs do nothing.
    """

    rank: int
    plan: Plan
    calls: Calls
    log: OpLog
    states: dict[int, str] = field(init=False)
    lines: dict[int, Line] = field(default_factory=dict, init=False)
    frees: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        buckets = self.plan.tensors[self.rank].exchanged
        self._buckets = [bucket.gradients for bucket in buckets]
        self._bucket_of: dict[str, int] = {name: k for k, names in enumerate(self._buckets) for name in names}
        self.states = dict.fromkeys(range(len(buckets)), AWAY if self.plan.shard else HERE)

    def gather(self, bucket: int) -> None:
        state, self.lines[bucket] = self._state(bucket, "gathers"), self.calls.line()
        if state == COMING:
            self.calls.note(f"gathers the parameters of bucket {bucket} again before it has waited for them")
        elif state == HERE and self.plan.shard:
            self._otherwise(f"gathers the parameters of bucket {bucket}, which are there")
        if self.plan.shard:
            self.states[bucket] = COMING
            self._count()

    def wait(self, bucket: int) -> None:
        state = self._state(bucket, "waits for")
        if state == AWAY:  # where they are here, as ``rt.once`` has waited for them, the verb does nothing
            self.calls.note(f"waits for the parameters of bucket {bucket}, which it does not gather")
        self.states[bucket] = HERE

    def wait_for_all(self) -> None:
        """What ``rt.once`` does before it reads parameters."""
        for bucket, state in self.states.items():
            if state == COMING:
                self.states[bucket] = HERE

    def begin_warm_up(self) -> None:
        """What is on its way comes again where the last update is undone; what is here does not."""
        here = [bucket for bucket, state in self.states.items() if state == HERE]
        if here and self.plan.shard:
            text = f"waits for the parameters of bucket {here[0]} before its warm-up"
            self.calls.note(f"{text}, which an update that is undone changes")

    def free(self, bucket: int) -> None:
        state = self._state(bucket, "frees the parameters of")
        if self.plan.shard == "parameters" and state == HERE:
            self.states[bucket], self.frees = AWAY, True
        elif self.plan.shard:
            why = "which are on their way" if state == COMING else "which are not its to free"
            self.calls.note(f"frees the parameters of bucket {bucket}, {why}")

    def read(self, names: Iterable[str]) -> None:
        """A section reads these parameters now."""
        for name in names:
            if self.states.get(self._bucket_of.get(name, -1), HERE) != HERE:
                text = f"reads the parameter {name!r} before its rows of other replicas are there"
                self.calls.note(text)
                return  # of the others the same is true

    def left(self) -> Iterator[Problem]:
        """Gathers that the program never waits for: they write to parameters that the next update reads."""
        for bucket, state in self.states.items():
            if state == COMING:
                text = f"gathers the parameters of bucket {bucket} and does not wait for them"
                yield Problem(*self.lines[bucket], text)
            elif state == HERE and self.frees:
                text = f"gathers the parameters of bucket {bucket} and does not free them"
                self.log.otherwise.setdefault(text, self.lines[bucket].number)

    def _state(self, bucket: int, verb: str) -> str:
        if bucket not in self.states:
            raise Rejected(self.calls.line(), f"{verb} the bucket {bucket}, which the plan does not have")
        return self.states[bucket]

    def _count(self) -> None:
        """Compare the bytes of all parameters that are here or coming with the plan's."""
        plan = self.plan
        # This replica's own rows stay beside the whole parameters that it gathers.
        owners = [plan.replicas * plan.lanes.dividing(names).number for names in self._buckets]
        if plan.shard != "parameters" or not plan.held or max(owners, default=1) == 1:
            return
        sizes = {name: plan.layouts[name].nbytes for name in plan.tensors[self.rank].parameters}
        rows = sum(
            sum(sizes[name] for name in names) // n for names, n in zip(self._buckets, owners, strict=True)
        )
        whole = sum(sizes[name] for name in sizes if name not in self._bucket_of)
        gathered = sum(
            sizes[name] for k, state in self.states.items() if state != AWAY for name in self._buckets[k]
        )
        planned = plan.held[self.rank].parameters
        if whole + rows + gathered > ACCURACY * planned:
            self._otherwise(f"has {whole + rows + gathered} bytes of parameters, and the plan has {planned}")

    def _otherwise(self, text: str) -> None:
        self.log.otherwise.setdefault(text, self.calls.line().number)
