"""Explains the difference between what a program computes and what it should."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fxpipe.certificate.problems import Line
from fxpipe.certificate.terms.identities import IN_ANY_ORDER
from fxpipe.certificate.terms.terms import Named, Term, operands, shown

#: Steps from an op to its operands, and what an operand that is the same counts, more than any likeness.
_DEEPEST = 10_000
_MUCH = 1_000


class Difference(NamedTuple):
    """``line``: that computes another value, if a program alone has that; ``text``: what, and what is due;
    ``is_shifted``: whether that is the right value of another microbatch."""

    line: Line | None
    text: str
    is_shifted: bool


def difference(known: int, actual: Term, expected: Term) -> Difference:
    """The first op that differs, for two terms that differ.

    known: the number of terms of the captured step; all others are a program's alone.
    """
    line, one, other = _apart(known, actual, expected)
    computes_here = one.line is not None and one.number >= known and one.op != "shifted"
    due, verb = _written(other), "computes" if computes_here else "takes"
    name = f" for {other.name}" if other.name not in ("", due) else ""
    text = f"{verb} {_written(one)}, where the captured step has {due}{name}"
    return Difference(line, text, one.op == "shifted")


def likeness(one: Term, other: Term) -> int:
    """How many of two terms' ops are the same, their own and those of their operands: of several summands
    that an edit changes, each is compared with its own."""
    if one.op != other.op:
        return 0
    operands = zip(dict(one.arguments).values(), dict(other.arguments).values(), strict=False)
    return 1 + sum(
        1 + (a is b) for a, b in operands if isinstance(a, Term) and isinstance(b, Term) and a.op == b.op
    )


def _written(term: Term) -> str:
    return f"{shown(term['self'])} of another microbatch" if term.op == "shifted" else term.written()


def _apart(known: int, actual: Term, expected: Term) -> tuple[Line | None, Term, Term]:
    """The deepest pair of terms of which one stands in the place of the other, and the line that computes the
    first of them, or an op of it."""
    line = None
    for _ in range(_DEEPEST):
        if actual.number >= known and actual.line is not None:
            line = actual.line
        pair = _operands_apart(known, actual, expected)
        if pair is None:
            break
        actual, expected = pair
    return line, actual, expected


def _operands_apart(known: int, actual: Term, expected: Term) -> tuple[Term, Term] | None:
    """The one pair of operands that differ, where all else is alike; the first of several."""
    if actual.op != expected.op or actual.number < known or actual.op == "shifted":
        return None
    if any(term is expected for term in operands(actual.arguments)):  # an op more
        return None
    ones, others = dict(actual.arguments), dict(expected.arguments)
    if actual.op in IN_ANY_ORDER:
        ones = _in_order(ones, others)
    if ones.keys() != others.keys():
        return None
    pairs = [pair for name in ones for pair in _pairs(ones[name], others[name])]
    if any(pair is None for pair in pairs):
        return None
    apart = [pair for pair in pairs if pair is not None and pair[0] is not pair[1]]
    # Operands that have changed places are told as they are.
    if {id(a) for a, _ in apart} & {id(b) for _, b in apart}:
        return None
    return apart[0] if apart else None


def _in_order(ones: dict[str, object], others: Named) -> Named:
    """The two operands such that each stands where the one is that it is like."""
    exchanged = {**ones, "self": ones["other"], "other": ones["self"]}

    def like(arguments: Named) -> int:
        pairs = [(arguments[name], others[name]) for name in ("self", "other")]
        same = sum(_MUCH for one, other in pairs if one is other)
        return same + sum(likeness(*pair) for pair in pairs if all(isinstance(each, Term) for each in pair))

    return exchanged if like(exchanged) > like(ones) else ones


def _pairs(one: object, other: object) -> list[tuple[Term, Term] | None]:
    """Terms of two arguments, those of lists by what they are; None where the arguments differ otherwise."""
    if isinstance(one, Term) and isinstance(other, Term):
        return [(one, other)]
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        if all(isinstance(each, Term) for each in (*one, *other)):
            return [*_by_likeness(one, other)]
        return [pair for a, b in zip(one, other, strict=True) for pair in _pairs(a, b)]
    return [] if one == other else [None]


def _by_likeness(ones: Sequence[Term], others: Sequence[Term]) -> Iterator[tuple[Term, Term]]:
    """Each of a list's terms that another list does not have, with the one that it is most like of those that
    are left there: an item that is missing, or in another place, moves all others."""
    left, changed = [*others], list[Term]()
    for term in ones:
        if term in left:
            left.remove(term)
        else:
            changed.append(term)
    for term in changed:
        alike = max(left, key=lambda each: likeness(term, each))
        left.remove(alike)
        yield term, alike
