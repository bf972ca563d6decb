"""``rt`` for terms: what a generated program calls, as ``runtime/program/rank.py`` has it for tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fxpipe.certificate.problems import ORDER, Line, Rejected
from fxpipe.certificate.programs.sections import Called
from fxpipe.certificate.programs.values import Container, Leaves, Memory, Offloaded, Once, Value
from fxpipe.certificate.ranks.traffic import Traffic
from fxpipe.certificate.ranks.world import Key, Message
from fxpipe.certificate.terms.sums import Addition, Summands, joined, sum_over_lanes
from fxpipe.certificate.terms.terms import BATCH_MEAN, Term
from fxpipe.plan.lanes import LaneGroup


@dataclass(eq=False, repr=False)
class TermRuntime(Traffic):
    """``losses``, ``outputs``: what the program gives, with the lines. ``totals``: the gradients that
    were summed over ranks. ``of_lanes``: those that were summed over lanes, with the line, the number of
    their summands then, and these lanes. ``summed``: those whose sums over the replicas have begun, with
    the line and the number of their summands so far. ``waited``: the line that waited for these.
    ``divided``: the line that divided the gradients by the count. ``last``: the line of its end.
    ``number_of_once``: how often it has computed something for the whole step."""

    losses: list[tuple[Value, Value | None, Line]] = field(default_factory=list)
    outputs: list[tuple[str, Value, Any, Line]] = field(default_factory=list)
    totals: dict[str, Summands] = field(default_factory=dict)
    of_lanes: dict[str, tuple[Line, int, LaneGroup]] = field(default_factory=dict)
    summed: dict[str, tuple[Line, int]] = field(default_factory=dict)
    waited: Line | None = None
    divided: Line | None = None
    ended: bool = False
    last: Line | None = None
    number_of_once: int = 0

    def warm_up(self, *made: dict[int, object]) -> Iterator[None]:
        """Once, as where the last update stands.  Where it does not, what was sent in a warm-up comes again,
        to receives that are posted again in warm-ups, and the values in ``made`` are freed."""
        if not all(type(values) is dict for values in made):
            raise Rejected(self.line, "has a warm-up that makes other things than values by microbatch")
        if self.reads_parameters:
            self.calls.note("has read parameters before its warm-up, which an update that is undone changes")
        self.rows.begin_warm_up()
        self.ahead, line = True, self.line
        yield
        self.ahead = False
        freed = sum({memory: memory.bytes for memory in _memories(made) if memory.log}.values())
        if self.log.now > freed:
            text = f"has a warm-up that makes {self.log.now - freed} bytes more than it would free"
            self.log.otherwise[text] = line.number

    # -- what it does between its sections -----------------------------------------------------------------

    def op(self, name: str) -> None:
        if type(name) is not str:
            raise Rejected(self.line, "begins an op whose name the certificate does not know")
        self.log.begin(name, self.line, self.calls.step_line())

    def once(self, compute: Callable[..., object], *tensors: object) -> Once:
        """What ``compute`` gives must be the same for all microbatches."""
        if any(isinstance(each, Container) and each.kind == "params" for each in tensors):
            self.rows.wait_for_all()
        values = compute(*tensors)
        if not isinstance(values, dict) or not all(isinstance(value, Value) for value in values.values()):
            raise Rejected(self.line, "computes once a step what is no dict of tensors")
        terms = {}
        for name, value in values.items():
            if self._noted(value).term.varies:
                text = f"computes {name!r} once a step, of which each microbatch has another"
                raise Rejected(self.line, text)
            terms[name] = value.term
        return self._once(terms)

    def _once(self, terms: dict[str, Term]) -> Once:
        self.number_of_once += 1
        values = {
            name: Value(term, None, Memory("a value of the whole step")) for name, term in terms.items()
        }
        return Once(f"once {self.number_of_once}", values)

    def batch_means(self, counts: Called, batches: Any, *constants: object) -> Once:
        """What ``counts`` gives must be the same of each microbatch, in which it is called once."""
        numbers = [each.microbatch for each in batches if isinstance(each, Leaves)]
        if type(batches) is not list or numbers != [*range(self.plan.step.microbatches)]:
            raise Rejected(self.line, "takes a mean over other microbatches than those of the batch")
        means: dict[str, Term] = {}
        for leaves in batches:
            others = (each[leaves.microbatch] if isinstance(each, list) else each for each in constants)
            values = self.sections.call(counts, [leaves, *others])
            if not isinstance(values, dict) or not all(isinstance(value, Value) for value in values.values()):
                raise Rejected(self.line, "takes the means over the batch of what is no dict of tensors")
            for name, value in values.items():
                term = self.calls.terms.plain(BATCH_MEAN, {"of": self._noted(value).term})
                if means.setdefault(name, term) is not term:
                    raise Rejected(self.line, f"counts {name!r} of each microbatch in another way")
        return self._once(means)

    def add_loss(self, loss: Value, count: Value | None = None) -> None:
        self.losses.append((self._noted(loss), None if count is None else self._noted(count), self.line))

    def add_output(self, name: str, value: Value, microbatch: int) -> None:
        if type(name) is not str:
            raise Rejected(self.line, "gives an output whose name the certificate does not know")
        self.outputs.append((name, self._noted(value), microbatch, self.line))

    # -- the end ------------------------------------------------------------------------------------------

    def summands(self, name: str) -> Summands:
        """What the program has added to the gradient of a parameter, with the microbatches and lines."""
        summands: Summands = {}
        group = self.of_lanes[name][2] if name in self.of_lanes else LaneGroup(1)
        for summary in self.sections.known.values():
            for added in summary.effects.added:
                if added.name == name:
                    term = added.term
                    if group.number > 1:  # the sum of all microbatches over the lanes is that of the sums
                        term = sum_over_lanes(self.calls.terms, term, **group.named)
                    additions = summands.setdefault(term, [])
                    additions.extend(Addition(m, call, added.line) for m, call in summary.calls)
        return summands

    def sum_over_lanes(self, bucket: int, n: int = 0, stride: int = 1) -> None:
        """All lanes run this program, so the sum is over the same terms of other lanes."""
        line, buckets = self.line, self._tensors.buckets
        if not 0 <= bucket < len(buckets):
            raise Rejected(line, f"sums the bucket {bucket} over lanes, which the plan does not have")
        if type(n) is not int or type(stride) is not int:
            raise Rejected(line, f"sums the bucket {bucket} over lanes that are no numbers")
        group = LaneGroup(n or self.plan.lanes.number, stride)
        for name in buckets[bucket].gradients:
            before, number = self.of_lanes.get(name), self.number_of_summands(name)
            is_new = self._in_turns and (0 if before is None else before[1]) == self._begun(name)
            if self.divided is not None or name in self.totals or (name in self.summed and not is_new):
                self.calls.note(f"sums the gradient of {name} over the lanes behind its other sums")
            elif name in self.of_lanes and not is_new:
                self.calls.note(f"sums the gradient of {name} over the lanes again")
            if before is not None and before[2] != group:
                self.calls.note(f"sums the gradient of {name} over other lanes than before")
            self.of_lanes[name] = (line, number, group)

    @property
    def _in_turns(self) -> bool:
        """Whether what is added to a gradient behind its sum over the replicas is summed apart."""
        return self.plan.shard in ("gradients", "parameters")

    def _begun(self, name: str) -> int:
        """The number of summands whose sum over the replicas has begun."""
        return self.summed[name][1] if name in self.summed else 0

    def reduce_gradients(self, bucket: int) -> None:
        """All replicas run this program, so the sum is over the same terms of other batches."""
        line, buckets = self.line, self._tensors.buckets
        if not 0 <= bucket < len(buckets):
            raise Rejected(line, f"sums the bucket {bucket}, which the plan does not have")
        numbers = {name: self.number_of_summands(name) for name in buckets[bucket].gradients}
        again = {name for name in numbers if name in self.summed}
        if self.plan.shard == "parameters":  # what is added from then on is summed apart
            if all(self.summed.get(name, (line, 0))[1] == number for name, number in numbers.items()):
                self.log.otherwise[f"sums bucket {bucket}, to which nothing was added"] = line.number
        elif again:
            self.calls.note(f"sums the gradient of {min(again)} over the replicas again")
        for name, number in numbers.items():
            if name in self.of_lanes and self.of_lanes[name][1] != number:
                self.calls.note(f"sums the gradient of {name} over the replicas before that over the lanes")
        self.summed |= {name: (line, number) for name, number in numbers.items()}
        self.waited = None  # for the last of them

    def gather_parameters(self, bucket: int) -> None:
        self.rows.gather(bucket)

    def wait_parameters(self, bucket: int) -> None:
        self.rows.wait(bucket)

    def free_parameters(self, bucket: int) -> None:
        self.rows.free(bucket)

    def wait_gradients(self) -> None:
        self.waited = self.line

    def number_of_summands(self, name: str) -> int:
        return sum(map(len, self.summands(name).values()))

    def all_reduce_gradient(self, name: str, ranks: tuple[int, ...]) -> None:
        """The first rank adds up those of the others, and sends them the sum."""
        line = self.line
        self._gradient(name)
        if self.divided is not None or name in self.totals:
            self.calls.note(f"sums the gradient of {name} again, or after its division")
        if self._tensors.buckets and self.waited is None:
            self.calls.note(f"sums the gradient of {name} over ranks before that over the replicas is over")
        mine, first = self.summands(name), ranks[0]
        if self.rank != first:
            self.world.send(self.world.next_key("from", self.rank, first), Message((name, mine), "", line))
            key = self.world.next_key("to", first, self.rank)
            self.totals[name] = self._sum_of(name, key, first)
            return
        # The same sum, rounded otherwise.
        if [*ranks] != sorted(ranks):
            text = f"adds up the gradient of {name} over ranks in another order than theirs"
            self.log.otherwise[text] = line.number
        parts = [mine]
        for rank in ranks[1:]:
            parts.append(self._sum_of(name, self.world.next_key("to", rank, self.rank), rank))
        total = joined(parts)
        for rank in ranks[1:]:
            self.world.send(self.world.next_key("from", self.rank, rank), Message((name, total), "", line))
        self.totals[name] = total

    def _sum_of(self, name: str, key: Key, source: int) -> Summands:
        message = self.world.take(key, self.rank, self.line, f"the gradient of {name} of rank {source}")
        if not isinstance(message.content, tuple) or message.content[0] != name:
            text = f"expects the gradient of {name}, and {message.line} sends another value"
            raise Rejected(self.line, text, ORDER)
        return message.content[1]  # type: ignore[no-any-return]

    def divide_gradients_by_count(self) -> None:
        if self.divided is not None:
            self.calls.note("divides the gradients again")
        if self._tensors.buckets and self.waited is None:
            self.calls.note("divides the gradients before their sums over the replicas are over")
        self.divided = self.line

    def finish(self) -> TermRuntime:
        """A program returns what this gives."""
        self.ended = True
        self.last = self.line
        self.log.begin("the end", self.last, self.last)
        return self


def _memories(values: object) -> Iterator[Memory]:
    match values:
        case Value():
            yield values.memory
        case Offloaded():
            yield values.value.memory
        case list() | tuple():
            for each in values:
                yield from _memories(each)
        case dict():
            yield from _memories([*values.values()])
