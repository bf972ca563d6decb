"""Argument types and file output shared by the subcommands."""

from __future__ import annotations

import argparse
from math import isfinite
from pathlib import Path
from typing import NoReturn

from fxpipe.errors import FxpipeError


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with a one-line message, without the usage."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def positive_int(text: str) -> int:
    number = _number(text, int, "a whole number")
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
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


def share(text: str) -> float:
    number = non_negative(text)
    if number > 1:
        raise argparse.ArgumentTypeError(f"{text} must be from 0 to 1")
    return number


def write(path: Path, text: str) -> None:
    """Write a file.  Raises FxpipeError if that fails."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FxpipeError(
            f"{path} cannot be written: {error.strerror or error}. Name another file."
        ) from error


def _number(text: str, of: type[int] | type[float], what: str) -> float:
    try:
        return of(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from None
