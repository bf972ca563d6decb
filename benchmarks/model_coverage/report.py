"""docs/coverage.md of the rows of a run."""

from __future__ import annotations

import datetime
import html
import json
import platform
import re
import subprocess
from collections import Counter, defaultdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.model_coverage.examine import EAGER, FAILED, RANDOM, REFUSED, RIGHT, WRONG
from benchmarks.model_coverage.options import MICROBATCHES, OPTIONS, ROWS

PACKAGES = (
    "torch",
    "transformers",
    "timm",
    "torchvision",
    "diffusers",
    "x-transformers",
    "vit-pytorch",
    "litgpt",
    "peft",
    "torch-geometric",
    "monai",
)
MARKS = {RIGHT: "right", REFUSED: "refused", FAILED: "failed", WRONG: "wrong", RANDOM: "runs"}
FIXED, NOT_COUNTED = "right, fixed", "not counted"
#: In the order of a menu.
RESULTS = (*MARKS.values(), FIXED, NOT_COUNTED)
FILTER = Path(__file__).parent / "filter.html"
NO_VOCABULARY = "found no cross-entropy"
#: A refusal's class: the first whose words are in its message; else its exception's name.
REFUSALS: tuple[tuple[str, str], ...] = (
    ("branches on a random number", "a branch on a random number"),
    ("reads a number from the buffer", "a number read from a buffer that the step changes"),
    ("reads the number", "a number read from the data"),
    ("reads a value of the data", "a number read from the data"),
    ("control flow or shapes depend on data", "shapes that depend on data"),
    ("forward writes to the parameter", "a parameter written in the forward"),
    ("backward writes to the buffer", "a buffer written in the backward"),
    ("forward changes the buffer", "a buffer that changes shape"),
    ("uses sparse tensors", "sparse tensors"),
    ("cannot be traced", "cannot be traced"),
    ("vocab_parallel cannot split", "a vocabulary layer that cannot be split"),
)

Row = dict[str, Any]
Run = dict[str, Any]


def write(raw: Path, run: Path, page: Path) -> None:
    """The page of a run's rows, and of what `run_of` told of it."""
    rows = [json.loads(line) for line in raw.read_text().splitlines()]
    page.write_text(text_of(rows, json.loads(run.read_text())))


def run_of(cases: int, when: datetime.datetime) -> Run:
    """cases: how many the suite has; rows of fewer are of a run that was ended, or of a part."""
    return {
        "date": f"{when:%Y-%m-%d}",
        "cases": cases,
        "machine": _machine(),
        "python": platform.python_version(),
        "versions": _versions(),
    }


def text_of(rows: list[Row], run: Run) -> str:
    table: dict[str, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        table[row["case"]][row["option"]] = row
    trained = {case: got for case, got in table.items() if got[EAGER]["outcome"] != FAILED}
    options = [o for o in OPTIONS if any(o in got for got in trained.values())]
    lines = [
        *_head(rows, trained, options, f"{len(table)} of {run['cases']}", run),
        *_counts(trained, options),
        *_classes(trained, options),
        *_models(table, options),
    ]
    return "\n".join(lines) + "\n"


def refusal(row: Row) -> str:
    """The class of what was refused."""
    detail = row.get("detail", "")
    found = next((name for words, name in REFUSALS if words in detail), None)
    return found or row["kind"]


def outcome(got: dict[str, Row], options: list[str]) -> str:
    """Of a model with all options: the worst; a model without a vocabulary is not held against it."""
    seen = {got[o]["outcome"] for o in options if o in got and not _no_vocabulary(got[o])}
    return next((o for o in (WRONG, FAILED, REFUSED, RANDOM) if o in seen), RIGHT)


def _fixed(got: dict[str, Row]) -> bool:
    """Whether an input had to be fixed with some option."""
    return any(row.get("fixed") for row in got.values())


def _no_vocabulary(row: Row) -> bool:
    return row["outcome"] == REFUSED and NO_VOCABULARY in row.get("detail", "")


def _head(
    rows: list[Row],
    trained: dict[str, dict[str, Row]],
    options: list[str],
    tried: str,
    run: Run,
) -> list[str]:
    of = Counter(outcome(got, options) for got in trained.values())
    fixed = sum(_fixed(got) and outcome(got, options) == RIGHT for got in trained.values())
    slow = [(r["compile_s"], r["case"], r["option"]) for r in rows if r.get("compile_s")]
    slowest = ", ".join(
        f"{case} with {option} {seconds:.0f} s" for seconds, case, option in sorted(slow)[::-1][:5]
    )
    commits = len({row["commit"] for row in rows})
    intro = f"""# Which models work

[The table of all models](#all-models) can be searched; [what ran where](limits.md#what-ran-where).

{len(trained)} models, nearly all from other projects, with tiny random configurations and unchanged
code. Right with every option tried: {of[RIGHT]}, {fixed} of them with `fixed=[…]`, as the error without it
says; refused clearly: {of[REFUSED]}; failed unclearly: {of[FAILED]}; wrong: {of[WRONG]}.
{of[RANDOM]} more draw random numbers of their own: they run, and cannot be compared.

Each model was compiled for {MICROBATCHES} microbatches of {ROWS} rows and run by `run_local`, in training
mode, in double precision and without dropout. *Right* means: the loss, every gradient and every buffer
after the step equal eager's up to rounding (1e-9; 1e-5 for a model that computes a part in single
precision; more if eager's own results change by more when its parameters are rounded); the same names share
memory as after eager's step; compiling left parameters and buffers bit-identical, and no tensor of the
trace alive. *Refused* is an error of fxpipe that says what and where. *Failed* is any other error, an error
of a rank while it runs, or a process that took too long or too much memory. Models that eager does not
train on the example are in the table and not counted.

| option | |
|---|---|
"""
    calls = [f"| {name} | `{_call(given)}` |" for name, given in OPTIONS.items()]
    made = f"""
`make coverage` of {run["date"]}: {tried} cases of the suite, at {commits} commits of fxpipe, which
[the rows](../benchmarks/results/coverage.jsonl) name. {run["machine"]}; Python {run["python"]},
{run["versions"]}.
The slowest compilations: {slowest}.
"""
    return [intro + "\n".join(calls), made]


def commit() -> str:
    """What is tried."""
    command = ["git", "log", "-1", "--format=%h", "--", "fxpipe"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _call(given: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in given.items())


def _machine() -> str:
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else platform.machine()


def _versions() -> str:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def _counts(trained: dict[str, dict[str, Row]], options: list[str]) -> list[str]:
    libraries: dict[str, list[dict[str, Row]]] = defaultdict(list)
    for case, got in trained.items():
        libraries[case.split("/")[0]].append(got)
    lines = [
        "## By library",
        "",
        f"| library | models | right | fixed | refused | failed | wrong | runs | {' | '.join(options)} |",
    ]
    lines.append("|---|" + "---:|" * (7 + len(options)))
    for library, all_got in [*libraries.items(), ("all", list(trained.values()))]:
        of = Counter(outcome(got, options) for got in all_got)
        each = []
        for option in options:
            meant = [got[option] for got in all_got if option in got and not _no_vocabulary(got[option])]
            right = sum(row["outcome"] in (RIGHT, RANDOM) for row in meant)
            each.append(f"{right}/{len(meant)}")
        fixed = sum(_fixed(got) and outcome(got, options) == RIGHT for got in all_got)
        counts = [len(all_got), of[RIGHT], fixed, of[REFUSED], of[FAILED], of[WRONG], of[RANDOM]]
        lines.append("| " + " | ".join([library, *map(str, counts), *each]) + " |")
    return [
        *lines,
        "",
        "Under an option: right or running, of the models that it applies to (`vocab` needs a vocabulary).",
        "*fixed*: the models of *right* that need `fixed=[…]`; *runs*: models with random numbers.",
        "",
    ]


def _classes(trained: dict[str, dict[str, Row]], options: list[str]) -> list[str]:
    cases: dict[str, set[str]] = defaultdict(set)
    for case, got in trained.items():
        for option in options:
            if option in got and got[option]["outcome"] == REFUSED and not _no_vocabulary(got[option]):
                cases[refusal(got[option])].add(case)
    if not cases:
        return []
    lines = ["## Refusals by class", "", "| class | models |", "|---|---:|"]
    ordered = sorted(cases.items(), key=lambda item: -len(item[1]))
    return [*lines, *(f"| {_cell(name)} | {len(found)} |" for name, found in ordered), ""]


def _models(table: dict[str, dict[str, Row]], options: list[str]) -> list[str]:
    """A row for each model, and the few lines with which a browser filters them."""
    rows, results = [], set()
    for case, got in sorted(table.items()):
        result, right, told = _result(got, options)
        results.add(result)
        cells = (case, result, ", ".join(right), "<br>".join(map(_html, told)))
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    found = [name for name in RESULTS if name in results]
    choices = "".join(f"<option>{name}</option>" for name in found)
    return [
        "## All models",
        "",
        '<div class="coverage" id="coverage-filter" hidden>',
        '<input type="search" aria-label="Words" placeholder="Words: a library, a model, an error">',
        f'<select aria-label="Result"><option value="">every result</option>{choices}</select>',
        "<output></output>",
        "</div>",
        "",
        '<table id="coverage">',
        "<thead><tr><th>model</th><th>result</th><th>right with</th><th>else</th></tr></thead>",
        "<tbody>",
        *rows,
        "</tbody>",
        "</table>",
        "",
        FILTER.read_text().rstrip(),
    ]


def _result(got: dict[str, Row], options: list[str]) -> tuple[str, list[str], list[str]]:
    """Of a model: its result, the options with which it is right or runs, and what the others told."""
    if got[EAGER]["outcome"] == FAILED:
        return NOT_COUNTED, [], [_told(got[EAGER])]
    same: dict[str, list[str]] = defaultdict(list)
    right = []
    for option in options:
        row = got.get(option)
        if row is None or _no_vocabulary(row):
            continue
        if row["outcome"] in (RIGHT, RANDOM):
            right.append(f"{option} ({row['fixed']} fixed)" if row.get("fixed") else option)
        else:
            same[_told(row)].append(option)
    name = MARKS[outcome(got, options)]
    if name == MARKS[RIGHT] and _fixed(got):
        name = FIXED
    return name, right, [f"{', '.join(with_)}: {text}" for text, with_ in same.items()]


def _told(row: Row) -> str:
    text = f"{row['kind']}: {row.get('detail', '')}"
    return text if len(text) <= 160 else text[:157] + "…"


def _html(text: str) -> str:
    return html.escape(text, quote=False).replace("`", "&#96;").replace("*", "&#42;").replace("_", "&#95;")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
