"""The vocabulary layers spread over the ranks: gradients against eager, and what cannot be spread."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from marks import with_variations
from models import MODELS, in_precision, next_word_loss, same_word_loss
from torch import nn
from zoo import EFFORT, Case, captured_once, eager, relative_error

import fxpipe
from fxpipe.errors import PartitionError, VocabularyError
from fxpipe.plan.tensors import sum_over_ranks
from fxpipe.runtime.program.load_program import load_program
from fxpipe.schedule.engine.arrays import schedule_arrays

pytestmark = pytest.mark.slow

FAMILIES = ("gpt2", "llama", "qwen3", "gemma2", "gpt_neox", "opt", "bert", "t5", "mixtral")
CAUSAL = set(FAMILIES) - {"bert", "t5"}
MICROBATCHES = 4
BARRIERS: tuple[str | bool, ...] = (False, "1-barrier", "2-barrier")
WORDS, WIDTH, LENGTH = 50, 8, 5


def spread(
    case: Case, ranks: int, schedule: str, vocab_parallel: str | bool, **options: Any
) -> fxpipe.Pipeline:
    with captured_once(case, MICROBATCHES):
        return fxpipe.compile(
            case.build(),
            case.example(),
            ranks=ranks,
            microbatches=MICROBATCHES,
            schedule=schedule,
            vocab_parallel=vocab_parallel,
            loss_fn=case.loss_fn,
            effort=EFFORT,
            **options,
        )


def agrees(case: Case, pipe: fxpipe.Pipeline, limit: float, parts: int = 1) -> None:
    """Loss and all gradients are what one process gets of the batch, or of its equal parts; those that are
    exactly zero but for rounding, too."""
    batch = case.data(MICROBATCHES)
    result = pipe.run_local(batch)
    expected = eager(case.build(), batch, parts, case.loss_fn)
    assert relative_error(result.loss, expected.loss) <= limit
    assert set(result.grads) == set(expected.grads)
    scale = max(grad.abs().max() for grad in expected.grads.values())
    for name, grad in expected.grads.items():
        difference = (result.grads[name] - grad).abs().max()
        assert difference <= limit * max(grad.abs().max(), 1e-6 * scale), name


def language_case(name: str) -> Case:
    case = in_precision(MODELS[name], torch.float64)
    loss_fn = next_word_loss if name in CAUSAL else same_word_loss
    return Case(case.model, case.batch, loss_fn, case.rows)


# Every family under one barrier and two; two of them, one causal and one of two towers, with two stages a
# rank as well. In this order a family is traced once.
EVERY = ((2, "1f1b", "1-barrier"), (3, "zb-h1", "2-barrier"))
CHUNKED = ((2, "zb-v", "2-barrier"), (2, "v-half", "1-barrier"))
BOTH = ("gpt2", "t5")
#: Their layers of the vocabulary are those of another family.
ALIKE = ("gpt_neox", "llama", "mixtral", "opt", "qwen3")
RUNS = [
    pytest.param(
        name,
        *shape,
        marks=[pytest.mark.variation]
        if name in ALIKE
        or (shape == EVERY[0] and name != "gpt2")
        or (shape in CHUNKED and (name != "t5" or shape == CHUNKED[1]))
        else [],
    )
    for name in FAMILIES
    for shape in (EVERY + CHUNKED if name in BOTH else EVERY)
]


@pytest.mark.in_ci("gpt2-3-zb-h1-2-barrier")
@pytest.mark.parametrize(("name", "ranks", "schedule", "barriers"), RUNS)
def test_models_have_the_gradients_of_one_process(
    name: str, ranks: int, schedule: str, barriers: str
) -> None:
    case = language_case(name)
    agrees(case, spread(case, ranks, schedule, barriers), 1e-10, MICROBATCHES)  # norms are in float32


@pytest.mark.variation
def test_four_ranks_and_a_loss_of_the_models_own() -> None:
    """In single precision, as the model's own loss is."""
    case = Case(MODELS["gpt2"].model, MODELS["gpt2"].batch, models.own_loss)
    agrees(case, spread(case, 4, "1f1b", "1-barrier", stages_per_rank=1), 1e-5)


# -- forms of the loss ------------------------------------------------------------------------------------


class Words(nn.Module):
    """An embedding, two layers, a projection, and a loss of the logits."""

    def __init__(
        self,
        loss: Callable[[torch.Tensor, torch.Tensor], Any],
        *,
        tied: bool = False,
        bias: bool = True,
        scale: float = 1.0,
        padding: int | None = None,
        by_operator: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, padding_idx=padding)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight
        self.loss, self.scale, self.by_operator = loss, scale, by_operator

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = self.second(self.first(self.embedding(ids)).tanh()).tanh()
        if self.by_operator:
            return self.loss(hidden @ self.head.weight.T + self.head.bias, labels)
        return self.loss(self.scale * self.head(hidden), labels)


class Chain(nn.Module):
    """Layers on numbers, and classes to choose from."""

    def __init__(self, classes: int, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(width, width) for _ in range(8)])
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.layers(x)), y)


def flat(logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **options)


def shifted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return flat(logits[:, :-1], labels[:, 1:])


def in_chunks(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    parts = zip(logits.split(2, 1), labels.split(2, 1), strict=True)
    return torch.stack([flat(z, y, reduction="sum") for z, y in parts]).sum() / labels.numel()


def capped(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return flat(5 * torch.tanh(logits / 5), labels, label_smoothing=0.1)


def by_hand(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (
        F.nll_loss(F.log_softmax(logits, -1).flatten(0, 1), labels.flatten(), reduction="none")
        .square()
        .mean()
    )


def along_the_second(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.CrossEntropyLoss()(logits.transpose(1, 2), labels)


def of_all_tokens(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return flat(logits, labels, reduction="sum") / (labels >= 0).sum()


#: A shard of two has nothing but padding.
NOT_PADDED = 20


def words_of(labels: torch.Tensor) -> torch.Tensor:
    """Without labels in the padding."""
    return torch.where(labels < 0, labels, labels % NOT_PADDED)


def sliced(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """And a mask without the padding's columns."""
    mask = torch.arange(NOT_PADDED) != 3
    return flat(logits[..., :NOT_PADDED].where(mask, -2.0), words_of(labels))


def sliced_capped(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The cap makes the padding's mask finite, if it comes behind that; smoothing takes the sum of all."""
    capped = 5 * torch.tanh(logits[:, :-1, :NOT_PADDED] / 5)
    return flat(capped, words_of(labels[:, 1:]), label_smoothing=0.1)


def filled(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """In place, which autograd writes as copies of parts."""
    logits[..., NOT_PADDED + 5 :] = -torch.inf
    logits[..., 7].fill_(-1e4)
    logits = 2 * logits[..., : NOT_PADDED + 3]
    logits[..., NOT_PADDED:] = -torch.inf
    logits.masked_fill_(torch.arange(NOT_PADDED + 3) == 3, 0.5)
    return flat(logits, words_of(labels))


FORMS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mean": flat,
    "shifted": shifted,
    "in chunks": in_chunks,
    "capped, smoothed": capped,
    "by hand, squared": by_hand,
    "along the second dimension": along_the_second,
    "sum over all tokens": of_all_tokens,
    "smoothed": lambda z, y: flat(z, y, label_smoothing=0.2),
    "no reduction": lambda z, y: flat(z, y, reduction="none").mean(),
    "temperature": lambda z, y: flat(z / 0.7, y),
    "of the last word": lambda z, y: flat(z[:, -1], y[:, -1]),
    "without the last columns": sliced,
    "without the last columns, capped, smoothed": sliced_capped,
    "columns filled in place": filled,
}


def batch(rows: int) -> dict[str, torch.Tensor]:
    labels = torch.randint(WORDS, (rows, LENGTH))
    labels[0, :2] = -100
    return {"ids": torch.randint(WORDS, (rows, LENGTH)), "labels": labels}


@cache
def words(loss: Callable[[torch.Tensor, torch.Tensor], Any], **options: Any) -> Case:
    return Case(lambda: Words(loss, **options).double(), batch)


@pytest.mark.in_ci("no reduction-1-barrier", "columns filled in place-1-barrier")
@pytest.mark.parametrize("barriers", with_variations(["1-barrier", "2-barrier"], ["2-barrier"]))
@pytest.mark.parametrize("form", with_variations(FORMS, ("mean", "smoothed", "temperature")))
def test_forms_of_the_loss(form: str, barriers: str) -> None:
    case = words(FORMS[form])
    agrees(case, spread(case, 2, "1f1b", barriers), 1e-10)


def with_z_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The squared log-sum-exp of each token, without the columns that are padding."""
    logits = (5 * torch.tanh(logits / 5))[..., :NOT_PADDED]
    return flat(logits, words_of(labels)) + 1e-2 * logits.logsumexp(-1).square().mean()


@pytest.mark.in_ci("2-barrier")
@pytest.mark.parametrize("barriers", ["1-barrier", "2-barrier"])
def test_z_loss(barriers: str) -> None:
    case = words(with_z_loss)
    agrees(case, spread(case, 2, "1f1b", barriers), 1e-10)


@pytest.mark.in_ci("tied, padded", "by @")
@pytest.mark.parametrize(
    "options",
    [{"tied": True}, {"bias": False}, {"tied": True, "padding": 3}, {"scale": 2e4}, {"by_operator": True}],
    ids=["tied", "no bias", "tied, padded", "logits of 10000", "by @"],
)
def test_forms_of_the_layers(options: dict[str, Any]) -> None:
    case = words(flat, **options)
    agrees(case, spread(case, 3, "zb-h1", "1-barrier"), 1e-10)


class LookedUpAgain(Words):
    """Looks its ids up in the first stage twice, and once more in a later one."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = self.first(self.embedding(ids)).tanh() + self.embedding(ids)
        return self.loss(self.head(self.second(hidden).tanh() + self.embedding(ids)), labels)


@pytest.mark.parametrize(
    ("schedule", "barriers"), [("zb-h1", "1-barrier"), ("1f1b", "2-barrier")], ids=["zb", "1f1b"]
)
def test_ids_that_are_looked_up_again(schedule: str, barriers: str) -> None:
    """Two lookups in one stage are one sum over the ranks; a third, whose gradient a stage of another rank
    needs as well, has a sum of its own."""
    case = looked_up_again()
    pipe = spread(case, 2, schedule, barriers, split_points=["second"])
    assert pipe.graph is not None
    lookups = [n for n in pipe.graph.nodes if n.target is sum_over_ranks and n.meta["color"].phase == "F"]
    assert len(lookups) == 2
    agrees(case, pipe, 1e-10)


@cache
def looked_up_again() -> Case:
    return Case(lambda: LookedUpAgain(flat).double(), batch)


class Hashed(Words):
    """Looks up hashes of its ids, of many rounds."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        for _ in range(25):
            ids = ids ^ (ids >> 1)
        return super().forward(ids % WORDS, labels)


def test_ids_with_many_ways_to_them() -> None:
    """Each round of a hash reads the one before twice; its copy for the lookup does so as well."""
    case = Case(lambda: Hashed(flat).double(), batch)
    agrees(case, spread(case, 2, "1f1b", "1-barrier"), 1e-10)


class Overflowing(Words):
    """A word whose hidden state becomes NaN, and a row of the table that is infinite."""

    def __init__(self) -> None:
        super().__init__(flat)
        self.embedding.weight.data[WORDS // 2] = torch.inf

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = self.first(self.embedding(ids)).tanh()
        hidden = hidden * torch.where(ids == 7, torch.nan, 1.0)[..., None]
        losses = F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten(), reduction="none")
        return (losses * torch.where(labels.flatten() == 9, torch.inf, 1.0)).sum()


@pytest.mark.in_ci("2-barrier")
@pytest.mark.parametrize("barriers", ["1-barrier", "2-barrier"])
def test_infinite_rows_and_nan_stay_where_they_are_without_shards(barriers: str) -> None:
    """The first row of a shard is infinite: only words that have it see that.  The gradient of one word is
    NaN, and the loss of another infinite."""
    case = Case(lambda: Overflowing().double(), batch)
    pipe = spread(case, 2, "zb-h1", barriers)
    data = {"ids": torch.arange(40).reshape(8, 5) % 7, "labels": torch.arange(40).reshape(8, 5) % 9}
    for ids, labels in ((0, 0), (7, 0), (0, 9)):
        data["ids"][3, 3], data["labels"][3, 3] = ids, labels
        found, expected = pipe.run_local(data), eager(case.build(), data, MICROBATCHES)
        assert torch.allclose(found.loss, expected.loss, equal_nan=True)
        for name, grad in expected.grads.items():
            assert torch.allclose(found.grads[name], grad, equal_nan=True), (ids, labels, name)


def masked_columns(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A vocabulary that is padded, and another column for each token that no token may have."""
    columns = torch.arange(WORDS)
    other = (columns == (labels[..., None] + 1) % (WORDS - 3)) & (labels[..., None] >= 0)
    logits = logits.masked_fill(columns >= WORDS - 3, -torch.inf).clamp(max=0.7)
    return flat(torch.where(other, -1e4, logits), labels.clamp(max=WORDS - 4))


class Scaled(Words):
    """Temperatures that are trained: of all logits, and of each token.  Its accuracy is a result."""

    def __init__(self, words: int) -> None:
        super().__init__(flat)
        self.words = words
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = self.first(self.embedding(ids)).tanh()
        labels = labels.clamp(max=self.words - 1)
        logits = self.head(hidden)[..., : self.words] / self.temperature * self.second(hidden)[..., :1].exp()
        best = logits.detach().argmax(-1)
        return {"loss": flat(logits, labels), "accuracy": (best == labels).double().mean(), "best": best}


class Labelled(nn.Module):
    """The cross-entropy of a small model, with ids and labels that each test chooses."""

    def __init__(self, ignored: int):
        super().__init__()
        self.tokens, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.ignored = ignored

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.tokens(ids).tanh())
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=self.ignored)


@pytest.mark.in_ci("1-barrier-255", "2-barrier-3")
@pytest.mark.parametrize(("barriers", "ignored"), [("1-barrier", -100), ("1-barrier", 255), ("2-barrier", 3)])
def test_ids_and_labels_that_no_shard_has_are_errors(barriers: str, ignored: int) -> None:
    """As of one table; but for labels that are ignored, of which any number may stand for."""
    torch.manual_seed(0)
    model, batch = (
        Labelled(ignored).double(),
        {name: torch.randint(WORDS, (4, LENGTH)) for name in ("ids", "labels")},
    )
    batch["labels"][1, 2:] = ignored
    example = {name: x[:2] for name, x in batch.items()}
    pipe = fxpipe.compile(model, example, ranks=2, microbatches=2, schedule="1f1b", vocab_parallel=barriers)
    found = pipe.run_local(batch)
    loss = model(**batch)
    loss.backward()
    torch.testing.assert_close(found.loss, loss.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.grads[name], parameter.grad)
    for name, op in (("ids", "embedding"), ("labels", "gather")):
        for index in (-1, WORDS):
            wrong = {**batch, name: batch[name].clone()}
            wrong[name][2, 0] = index
            with pytest.raises(fxpipe.RunError, match=rf"line \d+ of rank\d\.py \({op}\): .*out of"):
                pipe.run_local(wrong)


@pytest.mark.in_ci("2-barrier")
@pytest.mark.parametrize("barriers", ["1-barrier", "2-barrier"])
def test_columns_that_are_masked(barriers: str) -> None:
    case = words(masked_columns)
    agrees(case, spread(case, 3, "zb-h1", barriers), 1e-10)


@pytest.mark.in_ci("2-barrier-50")
@pytest.mark.parametrize(
    ("barriers", "words"), [("1-barrier", WORDS), ("2-barrier", WORDS), ("1-barrier", NOT_PADDED)]
)
def test_trained_temperatures_and_an_accuracy(barriers: str, words: int) -> None:
    """Of several largest logits the first counts, as without shards; those of the padding do not."""
    case = Case(lambda: Scaled(words).double(), batch, lambda output, given: output["loss"])
    pipe = spread(case, 2, "1f1b", barriers, outputs=["accuracy", "best"])
    agrees(case, pipe, 1e-10)
    model, data = case.build(), case.data(MICROBATCHES)
    model.head.weight.data[3] = model.head.weight.data[40] = model.head.weight.data[10]
    model.head.bias.data.fill_(-2.0)[[3, 10, 40]] = 9.0
    model.head.bias.data[words:] = 30.0
    pipe.load_state_dict(model.state_dict())
    found, expected = pipe.run_local(data, outputs=["accuracy", "best"]).outputs, model(**data)
    assert torch.equal(found["best"], expected["best"])
    assert (found["best"] == 3).any()
    assert found["accuracy"].mean() == expected["accuracy"]


def test_what_one_barrier_cannot_scale_two_can() -> None:
    case = words(lambda z, y: flat(z + z.tanh(), y))
    with pytest.raises(VocabularyError, match=r"aten.add.Tensor .* Ask for vocab_parallel=\"2-barrier\""):
        spread(case, 2, "1f1b", "1-barrier")
    agrees(case, spread(case, 2, "1f1b", "2-barrier"), 1e-10)


def test_a_sum_and_a_count() -> None:
    """The exact mean over all tokens of the batch, whose microbatches have different numbers of them."""

    def loss_fn(output: Any, given: Any) -> Any:
        return output, (given["labels"] >= 0).sum()

    case = Case(lambda: Words(lambda z, y: flat(z, y, reduction="sum")).double(), batch, loss_fn)
    agrees(case, spread(case, 2, "1f1b", "1-barrier"), 1e-10)


def test_a_microbatch_without_labels_adds_nothing() -> None:
    case = words(flat)
    pipe = spread(case, 2, "1f1b", "1-barrier")
    data = case.data(MICROBATCHES)
    data["labels"][2:4] = -100
    found, expected = pipe.run_local(data), eager(case.build(), data, 1)
    assert relative_error(found.loss, expected.loss) <= 1e-10
    for name, grad in expected.grads.items():
        assert torch.allclose(found.grads[name], grad, rtol=1e-10, atol=1e-12), name


def test_half_precision_is_as_near_as_one_process() -> None:
    case = Case(lambda: Words(lambda z, y: flat(z.float(), y), tied=True), batch)
    model, data = case.build(), case.data(MICROBATCHES)
    exact = eager(model.double(), data, 1)
    low = model.bfloat16()
    theirs = eager(low, data, 1)
    pipe = fxpipe.compile(
        low, case.example(), ranks=2, microbatches=MICROBATCHES, schedule="1f1b", vocab_parallel=True
    )
    ours = pipe.run_local(data)

    def error(grads: dict[str, torch.Tensor]) -> float:
        return sum(float((grads[n].double() - g).square().sum()) for n, g in exact.grads.items()) ** 0.5

    assert error(ours.grads) <= 1.5 * error(theirs.grads)


# -- where the work lies ----------------------------------------------------------------------------------


class UnderAutocast(Words):
    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(ids, labels)


def test_a_head_with_bias_under_autocast() -> None:
    case = Case(lambda: UnderAutocast(flat), batch)
    agrees(case, spread(case, 2, "1f1b", "1-barrier"), 2e-2)


def test_no_rank_has_logits_of_the_whole_vocabulary() -> None:
    for barriers in ("1-barrier", "2-barrier"):
        pipe = spread(words(flat, tied=True), 2, "1f1b", barriers)
        for section in pipe.sections:
            for node in section.graph.nodes:
                val = node.meta.get("val")
                if isinstance(val, torch.Tensor):
                    assert WORDS not in val.shape, f"{node.name} of {section.color}"


HEAVY_LOGITS = Case(lambda: MODELS["gpt2"].build().double(), MODELS["gpt2"].batch, same_word_loss)


@pytest.mark.variation
@pytest.mark.parametrize("schedule", with_variations(["1f1b", "zb-v"], ["zb-v"]))
def test_memory_is_as_simulated_and_a_microbatch_more_for_each_barrier(schedule: str) -> None:
    """Where logits weigh, less than the last rank of the schedule without holds."""
    case = HEAVY_LOGITS
    for barriers, choice in ((1, "1-barrier"), (2, "2-barrier")):
        pipe = spread(case, 2, schedule, choice)
        timeline = pipe.simulate()
        simulated = timeline.peak_memory
        measured = pipe.run_local(case.data(MICROBATCHES), measure_memory=True).peak_saved
        one = max(schedule_arrays(timeline.costs, timeline.schedule.placement, MICROBATCHES).smallest_limits)
        # Without, both families hold p = 2 microbatches at most.
        assert max(simulated) <= (2 + barriers) * one
        for found, expected in zip(measured, simulated, strict=True):
            assert found == pytest.approx(expected, rel=0.05)


def test_two_communicators_carry_all_collectives_in_one_order() -> None:
    """Two lookups and two kinds of sums, on three ranks."""
    pipe = spread(words(flat, tied=True), 3, "zb-h1", "2-barrier")
    assert pipe.plan.collectives == 2
    traffics = [load_program(source, "program").traffic for source in pipe.artifact.programs]
    orders = [[(call.verb, call.group) for call in own.calls if call.group >= 0] for own in traffics]
    assert orders[0].count(("reduce", 1)) == 2 * MICROBATCHES
    assert {group for _, group in orders[0]} == {0, 1}
    for group in (0, 1):
        first, *others = ([verb for verb, own in order if own == group] for order in orders)
        assert others == [first] * 2


def test_no_rank_gets_the_parts_of_a_sum() -> None:
    """The stage that needs it gets the sum: programs gather nothing, and save no parts."""
    pipe = spread(words(flat), 4, "1f1b", "1-barrier")
    for source in pipe.artifact.programs:
        assert "rt.gather(" not in source
    sections = {s.color: s for s in pipe.sections}
    sums = [v for s in sections.values() for v in s.inputs if v.summands]
    assert [len(v.summands) for v in sums] == [4, 4]
    for value in sums:
        (user,) = (s for s in sections.values() if value in s.inputs)
        assert not {part.name for part in value.summands} & {v.name for v in user.inputs}


def test_programs_that_gather_the_parts_still_run(tmp_path: Any) -> None:
    """As those that were saved before sums were collectives."""
    case = words(flat)
    pipe = spread(case, 2, "1f1b", "1-barrier")
    data = case.data(MICROBATCHES)
    expected = pipe.run_local(data)
    pipe.save(tmp_path / "older")
    for path in (tmp_path / "older").glob("rank*.py"):
        source = path.read_text().replace("rt.reduce(", "rt.gather(")
        assert source.count("rt.gather(") == 2
        for total in re.findall(r"(\S+) = rt\.gather\(", source):
            source = source.replace(f"rt.wait({total})", f"torch.add(*rt.wait_all({total}))")
        path.write_text(source)
    with pytest.warns(UserWarning, match="edited"):
        found = fxpipe.load(tmp_path / "older").run_local(data)
    assert torch.equal(found.loss, expected.loss)
    for name, grad in expected.grads.items():
        assert torch.equal(found.grads[name], grad), name


def test_a_tied_table_is_held_once_a_rank() -> None:
    pipe = spread(words(flat, tied=True, bias=False), 2, "zb-v", "1-barrier")
    for rank, held in enumerate(pipe.plan.tensors):
        rows = [name for name in held.parameters if name.is_part]
        assert rows == [f"embedding.weight[{(0, 25)[rank]}:{(25, 50)[rank]}]"]
        assert rows[0] in held.gradients


def test_saved_and_loaded_and_trained(tmp_path: Any) -> None:
    case = words(flat, tied=True)
    pipe = spread(case, 2, "1f1b", "1-barrier")
    data = case.data(MICROBATCHES)
    expected = pipe.run_local(data)
    pipe.save(tmp_path / "pipe")
    loaded = fxpipe.load(tmp_path / "pipe")
    assert set(loaded.state_dict()) == set(pipe.state_dict())
    for name, tensor in pipe.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    found = loaded.run_local(data)
    assert torch.equal(found.loss, expected.loss)
    for name, grad in expected.grads.items():
        assert torch.equal(found.grads[name], grad)


def test_a_meta_model_gets_its_tables_by_a_state_dict() -> None:
    case = words(flat, tied=True)
    with torch.device("meta"):
        model = Words(flat, tied=True).double()
    pipe = fxpipe.compile(
        model, case.example(), ranks=2, microbatches=MICROBATCHES, schedule="1f1b", vocab_parallel=True
    )
    pipe.load_state_dict(case.build().state_dict())
    agrees(case, pipe, 1e-10)


# -- what cannot be spread --------------------------------------------------------------------------------


def with_two_more(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Beside the loss two functions of the log-sum-exp, whose gradients are added before the product."""
    more = logits.logsumexp(-1).square().mean() + logits.logsumexp(-1).abs().mean()
    return flat(logits, labels) + 1e-3 * more


def with_square(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return flat(logits, labels) + 1e-3 * logits.square().sum(-1).mean()


def weighted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return flat(logits, labels, weight=torch.ones(WORDS, dtype=logits.dtype))


def squared(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.square().mean()


BAD = {
    "other use": (with_square, r"cannot split aten.sum.*uses the logits.*beside"),
    "a sum of gradients": (
        with_two_more,
        r"with one barrier cannot scale.*Ask for vocab_parallel=\"2-barrier\"",
    ),
    "class weights": (weighted, "class weights"),
    "no cross-entropy": (squared, r"no cross-entropy.*the model itself \(.*test_vocabulary.py:\d+\)"),
    "no projection": (
        lambda z, y: flat(z.softmax(-1), y),
        "cannot split aten._softmax|not the projection",
    ),
    "without the first columns": (
        lambda z, y: flat(z[..., 1:], y),
        "To leave out columns of the logits, take the first",
    ),
    "columns by index": (
        lambda z, y: flat(z[..., torch.arange(9)], y),
        r"aten.index.Tensor.* or mask others",
    ),
    "log-softmax twice": (
        lambda z, y: flat(z.log_softmax(-1), y),
        r"cannot split aten._log_softmax_backward_data.* \(.*test_vocabulary.py:\d+\)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_split_is_named(name: str) -> None:
    loss, message = BAD[name]
    with pytest.raises(VocabularyError, match=message):
        spread(words(loss), 2, "1f1b", "1-barrier")


class SparseTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 4, sparse=True), nn.Linear(4, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return flat(self.head(self.words(x)), x)


def test_a_table_with_sparse_gradients_is_named() -> None:
    with pytest.raises(VocabularyError, match=r"cannot split aten._sparse.*without sparse=True"):
        fxpipe.compile(
            SparseTable(),
            (torch.zeros(2, 3, dtype=torch.long),),
            ranks=2,
            microbatches=2,
            schedule="1f1b",
            vocab_parallel="1-barrier",
        )


def test_fewer_words_than_ranks() -> None:
    case = Case(lambda: Chain(3), lambda rows: {"x": torch.randn(rows, WIDTH), "y": torch.arange(rows) % 3})
    with pytest.raises(VocabularyError, match="3 entries for 4 ranks"):
        spread(case, 4, "1f1b", "1-barrier")


class Small(nn.Module):
    """Beside the vocabulary layers, a projection and maybe a tanh; the loss makes a mask of the labels."""

    def __init__(self, activation: bool):
        super().__init__()
        self.first, self.head, self.activation = nn.Linear(8, 16), nn.Linear(16, 8), activation

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        logits = self.head(hidden.tanh() if self.activation else hidden)
        return F.cross_entropy(logits, y, label_smoothing=0.1)


def small(activation: bool) -> Case:
    return Case(
        lambda: Small(activation).double(),
        lambda rows: {"x": torch.randn(rows, 8, dtype=torch.float64), "y": torch.randint(8, (rows,))},
    )


def test_no_stage_is_left_with_values_that_each_computes_for_itself() -> None:
    case = small(activation=True)
    pipe = spread(case, 2, "zb-h1", True)
    assert {s.color.stage for s in pipe.sections if s.phase == "F"} == {0, 1, 2, 3}
    agrees(case, pipe, 1e-10)


def test_a_model_of_fewer_stages_than_ranks_beside_its_vocabulary_layers() -> None:
    case = small(activation=False)
    with pytest.raises(PartitionError, match=r"1 stage at most.*With vocab_parallel .* without its vocab"):
        spread(case, 2, "zb-h1", True)
    pipe = spread(case, 2, "zb-h1", "auto")
    assert pipe.plan.vocabulary is None
    agrees(case, pipe, 1e-10)


def test_auto_goes_on_without_and_says_so() -> None:
    with pytest.warns(UserWarning, match="vocab_parallel='auto' goes on without.*no cross-entropy"):
        pipe = spread(words(squared), 2, "1f1b", "auto")
    assert pipe.plan.vocabulary is None


def test_auto_takes_two_barriers_where_one_is_not_enough() -> None:
    pipe = spread(words(lambda z, y: flat(z + z.tanh(), y)), 2, "auto", "auto")
    assert {attempt.barriers for attempt in pipe.plan.tried} == {0, 2}
    assert len({attempt.stages_per_rank for attempt in pipe.plan.tried if attempt.barriers}) == 2


@pytest.mark.variation
def test_auto_decides_by_simulated_time() -> None:
    """A large vocabulary is spread, one of a few words is not."""
    large, small = (
        fxpipe.compile(
            Chain(classes, 512),
            {"x": torch.randn(256, 512), "y": torch.zeros(256, dtype=torch.long)},
            ranks=4,
            microbatches=MICROBATCHES,
            schedule="zb-h1",
            vocab_parallel="auto",
        )
        for classes in (20_000, 4)
    )
    assert large.plan.vocabulary is not None
    assert small.plan.vocabulary is None
    chosen = spread(words(flat), 2, "1f1b", "auto").simulate().seconds
    seconds = [spread(words(flat), 2, "1f1b", choice).simulate().seconds for choice in BARRIERS]
    assert chosen == min(seconds)
    tried = spread(words(flat), 2, "auto", "auto").plan.tried
    assert {attempt.barriers for attempt in tried} == {0, 1, 2}


def test_an_unknown_choice() -> None:
    with pytest.raises(fxpipe.errors.OptionError, match="vocab_parallel is '3-barrier'"):
        spread(words(flat), 2, "1f1b", "3-barrier")


# -- evaluation -------------------------------------------------------------------------------------------


@pytest.mark.in_ci("gpt2-1-barrier-1f1b")
@pytest.mark.parametrize(
    ("name", "vocab_parallel", "schedule"),
    [
        ("gpt2", False, "auto"),
        ("gpt2", "1-barrier", "1f1b"),
        pytest.param("gpt2", "2-barrier", "zb-v", marks=pytest.mark.variation),
        pytest.param("t5", False, "zb-h1", marks=pytest.mark.variation),
        pytest.param("t5", "1-barrier", "interleaved", marks=pytest.mark.variation),
        ("t5", "2-barrier", "1f1b"),
    ],
)
def test_evaluation_gives_the_loss_alone(name: str, vocab_parallel: str | bool, schedule: str) -> None:
    case = language_case(name)
    model, data = case.build().eval(), case.data(MICROBATCHES)
    with captured_once(case, MICROBATCHES, "evaluation"):
        pipe = fxpipe.compile(
            model,
            case.example(),
            ranks=2,
            microbatches=MICROBATCHES,
            schedule=schedule,
            vocab_parallel=vocab_parallel,
            loss_fn=case.loss_fn,
            gradients=False,
            effort=EFFORT,
        )
    result = pipe.run_local(data)
    assert result.grads == {}
    assert relative_error(result.loss, eager(model, data, MICROBATCHES, case.loss_fn).loss) <= 1e-12
    behind = [n for s in pipe.sections if s.phase != "F" for n in s.graph.nodes]
    assert not any("mm" in str(n.target) for n in behind)


@pytest.mark.variation
@pytest.mark.parametrize("barriers", with_variations(["1-barrier", "2-barrier"], ["1-barrier"]))
def test_costs_for_other_sizes_are_those_of_a_compilation_at_them(barriers: str) -> None:
    def compiled(rows: int, length: int, dimensions: dict[str, int] | None) -> fxpipe.Pipeline:
        ids = torch.zeros(rows, length, dtype=torch.long)
        with captured_once("other sizes", rows, length, dimensions is None):
            return fxpipe.compile(
                Words(flat, tied=True),
                {"ids": ids, "labels": ids},
                ranks=2,
                microbatches=MICROBATCHES,
                schedule="1f1b",
                vocab_parallel=barriers,
                split_points=["second"],
                dimensions=dimensions,
            )

    sizes = {"microbatch": 3, "sequence": 20}
    found = compiled(2, 6, {"sequence": 6}).simulate(sizes).costs
    expected = compiled(3, 20, None).simulate().costs
    for one, other in zip(found.stages, expected.stages, strict=True):
        assert (one.saved_activations, one.saved_for_weight) == (
            other.saved_activations,
            other.saved_for_weight,
        )
        assert one.total == pytest.approx(other.total, rel=1e-9)
    assert [edge.bytes for edge in found.edges] == [edge.bytes for edge in expected.edges]
