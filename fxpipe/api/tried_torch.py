"""The versions of torch with which fxpipe was tried: it uses private parts of torch, which may move."""

from __future__ import annotations

import re
import warnings

#: The oldest and the newest, as (major, minor).
OLDEST, NEWEST = (2, 11), (2, 15)


def untried(version: str) -> str:
    """A word, with the remedy, on a torch that is older or newer than those that were tried; else "".

    version: ``torch.__version__``, such as "2.13.0+cpu"; nothing is known of one without numbers, somebody's
        own build.
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or OLDEST <= (int(numbers[1]), int(numbers[2])) <= NEWEST:
        return ""
    oldest, newest = (".".join(map(str, each)) for each in (OLDEST, NEWEST))
    below = f"{NEWEST[0]}.{NEWEST[1] + 1}"
    return (
        f"fxpipe was tried with torch {oldest} to {newest}, not with {version}, and uses private parts of "
        f'torch: if compiling fails, pip install "torch>={oldest},<{below}".'
    )


def warn_of_untried(version: str) -> None:
    """Warn of a torch that was not tried."""
    if word := untried(version):
        warnings.warn(word, stacklevel=4)
