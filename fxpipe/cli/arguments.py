"""Argument types and file output shared by the subcommands."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import NoReturn, TypeVar

from fxpipe.errors import FxpipeError
from fxpipe.schedule.units import parse_bytes

_N = TypeVar("_N", int, float)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """End with the message, without the usage."""
        raise FxpipeError(f"{message}. See {self.prog} --help")


def _number(
    of: Callable[[str], _N], what: str, *bounds: tuple[Callable[[_N], bool], str]
) -> Callable[[str], _N]:
    """A type of arguments: numbers that keep all bounds, each with what it asks for."""

    def number(text: str) -> _N:
        try:
            value = of(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from None
        for keeps, wanted in bounds:
            if not keeps(value):
                raise argparse.ArgumentTypeError(f"{text} must be {wanted}")
        return value

    return number


_FINITE = (lambda value: isfinite(value) and value >= 0, "finite and not negative")
positive_int = _number(int, "a whole number", (lambda value: value >= 1, "at least 1"))
whole_number = _number(int, "a whole number", (lambda value: value >= 0, "at least 0"))
non_negative = _number(float, "a number", _FINITE)
positive = _number(float, "a number", _FINITE, (lambda value: value > 0, "above 0"))
share = _number(float, "a number", _FINITE, (lambda value: value <= 1, "from 0 to 1"))


def named_length(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    if not name or not number.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=N, as sequence=4096 is")
    return name, int(number)


def flag(name: str) -> str:
    """``--memory-limit`` of ``memory_limit``."""
    return f"--{name.replace('_', '-')}"


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
    family = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    return family.split(",")[0] or "DejaVu Sans"
