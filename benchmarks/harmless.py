"""Random edits of a program's text that change no result, no message and no order, as a reader makes them who
looks at a program or writes it otherwise.

Each takes the syntax tree of a program and changes one place, or returns None where it finds none.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from random import Random
from typing import Any

from mutations import Mutation, _aliases, _bodies, _calls, _normal, _replace, _step, _text


def harmless(source: str, random: Random) -> tuple[str, str, str]:
    """A text with one edit: the name of its kind, what it did, and the new text."""
    while True:
        kind, tree = random.choice(tuple(HARMLESS)), ast.parse(source)
        done = HARMLESS[kind](tree, random)
        if done is not None and (text := ast.unparse(ast.fix_missing_locations(tree))) != _normal(source):
            return kind, done, text


def _sections(tree: ast.Module) -> list[ast.FunctionDef]:
    return [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name != "step"]


def _stored(tree: ast.AST) -> list[str]:
    names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return sorted(names - {"_"})


def _op_functions(tree: ast.Module) -> list[ast.FunctionDef]:
    """The functions of ``step`` for a microbatch."""
    return [x for x in _step(tree).body if isinstance(x, ast.FunctionDef) and x.args.args]


def rename_variable(tree: ast.Module, random: Random) -> str | None:
    """A variable of a section."""
    section = random.choice(_sections(tree))
    names = _stored(section)
    if not names:
        return None
    old = random.choice(names)
    new = f"{old}_renamed"
    for node in ast.walk(section):
        if isinstance(node, ast.Name) and node.id == old:
            node.id = new
    return f"{old} in {section.name}"


def rename_function(tree: ast.Module, random: Random) -> str | None:
    """A section, and where it is called."""
    section = random.choice(_sections(tree))
    if section.name in ("once_a_step", "counts"):
        return None
    old = section.name
    section.name = new = f"{old}_renamed"
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == old:
            node.id = new
    return old


def rename_alias(tree: ast.Module, random: Random) -> str | None:
    """The name of an op."""
    aliases: list[Any] = _aliases(tree)
    if not aliases:
        return None
    old = random.choice(aliases).targets[0].id
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == old:
            node.id = f"{old}_op"
    return str(old)


def without_alias(tree: ast.Module, random: Random) -> str | None:
    """An op is called by its whole name."""
    ops = {line.targets[0].id: line.value for line in _aliases(tree)}  # type: ignore[attr-defined]
    calls: list[Any] = [call for call in _calls(tree) if getattr(call.func, "id", "") in ops]
    if not calls:
        return None
    call = random.choice(calls)
    call.func = copy.deepcopy(ops[call.func.id])
    return _text(call)


def name_operand(tree: ast.Module, random: Random) -> str | None:
    """A call within a call gets a line of its own."""
    ops = {line.targets[0].id for line in _aliases(tree)}  # type: ignore[attr-defined]
    places = []
    for section in _sections(tree):
        for body in _bodies(section):
            for k, line in enumerate(body):
                if not isinstance(line, ast.Assign | ast.Expr):
                    continue
                nested = line.value.args if isinstance(line.value, ast.Call) else ()
                places += [
                    (body, k, line, each)
                    for each in nested
                    if isinstance(each, ast.Call) and getattr(each.func, "id", "") in ops
                ]
    if not places:
        return None
    body, k, line, call = random.choice(places)
    _replace(line, call, ast.Name("an_operand", ast.Load()))
    body.insert(k, ast.Assign([ast.Name("an_operand", ast.Store())], call))
    body.insert(k + 2, ast.Delete([ast.Name("an_operand", ast.Del())]))
    return _text(call)


def print_it(tree: ast.Module, random: Random) -> str | None:
    """What is in a variable of a section, or that a line was reached."""
    body = random.choice([body for section in _sections(tree) for body in _bodies(section)])
    places = [
        (k, line.targets[0].id)
        for k, line in enumerate(body)
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name)
    ]
    if not places:
        return None
    k, name = random.choice(places)
    shown = (
        "print('here')",
        f"print({name}.shape, {name}.dtype)",
        f"print(f'{{{name}.double().norm():.3f}}')",
        f"assert {name}.dim() >= 0",
        f"print({name}.isnan().any().item())",
    )
    line = random.choice(shown)
    body.insert(k + 1, ast.parse(line).body[0])
    return line


def print_of_a_microbatch(tree: ast.Module, random: Random) -> str | None:
    """A condition on the microbatch in a function of ``step``, for a look or a breakpoint."""
    functions = _op_functions(tree)
    if not functions:
        return None
    function = random.choice(functions)
    look = random.choice(("print('microbatch', m)", "breakpoint()"))
    line = f"if m == {random.randrange(90, 99)}:\n    {look}"
    first = 1 if isinstance(function.body[0], ast.Expr) and len(function.body) > 1 else 0
    function.body.insert(first, ast.parse(line).body[0])
    return line.replace("\n    ", " ")


def swap_independent(tree: ast.Module, random: Random) -> str | None:
    """Two neighboring lines of a section that make values, neither of which reads the other's."""
    places = list(_independent(tree))
    if not places:
        return None
    body, k = random.choice(places)
    body[k], body[k + 1] = body[k + 1], body[k]
    return f"{_text(body[k])} before {_text(body[k + 1])}"


def _independent(tree: ast.Module) -> Iterator[tuple[list[ast.stmt], int]]:
    views = ("reshape", "t", "transpose_int", "permute", "unsqueeze", "squeeze_dim", "expand")
    for section in _sections(tree):
        for body in _bodies(section):
            for k in range(len(body) - 1):
                one, other = body[k], body[k + 1]
                if not (_is_pure(one) and _is_pure(other)):
                    continue
                if any(getattr(call.func, "id", "") in views for x in (one, other) for call in _calls(x)):
                    continue  # what is alive between the two would be another view
                reads = [{n.id for n in ast.walk(x) if isinstance(n, ast.Name)} for x in (one, other)]
                if not set(_stored(one)) & reads[1] and not set(_stored(other)) & reads[0]:
                    yield body, k


def _is_pure(line: ast.stmt) -> bool:
    """Whether a line makes a value by ops that write to nothing."""
    if not isinstance(line, ast.Assign) or not isinstance(line.targets[0], ast.Name):
        return False
    names = [getattr(call.func, "id", "_") for call in _calls(line)]
    is_written = any(
        keyword.arg in ("out", "grad_input") for call in _calls(line) for keyword in call.keywords
    )
    return bool(names) and not is_written and not any(name.endswith("_") or "keyed" in name for name in names)


def another_name_for_it(tree: ast.Module, random: Random) -> str | None:
    """A container of ``step`` is read under a second name: ``weights = params``."""
    functions = [
        section for section in _sections(tree) if section.args.args and section.args.args[0].arg == "params"
    ]
    if not functions:
        return None
    section = random.choice(functions)
    for node in ast.walk(section):
        if isinstance(node, ast.Name) and node.id == "params":
            node.id = "weights"
    first = 1 if isinstance(section.body[0], ast.Expr) else 0
    section.body.insert(first, ast.parse("weights = params").body[0])
    return section.name


def move_function(tree: ast.Module, random: Random) -> str | None:
    """A section stands elsewhere in the file."""
    sections = _sections(tree)
    if len(sections) < 2:
        return None
    one, other = random.sample(sections, 2)
    a, b = tree.body.index(one), tree.body.index(other)
    tree.body[a], tree.body[b] = other, one
    return f"{one.name} and {other.name}"


def fewer_names_freed(tree: ast.Module, random: Random) -> str | None:
    """A local variable of a section's last lines is freed by the end of the function."""
    places = []
    for section in _sections(tree):
        for body in _bodies(section):
            places += [(body, line) for line in body[-2:-1] if isinstance(line, ast.Delete)]
    if not places:
        return None
    body, line = random.choice(places)
    body.remove(line)
    return _text(line)


HARMLESS: dict[str, Mutation] = {
    function.__name__.replace("_", " "): function
    for function in (
        rename_variable,
        rename_function,
        rename_alias,
        without_alias,
        name_operand,
        print_it,
        print_of_a_microbatch,
        swap_independent,
        another_name_for_it,
        move_function,
        fewer_names_freed,
    )
}
