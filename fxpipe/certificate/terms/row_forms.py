"""What an op gives row by row: the same term for a value of all rows, in whatever shape, and for its slices.

A value has ``rows`` rows where its first dimensions, its *lead*, have that many places: (3, 5, 50) has 15
rows of 50, as has (15, 50).  Its *form* is the term of shape (rows, …) that has these rows, in a table of its
own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from fxpipe.certificate.terms.identities import CAST, PERMUTE, RESHAPE, permuted, reshaped
from fxpipe.certificate.terms.layouts import Unknown, layout_of
from fxpipe.certificate.terms.schemas import is_elementwise
from fxpipe.certificate.terms.terms import NUMBER, Layout, Term, Terms, canonical, operands

Lead = tuple[int, ...]
Rows = Callable[[Term], Term | None]
"""Operand -> its form, where it has the rows of the op; None for others."""

VALUE, COLUMNS = "value", (1, 0)
#: Reductions of a loss.
EACH, MEAN, SUM = 0, 1, 2
_LIKE = ("aten.ones_like", "aten.zeros_like", "aten.full_like")
#: Ops along dimensions that they name -> their operands; each other dimension is left as it is.
_ALONG = {
    "aten._log_softmax": ("self",),
    "aten._log_softmax_backward_data": ("grad_output", "output"),
    "aten._softmax": ("self",),
    "aten._softmax_backward_data": ("grad_output", "output"),
    "aten.amax": ("self",),
    "aten.amin": ("self",),
    "aten.argmax": ("self",),
    "aten.argmin": ("self",),
    "aten.gather": ("self", "index"),
    "aten.logsumexp": ("self",),
    "aten.mean": ("self",),
    "aten.scatter_add": ("self", "index", "src"),
    "aten.slice": ("self",),
    "aten.sum": ("self",),
}
_NLL, _UNPICKED = "aten.nll_loss_forward", "aten.nll_loss_backward"
#: Ops that make of a sum the sum of what they make of its summands.
LINEAR = (CAST, PERMUTE, RESHAPE, "lanes.all_reduce")


def operand_of(term: Term) -> Term:
    """What a linear op is applied to."""
    return term["x" if term.op == "lanes.all_reduce" else "self"]  # type: ignore[no-any-return]


def read_operands(term: Term) -> list[Term]:
    """What an op reads: the gradient of a loss reads its count if that is a mean."""
    is_counted = term.op != _UNPICKED or term["reduction"] == MEAN
    read = (value for name, value in term.arguments if is_counted or name != "total_weight")
    return [*operands(tuple(read))]


def lead_of(shape: Lead, rows: int) -> Lead | None:
    """The first dimensions that have so many places, as few as do."""
    lengths = (k for k in range(1, len(shape) + 1) if prod(shape[:k]) == rows)
    return next((shape[:k] for k in lengths), None)


def shape_of(terms: Terms, term: Term) -> Lead | None:
    """The shape of a term; None for what is no tensor."""
    # An op of several results has no shape of its own; its items have.
    if term.layout is None and term.results is not None:
        return None
    try:
        return layout_of(terms, term).shape
    except Unknown:
        return None


@dataclass(eq=False)
class RowForms:
    """Forms of ops with ``rows`` rows, whose operands' forms are known.  ``terms``: of the programs,
    ``forms``: the table of forms, with the same identities."""

    terms: Terms
    forms: Terms
    rows: int

    def value(self, term: Term) -> Term:
        """A value of all rows, or of none, as an operand of forms."""
        if term.op == NUMBER:
            same = self.forms.plain(NUMBER, dict(term.arguments))
        else:
            same = self.forms.plain(VALUE, {"of": term})
        same.layout = same.layout or layout_of(self.terms, term)
        return same

    def opaque(self, term: Term, lead: Lead) -> Term:
        """The form of what no rule takes apart."""
        tail = layout_of(self.terms, term).shape[len(lead) :]
        return reshaped(self.forms, self.value(term), (self.rows, *tail))

    def is_alike(self, form: Term) -> bool:
        """Whether all rows of a form are alike."""
        while form.op == RESHAPE and layout_of(self.forms, form["self"]).shape[:1] == (self.rows,):
            form = form["self"]
        if form.op != "aten.expand":
            return form.op == "aten.full"
        source, shape = layout_of(self.forms, form["self"]).shape, layout_of(self.forms, form).shape
        return shape[:1] == (self.rows,) and (len(source) < len(shape) or source[0] == 1)

    def of_rows(self, term: Term, lead: Lead, rows: Rows) -> Term | None:
        """The form of a term's result, which has this lead, where each of its rows is made of the same row of
        the operands with rows, and of all of the others; None where no rule says so."""
        shape = shape_of(self.terms, term)
        if shape is None or shape[: len(lead)] != lead:
            return None
        tail, form = shape[len(lead) :], None
        match term.op:
            case "aten.expand":
                form = self._expanded(term["self"], lead, tail, rows)
            case "aten.full":
                form = self.forms.make("aten.full", {**dict(term.arguments), "size": (self.rows, *tail)})
            case "aten.mm":
                if (left := rows(term["self"])) is not None:
                    form = self._make(term, {"self": left, "mat2": self.value(term["mat2"])})
            case "aten.addmm":
                form = self._addmm(term, lead, rows)
            case op if op == _UNPICKED:
                form = self._unpicked(term, rows)
            case "item":
                form = self._picked(term, (EACH,), rows) if term["index"] == 0 else None
            case op if op in _ALONG:
                form = self._along(term, lead, rows)
            case op if op in (CAST, *_LIKE) or is_elementwise(op):
                form = self._elementwise(term, lead, len(tail), rows)
        if form is not None and form.layout is None:
            form.layout = Layout((self.rows, *tail), layout_of(self.terms, term).dtype)
        return form

    def of_sum(self, term: Term, rows: Rows, columns: Rows) -> Term | None:
        """The form of a term's result that is a sum over all rows, up to its shape; None for other ops.

        columns: gives the form of the transposed matrix, of an operand whose columns are the rows.
        """
        match term.op:
            case "aten.mm":
                left, right = columns(term["self"]), rows(term["mat2"])
                if left is None or right is None:
                    return None
                form = self._make(term, {"self": permuted(self.forms, left, COLUMNS), "mat2": right})
                form.layout = form.layout or layout_of(self.terms, term)
                return form
            case "aten.sum" | "aten.mean":
                return self._summed(term, rows(term["self"]))
            case "item":
                return self._picked(term, (SUM,), rows)
        return None

    # -- ops ----------------------------------------------------------------------------------------------

    def _make(self, term: Term, forms: dict[str, Term]) -> Term:
        op = "aten._to_copy" if term.op == CAST else term.op
        return self.forms.make(op, {**dict(term.arguments), **forms})

    def _operand(self, term: Term, lead: Lead, behind: int, rows: Rows) -> tuple[Term, bool] | None:
        """An operand that is broadcast to a lead and ``behind`` other dimensions, and whether it has rows.

        One that is broadcast along a part of the lead has them as it is expanded; None where its rows are
        those of another part.
        """
        shape = layout_of(self.terms, term).shape
        before, tail = shape[: max(0, len(shape) - behind)], shape[max(0, len(shape) - behind) :]
        form = rows(term) if len(before) == len(lead) else None
        if form is not None:
            return form, True
        value = self.value(term)
        if all(n == 1 for n in before):
            # Not without dimensions: then it would have no say in the dtype.
            return (reshaped(self.forms, value, (1, *tail)) if len(before) > 1 else value), False
        if prod(lead) != self.rows or len(before) > len(lead):
            return None
        wide = self.forms.make("aten.expand", {"self": value, "size": (*lead, *tail)})
        return reshaped(self.forms, wide, (self.rows, *tail)), True

    def _elementwise(self, term: Term, lead: Lead, behind: int, rows: Rows) -> Term | None:
        forms, has_rows = dict[str, Term](), False
        for name, argument in term.arguments:
            if isinstance(argument, Term):
                operand = self._operand(argument, lead, behind, rows)
                if operand is None:
                    return None
                forms[name] = operand[0]
                has_rows = has_rows or operand[1]
        return self._make(term, forms) if has_rows else None

    def _expanded(self, source: Term, lead: Lead, tail: Lead, rows: Rows) -> Term | None:
        operand = self._operand(source, lead, len(tail), rows)
        if operand is None:
            return None
        return self.forms.make("aten.expand", {"self": operand[0], "size": (self.rows, *tail)})

    def _addmm(self, term: Term, lead: Lead, rows: Rows) -> Term | None:
        left, bias = rows(term["mat1"]), self._operand(term["self"], lead, 1, rows)
        if left is None or bias is None:
            return None
        return self._make(term, {"self": bias[0], "mat1": left, "mat2": self.value(term["mat2"])})

    def _of_operands(self, term: Term, names: Iterable[str], rows: Rows) -> dict[str, Term] | None:
        """The forms of operands that all have rows."""
        forms = {name: rows(term[name]) for name in names}
        known = {name: form for name, form in forms.items() if form is not None}
        return known if len(known) == len(forms) else None

    def _along(self, term: Term, lead: Lead, rows: Rows) -> Term | None:
        """An op along dimensions behind the lead."""
        forms, k = self._of_operands(term, _ALONG[term.op], rows), len(lead)
        if forms is None:
            return None
        dims = self._dims(term, len(layout_of(self.terms, term[_ALONG[term.op][0]]).shape))
        if not dims or min(dims) < k:
            return None
        # In a form the rows are one dimension, however many they are of the value.
        shifted = tuple(d - k + 1 for d in dims)
        is_one = isinstance(dict(term.arguments).get("dim", 0), int)
        return self._make(term, {**forms, "dim": shifted[0] if is_one else shifted})  # type: ignore[dict-item]

    def _dims(self, term: Term, rank: int) -> tuple[int, ...]:
        """The dimensions along which an op goes, from the first on; all where it names none."""
        default = 0 if term.op == "aten.slice" else None
        dim: Any = dict(term.arguments).get("dim", default)
        dims = (dim,) if isinstance(dim, int) else dim or range(rank)
        return tuple(sorted(d % rank for d in dims))

    def _picked(self, term: Term, reductions: tuple[int, ...], rows: Rows) -> Term | None:
        """A loss of each row, or the sum of these; the number of labels that count is a sum, too."""
        pick = term["of"]
        if pick.op != _NLL or pick["weight"] is not None or pick["reduction"] not in reductions:
            return None
        forms = self._of_operands(pick, ("self", "target"), rows)
        if forms is None:
            return None
        item = self.forms.item(self._make(pick, forms), term["index"])
        shape = (self.rows,) if pick["reduction"] == EACH else ()
        item.layout = item.layout or Layout(shape, layout_of(self.terms, term).dtype)
        return item

    def _unpicked(self, term: Term, rows: Rows) -> Term | None:
        """The gradient of a loss, whose count is an operand, which only that of a mean reads."""
        reduction = term["reduction"]
        if term["weight"] is not None or reduction not in (EACH, MEAN, SUM):
            return None
        each = ("grad_output",) if reduction == EACH else ()
        forms = self._of_operands(term, ("self", "target", *each), rows)
        if forms is None:
            return None
        for name in () if each else ("grad_output", *["total_weight"] * (reduction == MEAN)):
            forms[name] = self.value(term[name])
        others = {name: value for name, value in term.arguments if name != "total_weight"}
        return self.forms.make(term.op, {**others, **forms})

    def _summed(self, term: Term, form: Term | None) -> Term | None:
        """A sum over rows, and perhaps other dimensions; a mean is such a sum, divided by its summands."""
        if form is None:
            return None
        shape = layout_of(self.terms, term["self"]).shape
        shape_of_form = layout_of(self.forms, form).shape
        # So many dimensions of the value are its rows.
        dims, k = self._dims(term, len(shape)), len(shape) - len(shape_of_form) + 1
        if dims[:k] != tuple(range(k)):
            return None
        over = (0, *(d - k + 1 for d in dims[k:]))
        kept = {"dtype": term["dtype"]} if term["dtype"] is not None else {}
        total = self.forms.make("aten.sum", {"self": form, "dim": over, **kept})
        left = tuple(n for d, n in enumerate(shape_of_form) if d not in over)
        total.layout = total.layout or Layout(left, layout_of(self.terms, term).dtype)
        if term.op == "aten.sum":
            return total
        return self.divided(total, prod(shape[d] for d in dims))

    def sum_of(self, form: Term) -> Term | None:
        """The form of a sum over the rows of a form; None for whole numbers, whose sum has another dtype."""
        layout = layout_of(self.forms, form)
        if not layout.dtype.is_floating_point:
            return None
        total = self.forms.make("aten.sum", {"self": form, "dim": (0,)})
        total.layout = total.layout or Layout(layout.shape[1:], layout.dtype)
        return total

    def divided(self, total: Term, number: object) -> Term:
        quotient = self.forms.make("aten.div", {"self": total, "other": number})
        quotient.layout = quotient.layout or total.layout
        return quotient

    def of_linear(self, term: Term, total: Term) -> Term | None:
        """The form of what an op makes of a sum, where it makes the same of each summand."""
        shape, dtype = layout_of(self.forms, total).shape, layout_of(self.terms, term).dtype
        made = None
        match term.op:
            case op if op == RESHAPE:
                return total
            case op if op == PERMUTE and shape == shape_of(self.terms, term["self"]):
                return permuted(self.forms, total, term["dims"])
            # Not to whole numbers, which rounds each summand, nor of truth values, whose sum is none.
            case op if op == CAST and dtype.is_floating_point and not self._is_truth(total):
                made = self.forms.make("aten._to_copy", {"self": total, "dtype": term["dtype"]})
            case "lanes.all_reduce" if term["op"] == canonical("sum"):
                made = self.forms.plain(term.op, {**dict(term.arguments), "x": total})
        if made is not None and made.layout is None:
            made.layout = Layout(shape, dtype)
        return made

    def _is_truth(self, form: Term) -> bool:
        return layout_of(self.forms, form).dtype is torch.bool
