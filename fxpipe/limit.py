"""A memory limit as a user says it, and what of it a rank has left for activations."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fxpipe.errors import LimitError, ScheduleError

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{infix}B": base**power
    for infix, base in (("", 1000), ("i", 1024))
    for power, letter in enumerate("kMGT" if not infix else "KMGT", start=1)
}


def parse_bytes(limit: float | str) -> float:
    """``"16GiB"``, ``"800 MB"`` or a number, in bytes.  Raises ScheduleError for what is no such thing."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", str(limit).strip())
    unit = None if match is None else {name.lower(): n for name, n in _UNITS.items()}.get(match[2].lower())
    if match is None or unit is None or float(match[1]) == 0:
        raise ScheduleError(
            f"The memory limit is {limit!r}; give a number of bytes above 0 or a text such as '16GiB' "
            f"(units: {', '.join(name for name in _UNITS if name)})."
        )
    return float(match[1]) * unit


def room(limit: float, weights: Sequence[int]) -> tuple[float, ...]:
    """Per rank the bytes that ``limit`` leaves beside its weights.

    Raises LimitError where the weights alone take as much.
    """
    worst = max(range(len(weights)), key=weights.__getitem__)
    if weights[worst] >= limit:
        raise LimitError(
            f"The memory limit is {limit:.0f} bytes, and the parameters, gradients and buffers of rank "
            f"{worst} alone take {weights[worst]}. Raise the limit or use more ranks.",
            weights[worst],
        )
    return tuple(limit - held for held in weights)
