"""The documentation of each option of ``compile``: the text below its field, by name.

It is read from the source of the records, which are not imported: the help of a command needs the texts, and
torch would take seconds.
"""

from __future__ import annotations

import ast
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path


def _docs_of(module: str, record: str) -> dict[str, str]:
    """The texts below the fields of a record; none where there is no source."""
    spec = find_spec(module)
    source = None if spec is None or spec.origin is None else Path(spec.origin)
    if source is None or source.suffix != ".py" or not source.exists():
        return {}
    tree = ast.parse(source.read_text("utf-8"))
    (fields,) = (x.body for x in tree.body if isinstance(x, ast.ClassDef) and x.name == record)
    docs = {}
    for option, text in pairwise(fields):
        if isinstance(option, ast.AnnAssign) and isinstance(text, ast.Expr):
            docs[ast.unparse(option.target)] = " ".join(ast.literal_eval(text.value).split())
    return docs


DOCS = _docs_of("fxpipe.api.arguments", "Arguments") | _docs_of("fxpipe.compiler.options", "Options")
