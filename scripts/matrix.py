"""Tries fxpipe with several versions of Python and torch: `make matrix`.

    python scripts/matrix.py --python python3.11 python3.12 --torch 2.11.0 2.13.0 newest

Each pair gets an environment of its own in build/matrix/, with fxpipe's wheel, which was built from its
sdist, and runs the first Python of README.md there, in an empty directory. ``--tests`` runs the fast tests of
the sdist as well, unpacked without the package, so that they test the wheel. A pair that cannot be installed
is told as that. Exit code 1 if one failed that could be installed.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / "build/matrix"
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
    wheel, sources = built()
    failed = 0
    for python, torch in product(options.python, options.torch):
        begin = time.monotonic()
        home = HOME / re.sub(r"[^\w.]+", "-", f"{python} torch {torch}").strip("-")
        problem = installed(python, torch, home, f"{wheel}[dev]" if options.tests else str(wheel))
        if problem:
            print(f"{python:<12} torch {torch:<8} cannot be installed: {problem}", flush=True)
            continue
        found, _ = run([home / "bin/python", "-c", VERSIONS])
        told, code = tried(home, first[1], sources if options.tests else None)
        failed += code
        seconds = time.monotonic() - begin
        print(f"Python and torch {found:<22} {told} ({seconds:.0f} s)", flush=True)
    return int(failed > 0)


def built() -> tuple[Path, Path]:
    """The wheel, and the unpacked sdist without the package."""
    shutil.rmtree(HOME / "dist", ignore_errors=True)
    python = HOME / "build/bin/python"
    steps: list[list[object]] = [
        [sys.executable, "-m", "venv", HOME / "build"],
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "build"],
        [python, "-m", "build", "--outdir", HOME / "dist", ROOT],
    ]
    for step in steps:
        told, code = run(step)
        if code:
            sys.exit(f"fxpipe cannot be built: {told}")
    (archive,), (wheel,) = ([*(HOME / "dist").glob(kind)] for kind in ("*.tar.gz", "*.whl"))
    with tarfile.open(archive) as file:
        file.extractall(HOME / "dist", filter="data")
    sources = archive.with_name(archive.name.removesuffix(".tar.gz"))
    shutil.rmtree(sources / "fxpipe")
    return wheel, sources


def run(command: list[object], where: Path = ROOT) -> tuple[str, int]:
    """The last line of what a command prints, with those of failed tests, and its exit code."""
    try:
        done = subprocess.run(
            [*map(str, command)], cwd=where, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except FileNotFoundError:
        return f"there is no {command[0]}", 127
    lines = done.stdout.strip().splitlines()
    failed = [line for line in lines[:-1] if line.startswith("FAILED")]
    return "\n    ".join([*lines[-1:], *failed]), done.returncode


def installed(python: str, torch: str, home: Path, package: str) -> str:
    """Why a pair cannot be installed; "" if it is."""
    what = "torch" if torch == "newest" else f"torch=={torch}"
    pip = [home / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    steps: list[list[object]] = [
        [python, "-m", "venv", home],
        [*pip, "--constraint", ROOT / "constraints.txt", "pip"],  # that of Python 3.11 takes twice as long
        [*pip, what],
        [*pip, "--force-reinstall", "--no-deps", package.removesuffix("[dev]")],
        [*pip, package],
    ]
    for step in steps:
        told, code = run(step)
        if code:
            return told
    return ""


def tried(home: Path, script: str, sources: Path | None) -> tuple[str, bool]:
    """What an environment shows, and whether something failed.  sources: whose tests are run."""
    with tempfile.TemporaryDirectory() as folder:
        told, code = run([home / "bin/python", "-c", script], Path(folder))
    if code or sources is None:
        return f"README.md: {told}" if code else "ok", bool(code)
    wide = ["env", "COLUMNS=250"]  # a narrow line has no reason of a failure
    told, code = run([*wide, home / "bin/python", "-m", "pytest", "-q", "-n", "2", "--fast"], sources)
    return f"tests: {told}", bool(code)


if __name__ == "__main__":
    sys.exit(main())
