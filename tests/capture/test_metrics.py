"""Numbers that a loss function returns, of which microbatches have another mean than the batch."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxpipe.capture.capture_options import CaptureOptions
from fxpipe.capture.trace import capture

ROWS, WORDS = 4, 3
FULL = torch.arange(ROWS) % WORDS
MASKED = torch.where(torch.arange(ROWS) < 3, FULL, -100)


def error(logits, y):
    return F.cross_entropy(logits, y).detach()


def accuracy(logits, y):
    mask = y >= 0
    return ((logits.argmax(-1) == y) & mask).sum() / mask.sum()


def told(metric, y=FULL, count=False, **options):
    """What is told of a metric beside a loss of the labels ``y``.  count: whether that is (sum, count)."""

    def loss_fn(logits, microbatch):
        sums = F.cross_entropy(logits, microbatch["y"], reduction="sum"), (microbatch["y"] >= 0).sum()
        loss = sums if count else (F.cross_entropy(logits, microbatch["y"]),)
        return *loss, {"metric": metric(logits, microbatch["y"])}

    return told_of(loss_fn, y, outputs=["metric"], **options)


def told_of(loss_fn, y, **options):
    class Net(nn.Linear):
        def forward(self, x, y):
            return super().forward(x)

    example = {"x": torch.randn(ROWS, 5), "y": y}
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        capture(Net(5, WORDS), example, loss_fn, 0.5, torch.device("cpu"), CaptureOptions(**options))
    return [str(x.message) for x in given]


@pytest.mark.parametrize("count", [False, True])
@pytest.mark.parametrize("metric", [error, accuracy, lambda logits, y: error(2 * logits, y)])
def test_a_mean_over_labels_of_which_microbatches_have_other_numbers(metric, count):
    (text,) = told(metric, MASKED, count)
    assert text.startswith("Each microbatch has its own 'metric', and their mean is not the whole batch's (")
    assert told(metric, FULL, count) == [], "all rows count"
    assert told(metric, MASKED, count, judged=False) == []


@pytest.mark.parametrize(
    "metric",
    [
        lambda logits, y: error(logits, y).exp(),
        lambda logits, y: logits.std(),
        lambda logits, y: F.cross_entropy(logits, y, torch.arange(1.0, 4.0)).detach(),
    ],
)
def test_another_function_of_the_rows(metric):
    assert len(told(metric)) == 1


@pytest.mark.parametrize(
    "metric",
    [
        lambda logits, y: (logits.argmax(-1) == y).double().sum(),
        lambda logits, y: logits.abs().mean(),
        lambda logits, y: logits.abs().amax(),
        lambda logits, y: logits.std(-1),
    ],
)
def test_sums_and_means_over_rows_and_the_largest(metric):
    assert told(metric, MASKED) == []


def test_a_loss_among_numbers_that_are_stacked():
    """As Lightning's steps log them: a step gives the whole batch's for it."""

    def loss_fn(logits, microbatch):
        loss = F.cross_entropy(logits, microbatch["y"])
        return loss, {"stacked": torch.stack([loss.detach().reshape(()), logits.mean()])}

    assert told_of(loss_fn, MASKED, outputs=["stacked"]) == []
