"""A program's source made into a function that can be run, stepped through and seen in tracebacks."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any


def load_step(source: str, filename: str) -> Callable[[Any, Any], Any]:
    """The ``step(rt, batch)`` of a program.  ``filename`` is where the source lies, or a name for it."""
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {"__name__": f"fxpipe_program_{abs(hash(filename))}", "__file__": filename}
    exec(compile(source, filename, "exec"), namespace)
    return namespace["step"]
