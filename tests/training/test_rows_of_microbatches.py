"""Steps of microbatches with rows of their own, beside their lengths, against eager PyTorch."""

import json
from collections.abc import Callable

import pytest
import torch
from lengths_model import LENGTH, ROWS, Words, eager, microbatch, words
from torch import nn
from torch.nn import functional as F

import fxpipe
from fxpipe.cli import main

Batch = list[dict[str, torch.Tensor]]
SIZES = ((1, 16), (16, 2), (3, 9), (2, 16), (5, 5), (1, 3), (2, 4))


pytestmark = pytest.mark.usefixtures("double_in_module")


@pytest.fixture(scope="module")
def pipe(double_in_module: None) -> fxpipe.Pipeline:
    return words(dimensions=ROWS, outputs=["head"])


def check_step(pipe: fxpipe.Pipeline, batch: Batch, given: object = None, **options: object) -> object:
    model = Words()
    model.load_state_dict(pipe.state_dict())
    result, loss = pipe.run_local(batch if given is None else given, **options), eager(model, batch)
    torch.testing.assert_close(result.loss, loss)
    torch.testing.assert_close(result.grads, {name: p.grad for name, p in model.named_parameters()})
    return result


@pytest.mark.parametrize("sizes", [SIZES[:3], SIZES[3:], SIZES[2:3], SIZES])
def test_a_list_of_microbatches(pipe, sizes):
    batch = [microbatch(length, rows) for rows, length in sizes]
    found = check_step(pipe, batch, outputs=["head"]).listed["head"]
    assert [(*x.shape[:2],) for x in found] == [*sizes]


@pytest.mark.parametrize("sizes", [SIZES, SIZES[::-1]])
def test_the_memory_of_a_step(pipe, sizes):
    lengths = [{"rows": rows, "sequence": length} for rows, length in sizes]
    simulated = pipe.simulate(lengths=lengths).peak_memory
    result = check_step(pipe, [microbatch(n, rows) for rows, n in sizes], measure_memory=True)
    for measured, expected, most in zip(
        result.peak_saved, simulated, pipe.plan.prediction.peak_memory, strict=True
    ):
        assert measured == pytest.approx(expected, rel=0.05)
        assert expected <= most * (1 + 1e-9)


def test_a_batch_of_other_rows(pipe):
    """One for all microbatches, of other lengths too; also its outputs."""
    for rows, length in ((3, 16), (12, 7)):
        batch = microbatch(length, rows)
        result = check_step(pipe, [batch], batch, outputs=["head"])
        assert result.outputs["head"].shape[:2] == (rows, length)


def test_programs_hold_products_of_names(pipe):
    first, _ = pipe.artifact.programs
    assert "def messages(rows, sequence):" in first
    assert "((rows, sequence, 8), (8 * sequence, 8, 1), torch.float64)" in first
    assert "[rows * sequence, 8]" in first
    assert pipe.check().lengths[-2:] == ("rows 1, sequence 16", "rows 1, sequence 2")


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            lambda: [microbatch(5, 3), microbatch(9, 4)],
            r"Microbatch 1 has rows 4 in 'ids'. The programs take rows from 1 to 3 with sequence 9: give few",
        ),
        (
            lambda: [{**microbatch(5, 3), "labels": microbatch(5, 2)["labels"]}],
            "Microbatch 0 has rows 3 in 'ids' and 2 in 'labels'",
        ),
        (lambda: microbatch(5, 7), "'ids' has 7 rows, which do not make 3 microbatches"),
        (
            lambda: [{name: x[:0] for name, x in microbatch(5).items()}],
            "Microbatch 0 has rows 0 .* with sequence 5: give more rows in fewer",
        ),
        (lambda: microbatch(16, 9), "The batch has rows 3 .* from 1 to 2 with sequence 16"),
    ],
    ids=["tokens", "leaves", "division", "no rows", "batch"],
)
def test_rows_that_are_refused(pipe, batch, message):
    with pytest.raises(fxpipe.BatchError, match=message):
        pipe.run_local(batch())


@pytest.mark.in_ci("replicas")
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "zb-h1", "microbatches": 4, "offload": True, "recompute": "norms"},
        pytest.param({"replicas": 2, "shard": "parameters"}, marks=pytest.mark.slow),
    ],
    ids=["offload", "replicas"],
)
def test_memory_and_replicas(options):
    """The order of replicas is by the slower microbatch of both, of which one has more rows, the other is
    longer; together they would be larger than the example."""
    pipe = words(dimensions=ROWS, **options)
    number = 4 * pipe.plan.replicas
    for sizes in (SIZES, SIZES[:1]):
        sizes = (sizes * number)[:number]
        check_step(pipe, [microbatch(length, rows) for rows, length in sizes])


def test_samples_in_rows_by_length(pipe, tmp_path, capsys):
    """As many short ones in a microbatch as it has tokens."""
    pipe.save(tmp_path / "saved")
    command = [
        "simulate",
        "--costs",
        str(tmp_path / "saved"),
        "--lengths",
        "16,9,8,4,4,4,3",
        "--tokens",
        "16",
    ]
    assert main([*command, "--json"]) == 0
    by_name = {way["way"]: way for way in json.loads(capsys.readouterr().out)["ways"]}
    # Microbatches of 2 × 16, 4 × 8 and 1 × 3.
    found = by_name["rows by length"]
    assert (found["microbatches"], found["filled"]) == (3, 48 / 67)
    lengths = [{"rows": rows, "sequence": n} for rows, n in ((2, 16), (4, 8), (1, 3))]
    assert found["seconds"] == pipe.simulate(lengths=lengths).seconds


class Prompted(Words):
    """Behind the same tokens in each row."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        prompt = self.positions.weight[:24].expand(len(ids), -1, -1)
        x = self.blocks[0](torch.cat([prompt, self.embed(ids)], 1))
        return F.cross_entropy(self.head(self.blocks[1](x)[:, 24:]).flatten(0, 1), labels.flatten())


@pytest.mark.variation
def test_a_microbatch_larger_than_the_example():
    """Many short rows, where each has other tokens beside its own."""
    model = Prompted()
    for block in model.blocks:
        block.mask = torch.ones(64, 64, dtype=torch.bool).tril()
    pipe = fxpipe.compile(model, microbatch(LENGTH), ranks=2, microbatches=2, dimensions=ROWS)
    batch = [microbatch(LENGTH), microbatch(2, 16)]
    refusal = r"With rows 16, sequence 2, microbatch 1 alone needs .*: give at most rows 6, or compile with"
    with pytest.raises(fxpipe.BatchError, match=refusal):
        pipe.run_local(batch)
    with pytest.raises(fxpipe.BatchError, match=r"With rows 7, sequence 2, .* at most rows 6,"):
        pipe.run_local([microbatch(2, 7)])
    batch = [microbatch(LENGTH), microbatch(2, 6)]
    torch.testing.assert_close(pipe.run_local(batch).loss, eager(model, batch))


class Rated(nn.Module):
    """Rows of numbers, a mean over rows, and another one over their elements."""

    def __init__(self, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.loss = nn.Linear(4, 8), nn.Linear(8, 4), loss

    def forward(self, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.loss((self.last(self.first(x).tanh()) - y).square().mean(-1), mask)


def elements(mask: torch.Tensor) -> float:
    return mask.numel()


def rows_alone(mask: torch.Tensor) -> float:
    return len(mask)


def one(mask: torch.Tensor) -> float:
    return 1.0


LOSSES: dict[str, tuple[Callable[..., torch.Tensor], Callable[[torch.Tensor], float]]] = {
    "mean": (lambda x, mask: x.mean(), elements),
    "mean of rows": (lambda x, mask: x.mean(1).mean(), rows_alone),
    "mean of means over rows": (lambda x, mask: x.mean(0).mean(), elements),
    "mean of rows, tokens first": (lambda x, mask: x.T.mean(0).mean(), rows_alone),
    "mean over rows, tokens first": (lambda x, mask: x.T.mean(1).mean(), elements),
    "mean of sums over rows": (lambda x, mask: x.sum(0).mean(), one),
    "divided by a number": (lambda x, mask: x.sum() / mask.numel(), elements),
    "divided by a float": (lambda x, mask: x.sum() / float(mask.numel()), elements),
    "divided twice": (lambda x, mask: x.sum() / mask.shape[0] / mask.shape[1], elements),
    "divided by rows": (lambda x, mask: (x.sum(1) / x.shape[1]).sum() / len(x), rows_alone),
    "mean of a mask": (lambda x, mask: (x * mask).mean() / mask.mean(), lambda mask: float(mask.sum())),
    "sum of a mask": (lambda x, mask: (x * mask).sum() / mask.sum(), lambda mask: float(mask.sum())),
    "mask of rows": (lambda x, mask: ((x * mask).sum(1) / mask.sum(1)).mean(), rows_alone),
    "sum": (lambda x, mask: x.sum(), one),
}


def rated(rows: int, length: int) -> dict[str, torch.Tensor]:
    mask = (torch.rand(rows, length) < 0.5).double()
    mask[:, 0] = 1
    return {"x": torch.randn(rows, length, 4), "y": torch.randn(rows, length, 4), "mask": mask}


@pytest.mark.in_ci("time-mean of a mask", "rows-mean", "rows-sum of a mask")
@pytest.mark.parametrize("name", [*LOSSES])
@pytest.mark.parametrize(
    "dimensions",
    [pytest.param({"time": 12}, marks=pytest.mark.slow), {"rows": 3, "time": 12}],
    ids=["time", "rows"],
)
def test_what_counts_in_the_step(name, dimensions):
    function, weight = LOSSES[name]
    torch.manual_seed(0)
    model = Rated(function)
    pipe = fxpipe.compile(model, rated(3, 12), ranks=1, microbatches=3, dimensions=dimensions)
    batch = [rated(rows if len(dimensions) > 1 else 3, n) for rows, n in ((1, 3), (3, 12), (5, 7))]
    weights = [weight(each["mask"]) for each in batch]
    losses = [model(**each) * w for each, w in zip(batch, weights, strict=True)]
    loss = sum(losses[1:], losses[0]) / sum(weights)
    grads = torch.autograd.grad(loss, [*model.parameters()])
    result = pipe.run_local(batch)
    torch.testing.assert_close(result.loss, loss.detach())
    names = [name for name, _ in model.named_parameters()]
    torch.testing.assert_close(result.grads, dict(zip(names, grads, strict=True)))


def test_a_rank_that_has_something_of_each_row_alone():
    """Its limit is for the most rows that a microbatch may have, not for those of the example."""
    model = Rated(lambda x, mask: ((x * mask).sum(1) / mask.sum(1)).mean())
    pipe = fxpipe.compile(
        model, rated(3, 12), ranks=2, microbatches=1, schedule="1f1b", dimensions={"rows": 3, "time": 12}
    )
    batch = [rated(18, 2), rated(1, 12)]
    loss = sum(model(**each) * len(each["x"]) for each in batch) / 19
    torch.testing.assert_close(pipe.run_local(batch).loss, loss.detach())


@pytest.mark.parametrize(
    "loss",
    [lambda x, mask: x.mean() * mask.shape[1], lambda x, mask: x.sum() / mask.sum() * mask.numel()],
    ids=["mean", "count"],
)
def test_a_mean_times_a_length(loss):
    pipe = fxpipe.compile(Rated(loss), rated(3, 12), ranks=1, microbatches=2, dimensions={"time": 12})
    with pytest.raises(
        fxpipe.BatchError, match=r"mean times a number that follows from lengths, in .*\.py:\d+"
    ):
        pipe.run_local([rated(3, 5)])


def test_a_mean_that_cannot_be_weighed():
    """Of the mean of a microbatch over means over its rows, and other elements."""
    model = Rated(lambda x, mask: (x.mean(0) + x.mean((0, 1))).mean())
    with pytest.warns(UserWarning, match="is the mean of their own means"):
        pipe = fxpipe.compile(
            model, rated(3, 12), ranks=1, microbatches=2, dimensions={"rows": 3, "time": 12}
        )
    batch = [rated(1, 12), rated(3, 7)]
    own = torch.stack([model(**each) for each in batch]).mean()
    torch.testing.assert_close(pipe.run_local(batch).loss, own.detach())


@pytest.mark.variation
def test_a_product_of_means_is_each_microbatchs_own():
    """As in an auxiliary loss of experts; a loss of labels is warned of nothing."""
    model = Rated(lambda x, mask: x.mean() + (x.sum(0) / float(len(x))).square().sum())
    with pytest.warns(UserWarning, match=r"goes on with means over .* in .*\.py:\d+.*, as an auxiliary loss"):
        pipe = fxpipe.compile(
            model, rated(3, 12), ranks=1, microbatches=2, dimensions={"rows": 3, "time": 12}
        )
    batch = [rated(2, 12), rated(3, 7)]
    each = [(model.first(one["x"]).tanh(), one) for one in batch]
    x = [(model.last(y) - one["y"]).square().mean(-1) for y, one in each]
    own = [a.mean(0).square().sum() for a in x]
    loss = torch.cat([a.flatten() for a in x]).mean() + torch.stack(own).mean()
    torch.testing.assert_close(pipe.run_local(batch).loss, loss.detach())


class OneRow(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(5, 5), nn.Linear(5, 5), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.function(self.first(x))).square().sum()


def rows_of(pipe: fxpipe.Pipeline) -> tuple[int, int, bool]:
    (rows,) = pipe.lengths
    return rows.least, rows.example, rows.leading


@pytest.mark.in_ci("broadcast", "branch of both")
@pytest.mark.parametrize(
    ("function", "least"),
    [
        (lambda x: x + torch.ones(1, 12, 5), 1),
        (lambda x: x.expand(x.shape[0], -1, -1) if x.shape[0] != 1 else x, 1),
        (lambda x: x.tanh() if x.shape[0] > 1 else x, 2),
        (lambda x: x.squeeze() * 2, 2),
        (lambda x: x.tanh() if x.shape[0] == 1 and x.shape[1] > 8 else x, 2),
    ],
    ids=["broadcast", "branch without effect", "branch", "squeeze", "branch of both"],
)
def test_one_row_where_it_is_the_same_step(function, least):
    options = {"ranks": 1, "microbatches": 1, "dimensions": {"rows": 4}}
    assert rows_of(fxpipe.compile(OneRow(function), (torch.randn(4, 12, 5),), **options)) == (least, 4, True)


def test_names_of_rows():
    """Any that is as long as no other dimension, or "microbatch"."""
    model, options = OneRow(torch.tanh), {"ranks": 1, "microbatches": 1}
    with pytest.raises(fxpipe.SizeError, match=r"'rows' is one row.*give an example of two rows or more"):
        fxpipe.compile(model, (torch.randn(1, 12, 5),), dimensions={"rows": 1, "time": 12}, **options)
    x = torch.randn(5, 12, 5)
    assert rows_of(fxpipe.compile(model, (x,), dimensions={"microbatch": 5}, **options)) == (1, 5, True)
    message = "'rows' is not the leading dimension, as another one is as long: .* or call it 'microbatch'"
    with pytest.raises(fxpipe.SizeError, match=message):
        fxpipe.compile(model, (x,), dimensions={"rows": 5}, **options)
