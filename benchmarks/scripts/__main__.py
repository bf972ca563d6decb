"""Runs whole training scripts under torchrun and in plain torch, and compares what they note.

    python -m benchmarks.scripts --output benchmarks/results/scripts.txt
    python -m benchmarks.scripts --only clip --settings 2 4

One start of torchrun runs many scripts one after the other; the next start goes on behind one that fails.
A script is *equal* to plain torch, ends in an *error* that says what to do, comes with a *warning*, *differs*
where the pages say so, is *wrong* without a word, *fails* with another error, or *hangs*.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.scripts import kinds
from benchmarks.scripts.script import SCRIPTS, SETTINGS, Script
from benchmarks.scripts.verdict import Verdict, judge
from benchmarks.scripts.worker import LIMIT, path_of, read, run_all

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]
from launch import forked  # noqa: E402
from report import Report  # noqa: E402


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
    """Run all scripts and tell at once what is not expected of them."""
    directory.mkdir(parents=True, exist_ok=True)
    for _ in run_setting(directory, "1", sorted({script.plain for script in scripts})):
        pass
    verdicts = []
    for setting in settings:
        here = [script for script in scripts if setting in script.settings]
        here.sort(key=lambda script: not script.equal)  # those that end a start come last
        parts = [[script.name for script in here if not script.alone]]
        parts += [[script.name] for script in here if script.alone]
        for name, hung in itertools.chain.from_iterable(run_setting(directory, setting, p) for p in parts):
            verdict = judge(directory, setting, SCRIPTS[name], hung)
            verdicts.append(verdict)
            if not verdict.expected:
                print(f"{verdict.word}: {setting} {name}: {verdict.text[:600]}", flush=True)
    return verdicts


def run_setting(directory: Path, setting: str, names: list[str]) -> Iterator[tuple[str, bool]]:
    """Run all scripts, in as many starts as failures demand; give the name of each, and whether it hung."""
    processes, rest = SETTINGS[setting][0], list(names)
    while rest:
        logs = directory / f"logs {setting} {len(list(directory.glob('logs *')))}"
        began, limit = time.monotonic(), LIMIT * (1 + len(rest))
        arguments = str(directory), setting, tuple(rest)
        try:
            printed = forked(
                processes, run_all, *arguments, dtype=torch.float64, logs=logs, limit=limit
            ).stderr
        except TimeoutError as error:  # torch's agent, where a process ends behind its script
            printed = (str(error),)
        over = [name for name in rest if _ended(directory, setting, name, processes)]
        failed = next((name for name in rest if _began(directory, setting, name) and name not in over), None)
        count = f"{len(over) + bool(failed)} scripts in {time.monotonic() - began:.0f} s"
        print(f"{setting}: {count}{f', until {failed}' if failed else ''}", flush=True)
        if failed is None and len(over) < len(rest):
            raise RuntimeError(f"no script began:\n{printed}")
        if setting == "1" and failed:
            raise RuntimeError(f"{failed} fails in plain torch:\n{printed}")
        yield from ((name, False) for name in over)
        if failed:
            yield failed, "Timeout (" in "".join(printed)
        rest = [name for name in rest if name not in over and name != failed]


def _began(directory: Path, setting: str, name: str) -> bool:
    return path_of(directory, setting, name, 0).with_suffix(".began").exists()


def _ended(directory: Path, setting: str, name: str, processes: int) -> bool:
    """Whether all processes have run the script to its end."""
    outcomes = [read(path_of(directory, setting, name, rank)) for rank in range(processes)]
    return all(outcome is not None and not outcome.error for outcome in outcomes)


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
