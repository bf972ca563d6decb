"""Measured costs: what sections are run on, and models whose sections are hard to run on synthetic inputs."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from zoo import Case, Chain, eager, numbers, relative_error

import fxpipe
from fxpipe.cost import profile
from fxpipe.cost.calibration.clock import Timed

pytestmark = pytest.mark.usefixtures("double")


class Expanded(Chain):
    """Saves a value whose elements lie in the same memory."""

    def between(self, x, i):
        return x * torch.linalg.norm(x, dim=0).expand_as(x) * x.softmax(-1).amax(0).expand_as(x)


class Checked(Chain):
    """Branches on the data; small numbers would take the other branch."""

    def forward(self, x, y):
        return super().forward(x, y) if x.abs().max() > 0.3 else super().forward(y, x)


class Solved(Chain):
    def between(self, x, i):
        return torch.linalg.solve(x @ x.mT + torch.eye(len(x)), x)


@pytest.mark.in_ci("Checked")
@pytest.mark.slow
@pytest.mark.parametrize("model", [Expanded, Checked])
def test_measured_costs(model):
    case = Case(model, numbers)
    pipe = fxpipe.compile(
        case.build(), case.example(), ranks=2, microbatches=2, schedule="1f1b", costs="measured"
    )
    assert all(cost.forward > 0 and cost.backward > 0 for cost in (s.costs for s in pipe.stages))
    batch = case.data(2)
    expected = eager(case.build(), batch, 2)
    assert relative_error(pipe.run_local(batch).loss, expected.loss) <= 1e-10


def test_an_op_that_needs_real_inputs():
    case = Case(Solved, numbers)
    with pytest.raises(fxpipe.ScheduleError, match=r"synthetic inputs.* lu_solve.* costs='analytic'"):
        fxpipe.compile(
            case.build(), case.example(), ranks=2, microbatches=2, schedule="1f1b", costs="measured"
        )


# -- the inputs of sections ----------------------------------------------------------------------------


class Words(nn.Module):
    """Looks rows up by the example's words, by a table of its own, and by positions that it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 8), nn.Embedding(50, 8)
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 50)
        self.register_buffer("order", torch.randperm(6))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(self.order)
        x = self.norm(x.mT).mT.tanh()
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def sentences() -> dict[str, torch.Tensor]:
    return {"ids": torch.randint(1, 50, (4, 6)), "labels": torch.randint(1, 50, (4, 6))}


def measured(model: nn.Module, example: Any, **options: Any) -> fxpipe.Pipeline:
    given: dict[str, Any] = {
        "ranks": 2,
        "microbatches": 2,
        "schedule": "1f1b",
        "costs": "measured",
        **options,
    }
    return fxpipe.compile(model, example, **given)


@pytest.fixture
def timed(monkeypatch) -> list[SimpleNamespace]:
    """Per section the tensors it is run on, and those that a run has overwritten as they are made again."""
    found: list[SimpleNamespace] = []

    def medians_in_turns(sections: Sequence[Timed], device: torch.device) -> list[float]:
        for section in sections:
            inputs = [x for x in section.run.args if isinstance(x, torch.Tensor)]
            given = [x.clone() for x in inputs]
            section.run()
            written = [x for x, old in zip(inputs, given, strict=True) if not torch.equal(x, old)]
            section.before()
            found.append(SimpleNamespace(given=given, made_again=written))
        return [1.0] * len(sections)

    monkeypatch.setattr(profile, "medians_in_turns", medians_in_turns)
    return found


def test_sections_read_the_indices_of_the_example(timed):
    """Zeros would add all rows to one, which takes other times than the rows of a text."""
    torch.manual_seed(0)
    model, example = Words(), sentences()
    measured(model, example)
    found = [x for section in timed for x in section.given if not x.is_floating_point() and x.numel() > 1]
    known = {"ids": example["ids"], "labels": example["labels"], "order": model.order}
    read = [[name for name, k in known.items() if torch.equal(x.flatten(), k.flatten())] for x in found]
    assert sorted({name for names in read for name in names}) == ["ids", "labels", "order"]
    assert all(read), "an index that is none of the example's or the model's"


def test_what_other_sections_make_of_the_labels_goes_with_them(timed):
    """W of a shard reads the labels, and from F which of them are ignored: with zeros for these, an ignored
    label would be an index."""
    torch.manual_seed(0)
    example = sentences()
    example["labels"][0, :3] = -100
    measured(Words(), example, vocab_parallel="1-barrier")
    ignored = (example["labels"] == -100).flatten()
    masks = [x for section in timed for x in section.given if x.dtype is torch.bool]
    assert any(torch.equal(x.flatten(), ignored) for x in masks)


def test_the_model_stays_as_it_is():
    """Sections overwrite buffers: the batch norm's."""
    torch.manual_seed(0)
    model = Words()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    measured(model, sentences())
    after = model.state_dict()
    assert all(torch.equal(after[name], x) for name, x in before.items())
    assert all(p.grad is None for p in model.parameters())


def test_the_random_numbers_stay_as_they_are():
    model, example = Powers(), {"x": torch.randn(8, 64)}
    before = torch.get_rng_state()
    measured(model, example)
    assert torch.equal(torch.get_rng_state(), before)


class Powers(nn.Module):
    """Its backward overwrites what the forward saved, again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).sigmoid()).pow(4).mean()


def test_overwritten_inputs_are_made_again_for_each_run(timed):
    torch.manual_seed(0)
    measured(Powers(), {"x": torch.randn(256, 64)})
    made_again = [x for section in timed for x in section.made_again if x.shape == (256, 64)]
    assert made_again
    assert all(x.std().item() == pytest.approx(0.02, rel=0.05) for x in made_again)


def test_a_model_without_values():
    with torch.device("meta"):
        model, example = Words(), sentences()
    pipe = measured(model, example)
    assert all(s.costs.total > 0 for s in pipe.stages)
