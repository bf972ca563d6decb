"""What the comparison of a model's Python with that of its compilation adds to each step, in microseconds.

A GPT-2 of transformers, of 12 narrow layers: the time depends on the number of modules and functions alone.
Another checkout is measured in turns with this one, each turn in a process of its own.

    python benchmarks/guards.py --beside ../older --output benchmarks/results/guards.txt
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from report import ROOT, Report, median_and_spread, revision

#: The share of the other checkout's time that a step's comparison may take.
BAR = 1 / 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--beside", type=Path, required=True, help="a checkout of another revision")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(measured()))
        return
    report = Report(
        f"The comparison of a GPT-2's Python in each step (bar: {BAR:.2f} of the other revision's time)"
    )
    roots = {revision(root): root for root in (options.beside, ROOT)}
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in roots}
    for _ in range(options.rounds):
        for name, root in roots.items():
            turns[name].append(_in_a_process(root))
    rows = []
    for name, values in turns.items():
        step, begin = ([turn[key] for turn in values] for key in ("step", "begin"))
        rows.append(
            [
                name,
                str(values[0]["compared"]),
                median_and_spread(step, ".0f"),
                median_and_spread(begin, ".0f"),
            ]
        )
    report.table(["revision", "compared", "µs in a step", "ms to begin"], rows)
    older, now = (min(turn["step"] for turn in values) for values in turns.values())
    report.line(
        f"\nthe least of each: {now / older:.2f} of the time ({'ok' if now <= older * BAR else 'missed'})"
    )
    report.save(options.output)


def _in_a_process(root: Path) -> dict[str, float]:
    environment = os.environ | {"PYTHONPATH": str(root.resolve()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--worker", "--beside", str(root)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    result: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return result


def measured() -> dict[str, float]:
    """The number of addresses and values that are compared; the least microseconds of a step of 1,000, and
    the milliseconds to find what is compared."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=12, n_embd=24, n_head=2, vocab_size=64, n_positions=32))
    begin = time.perf_counter()
    guards, compared = _guards(model)
    seconds = time.perf_counter() - begin
    steps = []
    for _ in range(1000):
        begin = time.perf_counter()
        assert guards.changes(model) == []
        steps.append(time.perf_counter() - begin)
    return {"compared": compared, "step": min(steps) * 1e6, "begin": seconds * 1e3}


def _guards(model: Any) -> tuple[Any, int]:
    try:
        from fxpipe.training.guards.python_guards import PythonGuards
    except ImportError:  # of an earlier revision
        from fxpipe.training.guards.python_guards import Settings

        settings = Settings(model)
        return settings, sum(len(place._ids) for place in settings._places)
    guards = PythonGuards(model)
    return guards, sum(len(column.before) for column in guards._ids._columns)


if __name__ == "__main__":
    main()
