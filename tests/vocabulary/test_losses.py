"""Losses that are written in another form where a head is split."""

import pytest
import torch
import torch.nn.functional as F
from word_losses import MICROBATCHES, ROWS, WORDS, Words, compiled, data, plain, smoothed

from fxpipe.errors import FxpipeError

pytestmark = pytest.mark.usefixtures("double")


def gathered(logits, batch):
    logs, labels = logits.reshape(-1, WORDS).log_softmax(-1), batch["labels"].reshape(-1)
    return -logs.gather(-1, labels[:, None])[:, 0].mean()


def masked(logits, batch):
    """As losses of preferences, over sequences: a sum of a response's tokens."""
    labels = batch["labels"]
    counts = labels % 3 > 0
    logs = torch.gather(logits.log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2)
    return -F.logsigmoid((logs * counts).sum(-1)).mean()


def clipped(logits, batch):
    """As losses of policies."""
    logs = torch.gather(logits.log_softmax(-1), 2, batch["labels"].unsqueeze(2)).squeeze(2)
    ratio, advantage = (logs - 0.9 * logs.detach()).exp(), (batch["ids"] - 20).to(logs.dtype)
    return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()


def shifted(logits, batch):
    labels = batch["labels"][:, 1:]
    logs = logits[:, :-1].log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    return -(logs * (labels % 3)).mean()


def indexed(logits, batch):
    logs, labels = logits.reshape(-1, WORDS).log_softmax(-1), batch["labels"].reshape(-1)
    return -(logs[torch.arange(len(labels)), labels] * (labels % 3)).mean()


LOSSES = (gathered, masked, clipped, shifted, indexed)
SETTINGS = [{"vocab_parallel": "1-barrier"}, {"vocab_parallel": "2-barrier"}, {"chunks": 3}]


def batch_of_labels(rows: int = ROWS * MICROBATCHES):
    batch = data(rows)
    return {**batch, "labels": batch["labels"].clamp(min=0)}


@pytest.mark.parametrize(
    ("loss", "settings"),
    [(loss, s) for loss in LOSSES for s in SETTINGS if (loss, s) != (masked, SETTINGS[2])],
)
def test_gradients_are_those_of_eager(loss, settings):
    batch, model = batch_of_labels(), Words(tied=True)
    pipe = compiled(model, loss, **{"chunks": 1} | settings)
    result, expected = pipe.run_local(batch), loss(model(batch["ids"]), batch)
    expected.backward()
    assert abs(result.loss - expected) <= 1e-12 * abs(expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(result.grads[name], parameter.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("loss", [plain, smoothed])
def test_the_mean_of_a_microbatch_has_parts(loss):
    batch, model = data(), Words()
    result = compiled(model, loss, mean="microbatch").run_local(batch)
    rows = zip(*(leaf.split(ROWS) for leaf in batch.values()), strict=True)
    each = [dict(zip(batch, leaves, strict=True)) for leaves in rows]
    assert len({int((part["labels"] >= 0).sum()) for part in each}) > 1
    expected = torch.stack([loss(model(part["ids"]), part) for part in each]).mean()
    expected.backward()
    assert abs(result.loss - expected) <= 1e-12
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(result.grads[name], parameter.grad, rtol=1e-10, atol=1e-14)


def test_a_loss_of_whole_sequences_has_no_parts():
    with pytest.raises(FxpipeError, match="depends on the loss of all tokens"):
        compiled(Words(), masked)


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_label_that_is_no_word_is_an_error(settings):
    """As in eager, also the number that a loss would ignore."""
    pipe, batch = compiled(Words(), gathered, **{"chunks": 1} | settings), batch_of_labels()
    batch["labels"][-1, -1] = -100
    with pytest.raises((FxpipeError, IndexError, RuntimeError), match=r"out of bounds|out of range|-100"):
        pipe.run_local(batch)
