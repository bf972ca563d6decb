"""Optimizers of every kind with each ``shard`` and both validations, beside plain torch.

2 replicas of 2 ranks, in float64, on the CPU over gloo.  Each optimizer of ``optimizers_classes.py`` makes 26
updates by gradients whose size differs by six orders of magnitude, some of them clipped by
``clip_grad_norm``.  With ``validation="post"`` ranks go ahead of the verdict in some, and take some of those
back.  Compared with an eager loop over the whole batch: each loss, and at the end each parameter.

``divided``: the replicas divide parameters by rows, as they do by default.  ``whole``: ``undivided=["*"]``.

    python benchmarks/optimizers.py --output benchmarks/results/optimizers.txt

Bar: none is WRONG.
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path
from typing import Any

from launch import run
from optimizers_classes import OPTIMIZERS
from report import Report

LEVELS = ("", "optimizer", "gradients", "parameters")
#: The levels, and whether parameters are undivided.
MESHES = [(level, whole) for level in LEVELS for whole in ((False, True) if level else (False,))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default="", help="a regular expression: the names of optimizers")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    report = Report("Optimizers on 2 replicas of 2 ranks, 26 updates in float64, beside plain torch")
    names = [name for name in OPTIMIZERS if re.search(arguments.only, name)]
    begun, found = time.perf_counter(), dict[str, dict[str, str]]()
    refusals = set[str]()
    measured: dict[str, Any] = run("optimizers_worker.py", 4, {"meshes": MESHES, "names": names}, limit=3600)
    for (level, whole), of_mesh in zip(MESHES, measured["results"], strict=True):
        for name, results in of_mesh.items():
            column = f"{level or 'none'}{', whole' if whole else ''}"
            found.setdefault(name, {})[column] = " / ".join(short(result) for result in results)
            for result in results:
                if result.startswith("refused: "):
                    refusals.add(result.removeprefix("refused: "))
    columns = [*found[names[0]]]
    report.line()
    report.line("shard, and whether parameters are whole: with a barrier / with post-validation")
    report.table(("", *columns), [(name, *results.values()) for name, results in found.items()])
    report.line()
    for refusal in sorted(refusals):
        report.line(f"  {refusal}")
    cells = [part for results in found.values() for cell in results.values() for part in cell.split(" / ")]
    wrong = sum(part not in ("right", "refused") for part in cells)
    report.line()
    report.line(
        f"{len(names)} optimizers, {len(cells)} runs: {cells.count('right')} right, "
        f"{cells.count('refused')} refused, {wrong} wrong. "
        f"{measured['taken back']} updates of rank 0 were taken back. {time.perf_counter() - begun:.0f} s."
    )
    report.save(arguments.output)


def short(result: str) -> str:
    return "refused" if result.startswith("refused: ") else result


if __name__ == "__main__":
    main()
