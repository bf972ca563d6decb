"""Compile models that others wrote and compare them with eager: ``make coverage``.

python -m benchmarks.model_coverage --only llama --options auto
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
import time
import zlib
from pathlib import Path

from benchmarks.model_coverage import libraries  # first of all: what the others import depends on it
from benchmarks.model_coverage.examine import EAGER, FAILED, RANDOM, RIGHT
from benchmarks.model_coverage.options import OPTIONS
from benchmarks.model_coverage.pool import run
from benchmarks.model_coverage.report import NO_VOCABULARY, commit, run_of, write
from benchmarks.model_coverage.sources import all_cases

ROOT = Path(__file__).parent.parent.parent
PAGE, RAW = ROOT / "docs" / "coverage.md", ROOT / "benchmarks" / "results" / "coverage.jsonl"
RUN = RAW.with_name("coverage_run.json")


def main() -> None:
    parser = argparse.ArgumentParser(prog="make coverage", description=__doc__)
    parser.add_argument("--only", metavar="REGEX", default="", help="cases whose library/name matches")
    parser.add_argument("--options", nargs="*", choices=OPTIONS, default=list(OPTIONS), metavar="OPTION")
    parser.add_argument("--processes", type=int, default=3, help="at a time, one core each")
    parser.add_argument("--every", type=int, default=1, help="each n-th case alone")
    parser.add_argument("--resume", action="store_true", help="keep the rows that are there, add the others")
    parser.add_argument("--rows", type=Path, help="write the rows here, and no page")
    parser.add_argument("--list", action="store_true", help="only name the cases")
    parser.add_argument(
        "--page-only", action="store_true", help="only write the page of the rows that are kept"
    )
    given = parser.parse_args()
    for name, why in libraries.MISSING.items():
        print(f"No {name}: {why}", file=sys.stderr)
    everything = all_cases()
    keys = [key for key in everything if re.search(given.only, key)][:: given.every]
    if given.list:
        print("\n".join(keys))
        return
    whole = not given.only and given.every == 1 and given.options == list(OPTIONS)
    kept = given.rows or (RAW if whole else ROOT / "build" / "coverage.jsonl")
    if not given.page_only:
        kept.parent.mkdir(parents=True, exist_ok=True)
        done: dict[str, set[str]] = {}
        if given.resume and kept.exists():
            for line in kept.read_text().splitlines():
                row = json.loads(line)
                # Where eager fails nothing is left to do.
                none_left = row["option"] == EAGER and row["outcome"] == FAILED
                done.setdefault(row["case"], set()).update(OPTIONS if none_left else {row["option"]})
        mixed = sorted(keys, key=lambda key: zlib.crc32(key.encode()))  # a run that is ended is a sample
        left = []
        for key in mixed:
            wanted = [o for o in (EAGER, *given.options) if o not in done.get(key, set())]
            if wanted and wanted != [EAGER]:
                left.append((everything[key], wanted))
        tried = commit()
        began, count = time.monotonic(), 0
        with kept.open("a" if given.resume else "w") as file:
            for row in run(left, given.processes):
                file.write(json.dumps({**row.to_json(), "commit": tried}) + "\n")
                file.flush()
                count += row.option == EAGER
                if row.outcome not in (RIGHT, RANDOM) and NO_VOCABULARY not in row.detail:
                    told = f"{row.case:45s} {row.option:9s} {row.outcome:8s} {row.kind} {row.detail[:120]}"
                    print(f"{time.monotonic() - began:5.0f} s {count:4d}/{len(left)} {told}", flush=True)
    if whole or given.page_only:
        if not given.page_only:
            run_ = run_of(len(everything), datetime.datetime.now())
            RUN.write_text(json.dumps(run_, indent=1) + "\n")
        write(kept, RUN, PAGE)


if __name__ == "__main__":
    main()
