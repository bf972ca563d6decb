"""What every benchmark prints: the machine, the versions, tables; and the file that keeps them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

ROOT = Path(__file__).parent.parent


class Report:
    """Prints to the terminal and remembers it; ``save`` writes all of it to a file."""

    def __init__(self, title: str) -> None:
        # A fixed width: the file should not depend on the terminal that it was made in.
        self._console = Console(record=True, width=180, highlight=False, soft_wrap=True)
        command = f"python {shlex.join([os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]])}"
        self.line(title)
        for name, value in {"command": command, **surroundings()}.items():
            self.line(f"  {name:<9} {value}")

    def line(self, text: str = "") -> None:
        self._console.print(escape(text))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """The first column is text, the others are numbers."""
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
        for i, column in enumerate(columns):
            table.add_column(escape(column), justify="right" if i else "left", no_wrap=True)
        for row in rows:
            table.add_row(*map(escape, row))
        self._console.print(table)

    def save(self, path: Path | None) -> None:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = self._console.export_text(clear=False).splitlines()
            path.write_text("\n".join(line.rstrip() for line in lines) + "\n")


def surroundings() -> dict[str, str]:
    """The date, the machine and the versions that a number depends on."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers")]
    return {
        "date": datetime.now().astimezone().isoformat(timespec="minutes"),
        "machine": f"{_processor()}, {cores} cores, {memory:.0f} GiB, Linux {platform.release()}",
        "load": f"{os.getloadavg()[0]:.2f} when it began (1 minute; other work makes the numbers worse)",
        "versions": f"fxpipe {revision(ROOT)}, Python {platform.python_version()}, {', '.join(versions)}",
    }


def median_and_spread(values: Sequence[float], format: str) -> str:
    """``median (least … most)``; of one value, the value."""
    if len(values) == 1:
        return f"{values[0]:{format}}"
    return f"{statistics.median(values):{format}} ({min(values):{format}} … {max(values):{format}})"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    names = {key.strip(): value.strip() for key, value in fields.items()}
    return (
        f"{names.get('model name', platform.machine())} (family {names.get('cpu family', '?')}, "
        f"model {names.get('model', '?')})"
    )


def revision(root: Path) -> str:
    """The commit of a checkout of fxpipe, or the version of the installed one."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True).stdout.strip()

    changed = " with changes" if git("status", "--porcelain", "fxpipe") else ""
    return f"{git('rev-parse', '--short', 'HEAD') or importlib.metadata.version('fxpipe')}{changed}"
