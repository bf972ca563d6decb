"""Losses that are written in another form where a head is split."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from word_losses import MICROBATCHES, ROWS, WORDS, Words, by_two, compiled, data, plain, smoothed

from fxpipe.errors import FxpipeError
from fxpipe.vocabulary.losses import _without

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


def beside_logsumexp(logits, batch):
    """Of the logits themselves: their labels' entries are in the loss alone, too."""
    labels = batch["labels"]
    logsum = logits.logsumexp(-1)
    entries = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return ((logsum - entries) * (labels % 3)).mean() + (0.1 * logsum.square() + entries.tanh()).mean()


def of_policy(logs, batch):
    ratio, advantage = (logs - 0.9 * logs.detach()).exp(), (batch["ids"][:, 1:] - 20).to(logs.dtype)
    return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()


def in_float32(logits, batch):
    """As TRL has log-probabilities in float32, the log-sum-exp of one row after the other."""
    logits, index = logits[:, :-1] / 0.7, batch["labels"][:, 1:].unsqueeze(-1)
    logsum = torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
    return of_policy((torch.gather(logits, -1, index) - logsum.unsqueeze(-1)).squeeze(-1), batch)


def in_bfloat16(logits, batch):
    """As TRL has log-probabilities in half precision, one row after the other."""
    rows = zip(logits[:, :-1] / 0.7, batch["labels"][:, 1:].unsqueeze(-1), strict=True)
    logs = [F.log_softmax(row, dim=-1).gather(dim=-1, index=labels) for row, labels in rows]
    return of_policy(torch.stack(logs).squeeze(-1), batch)


def along(logits, batch):
    labels = batch["labels"].unsqueeze(-1)
    return -torch.take_along_dim(logits.log_softmax(-1), labels, dim=-1).mean()


def turned(logits, batch):
    """As torch wants the dimensions of a cross-entropy, of logits that are shifted, and capped behind it."""
    turned = 3 * torch.tanh(logits[:, :-1].transpose(1, 2) / 3)
    each = F.cross_entropy(turned, batch["labels"][:, 1:], reduction="none")
    return (each * (1 + batch["ids"][:, 1:] % 3)).mean()


def turned_and_smoothed(logits, batch):
    return F.cross_entropy(logits.permute(0, 2, 1), batch["labels"], label_smoothing=0.1)


def alike(logits, batch):
    """Two slices of the same rows."""
    loss = F.cross_entropy(logits[:, :-1].reshape(-1, WORDS), batch["labels"][:, 1:].reshape(-1))
    return loss + 0.01 * logits[:, :-1].logsumexp(-1).square().mean()


SPELLINGS = (beside_logsumexp, in_float32, in_bfloat16, along, turned, turned_and_smoothed, by_two, alike)
LOSSES = (gathered, masked, clipped, shifted, indexed, *SPELLINGS)
ONE_BARRIER = {"vocab_parallel": "1-barrier"}
SETTINGS = [ONE_BARRIER, {"vocab_parallel": "2-barrier"}, {"chunks": 3}]
BOTH = [
    pytest.param(loss, {"chunks": 3} | s, marks=pytest.mark.variation)
    for loss in SPELLINGS
    for s in SETTINGS[:2]
]
#: A loss of whole sequences has no parts, and one barrier one gradient of a token's logits.
NOT = ((masked, SETTINGS[2]), (by_two, ONE_BARRIER))


def batch_of_labels(rows: int = ROWS * MICROBATCHES):
    batch = data(rows)
    return {**batch, "labels": batch["labels"].clamp(min=0)}


@pytest.mark.in_ci(
    "gathered-settings0",
    "masked-settings3",
    "indexed-settings11",
    "beside_logsumexp-settings14",
    "in_bfloat16-settings20",
    "along-settings23",
    "turned-settings26",
)
@pytest.mark.parametrize(
    ("loss", "settings"),
    [*((loss, s) for loss in LOSSES for s in SETTINGS if (loss, s) not in NOT), *BOTH],
)
def test_gradients_are_those_of_eager(loss, settings):
    batch, model = batch_of_labels(), Words(tied=True)
    pipe = compiled(model, loss, **{"chunks": 1} | settings)
    result, expected = pipe.run_local(batch), loss(model(batch["ids"]), batch)
    expected.backward()
    assert abs(result.loss - expected) <= 1e-12 * abs(expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(result.grads[name], parameter.grad, rtol=1e-10, atol=1e-14)


def test_the_gradient_of_one_alone_is_refused():
    """Of a log-sum-exp without a gradient no loss of tokens is made."""

    def loss(logits, batch):
        entries = logits.gather(-1, batch["labels"].unsqueeze(-1)).squeeze(-1)
        return (logits.logsumexp(-1).detach() - entries).mean()

    with pytest.raises(FxpipeError, match="There is no cross-entropy in the training step"):
        compiled(Words(), loss)


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


def test_a_gradient_with_a_summand_for_each_of_many_uses():
    graph = fx.Graph()
    other = graph.placeholder("other")
    summands = [graph.placeholder(f"x{k}") for k in range(1500)]
    total = graph.call_function(torch.ops.aten.neg.default, (other,))
    for summand in summands:
        total = graph.call_function(torch.ops.aten.add.Tensor, (total, summand))
    assert _without(total, other) == summands
    assert _without(total, total) is None
