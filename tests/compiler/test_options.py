"""The docs of options are their docstring, table and help; type checkers know their names and values."""

import inspect
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

from docs_worker import ROOT

import fxpipe
from fxpipe.api.arguments import DOCS
from fxpipe.compiler.options import Options, Settings
from fxpipe.plan.meshes import Mesh
from scripts.site_docstrings import as_markdown

PACKAGE = Path(fxpipe.__file__).parent


def table_of_options() -> str:
    """The options of ``compile`` as a table of Markdown, from their docs."""
    rows = ["| option | default | |", "|---|---|---|"]
    for name, option in inspect.signature(fxpipe.compile).parameters.items():
        if option.kind is option.KEYWORD_ONLY:
            default = f'"{option.default}"' if isinstance(option.default, str) else option.default
            rows.append(f"| `{name}` | `{default}` | {as_markdown(DOCS[name])} |")
    return "\n".join(rows)


def test_the_table_of_options_is_that_of_their_docs(request):
    page = ROOT / "docs/reference.md"
    before, rest = page.read_text().split("### Options of `compile`\n\n")
    table, after = rest.split("\n\n::: fxpipe.load")
    if request.config.getoption("--update-golden"):
        page.write_text(f"{before}### Options of `compile`\n\n{table_of_options()}\n\n::: fxpipe.load{after}")
    else:
        assert table == table_of_options()


def test_each_option_is_documented():
    parameters = inspect.signature(fxpipe.compile).parameters
    assert [*DOCS] == [*parameters][2:]
    assert [name for name, each in parameters.items() if each.annotation is each.empty] == []
    assert all((text[0] == "`" or text[0].isupper()) and text.endswith((".", ")")) for text in DOCS.values())
    for name, text in DOCS.items():
        shown = re.search(rf"^{name}: (.*?)(?=\n\S|\n\n)", fxpipe.compile.__doc__, re.DOTALL | re.MULTILINE)
        assert " ".join(shown[1].split()) == text


def test_each_option_is_read():
    """Of those that the compiler has: an option that nothing reads would be ignored in silence."""
    own = {"options.py", "check_options.py", "arguments.py"}
    files = [path for path in PACKAGE.rglob("*.py") if path.name not in own]
    read = {name for path in files for name in re.findall(r"\.([a-z_]+)\b", path.read_text())}
    settled = {"costs", "offload", "replay", "without"}  # ``Settings`` has what they stand for
    assert {field.name for field in fields(Options)} - read <= settled


def test_what_a_plan_has_of_replay():
    given = [SimpleNamespace(replay=replay) for replay in ("auto", True, False)]
    assert [*map(Settings.replays.fget, given)] == ["auto", "always", ""]


def test_each_option_of_plan_is_read():
    """``options_of`` has those of ``Options``; the others are read by name."""
    added = (PACKAGE / "cli/options/plan.py").read_text()
    options = set(re.findall(r'add_option\(\s*parser, "([a-z_]+)"', added))
    source = (PACKAGE / "cli/plan.py").read_text()
    others = options - {field.name for field in fields(Options)}
    assert len(others) > 5
    assert {name for name in others if f"options.{name}" not in source} == set()


def test_what_a_mesh_divides():
    assert [Mesh(2, 4, 1, shard).divides_parameters for shard in ("gradients", "parameters")] == [False, True]
