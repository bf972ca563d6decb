"""What values made for some rows are of the whole: the identities, as numbers, and edits of programs."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from word_losses import CASES, Words, compiled

import fxpipe
import fxpipe.runtime.program.lanes  # registers the ops between lanes
from fxpipe.certificate.check import check_artifact
from fxpipe.certificate.programs.calls import op_term
from fxpipe.certificate.terms.identities import RULES, reshaped
from fxpipe.certificate.terms.layouts import layout_of
from fxpipe.certificate.terms.parts import Part, Parts, Share
from fxpipe.certificate.terms.row_forms import MEAN, SUM, VALUE
from fxpipe.certificate.terms.schemas import schema_of
from fxpipe.certificate.terms.terms import INPUTS, NUMBER, Layout, Term, Terms

aten = torch.ops.aten
ROWS, BOUNDS = 15, (0, 5, 9, 15)
EACH = 0


def plain(argument: object) -> object:
    """An argument of a term as torch takes it."""
    match argument:
        case ("bool", value):
            return value
        case ("float", str(text)):
            return float.fromhex(text)
        case ("torch", str(text)):
            return getattr(torch, text.removeprefix("torch."), None)
        case tuple():
            return [*map(plain, argument)]
    return argument


class Numbers:
    """Terms of ops on inputs that have values: what ``call`` makes, ``value`` computes."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.terms = Terms(RULES)
        self.inputs = {
            "x": torch.randn(ROWS, 8, dtype=torch.float64),
            "y": torch.randn(ROWS, 8, dtype=torch.float64),
            "cube": torch.randn(3, 5, 8, dtype=torch.float64),
            "table": torch.randn(8, 6, dtype=torch.float64),
            "bias": torch.randn(6, dtype=torch.float64),
            "row": torch.randn(1, 8, dtype=torch.float64),
            "column": torch.randn(ROWS, 1, dtype=torch.float64),
            "half": torch.randn(1, 5, 8, dtype=torch.float64),
            "number": torch.randn((), dtype=torch.float64),
            "labels": torch.randint(8, (ROWS,)),
            "words": torch.randint(8, (ROWS, 2)),
        }
        for name, tensor in self.inputs.items():
            self.terms.input("batch", name, Layout(tuple(tensor.shape), tensor.dtype), True)
        self.captured()

    def captured(self) -> None:
        """What there is so far is the captured step."""
        self.terms.captured = len(self.terms.known)
        self.parts = Parts(self.terms)
        self.terms.whole = self.parts.whole

    def __getitem__(self, name: str) -> Term:
        return self.terms.input("batch", name, None, True)

    def call(self, op, *args, **kwargs) -> Term:
        schema = schema_of(op)
        return op_term(self.terms, schema, schema.bind(args, kwargs))

    def rows(self, x: Term | str, span: tuple[int, int], dim: int = 0) -> Term:
        return self.call(aten.slice.Tensor, self[x] if isinstance(x, str) else x, dim, *span)

    def value(self, term: Term) -> torch.Tensor:
        args = dict(term.arguments)
        if term.op in INPUTS:
            return self.inputs[term["name"]]
        if term.op == VALUE:
            return self.value(term["of"])
        if term.op == NUMBER:
            return torch.tensor(plain(term["s"]), dtype=term.layout.dtype)
        if term.op == "item":
            return self.value(term["of"])[term["index"]]
        args = {
            name: self.value(x) if isinstance(x, Term)
            else [self.value(each) for each in x] if name == "tensors"
            else plain(x)
            for name, x in args.items()
        }  # fmt: skip
        if term.op == "cast":
            return args["self"].to(args["dtype"])
        if term.op == "reshape":
            return args["self"].reshape(args["size"])
        if term.op == "permute":
            return args["self"].permute(args["dims"])
        if term.op == "aten.nll_loss_backward":
            args.setdefault("total_weight", torch.tensor(float("nan"), dtype=torch.float64))
        args.pop("device", None)
        return getattr(aten, term.op.removeprefix("aten."))(**args)


def nll(n: Numbers, s, reduction, item=0, labels="labels"):
    picked = n.call(aten.nll_loss_forward.default, logs(n, s), n.rows(labels, s), None, reduction, 3)
    return n.terms.item(picked, item)


def logs(n: Numbers, s):
    return n.call(aten._log_softmax.default, n.rows("x", s), 1, False)


def unpicked(n: Numbers, s, reduction, above="number"):
    above = n.rows(n.call(aten.sum.dim_IntList, n["y"], [1]), s) if reduction == EACH else n[above]
    args = logs(n, s), n.rows("labels", s), None, reduction, 3, n["number"]
    return n.call(aten.nll_loss_backward.default, above, *args)


def transposed(n: Numbers, x: Term):
    return n.call(aten.t.default, x)


#: What gives a part for a part, for the rows of a span.
OF_ROWS = {
    "elementwise": lambda n, s: n.call(aten.mul.Tensor, n.rows("x", s), n.rows("y", s)),
    "with a row": lambda n, s: n.call(aten.add.Tensor, n.rows("x", s), n["row"]),
    "with a column": lambda n, s: n.call(aten.sub.Tensor, n.rows("column", s), n.rows("x", s)),
    "with a number": lambda n, s: n.call(aten.div.Tensor, n.rows("x", s), n["number"]),
    "by a number": lambda n, s: n.call(aten.pow.Tensor_Scalar, n.rows("x", s), 2),
    "of another shape": lambda n, s: n.call(
        aten.add.Tensor, n.rows(n.call(aten.view.default, n["cube"], [ROWS, 8]), s), n.rows("x", s)
    ),
    "expanded": lambda n, s: n.call(
        aten.mul.Tensor, n.rows("x", s), n.call(aten.expand.default, n.rows("column", s), [s[1] - s[0], 8])
    ),
    "all alike": lambda n, s: n.call(
        aten.where.self,
        n.call(aten.gt.Scalar, n.rows("x", s), 0),
        n.call(aten.full.default, [s[1] - s[0], 8], 2.0, dtype=torch.float64),
        n.call(aten.expand.default, n["row"], [s[1] - s[0], 8]),
    ),
    "like": lambda n, s: n.call(
        aten.add.Tensor, n.rows("x", s), n.call(aten.ones_like.default, n.rows("y", s))
    ),
    "cast": lambda n, s: n.call(aten._to_copy.default, n.rows("x", s), dtype=torch.float32),
    "product": lambda n, s: n.call(aten.mm.default, n.rows("x", s), n["table"]),
    "with a bias": lambda n, s: n.call(aten.addmm.default, n["bias"], n.rows("x", s), n["table"]),
    "softmax": logs,
    "its gradient": lambda n, s: n.call(
        aten._log_softmax_backward_data.default, n.rows("y", s), logs(n, s), 1, torch.float64
    ),
    "largest": lambda n, s: n.call(aten.amax.default, n.rows("x", s), [-1], True),
    "place of it": lambda n, s: n.call(aten.argmax.default, n.rows("x", s), 1),
    "log of a sum": lambda n, s: n.call(aten.logsumexp.default, n.rows("x", s), [1]),
    "sum of words": lambda n, s: n.call(aten.sum.dim_IntList, n.rows("x", s), [1]),
    "some words": lambda n, s: n.rows(n.rows("x", s), (2, 6), 1),
    "gather": lambda n, s: n.call(aten.gather.default, n.rows("x", s), 1, n.rows("words", s)),
    "scatter": lambda n, s: n.call(
        aten.scatter_add.default, n.rows("y", s), 1, n.rows("words", s), n.rows(n.rows("x", s), (0, 2), 1)
    ),
    "losses": lambda n, s: nll(n, s, EACH),
    "gradient of losses": lambda n, s: unpicked(n, s, EACH),
    "gradient of a sum": lambda n, s: unpicked(n, s, SUM),
    "gradient of a mean by a count": lambda n, s: unpicked(n, s, MEAN),
    "as columns": lambda n, s: transposed(n, n.rows("x", s)),
    "of columns": lambda n, s: n.rows(transposed(n, n["x"]), s, 1),
    "of joined rows": lambda n, s: n.rows(
        n.call(aten.cat.default, [n.rows("x", s) for s in pairwise(BOUNDS)]), s
    ),
}  # fmt: skip
#: What gives a share of a sum over the rows.
OF_SUMS = {
    "product": lambda n, s: n.call(aten.mm.default, transposed(n, n.rows("x", s)), n.rows("y", s)),
    "product of columns": lambda n, s: n.call(
        aten.mm.default, n.rows(transposed(n, n["x"]), s, 1), n.rows("y", s)
    ),
    "with rows that are alike": lambda n, s: n.call(
        aten.mm.default,
        transposed(n, n.rows("x", s)),
        n.call(aten.full.default, [s[1] - s[0], 2], 1.0, dtype=torch.float64),
    ),
    "transposed": lambda n, s: transposed(n, OF_SUMS["product"](n, s)),
    "sum": lambda n, s: n.call(aten.sum.default, n.rows("x", s)),
    "sum of rows": lambda n, s: n.call(aten.sum.dim_IntList, n.rows("x", s), [0], True),
    "sum of all": lambda n, s: n.call(aten.sum.dim_IntList, n.rows("x", s), [1, 0]),
    "in another dtype": lambda n, s: n.call(aten.sum.default, n.rows("x", s), dtype=torch.float32),
    "cast": lambda n, s: n.call(aten._to_copy.default, OF_SUMS["product"](n, s), dtype=torch.float32),
    "a share of a sum of cubes": lambda n, s: n.call(
        aten.sum.default, n.rows(n.call(aten.view.default, n["cube"], [ROWS, 8]), s)
    ),
    "loss": lambda n, s: nll(n, s, SUM),
    "count of labels": lambda n, s: nll(n, s, SUM, 1),
}


@pytest.mark.parametrize("name", OF_ROWS)
def test_an_op_on_rows_gives_rows_of_the_whole(name):
    n = Numbers()
    for span in (*pairwise(BOUNDS), (3, 4)):
        term = OF_ROWS[name](n, span)
        part = n.parts.of(term)
        assert isinstance(part, Part)
        assert (part.rows, part.begin, part.end) == (ROWS, *span)
        rows = n.value(part.form)[part.begin : part.end]
        torch.testing.assert_close(rows.t() if part.is_transposed else rows, n.value(term))


def test_rows_of_a_part_are_rows_of_the_whole():
    n = Numbers()
    part = n.parts.of(n.rows(n.rows("x", (5, 9)), (1, 3)))
    assert (part.begin, part.end) == (6, 8)


@pytest.mark.parametrize("name", OF_SUMS)
def test_sums_of_rows_are_shares_of_the_sum(name):
    n = Numbers()
    terms = [OF_SUMS[name](n, span) for span in pairwise(BOUNDS)]
    shares = [n.parts.of(term) for term in terms]
    assert [share.spans for share in shares] == [(span,) for span in pairwise(BOUNDS)]
    assert len({share.form for share in shares}) == 1
    total = sum(map(n.value, terms))
    torch.testing.assert_close(n.value(shares[0].form).reshape(total.shape), total)
    added = n.call(aten.add.Tensor, n.call(aten.add.Tensor, terms[2], terms[0]), terms[1])
    assert n.parts.of(added) == Share(shares[0].form, ROWS, ((0, ROWS),))


#: What is neither rows nor a share, for each of the rows 0 … 5, 5 … 9 and 9 … 15.
NEITHER = {
    "other rows": lambda n, s: n.call(aten.add.Tensor, n.rows("x", s), n.rows("y", (s[0] - 1, s[1] - 1))),
    "columns beside rows": lambda n, s: n.call(
        aten.mm.default, transposed(n, n.rows("x", s)), n.rows("y", (s[0] - 1, s[1] - 1))
    ),
    "columns in the place of rows": lambda n, s: n.call(
        aten.add.Tensor, transposed(n, square(n, "x", s)), square(n, "y", s)
    ),
    "behind another dimension": lambda n, s: n.call(aten.expand.default, n.rows("x", s), [2, s[1] - s[0], 8]),
    "below other rows": lambda n, s: n.call(
        aten.add.Tensor, n.rows("x", s), n.call(aten.ones.default, [2, s[1] - s[0], 8])
    ),
    "along the rows": lambda n, s: n.call(aten._softmax.default, n.rows("x", s), 0, False),
    "largest of the rows": lambda n, s: n.call(aten.amax.default, n.rows("x", s), [0]),
    "a maximum of all": lambda n, s: n.call(aten.max.default, n.rows("x", s)),
    "transposed behind another shape": lambda n, s: transposed(
        n,
        n.call(
            torch.ops.lanes.all_reduce.default, n.call(aten.reshape.default, tall(n, s), [6, 8]), "sum", 2
        ),
    ),
    "labels of other rows": lambda n, s: n.terms.item(
        n.call(
            aten.nll_loss_forward.default, logs(n, s), n.rows("labels", (s[0] - 1, s[1] - 1)), None, SUM, 3
        ),
        0,
    ),
    "a mean loss": lambda n, s: nll(n, s, MEAN),
    "sorted": lambda n, s: n.terms.item(n.call(aten.sort.default, n.rows("x", s), 0), 0),
    "every second row": lambda n, s: n.call(aten.slice.Tensor, n["x"], 0, *s, 2),
    "a square": lambda n, s: n.call(aten.square.default, OF_SUMS["sum"](n, s)),
    "whole numbers of a sum": lambda n, s: n.call(
        aten._to_copy.default, OF_SUMS["sum"](n, s), dtype=torch.int64
    ),
    "two shares": lambda n, s: n.call(aten.add.Tensor, OF_SUMS["sum"](n, s), OF_SUMS["loss"](n, s)),
    "a share twice": lambda n, s: n.call(aten.add.Tensor, *[OF_SUMS["sum"](n, s)] * 2),
    "a product with a share": lambda n, s: n.call(
        aten.mm.default, n["row"], n.call(aten.mm.default, transposed(n, n.rows("x", s)), n.rows("y", s))
    ),
}


def square(n, x, s):
    """As many words as rows."""
    return n.rows(n.rows(x, s), (0, s[1] - s[0]), 1)


def tall(n, s):
    """A share of 8 x 6 numbers."""
    return n.call(aten.mm.default, transposed(n, n.rows("x", s)), n.rows(n.rows("y", s), (0, 6), 1))


@pytest.mark.parametrize("name", NEITHER)
def test_what_mixes_rows_is_no_part(name):
    n = Numbers()
    assert [n.parts.of(NEITHER[name](n, span)) for span in ((5, 9), (9, 14))] == [None, None]


#: Values of the captured step, and how parts of one are made.
WHOLES = {
    "scaled": (
        lambda n: n.call(aten.div.Tensor, n["cube"], 0.7),
        lambda n, s: n.call(aten.div.Tensor, cube(n, s), 0.7),
    ),
    "broadcast": (
        lambda n: n.call(aten.mul.Tensor, n["cube"], n["half"]),
        lambda n, s: n.call(
            aten.mul.Tensor,
            cube(n, s),
            n.rows(flat(n, n.call(aten.expand.default, n["half"], [3, 5, 8])), s),
        ),
    ),
    "softmax": (
        lambda n: n.call(aten._log_softmax.default, n["cube"], -1, False),
        lambda n, s: n.call(aten._log_softmax.default, cube(n, s), 1, False),
    ),
    "mean": (
        lambda n: n.call(aten.mean.default, n["cube"]),
        lambda n, s: n.call(aten.sum.default, cube(n, s)),
    ),
    "sum": (
        lambda n: n.call(aten.sum.dim_IntList, n["cube"], [0, 1], True),
        lambda n, s: n.call(aten.sum.dim_IntList, cube(n, s), [0]),
    ),
    "gradient": (
        lambda n: n.call(
            aten.mm.default, transposed(n, flat(n, n.call(aten.exp.default, n["cube"]))), n["x"]
        ),
        lambda n, s: n.call(
            aten.mm.default, transposed(n, n.call(aten.exp.default, cube(n, s))), n.rows("x", s)
        ),
    ),
}


def flat(n, x):
    return n.call(aten.reshape.default, x, [ROWS, 8])


def cube(n, s):
    return n.rows(flat(n, n["cube"]), s)


def joined(n: Numbers, name: str, parts: list[Term]) -> Term:
    if n.terms.known and name in ("scaled", "broadcast", "softmax"):
        return n.call(aten.cat.default, parts)
    total = parts[0]
    for part in parts[1:]:
        total = n.call(aten.add.Tensor, total, part)
    return n.call(aten.div.Scalar, total, ROWS * 8) if name == "mean" else total


SPANS = (*pairwise(BOUNDS),)
WRONG = {
    "a part is missing": SPANS[:2],
    "a part is there twice": (*SPANS, SPANS[2]),
    "a part is there in the place of another": (SPANS[0], (0, 4), SPANS[2]),
    "a part begins a row early": (SPANS[0], (4, 9), SPANS[2]),
    "a row is missing": (SPANS[0], (6, 9), SPANS[2]),
}


@pytest.mark.parametrize("name", WHOLES)
def test_all_parts_are_a_value_of_the_captured_step(name):
    """It has three rows of five, and the parts are of fifteen."""
    whole, part = WHOLES[name]
    n = Numbers()
    expected = whole(n)
    n.captured()

    def made(spans):
        return joined(n, name, [part(n, span) for span in spans])

    shape = layout_of(n.terms, made(SPANS)).shape
    assert made(SPANS) is reshaped(n.terms, expected, shape)
    for spans in WRONG.values():
        assert made(spans).number >= n.terms.captured
    backwards = made(SPANS[::-1])
    if name in ("scaled", "broadcast", "softmax"):
        assert backwards.number >= n.terms.captured
    else:
        assert backwards is made(SPANS)


def test_a_mean_of_means_is_no_mean():
    n = Numbers()
    n.call(aten.mean.default, n["cube"])
    n.captured()
    for spans in (SPANS, ((0, 5), (5, 10), (10, 15))):
        means = [n.call(aten.mean.default, cube(n, span)) for span in spans]
        total = joined(n, "", means)
        assert min(total.number, n.call(aten.div.Scalar, total, 3).number) >= n.terms.captured
        assert joined(n, "mean", means).number >= n.terms.captured


# -- programs ---------------------------------------------------------------------------------------------


@cache
def pipeline(name: str, **options: object) -> fxpipe.Pipeline:
    """Its rank 1 has the head, whose 15 tokens are 3 parts."""
    arguments, loss = CASES[name]
    return compiled(Words(**arguments), loss, check=False, **options)


@pytest.mark.variation
@pytest.mark.parametrize(
    ("name", "barriers"),
    [
        ("sum and count", False),
        pytest.param("z-loss", "1-barrier", marks=pytest.mark.variation),
        ("smoothed", "2-barrier"),
    ],
)
def test_parts_of_a_single_token_are_the_captured_step(name, barriers):
    """14 parts of 15 tokens.  ``compile`` checks larger ones in tests/vocabulary/test_chunks.py."""
    certificate = pipeline(name, chunks=14, vocab_parallel=barriers).check()
    assert (certificate.problems, certificate.otherwise) == ((), ())
    assert "Output layers are computed in 14 parts of the tokens" in str(certificate)


def test_what_a_model_computes_in_two_shapes_is_one_value():
    def twice(logits, batch):
        flat = torch.tanh(logits.reshape(-1, logits.shape[-1]))
        smoothed = F.cross_entropy(flat, batch["labels"].reshape(-1), label_smoothing=0.1)
        of_all = torch.logsumexp(logits, -1).square()
        return CASES["plain"][1](torch.tanh(logits), batch) + smoothed + of_all.mean() + of_all.sum()

    assert compiled(Words(), twice).check().holds


#: A name, what is edited, and into what; what is told, without its line.
EDITS = {
    "a part of the gradient is missing": (
        "plain",
        r"addmm_\(grads\[\"head.weight\"\], (.*), head_slice_1\)",
        "pass",
        "the gradient of head.weight has the rows 5 … 9 of d_head_weight of microbatches 0, 1, 2, 3 0 times",
    ),
    "a part of the gradient is added twice": (
        "plain",
        r"(addmm_\(grads\[\"head.weight\"\], (.*), head_slice_1\))",
        r"\1; \1",
        "the gradient of head.weight has the rows 5 … 9 of d_head_weight of microbatches 0, 1, 2, 3 2 times",
    ),
    "a part of the gradient in another shape": (
        "plain",
        r"addmm_\(grads\[\"head.weight\"\], (.*), head_slice_1\)",
        r"torch.ops.aten.add_.Tensor(grads['head.weight'], reshape(mm(\1, head_slice_1), [8, 50]))",
        "computes reshape(",
    ),
    "a part of the gradient is added to another": (
        "plain",
        r"(addmm_\(grads\[\")head.weight(\"\], .*, head_slice_1\))",
        r"\1table.weight\2",
        "the gradient of table.weight has mm(",
    ),
    "a part begins a row early": (
        "plain",
        r"(head_slice_1 = slice\(head_view, 0), 5, 10",
        r"\1, 4, 9",
        "computes nll_loss_forward(",
    ),
    "the labels of another part": (
        "plain",
        r"(model_slice_\d = slice\(model_view_2, 0), 5, 10",
        r"\1, 0, 5",
        "computes nll_loss_backward(",
    ),
    "parts in another order": (
        "plain",
        r"cat\(\[(\w+), (\w+), (\w+)\]\)",
        r"cat([\2, \1, \3])",
        "computes cat(",
    ),
    "a part twice in the input gradient": (
        "plain",
        r"cat\(\[(\w+), (\w+), (\w+)\]\)",
        r"cat([\1, \1, \3])",
        "computes cat(",
    ),
    "a part's loss twice": (
        "plain",
        r"(model_output = add_out\(model_add_4), model_getitem_2",
        r"\1, model_getitem",
        "computes add(",
    ),
    "a mean of a part": (
        "plain",
        r"(model_getitem_1, _ = nll_loss_forward\(.*), 2, -100\)",
        r"\1, 1, -100)",
        "computes nll_loss_forward(",
    ),
    "the count of a part": (
        "plain",
        r"(model_getitem_1, )_( = nll(?s:.*?)nll_loss_backward\((?s:.*?))once\[.*\]",
        r"\1counted\2counted",
        "computes nll_loss_forward(",
    ),
    "another scale of a part": (
        "capped",
        r"(bwd_model_mul_1 = mul_out\(\w+), 3.0",
        r"\1, 2.0",
        "computes mul(",
    ),
    "another temperature of a part": (
        "scaled in float32",
        r"(model_div_3 = div_out\(\w+), 0.7",
        r"\1, 0.8",
        "computes div(",
    ),
    "a part without its z-loss": (
        "z-loss",
        r"bwd_head_add_1 = add_out\(\n* *(\w+), (\w+), .*\)",
        r"bwd_head_add_1 = \2",
        "in parts, which the captured step does not have",
    ),
    "a part without its smoothing": (
        "smoothed",
        r"bwd_model_add_1 = add_out\(\n* *(\w+), (\w+), .*\)",
        r"bwd_model_add_1 = \2",
        "computes _log_softmax_backward_data(",
    ),
    "other weights of tokens": (
        "weighted",
        r"(slice\(model_add_4, 0), 5, 10",
        r"\1, 10, 15",
        "computes mul(",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_a_part_is_told(edit):
    name, pattern, by, says = EDITS[edit]
    artifact = pipeline(name, ranks=1).artifact
    text, count = re.subn(pattern, by, *artifact.programs, count=1)
    assert count == 1
    certificate = check_artifact(replace(artifact, programs=(text,)))
    print(certificate)
    assert any(says in problem.text for problem in certificate.problems)


def test_parts_are_looked_for_where_the_plan_has_them():
    """Elsewhere the certificate holds bit for bit."""
    artifact = pipeline("plain").artifact
    certificate = check_artifact(replace(artifact, plan=replace(artifact.plan, head_chunks=1)))
    assert not certificate.holds
