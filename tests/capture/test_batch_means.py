"""The loss of a batch whose microbatches have different counts of labels: that of plain torch on the whole
batch, in float64."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.capture.rules import loss_tail
from fxpipe.capture.trace import capture
from fxpipe.errors import BatchError
from fxpipe.ir.nodes import input_nodes
from fxpipe.ir.storage import call_nodes

ROWS, LENGTH, WORDS, WIDTH = 2, 5, 12, 8
Loss = Callable[[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]], torch.Tensor]


class Model(nn.Module):
    """Two stages, and a loss of the logits [rows, length, words], the labels, and more: the layer before, and
    weights of words."""

    def __init__(self, loss: Loss):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.hidden, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("weight", torch.rand(WORDS))
        self.loss = loss

    def forward(self, x, y):
        h = torch.tanh(self.hidden(self.embed(x)))
        return self.loss(self.head(h), y, (h, self.weight))


def per_token(logits, y):
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)


def mean(logits, y, more):
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def shifted(logits, y, more):
    labels = F.pad(y, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.float().view(-1, WORDS), labels.view(-1), reduction="mean")


def of_dims(logits, y, more):  # nll_loss2d
    return F.cross_entropy(logits.transpose(1, 2), y)


def smoothed(logits, y, more):
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), label_smoothing=0.1)


def masked(logits, y, more):
    mask = y != -100
    return (per_token(logits, y) * mask).sum() / mask.sum()


def guarded(logits, y, more):
    mask = (y != -100).to(logits.dtype)
    return (per_token(logits, y) * mask).sum() / mask.sum().clamp(min=1)


def epsilon(logits, y, more):
    mask = (y != -100).to(logits.dtype)
    return -(per_token(logits, y) * mask).sum() / (mask.sum() + 1e-8) * 0.5


def few(logits, y, more):
    """Weights whose sum over the batch is below the least divisor."""
    weights = (y != -100).to(logits.dtype) * 0.01
    return (per_token(logits, y) * weights).sum() / weights.sum().clamp(min=1)


def few_of_a_mean(logits, y, more):
    weights = (y != -100).to(logits.dtype) * 0.01
    return (per_token(logits, y) * weights).mean() / torch.maximum(weights.mean(), torch.tensor(0.5))


def few_at_a_place(logits, y, more):
    mask = (y != -100).to(logits.dtype)
    return ((per_token(logits, y) * mask).sum(0) / mask.sum(0).clamp(min=3)).mean()


def plus_one(logits, y, more):
    mask = y != -100
    return (per_token(logits, y) * mask).sum() / (mask.sum() + 1)


def within_bounds(logits, y, more):
    mask = (y != -100).to(logits.dtype)
    return (per_token(logits, y) * mask).sum() * (mask.sum() * 2).clamp(5, 20).reciprocal()


def of_two_counts(logits, y, more):
    mask = (y != -100).to(logits.dtype)
    return (per_token(logits, y) * mask).sum() / ((mask.sum() + 1e-3) + (y % 2 == 0).sum().clamp(min=30))


def unless_none(logits, y, more):
    mask = (y != -100).to(logits.dtype)
    return (per_token(logits, y) * mask).sum() / torch.where(mask.sum() > 0, mask.sum(), 1.0)


def normalized_mask(logits, y, more):
    mask = (y != -100).to(logits.dtype)
    return (per_token(logits, y) * (mask / mask.sum())).sum()


def means(logits, y, more):
    mask = (y != -100).to(logits.dtype)
    return (per_token(logits, y) * mask).mean() / mask.mean()


def with_others(logits, y, more):
    """Each term has its own count, or equal ones."""
    even = y % 2 == 0
    other = (more[0].square().mean(-1) * even).sum() / even.sum()
    return (
        mean(logits, y, more) + 0.3 * other + 0.1 * more[0].square().mean() - 0.2 * shifted(logits, y, more)
    )


def not_nan(logits, y, more):
    return torch.nan_to_num(mean(logits, y, more))


def stacked(logits, y, more):
    return torch.stack([mean(logits, y, more), more[0].square().mean()]).sum()


def of_sequences(logits, y, more):
    """A mean of rows, each of its own mean."""
    mask = (y != -100).to(logits.dtype)
    return ((per_token(logits, y) * mask).sum(1) / (mask.sum(1) + 1)).mean()


def weighted_errors(logits, y, more):
    """Torch loses the weight where a mode sees its functions."""
    weights = (y[..., None] != -100).to(logits.dtype) * more[1]
    return F.l1_loss(logits, torch.ones_like(logits), weight=weights)


def even(logits, y, more):
    return more[0].square().mean() + logits.logsumexp(-1).mean()


def weighted(logits, y, more):
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), weight=more[1])


LOSSES = [
    mean, shifted, of_dims, smoothed, weighted, masked, guarded, epsilon, few, few_of_a_mean, few_at_a_place,
    plus_one, within_bounds, of_two_counts, unless_none, normalized_mask, means, with_others, stacked,
    not_nan, of_sequences, weighted_errors, even,
]  # fmt: skip


def batch_of(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows have different numbers of labels, and the last two have none."""
    x, y = torch.randint(WORDS, (rows, LENGTH)), torch.randint(WORDS, (rows, LENGTH))
    for row in range(rows):
        y[row, : row % LENGTH] = -100
    y[-ROWS:] = -100
    return x, y


def compared(model: nn.Module, batch: Any, microbatches: int = 3, **options: Any) -> fxpipe.Pipeline:
    """The pipeline; its loss and gradients are those of the model on the whole batch."""
    example = tuple(t[: len(batch[0]) // options.get("replicas", 1) // microbatches] for t in batch)
    options = {"ranks": 2, "schedule": "zb-h1", "split_points": ["head"]} | options
    pipe = fxpipe.compile(model, example, microbatches=microbatches, **options)
    found = pipe.run_local(batch)
    model.zero_grad()
    loss = model(*batch)
    loss.backward()
    torch.testing.assert_close(found.loss, loss.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.grads[name], parameter.grad, msg=lambda text, n=name: f"{n}: {text}")
    return pipe


@pytest.mark.filterwarnings("error:The loss")
@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_loss_is_that_of_the_whole_batch(loss):
    torch.manual_seed(0)
    compared(Model(loss).double(), batch_of(6))


def test_a_divisor_of_many_ops_on_a_number_of_the_batch():
    """Each of them on the two before: as many ways lead to the number as a Fibonacci number says."""

    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, count):
            before = count
            for _ in range(60):
                before, count = count, count + before * 0.1
            return self.layer(x).square().sum() / count

    example = torch.randn(ROWS, WIDTH), torch.tensor(12.0)
    step = capture(Counted(), example, None, 0.5, torch.device("cpu"))
    assert step.means.totals


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch has it since 2.13")
@pytest.mark.filterwarnings("error:The loss")
def test_a_head_in_chunks_of_torch():
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

    class Chunked(Model):
        def forward(self, x, y):
            h, options = (
                torch.tanh(self.hidden(self.embed(x))).flatten(0, 1),
                LinearCrossEntropyOptions(batch_chunk_size=2),
            )
            loss = F.linear_cross_entropy(h, self.head.weight, y.flatten(), options=options)
            each = F.linear_cross_entropy(
                h, self.head.weight, y.flatten(), reduction="none", ignore_index=-100, options=options
            )
            return loss + each.square().mean()

    torch.manual_seed(0)
    compared(Chunked(None).double(), batch_of(6), split_points=["hidden"])


class Named(Model):
    """Gives the layer before as well, and a number of each microbatch."""

    def forward(self, x, y):
        h = torch.tanh(self.hidden(self.embed(x)))
        return {"loss": self.loss(self.head(h), y, (h, self.weight)), "h": h, "words": (y >= 0).sum()}


def test_evaluation_takes_a_short_batch():
    """Of whole microbatches, of rows that fill one when they are repeated, and some for two steps."""
    torch.manual_seed(0)
    model, outputs = Named(with_others).double(), ["h", "words"]
    example = tuple(t[:4] for t in batch_of(8))
    pipe = fxpipe.compile(
        model, example, ranks=1, microbatches=2, schedule="1f1b", outputs=outputs, evaluation=True
    )
    for rows in (8, 4, 6, 1, 7):
        batch = tuple(t[:rows] for t in batch_of(9))
        with torch.no_grad():
            expected = model(*batch)
        found = pipe.evaluate(batch, outputs=["h"])
        torch.testing.assert_close(found.loss, expected["loss"])
        torch.testing.assert_close(found.outputs["h"], expected["h"])
        torch.testing.assert_close(pipe.evaluate(batch), expected["loss"])
    assert pipe.evaluate(tuple(t[:4] for t in batch), outputs=["words"]).outputs["words"].shape == (1,)
    with pytest.raises(BatchError, match="'words' is of a microbatch, and 7 rows make no whole number"):
        pipe.evaluate(batch, outputs=["words"])
    with pytest.raises(
        BatchError, match=r"labels of -100, a mask of zeros\); pipe.evaluate takes it as it is"
    ):
        pipe.step(batch)


def test_explain_names_the_divisors(capsys):
    def longest(logits, y, more):
        return per_token(logits, y).sum() / (y >= 0).sum(1).max()

    example = tuple(t[:ROWS] for t in batch_of(6))
    options = {"ranks": 1, "microbatches": 3, "schedule": "1f1b"}
    fxpipe.compile(Model(masked), example, **options).explain()
    assert re.search(
        r"divide by their share of the batch's model_sum_1 \(test_batch_means.py:\d+\)",
        capsys.readouterr().out,
    )
    with pytest.warns(UserWarning, match="of which fxpipe cannot take the whole batch's"):
        fxpipe.compile(Model(longest), example, **options).explain()
    assert "The loss of each microbatch is by its own" in capsys.readouterr().out


def flooded(logits, y, more):
    return (mean(logits, y, more) - 0.1).abs() + 0.1


def focal(logits, y, more):
    return (1 - torch.exp(-mean(logits, y, more))) ** 2


def root(logits, y, more):
    return (more[0] - 1).square().mean().sqrt()


def norm(logits, y, more):
    return (more[0] - 1).norm()


def without_nan(logits, y, more):
    return torch.nanmean(torch.where(y[..., None] < 0, torch.nan, more[0]).square())


def balanced(logits, y, more):
    share = logits.softmax(-1).flatten(0, 1).mean(0)
    return mean(logits, y, more) + (share * share.log()).sum()


def centered(logits, y, more):
    return (more[0] - more[0].mean(0)).square().mean()


def advantages(logits, y, more):
    values = y.to(logits.dtype)
    return (logits[..., 0] * (values - values.mean())).mean()


def hardest(logits, y, more):
    return per_token(logits, y).mean(1).topk(1).values.mean()


def relative(logits, y, more):
    losses = per_token(logits, y).mean(1)
    return (losses.detach().softmax(0) * losses).sum()


def running(logits, y, more):
    return per_token(logits, y).mean(1).cumsum(0).mean()


def mirrored(logits, y, more):
    return F.cross_entropy(logits.flatten(0, 1), y.flip(0).clamp(min=0).flatten())


def geometric(logits, y, more):
    return (mean(logits, y, more) * more[0].square().mean()).sqrt()


def smooth_largest(logits, y, more):
    return torch.stack([mean(logits, y, more), more[0].square().mean()]).logsumexp(0)


def weights_of_two(logits, y, more):
    losses = torch.stack([mean(logits, y, more), more[0].square().mean()])
    return (losses.detach().softmax(0) * losses).sum()


def by_frequency(logits, y, more):
    """Cross-entropy with the weights of the batch's classes."""
    labels = y.clamp(min=0)
    counts = F.one_hot(labels.flatten(), logits.shape[-1]).sum(0)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=1 / (counts + 1).to(logits.dtype))


def positives(logits, y, more):
    wanted = (y > 2).to(logits.dtype)
    share = wanted.mean(0)
    return F.binary_cross_entropy_with_logits(logits[..., 0], wanted, pos_weight=(1 - share) / (share + 1))


def balanced_by_turns(logits, y, more):
    """The product of two numbers of each class."""
    shares = logits.softmax(-1).flatten(0, 1)
    chosen = shares.argmax(-1)
    terms = [(chosen == i).to(shares.dtype).mean() * shares[:, i].mean() for i in range(3)]
    return mean(logits, y, more) + sum(terms)


def error_of_each_feature(logits, y, more):
    wanted = F.one_hot(y.clamp(min=0), WORDS).to(logits.dtype)
    return (logits - wanted).square().flatten(0, 1).mean(0).sqrt().mean()


def dice(logits, y, more):
    """Of each class."""
    shares = logits.softmax(-1).flatten(0, 1)
    wanted = F.one_hot(y.clamp(min=0), WORDS).to(logits.dtype).flatten(0, 1)
    return 1 - (2 * (shares * wanted).sum(0) / (shares.sum(0) + wanted.sum(0) + 1)).mean()


def with_prior(logits, y, more):
    counts = torch.bincount(y.clamp(min=0).flatten(), minlength=WORDS)
    return mean(logits + (counts + 1).log(), y, more)


def correlation(logits, y, more):
    return torch.corrcoef(torch.stack([more[0][:, 0, 0], y[:, 0].to(logits.dtype)]))[0, 1]


def distance(logits, y, more):
    return torch.dist(more[0], torch.zeros_like(more[0]))


def relativistic(logits, y, more):
    return F.softplus(logits[..., 0] - more[0].mean()).mean()


def halves(logits, y, more):
    """Labels for the first half, and another loss of the others."""
    half = len(y) // 2
    return per_token(logits[:half], y[:half]).mean() + logits[half:].softmax(-1).square().mean()


def one_of_all(logits, y, more):
    return mean(logits, y, more) + more[0][-1].square().mean()


def views(logits, y, more):
    """As where the loop puts two views of each picture into one batch."""
    one, other = more[0].mean(1).chunk(2)
    return -(one * other).sum(-1).mean()


def over_the_rows(logits, y, more):
    """Attention along the leading dimension, as if it were that of the words."""
    h = more[0].transpose(0, 1)
    return F.scaled_dot_product_attention(h, h, h).square().mean()


def graph(logits, y, more):
    h = more[0].mean(1)
    return ((h @ h.T).softmax(-1) @ h).square().mean()


def recurrent(logits, y, more):
    state = torch.zeros_like(more[0][0])
    for row in more[0]:
        state = torch.tanh(state + row)
    return state.square().mean()


def convolved(logits, y, more):
    return F.conv1d(more[0][..., 0].T[None], torch.ones(1, LENGTH, 2)).square().mean()


def pairs(logits, y, more):
    h = more[0].mean(1)
    return (h @ h.T).square().mean()


def regression_of_ranks(logits, y, more):
    """Weights by the order of the rows."""
    return (per_token(logits, y).mean(1) * torch.linspace(0, 1, len(y))).mean()


def groups(logits, y, more):
    """The mean of each group of rows, by the numbers of the groups."""
    of_rows, number = per_token(logits, y).mean(1), y[:, -1].clamp(min=0)
    sums = torch.zeros(WORDS, dtype=logits.dtype).index_add(0, number, of_rows)
    return (of_rows / (1 + sums[number].detach())).mean()


def another_order(logits, y, more):
    return (more[0][torch.tensor([1, 0])] * more[0]).mean()


def added_to_each(logits, y, more):
    """A mean of what all rows get as well."""
    return (per_token(logits, y).mean(1) + 0.1 * more[0].square().mean()).mean()


def own_word(logits, y, more):
    """Of each row the one that it names itself."""
    place = y.clamp(min=0).argmax(1)
    h = more[0][torch.arange(len(y)), place]
    one_hot = torch.zeros_like(logits[:, 0]).scatter(1, place[:, None], 1.0)
    return h.square().mean() + (one_hot * logits[:, 1]).mean()


def own_pairs(logits, y, more):
    """Of the products of all rows those of each with itself."""
    h = more[0].mean(1)
    return (h @ h.T).diagonal().mean()


def each_row(logits, y, more):
    return sum(
        per_token(row[None], labels[None]).mean() for row, labels in zip(logits, y, strict=True)
    ) / len(y)


def pairs_of_neighbours(logits, y, more):
    scores = logits[:, 0, 0]
    return -F.logsigmoid(scores[0::2] - scores[1::2]).mean()


def views_of_each(logits, y, more):
    """Both are made of the rows of a microbatch."""
    one, other = torch.cat([more[0], more[0].sin()]).flatten(1).chunk(2)
    return -F.cosine_similarity(one, other).mean()


def along_the_words(logits, y, more):
    """Attention and a recurrence along another dimension than that of the rows, which is the second."""
    h = more[0].transpose(0, 1)
    state = torch.zeros_like(h[0])
    for word in h:
        state = torch.tanh(state + word)
    h = F.scaled_dot_product_attention(more[0], more[0], more[0])
    return state.square().mean() + h.square().mean() + per_token(logits[:, :3].flip(1), y[:, 1:4]).mean()


OTHER_FUNCTIONS = {
    **{
        flooded: r"abs\(",
        focal: r"exp\(",
        root: r"sqrt\(",
        norm: r"linalg_vector_norm\(",
        without_nan: "by ",
    },
    **{advantages: r"sub\(", hardest: r"topk\(", relative: r"softmax\(", running: r"cumsum\("},
    **{mirrored: r"flip\(", geometric: r"mul\(", by_frequency: "the weights of labels"},
    **{smooth_largest: r"logsumexp\(", weights_of_two: r"softmax\("},
    **{positives: r"div\(", balanced: r"log\(", balanced_by_turns: r"mul\(", centered: r"sub\("},
    **{error_of_each_feature: r"sqrt\(", dice: r"div\(", with_prior: r"log\(", distance: r"dist\("},
    **{correlation: "", relativistic: r"sub\(", halves: r"slice\(", one_of_all: r"select\("},
    **{views: r"mul\(", over_the_rows: r"softmax\(|attention", graph: r"softmax\(", recurrent: r"select\("},
    **{convolved: r"convolution\(", pairs: r"mean\(", regression_of_ranks: r"mul\("},
    **{groups: r"gather\(|index\(", another_order: r"index\("},
}
SUMS_OVER_ROWS = [even, each_row, pairs_of_neighbours, views_of_each, along_the_words]
SUMS_OVER_ROWS += [added_to_each, own_word, own_pairs]


@pytest.mark.parametrize("loss", [*OTHER_FUNCTIONS, *SUMS_OVER_ROWS], ids=lambda f: f.__name__)
def test_other_functions_of_the_rows_are_told(loss):
    example = tuple(t[:ROWS] for t in batch_of(6))
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        plan = fxpipe.compile(
            Model(loss), example, ranks=1, microbatches=3, schedule="1f1b", check=False
        ).plan
    told = [str(x.message) for x in given if "the mean of their losses is another one" in str(x.message)]
    assert len(told) == (loss in OTHER_FUNCTIONS)
    assert bool(plan.own_means) == (loss not in SUMS_OVER_ROWS)
    if told:
        assert re.search(
            rf"{OTHER_FUNCTIONS[loss]}.* \(test_batch_means.py:\d+\), of which fxpipe cannot", told[0]
        )


def summed(logits, y, more):
    return 0.5 * F.mse_loss(more[0], torch.zeros_like(more[0]), reduction="sum")


def summed_labels(logits, y, more):
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") + mean(logits, y, more)


def by_a_product(logits, y, more):
    return torch.dot(more[0].flatten(), more[0].flatten()) + mean(logits, y, more)


def by_two_matrices(logits, y, more):
    return (torch.ones(len(y)) @ more[0][:, 0].square()).mean()


def of_another_number(logits, y, more):
    """As if divided by the rows of a batch of 14."""
    return per_token(logits, y).mean(1).sum() / 14


def by_rows(logits, y, more):
    return -per_token(logits, y).sum() / len(y) + more[0].square().sum() * (1 / y.numel())


@pytest.mark.parametrize("loss", [summed, summed_labels, of_another_number, by_a_product, by_two_matrices])
def test_a_sum_without_a_divisor_is_told(loss):
    """Its mean over microbatches is a part of the whole batch's sum."""
    example = tuple(t[:ROWS] for t in batch_of(6))
    options = {"ranks": 1, "schedule": "1f1b", "check": False}
    with pytest.warns(UserWarning, match=r"sum over rows that nothing divides .*\(test_batch_means.py:\d+\)"):
        fxpipe.compile(Model(loss), example, microbatches=3, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fxpipe.compile(Model(loss), example, microbatches=3, mean="microbatch", **options)
        fxpipe.compile(Model(loss), example, microbatches=1, **options)
        fxpipe.compile(Model(by_rows), example, microbatches=3, **options)


class InnerStep(nn.Module):
    """Updates its weights within the forward, by the rows that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x, y):
        h = self.first(x).tanh()
        slope, *_ = torch.autograd.grad(F.mse_loss(self.last(h), y), self.last.weight, create_graph=True)
        return F.mse_loss(F.linear(h, self.last.weight - 0.1 * slope, self.last.bias), y)


def test_an_update_within_the_forward_is_told():
    example = torch.ones(ROWS, WIDTH), torch.ones(ROWS, 1)
    with pytest.warns(UserWarning, match=r"takes addmm\(.*a number of all rows for each of them"):
        fxpipe.compile(InnerStep(), example, ranks=1, microbatches=3, schedule="1f1b", check=False)


def _slope(model, x, y, loss, reduction="mean"):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(loss(model(x), y, reduction=reduction), x, create_graph=True)[0]


def _labels(y):
    return y.argmax(-1)


#: What a forward computes with the gradient of its inputs -> whether that is another number in a microbatch.
OF_SLOPES = {
    "a step": (lambda m, x, y: m(x + _slope(m, x, y, F.mse_loss)).square().mean(), True),
    "a penalty": (lambda m, x, y: _slope(m, x, y, F.mse_loss).square().sum(1).mean(), True),
    "of a mean of outputs": (
        lambda m, x, y: (
            (torch.autograd.grad(m(x.requires_grad_()).mean(), x, create_graph=True)[0].norm(dim=1) - 1)
            .square()
            .mean()
        ),
        True,
    ),
    "of labels": (
        lambda m, x, y: m(x + _slope(m, x, _labels(y), F.cross_entropy)).square().mean(),
        True,
    ),
    "of a sum": (lambda m, x, y: m(x + _slope(m, x, y, F.mse_loss, "sum")).square().mean(), False),
    "of a sum of labels": (
        lambda m, x, y: m(x + _slope(m, x, _labels(y), F.cross_entropy, "sum")).square().mean(),
        False,
    ),
    "a sign": (
        lambda m, x, y: m(x + _slope(m, x, _labels(y), F.cross_entropy).sign()).square().mean(),
        False,
    ),
    "a direction": (
        lambda m, x, y: m(x + F.normalize(_slope(m, x, y, F.mse_loss))).square().mean(),
        False,
    ),
}


@pytest.mark.parametrize("name", OF_SLOPES)
def test_a_gradient_of_a_mean_within_the_forward_is_told(name):
    """If it is used as it is: its sign and its direction are the same in a microbatch and a batch."""
    function, is_told = OF_SLOPES[name]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(WIDTH, 3)

        def forward(self, x, y):
            return function(self.body, x, y)

    example = torch.randn(ROWS, WIDTH), torch.randn(ROWS, 3)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        fxpipe.compile(Net(), example, ranks=1, microbatches=3, schedule="1f1b", check=False)
    told = [x for x in given if "gradient of a mean over the rows" in str(x.message)]
    assert len(told) == is_told


class Changing(nn.Module):
    """A forward with a buffer that a function changes; ``reads``: whether the loss depends on it."""

    def __init__(self, start: torch.Tensor, change: Callable[..., torch.Tensor], reads: bool = True) -> None:
        super().__init__()
        self.layer, self.change, self.reads = nn.Linear(WIDTH, WIDTH), change, reads
        self.register_buffer("kept", start)

    def forward(self, x):
        h = self.layer(x)
        with torch.no_grad():
            self.kept.copy_(self.change(self.kept, h, self.layer))
        return (h + self.kept if self.reads else h).square().mean()


CALLS = torch.zeros(()), lambda kept, h, layer: kept + 1
AVERAGE = torch.zeros(WIDTH), lambda kept, h, layer: 0.9 * kept + 0.1 * layer.bias
CENTER = torch.zeros(WIDTH), lambda kept, h, layer: 0.9 * kept + 0.1 * h.mean(0)
HIDDEN = torch.zeros(ROWS, WIDTH), lambda kept, h, layer: (kept + h).tanh()
NEWEST = torch.zeros(ROWS, WIDTH), lambda kept, h, layer: h


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (lambda: Changing(*CALLS), "loss depends on kept .*, which the forward changes"),
        (lambda: Changing(*AVERAGE), "loss depends on kept .*, which the forward changes"),
        (lambda: Changing(*CENTER), "loss depends on kept .*, which the forward changes"),
        (lambda: Changing(*HIDDEN), "keeps a part for each row in kept"),
        (lambda: Changing(*NEWEST), ""),
        (lambda: Changing(*CALLS, reads=False), ""),
        (lambda: Changing(*HIDDEN, reads=False), ""),
        (
            lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Flatten(0), Mean()),
            r"takes _native_batch_norm\w*\(.*a number of all rows for each of them",
        ),
    ],
    ids=["calls", "average", "center", "hidden", "newest", "unread calls", "unread rows", "norm"],
)
def test_what_a_forward_of_the_whole_batch_changes_once_is_told(model, told):
    """If the loss depends on it; and what it keeps for each row."""
    options = {"ranks": 1, "schedule": "1f1b", "check": False}
    example = (torch.ones(ROWS, WIDTH),)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        fxpipe.compile(model(), example, microbatches=3, **options)
    texts = [str(x.message) for x in given if "microbatch" in str(x.message)]
    assert bool(texts) == bool(told)
    assert not told or any(re.search(told, text) for text in texts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fxpipe.compile(model(), example, microbatches=3, mean="microbatch", **options)
        fxpipe.compile(model(), example, microbatches=1, **options)


class Mean(nn.Module):
    def forward(self, x):
        return x.square().mean()


def test_gradients_by_frequency_are_told():
    """A word's is divided by how often the microbatch has it, not the batch."""
    model = Model(even)
    model.embed.scale_grad_by_freq = True
    with pytest.warns(UserWarning, match=r"embedding\(.*how often the rows have each word"):
        fxpipe.compile(model, tuple(t[:ROWS] for t in batch_of(6)), ranks=1, microbatches=3, schedule="1f1b")


def test_means_of_microbatches_are_an_option():
    torch.manual_seed(0)
    model, batch = Model(guarded).double(), batch_of(6)
    example = tuple(t[:ROWS] for t in batch)
    pipe = fxpipe.compile(model, example, ranks=2, microbatches=3, schedule="1f1b", mean="microbatch")
    parts = [model(*(t[m : m + ROWS] for t in batch)) for m in range(0, 6, ROWS)]
    torch.testing.assert_close(pipe.run_local(batch).loss, torch.stack(parts).mean().detach())
    with pytest.raises(fxpipe.FxpipeError, match="mean is 'rows' and must be 'batch' or 'microbatch'"):
        fxpipe.compile(model, example, ranks=2, microbatches=3, mean="rows")


@pytest.mark.parametrize("shard", [None, "parameters"])
def test_means_are_over_all_replicas(shard):
    torch.manual_seed(0)
    compared(Model(with_others).double(), batch_of(12), replicas=2, shard=shard)
    compared(Model(few).double(), batch_of(12), replicas=2, shard=shard)


@pytest.mark.parametrize("loss", [few, few_of_a_mean, plus_one], ids=lambda f: f.__name__)
def test_evaluation_of_a_short_batch_by_what_it_has(loss):
    """The numbers beside its counts stay, where it has fewer microbatches."""
    torch.manual_seed(0)
    model, batch = Model(loss).double(), batch_of(6)
    example = tuple(t[:ROWS] for t in batch)
    pipe = fxpipe.compile(model, example, ranks=1, microbatches=3, schedule="1f1b", evaluation=True)
    for rows in (6, 5, 4, 2):
        short = tuple(t[:rows] for t in batch)
        torch.testing.assert_close(pipe.evaluate(short), model(*short).detach())


@pytest.mark.parametrize("barriers", ["1-barrier", "2-barrier"])
def test_split_vocabulary(barriers):
    torch.manual_seed(0)
    compared(Model(masked).double(), batch_of(6), vocab_parallel=barriers, schedule="1f1b", split_points=None)


def test_the_count_is_no_place_to_cut():
    """As many stages as ops: those that count leave none empty, and a rank gets the labels that it counts."""
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(WORDS, WORDS), nn.Tanh())]
    model, y = nn.Sequential(*layers).double(), torch.tensor([3, -100, 1, 2, 0, -100, 5, 4])

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x, y):
            return F.cross_entropy(self.model(x), y)

    batch = torch.randn(8, WORDS, dtype=torch.float64), y
    compared(Whole(), batch, 4, stages_per_rank=4, schedule="interleaved", split_points=None)


class Counted(Model):
    """The loss of Hugging Face's models with the number of labels of the whole batch."""

    def forward(self, x, y, number):
        h = torch.tanh(self.hidden(self.embed(x)))
        losses = F.cross_entropy(self.head(h).flatten(0, 1), y.flatten(), reduction=self.loss[0])
        return self.loss[1](losses) / number + 0.1 * h.square().mean()


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (("sum", lambda x: x), {}),
        (("sum", lambda x: x), {"ranks": 2, "vocab_parallel": "1-barrier"}),
        (("none", torch.sum), {}),
        (("none", torch.mean), {}),
        (("sum", lambda x: x), {"number": float}),
    ],
    ids=["sum", "vocabulary", "sum of all", "mean", "no integer"],
)
def test_a_number_of_all_labels(loss, options):
    """A sum over rows has to be divided by each microbatch's share of it, a mean by all of it."""
    options, number = dict(options), options.get("number", int)
    options.pop("number", None)
    torch.manual_seed(0)
    model = Counted(loss).double()
    x, y = torch.randint(WORDS, (6, LENGTH)), torch.randint(WORDS, (6, LENGTH))
    y[0], y[3, 1:] = -100, -100
    batch = {"x": x, "y": y, "number": torch.tensor(number((y != -100).sum()))}
    expected = model(**batch)
    expected.backward()
    example = {name: value[:ROWS] if value.dim() else value for name, value in batch.items()}
    pipe = fxpipe.compile(model, example, **{"ranks": 1, **options}, microbatches=3, schedule="1f1b")
    result = pipe.run_local(batch)
    torch.testing.assert_close(result.loss, expected.detach(), rtol=1e-12, atol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(result.grads[name], parameter.grad, rtol=1e-9, atol=1e-12)
    assert bool(pipe.plan.batch_means) == (loss[1] is not torch.mean)


@pytest.mark.parametrize(
    "loss", [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.binary_cross_entropy_with_logits]
)
def test_a_sum_of_errors_by_a_number_of_all(loss):
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 3).double()
    batch = {"input": torch.randn(6, WIDTH).double(), "y": torch.rand(6, 3).double(), "n": torch.tensor(18)}
    few = {name: x[:ROWS] if x.dim() else x for name, x in batch.items()}

    def loss_fn(output, rows):
        return loss(output, rows["y"], reduction="sum") / rows["n"]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe = fxpipe.compile(model, few, loss_fn=loss_fn, ranks=1, microbatches=3, schedule="1f1b")
    torch.testing.assert_close(pipe.run_local(batch).loss, loss_fn(model(batch["input"]), batch).detach())


@pytest.mark.parametrize(
    "divisor",
    [lambda n: n * 3, lambda n: (n + 1).clamp(min=1), lambda n: n.double().reshape(1) ** 2],
    ids=["a product", "a guard", "a square"],
)
def test_what_is_computed_of_a_number_of_the_batch_divides_as_it_does(divisor):
    """As of smoothed labels: one sum by the labels, another one by these times the classes."""
    model = nn.Linear(WIDTH, 3).double()
    batch = {"input": torch.randn(6, WIDTH).double(), "n": torch.tensor(18)}
    few = {name: x[:ROWS] if x.dim() else x for name, x in batch.items()}

    def loss_fn(output, rows):
        return output.square().sum() / rows["n"] + (output.cos().sum() / divisor(rows["n"])).sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe = fxpipe.compile(model, few, loss_fn=loss_fn, ranks=1, microbatches=3, schedule="1f1b")
    result, loss = pipe.run_local(batch), loss_fn(model(batch["input"]), batch)
    loss.backward()
    torch.testing.assert_close(result.loss, loss.detach())
    torch.testing.assert_close(result.grads, {name: p.grad for name, p in model.named_parameters()})


@pytest.mark.parametrize("factor", ["leaf", "parameter"])
def test_a_sum_times_a_number_is_told(factor):
    example = {"x": torch.ones(ROWS, WIDTH), "n": torch.tensor(0.1)}

    class Scaled(nn.Linear):
        def forward(self, x, n):
            return super().forward(x).square().sum() * (n if factor == "leaf" else self.bias[0].reshape(()))

    with pytest.warns(UserWarning, match="sum over rows that nothing divides"):
        fxpipe.compile(Scaled(WIDTH, 1), example, ranks=1, microbatches=3, schedule="1f1b", check=False)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda y, _: torch.cat([y[:0], y]).square().sum() / 6,
        lambda y, _: y.square().sum() + y.sum() / float("inf"),
        lambda y, _: y.square().sum() * y.square().sum().square(),
    ],
    ids=["of no rows as well", "divided by infinity", "a product"],
)
@pytest.mark.filterwarnings("ignore:The loss")
def test_a_sum_of_any_form_compiles(loss_fn):
    options = {"ranks": 1, "microbatches": 2, "schedule": "1f1b", "loss_fn": loss_fn}
    fxpipe.compile(torch.nn.Linear(4, 4), (torch.ones(2, 4),), **options)


def test_parts_of_a_divisor_are_looked_at_once(monkeypatch):
    """Each is made of the one before twice: there are 2^50 ways from the divisor to its count."""
    asked = []

    def inputs_of(node):
        asked.append(node)
        assert len(asked) < 10_000
        return input_nodes(node)

    monkeypatch.setattr(loss_tail, "input_nodes", inputs_of)

    def loss_fn(output, batch):
        count = (batch["y"] >= 0).sum()
        for _ in range(50):
            count = (count.clamp(min=1) + count.clamp(max=99)) / 2
        return (per_token(output, batch["y"]) * (batch["y"] >= 0)).sum() / count

    class Logits(Model):
        def forward(self, x):
            return self.head(torch.tanh(self.hidden(self.embed(x))))

    batch = {name: torch.randint(WORDS, (4, LENGTH)) for name in ("x", "y")}
    example = {name: rows[:ROWS] for name, rows in batch.items()}
    options = {"ranks": 1, "microbatches": 2, "schedule": "1f1b", "check": False}
    pipe = fxpipe.compile(Logits(None), example, loss_fn=loss_fn, **options)
    assert len(pipe.plan.batch_means) == 1


def test_the_losses_of_many_tokens_are_found_in_linear_time(monkeypatch):
    """As where a loop adds one up for each: the backward of each is looked up, not searched for."""
    looks = []
    monkeypatch.setattr(loss_tail, "call_nodes", lambda graph: looks.append(graph) or call_nodes(graph))

    def of_each_token(logits, y, more):
        return sum(F.cross_entropy(logits[:, k], y[:, k]) for k in range(LENGTH)) / LENGTH

    step = capture(Model(of_each_token), batch_of(4), None, 0.5, torch.device("cpu"))
    assert len(step.means.exact) == 1  # the line of all of them
    assert len(looks) <= 4
