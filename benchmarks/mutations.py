"""Random edits of a program's text, as a slip of the code generation or of a person would make them.

Each takes the syntax tree of a program and changes one place, or returns None where it finds none.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from random import Random

Mutation = Callable[[ast.Module, Random], str | None]
"""Changes the tree; gives what it did as text."""


def mutated(source: str, random: Random) -> tuple[str, str, str]:
    """A text with one edit: the name of its kind, what it did, and the new text."""
    tree = ast.parse(source)
    while True:
        kind = random.choice(tuple(MUTATIONS))
        edited = copy.deepcopy(tree)
        done = MUTATIONS[kind](edited, random)
        if done is not None:
            return kind, done, ast.unparse(ast.fix_missing_locations(edited))


def _functions(tree: ast.Module) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def _bodies(tree: ast.Module) -> list[list[ast.stmt]]:
    return [node.body for node in _functions(tree)]


def _step(tree: ast.Module) -> list[ast.stmt]:
    return next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "step").body


def _text(node: ast.AST) -> str:
    return ast.unparse(node)[:90]


def _matching(body: list[ast.stmt], *words: str) -> list[int]:
    return [k for k, line in enumerate(body) if any(word in ast.unparse(line) for word in words)]


def _drop(body: list[ast.stmt], places: list[int], random: Random) -> str | None:
    if not places or len(body) < 2:
        return None
    return _text(body.pop(random.choice(places)))


def drop_call(tree: ast.Module, random: Random) -> str | None:
    """A W, a send or another call of ``step`` is missing."""
    body = _step(tree)
    return _drop(body, _matching(body, "(")[2:-1], random)


def drop_line(tree: ast.Module, random: Random) -> str | None:
    """A line of any function is missing."""
    body = random.choice(_bodies(tree))
    return _drop(body, [*range(len(body) - 1)], random)


def drop_deletion(tree: ast.Module, random: Random) -> str | None:
    """A value is not freed."""
    body = _step(tree)
    return _drop(body, [k for k, line in enumerate(body) if isinstance(line, ast.Delete)], random)


def swap_lines(tree: ast.Module, random: Random) -> str | None:
    """Two neighboring lines."""
    body = random.choice(_bodies(tree))
    if len(body) < 3:
        return None
    k = random.randrange(len(body) - 2)
    body[k], body[k + 1] = body[k + 1], body[k]
    return f"{_text(body[k])} before {_text(body[k + 1])}"


def swap_sends(tree: ast.Module, random: Random) -> str | None:
    """The values of two messages."""
    body = _step(tree)
    calls = [line.value for line in body if isinstance(line, ast.Expr) and ".send(" in ast.unparse(line)]
    calls = [call for call in calls if isinstance(call, ast.Call)]
    if len(calls) < 2:
        return None
    one, other = random.sample(calls, 2)
    one.args[0], other.args[0] = other.args[0], one.args[0]
    return f"{_text(one)} and {_text(other)}"


def twice(tree: ast.Module, random: Random) -> str | None:
    """A line runs twice: a sum, a message."""
    body = random.choice([*_bodies(tree), _step(tree)])
    k = random.randrange(len(body))
    if isinstance(body[k], ast.Return):
        return None
    body.insert(k, copy.deepcopy(body[k]))
    return _text(body[k])


def early_free(tree: ast.Module, random: Random) -> str | None:
    """A value is freed before its last use, or a list emptied."""
    body = random.choice(_bodies(tree))
    places = [k for k, line in enumerate(body) if isinstance(line, ast.Delete)]
    if not places:
        return None
    k = random.choice(places)
    line = body.pop(k)
    body.insert(max(0, k - random.randint(1, 3)), line)
    return _text(line)


def _constants(tree: ast.AST, kinds: tuple[type, ...]) -> list[ast.Constant]:
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return [node for node in found if type(node.value) in kinds]


def swap_literals(tree: ast.Module, random: Random) -> str | None:
    """Two numbers of a line."""
    lines = [line for body in _bodies(tree) for line in body if not isinstance(line, ast.FunctionDef)]
    line = random.choice(lines)
    found = _constants(line, (int, float, bool))
    if len({repr(node.value) for node in found}) < 2:
        return None
    one, other = random.sample(found, 2)
    one.value, other.value = other.value, one.value
    return _text(line)


def other_literal(tree: ast.Module, random: Random) -> str | None:
    """Another number: a position, a microbatch, a rank, a row, a size."""
    found = _constants(tree, (int, float, bool))
    if not found:
        return None
    node = random.choice(found)
    before = node.value
    node.value = not before if isinstance(before, bool) else before + random.choice((-1, 1, 2))
    return f"{before} becomes {node.value}"


def other_name(tree: ast.Module, random: Random) -> str | None:
    """Another parameter, leaf or message."""
    lines = [node for node in ast.walk(tree) if isinstance(node, ast.Subscript)]
    found = [node.slice for node in lines if isinstance(node.slice, ast.Constant)]
    names = sorted({str(node.value) for node in found if isinstance(node.value, str)})
    nodes = [node for node in found if isinstance(node.value, str)]
    if len(names) < 2:
        return None
    node = random.choice(nodes)
    before, node.value = node.value, random.choice(names)
    return f"{before!r} becomes {node.value!r}"


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) > 1)


def swap_operands(tree: ast.Module, random: Random) -> str | None:
    """Two arguments of a call."""
    call = random.choice([*_calls(tree)])
    one, other = random.sample(range(len(call.args)), 2)
    call.args[one], call.args[other] = call.args[other], call.args[one]
    return _text(call)


def other_operand(tree: ast.Module, random: Random) -> str | None:
    """Another variable of the same function."""
    body = random.choice(_functions(tree))
    names = [node for node in ast.walk(body) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    if len({node.id for node in names}) < 2:
        return None
    node, other = random.sample(names, 2)
    before, node.id = node.id, other.id
    return f"{before} becomes {node.id}"


def other_op(tree: ast.Module, random: Random) -> str | None:
    """The alias of another op."""
    aliases = [
        n.targets[0].id for n in tree.body if isinstance(n, ast.Assign) and "torch.ops" in ast.unparse(n)
    ]  # type: ignore[attr-defined]
    calls = [c for c in ast.walk(tree) if isinstance(c, ast.Call) and getattr(c.func, "id", "") in aliases]
    if not calls or len(aliases) < 2:
        return None
    call = random.choice(calls)
    call.func.id = random.choice(aliases)  # type: ignore[attr-defined]
    return _text(call)


def drop_out(tree: ast.Module, random: Random) -> str | None:
    """An op writes to another value, or makes a new one."""
    calls = [c for c in ast.walk(tree) if isinstance(c, ast.Call) and any(k.arg == "out" for k in c.keywords)]
    if not calls:
        return None
    call = random.choice(calls)
    keyword = next(k for k in call.keywords if k.arg == "out")
    names = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id.isidentifier()]
    keyword.value = ast.Name(random.choice(names).id, ast.Load())
    return _text(call)


MUTATIONS: dict[str, Mutation] = {
    function.__name__.replace("_", " "): function
    for function in (
        drop_call,
        drop_line,
        drop_deletion,
        swap_lines,
        swap_sends,
        twice,
        early_free,
        swap_literals,
        other_literal,
        other_name,
        swap_operands,
        other_operand,
        other_op,
        drop_out,
    )
}
