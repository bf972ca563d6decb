"""The report as one file of HTML: the page, its scripts and libraries, and the data, deflated.

Names of a user's model are in the data alone, in base64; the scripts show them as text, never as markup.
"""

from __future__ import annotations

import base64
import json
import zlib
from importlib.resources import files
from string import Template
from typing import Any

from fxpipe.errors import printable

SCRIPTS = (
    "core.js",
    "model.js",
    "fine.js",
    "rows.js",
    "timeline.js",
    "memory.js",
    "idle.js",
    "inspect.js",
    "modules.js",
    "drawing.js",
    "graph.js",
    "tables.js",
    "candidates.js",
    "lengths.js",
    "search.js",
    "app.js",
)
"""Own scripts, in the order in which they run."""

_HERE = files("fxpipe.viz.report")


def page(data: dict[str, Any]) -> str:
    """The source of the page.  data: as ``report_data`` gives it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    title = printable(f"{data['head']['model']}, {data['head']['schedule']}")
    return Template(_read("page.html")).substitute(
        title=title.replace("&", "&amp;").replace("<", "&lt;"),
        style=_read("vendor/uPlot.min.css") + _read("style.css"),
        uplot=_script(_read("vendor/uPlot.iife.min.js")),
        dagre=_script(_read("vendor/dagre.min.js")),
        data=_packed(text),
        scripts="\n".join(f"<script>{_script(_read(name))}</script>" for name in SCRIPTS),
    )


def _read(name: str) -> str:
    return _HERE.joinpath(name).read_text(encoding="utf-8")


def _packed(text: str) -> str:
    """Deflated, in base64, whose letters can end no element."""
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def _script(text: str) -> str:
    """The text of a script element, which these would end or hide, in a string as well."""
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")
