"""The grammar of programs: all that the text of a program may say, as Python's own ``ast``, restricted.

A program is imports, aliases of ops, the layouts of its messages, functions of tensors, and the function
``step``.  ``parse.py`` reads a text; the certificate evaluates what it reads, and the other readers of
programs look things up in it.  A text may say what the grammar does not have: it then runs, and its lines are
told as ``Outside``.

expressions  ``ast.Name``; ``Constant``, also for ``torch.float32``, ``float("-inf")`` and ``-1``;
             ``Subscript``, of an index or of ``begin:end``; ``List`` and ``Tuple``, with ``*more`` among the
             items; ``ListComp`` without conditions; ``Dict``; ``JoinedStr``, whose values stand in it without
             a format; ``BinOp`` and ``UnaryOp`` of ``SIGNS``; and ``Call``: of an ``Op``, of a verb of ``rt``
             (``OfRuntime``), of a function of the program, of ``range``, of one of ``METHODS``
statements   ``ast.Assign`` to one target, ``Expr`` (a call), ``Delete`` of variables, ``For``, ``Return``,
             ``Import``, ``ImportFrom``, and ``Function``, ``Skipped`` and ``Outside``
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from fxpipe.plan.program.verbs import ATTRIBUTES, VERBS

#: What a program may read and call of ``rt``.
OF_RUNTIME = ATTRIBUTES | VERBS.keys()
#: What a program may call of its lists and dicts.
METHODS = frozenset({"append", "clear", "insert", "pop", "reverse"})
#: What it may compute of numbers; ``once | means`` too.
SIGNS: dict[type[ast.operator | ast.unaryop], str] = {
    ast.Add: "+", ast.Sub: "-", ast.USub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//",
    ast.Mod: "%", ast.BitOr: "|",
}  # fmt: skip


@dataclass(eq=False)
class Op(ast.expr):
    """``torch.ops.aten.mm.default`` as "aten.mm.default"; ``lanes.part`` as "lanes.part.default"."""

    name: str
    lineno: int


@dataclass(eq=False)
class OfRuntime(ast.expr):
    """``rt.params``, or a verb of ``rt`` that is called."""

    name: str


@dataclass(eq=False)
class Shown(ast.expr):
    """A text that an edit makes to print it, with the names that it reads: no op may take it."""

    text: str
    names: tuple[str, ...]


#: Nodes that have none in them, beside ``ctx``, which says whether a name is read or bound.
_LEAVES = frozenset({ast.Name, ast.Constant, ast.Load, ast.Store, ast.Del})


@dataclass(eq=False)
class Skipped(ast.stmt):
    """What changes nothing: a docstring, ``pass``, ``breakpoint()``, a ``print`` or an ``assert`` of what may
    be shown, and ``if m == 3:`` around such lines.  ``names``: that it reads in any case."""

    names: tuple[str, ...]
    lineno: int


@dataclass(eq=False)
class Outside(ast.stmt):
    """A line that the grammar does not have.  ``what``: as a noun."""

    what: str
    lineno: int


@dataclass(eq=False)
class Function(ast.stmt):
    """``local``: the names that it assigns, its parameters among them."""

    _fields = ("body",)
    name: str
    parameters: tuple[str, ...]
    body: list[ast.stmt]
    local: frozenset[str]
    lineno: int
    end_lineno: int | None


def _lines_of(dictionary: ast.Dict) -> dict[str, int]:
    """The line of each key."""
    return {str(getattr(key, "value", None)): key.lineno for key in dictionary.keys if key is not None}


def parts(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all that is in it, in the order of the text; names and constants without their contexts.

    Programs have tens of thousands of nodes, half of them names: ``ast.walk`` takes three times as long.
    """
    todo = [node]
    while todo:
        yield (each := todo.pop())
        if type(each) in _LEAVES:
            continue
        inner: list[ast.AST] = []
        for name in each._fields:
            value = getattr(each, name, None)
            if isinstance(value, ast.AST):
                inner.append(value)
            elif type(value) is list:
                inner += [item for item in value if isinstance(item, ast.AST)]
        todo += reversed(inner)


@dataclass(frozen=True)
class Comment:
    """A comment above ops: their module, and the line of the model, "" where it is not told."""

    line: int
    module: str
    source: str


@dataclass(frozen=True, eq=False)
class Program:
    """``body``: its top level.  ``outside``: its lines, in any function, that the grammar does not have, or
    why Python cannot read the text."""

    body: tuple[ast.stmt, ...]
    outside: tuple[Outside, ...]
    comments: tuple[Comment, ...] = ()

    def nodes(self) -> Iterator[ast.AST]:
        return (node for each in self.body for node in parts(each))

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
        assigned = ((each.targets[0], each.value) for each in self.body if isinstance(each, ast.Assign))
        return {name.id: op for name, op in assigned if isinstance(name, ast.Name) and isinstance(op, Op)}

    @cached_property
    def message_lines(self) -> Mapping[str, int]:
        """The lines of the layouts of messages, by their names."""
        lines: dict[str, int] = {}
        for each in self.body:
            match each:
                case ast.Assign(targets=[ast.Name(id="MESSAGES")], value=ast.Dict() as layouts):
                    lines |= _lines_of(layouts)
                case Function(name="messages", body=[*_, ast.Return(value=ast.Dict() as layouts)]):
                    lines |= _lines_of(layouts)
        return lines

    @cached_property
    def names(self) -> Mapping[int, frozenset[str]]:
        """The names that stand in each line."""
        by_line: dict[int, set[str]] = {}
        for each in self.nodes():
            if isinstance(each, ast.Name):
                by_line.setdefault(each.lineno, set()).add(each.id)
        return {line: frozenset(names) for line, names in by_line.items()}
