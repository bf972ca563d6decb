"""Writes graphviz source and its picture; only the source on a machine without ``dot``."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import graphviz

from fxpipe.errors import printable


def render(graphs: Mapping[str, graphviz.Digraph], directory: Path) -> list[Path]:
    """Write ``NAME.dot`` and ``NAME.svg`` for each graph; return the files.

    If ``dot`` is missing or fails, there are no pictures and one line on stderr says how to get them.
    """
    files, missing, problem = [], [], ""
    for name, graph in graphs.items():
        source = directory / f"{name}.dot"
        source.write_text(graph.source, encoding="utf-8")
        files.append(source)
        try:
            picture = graph.pipe(format="svg", encoding="utf-8", quiet=True)
        except graphviz.ExecutableNotFound:
            problem = "dot is not installed (Debian, Ubuntu: apt install graphviz)"
        except subprocess.CalledProcessError as error:
            problem = f"dot failed: {error.stderr.strip().splitlines()[-1:]}"
        else:
            files.append(directory / f"{name}.svg")
            files[-1].write_text(picture, encoding="utf-8")
            continue
        missing.append(source)
    if missing:
        paths = shlex.join(map(str, missing))
        print(printable(f"fxpipe: {problem}; for pictures run: dot -Tsvg -O {paths}"), file=sys.stderr)
    return files
