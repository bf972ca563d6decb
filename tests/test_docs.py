"""The Python and the commands of pages run as they stand there; excerpts and tables are those of the code."""

import contextlib
import functools
import io
import json
import re
from pathlib import Path

import docs_worker
import pytest
import torch
from docs_worker import ROOT
from launch import Run, forked
from safetensors.torch import save_file
from small_samples import SMALL

import fxpipe
from fxpipe.cli import main
from fxpipe.cost.calibration import samples
from fxpipe.cost.devices.device_file import read_device
from fxpipe.cost.devices.known_devices import CPU

pytestmark = [pytest.mark.slow, pytest.mark.waits]

PAGES = sorted(str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
#: Their Python runs on four ranks, but for sections that run all ranks in one process.
ON_RANKS = (
    "README.md", "docs/schedules.md", "docs/mesh.md", "docs/howto.md", "docs/training.md", "docs/lengths.md",
)  # fmt: skip
IN_ONE_PROCESS = ("README.md", "docs/howto.md", "docs/debugging.md")
#: They compile for more ranks than four, or for other devices.
COMPILED = (
    "docs/costs.md", "docs/inductor.md", "docs/lanes.md", "docs/large_models.md", "docs/offload.md",
    "docs/replay.md", "docs/vocabulary.md",
)  # fmt: skip
#: In the order of what one needs of another.
COMMANDS = (
    "README.md", "docs/concepts.md", "docs/howto.md", "docs/report.md", "docs/training.md",
    "docs/debugging.md", "docs/costs.md",
)  # fmt: skip
SHOWN = ("docs/simulate.md", "docs/certificate.md")
ELSEWHERE = {
    "docs/tutorial.md": "test_the_tutorial",
    "docs/architecture.md": "test_one_model_through_every_phase",
    "docs/trainers.md": "integrations/test_trainers.py",
    "CONTRIBUTING.md": "passes/test_each_pass.py",
}


def started(page: str) -> list[list[str]]:
    """What torchrun starts, behind ``fxpipe``."""
    return [call[call.index("fxpipe") + 1 :] for call in docs_worker.commands(page) if call[0] == "torchrun"]


def test_every_block_runs_or_says_why_not():
    for page in set(PAGES) - ELSEWHERE.keys():
        whole = docs_worker.python(page)
        assert not whole or page in {*ON_RANKS, *IN_ONE_PROCESS, *COMPILED}, page
        calls = docs_worker.commands(page)
        assert not calls or page in COMMANDS, page
        for call in calls:
            assert call[0] == "fxpipe" or (call[0] == "torchrun" and "fxpipe" in call), (page, call)
        assert not docs_worker.shown(page) or page in SHOWN, page
        for block in docs_worker.blocks(page):
            assert block.language in ("python", "bash", "console", "json"), (page, block)
            assert block.is_whole or block.title or block.language == "console", (page, block)
    reasons = [block.reason for page in PAGES for block in docs_worker.blocks(page) if block.reason]
    assert len(reasons) <= 12, reasons


def test_the_diffs_of_contributing_begin_with_what_is_there():
    files = [path.read_text() for folder in ("fxpipe", "tests") for path in (ROOT / folder).rglob("*.py")]
    diffs = [block.text for block in docs_worker.blocks("CONTRIBUTING.md") if block.language == "diff"]
    assert len(diffs) >= 7
    for diff in diffs:
        before = "".join(line[1:] + "\n" for line in diff.splitlines() if not line.startswith("+"))
        assert any(before in file for file in files), diff


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """What the commands of pages take for granted."""
    directory = tmp_path_factory.mktemp("pages")
    known = docs_worker.names()
    pipe = fxpipe.compile(known["model"], known["example"], ranks=4, microbatches=16, schedule="1f1b")
    pipe.save(directory / "build/demo")
    for name in ("data.safetensors", "build/demo-data.safetensors"):
        save_file(known["batch"] | {"labels": known["batch"]["labels"].clone()}, directory / name)
    (directory / "my_model.py").write_text(
        "from docs_worker import names\n\ndef large():\n    known = names()\n"
        "    return known['model'], known['example']\n"
    )
    return directory


@pytest.fixture(scope="module")
def ranks(directory) -> Run:
    """One start of four ranks, for all pages."""
    calls = [call for page in COMMANDS for call in started(page)]
    given = [*ON_RANKS], calls, str(directory)
    run = forked(4, docs_worker.run_on_ranks, *given, dtype=torch.float32, logs=directory / "logs")
    assert run.code == 0, run
    return run


@pytest.fixture(scope="module")
def printed(directory) -> str:
    """What the Python prints that runs in one process; it saves pipelines that commands read."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as found:
        patch.chdir(directory)
        patch.syspath_prepend(str(directory))
        docs_worker.run(IN_ONE_PROCESS, local=True)
    return found.getvalue()


@pytest.fixture
def here(printed, directory, monkeypatch) -> Path:
    """In the directory, after the Python of the pages."""
    monkeypatch.chdir(directory)
    monkeypatch.syspath_prepend(str(directory))
    return directory


@pytest.mark.variation
def test_pages_on_ranks(ranks):
    blocks = sum(len(docs_worker.python(page, local=False)) for page in ON_RANKS)
    calls = sum(len(started(page)) for page in COMMANDS)
    assert all(out.count("ran ") == blocks + calls for out in ranks.stdout), ranks


@pytest.mark.variation
def test_ranks_calibrate_their_messages(ranks, directory):
    found = read_device(directory / "cpu.json")
    assert found.conditions["ranks"] == "4"
    assert found.device.intra != CPU.intra
    assert 0 < found.device.intra.latency < 1
    assert 1e6 < found.device.intra.bandwidth < 1e13


def test_pages_in_one_process(printed):
    assert "Rank 1 of 4: Model" in printed  # the program
    assert "'F0.15'" in printed  # a range of the profiler
    assert "[record function] F0.0" in printed


@pytest.mark.variation
def test_commands_of_pages(ranks, here, monkeypatch, capsys):
    """Those that read what ranks and Python have saved; and the Python that compiles for more ranks."""
    (here / "gpu.json").write_bytes((here / "cpu.json").read_bytes())
    docs_worker.run(COMPILED, schedule="1f1b", check=False)

    monkeypatch.setattr("sys.stdin", io.StringIO("continue\n" * 9))  # of --pdb
    for name, sizes in SMALL.items():
        monkeypatch.setattr(samples, name, sizes)  # of calibrate
    told = {}
    for call in (call for page in COMMANDS for call in docs_worker.commands(page)):
        if call[0] == "fxpipe":
            assert not main(docs_worker.fewer(call[1:])), call
            told.setdefault(" ".join(call[1:4]), capsys.readouterr().out)
    assert "span bubble 27.27%" in told["simulate --schedule 1f1b"]
    assert "span bubble 11.11%" in told["simulate --schedule zb-h1"]
    assert "as in the step" in told["replay recorded F1.3"]
    assert {"report.html", "measured0.json"} <= {path.name for path in (here / "build/gpt2").iterdir()}
    assert {"trace.json", "cpu.json"} <= {path.name for path in here.iterdir()}


@pytest.mark.parametrize("page", SHOWN)
def test_what_commands_print(here, page, capsys):
    (here / "docs").mkdir(exist_ok=True)
    assert docs_worker.shown(page)
    for call, lines in docs_worker.shown(page):
        assert main(call[1:]) == 0
        printed = iter([line.rstrip() for line in capsys.readouterr().out.splitlines()])
        for line in lines:
            begin, rest, _ = line.partition("…")
            assert any(found.startswith(begin) if rest else found == line for found in printed), line


def test_a_file_of_costs(tmp_path, capsys):
    (block,) = (block for block in docs_worker.blocks("docs/simulate.md") if block.language == "json")
    (tmp_path / "costs.json").write_text(block.text)
    call = ["simulate", "--costs", str(tmp_path / "costs.json"), "--schedule", "zb-h1", "--ranks", "2"]
    assert main([*call, "--microbatches", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["seconds"] == pytest.approx(1.0 + 0.1 + 1.2 + 1.3 + 0.1 + 1.1 + 0.9)


def test_the_tutorial(tmp_path):
    ran = forked(2, docs_worker.run_scripts, str(tmp_path), dtype=torch.float32, logs=tmp_path / "logs")
    assert ran.code == 0, ran
    assert len(docs_worker.tutorial()) == 5
    assert re.search(r"step 4: loss .*\nloss on 50 other rows: 0", ran.stdout[0]), ran
    assert fxpipe.read_checkpoint(tmp_path / "checkpoints").state["loader"] == {"taken": 4}


def assert_excerpt(text: str, whole: str) -> None:
    """Its parts, between ellipses and empty lines, stand in ``whole`` in this order."""
    rest = whole
    for part in re.split(r"^\s*…\n", text, flags=re.MULTILINE):
        for lines in filter(None, part.split("\n\n")):
            assert lines in rest, f"not behind what stands above it: {lines}"
            rest = rest[rest.index(lines) + len(lines) :]


def test_the_excerpt_of_the_first_page_is_of_what_its_code_saves(here):
    (block,) = (block for block in docs_worker.blocks("README.md") if block.title)
    assert_excerpt(block.text, (here / block.title).read_text())


@pytest.mark.parametrize(("page", "number"), [("docs/concepts.md", 4), ("docs/inductor.md", 1)])
def test_excerpts_of_programs_are_those_of_the_goldens(page, number):
    excerpts = [(block.title, block.text) for block in docs_worker.blocks(page) if block.title]
    assert len(excerpts) == number
    for title, text in excerpts:
        assert_excerpt(text, (ROOT / "tests/golden" / f"{title}.golden").read_text())


def test_one_model_through_every_phase(monkeypatch, capsys):
    """The excerpts of docs/architecture.md are of the model that stands above them."""
    page = (ROOT / "docs/architecture.md").read_text().partition("## One model through every phase")[2]
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    model, captured, fused, sections, orders, program = (text for _, text in fences[:6])
    names = {"torch": torch, "nn": torch.nn, "fxpipe": fxpipe}
    exec(model, names)
    pipe, plain = names["pipe"], fxpipe.compile
    for name in ("hoist_updates", "fuse_accumulation"):
        monkeypatch.setattr(fxpipe, "compile", functools.partial(plain, print_after=name))
        exec(model, names)
    printed = re.sub(r" : .*", "", capsys.readouterr().out)
    captured = re.sub(r"^ *(seq +\d+ +)?", "", captured, flags=re.MULTILINE)
    assert_excerpt(captured, re.sub(r"^ +", "", printed, flags=re.MULTILINE))
    assert_excerpt(re.sub(r" : .*", "", fused), printed)
    assert_excerpt(program, pipe.artifact.programs[1])
    for line, text in zip(orders.splitlines(), pipe.artifact.programs, strict=True):
        assert f"Order:\n  {line.partition(': ')[2]}\n" in text
    for line, section in zip(sections.splitlines(), pipe.sections, strict=False):
        assert line.startswith(f"{section.phase}{section.stage} ")
        for side, values in zip(line[2:].split("->"), (section.inputs, section.outputs), strict=True):
            told = re.sub(r"\w+_…|…|\b(parameter|batch|value|gradient)\b", "", side)
            assert {*re.findall(r"[\w.]+", told)} <= {value.name for value in values}
