"""Whether a pass is silent: with any one of them replaced by nothing, a fast test must fail.

For each pass pytest runs until the first failure: the golden of the pass, and where that holds, all fast
tests.  This file is also the pytest plugin that takes the pass off the list.

    python benchmarks/silent_passes.py [pass ...]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from fxpipe.compiler import passes

ROOT = Path(__file__).parents[1]
WITHOUT = "FXPIPE_TESTS_WITHOUT_PASS"


def pytest_configure() -> None:
    """Before any test imports the list."""
    name = os.environ[WITHOUT]
    groups = (
        tuple(replace(each, run=lambda *_: None) if each.name == name else each for each in group)
        for group in passes.PASSES
    )
    passes.PASSES = passes.Passes(*groups)


def first_failure(name: str) -> str:
    """The first fast test that fails without the pass; "" if none does."""
    folders = (ROOT, ROOT / "tests")
    environment = os.environ | {WITHOUT: name, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    for tests in (f"tests/passes/test_each_pass.py::test_a_pass_changes[{name}]", "tests"):
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "--fast",
            "--tb=no",
            "-p",
            "benchmarks.silent_passes",
            tests,
        ]
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if run.returncode:
            found = re.search(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE)
            assert found is not None, run.stdout + run.stderr
            return found[1]
    return ""


def main() -> int:
    from report import Report

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("passes", nargs="*", choices=[*passes.PASS_NAMES, []], help="all by default")
    parser.add_argument("--output", type=Path, help="keep what is printed in this file")
    options = parser.parse_args()
    report = Report("Passes replaced by nothing (bar: for each a fast test fails)")
    rows = []
    for name in options.passes or passes.PASS_NAMES:
        start = time.perf_counter()
        failure = first_failure(name)
        rows.append([name, failure or "none: SILENT", f"{time.perf_counter() - start:.0f}"])
        print(*rows[-1], flush=True)
    report.table(["pass", "first test that fails", "seconds"], rows)
    report.save(options.output)
    return int(any("SILENT" in failure for _, failure, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
