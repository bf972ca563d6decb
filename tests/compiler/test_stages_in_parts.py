"""Stages cut into parts: the numbers of eager, as many parts as a limit needs, what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from equality import eager_step
from torch import nn
from torch.nn import functional as F
from zoo import CASES, EFFORT, too_far

import fxpipe
from fxpipe.errors import LimitError, OptionError, PartitionError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("double")]
WORDS, WIDTH, LAYERS, MICROBATCHES = 20, 8, 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Twice(Net):
    """All blocks are called twice, and the table is the head's as well."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def batch(microbatches: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {"ids": torch.randint(WORDS, (microbatches, 6))}


def compiled(model: Callable[[], Net] = Net, **options) -> fxpipe.Pipeline:
    given = {"ranks": 2, "microbatches": MICROBATCHES, "schedule": "1f1b"} | options
    return fxpipe.compile(model(), batch(1), **given)


def check_against_eager(pipe: fxpipe.Pipeline, model: type[Net] = Net) -> None:
    microbatches = pipe.plan.step.microbatches * pipe.replicas
    rows = batch(microbatches)
    found = pipe.run_local(rows)
    loss, grads = eager_step(model(), rows, microbatches, None)
    assert too_far({"loss": found.loss, **found.grads}, {"loss": loss, **grads}, 1e-12) == {}


@pytest.mark.in_ci("{'parts': 3}")
@pytest.mark.parametrize(
    "options",
    [
        {"parts": 3},
        {"parts": 2, "vocab_parallel": True, "schedule": "zb-h1"},
        *(
            pytest.param(each, marks=pytest.mark.variation)
            for each in (
                {"parts": 2, "schedule": "zb-v"},
                {"parts": 2, "recompute": "full", "offload": True},
                {"parts": 2, "validation": "post", "schedule": "zb"},
                {"parts": 4, "replicas": 2, "shard": "parameters"},
            )
        ),
    ],
    ids=str,
)
def test_parts_give_the_numbers_of_eager(options):
    pipe = compiled(**options)
    stages = pipe.plan.ranks * (2 if options.get("schedule") == "zb-v" else 1)
    assert len(pipe.schedule.model_stages) == options["parts"] * stages
    check_against_eager(pipe)


def test_a_part_follows_the_other_on_its_rank():
    assert compiled(parts=3).schedule.placement == (0, 0, 0, 1, 1, 1)
    in_v = compiled(parts=2, schedule="zb-v").schedule.placement
    assert in_v == (0, 0, 1, 1, 1, 1, 0, 0)


def test_views_of_what_another_part_has_made_keep_all_of_it():
    """Queries, keys and values are made in one part and used in the next, which saves two of the three."""
    case = CASES["multihead_attention"]
    options = {"ranks": 2, "parts": 3, "microbatches": 2, "schedule": "1f1b", "effort": EFFORT}
    pipe = fxpipe.compile(case.build(), case.example(), **options)
    peaks = pipe.plan.prediction.peak_memory
    assert tuple(rank.peak_bytes for rank in pipe.check().ranks) == peaks
    measured = pipe.run_local(case.data(2), measure_memory=True).peak_saved
    assert measured[0] == peaks[0]


@pytest.mark.variation
def test_as_many_parts_as_the_limit_of_divided_parameters_needs():
    whole = sum(p.nbytes for p in Net().parameters())

    def stages(limit: float, schedule: str = "1f1b") -> int:
        options = {"ranks": 1, "replicas": 4, "shard": "parameters", "memory_limit": limit * whole}
        pipe = compiled(**options, schedule=schedule)
        peaks, held = pipe.simulate().peak_memory, pipe.plan.held
        assert max(a.total + b for a, b in zip(held, peaks, strict=True)) <= limit * whole
        if limit < 3:
            check_against_eager(pipe)
        return len(pipe.schedule.placement)

    assert [stages(limit) for limit in (5.0, 3.0, 2.1)] == [1, 4, 8]
    # Of 4 parts not even the parameters fit, of 8 these and not the activations.
    assert stages(1.8) == 16
    assert stages(2.5, "zb") == 8
    with pytest.raises(LimitError, match="Raise the limit"):
        stages(0.4)


@pytest.mark.variation
def test_parameters_of_several_parts_are_there_once():
    """The plan has what is gathered at most: that of two parts, where each tensor counts once."""
    limit = 3.4 * sum(p.nbytes for p in Twice().parameters())
    pipe = compiled(Twice, ranks=1, replicas=4, shard="parameters", memory_limit=limit, parts=8)
    assert "rt.free_parameters" in pipe.artifact.programs[0]
    assert pipe.check().otherwise == ()
    check_against_eager(pipe, Twice)


@pytest.mark.variation
def test_parameters_that_are_cast_once_a_step_are_there_for_it():
    limit = 2.5 * sum(p.nbytes for p in Net().float().parameters())
    given = {"model": lambda: Net().float(), "ranks": 1, "replicas": 4, "parts": 8, "shard": "parameters"}
    with torch.autocast("cpu", torch.bfloat16):
        whole, pipe = (compiled(**given, memory_limit=each) for each in (None, limit))
    assert all("rt.once(once_a_step, params" in each.artifact.programs[0] for each in (whole, pipe))
    assert "rt.free_parameters" in pipe.artifact.programs[0]
    rows = batch(4 * MICROBATCHES)
    assert torch.equal(pipe.run_local(rows).loss, whole.run_local(rows).loss)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"parts": 0}, OptionError, "parts is 0"),
        ({"parts": "layers"}, OptionError, "parts is 'layers'"),
        ({"parts": "exchanges"}, OptionError, "this model has no such exchange"),
        ({"parts": "exchanges", "dimensions": {"length": 6}}, OptionError, "does not go with dimensions"),
        ({"parts": 99}, PartitionError, "parts"),
    ],
    ids=str,
)
def test_what_parts_are_not(options, error, says):
    with pytest.raises(error, match=says):
        compiled(**options)


@pytest.mark.variation
def test_a_schedule_by_hand_has_its_parts_as_stages():
    by_hand = compiled(parts=2).schedule
    with pytest.raises(OptionError, match="leave out parts"):
        compiled(schedule=by_hand, parts=2)
    assert compiled(schedule=by_hand).schedule.placement == (0, 0, 1, 1)
