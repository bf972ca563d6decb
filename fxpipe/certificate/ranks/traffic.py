"""Messages and offloads of ``rt`` for terms: which values a program sends, receives and moves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from fxpipe.certificate.problems import LAYOUT, ORDER, Rejected
from fxpipe.certificate.programs.values import Announced, Memory, Offloaded, Pending, Value
from fxpipe.certificate.ranks.inputs import Inputs
from fxpipe.certificate.ranks.world import Key, Message
from fxpipe.certificate.terms.layouts import layout_of
from fxpipe.certificate.terms.terms import Layout, Term, Terms
from fxpipe.plan.tensors import is_packed

COLLECTIVE = "collective"
_ALIGNMENT = 512  # bytes, of the values in an offload pool


@dataclass(frozen=True, repr=False)
class SumOverRanks:
    """The function of the values of all ranks that a reduce is."""

    terms: Terms
    name: ClassVar[str] = "sum_over_ranks"

    def run(self, *parts: Value) -> Value:
        term = self.terms.plain(self.name, {"parts": tuple(part.term for part in parts)})
        term.layout = term.layout or parts[0].term.layout
        return Value(term, 0, Memory(root=term))


@dataclass(eq=False, repr=False)
class Traffic(Inputs):
    """``sent``: the number of messages that the rank has sent.  ``pending``: what it receives and has not
    waited for.  ``ahead``: whether its warm-up runs."""

    sent: int = 0
    ahead: bool = False
    pending: dict[Pending, None] = field(default_factory=dict)
    _pool: list[Offloaded] = field(default_factory=list)

    def _noted(self, value: Any) -> Value:
        """A value without its memory, which may go."""
        term = self.calls.read(value)
        if not isinstance(term, Term):
            raise Rejected(self.line, "gives what is no tensor")
        value.memory.use()
        return Value(term, value.microbatch, Memory())

    # -- messages -----------------------------------------------------------------------------------------

    def send(self, values: Any, layouts: Any, to: int) -> None:
        if not 0 <= to < self.plan.ranks:
            raise Rejected(self.line, f"sends to rank {to} of {self.plan.ranks} ranks")
        several = isinstance(values, list) and isinstance(layouts, list)
        pairs = zip(values, layouts, strict=True) if several else [(values, layouts)]
        for value, layout in pairs:
            self._send(self.world.next_key("from", self.rank, to), value, layout)

    def _send(self, key: Key, value: Any, layout: object) -> None:
        sent = self._noted(value)
        self._check_layout(sent.term, layout)
        self._check_lengths(sent, layout)
        due = self.reference.named.get(_name(layout), sent.term)
        if due is not sent.term:  # its reader may do the same to both
            self.log.otherwise[f"sends {sent.term} as {due}"] = self.line.number
        # A send does not block, and no line says when it has read the memory: none may write there.
        value.memory.keeper = value.memory.keeper or "a message on its way"
        self.sent += 1
        self.world.send(key, Message(sent, layout, self.line, self.ahead))

    def _check_layout(self, term: Term, layout: Any) -> None:
        """A message must have the shape and the dtype that it is announced with."""
        shape, strides, dtype = layout
        actual = layout_of(self.calls.terms, term)
        # A receive fills memory from its first byte to its last; of an empty tensor there is none.
        if 0 not in shape and not is_packed(shape, strides):
            text = f"sends with the strides {tuple(strides)}, which leave gaps or share elements"
            self.calls.note(text, f"{LAYOUT} {_name(layout)}")
        if actual != Layout(tuple(shape), dtype):
            text = f"sends {term} of shape {actual.shape} and {actual.dtype} as one of {shape} and {dtype}"
            self.calls.note(text, f"{LAYOUT} {_name(layout)}", of=[term])

    def _check_lengths(self, value: Value, layout: object) -> None:
        """A message must have the lengths of its microbatch."""
        of = layout.microbatch if isinstance(layout, Announced) else None
        if None not in (of, value.microbatch) and of != value.microbatch:
            text = f"has microbatch {value.microbatch} of {_name(layout)} in the lengths of {of}"
            self.calls.note(text, f"{LAYOUT} {_name(layout)}")

    def receive(self, layouts: object, source: int) -> Pending:
        if source == self.rank:
            self.calls.note("receives from its own rank", ORDER)
        expected = layouts if isinstance(layouts, list) else [layouts]
        return self._posted([self.world.next_key("to", source, self.rank) for _ in expected], expected)

    def wait(self, pending: Pending) -> Value:
        (value,) = self.wait_all(pending)
        return value

    def wait_all(self, pending: object) -> list[Value]:
        if not isinstance(pending, Pending):
            raise Rejected(self.line, "waits for what is no message")
        self.pending.pop(pending, None)
        values = [
            self._arrived(key, layout, pending)
            for key, layout in zip(pending.keys, pending.layouts, strict=True)
        ]
        if pending.adds:
            values = [self._summed(values)]
        pending.arrived = [*values]
        return values

    def _arrived(self, key: Key, layout: object, pending: Pending) -> Value:
        line, is_shared = self.line, key[0] == COLLECTIVE
        if is_shared:
            what = f"collective {key[2]} of group {key[1]}, from rank {key[3]}"
            message = self.world.look(key, self.rank, line, what)
        else:
            posted = f", asked for in line {pending.line.number}" if pending.line != line else ""
            what = f"message {key[2]} of rank {key[0]}{posted}"
            message = self.world.take(key, self.rank, line, what)
        value = message.content
        if not isinstance(value, Value):
            text = f"expects {layout}, and {message.line} sends a gradient for its sum"
            raise Rejected(line, text, ORDER)
        # Each rank has a name of its own for its part of a collective.
        is_named = is_shared or _name(message.layout) == _name(layout)
        if message.layout != layout or not is_named:
            text = f"expects {layout}, and {message.line} sends {message.layout}"
            self.calls.note(text, f"{LAYOUT} {_name(layout)}" if is_named else ORDER)
        # A warm-up that runs again sends and receives again: in one alone, the other end would wait or count
        # one message too many.
        if message.ahead != pending.ahead:
            asked, sent = ("in", "behind") if pending.ahead else ("behind", "in")
            self.calls.note(
                f"asks {asked} its warm-up ({pending.line}) for what {message.line} sends {sent} its own"
            )
        self._check_lengths(value, layout)
        return Value(value.term, value.microbatch, self._new_memory(value))

    def _summed(self, parts: list[Value]) -> Value:
        """The sum of a value of every rank, in rank order."""
        return self.sections.call(SumOverRanks(self.calls.terms), parts)  # type: ignore[no-any-return]

    def broadcast(self, tensor: object, layout: object, source: int, group: int) -> Pending | None:
        key = self._join(group, "broadcast", source)
        if self.rank != source:
            return self._posted([(*key, source)], [layout])
        self._give((*key, source), tensor, layout)
        return None

    def gather(self, tensor: object, layout: object, to: int, group: int) -> Pending | None:
        return self._collect("gather", tensor, layout, to, group)

    def all_gather(self, tensor: object, layout: object, group: int) -> Pending | None:
        return self._collect("all_gather", tensor, layout, -1, group)

    def reduce(self, tensor: object, layout: object, to: int, group: int) -> Pending | None:
        pending = self._collect("reduce", tensor, layout, to, group)
        if pending is not None:
            pending.adds = True
        return pending

    def _collect(self, verb: str, tensor: object, layout: object, to: int, group: int) -> Pending | None:
        """Send a tensor to one rank, or to all with -1, which get those of all ranks."""
        key = self._join(group, verb, to)
        self._give((*key, self.rank), tensor, layout)
        everyone = [(*key, rank) for rank in range(self.plan.ranks)]
        return self._posted(everyone, [layout] * len(everyone)) if to in (-1, self.rank) else None

    def _give(self, key: Key, value: Any, layout: object) -> None:
        """Send a part of a collective."""
        self._send(key, value, layout)
        value.memory.count_from_now()

    def _posted(self, keys: list[Key], layouts: list[object]) -> Pending:
        pending = Pending(keys, layouts, self.line, ahead=self.ahead)
        self.pending[pending] = None
        return pending

    def _join(self, group: int, verb: str, root: int) -> Key:
        """The key of the next collective of a group; all ranks must take part in it alike."""
        if not 0 <= group < self.plan.collectives:
            raise Rejected(self.line, f"uses the group {group}, which the plan does not have")
        *_, number = self.world.next_key("group", group, self.rank)
        other = self.world.joined.setdefault((group, number), [])
        if other and other[0][:2] != (verb, root):
            theirs, of, line = other[0]
            self.calls.note(f"takes part in {_of_root(verb, root)}, and {line} in {_of_root(theirs, of)}")
        other.append((verb, root, self.line))
        return COLLECTIVE, group, number

    # -- offload ------------------------------------------------------------------------------------------

    def offload(self, values: list[Any], at: int) -> None:
        self._moved("offload")
        for k, value in enumerate(values):
            # The places follow from the sizes, as the runtime computes them: a program names the first alone.
            size = layout_of(self.calls.terms, self.calls.read(value)).bytes
            handle = Offloaded(value, at, at + -(-size // _ALIGNMENT) * _ALIGNMENT)
            self._place(handle)
            values[k], at = handle, handle.end

    def _moved(self, verb: str) -> None:
        self.log.transfers[verb, len(self.log.ops)] += 1

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

    def wait_offload(self, values: list[object]) -> None:
        self._moved("wait_offload")
        for handle in self._handles(values, "leaving"):
            value = handle.value
            value.memory.use()  # the copy has read it until now
            handle.value = Value(value.term, value.microbatch, Memory())
            handle.state = "out"

    def reload(self, values: list[object]) -> None:
        self._moved("reload")
        for handle in self._handles(values, "out"):
            handle.value = Value(handle.value.term, handle.value.microbatch, self._new_memory(handle.value))
            handle.value.memory.count(self.log)
            handle.state = "coming"

    def wait_reload(self, values: list[object]) -> None:
        self._moved("wait_reload")
        for k, handle in enumerate(self._handles(values, "coming")):
            self._pool.remove(handle)  # only now may another value have its bytes
            values[k] = handle.value

    def _handles(self, values: object, state: str) -> list[Offloaded]:
        if not isinstance(values, list) or not all(isinstance(value, Offloaded) for value in values):
            raise Rejected(self.line, "moves what is not offloaded")
        for handle in values:
            if handle.state != state:
                text = f"moves {handle.value.term}, which is {handle.state} and has to be {state}"
                raise Rejected(self.line, text)
        return list(values)

    def _new_memory(self, value: Value) -> Memory:
        return Memory(root=value.term, bytes=layout_of(self.calls.terms, value.term).bytes)


def _of_root(verb: str, root: int) -> str:
    """Name a collective in messages.  root: -1 where all ranks get the result."""
    return f"{'an' if verb[0] in 'aeiou' else 'a'} {verb}" + (f" of rank {root}" if root >= 0 else "")


def _name(layout: object) -> str:
    """The name of a layout of ``MESSAGES``."""
    return layout.name if isinstance(layout, Announced) else ""
