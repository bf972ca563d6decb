"""The Python and the commands of pages run as they stand there; excerpts and tables are those of the code."""

import inspect
import re
from pathlib import Path

import docs_worker
import pytest
import torch
from docs_worker import ROOT
from launch import forked
from safetensors.torch import save_file

import fxpipe
from fxpipe.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.waits]


#: The number of blocks that are whole, by page.
PAGES = {"README.md": 2, "docs/steps.md": 1, "docs/mesh.md": 3, "docs/howto.md": 4}
LOCAL = {"docs/howto.md": 4, "docs/debugging.md": 3}


def test_pages(tmp_path):
    ran = forked(4, docs_worker.run, [*PAGES], str(tmp_path), dtype=torch.float32, logs=tmp_path / "logs")
    assert ran.code == 0, ran
    assert {page: len(docs_worker.blocks(page)) for page in PAGES} == PAGES
    assert all(out.count("ran ") == sum(PAGES.values()) for out in ran.stdout), ran


def test_pages_in_one_process(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    docs_worker.run([*LOCAL], str(tmp_path), local=True)
    assert {page: len(docs_worker.blocks(page, local=True)) for page in LOCAL} == LOCAL
    printed = capsys.readouterr().out
    assert "Rank 1 of 4: Model" in printed  # the program
    assert "'F0.15'" in printed  # a range of the profiler
    assert "[record function] F0.0" in printed
    replays, debugged = docs_worker.commands("docs/debugging.md")
    assert debugged == [*replays, "--pdb"]
    assert main(replays[1:]) == 0
    assert "as in the step" in capsys.readouterr().out


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A directory with what the commands of pages take for granted."""
    directory = tmp_path_factory.mktemp("commands")
    known = docs_worker.names()
    pipe = fxpipe.compile(known["model"], known["example"], ranks=4, microbatches=16, schedule="zb-h1")
    (directory / "build").mkdir()
    for name in ("gpt2", "demo"):
        pipe.save(directory / "build" / name)
    for name in ("data.safetensors", "build/demo-data.safetensors"):
        save_file(known["batch"] | {"labels": known["batch"]["labels"].clone()}, directory / name)
    return directory


WITH_COMMANDS = ("README.md", "docs/howto.md", "docs/concepts.md")


def test_commands(saved, monkeypatch, capsys):
    monkeypatch.chdir(saved)
    calls = [call for page in WITH_COMMANDS for call in docs_worker.commands(page)]
    started = [call[call.index("fxpipe") + 1 :] for call in calls if call[0] == "torchrun"]
    ran = forked(4, docs_worker.run_commands, started, str(saved), dtype=torch.float32, logs=saved / "logs")
    assert ran.code == 0, ran
    assert len(started) == 2
    printed = {}
    for call in calls:
        if call[0] == "fxpipe":
            assert not main(call[1:]), call
            printed[" ".join(call[:4])] = capsys.readouterr().out
    assert "span bubble 27.27%" in printed["fxpipe simulate --schedule 1f1b"]
    assert "span bubble 11.11%" in printed["fxpipe simulate --schedule zb-h1"]
    assert {"report.html"} <= {path.name for path in (saved / "build/gpt2").iterdir()}


def test_the_tutorial(tmp_path):
    ran = forked(2, docs_worker.run_scripts, str(tmp_path), dtype=torch.float32, logs=tmp_path / "logs")
    assert ran.code == 0, ran
    assert len(docs_worker.tutorial()) == 5
    assert re.search(r"step 4: loss .*\nloss on 50 other rows: 0", ran.stdout[0]), ran
    assert fxpipe.read_checkpoint(tmp_path / "checkpoints").state["loader"] == {"taken": 4}


def test_excerpts_of_programs_are_those_of_the_goldens():
    excerpts = [(title, text) for _, title, text in docs_worker.fences("docs/concepts.md") if title]
    assert len(excerpts) == 4
    for title, text in excerpts:
        rest = (ROOT / "tests/golden" / f"{title}.golden").read_text()
        for part in re.split(r"^\s*…\n", text, flags=re.MULTILINE):
            for lines in filter(None, part.split("\n\n")):
                assert lines in rest, f"not behind what stands above it in {title}: {lines}"
                rest = rest[rest.index(lines) + len(lines) :]


def test_defaults_in_the_table_of_options():
    rows = re.findall(r"^\| (`\w+`.*?) \| (`.*?`) \| ", (ROOT / "README.md").read_text(), re.MULTILINE)
    table: dict[str, str] = {}
    for options, defaults in rows:
        table |= zip(options.split(", "), defaults.split(", "), strict=True)
    known = inspect.signature(fxpipe.compile).parameters.values()
    defaults = {f"`{p.name}`": p.default for p in known if p.kind is p.KEYWORD_ONLY}
    assert defaults.keys() - table.keys() == {"`ranks`", "`microbatches`", "`loss_fn`"}
    for name, value in table.items():
        default = defaults[name]
        assert value == (f'`"{default}"`' if isinstance(default, str) else f"`{default}`"), name
