"""Where the identities on terms hold, and where a bit would change."""

from __future__ import annotations

import pytest
import torch

from fxpipe.certificate.programs.calls import keyed_term, op_term
from fxpipe.certificate.terms.identities import RULES
from fxpipe.certificate.terms.layouts import Unknown, layout_of
from fxpipe.certificate.terms.schemas import schema_of
from fxpipe.certificate.terms.sums import leaves
from fxpipe.certificate.terms.terms import Layout, Terms

aten = torch.ops.aten
FLOAT, WHOLE, COMPLEX = torch.float32, torch.int64, torch.complex64


def same(dtype, one, other):
    """Whether two functions of ``call`` and of two inputs give one term."""
    terms = Terms(RULES)

    def call(op, *args, **kwargs):
        schema = schema_of(op)
        return op_term(terms, schema, schema.bind(args, kwargs))

    x, y = (terms.input("batch", name, Layout((2, 3), dtype), True) for name in "xy")
    a, b = one(call, x, y), other(call, x, y)
    print(a.op, a.arguments, "and", b.op, b.arguments)  # shown where a test fails
    return a is b


@pytest.mark.parametrize(
    ("dtype", "made", "holds"),
    [
        (FLOAT, lambda call, x, y: call(aten.mul.Tensor, x, 1), True),
        (FLOAT, lambda call, x, y: call(aten.mul.Tensor, x, True), True),
        (COMPLEX, lambda call, x, y: call(aten.mul.Tensor, x, 1), False),  # infinities
        (WHOLE, lambda call, x, y: call(aten.mul.Tensor, x, 1.0), False),  # becomes a float
        (WHOLE, lambda call, x, y: call(aten.add.Tensor, x, 0), True),
        (FLOAT, lambda call, x, y: call(aten.add.Tensor, x, 0), False),  # -0.0
        (FLOAT, lambda call, x, y: call(aten.sub.Tensor, x, 0), True),
        (FLOAT, lambda call, x, y: call(aten.sub.Tensor, x, -0.0), False),
        (FLOAT, lambda call, x, y: call(aten.view.default, call(aten.view.default, x, [6]), [2, 3]), True),
        (FLOAT, lambda call, x, y: call(aten.t.default, call(aten.transpose.int, x, 0, -1)), True),
        (FLOAT, lambda call, x, y: call(aten.slice.Tensor, x, 1, 0, 9), True),
        (FLOAT, lambda call, x, y: call(aten.slice.Tensor, x, 1, 0, 2), False),
        (FLOAT, lambda call, x, y: call(aten._to_copy.default, x, dtype=FLOAT), True),
        (FLOAT, lambda call, x, y: call(aten.neg.default, call(aten.neg.default, x)), True),
        (FLOAT, lambda call, x, y: call(aten.select.int, call(aten.unsqueeze.default, x, 1), 1, 0), True),
        (FLOAT, lambda call, x, y: call(aten.sum.dim_IntList, call(aten.unsqueeze.default, x, 1), [1]), True),
        (FLOAT, lambda call, x, y: call(aten.sum.dim_IntList, x, [0], True), False),
        (
            FLOAT,
            lambda call, x, y: call(
                aten.sum.dim_IntList, call(aten.unsqueeze.default, x, 0), [0], dtype=torch.float64
            ),
            False,
        ),
        (
            FLOAT,
            lambda call, x, y: call(aten.select.int, call(aten.expand.default, x, [4, 2, 3]), 0, 3),
            True,
        ),
        (
            FLOAT,
            lambda call, x, y: call(
                aten.t.default, call(aten.squeeze.dim, call(aten.unfold.default, x, 0, 2, 1), 0)
            ),
            True,
        ),
        (FLOAT, lambda call, x, y: call(aten.view.default, call(aten.t.default, x), [2, 3]), False),
        (FLOAT, lambda call, x, y: call(aten.t.default, call(aten.view.default, x, [3, 2])), False),
        (
            FLOAT,
            lambda call, x, y: call(
                aten.select.int, call(aten.view.default, call(aten.t.default, x), [1, 2, 3]), 0, 0
            ),
            False,
        ),
        (
            COMPLEX,
            lambda call, x, y: call(aten.view_as_complex.default, call(aten.view_as_real.default, x)),
            True,
        ),
        (COMPLEX, lambda call, x, y: call(aten._conj.default, x), False),
    ],
)
def test_a_value_is_its_operand(dtype, made, holds):
    assert same(dtype, made, lambda call, x, y: x) is holds


def test_views_of_the_same_elements_are_one():
    """A row of ``x`` transposed is a column; a part of a reshape that copies is that of the copy."""

    def row(call, x, number):
        return call(aten.select.int, x, 0, number)

    def flat(call, x, *shape):
        return call(aten.view.default, call(aten.t.default, x), [*shape, 6])

    def column(call, x):
        return call(aten.select.int, call(aten.t.default, x), 1, 1)

    def square(call, x):
        return call(aten.slice.Tensor, x, 1, 0, 2)

    for one, other, holds in (
        (lambda call, x, y: square(call, x), lambda call, x, y: call(aten.t.default, square(call, x)), False),
        (lambda call, x, y: row(call, x, 1), lambda call, x, y: column(call, x), True),
        (lambda call, x, y: row(call, x, 1), lambda call, x, y: row(call, x, 0), False),
        (lambda call, x, y: row(call, x, 1), lambda call, x, y: row(call, y, 1), False),
        (lambda call, x, y: row(call, flat(call, x, 1), 0), lambda call, x, y: flat(call, x), True),
        (lambda call, x, y: flat(call, x), lambda call, x, y: call(aten.view.default, x, [6]), False),
    ):
        assert same(FLOAT, one, other) is holds


@pytest.mark.parametrize(("sizes", "whole"), [([2], True), ([2, 0], True), ([1, 1], False)])
def test_the_one_part_of_a_value_is_the_value(sizes, whole):
    terms, schema = Terms(RULES), schema_of(aten.split_with_sizes.default)
    x = terms.input("batch", "x", Layout((2, 3), FLOAT), True)
    assert (terms.item(op_term(terms, schema, schema.bind((x, sizes), {})), 0) is x) is whole


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda call, x: call(aten.transpose.int, x, 0, 3), "2 dimensions has no dimension 3"),
        (lambda call, x: call(aten.slice.Tensor, x, -3, 0, 9), "2 dimensions has no dimension -3"),
        (lambda call, x: call(aten.slice.Tensor, x, 0, 0, 9, 0), "no step 0"),
        (lambda call, x: call(aten.unsqueeze.default, x, 3), "no dimension 3"),
        (lambda call, x: call(aten.squeeze.dim, x, 2), "no dimension 2"),
        (lambda call, x: call(aten.permute.default, x, [0, 0]), "no order of 2 dimensions"),
        (lambda call, x: call(aten.view.default, call(aten.view.default, x, [5]), [2, 3]), "cannot be"),
        (lambda call, x: call(aten.expand.default, x, [4, 3]), "cannot be expanded"),
        (lambda call, x: call(aten.expand.default, x, [-1, 2, 3]), "cannot be expanded"),
    ],
)
def test_what_torch_refuses_has_no_term(made, said):
    with pytest.raises(Unknown, match=said):
        same(FLOAT, lambda call, x, y: made(call, x), lambda call, x, y: x)


@pytest.mark.parametrize(
    ("dtype", "op", "out", "holds"),
    [
        (FLOAT, aten.mul.Tensor, aten.mul.out, True),
        (COMPLEX, aten.mul.Tensor, aten.mul.out, False),  # one of its two products is not rounded
        (FLOAT, aten.sub.Tensor, aten.sub.out, False),
    ],
)
def test_operands_have_no_order_where_no_bit_depends_on_it(dtype, op, out, holds):
    exchanged = same(dtype, lambda call, x, y: call(op, x, y), lambda call, x, y: call(out, y, x, out=x))
    assert exchanged is holds


def test_a_factory_op_has_the_shape_that_it_is_given():
    """Its device is the name of a module of torch as well."""
    terms, schema = Terms(RULES), schema_of(aten.full.default)
    arguments = {"dtype": FLOAT, "device": torch.device("cpu"), "pin_memory": False}
    term = op_term(terms, schema, schema.bind(([2, 3], 0.5), arguments))
    assert layout_of(terms, term) == Layout((2, 3), FLOAT)


@pytest.mark.parametrize(
    ("op", "between", "back", "holds"),
    [
        (aten.bernoulli.p, torch.bool, FLOAT, True),
        (aten.bernoulli.p, torch.uint8, FLOAT, False),
        (aten.bernoulli.p, torch.bool, torch.float64, False),
        (aten.uniform.default, torch.bool, FLOAT, False),
    ],
)
def test_random_zeros_and_ones_are_what_their_truth_values_say(op, between, back, holds):
    terms = Terms(RULES)
    x = terms.input("batch", "x", Layout((2, 3), FLOAT), True)
    key, schema = terms.input("key", "key", Layout((), WHOLE), True), schema_of(op)
    given = [x, 0.5] if op is aten.bernoulli.p else [x]
    drawn = keyed_term(terms, key, 3, schema, schema.bind(given, {}))

    def cast(term, dtype):
        schema = schema_of(aten._to_copy.default)
        return op_term(terms, schema, schema.bind([term], {"dtype": dtype}))

    assert (cast(cast(drawn, between), back) is drawn) is holds


def test_a_weight_of_a_loop_may_have_more_summands_than_python_has_frames():
    terms, layout, total = Terms(RULES), Layout((4,), FLOAT), None
    parts = [terms.input("batch", f"part{k}", layout, True) for k in range(2000)]
    for part in parts:
        total = part if total is None else terms.make("aten.add", {"self": total, "other": part})
        total.layout = layout
    assert sorted(each.name for each in leaves(terms, total)) == sorted(part.name for part in parts)
