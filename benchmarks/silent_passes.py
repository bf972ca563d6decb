"""Whether a pass is silent: with any one of them replaced by nothing, a fast test must fail.

For each pass pytest runs until the first failure: the golden of the pass, and where that holds, all fast
tests.  Each run is a process that begins with torch and transformers imported.

    python benchmarks/silent_passes.py [pass ...]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import transformers  # noqa: F401 - once for all runs
from report import ROOT, Report

from fxpipe.compiler import passes


@dataclass
class Without:
    """A pytest plugin that takes a pass off the list.  ``failed``: the first test that fails."""

    name: str
    failed: str = ""

    def pytest_configure(self) -> None:
        """Before any test imports the list."""
        groups = (
            tuple(replace(each, run=lambda *_: None) if each.name == self.name else each for each in group)
            for group in passes.PASSES
        )
        passes.PASSES = passes.Passes(*groups)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid


def first_failure(name: str) -> str:
    """The first fast test that fails without the pass; "" if none does."""
    plugin = Without(name)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    for tests in (f"tests/passes/test_each_pass.py::test_a_pass_changes[{name}]", "tests"):
        ended = pytest.main(["-q", "-x", "--fast", "--tb=no", "-p", "no:cacheprovider", tests], [plugin])
        if ended != pytest.ExitCode.OK:
            assert plugin.failed, f"pytest ends with {ended!r}, and no test failed"
            return plugin.failed
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("passes", nargs="*", choices=[*passes.PASS_NAMES, []], help="all by default")
    parser.add_argument("--output", type=Path, help="keep what is printed in this file")
    options = parser.parse_args()
    report = Report("Passes replaced by nothing (bar: for each a fast test fails)")
    os.chdir(ROOT)
    sys.path.append(str(ROOT / "tests"))
    rows = []
    for name in options.passes or passes.PASS_NAMES:
        start = time.perf_counter()
        with multiprocessing.get_context("fork").Pool(1) as pool:
            failure = pool.apply(first_failure, [name])
        rows.append([name, failure or "none: SILENT", f"{time.perf_counter() - start:.0f}"])
        print(*rows[-1], flush=True)
    report.table(["pass", "first test that fails", "seconds"], rows)
    report.save(options.output)
    return int(any("SILENT" in failure for _, failure, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
