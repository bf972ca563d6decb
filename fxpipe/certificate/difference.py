"""Explains the difference between what a program computes and what it should."""

from __future__ import annotations

from typing import Any

from fxpipe.certificate.terms import Term, shown

_DEEPEST = 10_000


def difference(known: int, found: Term, expected: Term) -> str:
    """The first op that differs, with its line, for two terms that differ.

    known: the number of terms of the captured step; all others are a program's alone.
    """
    one, other = _apart(known, found, expected)
    where = f"{one.line} computes " if one.line is not None and one.number >= known else "is "
    name = f" for {other.name}" if other.name else ""
    return f"{where}{_written(one)}, where the captured step has {_written(other)}{name}"


def _written(term: Term) -> str:
    if term.op == "shifted":
        by = term["by"]
        return f"{shown(term['self'])} of the microbatch {abs(by)} {'later' if by > 0 else 'earlier'}"
    return term.written()


def _apart(known: int, found: Term, expected: Term) -> tuple[Term, Term]:
    """The deepest pair of terms of which one stands in the place of the other."""
    for _ in range(_DEEPEST):
        pair = _operands_apart(known, found, expected)
        if pair is None:
            break
        found, expected = pair
    return found, expected


def _operands_apart(known: int, found: Term, expected: Term) -> tuple[Term, Term] | None:
    """The one pair of operands that differ, where all else is alike; the first of several."""
    if found.op != expected.op or found.number < known or found.op == "shifted":
        return None
    ones, others = dict(found.arguments), dict(expected.arguments)
    if ones.keys() != others.keys():
        return None
    pairs = [pair for name in ones for pair in _pairs(ones[name], others[name])]
    if any(pair is None for pair in pairs):
        return None
    apart = [pair for pair in pairs if pair is not None and pair[0] is not pair[1]]
    # Exchanged operands are told as they are.
    if len(apart) > 1 and {id(a) for a, _ in apart} == {id(b) for _, b in apart}:
        return None
    return apart[0] if apart else None


def _pairs(one: Any, other: Any) -> list[tuple[Term, Term] | None]:
    """Terms in the same places of two arguments; None where the arguments differ otherwise."""
    if isinstance(one, Term) and isinstance(other, Term):
        return [(one, other)]
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return [pair for a, b in zip(one, other, strict=True) for pair in _pairs(a, b)]
    return [] if one == other else [None]
