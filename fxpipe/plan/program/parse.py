"""Reads the text of a program as records of the grammar: the one parser of programs.

A statement that the grammar does not have becomes ``Outside``, with its line and what it is; all others are
read as they are.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import CodeType
from typing import NoReturn

import torch

from fxpipe.plan.program import records as r
from fxpipe.plan.program.shown import names_shown

#: Modules of fxpipe that programs import, under the names that they had in earlier versions.
_EARLIER = {f"fxpipe.runtime.{name}": f"fxpipe.runtime.program.{name}" for name in ("random", "inductor")}
#: What programs import of fxpipe.
_IMPORTED = {
    "fxpipe.runtime.program": ("lanes",),
    "fxpipe.runtime.program.checks": ("expect",),
    "fxpipe.runtime.program.inductor": ("inductor",),
    "fxpipe.runtime.program.random": ("keyed",),
    "fxpipe.runtime.program.within": ("within",),
    "__future__": ("annotations",),
}
#: Names that always mean the same.
_RESERVED = frozenset({
    "breakpoint", "complex", "float", "inductor", "lanes", "math", "print", "range", "rt", "torch",
})  # fmt: skip
_SIGNS: dict[type[ast.operator], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%", ast.BitOr: "|",
}  # fmt: skip
#: A comment above ops, with the line of the model.
_COMMENT = re.compile(r"\s+# (the model itself|\S+)(?:  \((.*)\))?")
_NOT_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)


@lru_cache(maxsize=8)
def parse(source: str) -> r.Program:
    """The last few are kept: a program that was checked is run next."""
    try:
        return _Parser(ast.parse(source)).program(source)
    except _NOT_PYTHON as error:
        line = getattr(error, "lineno", None) or 0
        return r.Program((), (r.Outside(f"no Python program ({error})", line),), is_python=False)


def compiled(source: str, filename: str) -> tuple[CodeType, r.Program]:
    """The code that runs, edits outside of the grammar included, and what is read of it.

    Raises what Python does where it cannot read the text.
    """
    program = parse(source)
    if not program.is_python:
        _Parser(ast.parse(source, filename)).program(source)  # raises
    if not any(name in source for name in _EARLIER):
        return compile(source, filename, "exec"), program
    tree = ast.parse(source, filename)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            node.module = _EARLIER.get(str(node.module), node.module)
    return compile(tree, filename, "exec"), program


class _Unlike(Exception):
    """A node that the grammar does not have, where it stands."""

    def __init__(self, what: str, node: ast.AST) -> None:
        super().__init__(what)
        self.outside = r.Outside(what, getattr(node, "lineno", 0))


def _refuse(what: str, node: ast.AST) -> NoReturn:
    raise _Unlike(what, node)


@dataclass
class _Parser:
    """``names``: those that the function around assigns.  ``depth``: of functions."""

    tree: ast.Module
    outside: list[r.Outside] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    depth: int = 0
    is_step: bool = False

    def program(self, source: str) -> r.Program:
        body = self._block(self.tree.body)
        return r.Program(body, tuple(self.outside), tuple(_comments(source)))

    @cached_property
    def bound(self) -> frozenset[str]:
        """All names that the program gives a value anywhere."""
        names: set[str] = set()
        todo: list[Any] = [self.tree]
        for node in todo:  # ``ast.walk`` takes three times as long
            if isinstance(node, ast.Name):
                if not isinstance(node.ctx, ast.Load):
                    names.add(node.id)
                continue
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.alias):
                names.add(node.asname or node.name)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
            elif not isinstance(node, ast.AST):  # None, or a text, in a list
                continue
            for key in node._fields:
                value = getattr(node, key, None)
                if isinstance(value, list):
                    todo += value
                elif isinstance(value, ast.AST):
                    todo.append(value)
        return frozenset(names)

    # -- statements ---------------------------------------------------------------------------------------

    def _block(self, nodes: Sequence[ast.stmt]) -> tuple[r.Statement, ...]:
        return tuple(map(self._statement, nodes))

    def _statement(self, node: ast.stmt) -> r.Statement:
        try:
            statement = self._read(node, node.lineno)
            if self.depth == 0 and not isinstance(statement, r.Import | r.Function | r.Skipped):
                _check_top(statement, node)
            return statement
        except _Unlike as error:
            self.outside.append(error.outside)
            return error.outside

    def _read(self, node: ast.stmt, line: int) -> r.Statement:
        match node:
            case ast.Assign(targets=[target], value=value):
                return r.Assign(self._target(target), self._assigned(value), line)
            case ast.Expr(value=ast.Constant(value=str())) | ast.Pass():
                return r.Skipped((), line)
            case ast.Expr(
                value=ast.Call(func=ast.Name(id="print" | "breakpoint"), args=args, keywords=named)
            ):
                return self._skipped([*args, *(each.value for each in named)], node)
            case ast.Expr(value=value):
                return r.Do(self.expression(value), line)
            case ast.Delete(targets=[ast.Tuple(elts=targets)] | targets):
                names = [each for each in targets if isinstance(each, ast.Name)]
                if len(names) < len(targets):
                    _refuse("a del of more than variables", node)
                return r.Delete(tuple(self._bound(each.id, each) for each in names), line)
            case ast.For(target=target, iter=iterable, body=body, orelse=[]):
                values = self._iterable(iterable, is_warm_up=self.is_step)
                return r.For(self._target(target), values, self._block(body), line)
            case ast.Return(value=None):
                return r.Return(None, line)
            case ast.Return(value=ast.expr() as value):
                return r.Return(self.expression(value), line)
            case ast.FunctionDef():
                return self._function(node)
            case ast.If(test=test, body=body, orelse=orelse):
                return self._if(self._skipped([test], node), [*body, *orelse], node)
            case ast.Assert(test=test, msg=message):
                return self._skipped([each for each in (test, message) if each is not None], node)
            case ast.Import(names=[ast.alias(name=module, asname=None)]):
                if module not in _RESERVED:
                    self._bound(module.partition(".")[0], node)
                return r.Import(module, (), line)
            case ast.ImportFrom(module=module, names=aliases, level=level):
                known, imported = _EARLIER.get(str(module), str(module)), tuple(each.name for each in aliases)
                is_renamed = any(each.asname for each in aliases)
                if level or self.depth or is_renamed or not {*imported} <= {*_IMPORTED.get(known, ())}:
                    _refuse(f"an import from {module}", node)
                return r.Import(known, imported, line)
        _refuse(_noun(node), node)

    def _target(self, node: ast.expr) -> r.Target:
        match node:
            case ast.Name(id=name):
                return self._bound(name, node)
            case ast.Subscript(value=value, slice=index) if not isinstance(index, ast.Slice):
                return r.Item(self.expression(value), self.expression(index))
            case ast.Tuple(elts=items) | ast.List(elts=items):
                return r.Sequence(tuple(map(self._target, items)), is_list=False)
        _refuse(f"an assignment to {_noun(node)}", node)

    def _assigned(self, node: ast.expr) -> r.Expression:
        names = names_shown(node, self.bound) if isinstance(node, ast.JoinedStr) else None
        try:
            return self.expression(node)
        except _Unlike:
            if names is None:
                raise
            return r.Shown(ast.unparse(node), names)  # a text may be kept: it holds no memory

    def _bound(self, name: str, node: ast.AST) -> r.Name:
        if name in _RESERVED or name.startswith("__"):
            _refuse(f"another {name}", node)
        self.names.add(name)
        return r.Name(name, getattr(node, "lineno", 0))

    def _iterable(self, node: ast.expr, is_warm_up: bool = False) -> r.Expression:
        match node:
            case ast.Call(func=ast.Name(id="range"), args=args, keywords=[]):
                return r.Range(tuple(map(self.expression, args)))
            case ast.Call(func=ast.Attribute(value=ast.Name(id="rt"), attr="warm_up")) if is_warm_up:
                return self._called(r.OfRuntime("warm_up"), node)
        return self.expression(node)

    def _skipped(self, values: Sequence[ast.expr], node: ast.stmt) -> r.Skipped:
        """Refuses what may change something."""
        names: list[str] = []
        for value in values:
            shown = names_shown(value, self.bound)
            if shown is None:
                _refuse(f"{_noun(node)} of what is more than looked at, {ast.unparse(value):.60}", value)
            names += shown
        return r.Skipped(tuple(names), node.lineno)

    def _if(self, test: r.Skipped, body: Sequence[ast.stmt], node: ast.If) -> r.Skipped:
        before = len(self.outside)
        inner = self._block(body)
        if len(self.outside) == before and not all(isinstance(each, r.Skipped) for each in inner):
            _refuse("an if around more than print and breakpoint", node)
        return test

    def _function(self, node: ast.FunctionDef) -> r.Function:
        self._bound(node.name, node)
        if self.depth and not (self.depth == 1 and self.is_step):
            _refuse("a function in a function", node)
        around = self.names, self.depth, self.is_step
        self.names, self.depth = set(), self.depth + 1
        self.is_step = self.depth == 1 and node.name == "step"
        parameters = tuple(each.arg for each in node.args.args)
        try:
            unlike = [r.Outside(each, node.lineno) for each in self._unlike(node, parameters)]
            self.outside += unlike
            self.names.update(parameters)
            body = self._block(node.body)
            local = frozenset(self.names)
        finally:
            self.names, self.depth, self.is_step = around
        end, is_compiled = node.end_lineno or node.lineno, bool(node.decorator_list)
        return r.Function(node.name, parameters, (*unlike, *body), local, is_compiled, node.lineno, end)

    def _unlike(self, node: ast.FunctionDef, parameters: Sequence[str]) -> Iterator[str]:
        """What the grammar does not have of a function's head."""
        args = node.args
        if args.vararg or args.kwarg or args.kwonlyargs or args.posonlyargs or args.defaults:
            yield "a parameter with a default, or for any number of arguments"
        if self.is_step and (parameters[:1] != ("rt",) or len(parameters) != 2):
            yield f"a step({', '.join(parameters)}): it takes rt and the batch"
        for k, name in enumerate(parameters):
            if name in _RESERVED - ({"rt"} if self.is_step and k == 0 else set()) or name in parameters[:k]:
                yield f"another {name}"
        decorators = [_dotted(each) for each in node.decorator_list]
        if decorators not in ([], ["inductor"]) or node.returns or getattr(node, "type_params", None):
            yield "a decorator, or a type of a result"

    # -- expressions --------------------------------------------------------------------------------------

    def expression(self, node: ast.expr) -> r.Expression:
        match node:
            case ast.Name(id=name):
                if name in _RESERVED or name.startswith("__"):
                    _refuse(f"{name} as a value", node)
                if hasattr(builtins, name) and name not in self.bound:
                    _refuse(f"a use of {name}", node)
                return r.Name(name, node.lineno)
            case ast.Constant(value=value) if not isinstance(value, bytes) and value is not ...:
                return r.Literal(value)
            case ast.Call():
                return self._call(node)
            case ast.Subscript(value=value, slice=ast.Slice(lower=lower, upper=upper, step=None)):
                begin, end = (None if each is None else self.expression(each) for each in (lower, upper))
                return r.Item(self.expression(value), r.Slice(begin, end))
            case ast.Subscript(value=value, slice=index):
                return r.Item(self.expression(value), self.expression(index))
            case ast.Attribute():
                return _attribute(node)
            case ast.Tuple(elts=items) | ast.List(elts=items):
                return r.Sequence(tuple(map(self._element, items)), isinstance(node, ast.List))
            case ast.JoinedStr(values=parts):
                return r.Text(tuple(map(self._part, parts)))
            case ast.Dict(keys=keys, values=values) if all(keys):
                lines = tuple(key.lineno for key in keys if key is not None)
                known = tuple(self.expression(key) for key in keys if key is not None)
                return r.Dict(known, tuple(map(self.expression, values)), lines)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                of = self.expression(operand)
                if isinstance(of, r.Literal) and type(of.value) in (int, float, complex):
                    return r.Literal(-of.value)
                return r.Arithmetic("-", of, None)
            case ast.BinOp(left=left, op=sign, right=right):
                symbol = _SIGNS.get(type(sign))
                if symbol is None or (symbol == "%" and isinstance(left, ast.Constant | ast.JoinedStr)):
                    _refuse(f"the operator {ast.unparse(node):.60}", node)
                return r.Arithmetic(symbol, self.expression(left), self.expression(right))
            case ast.ListComp():
                return self._comprehension(node)
        _refuse(_noun(node), node)

    def _element(self, node: ast.expr) -> r.Expression | r.Spread:
        match node:
            case ast.Starred(value=ast.GeneratorExp() as inner):
                return r.Spread(self._comprehension(inner))
            case ast.Starred(value=inner):
                return r.Spread(self.expression(inner))
        return self.expression(node)

    def _comprehension(self, node: ast.ListComp | ast.GeneratorExp) -> r.Expression:
        if any(each.ifs or each.is_async for each in node.generators):
            _refuse("a condition in a list", node)
        around, self.names = self.names, set()
        try:
            iterables = [self._iterable(each.iter) for each in node.generators]
            targets = [self._target(each.target) for each in node.generators]
            if any(isinstance(each, r.Item) for each in r.parts(tuple(targets))):
                _refuse("an assignment in a list", node)
            return r.Comprehension(self.expression(node.elt), tuple(zip(targets, iterables, strict=True)))
        finally:
            self.names = around

    def _part(self, node: ast.expr) -> r.Expression:
        match node:
            case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
                return self.expression(value)
            case ast.Constant():
                return self.expression(node)
        _refuse("a text with a format", node)

    def _call(self, node: ast.Call) -> r.Expression:
        match node:
            case ast.Call(ast.Name("float" | "complex" as kind), [ast.Constant(str(text))], []):
                return r.Literal(_plain({"float": float, "complex": complex}[kind], text, node))
            case ast.Call(ast.Attribute(ast.Name("torch"), "device"), [ast.Constant(str(text))], []):
                return r.Literal(_plain(torch.device, text, node))
            case ast.Call(ast.Name(name)) if hasattr(builtins, name) and name not in self.bound:
                _refuse(f"a call of {name}", node)
            case ast.Call(
                ast.Name() | ast.Attribute(ast.Attribute() | ast.Name("rt" | "torch" | "lanes")) as function
            ):
                return self._called(self.expression(function), node)
            case ast.Call(ast.Attribute(of, name), args, []) if name in r.METHODS:
                return r.Method(self.expression(of), name, tuple(map(self.expression, args)), node.lineno)
            case ast.Call(ast.Attribute(_, name)):
                _refuse(f"the method .{name}", node)
        _refuse("a call of a value", node)

    def _called(self, function: r.Expression, node: ast.Call) -> r.Expression:
        named = tuple((each.arg or "", self.expression(each.value)) for each in node.keywords)
        names = [name for name, _ in named]
        if "" in names or len({*names}) < len(names):
            _refuse("arguments of a dict, or one twice", node)
        return r.Call(function, tuple(map(self.expression, node.args)), named, node.lineno)


def _attribute(node: ast.Attribute) -> r.Expression:
    match _dotted(node).split("."):
        case ["rt", name] if name in r.OF_RUNTIME and name != "warm_up":
            return r.OfRuntime(name)
        case ["torch", "ops", *path] if path:
            return r.Op(".".join(path), node.lineno)
        case ["lanes", name]:
            return r.Op(f"lanes.{name}.default", node.lineno)
        case ["torch", name]:
            value = getattr(torch, name, None)
            if isinstance(value, torch.dtype | torch.layout | torch.memory_format | float):
                return r.Literal(value)
    is_known = isinstance(node.value, ast.Name) and node.value.id in ("rt", "torch")
    _refuse(f"a use of {_dotted(node)}" if is_known else f"the attribute .{node.attr}", node)


def _check_top(statement: r.Statement, node: ast.stmt) -> None:
    """At the top level nothing can change from call to call."""
    match statement:
        case r.Assign(target=r.Name(id="MESSAGES"), value=r.Dict(keys=keys, values=values)):
            if all(isinstance(key, r.Literal) for key in keys) and all(map(_is_constant, values)):
                return
        case r.Assign(target=r.Name(), value=value) if isinstance(value, r.Op) or _is_constant(value):
            return
        case r.Outside():
            return
    _refuse("a line at the top level that is no import, op, constant or function", node)


def _is_constant(value: r.Expression | r.Spread) -> bool:
    match value:
        case r.Sequence(items=items, is_list=False):
            return all(map(_is_constant, items))
    return isinstance(value, r.Literal)


def _plain(kind: Callable[[str], object], text: str, node: ast.AST) -> object:
    try:
        return kind(text)
    except (ValueError, RuntimeError):
        _refuse(f"{text!r:.40}, which is no {kind.__name__},", node)


def _dotted(node: ast.expr) -> str:
    """``torch.ops.aten.mm`` as text; "?" for the value of another expression."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            return f"{_dotted(value)}.{name}"
    return "?"


def _noun(node: ast.AST) -> str:
    """What a node is: "a while", "an if"."""
    kind = type(node)
    name = _NOUNS.get(kind, re.sub(r"(?<=[a-z])(?=[A-Z])", " ", kind.__name__).lower())
    return f"a{'n' if name[0] in 'aeiou' else ''} {name}"


_NOUNS: dict[type[ast.AST], str] = {
    ast.AnnAssign: "assignment with a type",
    ast.Assign: "assignment to several variables in turn",
    ast.AugAssign: "assignment to what was there before",
    ast.ClassDef: "class",
    ast.DictComp: "loop in a dict",
    ast.Expr: "print",
    ast.FormattedValue: "text",
    ast.GeneratorExp: "generator",
    ast.IfExp: "value with a condition",
    ast.NamedExpr: "assignment in a line",
}


def _comments(source: str) -> Iterator[r.Comment]:
    for number, line in enumerate(source.splitlines(), 1):
        if "# " in line and (match := _COMMENT.fullmatch(line)):
            yield r.Comment(number, match[1], match[2] or "")
