"""The problems in which a problem is searched: within its memory limits, or beyond them before offload."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from fxpipe.schedule.families.registry import FAMILIES, SEARCHED, Family
from fxpipe.schedule.offload.planner import AUTO
from fxpipe.schedule.problem import Problem

_TWICE = 2.0


def variants(problem: Problem) -> list[Problem]:
    """The variants of a problem: within the limits without offload; without limits, and then with as much
    offload as needed; within twice the limits, and then the same."""
    if problem.offload is None or (problem.offload == AUTO and not problem.is_limited):
        return [replace(problem, offload=None)]
    beyond = replace(problem, slack=inf)
    if problem.offload != AUTO:
        return [beyond]
    return [replace(problem, offload=None), beyond, replace(problem, slack=_TWICE)]


def families_of(variant: Problem) -> list[Family]:
    """The families that ``auto`` tries in a variant."""
    return [
        family
        for family in FAMILIES.values()
        if variant.stages_per_rank in family.chunks_in(variant.shape)
        and (family.name == SEARCHED or (not family.is_searched and variant.slack != _TWICE))
        and not (family.for_offload and variant.offload is None)
    ]
