"""What a program holds in the place of tensors: a term, its microbatch, and the memory that it is in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from fxpipe.certificate.problems import Line
from fxpipe.certificate.terms.terms import Term

#: Why a program cannot compute with tensors otherwise.
FOLLOWS = "the check follows the ops of torch.ops, and knows no numbers"
#: The keeper of what the begin of an exchange gives, which its end alone may read, once.
ON_ITS_WAY = "on its way between lanes"


class Memory:
    """A storage.  ``version``: how often an op wrote to it; ``written``: the line of the last write.
    ``keeper``: who may still read or fill it, so that no op may write to it ("a message on its way"); "" for
    none.

    ``root``: the value that it was made for.

    It counts in ``log`` from ``count`` on until nothing of the program refers to it.  ``since``, ``used``:
    how many ops had begun then, and when it was last read.
    """

    __slots__ = ("__weakref__", "bytes", "keeper", "log", "root", "since", "used", "version", "written")

    def __init__(self, keeper: str = "", *, root: Term | None = None, bytes: int = 0) -> None:
        self.bytes, self.keeper, self.root = bytes, keeper, root
        self.log: OpLog | None = None
        self.version, self.written = 0, ""

    def count(self, log: OpLog) -> None:
        if self.log is None:
            self.log, self.since = log, len(log.ops)
            log.changes[self.since] += self.bytes
        self.used = len(log.ops)

    def use(self) -> None:
        if self.log is not None:
            self.used = len(self.log.ops)

    def count_from_now(self) -> None:
        """Count from here on: until now it was a part of a collective that had not begun."""
        if self.log is not None:
            self.log.changes[self.since] -= self.bytes
            self.since = len(self.log.ops)
            self.log.changes[self.since] += self.bytes

    # By reference counts: it goes when the last variable of the program that refers to it goes.
    def __del__(self) -> None:
        if self.log is not None:
            self.log.changes[len(self.log.ops)] -= self.bytes
            if self.bytes and self.used < len(self.log.ops):
                self.log.dead.append((self.root, self.used, len(self.log.ops)))


@dataclass(eq=False, repr=False)
class OpLog:
    """The bytes that a rank's program holds between its ops.  ``changes``: behind so many ``ops``.

    As in the plan, a message counts from the first section on that uses it, and a part of a collective not
    before that has begun.  ``lines``: of the ops, ``calls``: those of ``step`` that call them.
    ``dead``: values that were held though nothing read them again, with the numbers of ops that had begun
    when they were last read, and when they were freed.
    ``otherwise``: what else the plan has not, as text, with a line.  ``transfers``: how often an offload or a
    reload begins, or is waited for, behind so many ops.  ``idle``: the ops in which no section has run.
    """

    ops: list[str] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    calls: list[Line] = field(default_factory=list)
    changes: Counter[int] = field(default_factory=Counter)
    idle: dict[str, int] = field(default_factory=dict)
    dead: list[tuple[Term | None, int, int]] = field(default_factory=list)
    otherwise: dict[str, int] = field(default_factory=dict)
    transfers: Counter[tuple[str, int]] = field(default_factory=Counter)

    def begin(self, op: str, line: Line, call: Line) -> None:
        self.ops.append(op)
        self.lines.append(line)
        self.calls.append(call)
        self.idle[op] = line.number

    def runs(self, section: str, microbatch: int | None, line: Line) -> None:
        """A section must run in an op of its microbatch: what it gives is held from there on."""
        op = self.ops[-1] if self.ops else "the first op"
        self.idle.pop(op, None)
        if microbatch is not None and not op.endswith(f".{microbatch}"):
            self.otherwise.setdefault(f"runs {section} of microbatch {microbatch} in {op}", line.number)

    @property
    def now(self) -> int:
        return sum(self.changes.values())

    @property
    def peak(self) -> tuple[int, str]:
        """The most bytes, and the op before which they are held."""
        now, most = 0, (0, "")
        for number, op in enumerate(self.ops):
            now += self.changes[number]
            most = max(most, (now, op), key=lambda each: each[0])
        return most


class Value:
    """A tensor of a program.  ``term`` of ``microbatch`` (None: of all alike) in ``memory``.

    It reads the memory as it was when ``memory.version`` was ``version``.
    """

    __slots__ = ("memory", "microbatch", "term", "version")

    def __init__(self, term: Term, microbatch: int | None, memory: Memory) -> None:
        self.term, self.memory, self.version = term, memory, memory.version
        self.microbatch = microbatch if term.varies else None

    @property
    def is_stale(self) -> bool:
        return self.version != self.memory.version


class Printed:
    """A text that a program makes of tensors, to print it.  ``text``: how it makes it."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


@dataclass(frozen=True, eq=False, repr=False)
class Sum:
    """The accumulator of a gradient, or its transposed view."""

    name: str
    transposed: bool = False


@dataclass(eq=False, repr=False)
class Leaves:
    """The leaves of a microbatch, by name."""

    microbatch: int
    read: Callable[[str, int], Value]

    def __getitem__(self, name: str) -> Value:
        return self.read(name, self.microbatch)


@dataclass(eq=False, repr=False)
class Container:
    """A dict of ``rt``, by its kind (``params``, ``grads`` …), or the leaves of a microbatch in a section."""

    kind: str
    read: Callable[[str], object]
    write: Callable[[str, object], None] | None = None

    def __getitem__(self, name: str) -> object:
        return self.read(name)

    def __setitem__(self, name: str, value: object) -> None:
        if self.write is None:
            raise TypeError(f"a program does not replace {self.kind}")
        self.write(name, value)


class Once(Container):
    """What is computed once a step: two such dicts make one."""

    def __init__(self, kind: str, values: dict[str, Value]) -> None:
        super().__init__(kind, values.__getitem__)
        self.values = values

    def joined(self, other: Once) -> Once:
        return Once(f"{self.kind}, {other.kind}", {**self.values, **other.values})


@dataclass(eq=False, repr=False)
class Offloaded:
    """A handle in the place of a value: ``value`` without its memory, the bytes ``at`` … ``end`` of the pool.
    ``state``: leaving, out or coming."""

    value: Value
    at: int
    end: int
    state: str = "leaving"


class Length(int):
    """A length of a microbatch.  In a check all have the same: ``microbatch`` tells whose it is."""

    microbatch: int

    def __new__(cls, value: int, microbatch: int) -> Length:
        length = super().__new__(cls, value)
        length.microbatch = microbatch
        return length


class Announced(tuple[object, ...]):
    """A layout of ``MESSAGES``: shape, strides and dtype, with the name that both ends have for it.
    ``microbatch``: whose lengths it has; None where all microbatches have the example's."""

    name: str
    microbatch: int | None

    def __new__(cls, name: str, layout: Iterable[object], microbatch: int | None = None) -> Announced:
        announced = super().__new__(cls, layout)
        announced.name, announced.microbatch = name, microbatch
        return announced

    def __str__(self) -> str:
        return " ".join(map(str, (self.name, *self)))


@dataclass(eq=False, repr=False)
class Pending:
    """What a program waits for: the messages with these keys, one a tensor, in these layouts.  ``adds``:
    whether their sum is what arrives.  ``line``: that posted it.  ``ahead``: whether in the warm-up.
    ``arrived``: what it holds from then on."""

    keys: list[tuple[object, ...]]
    layouts: list[object]
    line: Line
    adds: bool = False
    ahead: bool = False
    arrived: list[Value] = field(default_factory=list)


@dataclass(frozen=True, eq=False, repr=False)
class Within:
    """The values of a module in a container, by their names within the module."""

    container: Container
    module: str

    def __getitem__(self, name: str) -> object:
        return self.container[f"{self.module}.{name}"]


def written(value: object) -> str:
    """Write a value as text, for messages."""
    match value:
        case Printed():
            return value.text
        case Value():
            return str(value.term)
        case Sum():
            return f"the gradient of {value.name}"
        case Container():
            return value.kind
        case Within():
            return f"{value.container.kind} of {value.module}"
        case Leaves():
            return "the batch"
        case None | bool() | int() | float() | str():
            return str(value)
    return f"a {type(value).__name__}"
