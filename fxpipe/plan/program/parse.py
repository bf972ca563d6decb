"""Reads the text of a program by the grammar (``records.py``): the one parser of programs.

A statement that the grammar does not have becomes ``Outside``, with its line and what it is; all others are
read as they are.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType
from typing import Any, NoReturn

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
#: A comment above ops, with the line of the model.
_COMMENT = re.compile(r"\s+# (the model itself|\S+)(?:  \((.*)\))?")
_NOT_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)


@lru_cache(maxsize=8)
def parse(source: str) -> r.Program:
    """The last few are kept: a program that was checked is run next."""
    try:
        return _program(source)
    except _NOT_PYTHON as error:
        line = getattr(error, "lineno", None) or 0
        outside = r.Outside(f"no Python program ({error})", line)
        return r.Program((), (outside,))


def compiled(source: str, filename: str) -> tuple[CodeType, r.Program]:
    """The code that runs, edits outside of the grammar included, and what is read of it.

    Raises what Python does where it cannot read the text.
    """
    program = parse(source)
    if not any(name in source for name in _EARLIER):
        return compile(source, filename, "exec"), program
    tree = ast.parse(source, filename)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            node.module = _EARLIER.get(str(node.module), node.module)
    return compile(tree, filename, "exec"), program


def code_of(step: str, filename: str) -> CodeType:
    """The code of a function ``step`` that fxpipe wrote for a program; nothing has to be read of it."""
    return compile(step, filename, "exec")


class _Unlike(Exception):
    """A node that the grammar does not have, where it stands."""

    def __init__(self, what: str, node: ast.AST) -> None:
        super().__init__(what)
        self.outside = r.Outside(what, getattr(node, "lineno", 0))


def _refuse(what: str, node: ast.AST) -> NoReturn:
    raise _Unlike(what, node)


def _program(source: str) -> r.Program:
    tree, bound = ast.parse(source), set[str]()
    for node in r.parts(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                bound.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                bound.add(name)
            case ast.alias(name=name, asname=other):
                bound.add(other or name)
    parser = _Parser(frozenset(bound))
    body = parser.block(tree.body)
    return r.Program(tuple(body), tuple(parser.outside), tuple(_comments(source)))


@dataclass
class _Parser:
    """Reads the nodes of a text, and changes them.

    ``bound``: all names that the program gives a value anywhere.  ``names``: those that the function around
    assigns.  ``depth``: of functions."""

    bound: frozenset[str]
    outside: list[r.Outside] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    depth: int = 0
    is_step: bool = False

    # -- statements ---------------------------------------------------------------------------------------

    def block(self, nodes: Sequence[ast.stmt]) -> list[ast.stmt]:
        return [*map(self._statement, nodes)]

    def _statement(self, node: ast.stmt) -> ast.stmt:
        try:
            statement = self._read(node)
            if self.depth == 0:
                _check_top(statement)
            return statement
        except _Unlike as error:
            self.outside.append(error.outside)
            return error.outside

    def _read(self, node: ast.stmt) -> ast.stmt:
        match node:
            case ast.Assign(targets=[target], value=value):
                node.targets, node.value = [self._target(target)], self._assigned(value)
            case ast.Expr(value=ast.Constant(value=str())) | ast.Pass():
                return r.Skipped((), node.lineno)
            case ast.Expr(
                value=ast.Call(func=ast.Name(id="print" | "breakpoint"), args=args, keywords=named)
            ):
                return self._skipped([*args, *(each.value for each in named)], node)
            case ast.Expr(value=value):
                node.value = self.expression(value)
            case ast.Delete(targets=[ast.Tuple(elts=targets)] | targets):
                node.targets = targets
                for each in targets:
                    if not isinstance(each, ast.Name):
                        _refuse("a del of more than variables", node)
                    self._bound(each.id, each)
            case ast.For(target=target, iter=iterable, body=body, orelse=[]):
                node.iter = self._iterable(iterable, is_warm_up=self.is_step)
                node.target, node.body = self._target(target), self.block(body)
            case ast.Return(value=value):
                node.value = None if value is None else self.expression(value)
            case ast.FunctionDef():
                return self._function(node)
            case ast.If(test=test, body=body, orelse=orelse):
                return self._if(self._skipped([test], node), [*body, *orelse], node)
            case ast.Assert(test=test, msg=message):
                return self._skipped([each for each in (test, message) if each is not None], node)
            case ast.Import(names=[ast.alias(name=module, asname=None)]):
                name = module.partition(".")[0]
                if module not in _RESERVED and name != "torch":  # of which a part is no other name
                    self._bound(name, node)
            case ast.ImportFrom(module=module, names=aliases, level=level):
                node.module = _EARLIER.get(str(module), str(module))
                known, imported = _IMPORTED.get(node.module, ()), {each.name for each in aliases}
                if level or self.depth or any(each.asname for each in aliases) or not imported <= {*known}:
                    _refuse(f"an import from {module}", node)
            case _:
                _refuse(_noun(node), node)
        return node

    def _target(self, node: ast.expr) -> ast.expr:
        match node:
            case ast.Name(id=name):
                self._bound(name, node)
            case ast.Subscript(value=value, slice=index) if not isinstance(index, ast.Slice):
                node.value, node.slice = self.expression(value), self.expression(index)
            case ast.Tuple(elts=items) | ast.List(elts=items):
                node.elts = [*map(self._target, items)]
            case _:
                _refuse(f"an assignment to {_noun(node)}", node)
        return node

    def _assigned(self, node: ast.expr) -> ast.expr:
        names = names_shown(node, self.bound) if isinstance(node, ast.JoinedStr) else None
        if names is None:
            return self.expression(node)
        text = ast.unparse(node)
        try:
            return self.expression(node)
        except _Unlike:
            return r.Shown(text, names)  # a text may be kept: it holds no memory

    def _bound(self, name: str, node: ast.AST) -> None:
        if name in _RESERVED or name.startswith("__"):
            _refuse(f"another {name}", node)
        self.names.add(name)

    def _iterable(self, node: ast.expr, is_warm_up: bool = False) -> ast.expr:
        match node:
            case ast.Call(func=ast.Name(id="range"), args=args, keywords=[]):
                node.args = [*map(self.expression, args)]
                return node
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
        inner = self.block(body)
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
            body = [*unlike, *self.block(node.body)]
            lines = node.lineno, node.end_lineno
            return r.Function(node.name, parameters, body, frozenset(self.names), *lines)
        finally:
            self.names, self.depth, self.is_step = around

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

    def expression(self, node: ast.expr) -> ast.expr:
        match node:
            case ast.Name(id=name):
                if name in _RESERVED or name.startswith("__"):
                    _refuse(f"{name} as a value", node)
                if hasattr(builtins, name) and name not in self.bound:
                    _refuse(f"a use of {name}", node)
            case ast.Constant(value=value) if not isinstance(value, bytes) and value is not ...:
                pass
            case ast.Call():
                return self._call(node)
            case ast.Subscript(value=value, slice=ast.Slice(lower=lower, upper=upper, step=None) as index):
                index.lower, index.upper = (each and self.expression(each) for each in (lower, upper))
                node.value = self.expression(value)
            case ast.Subscript(value=value, slice=index):
                node.value, node.slice = self.expression(value), self.expression(index)
            case ast.Attribute():
                return _attribute(node)
            case ast.Tuple(elts=items) | ast.List(elts=items):
                node.elts = [*map(self._element, items)]
            case ast.JoinedStr(values=parts):
                node.values = [*map(self._part, parts)]
            case ast.Dict(keys=keys, values=values) if all(keys):
                node.keys = [key and self.expression(key) for key in keys]
                node.values = [*map(self.expression, values)]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                node.operand = self.expression(operand)
                number: Any = getattr(node.operand, "value", None)
                if type(number) in (int, float, complex):
                    return _constant(-number, node)
            case ast.BinOp(left=left, op=sign, right=right):
                is_text = isinstance(sign, ast.Mod) and isinstance(left, ast.Constant | ast.JoinedStr)
                if type(sign) not in r.SIGNS or is_text:
                    _refuse(f"the operator {ast.unparse(node):.60}", node)
                node.left, node.right = self.expression(left), self.expression(right)
            case ast.ListComp():
                return self._comprehension(node)
            case _:
                _refuse(_noun(node), node)
        return node

    def _element(self, node: ast.expr) -> ast.expr:
        match node:
            case ast.Starred(value=ast.GeneratorExp() as inner):
                node.value = self._comprehension(inner)
            case ast.Starred(value=inner):
                node.value = self.expression(inner)
            case _:
                return self.expression(node)
        return node

    def _comprehension(self, node: ast.ListComp | ast.GeneratorExp) -> ast.expr:
        if any(each.ifs or each.is_async for each in node.generators):
            _refuse("a condition in a list", node)
        around, self.names = self.names, set()
        try:
            for each in node.generators:
                each.iter = self._iterable(each.iter)
            for each in node.generators:
                each.target = self._target(each.target)
            targets = (inner for each in node.generators for inner in ast.walk(each.target))
            if any(isinstance(inner, ast.Subscript) for inner in targets):
                _refuse("an assignment in a list", node)
            node.elt = self.expression(node.elt)
            return node
        finally:
            self.names = around

    def _part(self, node: ast.expr) -> ast.expr:
        match node:
            case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
                return self.expression(value)
            case ast.Constant():
                return self.expression(node)
        _refuse("a text with a format", node)

    def _call(self, node: ast.Call) -> ast.expr:
        match node:
            case ast.Call(ast.Name("float" | "complex" as kind), [ast.Constant(str(text))], []):
                return _plain({"float": float, "complex": complex}[kind], text, node)
            case ast.Call(ast.Attribute(ast.Name("torch"), "device"), [ast.Constant(str(text))], []):
                return _plain(torch.device, text, node)
            case ast.Call(ast.Name(name)) if hasattr(builtins, name) and name not in self.bound:
                _refuse(f"a call of {name}", node)
            case ast.Call(
                ast.Name() | ast.Attribute(ast.Attribute() | ast.Name("rt" | "torch" | "lanes")) as function
            ):
                return self._called(self.expression(function), node)
            case ast.Call(ast.Attribute(of, name) as function, args, []) if name in r.METHODS:
                function.value, node.args = self.expression(of), [*map(self.expression, args)]
                return node
            case ast.Call(ast.Attribute(_, name)):
                _refuse(f"the method .{name}", node)
        _refuse("a call of a value", node)

    def _called(self, function: ast.expr, node: ast.Call) -> ast.Call:
        for each in node.keywords:
            each.value = self.expression(each.value)
        names = [each.arg for each in node.keywords]
        if None in names or len({*names}) < len(names):
            _refuse("arguments of a dict, or one twice", node)
        node.func, node.args = function, [*map(self.expression, node.args)]
        return node


def _constant(value: object, node: ast.expr) -> ast.Constant:
    """A value of torch's too, in the place of the node that gives it."""
    return ast.copy_location(ast.Constant(value), node)  # type: ignore[arg-type]


def _attribute(node: ast.Attribute) -> ast.expr:
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
                return _constant(value, node)
    owner = node.value.id if isinstance(node.value, ast.Name) else ""
    if owner == "rt":
        _refuse(f"a use of {_dotted(node)}, which is no verb of plan/program/verbs.py", node)
    _refuse(f"a use of {_dotted(node)}" if owner == "torch" else f"the attribute .{node.attr}", node)


def _check_top(statement: ast.stmt) -> None:
    """Refuse what could change from call to call: at the top level nothing can."""
    match statement:
        case ast.Assign(targets=[ast.Name(id="MESSAGES")], value=ast.Dict(keys=keys, values=values)):
            if all(isinstance(key, ast.Constant) for key in keys) and all(map(_is_constant, values)):
                return
        case ast.Assign(targets=[ast.Name()], value=value) if isinstance(value, r.Op) or _is_constant(value):
            return
        case ast.Import() | ast.ImportFrom() | r.Function() | r.Skipped() | r.Outside():
            return
    _refuse("a line at the top level that is no import, op, constant or function", statement)


def _is_constant(value: ast.expr) -> bool:
    if isinstance(value, ast.Tuple):
        return all(map(_is_constant, value.elts))
    return isinstance(value, ast.Constant)


def _plain(kind: Callable[[str], object], text: str, node: ast.expr) -> ast.Constant:
    try:
        return _constant(kind(text), node)
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
