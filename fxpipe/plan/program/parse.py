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
from functools import cached_property
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
_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%", ast.BitOr: "|",
}  # fmt: skip
#: A comment above ops, with the line of the model.
_COMMENT = re.compile(r"\s+# (the model itself|\S+)(?:  \((.*)\))?")
_NOT_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)


def parse(source: str) -> r.Program:
    try:
        return _Parser(ast.parse(source)).program(source)
    except _NOT_PYTHON as error:
        line = getattr(error, "lineno", None) or 0
        return r.Program((), (r.Outside(f"no Python program ({error})", line),), is_python=False)


def compiled(source: str, filename: str) -> CodeType:
    """The code that runs, edits outside of the grammar included.

    Raises what Python does where it cannot read the text.
    """
    tree = ast.parse(source, filename)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            node.module = _EARLIER.get(str(node.module), node.module)
    return compile(tree, filename, "exec")


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
        nodes = [*ast.walk(self.tree)]
        stored = {n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
        defined = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        imported = {n.asname or n.name for n in nodes if isinstance(n, ast.alias)}
        return frozenset(stored | defined | imported | {n.arg for n in nodes if isinstance(n, ast.arg)})

    # -- statements ---------------------------------------------------------------------------------------

    def _block(self, nodes: Sequence[ast.stmt]) -> tuple[r.Statement, ...]:
        return tuple(map(self._statement, nodes))

    def _statement(self, node: ast.stmt) -> r.Statement:
        try:
            reader = _STATEMENTS.get(type(node))
            if reader is None:
                _refuse(_noun(node), node)
            found = reader(self, node)
            if self.depth == 0 and not isinstance(found, r.Import | r.Function | r.Skipped):
                _check_top(found, node)
            return found
        except _Unlike as error:
            self.outside.append(error.outside)
            return error.outside

    def _import(self, node: ast.Import) -> r.Statement:
        (first, *others) = node.names
        if others or first.asname:
            _refuse("an import of several modules, or by another name", node)
        return r.Import(first.name, (), node.lineno)

    def _import_from(self, node: ast.ImportFrom) -> r.Statement:
        module = _EARLIER.get(str(node.module), str(node.module))
        names = tuple(each.name for each in node.names)
        is_renamed = any(each.asname for each in node.names)
        if node.level or is_renamed or not {*names} <= {*_IMPORTED.get(module, ())} or self.depth:
            _refuse(f"an import from {node.module}", node)
        return r.Import(module, names, node.lineno)

    def _assign(self, node: ast.Assign) -> r.Statement:
        if len(node.targets) > 1:
            _refuse("several targets", node)
        (target,) = node.targets
        try:
            value = self.expression(node.value)
        except _Unlike:
            names = names_shown(node.value, self.bound)
            if names is None or not isinstance(target, ast.Name):
                raise
            value = r.Shown(ast.unparse(node.value), names)
        return r.Assign(self._target(target), value, node.lineno)

    def _target(self, node: ast.expr) -> r.Target:
        match node:
            case ast.Name():
                self._bind(node.id, node)
                return r.Name(node.id, node.lineno)
            case ast.Subscript(slice=ast.Slice()):
                _refuse("an assignment to a part of a list", node)
            case ast.Subscript():
                return r.Item(self.expression(node.value), self.expression(node.slice))
            case ast.Tuple(elts=items) | ast.List(elts=items):
                return r.Sequence(tuple(map(self._target, items)), is_list=False)
        _refuse(f"an assignment to {_noun(node)}", node)

    def _bind(self, name: str, node: ast.AST) -> None:
        if name in _RESERVED or name.startswith("__"):
            _refuse(f"another {name}", node)
        self.names.add(name)

    def _delete(self, node: ast.Delete) -> r.Statement:
        names, targets = [], node.targets
        if len(targets) == 1 and isinstance(targets[0], ast.Tuple):
            targets = targets[0].elts
        for target in targets:
            if not isinstance(target, ast.Name):
                _refuse(f"a del of {_noun(target)}", node)
            self._bind(target.id, node)
            names.append(r.Name(target.id, target.lineno))
        return r.Delete(tuple(names), node.lineno)

    def _for(self, node: ast.For) -> r.Statement:
        if node.orelse:
            _refuse("an else of a loop", node)
        iterable = self._iterable(node.iter, is_warm_up=self.is_step)
        return r.For(self._target(node.target), iterable, self._block(node.body), node.lineno)

    def _iterable(self, node: ast.expr, is_warm_up: bool = False) -> r.Expression:
        match node:
            case ast.Call(func=ast.Name(id="range"), args=args, keywords=[]):
                return r.Range(tuple(map(self.expression, args)))
            case ast.Call(func=ast.Attribute(value=ast.Name(id="rt"), attr="warm_up")) if is_warm_up:
                return self._called(r.OfRuntime("warm_up"), node)
        return self.expression(node)

    def _return(self, node: ast.Return) -> r.Statement:
        return r.Return(None if node.value is None else self.expression(node.value), node.lineno)

    def _line(self, node: ast.Expr) -> r.Statement:
        match node.value:
            case ast.Constant(value=str()):
                return r.Skipped((), node.lineno)
            case ast.Call(func=ast.Name(id="print" | "breakpoint"), args=args, keywords=named):
                return self._skipped([*args, *(each.value for each in named)], node)
        try:
            return r.Do(self.expression(node.value), node.lineno)
        except _Unlike as error:
            if names_shown(node.value, self.bound) is None:
                raise error from None
            return self._skipped([node.value], node)

    def _skipped(self, values: Sequence[ast.expr], node: ast.stmt) -> r.Skipped:
        """Refuses what may change something."""
        names: list[str] = []
        for value in values:
            shown = names_shown(value, self.bound)
            if shown is None:
                _refuse(f"{_noun(node)} of what is more than looked at, {ast.unparse(value):.60}", value)
            names += shown
        return r.Skipped(tuple(names), node.lineno)

    def _assert(self, node: ast.Assert) -> r.Statement:
        return self._skipped([node.test, *([node.msg] if node.msg else [])], node)

    def _pass(self, node: ast.Pass) -> r.Statement:
        return r.Skipped((), node.lineno)

    def _if(self, node: ast.If) -> r.Statement:
        found = self._skipped([node.test], node)
        before = len(self.outside)
        inner = self._block([*node.body, *node.orelse])
        if len(self.outside) == before and not all(isinstance(each, r.Skipped) for each in inner):
            _refuse("an if around more than print and breakpoint", node)
        return found

    def _function(self, node: ast.FunctionDef) -> r.Statement:
        self._bind(node.name, node)
        if self.depth and not (self.depth == 1 and self.is_step):
            _refuse("a function in a function", node)
        around = self.names, self.depth, self.is_step
        self.names, self.depth = set(), self.depth + 1
        self.is_step = self.depth == 1 and node.name == "step"
        parameters = tuple(each.arg for each in node.args.args)
        decorators = [_dotted(each) for each in node.decorator_list]
        try:
            unlike = self._head(node, parameters, decorators)
            self.names.update(parameters)
            body = self._block(node.body)
            local = frozenset(self.names)
        finally:
            self.names, self.depth, self.is_step = around
        end, is_compiled = node.end_lineno or node.lineno, decorators == ["inductor"]
        return r.Function(node.name, parameters, (*unlike, *body), local, is_compiled, node.lineno, end)

    def _head(
        self, node: ast.FunctionDef, parameters: Sequence[str], decorators: Sequence[str]
    ) -> list[r.Outside]:
        """What the grammar does not have of a function's head."""
        args, what = node.args, list[str]()
        if args.vararg or args.kwarg or args.kwonlyargs or args.posonlyargs or args.defaults:
            what.append("a parameter with a default, or for any number of arguments")
        if self.is_step and (parameters[:1] != ("rt",) or len(parameters) != 2):
            what.append(f"a step({', '.join(parameters)}): it takes rt and the batch")
        for k, name in enumerate(parameters):
            if name in _RESERVED - ({"rt"} if self.is_step and k == 0 else set()) or name in parameters[:k]:
                what.append(f"another {name}")
        if decorators not in ([], ["inductor"]) or node.returns or getattr(node, "type_params", None):
            what.append("a decorator, or a type of a result")
        unlike = [r.Outside(each, node.lineno) for each in what]
        self.outside += unlike
        return unlike

    # -- expressions --------------------------------------------------------------------------------------

    def expression(self, node: ast.expr) -> r.Expression:
        reader = _EXPRESSIONS.get(type(node))
        if reader is None:
            _refuse(_noun(node), node)
        found: r.Expression = reader(self, node)
        return found

    def _name(self, node: ast.Name) -> r.Expression:
        name = node.id
        if name in _RESERVED or name.startswith("__"):
            _refuse(f"{name} as a value", node)
        if hasattr(builtins, name) and name not in self.bound:
            _refuse(f"a use of {name}", node)
        return r.Name(name, node.lineno)

    def _constant(self, node: ast.Constant) -> r.Expression:
        if isinstance(node.value, bytes) or node.value is ...:
            _refuse(f"the constant {node.value!r:.40}", node)
        return r.Literal(node.value)

    def _attribute(self, node: ast.Attribute) -> r.Expression:
        match _dotted(node).split("."):
            case ["rt", name] if name in r.OF_RUNTIME and name != "warm_up":
                return r.OfRuntime(name)
            case ["rt", name]:
                _refuse(f"a use of rt.{name}", node)
            case ["torch", "ops", *path] if path:
                return r.Op(".".join(path), node.lineno)
            case ["lanes", name]:
                return r.Op(f"lanes.{name}.default", node.lineno)
            case ["torch", name]:
                value = getattr(torch, name, None)
                if isinstance(value, torch.dtype | torch.layout | torch.memory_format | float):
                    return r.Literal(value)
                _refuse(f"a use of torch.{name}", node)
        _refuse(f"the attribute .{node.attr}", node)

    def _subscript(self, node: ast.Subscript) -> r.Expression:
        of = self.expression(node.value)
        match node.slice:
            case ast.Slice(lower=lower, upper=upper, step=None):
                begin, end = (None if each is None else self.expression(each) for each in (lower, upper))
                return r.Item(of, r.Slice(begin, end))
        return r.Item(of, self.expression(node.slice))

    def _sequence(self, node: ast.List | ast.Tuple) -> r.Expression:
        return r.Sequence(tuple(map(self._element, node.elts)), isinstance(node, ast.List))

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
            loops = [(each.target, self._iterable(each.iter)) for each in node.generators]
            targets = tuple((self._target(target), iterable) for target, iterable in loops)
            if any(isinstance(each, r.Item) for target, _ in targets for each in r.parts(target)):
                _refuse("an assignment in a list", node)
            return r.Comprehension(self.expression(node.elt), targets)
        finally:
            self.names = around

    def _dict(self, node: ast.Dict) -> r.Expression:
        keys = [each for each in node.keys if each is not None]
        if len(keys) < len(node.keys):
            _refuse("a dict of another one", node)
        values = tuple(map(self.expression, node.values))
        return r.Dict(tuple(map(self.expression, keys)), values, tuple(each.lineno for each in keys))

    def _text(self, node: ast.JoinedStr) -> r.Expression:
        return r.Text(tuple(map(self._part, node.values)))

    def _part(self, node: ast.expr) -> r.Expression:
        match node:
            case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
                return self.expression(value)
            case ast.Constant():
                return self.expression(node)
        _refuse("a text with a format", node)

    def _unary(self, node: ast.UnaryOp) -> r.Expression:
        if not isinstance(node.op, ast.USub):
            _refuse(f"the operator {ast.unparse(node):.60}", node)
        of = self.expression(node.operand)
        if isinstance(of, r.Literal) and type(of.value) in (int, float, complex):
            return r.Literal(-of.value)
        return r.Arithmetic("-", of, None)

    def _binary(self, node: ast.BinOp) -> r.Expression:
        symbol = _OPERATORS.get(type(node.op))
        if symbol is None or (symbol == "%" and isinstance(node.left, ast.Constant | ast.JoinedStr)):
            _refuse(f"the operator {ast.unparse(node):.60}", node)
        return r.Arithmetic(symbol, self.expression(node.left), self.expression(node.right))

    def _call(self, node: ast.Call) -> r.Expression:
        match node:
            case ast.Call(ast.Name("float" | "complex" as kind), [ast.Constant(str(text))], []):
                return r.Literal(_plain({"float": float, "complex": complex}[kind], text, node))
            case ast.Call(ast.Attribute(ast.Name("torch"), "device"), [ast.Constant(str(text))], []):
                return r.Literal(_plain(torch.device, text, node))
            case ast.Call(ast.Attribute(ast.Name("rt" | "torch" | "lanes")) as function):
                return self._called(self.expression(function), node)
            case ast.Call(ast.Attribute(of, name), args, []) if name in r.METHODS:
                return r.Method(self.expression(of), name, tuple(map(self.expression, args)), node.lineno)
            case ast.Call(ast.Name(name)) if hasattr(builtins, name) and name not in self.bound:
                _refuse(f"a call of {name}", node)
            case ast.Call(ast.Name() | ast.Attribute(ast.Attribute()) as function):
                return self._called(self.expression(function), node)
            case ast.Call(ast.Attribute(_, name)):
                _refuse(f"the method .{name}", node)
        _refuse("a call of a value", node)

    def _called(self, function: r.Expression, node: ast.Call) -> r.Expression:
        named = tuple((each.arg or "", self.expression(each.value)) for each in node.keywords)
        names = [name for name, _ in named]
        if "" in names or len({*names}) < len(names):
            _refuse("arguments of a dict, or one twice", node)
        return r.Call(function, tuple(map(self.expression, node.args)), named, node.lineno)


def _check_top(found: r.Statement, node: ast.stmt) -> None:
    """At the top level nothing can change from call to call."""
    match found:
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


def _plain(kind: Callable[[str], Any], text: str, node: ast.AST) -> Any:
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
        if "# " in line and (found := _COMMENT.fullmatch(line)):
            yield r.Comment(number, found[1], found[2] or "")


_STATEMENTS: dict[type[ast.stmt], Callable[[_Parser, Any], r.Statement]] = {
    ast.Assert: _Parser._assert,
    ast.Assign: _Parser._assign,
    ast.Delete: _Parser._delete,
    ast.Expr: _Parser._line,
    ast.For: _Parser._for,
    ast.FunctionDef: _Parser._function,
    ast.If: _Parser._if,
    ast.Import: _Parser._import,
    ast.ImportFrom: _Parser._import_from,
    ast.Pass: _Parser._pass,
    ast.Return: _Parser._return,
}
_EXPRESSIONS: dict[type[ast.expr], Callable[[_Parser, Any], r.Expression]] = {
    ast.Attribute: _Parser._attribute,
    ast.BinOp: _Parser._binary,
    ast.Call: _Parser._call,
    ast.Constant: _Parser._constant,
    ast.Dict: _Parser._dict,
    ast.JoinedStr: _Parser._text,
    ast.List: _Parser._sequence,
    ast.ListComp: _Parser._comprehension,
    ast.Name: _Parser._name,
    ast.Subscript: _Parser._subscript,
    ast.Tuple: _Parser._sequence,
    ast.UnaryOp: _Parser._unary,
}
