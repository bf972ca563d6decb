"""Compile models that others wrote and compare them with eager: ``make coverage``.

python -m benchmarks.coverage --only llama --options auto
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

from benchmarks.coverage import libraries  # noqa: F401 - first of all: what the others import depends on it
from benchmarks.coverage.examine import EAGER, RANDOM, RIGHT
from benchmarks.coverage.options import OPTIONS
from benchmarks.coverage.pool import run
from benchmarks.coverage.report import write
from benchmarks.coverage.sources import all_cases

ROOT = Path(__file__).parent.parent.parent
PAGE, RAW = ROOT / "docs" / "coverage.md", ROOT / "benchmarks" / "results" / "coverage.jsonl"


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
    everything = all_cases()
    keys = [key for key in everything if re.search(given.only, key)][:: given.every]
    if given.list:
        print("\n".join(keys))
        return
    whole = not given.only and given.every == 1 and given.options == list(OPTIONS)
    kept = given.rows or (RAW if whole else ROOT / "build" / "coverage.jsonl")
    if not given.page_only:
        kept.parent.mkdir(parents=True, exist_ok=True)
        done: set[str] = set()
        if given.resume and kept.exists():
            done = {row["case"] for row in map(json.loads, kept.read_text().splitlines())}
        mixed = sorted(keys, key=lambda key: zlib.crc32(key.encode()))  # a run that is ended is a sample
        left = [everything[key] for key in mixed if key not in done]
        began, count = time.monotonic(), 0
        with kept.open("a" if given.resume else "w") as file:
            for row in run(left, given.options, given.processes):
                file.write(json.dumps(row.to_json()) + "\n")
                file.flush()
                count += row.option == EAGER
                if row.outcome not in (RIGHT, RANDOM) and row.kind != "VocabularyError":
                    told = f"{row.case:45s} {row.option:9s} {row.outcome:8s} {row.kind} {row.detail[:120]}"
                    print(f"{time.monotonic() - began:5.0f} s {count:4d}/{len(left)} {told}", flush=True)
    if whole or given.page_only:
        arguments = " ".join(sys.argv[1:]).replace("--page-only", "").strip()
        command = f'make coverage ARGS="{arguments}"' if arguments else "make coverage"
        write(kept, PAGE, command, datetime.datetime.now())


if __name__ == "__main__":
    main()
