"""What a program's ``step`` does, in order, as far as its text shows it.

A function of ``step``, as ``F1`` for the ops F1.0, F1.1, …, is called in lines of its own, with numbers.
"""

from __future__ import annotations

import ast
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fxpipe.plan.program import records as r

Numbers = Mapping[str, object]
"""The arguments of the function around a line."""


@dataclass(frozen=True, eq=False)
class Performed:
    """The lines of a program's ``step``."""

    step: r.Function

    @cached_property
    def functions(self) -> dict[str, r.Function]:
        return {each.name: each for each in self.step.body if isinstance(each, r.Function)}

    @property
    def has_warm_up(self) -> bool:
        """Whether it begins with the loop in which a rank runs ahead of the verdict on the last update."""
        return any(isinstance(each, ast.For) and _is_warm_up(each) for each in self.step.body)

    @property
    def ops(self) -> tuple[str, ...]:
        """The names in the calls ``rt.op("F1.0")``, or ``rt.op(f"F1.{m}")`` in the function ``F1``."""
        names = (_op(value, numbers) for value, numbers in self.values())
        return tuple(name for name in names if name is not None)

    def values(self) -> Iterator[tuple[ast.expr, Numbers]]:
        """What is computed, in order."""
        for value in _values(self.step.body):
            yield value, {}
            called = self._called(value)
            if called is not None:
                function, numbers = called
                for inner in _values(function.body):
                    yield inner, numbers

    def lines(self) -> list[ast.expr]:
        """What is computed in lines of ``step`` and of its functions, each line once."""
        return [value for each in (self.step, *self.functions.values()) for value in _values(each.body)]

    @property
    def is_complete(self) -> bool:
        """Whether the functions of ``step`` are called in lines of their own alone, and run to their ends,
        and the grammar has all that it does."""
        calls = [called[0].name for v in _values(self.step.body) if (called := self._called(v)) is not None]
        inside = [*r.parts(self.step)]
        named = [each.id for each in inside if isinstance(each, ast.Name) and each.id in self.functions]
        defined = Counter(x.name for x in inside if isinstance(x, r.Function) and x is not self.step)
        returns = [each for f in self.functions.values() for each in f.body if isinstance(each, ast.Return)]
        is_known = not any(isinstance(each, r.Outside) for each in inside)
        is_plain = not returns and all(defined[name] == 1 for name in self.functions)
        # A name of a function that stands anywhere else may lead to a call that no line shows.
        return Counter(calls) == Counter(named) and is_known and is_plain

    def _called(self, value: ast.expr) -> tuple[r.Function, dict[str, object]] | None:
        """The function of ``step`` that is called, with its arguments, if they are literals."""
        match value:
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in self.functions:
                function = self.functions[name]
                numbers = [each.value for each in arguments if isinstance(each, ast.Constant)]
                if len(numbers) == len(arguments) == len(function.parameters):
                    return function, dict(zip(function.parameters, numbers, strict=True))
        return None


def _values(body: Sequence[ast.stmt]) -> Iterator[ast.expr]:
    for each in body:
        match each:
            case ast.Expr(value=value) | ast.Assign(value=value):
                yield value
            case ast.For(body=inner) if _is_warm_up(each):
                yield from _values(inner)


def _is_warm_up(loop: ast.For) -> bool:
    """Whether a loop runs once: a second time it does all of it again."""
    function = loop.iter.func if isinstance(loop.iter, ast.Call) else None
    return isinstance(function, r.OfRuntime) and function.name == "warm_up"


def _op(value: ast.expr, numbers: Numbers) -> str | None:
    match value:
        case ast.Call(func=r.OfRuntime(name="op"), args=[name], keywords=[]):
            return text_of(name, numbers)
    return None


def text_of(value: ast.expr, values: Numbers) -> str | None:
    """The text that a literal, or an f-string of names and numbers, is; None for any other expression.

    values: of the names.
    """
    match value:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            texts = [_number(part, values) for part in parts]
            return None if None in texts else "".join(map(str, texts))
    return None


def _number(value: ast.expr, values: Numbers) -> object:
    match value:
        case ast.Constant(value=number):
            return number
        case ast.Name(id=name):
            return values.get(name)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            a, b = _number(left, values), _number(right, values)
            return _OPERATORS[type(sign)](a, b) if isinstance(a, int) and isinstance(b, int) else None
    return None


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
