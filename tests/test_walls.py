"""The walls between rooms: each contract of import-linter breaks where it should, and the parts of torch that
rooms may use, which import-linter does not tell apart."""

import ast
import re
import shutil
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import fxpipe

ROOT, PACKAGE = Path(__file__).parents[1], Path(fxpipe.__file__).parent
COMPILER = ("capture", "codegen", "compiler", "cost", "ir", "partition", "passes", "vocabulary")

#: Contract -> a module, and an import that it must not have.
BROKEN = {
    "Each room imports only from the rooms below it": ("capture.inputs", "passes.colored.untie"),
    "Schedules are made without torch": ("schedule.lowering.lower", "torch"),
    "Running a pipeline needs its plan and no compiler": ("training.model.save", "ir.storage"),
    "The compiler knows no ranks": ("codegen.program", "runtime.ranks.connect"),
    "The certificate shares no code with what it checks": ("certificate.programs.calls", "ir.storage"),
    "A plan is data: of schedules it knows the words": ("plan.artifact", "schedule.search.pool"),
    "Published orders are built without a search": ("schedule.families.weights", "schedule.search.pool"),
    "The compiled loops are the search's and the families'": ("cli.compare", "schedule.engine.kernel"),
    "Programs need no processes, processes no transports": ("runtime.program.comm", "runtime.job.digest"),
    "Programs run without the compiler's libraries": ("runtime.job.process", "networkx"),
}


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> str:
    """What import-linter says of a copy in which every wall has a hole."""
    copy = tmp_path_factory.mktemp("walls")
    shutil.copytree(PACKAGE, copy / "fxpipe", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    for module, imported in BROKEN.values():
        path = copy / "fxpipe" / f"{module.replace('.', '/')}.py"
        path.write_text(f"{path.read_text()}\nimport {_full(imported)}\n")
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
    run = subprocess.run(
        [*command, "--no-logo", "--no-cache"], cwd=copy, capture_output=True, text=True, check=False
    )
    assert run.returncode == 1, run.stdout + run.stderr
    return re.sub(r"\s+", " ", run.stdout)


def _full(module: str) -> str:
    return module if module in ("torch", "networkx") else f"fxpipe.{module}"


@pytest.mark.parametrize("contract", BROKEN)
def test_a_hole_is_found(report, contract):
    module, imported = BROKEN[contract]
    assert f"{contract} BROKEN" in report
    own = re.split(r"-{5,}", report.split(f"{contract} ---")[1])
    assert f"fxpipe.{module} -> {_full(imported)}" in next(part for part in own if "->" in part)


def test_every_contract_is_tried():
    names = re.findall(r'^name = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert {*names} - {"fxpipe"} == {*BROKEN}


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def _imports(path: Path) -> set[str]:
    """The modules that a file imports, with the names that it takes from them."""
    found = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


@pytest.mark.parametrize(
    ("rooms", "part", "exceptions"),
    [
        # Inductor compiles functions at run time, from graphs of its own.
        (("plan", "runtime", "training"), "torch.fx", {"inductor.py", "pieces.py", "torch_private.py"}),
        ((*COMPILER, "plan", "viz"), "torch.distributed", set()),
    ],
)
def test_parts_of_torch(rooms, part, exceptions):
    files = [path for room in rooms for path in (PACKAGE / room).rglob("*.py")]
    assert len(files) > 20
    users = {path.name for path in files if any(f"{x}.".startswith(f"{part}.") for x in _imports(path))}
    assert users == exceptions


#: The readers of Python's text: the parser of programs, and what reads the model's code and the user's.
READERS = {
    "api/option_docs.py": {"ast.parse", "ast.literal_eval"},
    "capture/state/frozen_state.py": {"ast.parse"},
    "cli/run/data.py": {"ast.literal_eval"},
    "plan/program/parse.py": {"ast.parse", "compile"},
    "runtime/functions.py": {"dis"},
    "schedule/engine/compiled.py": {"compile"},
}
#: Who knows programs and has a regular expression, of names alone.
WITH_PATTERNS = {
    "certificate/causes.py", "plan/program/parse.py", "plan/saved/files.py", "viz/report/program_lines.py",
}  # fmt: skip


def _parses(path: Path) -> set[str]:
    """What a file has that reads or runs a text as Python."""
    called = {ast.unparse(node.func) for node in ast.walk(_tree(path)) if isinstance(node, ast.Call)}
    parsers = {"ast.parse", "ast.literal_eval", "compile", "eval"} & (called | _imports(path))
    return ({"tokenize", "symtable", "dis"} & _imports(path)) | parsers


def test_one_parser_reads_programs():
    """Others look at the nodes that it gives; the certificate runs no text."""
    files = {str(path.relative_to(PACKAGE)): path for path in PACKAGE.rglob("*.py")}
    assert {name: parses for name, path in files.items() if (parses := _parses(path))} == READERS
    of_programs = {
        name
        for name, path in files.items()
        if any(each.startswith("fxpipe.plan.program") for each in _imports(path))
        or name == "plan/program/parse.py"
    }
    assert {name for name in of_programs if "re" in _imports(files[name])} == WITH_PATTERNS
    runs = {name for name, path in files.items() if re.search(r"\bexec\(", path.read_text())}
    assert not any(name.startswith(("certificate", "plan")) for name in runs)


def test_the_number_of_rooms_and_of_imports_between_them():
    rooms: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        used = {name.split(".")[1] for name in _imports(path) if name.startswith("fxpipe.")}
        rooms.setdefault(room, set()).update(used - {room})
    below = {room: used & rooms.keys() for room, used in rooms.items()}
    level: dict[str, int] = {}
    for room in TopologicalSorter(below).static_order():  # raises for a circle
        level[room] = 1 + max((level[other] for other in below[room]), default=0)
    assert len(rooms) <= 22
    assert max(level.values()) <= 11
    assert sum(map(len, below.values())) <= 98
