"""Tries fxpipe with several versions of Python and torch: `make matrix`.

    python scripts/matrix.py --python python3.11 python3.12 --torch 2.11.0 2.13.0 newest

Each pair gets an environment of its own in build/matrix/, with fxpipe installed from a wheel, and runs the
first Python of README.md there, in an empty directory; ``--tests`` runs the fast tests as well. A pair that
cannot be installed is told as that. Exit code 1 if one failed that could be installed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("python3.11", "python3.12", "python3.13", "python3.14")
TORCHES = ("2.11.0", "2.13.0", "newest")
VERSIONS = "import sys, torch; print(sys.version.split()[0], torch.__version__)"


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--python", nargs="+", default=PYTHONS, metavar="COMMAND")
    parser.add_argument("--torch", nargs="+", default=TORCHES, metavar="VERSION")
    parser.add_argument("--tests", action="store_true", help="run the fast tests as well")
    options = parser.parse_args()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    first = re.search(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert first is not None, "README.md begins with Python"
    failed = 0
    for python, torch in product(options.python, options.torch):
        begin = time.monotonic()
        home = ROOT / "build/matrix" / re.sub(r"[^\w.]+", "-", f"{python} torch {torch}").strip("-")
        problem = installed(python, torch, home, options.tests)
        if problem:
            print(f"{python:<12} torch {torch:<8} cannot be installed: {problem}", flush=True)
            continue
        found, _ = run([home / "bin/python", "-c", VERSIONS])
        problem = tried(home, first[1], options.tests)
        failed += bool(problem)
        seconds = time.monotonic() - begin
        print(f"Python and torch {found:<22} {problem or 'ok'} ({seconds:.0f} s)", flush=True)
    return int(failed > 0)


def run(command: list[object], where: Path = ROOT) -> tuple[str, int]:
    """The last line of what a command prints, and its exit code."""
    try:
        done = subprocess.run(
            [*map(str, command)], cwd=where, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except FileNotFoundError:
        return f"there is no {command[0]}", 127
    lines = done.stdout.strip().splitlines()
    return lines[-1] if lines else "", done.returncode


def installed(python: str, torch: str, home: Path, with_tests: bool) -> str:
    """Why a pair cannot be installed; "" if it is."""
    what = "torch" if torch == "newest" else f"torch=={torch}"
    pip = [home / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    steps: list[list[object]] = [
        [python, "-m", "venv", home],
        [*pip, what],
        [*pip, f"{ROOT}[dev]" if with_tests else ROOT],
    ]
    for step in steps:
        told, code = run(step)
        if code:
            return told
    return ""


def tried(home: Path, script: str, with_tests: bool) -> str:
    """What failed in an environment; "" if nothing did."""
    with tempfile.TemporaryDirectory() as folder:
        told, code = run([home / "bin/python", "-c", script], Path(folder))
        if code:
            return f"README.md: {told}"
    if with_tests:
        told, code = run([home / "bin/python", "-m", "pytest", "-q", "-n", "2", "--fast"])
        if code:
            return f"tests: {told}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
