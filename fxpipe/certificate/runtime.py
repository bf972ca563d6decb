"""``rt`` for terms: what a generated program calls, as ``runtime/program/rank.py`` has it for tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fxpipe.certificate.calls import Calls
from fxpipe.certificate.layouts import layout_of
from fxpipe.certificate.problems import Line, Rejected
from fxpipe.certificate.reference import Reference
from fxpipe.certificate.sections import Sections
from fxpipe.certificate.terms import Layout, Term, canonical
from fxpipe.certificate.values import (
    Announced,
    Container,
    Held,
    Leaves,
    Memory,
    Offloaded,
    Pending,
    Sum,
    Value,
)
from fxpipe.certificate.world import Message, World
from fxpipe.plan.artifact import Plan, RankTensors

COLLECTIVE = "collective"
_ALIGNMENT = 512  # bytes, of the values in an offload pool
Summands = dict[Term, list[tuple[int | None, Line]]]
"""Term -> each microbatch of which it was added, with the line."""


@dataclass(eq=False)
class TermRuntime:
    """One rank.  ``losses``, ``outputs``: what the program gives, with the lines.  ``versions``: how often
    it has given a buffer a new value.  ``totals``: the gradients that were summed over ranks.  ``summed``:
    those whose sums over the replicas have begun, with the line and the number of their summands so far.
    ``waited``: the line that waited for these.  ``gathering``: the buckets of parameters that are gathered
    from other replicas, ``gathered``: the parameters that have arrived.  ``divided``: the line that divided
    the gradients by the count.  ``last``: the line of its end.  ``ahead``: whether its warm-up runs.
    ``batch``: what its step is given."""

    rank: int
    plan: Plan
    reference: Reference
    world: World
    calls: Calls
    sections: Sections
    held: Held
    losses: list[tuple[Value, Value | None, Line]] = field(default_factory=list)
    outputs: list[tuple[str, Value, Any, Line]] = field(default_factory=list)
    versions: Counter[str] = field(default_factory=Counter)
    totals: dict[str, Summands] = field(default_factory=dict)
    summed: dict[str, tuple[Line, int]] = field(default_factory=dict)
    waited: Line | None = None
    gathering: set[int] = field(default_factory=set)
    gathered: set[str] = field(default_factory=set)
    divided: Line | None = None
    ended: bool = False
    last: Line | None = None
    sent: int = 0
    ahead: bool = False
    batch: object = field(default_factory=object)
    pending: dict[Pending, None] = field(default_factory=dict)
    _buffers: dict[str, Value] = field(default_factory=dict)
    _pool: list[Offloaded] = field(default_factory=list)

    # -- what a program reads -----------------------------------------------------------------------------

    @property
    def params(self) -> Container:
        return Container("params", self._parameter)

    @property
    def constants(self) -> Container:
        return Container("constants", lambda name: self._input("constant", name, self._tensors.constants))

    @property
    def buffers(self) -> Container:
        return Container("buffers", self.buffer, self._set_buffer)

    @property
    def grads(self) -> Container:
        return Container("grads", self._gradient)

    def _parameter(self, name: str) -> Value:
        found = self._input("parameter", name, self._tensors.parameters)
        if self.plan.shard and name in self._tensors.gradients and name not in self.gathered:
            self.calls.note(f"reads the parameter {name!r} before its rows of other replicas are there")
        return found

    @property
    def _tensors(self) -> RankTensors:
        return self.plan.tensors[self.rank]

    def _input(self, kind: str, name: str, known: tuple[str, ...]) -> Value:
        if name not in known:
            raise Rejected(self.calls.line(), f"reads the {kind} {name!r}, which this rank does not hold")
        return Value(self.reference.input(kind, name), None, Memory(f"a {kind}"))

    def buffer(self, name: str) -> Value:
        if name not in self._buffers:
            term = self.reference.input("buffer", name)
            if name not in self._tensors.buffers:
                raise Rejected(self.calls.line(), f"reads the buffer {name!r}, which this rank does not hold")
            self._buffers[name] = Value(term, 0, Memory("a buffer"))
        return self._buffers[name]

    def _set_buffer(self, name: str, value: Any) -> None:
        """The new value of a buffer must be the captured step's, of the microbatch whose turn it is."""
        number, expected = self.versions[name], self.reference.buffers.get(name)
        if not isinstance(value, Value) or expected is None:
            self.calls.note(f"gives the buffer {name!r} a value, and the step does not change it")
            return
        what = f"the buffer {name!r}"
        if value.term is not expected:
            self.reference.note_difference(what, self.calls.line(), value.term, expected)
        elif value.microbatch not in (None, number):
            self.calls.note(f"gives {what} of microbatch {value.microbatch}, where that of {number} is due")
        self.versions[name] += 1
        memory = Memory("a buffer")
        self._buffers[name] = Value(self.reference.input("buffer", name), number + 1, memory)

    def _gradient(self, name: str) -> Sum:
        if name not in self._tensors.gradients:
            raise Rejected(
                self.calls.line(), f"adds to the gradient of {name!r}, which this rank does not hold"
            )
        return Sum(name)

    def warm_up(self, *made: dict[int, Any]) -> Iterator[None]:
        """Once, as where the last update stands.  Where it does not, what was sent in a warm-up comes again,
        to receives that are posted again in warm-ups."""
        self.ahead = True
        yield
        self.ahead = False

    def microbatches(self, batch: Any) -> list[Leaves]:
        if batch is not self.batch:
            raise Rejected(self.calls.line(), "takes microbatches of something else than the step's batch")

        def read(name: str, microbatch: int) -> Value:
            if name not in self.plan.step.leaves[self.rank]:
                raise Rejected(self.calls.line(), f"reads the leaf {name!r}, which this rank does not get")
            return Value(self.reference.input("batch", name), microbatch, Memory("the batch"))

        return [Leaves(m, read) for m in range(self.plan.step.microbatches)]

    def key(self, microbatch: int) -> Value:
        return Value(self.reference.input("key", "key"), microbatch, Memory("a key"))

    def lane_key(self, microbatch: int) -> Value:
        return Value(self.reference.input("key", "lane_key"), microbatch, Memory("a key"))

    def cast_parameters(self, casts: Mapping[str, tuple[str, Any]]) -> Container:
        found = {}
        for bucket in [*self.gathering]:
            self.wait_parameters(bucket)
        for name, (parameter, dtype) in casts.items():
            source = self.params[parameter].term
            term = self.calls.terms.make("aten._to_copy", {"self": source, "dtype": canonical(dtype)})
            found[name] = Value(term, None, Memory("a parameter"))
        return Container("casts", found.__getitem__)

    # -- what it does between its sections -----------------------------------------------------------------

    def op(self, name: str) -> None:
        self.held.ops.append(name)

    def add_loss(self, loss: Value, count: Value | None = None) -> None:
        self.losses.append(
            (self._noted(loss), None if count is None else self._noted(count), self.calls.line())
        )

    def add_output(self, name: str, value: Value, microbatch: int) -> None:
        self.outputs.append((name, self._noted(value), microbatch, self.calls.line()))

    def _noted(self, value: Any) -> Value:
        """A value without its memory, which may go."""
        term = self.calls.read(value)
        if not isinstance(term, Term):
            raise Rejected(self.calls.line(), "gives what is no tensor")
        return Value(term, value.microbatch, Memory())

    # -- messages -----------------------------------------------------------------------------------------

    def send(self, values: Any, layouts: Any, to: int) -> None:
        several = isinstance(values, list) and isinstance(layouts, list)
        pairs = zip(values, layouts, strict=True) if several else [(values, layouts)]
        for value, layout in pairs:
            self._send(self.world.next_key("from", self.rank, to), value, layout)

    def _send(self, key: Any, value: Any, layout: Any) -> None:
        sent = self._noted(value)
        self._check_layout(sent.term, layout)
        value.memory.keeper = value.memory.keeper or "a message on its way"
        self.sent += 1
        self.world.send(key, Message(sent, layout, self.calls.line(), self.ahead))

    def _check_layout(self, term: Term, layout: Any) -> None:
        """A message must have the shape and the dtype that it is announced with."""
        shape, _, dtype = layout
        own = layout_of(self.calls.terms, term)
        if own != Layout(tuple(shape), dtype):
            self.calls.note(
                f"sends {term} of shape {own.shape} and {own.dtype} as one of {shape} and {dtype}"
            )

    def receive(self, layouts: Any, source: int) -> Pending:
        expected = layouts if isinstance(layouts, list) else [layouts]
        return self._posted([self.world.next_key("to", source, self.rank) for _ in expected], expected)

    def wait(self, pending: Pending) -> Value:
        (value,) = self.wait_all(pending)
        return value

    def wait_all(self, pending: Any) -> list[Value]:
        if not isinstance(pending, Pending):
            raise Rejected(self.calls.line(), "waits for what is no message")
        self.pending.pop(pending, None)
        found = [
            self._arrived(key, layout, pending)
            for key, layout in zip(pending.keys, pending.layouts, strict=True)
        ]
        if pending.adds:
            found = [self._summed(found)]
        return found

    def _arrived(self, key: Any, layout: Any, pending: Pending) -> Value:
        line = self.calls.line()
        if key[0] != COLLECTIVE:
            what = f"message {key[2]} of rank {key[0]}"
            message = self.world.take(key, self.rank, line, what)
        else:
            what = f"collective {key[2]} of group {key[1]}, from rank {key[3]}"
            message = self.world.look(key, self.rank, line, what)
        is_shared = key[0] == COLLECTIVE  # each rank has a name of its own for its part
        if message.layout != layout or not (is_shared or _name(message.layout) == _name(layout)):
            self.calls.note(f"expects {layout}, and {message.line} sends {message.layout}")
        if message.ahead != pending.ahead:
            asked, sent = ("in", "behind") if pending.ahead else ("behind", "in")
            self.calls.note(
                f"asks {asked} its warm-up ({pending.line}) for what {message.line} sends {sent} its own"
            )
        value = message.content
        return Value(value.term, value.microbatch, self._new_memory(value))

    def _summed(self, parts: list[Value]) -> Value:
        """The sum of a value of every rank, in rank order."""
        return self.sections.call(self._sum_over_ranks, parts, (), self.buffer)  # type: ignore[no-any-return]

    def _sum_over_ranks(self, *parts: Value) -> Value:
        term = self.calls.terms.plain("sum_over_ranks", {"parts": tuple(part.term for part in parts)})
        term.layout = term.layout or parts[0].term.layout
        return Value(term, 0, Memory(root=term))

    def broadcast(self, tensor: Any, layout: Any, source: int, group: int) -> Pending | None:
        key = self._join(group, "broadcast", source)
        if self.rank != source:
            return self._posted([(*key, source)], [layout])
        self._give((*key, source), tensor, layout)
        return None

    def gather(self, tensor: Any, layout: Any, to: int, group: int) -> Pending | None:
        return self._collect("gather", tensor, layout, to, group)

    def all_gather(self, tensor: Any, layout: Any, group: int) -> Pending | None:
        return self._collect("all_gather", tensor, layout, -1, group)

    def reduce(self, tensor: Any, layout: Any, to: int, group: int) -> Pending | None:
        pending = self._collect("reduce", tensor, layout, to, group)
        if pending is not None:
            pending.adds = True
        return pending

    def _collect(self, verb: str, tensor: Any, layout: Any, to: int, group: int) -> Pending | None:
        """Send a tensor to one rank, or to all with -1, which get those of all ranks."""
        key = self._join(group, verb, to)
        self._give((*key, self.rank), tensor, layout)
        everyone = [(*key, rank) for rank in range(self.plan.ranks)]
        return self._posted(everyone, [layout] * len(everyone)) if to in (-1, self.rank) else None

    def _give(self, key: Any, value: Any, layout: Any) -> None:
        """Send a part of a collective."""
        self._send(key, value, layout)
        value.memory.count_from_now()

    def _posted(self, keys: list[Any], layouts: list[Any]) -> Pending:
        pending = Pending(keys, layouts, self.calls.line(), ahead=self.ahead)
        self.pending[pending] = None
        return pending

    def _join(self, group: int, verb: str, root: int) -> Any:
        """The key of the next collective of a group; all ranks must take part in it alike."""
        if not 0 <= group < self.plan.collectives:
            raise Rejected(self.calls.line(), f"uses the group {group}, which the plan does not have")
        *_, number = self.world.next_key("group", group, self.rank)
        other = self.world.joined.setdefault((group, number), [])
        if other and other[0][:2] != (verb, root):
            theirs, of, line = other[0]
            self.calls.note(f"takes part in a {verb} of rank {root}, and {line} in a {theirs} of {of}")
        other.append((verb, root, self.calls.line()))
        return COLLECTIVE, group, number

    # -- offload ------------------------------------------------------------------------------------------

    def offload(self, values: list[Any], at: int) -> None:
        for k, value in enumerate(values):
            size = layout_of(self.calls.terms, self.calls.read(value)).bytes
            handle = Offloaded(value, at, at + -(-size // _ALIGNMENT) * _ALIGNMENT)
            self._place(handle)
            values[k], at = handle, handle.end

    def _place(self, handle: Offloaded) -> None:
        """Note a problem if the bytes are not there, or are another value's."""
        pool = self.plan.pools[self.rank] if self.plan.pools else 0
        if not 0 <= handle.at <= handle.end <= pool:
            self.calls.note(f"offloads to the bytes {handle.at} to {handle.end} of a pool of {pool}")
        for other in self._pool:
            if other.at < handle.end and handle.at < other.end:
                self.calls.note(
                    f"offloads {handle.value.term} over {other.value.term}, which is still needed"
                )
        self._pool.append(handle)
        handle.value.memory.keeper = handle.value.memory.keeper or "on its way to the pool"

    def wait_offload(self, values: list[Any]) -> None:
        for handle in self._handles(values):
            value = handle.value
            handle.value = Value(value.term, value.microbatch, Memory())
            handle.state = "out"

    def reload(self, values: list[Any]) -> None:
        for handle in self._handles(values):
            handle.value = Value(handle.value.term, handle.value.microbatch, self._new_memory(handle.value))
            handle.value.memory.count(self.held)
            handle.state = "coming"

    def wait_reload(self, values: list[Any]) -> None:
        for k, handle in enumerate(self._handles(values)):
            if handle.state != "coming":
                raise Rejected(self.calls.line(), f"waits for {handle.value.term}, which is not reloaded")
            self._pool.remove(handle)
            values[k] = handle.value

    def _handles(self, values: Any) -> list[Offloaded]:
        if not isinstance(values, list) or not all(isinstance(value, Offloaded) for value in values):
            raise Rejected(self.calls.line(), "moves what is not offloaded")
        return list(values)

    def _new_memory(self, value: Value) -> Memory:
        return Memory(bytes=layout_of(self.calls.terms, value.term).bytes)

    # -- the end ------------------------------------------------------------------------------------------

    def summands(self, name: str) -> Summands:
        """What the program has added to the gradient of a parameter, with the microbatches and lines."""
        found: Summands = {}
        for summary in self.sections.known.values():
            for added in summary.effects.added:
                if added.name == name:
                    found.setdefault(added.term, []).extend((m, line) for m, line in summary.calls)
        return found

    def gather_parameters(self, bucket: int) -> None:
        self._bucket(bucket, "gathers")
        self.gathering.add(bucket)

    def wait_parameters(self, bucket: int) -> None:
        names = self._bucket(bucket, "waits for")
        if bucket not in self.gathering:
            self.calls.note(f"waits for the parameters of bucket {bucket}, which it does not gather")
        self.gathering.discard(bucket)
        self.gathered.update(names)

    def free_parameters(self, bucket: int) -> None:
        self.gathered.difference_update(self._bucket(bucket, "frees the parameters of"))

    def _bucket(self, bucket: int, verb: str) -> tuple[str, ...]:
        buckets = self._tensors.buckets
        if not 0 <= bucket < len(buckets):
            raise Rejected(self.calls.line(), f"{verb} the bucket {bucket}, which the plan does not have")
        return buckets[bucket].gradients

    def reduce_gradients(self, bucket: int) -> None:
        """All replicas run this program, so the sum is over the same terms of other batches."""
        line = self.calls.line()
        for name in self._bucket(bucket, "sums"):
            if name in self.summed and self.plan.shard != "parameters":
                self.calls.note(f"sums the gradient of {name} over the replicas again")
            self.summed[name] = line, self.number_of_summands(name)

    def wait_gradients(self) -> None:
        self.waited = self.calls.line()

    def number_of_summands(self, name: str) -> int:
        return sum(map(len, self.summands(name).values()))

    def all_reduce_gradient(self, name: str, ranks: tuple[int, ...]) -> None:
        """The first rank adds up those of the others, and sends them the sum."""
        line = self.calls.line()
        self._gradient(name)
        if self.divided is not None or name in self.totals:
            self.calls.note(f"sums the gradient of {name} again, or after its division")
        if self._tensors.buckets and self.waited is None:
            self.calls.note(f"sums the gradient of {name} over ranks before that over the replicas is over")
        own, first = self.summands(name), ranks[0]
        if self.rank != first:
            self.world.send(self.world.next_key("from", self.rank, first), Message((name, own), "", line))
            key = self.world.next_key("to", first, self.rank)
            self.totals[name] = self._sum_of(name, key, first)
            return
        parts = [own]
        for rank in ranks[1:]:
            parts.append(self._sum_of(name, self.world.next_key("to", rank, self.rank), rank))
        total = joined(parts)
        for rank in ranks[1:]:
            self.world.send(self.world.next_key("from", self.rank, rank), Message((name, total), "", line))
        self.totals[name] = total

    def _sum_of(self, name: str, key: Any, source: int) -> Summands:
        message = self.world.take(
            key, self.rank, self.calls.line(), f"the gradient of {name} of rank {source}"
        )
        if not isinstance(message.content, tuple) or message.content[0] != name:
            raise Rejected(
                self.calls.line(), f"expects the gradient of {name}, and {message.line} sends another value"
            )
        return message.content[1]  # type: ignore[no-any-return]

    def divide_gradients_by_count(self) -> None:
        if self.divided is not None:
            self.calls.note("divides the gradients again")
        if self._tensors.buckets and self.waited is None:
            self.calls.note("divides the gradients before their sums over the replicas are over")
        self.divided = self.calls.line()

    def finish(self) -> None:
        self.ended = True
        self.last = self.calls.line()
        self.held.ops.append("the end")


def _name(layout: Any) -> str:
    """Of a layout of ``MESSAGES``."""
    return layout.name if isinstance(layout, Announced) else ""


def joined(parts: Iterable[Summands]) -> Summands:
    """Summands of several ranks."""
    found: Summands = {}
    for part in parts:
        for term, times in part.items():
            found.setdefault(term, []).extend(times)
    return found
