"""Random edits of a program's text, as a slip of the code generation or of a person would make them.

Each takes the syntax tree of a program and changes one place, or returns None where it finds none.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Iterator
from difflib import SequenceMatcher
from functools import cache
from random import Random
from typing import Any

Mutation = Callable[[ast.Module, Random], str | None]
"""Changes the tree; gives what it did as text."""


def mutated(source: str, random: Random) -> tuple[str, str, str]:
    """A text with one edit: the name of its kind, what it did, and the new text."""
    while True:
        kind, tree = random.choice(tuple(MUTATIONS)), ast.parse(source)
        done = MUTATIONS[kind](tree, random)
        if done is not None and (text := ast.unparse(tree)) != _normal(source):
            return kind, done, text


def exchange_mutated(source: str, random: Random) -> tuple[str, str, str]:
    """The same, of a line that sums gradients over replicas or lanes, or gathers, waits for or frees
    parameters: it is missing, runs twice, changes places with another line, or names another bucket."""
    while True:
        tree = ast.parse(source)
        places = [
            (body, k)
            for body in _bodies(tree)
            for k, line in enumerate(body)
            if isinstance(line, ast.Expr) and re.match(EXCHANGES, _text(line))
        ]
        body, k = random.choice(places)
        line, kind = body[k], random.choice(("missing", "twice", "elsewhere", "another bucket"))
        done = _text(line)
        if kind == "twice":
            body.insert(_place(body, random), copy.deepcopy(line))
        elif kind == "another bucket":
            numbers = _constants(line, (int,))
            for number in random.sample(numbers, min(1, len(numbers))):
                number.value = max(0, number.value + random.choice((-1, 1, 2)))
        else:
            body.remove(line)
            if kind == "elsewhere":
                body, _ = random.choice([*places, (body, 0)])
                body.insert(_place(body, random), line)
        if not all(_bodies_are_full(tree)):
            continue
        if (text := ast.unparse(tree)) != _normal(source):
            return kind, done, text


def part_mutated(source: str, random: Random) -> tuple[str, str, str]:
    """The same, of a function that computes an output layer in parts of the tokens: also the rows of another
    part, or another part's value.  Of a program without such a function, of any line."""
    whole = ast.parse(source)
    if not any(map(_has_parts, whole.body)):
        return mutated(source, random)
    while True:
        tree = ast.parse(source)
        head = [node for node in tree.body if _has_parts(node) or isinstance(node, ast.Assign)]
        kinds = {name: MUTATIONS[name] for name in OF_PARTS} | {
            "other rows": other_rows,
            "other part": other_part,
        }
        kind = random.choice(tuple(kinds))
        done = kinds[kind](ast.Module(head, []), random)
        if done is not None and (text := ast.unparse(tree)) != _normal(source):
            return kind, done, text


#: Edits of one function.
OF_PARTS = (
    "drop line",
    "swap lines",
    "twice",
    "swap literals",
    "other literal",
    "swap operands",
    "other row",
    "other operand",
    "other op",
    "drop out",
)


def _has_parts(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name != "step" and len(_slices(node)) > 1


def _slices(tree: ast.AST) -> list[ast.Call]:
    """The calls that take rows a … b of a value."""
    return [c for c in _calls(tree) if getattr(c.func, "id", "") == "slice" and _text(c.args[1]) == "0"]


def other_rows(tree: ast.Module, random: Random) -> str | None:
    """The rows of another part, or one row more or less."""
    call, other = random.sample(_slices(tree), 2)
    before = _text(call)
    if random.random() < 0.5:
        call.args[2:] = copy.deepcopy(other.args[2:])
    else:
        bound: Any = random.choice(call.args[2:])
        bound.value = max(0, bound.value + random.choice((-1, 1)))
    return f"{before} becomes {_text(call)}"


def other_part(tree: ast.Module, random: Random) -> str | None:
    """The same value of another part: ``head_mm_1`` for ``head_mm_2``."""
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    node = random.choice(names)
    others = {each.id for each in names if _stem(each.id) == _stem(node.id)} - {node.id}
    if not others:
        return None
    before, node.id = node.id, random.choice(sorted(others))
    return f"{before} becomes {node.id} (line {node.lineno})"


def _stem(name: str) -> str:
    return re.sub(r"_\d+$", "", name)


def _place(body: list[ast.stmt], random: Random) -> int:
    """Where a line may come, before a return."""
    return random.randrange(len(body) + (not isinstance(body[-1], ast.Return)))


#: Calls on what replicas and lanes have of gradients and parameters.
EXCHANGES = r"rt\.(sum_over_lanes|\w+_gradients?|(gather|wait|free)_parameters)\b"


def _bodies_are_full(tree: ast.AST) -> Iterator[bool]:
    return (bool(body) for body in _bodies(tree))


def edited_lines(source: str, text: str) -> set[int]:
    """The lines of a ``mutated`` text that are not the source's.

    Of a line that is missing, those before and behind its place, and the first that reads what it made; of
    one that is there twice, both.
    """
    before, after = _normal(source).splitlines(), text.splitlines()
    lines = set[int]()
    for tag, first, _, start, end in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag == "delete":
            lines |= {start, start + 1}
            made = re.findall(r"\w{2,}", before[first].partition(" = ")[0]) if " = " in before[first] else ()
            uses = (k for k in range(start, len(after)) if set(made) & set(re.findall(r"\w+", after[k])))
            lines.add(1 + next(uses, start))
        elif tag == "insert":
            lines |= {*range(start + 1, end + 1)}
            lines |= {start} if start and after[start - 1] == after[start] else set()
            lines |= {end + 1} if end < len(after) and after[end] == after[start] else set()
        elif tag == "replace":
            lines |= {*range(start + 1, end + 1)}
    return lines


@cache
def _normal(source: str) -> str:
    return ast.unparse(ast.parse(source))


def _bodies(tree: ast.AST) -> list[list[ast.stmt]]:
    """The statements of each function and each loop."""
    return [node.body for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.For)]


def _step(tree: ast.Module) -> ast.FunctionDef:
    return next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "step")


def _text(node: ast.AST) -> str:
    return ast.unparse(node)[:90]


def _drop(tree: ast.AST, which: Callable[[ast.stmt], bool], random: Random) -> str | None:
    found = [(body, line) for body in _bodies(tree) for line in body if len(body) > 1 and which(line)]
    if not found:
        return None
    body, line = random.choice(found)
    body.remove(line)
    return _text(line)


def _is_docstring(line: ast.stmt) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)


def drop_call(tree: ast.Module, random: Random) -> str | None:
    """A W, a send or another call of ``step`` is missing."""
    return _drop(
        _step(tree), lambda line: isinstance(line, ast.Expr) and isinstance(line.value, ast.Call), random
    )


def drop_line(tree: ast.Module, random: Random) -> str | None:
    """A line of any function is missing."""
    return _drop(tree, lambda line: not isinstance(line, ast.Return) and not _is_docstring(line), random)


def drop_deletion(tree: ast.Module, random: Random) -> str | None:
    """A value of any function is not freed.

    An edit that changes nothing between ops: the value is a local variable, which goes when its function
    ends, at the latest as its op does.  A plan has no memory within an op, which its user leaves room for.
    """
    return _drop(tree, lambda line: isinstance(line, ast.Delete), random)


def keep(tree: ast.Module, random: Random) -> str | None:
    """A value by microbatch is read and not taken: ``h[m]`` for ``h.pop(m)``; or a list is not emptied."""
    pops = [c for c in ast.walk(tree) if isinstance(c, ast.Call) and getattr(c.func, "attr", "") == "pop"]
    clears = [c for c in ast.walk(tree) if isinstance(c, ast.Call) and getattr(c.func, "attr", "") == "clear"]
    if not pops and not clears:
        return None
    call: Any = random.choice([*pops, *clears])
    text = _text(call)
    if call in pops and call.args:
        place = ast.Subscript(call.func.value, call.args[0], ast.Load())
        _replace(tree, call, place)
    else:
        _replace(tree, call, call.func.value)
    return text


def _replace(tree: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for node in ast.walk(tree):
        for name, value in ast.iter_fields(node):
            if value is old:
                setattr(node, name, new)
            elif isinstance(value, list):
                value[:] = [new if each is old else each for each in value]


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
    calls = [c for c in _calls(_step(tree)) if getattr(c.func, "attr", "") == "send"]
    if len(calls) < 2:
        return None
    one, other = random.sample(calls, 2)
    one.args[0], other.args[0] = other.args[0], one.args[0]
    return f"{_text(one)} and {_text(other)}"


def swap_calls(tree: ast.Module, random: Random) -> str | None:
    """Two calls of ``step``, in its order of ops."""
    calls = [n for n in ast.walk(_step(tree)) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)]
    if len(calls) < 2:
        return None
    one, other = random.sample(calls, 2)
    one.value, other.value = other.value, one.value
    return f"{_text(one)} and {_text(other)}"


def twice(tree: ast.Module, random: Random) -> str | None:
    """A line runs twice: a sum, a message."""
    body = random.choice(_bodies(tree))
    k = random.randrange(len(body))
    if isinstance(body[k], ast.Return):
        return None
    body.insert(k, copy.deepcopy(body[k]))
    return _text(body[k])


def early_free(tree: ast.Module, random: Random) -> str | None:
    """A value is freed before its last use."""
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
    found = _constants(random.choice(lines), (int, float, bool))
    if len({repr(node.value) for node in found}) < 2:
        return None
    one, other = random.sample(found, 2)
    text = f"{one.value} and {other.value}"
    one.value, other.value = other.value, one.value
    return text


def other_literal(tree: ast.Module, random: Random) -> str | None:
    """Another number: a position, a microbatch, a rank, a row, a size."""
    found = _constants(tree, (int, float, bool))
    if not found:
        return None
    node = random.choice(found)
    before: Any = node.value
    node.value = not before if isinstance(before, bool) else before + random.choice((-1, 1, 2))
    return f"{before} becomes {node.value} (line {node.lineno})"


def other_name(tree: ast.Module, random: Random) -> str | None:
    """Another parameter, leaf or message."""
    nodes = [node for node in _constants(tree, (str,)) if " " not in str(node.value)]
    names = sorted({str(node.value) for node in nodes})
    if len(names) < 2:
        return None
    node = random.choice(nodes)
    before, node.value = node.value, random.choice(names)
    return f"{before!r} becomes {node.value!r} (line {node.lineno})"


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def swap_operands(tree: ast.Module, random: Random) -> str | None:
    """Two arguments of a call."""
    call = random.choice([call for call in _calls(tree) if len(call.args) > 1])
    one, other = random.sample(range(len(call.args)), 2)
    call.args[one], call.args[other] = call.args[other], call.args[one]
    return _text(call)


def other_row(tree: ast.Module, random: Random) -> str | None:
    """An entry of a list or of a tuple takes the place of another one: a row of a table, a size, a result."""
    found = [n for n in ast.walk(tree) if isinstance(n, ast.List | ast.Tuple) and len(n.elts) > 1]
    if not found:
        return None
    row = random.choice(found)
    one, other = random.sample(range(len(row.elts)), 2)
    if random.random() < 0.5 or isinstance(row.ctx, ast.Store):
        row.elts[one], row.elts[other] = row.elts[other], row.elts[one]
    else:
        row.elts[one] = copy.deepcopy(row.elts[other])
    return _text(row)


def other_operand(tree: ast.Module, random: Random) -> str | None:
    """Another variable of the same function."""
    body = random.choice([node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)])
    names = [node for node in ast.walk(body) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    if len({node.id for node in names}) < 2:
        return None
    node, other = random.sample(names, 2)
    before, node.id = node.id, other.id
    return f"{before} becomes {node.id} (line {node.lineno})"


def _aliases(tree: ast.Module) -> list[ast.Assign]:
    """The lines at the top that name an op."""
    return [node for node in tree.body if isinstance(node, ast.Assign) and "torch.ops" in ast.unparse(node)]


def other_op(tree: ast.Module, random: Random) -> str | None:
    """The alias of another op."""
    aliases = [line.targets[0].id for line in _aliases(tree)]  # type: ignore[attr-defined]
    calls = [call for call in _calls(tree) if getattr(call.func, "id", "") in aliases]
    if not calls or len(aliases) < 2:
        return None
    call: Any = random.choice(calls)
    before, call.func.id = call.func.id, random.choice(aliases)
    return f"{before} becomes {_text(call)}"


def other_alias(tree: ast.Module, random: Random) -> str | None:
    """Two aliases name each other's op."""
    aliases = _aliases(tree)
    if len(aliases) < 2:
        return None
    one, other = random.sample(aliases, 2)
    one.value, other.value = other.value, one.value
    return f"{_text(one)} and {_text(other)}"


def drop_out(tree: ast.Module, random: Random) -> str | None:
    """An op writes to another value, or makes a new one."""
    calls = [c for c in _calls(tree) if any(k.arg == "out" for k in c.keywords)]
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
        keep,
        swap_lines,
        swap_calls,
        swap_sends,
        twice,
        early_free,
        swap_literals,
        other_literal,
        other_name,
        swap_operands,
        other_row,
        other_operand,
        other_op,
        other_alias,
        drop_out,
    )
}
