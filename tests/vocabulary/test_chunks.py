"""The head in parts of the tokens: gradients against eager, what is never there, and what is refused."""

import copy
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from word_losses import (
    CASES,
    LENGTH,
    MICROBATCHES,
    ROWS,
    TOKENS,
    WIDTH,
    WORDS,
    Words,
    by_all_and_some,
    compiled,
    data,
    flat,
    plain,
)

import fxpipe
from fxpipe.errors import OptionError, PartitionError, VocabularyError
from fxpipe.ir.storage import call_nodes

pytestmark = pytest.mark.usefixtures("double")


def largest(pipe: fxpipe.Pipeline) -> int:
    """The elements of the largest value that is no parameter's."""
    made = (node for node in call_nodes(pipe.graph) if node.target is not torch.ops.aten.expand.default)
    values = (node.meta["val"] for node in made)
    return max(v.numel() for v in values if isinstance(v, torch.Tensor) and v.shape != (WORDS, WIDTH))


PRODUCTS = [getattr(torch.ops.aten, op).default for op in ("mm", "addmm", "addmm_")]


@pytest.mark.in_ci("smoothed", "sum and count", "divided by many ops")
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_whole_head(name):
    options, loss = CASES[name]
    batch, model = data(), Words(**options)
    theirs = copy.deepcopy(model)
    pipe = compiled(model, loss, evaluation=True)
    result, expected = pipe.run_local(batch, measure_memory=True), loss(theirs(batch["ids"]), batch)
    if isinstance(expected, tuple):
        expected = expected[0] / expected[1]
    expected.backward()
    limit = 1e-6 if "float32" in name else 1e-12
    assert abs(result.loss - expected) <= limit * abs(expected)
    grads = {n: p.grad for n, p in theirs.named_parameters()}
    assert result.grads.keys() == grads.keys()
    for parameter, grad in grads.items():
        assert (result.grads[parameter] - grad).abs().max() <= limit * grad.abs().max()
    assert abs(pipe.evaluation.run_local(batch).loss - expected) <= limit * abs(expected)
    assert largest(pipe) < TOKENS * WORDS
    assert pipe.plan.head_chunks == pipe.evaluation.plan.head_chunks == 3
    whole = compiled(model, loss, chunks=1)
    assert largest(whole) >= (LENGTH - 1) * ROWS * WORDS
    assert result.peak_saved[1] < whole.run_local(batch, measure_memory=True).peak_saved[1]


WITH_SHARDS = ("1-barrier", "2-barrier")
#: It takes the sum of all logits of a token.
NOT_SHARDED = "summed in float32"
SHARDED = [
    pytest.param(
        name,
        barriers,
        marks=[] if name in ("tied", "z-loss", "smoothed", "capped") else [pytest.mark.variation],
    )
    for name in CASES
    for barriers in WITH_SHARDS
    if name != NOT_SHARDED
]


@pytest.mark.in_ci("z-loss-2-barrier")
@pytest.mark.parametrize(("name", "barriers"), SHARDED)
def test_gradients_are_those_of_the_whole_head_with_shards(name, barriers):
    """A shard has 25 words: no value of the step has them for all tokens."""
    options, loss = CASES[name]
    batch, model = data(), Words(**options)
    theirs = copy.deepcopy(model)
    pipe = compiled(model, loss, vocab_parallel=barriers, evaluation=True)
    result, expected = pipe.run_local(batch, measure_memory=True), loss(theirs(batch["ids"]), batch)
    if isinstance(expected, tuple):
        expected = expected[0] / expected[1]
    expected.backward()
    limit = 1e-6 if "float32" in name else 1e-12
    assert abs(result.loss - expected) <= limit * abs(expected)
    for parameter, weight in theirs.named_parameters():
        assert (result.grads[parameter] - weight.grad).abs().max() <= limit * weight.grad.abs().max()
    assert abs(pipe.evaluation.run_local(batch).loss - expected) <= limit * abs(expected)
    assert largest(pipe) <= TOKENS * WORDS // 3
    whole = compiled(model, loss, chunks=1, vocab_parallel=barriers)
    assert largest(whole) >= TOKENS * WORDS // 2
    assert sum(result.peak_saved) < sum(whole.run_local(batch, measure_memory=True).peak_saved)
    products = [
        sum(n.target in PRODUCTS and n.meta["color"].stage >= 4 for n in call_nodes(each.graph))
        for each in (pipe, whole)
    ]
    # Of each of three parts on two ranks: the logits twice, and two gradients; with one barrier the
    # smoothing's is one more.
    more = 6 if (name, barriers) == ("smoothed", "1-barrier") else 0
    assert products == [24 + more, 6 + more // 3]


def test_it_is_explained(capsys):
    pipe = compiled(Words(), plain)
    (rewrite,) = pipe.plan.rewrites
    logits = TOKENS * WORDS * 8
    assert (rewrite.rule, rewrite.ops, rewrite.seconds) == ("head-chunks", 1, 0.0)
    assert logits <= rewrite.bytes <= 1.1 * logits  # their logarithmic softmax, which is kept once
    pipe.explain()
    text = "head-chunks: 1 output layer in 3 parts of the tokens, in the backward: "
    assert text in capsys.readouterr().out
    split = compiled(Words(), plain, vocab_parallel=True)
    assert [(each.rule, each.ops, each.bytes) for each in split.plan.rewrites] == [("head-chunks", 1, logits)]
    split.explain()
    text = "1 output layer in 3 parts of the tokens, whose logits every rank computes twice: "
    assert text in capsys.readouterr().out
    assert not compiled(Words(), plain, chunks=1).plan.rewrites
    with pytest.raises(OptionError, match="'head-chunks', which only an option asks for: head_chunks=1"):
        compiled(Words(), plain, without=["head-chunks"])


def test_tokens_that_are_ignored_in_a_whole_part():
    """The first part of a microbatch has no label that counts."""
    batch = data()
    batch["labels"][::ROWS] = -100
    model = Words()
    result = compiled(copy.deepcopy(model), plain, chunks=ROWS).run_local(batch)
    loss = plain(model(batch["ids"]), batch)
    loss.backward()
    assert abs(result.loss - loss) < 1e-12
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(result.grads[name], parameter.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.in_ci("options0", "options4")
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "1f1b"},
        {"schedule": "zb-v", "offload": True},
        {"recompute": "full"},
        {"ranks": 1},
        {"replicas": 2, "shard": "gradients"},
    ],
)
def test_in_other_settings(options):
    batch = data(ROWS * MICROBATCHES * options.get("replicas", 1))
    result, whole = (compiled(Words(), plain, chunks, **options).run_local(batch) for chunks in (3, 1))
    for name, grad in whole.grads.items():
        torch.testing.assert_close(result.grads[name], grad, rtol=1e-10, atol=1e-14)


def test_a_shard_of_as_many_words_as_hidden_states_are_wide():
    model, batch = Words(width=WORDS // 2), data()
    result = compiled(model, plain, vocab_parallel="1-barrier").run_local(batch)
    plain(model(batch["ids"]), batch).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(result.grads[name], parameter.grad, rtol=1e-10, atol=1e-14)


def by_the_sum(logits, batch):
    return F.cross_entropy(*flat(logits, batch), reduction="sum").square(), torch.tensor(3.0)


def by_the_mean(logits, batch):
    """A focal loss of the mean, whose gradient waits for all tokens."""
    loss = plain(logits, batch)
    return (1 - torch.exp(-loss)) ** 2 * loss


def of_classes(logits, batch):
    return F.cross_entropy(*flat(logits, batch), weight=torch.arange(1.0, 1.0 + WORDS))


def of_all_logits(logits, batch):
    return plain(logits, batch) + torch.linalg.matrix_norm(logits.reshape(-1, WORDS))


REFUSED = {
    "the loss of all": (by_the_sum, {}, VocabularyError, "depends on the loss of all tokens"),
    "a mean": (by_the_mean, {}, VocabularyError, "depends on the loss of all tokens"),
    "some and all": (by_all_and_some, {}, VocabularyError, "or shift the labels instead of the logits"),
    "a norm": (of_all_logits, {}, VocabularyError, r"takes the logits of all tokens.*without head_chunks"),
    "no cross-entropy": (lambda x, batch: x.mean(), {}, VocabularyError, "There is no cross-entropy"),
    "own means": (of_classes, {"mean": "microbatch"}, VocabularyError, "by the weights of the labels"),
    "too many": (plain, {"chunks": 16}, VocabularyError, f"head_chunks is 16, and the head has {TOKENS} "),
    "none": (plain, {"chunks": 0}, OptionError, "head_chunks is 0 and must be a whole number, at least 1"),
    "dimensions": (plain, {"dimensions": {"n": LENGTH}}, OptionError, "does not go with dimensions"),
    "a norm of shards": (of_all_logits, {"vocab_parallel": True}, VocabularyError, "cannot split aten"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The loss takes")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    loss, options, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        compiled(Words(), loss, **options)


class TwoHeads(nn.Module):
    """The second one behind another layer, as where several tokens are predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.after, self.second = Words(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids, labels):
        x = self.words.table(ids)
        first = plain(self.words.head(torch.tanh(self.words.layers[0](x))), {"labels": labels})
        return first + plain(self.second(torch.tanh(self.after(x))), {"labels": labels})


def test_two_heads():
    """They are in the last stage, as it has the loss."""
    torch.manual_seed(0)
    model, batch = TwoHeads(), data()
    settings = {"ranks": 2, "microbatches": MICROBATCHES, "schedule": "1f1b", "head_chunks": 3}
    theirs = copy.deepcopy(model)
    loss = theirs(**batch)
    loss.backward()
    result = fxpipe.compile(model, data(ROWS), **settings).run_local(batch)
    assert abs(result.loss - loss) < 1e-12
    for name, grad in result.grads.items():
        torch.testing.assert_close(grad, theirs.get_parameter(name).grad, rtol=1e-10, atol=1e-14)
    with pytest.raises(PartitionError, match=r"split points leave module 'words\.head'.* in another one"):
        fxpipe.compile(model, data(ROWS), split_points=["after"], **settings)


def test_logits_that_are_an_output_are_refused():
    with pytest.raises(VocabularyError, match="takes the logits of all tokens"):
        compiled(Words(), plain, outputs=["output"])


@pytest.mark.variation
@pytest.mark.filterwarnings("ignore:The loss takes linalg_vector_norm")
def test_the_planner_takes_parts_where_the_limit_asks_for_them(monkeypatch):
    """On a device where an op takes long to start the parts take longer than the whole."""
    monkeypatch.setattr("fxpipe.vocabulary.chunks.FEWEST", 2)
    model, batch = Words(), data()

    def chosen(limit=None, **options):
        options = {"schedule": "1f1b", "costs": "h100-sxm", "loss_fn": plain, "head_chunks": "auto"} | options
        options |= {"split_points": ["layers.1"]}
        shape = {"ranks": 2, "microbatches": MICROBATCHES, "memory_limit": limit}
        return fxpipe.compile(model, data(ROWS), **shape, **options)

    def needed(pipe):
        peaks = zip(pipe.plan.held, pipe.plan.prediction.peak_memory, strict=True)
        return max(held.total + peak for held, peak in peaks)

    # 50 words and 8 features: in 4 parts of 15 tokens, as 8 leave fewer than 2 tokens.
    whole = chosen("1GiB")
    assert whole.plan.head_chunks == chosen().plan.head_chunks == 1
    parts = chosen(needed(whole) - 1)
    assert parts.plan.head_chunks == 4
    assert needed(parts) < needed(whole)
    found, expected = parts.run_local(batch), whole.run_local(batch)
    assert torch.allclose(found.loss, expected.loss, rtol=1e-12)
    assert all(torch.allclose(found.grads[n], g, rtol=1e-9) for n, g in expected.grads.items())
    split = chosen("1GiB", vocab_parallel="1-barrier")
    assert split.plan.head_chunks == 1
    parts = chosen(needed(split) - 1, vocab_parallel="1-barrier")
    assert (parts.plan.head_chunks, parts.plan.vocabulary.barriers) == (4, 1)
    assert needed(parts) < needed(split)
    compared = chosen("1GiB", vocab_parallel="auto", schedule="auto").plan.tried
    assert {(row.barriers, row.head_chunks) for row in compared} == {*product((0, 1, 2), (1, 4))}
    with pytest.raises(OptionError, match="head_chunks is 'many'"):
        chosen(head_chunks="many")
    assert chosen(loss_fn=of_all_logits).plan.head_chunks == 1
