"""Gradients as sums: the summands that the ranks may add, in any order.

A gradient is the sum of its summands over all uses of its parameter, microbatches and ranks.  The order of
these additions is the program's own, and so is that of the additions that autograd made of several uses: a
sum is taken apart into its summands.  A summand may lose a cast on its way to the accumulator, which has at
least as many bits: the accumulator rounds later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from fxpipe.certificate.problems import Line, Problem
from fxpipe.certificate.terms.difference import likeness
from fxpipe.certificate.terms.identities import CAST, PERMUTE, ROWS, of_lanes, permuted, rows_added
from fxpipe.certificate.terms.terms import Term, Terms, canonical

if TYPE_CHECKING:
    from fxpipe.certificate.ranks.runtime import Addition, Summands
    from fxpipe.certificate.reference import Reference


def leaves(terms: Terms, term: Term) -> Iterator[Term]:
    """The summands of a sum, also of one over the lanes."""
    if term.op == "aten.add" and "alpha" not in dict(term.arguments):
        for name in ("self", "other"):
            yield from leaves(terms, term[name])
    elif is_sum_over_lanes(term):
        yield from (sum_over_lanes(terms, each, **of_lanes(term)) for each in leaves(terms, term["x"]))
    else:
        yield term


def sum_over_lanes(terms: Terms, term: Term, **group: int) -> Term:
    """group: ``n`` and, where it is not 1, ``stride``, as the op has them."""
    return terms.plain("lanes.all_reduce", {"x": term, "op": canonical("sum"), **group})


def is_sum_over_lanes(term: Term) -> bool:
    return term.op == "lanes.all_reduce" and term["op"] == canonical("sum")


def added_forms(terms: Terms, term: Term, dtype: torch.dtype) -> list[Term]:
    """A summand, and what may be added in its place to an accumulator of a dtype."""
    if is_sum_over_lanes(term):
        of_sums = added_forms(terms, term["x"], dtype)
        return [sum_over_lanes(terms, form, **of_lanes(term)) for form in of_sums]
    wide = terms.make("aten._to_copy", {"self": term, "dtype": canonical(dtype)})
    return list(dict.fromkeys([term, *forms(terms, wide)]))


def forms(terms: Terms, term: Term) -> list[Term]:
    """A value, and the same without its last casts."""
    equal = [term]
    if term.op == CAST:
        source = term["self"]
        equal += forms(terms, source)
        if source.op == "aten.mm":
            wide = {**dict(source.arguments), "out_dtype": term["dtype"]}
            equal.append(terms.plain("aten.mm", wide))
        if source.op == ROWS:
            values = terms.make("aten._to_copy", {"self": source["values"], "dtype": term["dtype"]})
            equal.append(rows_added(terms, source["rows"], values, source["size"]))
    elif term.op == PERMUTE:
        equal += [permuted(terms, inner, term["dims"]) for inner in forms(terms, term["self"])[1:]]
    return equal


class Missing(NamedTuple):
    """A summand of a gradient that a program does not add, with a microbatch or with all (None)."""

    name: str
    term: Term
    line: Line | None
    microbatch: int | None


class Foreign(NamedTuple):
    """A summand that a program adds, at a line, and the captured step does not."""

    name: str
    term: Term
    line: Line


@dataclass(frozen=True)
class GradientSum:
    """``times``: how often each summand is due with every microbatch.  ``dtype``: of the accumulator."""

    times: Counter[Term]
    dtype: torch.dtype

    @staticmethod
    def of(terms: Terms, summands: Sequence[Term], dtype: torch.dtype) -> GradientSum:
        return GradientSum(Counter(leaf for term in summands for leaf in leaves(terms, term)), dtype)

    def problems(
        self,
        reference: Reference,
        microbatches: int,
        name: str,
        total: Summands,
        end: Line | None,
    ) -> Iterator[Problem | Missing | Foreign]:
        """What differs in a sum that a program has made."""
        known = {form: term for term in self.times for form in added_forms(reference.terms, term, self.dtype)}
        added: Summands = {}
        for term, calls in total.items():
            for leaf in leaves(reference.terms, term):
                added.setdefault(known.get(leaf, leaf), []).extend(calls)
        foreign = {term: calls for term, calls in added.items() if term not in self.times}
        counts = {term: len(added.get(term, ())) for term in self.times}
        short = [term for term, times in self.times.items() if counts[term] < times * microbatches]
        instead = dict[Term, Term]()
        able = {form: each for each in short for form in added_forms(reference.terms, each, self.dtype)}
        for term, calls in foreign.items():
            if able:  # one summand may be another thing with some microbatches than with others
                alike = {
                    form: (likeness(term, form), each not in instead.values()) for form, each in able.items()
                }
                nearest = max(able, key=alike.__getitem__)
                instead[term] = able[nearest]
                reference.note_difference(f"the gradient of {name}", calls[0].line, term, nearest)
            else:
                yield Foreign(name, term, calls[0].line)
        for term in self.times.keys() - {*instead.values()}:
            yield from _uneven(name, term, self.times[term], added.get(term, []), microbatches, end)


def _at(line: Line | None, text: str) -> Problem:
    return Problem(0, 0, text) if line is None else Problem(line.rank, line.number, text)


def _uneven(
    name: str,
    term: Term,
    times: int,
    calls: list[Addition],
    microbatches: int,
    end: Line | None,
) -> Iterator[Problem | Missing]:
    """Microbatches of which a summand was added too seldom or too often."""
    last = calls[-1].call if calls else end
    at = partial(_at, last)
    if not calls:
        yield Missing(name, term, last, None)
        return
    if not term.varies:
        if len(calls) != times * microbatches:
            yield at(
                f"the gradient of {name} has {term} {len(calls)} times, and {times * microbatches} are due"
            )
        return
    count = Counter(each.microbatch for each in calls)
    for m in range(microbatches):
        if count[m] < times:
            yield Missing(name, term, last, m)
        elif count[m] > times:
            line = [each.call for each in calls if each.microbatch == m][-1]
            yield _at(
                line, f"the gradient of {name} has {term} of microbatch {m} {count[m]} times, not {times}"
            )
