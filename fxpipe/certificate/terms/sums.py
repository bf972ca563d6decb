"""Gradients as sums: the summands that the ranks may add, in any order.

A gradient is the sum of its summands over all uses of its parameter, microbatches and ranks.  The order of
these additions is the program's own, and so is that of the additions that autograd made of several uses: a
sum is taken apart into its summands.  A summand may lose a cast on its way to the accumulator, which has at
least as many bits: the accumulator rounds later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise, repeat
from typing import TYPE_CHECKING, NamedTuple

import torch

from fxpipe.certificate.problems import Line, Problem, named
from fxpipe.certificate.terms.difference import likeness
from fxpipe.certificate.terms.identities import CAST, PERMUTE, ROWS, of_lanes, permuted, rows_added
from fxpipe.certificate.terms.layouts import layout_of
from fxpipe.certificate.terms.parts import Parts, Span
from fxpipe.certificate.terms.terms import Term, Terms, canonical

if TYPE_CHECKING:
    from fxpipe.certificate.reference import Reference


class Addition(NamedTuple):
    """The addition of a summand of a microbatch, or of all alike (None): the line that calls the section, and
    the line of the section that adds."""

    microbatch: int | None
    call: Line
    line: Line


Summands = dict[Term, list[Addition]]


def joined(parts: Iterable[Summands]) -> Summands:
    """Summands of several ranks."""
    sums: Summands = {}
    for part in parts:
        for term, times in part.items():
            sums.setdefault(term, []).extend(times)
    return sums


def leaves(terms: Terms, term: Term) -> Iterator[Term]:
    """The summands of a sum, also of one over the lanes."""
    todo = [term]  # no recursion: a weight of a loop has as many summands as that has rounds
    while todo:
        one = todo.pop()
        if one.op == "aten.add" and "alpha" not in dict(one.arguments):
            todo += one["other"], one["self"]
        elif is_sum_over_lanes(one):
            yield from (sum_over_lanes(terms, each, **of_lanes(one)) for each in leaves(terms, one["x"]))
        else:
            yield one


def sum_over_lanes(terms: Terms, term: Term, **group: int) -> Term:
    """The sum of a value over lanes.  group: ``n`` and, where it is not 1, ``stride``, as the op has them."""
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
        # An op that adds to a wider accumulator by itself does not round its result to its own dtype first.
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
        # A program may add sums of uses or of lanes where the captured step adds each, and the reverse.
        for term, calls in total.items():
            for leaf in leaves(reference.terms, term):
                added.setdefault(known.get(leaf, leaf), []).extend(calls)
        shares = {} if reference.parts is None else _shares(reference.parts, known, added)
        for term, of_rows in shares.items():
            added.setdefault(term, []).extend(of_rows.wholes())
        foreign = {term: calls for term, calls in added.items() if term not in self.times}
        counts = {term: len(added.get(term, ())) for term in self.times}
        short = [term for term, times in self.times.items() if counts[term] < times * microbatches]
        # A summand that is unknown most likely stands for one that is missing: told as one problem, not two.
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
        for term in self.times.keys() - {*instead.values()}:  # these are told
            uneven = [*shares[term].uneven(name, term, self.times[term])] if term in shares else []
            yield from uneven or _uneven(name, term, self.times[term], added.get(term, []), microbatches, end)


@dataclass(frozen=True)
class _Shares:
    """What is added of a summand in shares of its ``rows`` rows: each addition with its rows."""

    rows: int
    additions: list[tuple[Addition, tuple[Span, ...]]] = field(default_factory=list)

    def _times(self) -> dict[int | None, list[tuple[Span, int]]]:
        """Microbatch -> how often each of its rows is added, in spans in which that is the same."""
        changes: dict[int | None, Counter[int]] = {}
        for addition, spans in self.additions:
            change = changes.setdefault(addition.microbatch, Counter({0: 0, self.rows: 0}))
            # Where the number changes: one more from the begin of a span on, one less from its end on.
            for begin, end in spans:
                change[begin] += 1
                change[end] -= 1
        times: dict[int | None, list[tuple[Span, int]]] = {}
        for m, change in changes.items():
            places = sorted(change)
            times[m] = [*zip(pairwise(places), accumulate(map(change.__getitem__, places)), strict=False)]
        return times

    def wholes(self) -> Iterator[Addition]:
        """The additions of all rows: as many as each row has at least."""
        last = {addition.microbatch: addition for addition, _ in self.additions}
        for m, times in self._times().items():
            yield from repeat(last[m], min(count for _, count in times))

    def uneven(self, name: str, term: Term, due: int) -> Iterator[Problem]:
        """Rows that are added more or less often than others of their microbatch."""
        uneven: dict[tuple[Span, int], list[int]] = {}
        for m, times in self._times().items():
            for span, count in times if len({count for _, count in times}) > 1 else ():
                if count != due:
                    uneven.setdefault((span, count), []).append(m or 0)
        for ((begin, end), count), microbatches in uneven.items():
            lines = [each.line for each, spans in self.additions if (begin, end) in spans]
            line = lines[-1] if lines else self.additions[-1][0].line
            rows = f"the rows {begin} … {end - 1} of {term} of {named(microbatches)} {count} times, not {due}"
            yield Problem.at(line, f"the gradient of {name} has {rows}")


def _shares(parts: Parts, known: Mapping[Term, Term], added: Summands) -> dict[Term, _Shares]:
    """Take what is added in shares of rows out of what is added, by the summand that it is a share of."""
    shares: dict[Term, _Shares] = {}
    by_form: dict[int, dict[Term | None, Term]] = {}
    for leaf in [*added]:
        share = None if leaf in known else parts.share(leaf)
        if share is not None:
            forms = by_form.get(share.rows) or {parts.sum_form(each, share.rows): each for each in known}
            by_form[share.rows] = forms
            whole = forms.get(share.form)
            if (
                whole is not None
                and layout_of(parts.terms, whole).shape == layout_of(parts.terms, leaf).shape
            ):
                of_rows = shares.setdefault(known[whole], _Shares(share.rows))
                of_rows.additions.extend((addition, share.spans) for addition in added.pop(leaf))
    return shares


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
    at = partial(Problem.at, last)
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
            yield Problem.at(
                line, f"the gradient of {name} has {term} of microbatch {m} {count[m]} times, not {times}"
            )
