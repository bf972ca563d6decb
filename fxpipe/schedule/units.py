"""Reads and formats numbers with units, and computes the ticks of an axis."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Units:
    """The formats of a timeline's times and memory; ``limit``: of memory that must be enough, not rounded."""

    time: Callable[[float], str]
    memory: Callable[[float], str]
    limit: Callable[[float], str]


#: The units of memory that users may write, with their bytes.
BYTES = {"": 1, "B": 1} | {
    f"{letter}{infix}B": base**power
    for letters, infix, base in (("kMGT", "", 1000), ("KMGT", "i", 1024))
    for power, letter in enumerate(letters, start=1)
}


def parse_bytes(text: str) -> float | None:
    """``"16GiB"`` or ``"800 MB"``, in any case of letters, in bytes; None for any other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    unit = None if match is None else {name.lower(): n for name, n in BYTES.items()}.get(match[2].lower())
    return None if match is None or unit is None or float(match[1]) == 0 else float(match[1]) * unit


def is_decimal(text: str) -> bool:
    """Whether memory is written in powers of 1000: ``"16GB"``."""
    return re.search(r"[kmgt]b\s*$", text, re.IGNORECASE) is not None


def bytes_text(count: float) -> str:
    """``1536`` to ``1.5 KiB``."""
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def decimal_bytes_text(count: float) -> str:
    """``1500`` to ``1.5 kB``."""
    return _scaled(count, 1000, ("B", "kB", "MB", "GB", "TB"))


def _with_bytes(text: Callable[[float], str]) -> Callable[[float], str]:
    """``1536.5`` to ``1.5 KiB (1537 bytes)``."""
    return lambda count: f"{text(count)} ({math.ceil(count)} bytes)"


def limit_text(number: float) -> str:
    """Nine significant digits."""
    return f"{number:.9g}"


def bubble_text(share: float) -> str:
    """``0.2632`` to ``26.32%``."""
    return f"{share:.2%}"


def flops_text(count: float) -> str:
    """``2_000_000`` to ``2 MFLOP``."""
    return _scaled(count, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))


def seconds_text(seconds: float) -> str:
    """``0.0015`` to ``1.5 ms``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= 0.9995 * size:
            return f"{number_text(seconds / size)} {unit}"
    return f"{number_text(seconds / 1e-9)} ns" if seconds else "0 s"


def number_text(number: float) -> str:
    """Three significant digits, or all digits of a larger integer part: ``1234``, ``12.3``, ``0.5``."""
    if number == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(number))))
    text = f"{number:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _scaled(count: float, base: int, names: tuple[str, ...]) -> str:
    for name in names[:-1]:
        if abs(count) < base:
            return f"{number_text(count)} {name}"
        count /= base
    return f"{number_text(count)} {names[-1]}"


def ticks(end: float, at_most: int) -> tuple[float, ...]:
    """Round numbers from 0 to ``end``, 1, 2 or 5 times a power of ten apart, in at most so many steps."""
    if end <= 0:
        return (0.0,)
    raw = end / at_most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    return tuple(i * step for i in range(math.floor(end / step * (1 + 1e-9)) + 1))


PHYSICAL = Units(seconds_text, bytes_text, _with_bytes(bytes_text))
"""Seconds and bytes."""

DECIMAL = Units(seconds_text, decimal_bytes_text, _with_bytes(decimal_bytes_text))
"""Seconds, and bytes in powers of 1000."""


def units_of(limit: str) -> Units:
    """The units in which a limit is written."""
    return DECIMAL if is_decimal(limit) else PHYSICAL


PLAIN = Units(number_text, number_text, limit_text)
"""Any one unit of each."""
