"""The grammar of programs, as records: all that the text of a program may say.

A program is imports, aliases of ops, the layouts of its messages, functions of tensors, and the function
``step``.  ``parse.py`` makes these records of a text; the certificate evaluates them, and the other readers
of programs look things up in them.  A text may say what is not in here: it then runs, and its lines are told
as ``Outside``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, cached_property
from typing import Any

from fxpipe.plan.program.verbs import ATTRIBUTES, VERBS

#: What a program may read and call of ``rt``.
OF_RUNTIME = ATTRIBUTES | VERBS.keys()
#: What a program may call of its lists and dicts.
METHODS = frozenset({"append", "clear", "insert", "pop", "reverse"})

# -- expressions ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Literal:
    """A number, a text, None, or a value of torch that is as plain: ``torch.float32``, ``float("-inf")``."""

    value: Any


@dataclass(frozen=True, slots=True)
class Name:
    id: str
    line: int


@dataclass(frozen=True, slots=True)
class Op:
    """``torch.ops.aten.mm.default`` as "aten.mm.default"; ``lanes.part`` as "lanes.part.default"."""

    name: str
    line: int


@dataclass(frozen=True, slots=True)
class OfRuntime:
    """``rt.params``, or a verb of ``rt`` that is called."""

    name: str


@dataclass(frozen=True, slots=True)
class Item:
    """``of[index]``; the index may be a Slice."""

    of: Expression
    index: Expression | Slice


@dataclass(frozen=True, slots=True)
class Slice:
    """``begin:end``, each of which may be left out."""

    begin: Expression | None
    end: Expression | None


@dataclass(frozen=True, slots=True)
class Sequence:
    """A list, or a tuple.  Also a target: ``a, b``."""

    items: tuple[Expression | Spread, ...]
    is_list: bool


@dataclass(frozen=True, slots=True)
class Spread:
    """``*of`` among the items of a list."""

    of: Expression


@dataclass(frozen=True, slots=True)
class Comprehension:
    """``[value for target in iterable …]``, with one or more loops."""

    value: Expression
    loops: tuple[tuple[Target, Expression], ...]


@dataclass(frozen=True, slots=True)
class Range:
    arguments: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Dict:
    """``lines``: of its keys."""

    keys: tuple[Expression, ...]
    values: tuple[Expression, ...]
    lines: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Text:
    """An f-string: texts, and values without a format."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """``left + right`` of numbers, or ``-left``; ``once | means`` too."""

    operator: str
    left: Expression
    right: Expression | None


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an op, of a function of the program, or of a verb of ``rt``."""

    function: Expression
    arguments: tuple[Expression, ...]
    named: tuple[tuple[str, Expression], ...]
    line: int


@dataclass(frozen=True, slots=True)
class Method:
    """A call of a method of a list or a dict."""

    of: Expression
    name: str
    arguments: tuple[Expression, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Shown:
    """A text that an edit makes to print it, with the names that it reads: no op may take it."""

    text: str
    names: tuple[str, ...]


Expression = (
    Literal | Name | Op | OfRuntime | Item | Sequence | Comprehension | Range | Dict | Text | Arithmetic
    | Call | Method | Shown
)  # fmt: skip
Target = Name | Item | Sequence

# -- statements -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Import:
    """``import module``, or ``from module import names``."""

    module: str
    names: tuple[str, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Assign:
    target: Target
    value: Expression
    line: int


@dataclass(frozen=True, slots=True)
class Do:
    """An expression in a line of its own: a call."""

    value: Expression
    line: int


@dataclass(frozen=True, slots=True)
class Delete:
    names: tuple[Name, ...]
    line: int


@dataclass(frozen=True, slots=True)
class For:
    target: Target
    iterable: Expression
    body: tuple[Statement, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Return:
    value: Expression | None
    line: int


@dataclass(frozen=True, slots=True)
class Skipped:
    """What changes nothing: a docstring, ``pass``, ``breakpoint()``, a ``print`` or an ``assert`` of what may
    be shown, and ``if m == 3:`` around such lines.  ``names``: that it reads in any case."""

    names: tuple[str, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Outside:
    """A line that the grammar does not have.  ``what``: as a noun."""

    what: str
    line: int


@dataclass(frozen=True, eq=False)
class Function:
    """``local``: the names that it assigns, its parameters among them.  ``is_compiled``: by Inductor.
    ``line``: of its ``def``, ``end``: its last one."""

    name: str
    parameters: tuple[str, ...]
    body: tuple[Statement, ...]
    local: frozenset[str]
    is_compiled: bool
    line: int
    end: int


Statement = Import | Assign | Do | Delete | For | Return | Skipped | Outside | Function


@dataclass(frozen=True)
class Comment:
    """A comment above ops: their module, and the line of the model, "" where it is not told."""

    line: int
    module: str
    source: str


@dataclass(frozen=True, eq=False)
class Program:
    """``body``: its top level.  ``outside``: its lines, in any function, that the grammar does not have.
    ``is_python``: False for a text that Python cannot read; ``outside`` says why."""

    body: tuple[Statement, ...]
    outside: tuple[Outside, ...]
    comments: tuple[Comment, ...] = ()
    is_python: bool = True

    @cached_property
    def functions(self) -> Mapping[str, Function]:
        """The functions at its top level."""
        return {each.name: each for each in self.body if isinstance(each, Function)}

    @property
    def step(self) -> Function | None:
        return self.functions.get("step")

    @cached_property
    def aliases(self) -> Mapping[str, Op]:
        """The names of ops."""
        return {
            each.target.id: each.value
            for each in self.body
            if isinstance(each, Assign) and isinstance(each.target, Name) and isinstance(each.value, Op)
        }

    @cached_property
    def message_lines(self) -> Mapping[str, int]:
        """The lines of the layouts of messages, by their names."""
        lines: dict[str, int] = {}
        for each in self.body:
            match each:
                case Assign(target=Name(id="MESSAGES"), value=Dict() as layouts):
                    keys = (key.value if isinstance(key, Literal) else None for key in layouts.keys)
                    lines |= {str(key): line for key, line in zip(keys, layouts.lines, strict=True)}
        return lines

    @cached_property
    def names(self) -> Mapping[int, frozenset[str]]:
        """The names that stand in each line."""
        by_line: dict[int, set[str]] = {}
        for each in parts(self.body):
            if isinstance(each, Name):
                by_line.setdefault(each.line, set()).add(each.id)
        return {line: frozenset(names) for line, names in by_line.items()}

    @cached_property
    def deleted(self) -> tuple[Name, ...]:
        """The variables that it deletes, in order."""
        return tuple(name for each in parts(self.body) if isinstance(each, Delete) for name in each.names)


def parts(record: Any) -> Iterator[Any]:
    """All records in a record, or in a tuple of records, itself among them."""
    todo = [record]
    while todo:
        each = todo.pop()
        if isinstance(each, tuple):
            todo += reversed(each)
        elif (names := _fields(each.__class__)) is not None:
            yield each
            todo += [getattr(each, name) for name in names]


@cache
def _fields(kind: type) -> tuple[str, ...] | None:
    """Of a record, the last one first: ``fields`` of each record takes most of the time of ``parts``."""
    return tuple(field.name for field in reversed(fields(kind))) if is_dataclass(kind) else None
