"""Marks of parametrized tests."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_except(cases: Iterable[Any], *fast: Any, variations: Collection[Any] = ()) -> list[Any]:
    """The cases, all but ``fast`` marked as slow, and ``variations`` as that."""
    return [
        case if case in fast else pytest.param(case, marks=[pytest.mark.slow, *_variation(case, variations)])
        for case in cases
    ]


def with_variations(cases: Iterable[Any], variations: Collection[Any]) -> list[Any]:
    """The cases, ``variations`` of them marked as that."""
    return [pytest.param(case, marks=_variation(case, variations)) for case in cases]


def _variation(case: Any, variations: Collection[Any]) -> list[pytest.MarkDecorator]:
    return [pytest.mark.variation] if case in variations else []
