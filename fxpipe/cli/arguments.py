"""Argument types and file output shared by the subcommands."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from contextlib import AbstractContextManager
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import NoReturn

from fxpipe.errors import FxpipeError
from fxpipe.schedule.units import parse_bytes


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Without the usage."""
        raise FxpipeError(f"{message}. See {self.prog} --help")


def positive_int(text: str) -> int:
    number = _number(text, int, "a whole number")
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return int(number)


def whole_number(text: str) -> int:
    number = _number(text, int, "a whole number")
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} must be at least 0")
    return int(number)


def positive(text: str) -> float:
    number = non_negative(text)
    if number == 0:
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return number


def non_negative(text: str) -> float:
    number = _number(text, float, "a number")
    if not isfinite(number) or number < 0:
        raise argparse.ArgumentTypeError(f"{text} must be finite and not negative")
    return number


class MemoryLimit(float):
    """A memory limit; ``unit`` as it was written, "" for a plain number."""

    unit: str

    def __new__(cls, number: float, unit: str = "") -> MemoryLimit:
        made = super().__new__(cls, number)
        made.unit = unit
        return made


def memory(text: str) -> MemoryLimit:
    """``16GiB`` in bytes, or a number in the unit of the costs."""
    if text.strip()[-1:].isalpha() and text.strip().lower() not in ("nan", "inf"):
        limit = parse_bytes(text)
        if limit is None:
            raise argparse.ArgumentTypeError(f"{text!r} is no size such as 16GiB or 800MB, above 0")
        return MemoryLimit(limit, text.strip())
    return MemoryLimit(positive(text))


def output(text: str) -> Path:
    """A file to write, asked for before any work."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path} cannot be written: there is no directory {path.parent}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} cannot be written: it is a directory")
    return path


def picture(text: str) -> Path:
    """The file of a picture.  PNG needs a library."""
    path = output(text)
    if path.suffix not in (".svg", ".png"):
        raise argparse.ArgumentTypeError(f"{text} must end with .svg or .png")
    if path.suffix == ".png" and find_spec("resvg_py") is None:
        raise argparse.ArgumentTypeError(f"{text} needs resvg: pip install 'fxpipe[png]', or name a .svg")
    return path


def working(what: str) -> AbstractContextManager[object]:
    """Show, on a terminal, that a command works."""
    from rich.console import Console  # the help does not need it

    return Console(stderr=True).status(what)


def write_picture(path: Path, svg: str) -> None:
    """Write a picture as SVG or PNG, by the suffix.  Raises ArtifactError if that fails."""
    from fxpipe.plan.saved.files import writing  # it imports torch, which the help does not need

    if path.suffix == ".svg":
        data = svg.encode()
    else:
        from resvg_py import svg_to_bytes

        data = bytes(svg_to_bytes(svg_string=svg, zoom=2, sans_serif_family=_sans_serif()))
    with writing(path):
        path.write_bytes(data)


def _sans_serif() -> str:
    """The font that this machine has for sans-serif.  By default resvg takes Arial, and leaves all text out
    where that is missing."""
    if (match := shutil.which("fc-match")) is None:
        return "DejaVu Sans"
    asked = [match, "--format=%{family}", "sans-serif"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    return found.split(",")[0] or "DejaVu Sans"


def share(text: str) -> float:
    number = non_negative(text)
    if number > 1:
        raise argparse.ArgumentTypeError(f"{text} must be from 0 to 1")
    return number


def _number(text: str, of: type[int] | type[float], what: str) -> float:
    try:
        return of(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from None
