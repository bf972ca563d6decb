"""What a program holds in the place of tensors: a term, its microbatch, and the memory that it is in."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import GetSetDescriptorType
from typing import Any

import torch

from fxpipe.certificate.problems import Line
from fxpipe.certificate.terms.layouts import Unknown
from fxpipe.certificate.terms.terms import Layout, Term


class Memory:
    """A storage.  ``version``: how often an op wrote to it; ``written``: the line of the last write.
    ``keeper``: who may still read it, so that no op may write to it ("a message on its way"); "" for none.

    ``root``: the value that it was made for.

    It counts in ``held`` from ``count`` on until nothing of the program refers to it.  ``used``: how many ops
    had begun when it was last read.
    """

    __slots__ = ("__weakref__", "bytes", "held", "keeper", "root", "since", "used", "version", "written")

    def __init__(self, keeper: str = "", *, root: Term | None = None, bytes: int = 0) -> None:
        self.bytes, self.keeper, self.root = bytes, keeper, root
        self.held: Held | None = None
        self.since, self.used, self.version, self.written = 0, 0, 0, ""

    def count(self, held: Held) -> None:
        if self.held is None:
            self.held, self.since = held, len(held.ops)
            held.changes[self.since] += self.bytes
        self.used = len(held.ops)

    def use(self) -> None:
        if self.held is not None:
            self.used = len(self.held.ops)

    def count_from_now(self) -> None:
        """Not before: until now it was a part of a collective that had not begun."""
        if self.held is not None:
            self.held.changes[self.since] -= self.bytes
            self.since = len(self.held.ops)
            self.held.changes[self.since] += self.bytes

    def __del__(self) -> None:
        if self.held is not None:
            self.held.changes[len(self.held.ops)] -= self.bytes
            if self.bytes and self.used < len(self.held.ops):
                self.held.dead.append((self.root, self.used, len(self.held.ops)))


@dataclass(eq=False, repr=False)
class Held:
    """The bytes that a rank's program holds between its ops.  ``changes``: behind so many ``ops``.

    As in the plan, a message counts from the first section on that uses it, and a part of a collective not
    before that has begun.  ``lines``: of the ops, ``calls``: those of ``step`` that call them.
    ``dead``: values that were held though nothing read them again, with the numbers of ops that had begun
    when they were last read, and when they were freed.
    ``wasted``: what else holds memory, as text, with a line.  ``transfers``: how often an offload or a reload
    begins, or is waited for, behind so many ops.  ``idle``: the ops in which no section has run.
    """

    ops: list[str] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    calls: list[Line] = field(default_factory=list)
    changes: Counter[int] = field(default_factory=Counter)
    idle: dict[str, int] = field(default_factory=dict)
    dead: list[tuple[Term | None, int, int]] = field(default_factory=list)
    wasted: dict[str, int] = field(default_factory=dict)
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
            self.wasted.setdefault(f"runs {section} of microbatch {microbatch} in {op}", line.number)

    @property
    def now(self) -> int:
        return sum(self.changes.values())

    @property
    def peak(self) -> tuple[int, str]:
        """The most bytes, and the op before which they are held."""
        held, most = 0, (0, "")
        for number, op in enumerate(self.ops):
            held += self.changes[number]
            most = max(most, (held, op), key=lambda found: found[0])
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

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._layout("shape").shape)

    @property
    def dtype(self) -> torch.dtype:
        return self._layout("dtype").dtype

    def __getattr__(self, name: str) -> Any:
        return _method(self, name)

    def _layout(self, name: str) -> Layout:
        if self.term.layout is None:
            raise Unread(f"reads .{name} of {self.term}", name)
        return self.term.layout


class Unread(Unknown, AttributeError):
    """A program does with a tensor what is no op of ``torch.ops``."""

    def __init__(self, what: str, name: str = "") -> None:
        super().__init__(f"{what}: the check follows the ops of torch.ops, and knows no numbers", name=name)


def is_printed_method(name: str) -> bool:
    """Whether a method of tensors, or a function of that name, gives something and changes nothing."""
    op = getattr(torch.ops.aten, name, None)
    schemas = () if op is None else [getattr(op, each)._schema for each in op.overloads()]
    gives = any(
        schema.returns
        and not schema.is_mutable
        and schema.arguments
        and "Tensor" in str(schema.arguments[0].type)
        for schema in schemas
    )
    return name in _GIVES_NUMBERS or gives


_GIVES_NUMBERS = (
    "bool", "cpu", "data_ptr", "dim", "double", "element_size", "float", "get_device", "int", "is_contiguous",
    "long", "ndimension", "nelement", "numpy", "size", "storage_offset", "stride", "tolist", "type",
)  # fmt: skip


#: What reading changes nothing.
_ATTRIBUTES = frozenset(
    name
    for name in dir(torch.Tensor)
    if not name.startswith("_")
    and isinstance(inspect.getattr_static(torch.Tensor, name), property | GetSetDescriptorType)
)


class Printed:
    """What a program computes of a tensor without ``torch.ops``, which it may print.  ``text``: how."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    @classmethod
    def function(cls, name: str, *own: object) -> Callable[..., Printed]:
        def call(*given: object, **named: object) -> Printed:
            if "out" in named:
                raise Unread(f"writes with torch.{name}")
            return cls(f"{name}({', '.join(map(_text, (*own, *given, *named.values())))})")

        return call

    def __getattr__(self, name: str) -> Any:
        return _method(self, name)


def _text(value: object) -> str:
    """For messages."""
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
    return str(value)


def _method(value: object, name: str) -> Any:
    if name in _ATTRIBUTES:
        return Printed(f"{name}({_text(value)})")
    if not is_printed_method(name):
        raise Unread(f"reads .{name} of {_text(value)}", name)
    return Printed.function(name, value)


def _method_of_dict(value: object, name: str) -> Any:
    if name not in ("keys", "values", "items"):
        raise Unread(f"reads .{name} of {_text(value)}", name)
    return Printed.function(name, value)


def _refused(name: str) -> Callable[..., Any]:
    def refused(value: object, *_: object) -> Any:
        raise Unread(f"computes {name} of {_text(value)}")

    return refused


@dataclass(frozen=True, eq=False, repr=False)
class Sum:
    """The accumulator of a gradient, or its transposed view."""

    name: str
    transposed: bool = False

    def __getattr__(self, name: str) -> Any:
        return _method(self, name)


@dataclass(eq=False, repr=False)
class Leaves:
    """The leaves of a microbatch, by name."""

    microbatch: int
    read: Callable[[str, int], Value]

    def __getitem__(self, name: str) -> Value:
        return self.read(name, self.microbatch)

    def __getattr__(self, name: str) -> Any:
        return _method_of_dict(self, name)


@dataclass(eq=False, repr=False)
class Container:
    """A dict of ``rt``, by its kind (``params``, ``grads`` …), or the leaves of a microbatch in a section."""

    kind: str
    read: Callable[[str], Any]
    write: Callable[[str, Any], None] | None = None

    def __getitem__(self, name: str) -> Any:
        return self.read(name)

    def __setitem__(self, name: str, value: Any) -> None:
        if self.write is None:
            raise TypeError(f"a program does not replace {self.kind}")
        self.write(name, value)

    def __getattr__(self, name: str) -> Any:
        return _method_of_dict(self, name)


class Once(Container):
    """What is computed once a step: two such dicts make one."""

    def __init__(self, kind: str, values: dict[str, Value]) -> None:
        super().__init__(kind, values.__getitem__)
        self.values = values

    def __or__(self, other: object) -> Once:
        if not isinstance(other, Once):
            raise Unread(f"computes or of {_text(self)}")
        return Once(f"{self.kind}, {other.kind}", {**self.values, **other.values})


@dataclass(eq=False, repr=False)
class Offloaded:
    """A handle in the place of a value: ``value`` without its memory, the bytes ``at`` … ``end`` of the pool.
    ``state``: leaving, out or coming."""

    value: Value
    at: int
    end: int
    state: str = "leaving"


class Announced(tuple[Any, ...]):
    """A layout of ``MESSAGES``: shape, strides and dtype, with the name that both ends have for it."""

    name: str

    def __new__(cls, name: str, layout: Any) -> Announced:
        found = super().__new__(cls, layout)
        found.name = name
        return found

    def __str__(self) -> str:
        return " ".join(map(str, (self.name, *self)))


@dataclass(eq=False, repr=False)
class Pending:
    """What a program waits for: the messages with these keys, one a tensor, in these layouts.  ``adds``:
    whether their sum is what arrives.  ``line``: that posted it.  ``ahead``: whether in the warm-up.
    ``arrived``: what it holds from then on."""

    keys: list[Any]
    layouts: list[Any]
    line: Any
    adds: bool = False
    ahead: bool = False
    arrived: list[Value] = field(default_factory=list)


@dataclass(frozen=True, eq=False, repr=False)
class Within:
    """Of a container, the values of a module by their names within it."""

    container: Container
    module: str

    def __getitem__(self, name: str) -> Any:
        return self.container[f"{self.module}.{name}"]

    def __getattr__(self, name: str) -> Any:
        return _method_of_dict(self, name)


_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "matmul", "pow", "and", "or", "xor")
_COMPARISONS = ("neg", "abs", "invert", "lt", "le", "gt", "ge", "eq", "ne", "getitem", "round")
_NUMBERS = ("bool", "int", "float", "complex", "index", "len", "iter", "contains", "setitem", "delitem")
_OF_DICTS = ("iter", "len", "contains", "eq", "ne", "or", "ror", "hash")
for _class in (Value, Printed, Sum):
    for _name in _ARITHMETIC:
        setattr(_class, f"__{_name}__", Printed.function(_name))
        setattr(_class, f"__r{_name}__", Printed.function(f"r{_name}"))
        setattr(_class, f"__i{_name}__", _refused(f"i{_name}"))  # it would change all views as well
    for _name in _COMPARISONS:
        setattr(_class, f"__{_name}__", Printed.function(_name))
    for _name in (*_NUMBERS, "hash"):
        setattr(_class, f"__{_name}__", _refused(_name))
for _dict in (Container, Leaves, Within):
    for _name in _OF_DICTS:
        setattr(_dict, f"__{_name}__", _refused(_name))
