"""Runs whole training scripts under torchrun and in plain torch, and compares what they note.

    python -m benchmarks.scripts --output benchmarks/results/scripts.txt
    python -m benchmarks.scripts --only clip --settings 2 4

One start of torchrun runs many scripts one after the other; the next start goes on behind one that fails.
A script is *equal* to plain torch, ends in an *error* that says what to do, comes with a *warning*, *differs*
where the pages say so, is *wrong* without a word, *fails* with another error, or *hangs*.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.scripts import kinds
from benchmarks.scripts.script import PLAIN, SCRIPTS, SETTINGS, Script
from benchmarks.scripts.worker import LIMIT, Outcome, path_of, read, run_all

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]
from launch import forked  # noqa: E402
from report import Report  # noqa: E402

ATOL = 1e-10


@dataclass(frozen=True)
class Verdict:
    """word: equal, error, warning, differs, wrong, fails or hangs.

    expected: whether the script may do that.
    """

    script: Script
    setting: str
    word: str
    text: str

    @property
    def expected(self) -> bool:
        script = self.script
        return {
            "equal": script.equal,
            "error": bool(script.error),
            "warning": bool(script.warning),
            "differs": bool(script.differs),
        }.get(self.word, False)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scripts", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--only", default="", help="scripts whose name or kind matches this pattern")
    parser.add_argument("--settings", nargs="+", choices=[s for s in SETTINGS if s != "1"], default=None)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--keep", type=Path, help="a directory for the logs of all processes")
    arguments = parser.parse_args()
    logging.getLogger("torch").setLevel(logging.CRITICAL)  # the agent's words about scripts that are to fail
    kinds.load()
    chosen = [s for s in SCRIPTS.values() if re.search(arguments.only, f"{s.kind}/{s.name}")]
    settings = arguments.settings or [s for s in SETTINGS if s != "1"]
    with tempfile.TemporaryDirectory() as directory:
        verdicts = judge_all(chosen, settings, arguments.keep or Path(directory))
    report(verdicts).save(arguments.output)
    return int(any(not verdict.expected for verdict in verdicts))


def judge_all(scripts: list[Script], settings: list[str], directory: Path) -> list[Verdict]:
    directory.mkdir(parents=True, exist_ok=True)
    run_setting(directory, "1", sorted({script.plain for script in scripts if script.plain in PLAIN}))
    verdicts = []
    for setting in settings:
        here = [script for script in scripts if setting in script.settings]
        here.sort(key=lambda script: not script.equal)  # those that end a start come last
        hung = run_setting(directory, setting, [script.name for script in here if not script.alone])
        for script in here:
            hung |= run_setting(directory, setting, [script.name]) if script.alone else set()
        for script in here:
            verdict = judge(directory, setting, script, script.name in hung)
            verdicts.append(verdict)
            if not verdict.expected:
                print(f"{verdict.word}: {setting} {script.name}: {verdict.text[:600]}", flush=True)
    return verdicts


def run_setting(directory: Path, setting: str, names: list[str]) -> set[str]:
    """Run all scripts, in as many starts as failures demand; return the names of those that did not end."""
    processes, rest, hung = SETTINGS[setting][0], list(names), set[str]()
    while rest:
        logs = directory / f"logs {setting} {len(list(directory.glob('logs *')))}"
        began = time.monotonic()
        run = forked(
            processes, run_all, str(directory), setting, tuple(rest), dtype=torch.float64, logs=logs,
            limit=LIMIT * (1 + len(rest))
        )  # fmt: skip
        over = [name for name in rest if _ended(directory, setting, name, processes)]
        failed = next((name for name in rest if _began(directory, setting, name) and name not in over), None)
        count = f"{len(over) + bool(failed)} scripts in {time.monotonic() - began:.0f} s"
        print(f"{setting}: {count}{f', until {failed}' if failed else ''}", flush=True)
        if failed and "Timeout (" in "".join(run.stderr):
            hung.add(failed)
        if failed is None and len(over) < len(rest):
            raise RuntimeError(f"no script began:\n{run}")
        if setting == "1" and failed:
            raise RuntimeError(f"{failed} fails in plain torch:\n{run}")
        rest = [name for name in rest if name not in over and name != failed]
    return hung


def _began(directory: Path, setting: str, name: str) -> bool:
    return path_of(directory, setting, name, 0).with_suffix(".began").exists()


def _ended(directory: Path, setting: str, name: str, processes: int) -> bool:
    """Whether all processes have run the script to its end."""
    outcomes = [read(path_of(directory, setting, name, rank)) for rank in range(processes)]
    return all(outcome is not None and not outcome.error for outcome in outcomes)


def judge(directory: Path, setting: str, script: Script, hung: bool) -> Verdict:
    def verdict(word: str, text: str = "") -> Verdict:
        return Verdict(script, setting, word, " ".join(text.split()))

    outcomes = [read(path_of(directory, setting, script.name, rank)) for rank in range(SETTINGS[setting][0])]
    errors = [outcome.error for outcome in outcomes if outcome is not None and outcome.error]
    if script.error and (match := next((e for e in errors if re.search(script.error, e)), "")):
        return verdict("error", match)
    if hung:
        return verdict("hangs", errors[0] if errors else f"not over after {LIMIT} s")
    if errors:
        return verdict("fails", errors[0])
    if any(outcome is None for outcome in outcomes):
        return verdict("fails", "a process ended without a word")
    expected = read(path_of(directory, "1", script.plain, 0))
    difference = compare(expected, [o for o in outcomes if o is not None], script.tolerance)
    if not difference:
        return verdict("equal")
    if script.differs:
        return verdict("differs", f"{difference}; {script.differs}")
    warnings = [text for outcome in outcomes if outcome is not None for text in outcome.warnings]
    if script.warning and (match := next((w for w in warnings if re.search(script.warning, w)), "")):
        return verdict("warning", f"{match} ({difference})")
    return verdict("wrong", difference)


def compare(expected: Outcome | None, outcomes: list[Outcome], tolerance: float) -> str:
    """The first difference in words, and the largest; nothing if all values are those of plain torch."""
    assert expected is not None
    worst, text, noted = 0.0, "", set()
    for rank, outcome in enumerate(outcomes):
        for name, values in outcome.values.items():
            wanted = expected.values.get(name)
            if wanted is None:
                return f"process {rank} notes {name!r}, which plain torch does not"
            noted.add(name)
            if len(values) != len(wanted):
                return f"process {rank} notes {name!r} {len(values)} times, plain torch {len(wanted)} times"
            for i, (a, b) in enumerate(zip(values, wanted, strict=True)):
                if a.shape != b.shape:
                    return f"process {rank}: {name!r} has the shape {list(a.shape)}, not {list(b.shape)}"
                off = float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
                scale = float(b.double().abs().max()) if b.numel() else 0.0
                if not off <= ATOL + tolerance * scale and not off <= worst:
                    worst, text = off, f"process {rank}: {name!r} ({i}) is {off:.1e} off, of {scale:.1e}"
    return text or ("" if noted else "no process notes anything")


def report(verdicts: list[Verdict]) -> Report:
    page = Report("Whole training scripts under torchrun beside plain torch in one process, float64")
    counts = Counter(verdict.word for verdict in verdicts)
    plain, variants = ({getattr(v.script, field) for v in verdicts} for field in ("plain", "name"))
    page.line(f"{len(plain)} scripts, {len(variants)} with variants, {len(verdicts)} runs:")
    page.line("  " + ", ".join(f"{count} {word}" for word, count in counts.most_common()))
    page.line(f"  not as expected: {sum(not verdict.expected for verdict in verdicts)}")
    page.line()
    order = {kind: i for i, kind in enumerate(kinds.KINDS)}
    names = list(SCRIPTS)
    for kind in order:
        rows = [v for v in verdicts if v.script.kind == kind]
        rows.sort(key=lambda v: (names.index(v.script.name), list(SETTINGS).index(v.setting)))
        if rows:
            page.table([kind, "on", "outcome", ""], [_row(verdict) for verdict in rows])
            page.line()
    return page


def _row(verdict: Verdict) -> list[str]:
    mark = "" if verdict.expected else "!"
    text = verdict.text.replace(str(ROOT), "")
    return [
        verdict.script.name,
        verdict.setting,
        f"{verdict.word}{mark}",
        text if len(text) < 90 else text[:89] + "…",
    ]


if __name__ == "__main__":
    sys.exit(main())
