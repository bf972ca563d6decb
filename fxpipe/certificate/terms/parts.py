"""Identities of values that a program makes for some rows at a time: what such a value is of the whole.

    rows of slices      f(x[a:b], y[a:b], z) = f(x, y, z)[a:b], where f works row by row:
                        elementwise ops, mm and addmm by their first matrix, ops along other dimensions,
                        losses without a reduction, the gradient of a loss that is no mean
    shares of sums      sum(x[a:b]), sum(x[b:c]) = shares of sum(x), and their sum = that of x[a:c];  also of
                        mm(x.T[:, a:b], y[a:b]), and of a loss that adds up its rows
    wholes              cat of all rows, in their order = x
                        the sum of shares that have each row once = sum(x);  sum(x) / n = mean(x)
    of sums             casts between floating dtypes, permutations and sums over lanes of a share

They hold for real numbers: a sum over rows in parts rounds otherwise, and a product of fewer rows may.  So
they are used for plans alone whose output layer is in parts (``plan.head_chunks``).

A term keeps its own op and operands.  Only where parts come together, the term of the whole takes its place,
if the captured step has that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from fxpipe.certificate.terms.identities import PERMUTE, RESHAPE, RULES, number, permuted, reshaped
from fxpipe.certificate.terms.layouts import layout_of
from fxpipe.certificate.terms.row_forms import (
    COLUMNS,
    LINEAR,
    Lead,
    RowForms,
    lead_of,
    operand_of,
    read_operands,
    shape_of,
)
from fxpipe.certificate.terms.terms import NUMBER, Term, Terms, operands

Span = tuple[int, int]
#: Ops that may make a whole of parts.
JOINS = ("aten.add", "aten.cat", "aten.div")
_VIEWS = (RESHAPE, PERMUTE, "aten.slice", "aten.expand")


@dataclass(frozen=True)
class Part:
    """The rows ``begin`` … ``end`` of the value that has a form; as columns if ``is_transposed``."""

    form: Term
    rows: int
    begin: int
    end: int
    is_transposed: bool = False

    @property
    def is_whole(self) -> bool:
        return (self.begin, self.end, self.is_transposed) == (0, self.rows, False)


@dataclass(frozen=True)
class Share:
    """What the rows in ``spans`` are of a sum over all rows.  Spans are in order, none touches another."""

    form: Term
    rows: int
    spans: tuple[Span, ...]

    @property
    def is_whole(self) -> bool:
        return self.spans == ((0, self.rows),)


def _joined(spans: Sequence[Span]) -> tuple[Span, ...] | None:
    """The spans in order, those that touch as one; None where two of them have a row."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin < joined[-1][1]:
            return None
        if joined and begin == joined[-1][1]:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((begin, end))
    return tuple(joined)


@dataclass(eq=False)
class _Whole:
    """The captured step's values with so many rows.  ``forms``: of terms.  ``sums``: of sums over rows.
    ``by_form``: the first captured term of each form.  ``has_equal``: whether it has one of two terms, not
    just of another shape."""

    terms: Terms
    rows: int
    calculus: RowForms = field(init=False)
    by_form: dict[Term, Term] = field(default_factory=dict)
    has_equal: bool = False
    forms: dict[Term, Term | None] = field(default_factory=dict)
    sums: dict[Term, Term | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.calculus = RowForms(self.terms, Terms(RULES), self.rows)
        for term in [*self.terms.known.values()][: self.terms.captured]:
            self.first(term)
        self.calculus.forms.captured = len(self.calculus.forms.known)

    def first(self, term: Term) -> Term:
        """The first captured term of the form of a captured term, itself if that has none."""
        for form in (self.form(term), self.sum(term)):
            if form is not None and (first := self.by_form.setdefault(form, term)) is not term:
                self.has_equal = self.has_equal or term.op != RESHAPE
                return first
        return term

    def form(self, term: Term) -> Term | None:
        """The form of a value; None for one without so many rows."""
        if term not in self.forms:
            self.forms[term] = self._form(term)
        return self.forms[term]

    def _form(self, term: Term) -> Term | None:
        shape = shape_of(self.terms, term)
        lead = None if shape is None else lead_of(shape, self.rows)
        if shape is None or lead is None:
            return None
        # A program's own terms are no values of the captured step, but views of these may be.
        made = None
        if term.op == RESHAPE and (source := self.form(term["self"])) is not None:
            made = reshaped(self.calculus.forms, source, (self.rows, *shape[len(lead) :]))
        elif not self.terms.captured or term.number < self.terms.captured or term.op in _VIEWS:
            made = self.calculus.of_rows(term, lead, lambda operand: self._with_lead(operand, lead))
        return made if made is not None else self.calculus.opaque(term, lead)

    def _with_lead(self, term: Term, lead: Lead) -> Term | None:
        shape = shape_of(self.terms, term)
        return None if shape is None or shape[: len(lead)] != lead else self.form(term)

    def transposed(self, term: Term) -> Term | None:
        """The form of a matrix, transposed, whose columns are the rows."""
        shape = shape_of(self.terms, term)
        if shape is None or len(shape) != 2 or shape[1] != self.rows:
            return None
        if term.op == PERMUTE:
            return self.form(term["self"])
        return permuted(self.calculus.forms, self.calculus.value(term), COLUMNS)

    def sum(self, term: Term) -> Term | None:
        """The form of a sum over rows; None for what is no sum over so many."""
        if term not in self.sums:
            self.sums[term] = None if shape_of(self.terms, term) is None else self._sum(term)
        return self.sums[term]

    def _sum(self, term: Term) -> Term | None:
        inner = self.sum(operand_of(term)) if term.op in LINEAR else None
        if inner is not None:
            return self.calculus.of_linear(term, inner)
        return self.calculus.of_sum(term, self.form, self.transposed)


class EqualValues:
    """Gives terms of the captured step that are equal in all of some numbers of rows as one, up to its shape:
    what a model computes twice, in two shapes, a program computes once for each part."""

    def __init__(self, terms: Terms, rows: Iterable[int]) -> None:
        self._wholes = [_Whole(terms, number) for number in rows]

    def __call__(self, term: Term) -> Term | None:
        """The ``whole`` of terms."""
        for whole in self._wholes:
            if (first := whole.first(term)) is not term:
                return reshaped(whole.terms, first, layout_of(whole.terms, term).shape)
        return None


@dataclass(eq=False)
class Parts:
    """Tells what terms of programs are of whole values of the captured step."""

    terms: Terms
    _by_rows: dict[int, _Whole] = field(default_factory=dict)
    _known: dict[Term, Part | Share | None] = field(default_factory=dict)

    def whole(self, term: Term) -> Term | None:
        """The captured step's term that a term equals, which is made of all its parts; None for others."""
        is_join = term.op in JOINS and term.number >= self.terms.captured
        of = self.of(term) if is_join else None
        if of is None or not of.is_whole:
            return None
        captured = self._whole(of.rows).by_form.get(of.form)
        layout = layout_of(self.terms, term)
        if captured is None or layout_of(self.terms, captured).dtype != layout.dtype:
            return None
        return reshaped(self.terms, captured, layout.shape)

    def rows_of_equal_values(self) -> list[int]:
        """The numbers of rows in which values of the captured step are equal that are not the same."""
        return [rows for rows, whole in self._by_rows.items() if whole.has_equal]

    def share(self, term: Term) -> Share | None:
        """What a term is of a sum over rows."""
        self.of(term)
        return self._share(term)

    def sum_form(self, term: Term, rows: int) -> Term | None:
        """The form of a sum over so many rows."""
        return self._whole(rows).sum(term)

    def first_foreign(self, term: Term) -> Term | None:
        """The first term that is none of a value of the captured step, of those that a term is computed from;
        None where none of these is made of parts."""
        todo, foreign = [term], dict[Term, None]()
        for each in todo:
            is_alone = each.number >= self.terms.captured and each.op != NUMBER
            if is_alone and each not in foreign and not self._is_captured(each):
                foreign[each] = None
                todo += read_operands(each)
        if not any(self.of(operand) for each in foreign for operand in read_operands(each)):
            return None
        return min(foreign, key=lambda each: each.number)

    def _is_captured(self, term: Term) -> bool:
        of = self.of(term)
        return of is not None and of.form.number < self._whole(of.rows).calculus.forms.captured

    def of(self, term: Term) -> Part | Share | None:
        # Operands first, and without recursion: terms are as deep as the model.
        todo = [term]
        while todo:
            last = todo[-1]
            waits = [each for each in operands(last.arguments) if self._may_be_part(each)]
            waits = [each for each in waits if each not in self._known]
            todo += waits
            if not waits:
                self._known[todo.pop()] = self._of(last)
        return self._known[term]

    def _may_be_part(self, term: Term) -> bool:
        return term.number >= self.terms.captured or term.op in _VIEWS

    def _whole(self, rows: int) -> _Whole:
        # As it is met: to make one is to go through all of the captured step.
        if rows not in self._by_rows:
            self._by_rows[rows] = _Whole(self.terms, rows)
        return self._by_rows[rows]

    # -- what a term is -----------------------------------------------------------------------------------

    def _of(self, term: Term) -> Part | Share | None:
        shape = shape_of(self.terms, term)
        if shape is None:
            return None
        match term.op:
            case "aten.slice":
                return self._sliced(term)
            case "aten.cat":
                return self._cat(term)
            case "aten.add" if (total := self._added(term)) is not None:
                return total
            case "aten.div" if (one := self._total(term["self"])) is not None:
                return self._divided(term, one)
        if term.op in LINEAR and isinstance(share := self._known.get(operand_of(term)), Share):
            form = self._whole(share.rows).calculus.of_linear(term, share.form)
            return None if form is None else Share(form, share.rows, share.spans)
        return self._viewed(term, shape) if term.op in (RESHAPE, PERMUTE) else self._computed(term)

    def _share(self, term: object) -> Share | None:
        """The share of a sum over rows that a single row is."""
        of = self._known.get(term) if isinstance(term, Term) else None
        if not isinstance(of, Part) or of.is_transposed or of.end - of.begin != 1:
            return of if isinstance(of, Share) else None
        form = self._whole(of.rows).calculus.sum_of(of.form)
        return None if form is None else Share(form, of.rows, ((of.begin, of.end),))

    def _total(self, term: object) -> Share | None:
        """A sum over all rows, also of the captured step."""
        share = self._share(term)
        if share is not None or not isinstance(term, Term) or term.number >= self.terms.captured:
            return share if share is not None and share.is_whole else None
        sums = ((rows, whole.sum(term)) for rows, whole in self._by_rows.items())
        return next((Share(form, rows, ((0, rows),)) for rows, form in sums if form is not None), None)

    def _part(self, term: object) -> Part | None:
        of = self._known.get(term) if isinstance(term, Term) else None
        return of if isinstance(of, Part) else None

    def _sliced(self, term: Term) -> Part | None:
        source, dim = term["self"], term["dim"]
        inner, before = self._part(source), shape_of(self.terms, source)
        if term["step"] != 1 or before is None or before[dim] < 2:
            return None
        begin, end = term["start"], term["end"]
        if inner is not None:
            if dim != int(inner.is_transposed):
                part = self._computed(term)
                return part if isinstance(part, Part) else None
            return replace(inner, begin=inner.begin + begin, end=inner.begin + end)
        rows = before[dim]
        # Rows are along the first dimension; the columns of a matrix are rows of its transpose.
        if dim > 1 or (dim == 1 and len(before) != 2):
            return None
        whole = self._whole(rows)
        form = whole.transposed(source) if dim else whole.form(source)
        return None if form is None else Part(form, rows, begin, end, bool(dim))

    def _viewed(self, term: Term, shape: Lead) -> Part | Share | None:
        inner = self._part(term["self"])
        if inner is None:
            return None
        if term.op == PERMUTE:
            is_turned = term["dims"] == COLUMNS
            return replace(inner, is_transposed=not inner.is_transposed) if is_turned else None
        if inner.is_transposed:
            return None
        forms = self._whole(inner.rows).calculus.forms
        if shape[:1] == (inner.end - inner.begin,):
            return replace(inner, form=reshaped(forms, inner.form, (inner.rows, *shape[1:])))
        is_one_row = shape == layout_of(forms, inner.form).shape[1:]
        return self._share(term["self"]) if is_one_row else None

    def _cat(self, term: Term) -> Part | None:
        parts = [self._part(each) for each in term["tensors"]]
        first, last = parts[0], parts[-1]
        if first is None or last is None or term["dim"] not in (None, 0):
            return None
        for one, other in pairwise(parts):
            if one is None or other is None or one.is_transposed or other.is_transposed:
                return None
            if (one.form, one.rows, one.end) != (other.form, other.rows, other.begin):
                return None
        return Part(first.form, first.rows, first.begin, last.end)

    def _added(self, term: Term) -> Share | None:
        one, other = self._share(term["self"]), self._share(term["other"])
        if one is None or other is None or "alpha" in dict(term.arguments):
            return None
        # One that is broadcast would be added several times.
        shapes = {layout_of(self.terms, each).shape for each in (term, term["self"], term["other"])}
        spans = _joined((*one.spans, *other.spans))
        if (one.form, one.rows) != (other.form, other.rows) or spans is None or len(shapes) > 1:
            return None
        return Share(one.form, one.rows, spans)

    def _divided(self, term: Term, total: Share) -> Share | None:
        """A sum over all rows by a number, as a mean is."""
        by = number(term["other"])
        if not isinstance(by, int | float) or not float(by).is_integer() or term["rounding_mode"] is not None:
            return None
        form = self._whole(total.rows).calculus.divided(total.form, int(by))
        return Share(form, total.rows, total.spans)

    def _computed(self, term: Term) -> Part | Share | None:
        """What an op makes of parts: the rows of what it makes of their wholes, or a share of its sum."""
        of = term["of"] if term.op == "item" else term
        parts = [part for each in operands(of.arguments) if (part := self._part(each)) is not None]
        if not parts:
            return None
        # Slices of rows that are all alike are one view, and stand for any rows.
        known = next((part for part in parts if not self._is_alike(part)), parts[0])
        rows, span = known.rows, (known.begin, known.end)
        lead, calculus = (known.end - known.begin,), self._whole(rows).calculus

        def form(operand: Term, is_transposed: bool = False) -> Term | None:
            part = self._part(operand)
            if part is None:
                return None if is_transposed else self._alike(operand, lead, calculus)
            is_there = (part.begin, part.end) == span or (
                self._is_alike(part) and (part.end - part.begin,) == lead
            )
            fits = part.rows == rows and is_there and part.is_transposed == is_transposed
            return part.form if fits else None

        made = calculus.of_rows(term, lead, form)
        if made is not None:
            return Part(made, rows, *span)
        made = calculus.of_sum(term, form, lambda operand: form(operand, True))
        return None if made is None else Share(made, rows, (span,))

    def _is_alike(self, part: Part) -> bool:
        return self._whole(part.rows).calculus.is_alike(part.form)

    def _alike(self, term: Term, lead: Lead, calculus: RowForms) -> Term | None:
        """The form of a value all of whose rows are alike, which are as many as a part's."""
        if term.op not in ("aten.expand", "aten.full"):
            return None
        return calculus.of_rows(term, lead, lambda operand: None)
