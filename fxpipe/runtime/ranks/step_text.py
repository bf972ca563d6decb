"""The order of a ``step`` as its text shows it: its statements, and those of its functions where it calls
them.

A function of ``step``, as ``F1`` for the ops F1.0, F1.1, …, is called in lines of its own, with numbers.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, eq=False)
class StepText:
    step: ast.FunctionDef

    @cached_property
    def functions(self) -> dict[str, ast.FunctionDef]:
        return {n.name: n for n in self.step.body if isinstance(n, ast.FunctionDef)}

    def values(self) -> Iterator[tuple[ast.expr, Mapping[str, object]]]:
        """What is computed, in order, with the arguments of the function around."""
        for value in _values(self.step.body):
            yield value, {}
            given = self._call(value)
            if given is not None:
                function, arguments = given
                for inner in _values(function.body):
                    yield inner, arguments

    def shown(self) -> list[ast.expr]:
        """What is computed in lines of ``step`` and of its functions, each line once."""
        return [v for body in (self.step, *self.functions.values()) for v in _values(body.body)]

    @property
    def is_complete(self) -> bool:
        """Whether the functions of ``step`` are called in lines of their own alone, and run to their ends."""
        calls = [given[0].name for v in _values(self.step.body) if (given := self._call(v)) is not None]
        nodes = list(ast.walk(self.step))
        named = [n.id for n in nodes if isinstance(n, ast.Name) and n.id in self.functions]
        defined = Counter(n.name for n in nodes if isinstance(n, ast.FunctionDef))
        ends = [n for f in self.functions.values() for n in ast.walk(f) if isinstance(n, ast.Return)]
        return Counter(calls) == Counter(named) and not ends and all(defined[f] == 1 for f in self.functions)

    def _call(self, value: ast.expr) -> tuple[ast.FunctionDef, dict[str, object]] | None:
        """The function of ``step`` that is called, with its arguments, if they are constants."""
        match value:
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in self.functions:
                function = self.functions[name]
                names = [argument.arg for argument in function.args.args]
                numbers = [argument.value for argument in args if isinstance(argument, ast.Constant)]
                if len(numbers) == len(args) == len(names):
                    return function, dict(zip(names, numbers, strict=True))
        return None


def text_of(value: ast.expr, arguments: Mapping[str, object]) -> str | None:
    """The text that a literal, or an f-string of arguments, is; None for any other expression."""
    match value:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            texts = [text_of(part, arguments) for part in parts]
            return None if None in texts else "".join(map(str, texts))
        case ast.FormattedValue(value=ast.Name(id=name), conversion=-1, format_spec=None) if (
            name in arguments
        ):
            return str(arguments[name])
    return None


def _values(body: Sequence[ast.stmt]) -> Iterator[ast.expr]:
    return (n.value for n in body if isinstance(n, ast.Expr | ast.Assign))
