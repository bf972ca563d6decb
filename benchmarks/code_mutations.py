"""Random faults in fxpipe's own code, each against the tests of its room.

    python benchmarks/code_mutations.py --number 60 --seed 1 --output benchmarks/results/code_mutations.txt

Works in a copy of the repository: one place of one file is changed (a comparison, an operator, a number, a
condition, a statement that is left out, an argument that is left out), and pytest runs until a test fails:
first the files of the room's tests that name the module or the function, then the others.  Prints what no
test has seen, for a person to look at: a fault, or a change that means nothing.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from difflib import unified_diff
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from report import ROOT, Report

#: Where the tests of rooms are that have no directory of their own name.
TESTS = {
    "api": ("training", "test_bad_input.py", "test_weak_errors.py"),
    "ir": ("passes", "capture", "codegen", "cost"),
    "python_state": ("capture", "training"),
    "strict.py": ("plan",),
    "errors.py": ("test_bad_input.py", "test_weak_errors.py", "test_text.py"),
}
ENDLESS = "no end"
Change = Callable[[Any], None]
"""Changes a node."""
SWAPPED: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip


def places(tree: ast.Module) -> list[tuple[int, str, Change]]:
    """Every change of one place: the number of its node, what it is, and how it is made.  Annotations, which
    do not run, stay as they are."""
    notes = (getattr(node, name, None) for node in ast.walk(tree) for name in ("annotation", "returns"))
    types = {node for note in notes if note is not None for node in ast.walk(note)}
    nodes = [(k, node) for k, node in enumerate(ast.walk(tree)) if node not in types]
    return [(k, what, change) for k, node in nodes for what, change in _changes(node)]


def _changes(node: ast.AST) -> Iterator[tuple[str, Change]]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        yield "comparison", _swap_compared
    if isinstance(node, ast.BoolOp | ast.BinOp | ast.AugAssign) and type(node.op) in SWAPPED:
        yield "operator", _swap_operator
    if isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        yield "number", _other_number
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        yield "condition", _negate
    for name, body in ast.iter_fields(node):
        if name in ("body", "orelse") and isinstance(body, list):
            for k, line in enumerate(body):
                text = isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)
                if isinstance(line, ast.Expr | ast.AugAssign | ast.Raise | ast.Continue) and not text:
                    yield "left out", partial(_leave_out, name=name, k=k)
    if isinstance(node, ast.Call) and node.keywords:
        yield "argument left out", lambda call: call.keywords.pop()


def _swap_compared(node: ast.Compare) -> None:
    node.ops[0] = SWAPPED[type(node.ops[0])]()


def _swap_operator(node: Any) -> None:
    node.op = SWAPPED[type(node.op)]()


def _other_number(node: ast.Constant) -> None:
    value: Any = node.value
    node.value = not value if isinstance(value, bool) else value + 1


def _negate(node: Any) -> None:
    node.test = ast.UnaryOp(ast.Not(), node.test)


def _leave_out(node: ast.AST, name: str, k: int) -> None:
    getattr(node, name)[k] = ast.Pass()


def tests_of(room: str, root: Path, words: list[str]) -> list[list[str]]:
    """The test files of a room: those that have some of the words, the first of them the module, with those
    first that have most, and the others."""
    paths = [root / "tests" / each for each in TESTS.get(room, (room,))]
    files = [f for p in paths for f in (sorted(p.rglob("test_*.py")) if p.is_dir() else [p]) if f.exists()]
    counts = {file: [*map(file.read_text().count, words)] for file in files}
    near = sorted((f for f in files if any(counts[f])), key=lambda f: (counts[f][0], sum(counts[f])))
    return [[str(f) for f in part] for part in (near[::-1], [f for f in files if f not in near]) if part]


def first_failure(files: list[str], root: Path, limit: float) -> str:
    """The first test that fails; "" if all pass, ENDLESS if they do not end in time."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *files]
    environment = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        run = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return ENDLESS
    lines = [x for x in run.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
    return "" if run.returncode == 0 else (lines or ["no test is collected"])[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--number", type=int, default=60)
    parser.add_argument("--first", type=int, default=0, help="the number of the first, for a run in pieces")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=inf, help="of wall time, behind which none begins")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for the tests of one fault")
    parser.add_argument("--tests", nargs="+", help="run these alone, for faults whose tests are known")
    parser.add_argument(
        "--list", action="store_true", help="name the faults and their changed lines, run nothing"
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    chosen, seen, tried = random.Random(arguments.seed), Counter[str](), list[str]()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "fxpipe"
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(".git", ".venv*", "build", "site"))
        files = [f for f in sorted((root / "fxpipe").rglob("*.py")) if "__init__" not in f.name]
        sizes = [len(f.read_text().splitlines()) for f in files]
        end = time.monotonic() + arguments.seconds
        for number in range(arguments.number):
            if time.monotonic() > end:
                break
            (path,) = chosen.choices(files, sizes)
            source = path.read_text()
            tree = ast.parse(source)
            if not (possible := places(tree)):
                continue
            k, what, change = chosen.choice(possible)
            node: Any = next(x for j, x in enumerate(ast.walk(tree)) if j == k)
            if number < arguments.first:
                continue
            before = ast.unparse(tree)
            change(node)
            line = getattr(node, "lineno", 0)
            module = path.relative_to(root / "fxpipe")
            if arguments.list:
                lines = unified_diff(before.splitlines(), ast.unparse(tree).splitlines(), n=0, lineterm="")
                print(f"{number} {module}:{line} {what}", *list(lines)[3:], sep="\n  ")
                continue
            functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
            around = [f.name for f in functions if f.lineno <= line <= (f.end_lineno or 0)]
            words = [
                ".".join(module.with_suffix("").parts),
                *(name for name in around if not name.startswith("__")),
            ]
            path.write_text(ast.unparse(tree))
            begun = time.monotonic()
            parts = [arguments.tests] if arguments.tests else tests_of(module.parts[0], root, words)
            failed = next((x for x in (first_failure(p, root, arguments.limit) for p in parts) if x), "")
            path.write_text(source)
            text = source.splitlines()[line - 1].strip() if line else ""
            taken = f"{time.monotonic() - begun:.0f} s"
            tried.append(f"{module}:{line} {what}: {text}  ->  {failed or 'SURVIVES'} ({taken})")
            print(number, tried[-1], file=sys.stderr, flush=True)
            seen[failed if failed == ENDLESS else "seen by a test" if failed else "survives"] += 1
    if arguments.list:
        return
    report = Report("Faults in fxpipe's own code, each against the tests of its room")
    report.line(f"{seen.total()} faults of seed {arguments.seed}: {dict(seen)}")
    for each in tried:
        report.line(each)
    report.save(arguments.output)


if __name__ == "__main__":
    main()
