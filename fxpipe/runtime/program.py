"""A program's source made into a function that can be run, stepped through and seen in tracebacks."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable
from typing import Any

from fxpipe.errors import ArtefactError


def load_step(source: str, filename: str) -> Callable[[Any, Any], Any]:
    """The ``step(rt, batch)`` of a program.  ``filename`` is where the source lies, or a name for it."""
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {"__name__": f"fxpipe_program_{abs(hash(filename))}", "__file__": filename}
    try:
        tree = ast.parse(source, filename)
    except SyntaxError as error:
        raise ArtefactError(
            f"{filename} is no Python program (line {error.lineno}: {error.msg}). Mend it, or save again."
        ) from error
    steps = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "step"]
    if not steps or not isinstance(steps[-1].body[-1], ast.Return):
        raise ArtefactError(f"{filename} is cut short: no step(rt, batch) that ends in a return. Save again.")
    exec(compile(tree, filename, "exec"), namespace)
    return namespace["step"]
