"""``--lengths``: lengths of samples, as numbers, from a file, or of a distribution."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

#: Steps that are drawn of a distribution.
STEPS = 4
#: What lengths are written as.
HELP = "731,64,2048, a file with one a line (or JSON lines), or lognormal:mean=600,sigma=1,max=8192"


@dataclass(frozen=True)
class Listed:
    """Lengths one by one.  ``text``: as they were given."""

    text: str
    lengths: tuple[int, ...]

    def within(self, most: int) -> Listed:
        return self

    def draw(self, random: np.random.Generator, number: int) -> list[int]:
        """Each at most once, if there are so many."""
        drawn: list[int] = random.choice(self.lengths, number, replace=number > len(self.lengths)).tolist()
        return drawn


@dataclass(frozen=True)
class LogNormal:
    """A log-normal distribution.  ``mean``: of the lengths before those below ``min`` or above ``max`` become
    these; without ``max`` the example's length.  ``sigma``: the deviation of their logarithms."""

    text: str
    mean: float
    sigma: float
    min: int = 1
    max: int | None = None

    def within(self, most: int) -> LogNormal:
        return self if self.max is not None else replace(self, max=most)

    def draw(self, random: np.random.Generator, number: int) -> list[int]:
        drawn = random.lognormal(log(self.mean) - self.sigma**2 / 2, self.sigma, number)
        return [int(n) for n in drawn.round().clip(self.min, self.max)]


Lengths = Listed | LogNormal


def drawn(lengths: Lengths, most: int, samples: int, seed: int) -> list[list[int]]:
    """The samples of some steps.  most: tokens of the example."""
    import numpy as np  # the help does not need it

    random, source = np.random.default_rng(seed), lengths.within(most)
    return [source.draw(random, samples) for _ in range(STEPS)]


def lengths(text: str) -> Lengths:
    """The one parser of lengths, for arguments."""
    try:
        name, colon, parameters = text.partition(":")
        # Not Path's own: before Python 3.14 they raise for lists that are longer than names of files may be.
        if colon and not os.path.exists(text):
            return _distribution(text, name, parameters)
        is_file = os.path.isfile(text)
        listed = Listed(text, tuple(_of_file(Path(text)) if is_file else _numbers(text)))
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be read: {error}") from error
    if not listed.lengths:
        raise argparse.ArgumentTypeError(f"{text} has no lengths")
    return listed


def _numbers(text: str) -> Iterator[int]:
    for word in text.split(","):
        if not re.fullmatch(r"\s*\d+\s*", word) or not int(word):
            raise argparse.ArgumentTypeError(f"{text!r} is no list of lengths, and no file: {HELP}")
        yield int(word)


def _of_file(path: Path) -> Iterator[int]:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            value = value.get("length", value.get("input_ids"))
        length = len(value) if isinstance(value, list) else value
        if type(length) is not int or length < 1:
            raise argparse.ArgumentTypeError(
                f'{path}, line {number}: {line.strip()[:40]!r} is no length: write 731, {{"length": 731}} or '
                '{"input_ids": […]}'
            )
        yield length


def _distribution(text: str, name: str, parameters: str) -> LogNormal:
    given = dict(re.findall(r"(\w+)=([^,]*)", parameters))
    wrong = ",".join(f"{key}={value}" for key, value in given.items()) != parameters
    try:
        numbers = {key: float(given.pop(key)) for key in ("mean", "sigma") if key in given}
        bounds = {key: int(given.pop(key)) for key in ("min", "max") if key in given}
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error
    if name != "lognormal" or wrong or given or len(numbers) < 2:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no distribution: lognormal takes mean and sigma, and perhaps min and max, as "
            "lognormal:mean=600,sigma=1,max=8192"
        )
    found = LogNormal(text, numbers["mean"], numbers["sigma"], bounds.get("min", 1), bounds.get("max"))
    least = 1 <= found.min <= (found.min if found.max is None else found.max)
    if not (0 < found.mean < 1e9 and 0 <= found.sigma < 10 and least):
        raise argparse.ArgumentTypeError(
            f"{text}: mean is above 0, sigma from 0 to 10, and min from 1 to max"
        )
    return found
