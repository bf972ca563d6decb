"""A fixed sample of the coverage suite (`make coverage`), and that the suite sees what it is there to see."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.model_coverage.case import Case, Subject, leaves_loss
from benchmarks.model_coverage.examine import EAGER, FAILED, REFUSED, RIGHT, WRONG, Row, examine
from benchmarks.model_coverage.options import OPTIONS
from benchmarks.model_coverage.reference import Results, difference
from benchmarks.model_coverage.report import text_of
from benchmarks.model_coverage.sources import find
from benchmarks.model_coverage.state import aliases_of, changed_attributes, changed_tensors, state_of

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]

# Each option, and the parts of models that are hard: state, names, words beside pictures, routing.
RUN = [
    ("transformers/gpt2", "vocab"),
    ("transformers/qwen3_moe", "recompute"),
    ("transformers/resnet", "offload"),
    ("transformers/doge", "zb-h1"),
    ("torch.nn/LSTM", "zb-h1"),
    ("torch examples/dcgan", "recompute"),
    ("torch examples/two_names_and_a_cache", "zb-h1"),
    ("torch examples/vq_ema", "auto"),
    ("torch examples/momentum_encoder", "recompute"),
]
REFUSE = [
    ("torch.nn/Embedding_max_norm", "zb-h1", "CaptureError"),
    ("torch.nn/loss_MSE", "vocab", "VocabularyError"),
]


@pytest.fixture(autouse=True)
def defaults():
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)


def rows_of(key: str, option: str) -> list[Row]:
    rows = list(examine(find(key), [option]))
    assert [row.option for row in rows] == [EAGER, option], rows
    return rows


#: Of models that other tests have as well.
VARIATIONS = (
    "transformers/gpt2", "transformers/resnet", "transformers/doge", "torch.nn/LSTM", "torch examples/dcgan"
)  # fmt: skip


@pytest.mark.in_ci("torch examples/two_names_and_a_cache-zb-h1", "torch examples/vq_ema-auto")
@pytest.mark.parametrize(
    ("key", "option"),
    [
        pytest.param(*run, marks=[pytest.mark.variation] if run[0] in VARIATIONS else [], id="-".join(run))
        for run in RUN
    ],
)
def test_right(key, option):
    _, row = rows_of(key, option)
    assert row.outcome == RIGHT, row
    assert row.error <= row.bound


@pytest.mark.parametrize(
    ("key", "option", "kind"), REFUSE, ids=[f"{key}-{option}" for key, option, _ in REFUSE]
)
def test_refused(key, option, kind):
    _, row = rows_of(key, option)
    assert (row.outcome, row.kind) == (REFUSED, kind), row


class _OnAGrid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return self.layers(x)[:, torch.repeat_interleave(torch.arange(4), grid[0])].square().mean()


@pytest.mark.parametrize(("last", "outcome", "fixed"), [(1, RIGHT, "grid"), (2, REFUSED, "")])
def test_an_input_is_fixed_where_the_error_says_so(last, outcome, fixed):
    def batch(rows: int) -> dict[str, torch.Tensor]:
        grid = torch.ones(rows, 4, dtype=torch.long)
        grid[6:] = last  # of the fourth microbatch
        return {"x": torch.randn(rows, 4), "grid": grid}

    _, row = examine(Case("a", "grid", lambda: Subject(_OnAGrid(), batch)), ["zb-h1"])
    assert (row.outcome, row.fixed) == (outcome, fixed), row


def results(loss: float, grad: float, buffer: float) -> Results:
    full = torch.full((3,), 1.0)
    tensor = torch.tensor
    return Results(
        tensor(loss),
        {"w": tensor([1.0, grad]), "zero": 1e-18 * full},
        {"mean": tensor([buffer, 1.0])},
    )


@pytest.mark.parametrize(
    ("found", "error", "where"),
    [
        (results(2.0, 3.0, 0.5), 0.0, "loss"),
        (results(2.2, 3.0, 0.5), 0.1, "loss"),
        (results(2.0, 3.3, 0.5), 0.1, "gradient of w"),
        (results(2.0, 3.0, 0.75), 0.25, "buffer mean"),
        (results(2.0, float("nan"), 0.5), float("inf"), "gradient of w"),
    ],
)
def test_the_largest_difference_is_found(found, error, where):
    off, place = difference(found, results(2.0, 3.0, 0.5), epsilon=0.0)
    assert (off, place) == (pytest.approx(error, abs=1e-7), where)


def test_a_gradient_that_is_zero_but_for_rounding_may_be_missing():
    expected = results(2.0, 3.0, 0.5)
    found = Results(expected.loss, {"w": expected.grads["w"]}, expected.buffers)
    assert difference(found, expected, epsilon=2e-16)[0] == 0.0
    assert difference(found, expected, epsilon=0.0) == (float("inf"), "gradient of zero is missing")


def test_a_model_that_was_touched_is_seen():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = state_of(model)
    assert changed_tensors(model, before) == changed_attributes(model, before) == []
    model[1].num_batches_tracked += 1
    model[0].cache = [{"key": FakeTensorMode().from_tensor(torch.ones(2))}]
    assert changed_tensors(model, before) == [
        "0.cache holds a FakeTensor",
        "1.num_batches_tracked has other values",
    ]
    assert changed_attributes(model, before) == ["the attribute 0.cache is new"]
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    assert "0.weight is another object, of type Parameter" in changed_tensors(model, before)


def test_aliases_are_names_that_share_memory():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert aliases_of(model) == []
    model[1].weight = model[0].weight
    assert aliases_of(model) == [["0.weight", "1.weight"]]


def test_the_loss_of_any_output_depends_on_each_element():
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    leaves_loss({"a": (x * 1, None), "ids": torch.ones(2, dtype=torch.long)}, None).backward()
    assert x.grad.unique().numel() == 4
    with pytest.raises(ValueError, match="no floating-point tensor"):
        leaves_loss(x.detach(), None)


def test_the_page_counts_models_by_their_worst_option():
    def row(case, option, outcome, kind="", detail=""):
        return {**Row(case, option, outcome, kind, detail, compile_s=1.0).to_json(), "commit": "abc"}

    rows = [
        row("a/good", EAGER, RIGHT),
        *(row("a/good", option, RIGHT) for option in ("zb-h1", "auto", "recompute")),
        {**row("a/good", "offload", RIGHT), "fixed": "grid"},
        row("a/good", "vocab", REFUSED, "VocabularyError", "vocab_parallel found no cross-entropy"),
        row("a/bad", EAGER, RIGHT),
        *(row("a/bad", option, RIGHT) for option in OPTIONS if option != "recompute"),
        row("a/bad", "recompute", WRONG, "numbers", "loss is off"),
        row("b/untrained", EAGER, FAILED, "ValueError", "no <input>"),
    ]
    page = text_of(rows, {"date": "2026-01-02", "cases": 7, "machine": "", "python": "", "versions": ""})
    assert "Right with every option tried: 1, 1 of them with `fixed=[…]`" in page
    assert "refused clearly: 0; failed" in page
    assert "3 of 7 cases of the suite, at 1 commits" in page
    assert "wrong: 1." in page
    assert "| a | 2 | 1 | 1 | 0 | 0 | 1 | 0 | 2/2 | 2/2 | 1/2 | 2/2 | 1/1 |" in page
    cells = [re.findall("<td>(.*?)</td>", line) for line in page.splitlines() if line.startswith("<tr>")]
    assert cells == [
        ["a/bad", "wrong", "zb-h1, auto, offload, vocab", "recompute: numbers: loss is off"],
        ["a/good", "right, fixed", "zb-h1, auto, recompute, offload (grid fixed)", ""],
        ["b/untrained", "not counted", "", "ValueError: no &lt;input&gt;"],
    ]


def test_the_page_is_that_of_the_rows():
    rows = [
        json.loads(line) for line in (ROOT / "benchmarks/results/coverage.jsonl").read_text().splitlines()
    ]
    run = json.loads((ROOT / "benchmarks/results/coverage_run.json").read_text())
    assert (ROOT / "docs/coverage.md").read_text() == text_of(rows, run)
