"""Marks of parametrized tests."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_except(cases: Iterable[Any], *fast: Any) -> list[Any]:
    """The cases, all but ``fast`` marked as slow."""
    return [case if case in fast else pytest.param(case, marks=pytest.mark.slow) for case in cases]
