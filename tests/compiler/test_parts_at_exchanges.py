"""Stages that are cut at exchanges of the model's own code: the numbers of whole stages."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from zoo import EFFORT, captured_once, relative_error, too_far

import fxpipe
from fxpipe.runtime.program import lanes

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("double")]
WIDTH, ROWS, MICROBATCHES = 4, 6, 2


class Exchange(torch.autograd.Function):
    """To each lane its share of the rows; the gradient back."""

    @staticmethod
    def forward(context, x):
        return lanes.all_to_all(x, 2)

    @staticmethod
    def backward(context, gradient):
        return lanes.all_to_all(gradient, 2)


class Total(torch.autograd.Function):
    """The sum over the lanes."""

    @staticmethod
    def forward(context, x):
        return lanes.all_reduce(x, "sum", 2)

    @staticmethod
    def backward(context, gradient):
        return gradient


class Net(nn.Module):
    """Exchanges the same rows twice: they are used before and behind another exchange."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third, last = self.layers
        x = first(x).tanh()
        one, other = Exchange.apply(x), Exchange.apply(x)
        x = Exchange.apply(second(one).tanh())
        x = third(x).tanh() * other
        return Total.apply(last(Exchange.apply(x)).square().sum())


def batch(microbatches: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(microbatches * ROWS, WIDTH)}


def compiled(parts: int | str = "exchanges", **options) -> fxpipe.Pipeline:
    model, given = Net(), {"microbatches": MICROBATCHES, "schedule": "1f1b", "mean": "microbatch"} | options
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    with fxpipe.local_lanes(2) as mesh, captured_once("exchanges"):
        parallelize_module(model, mesh, {"layers.*": fxpipe.SummedGradients()})
        pipe = fxpipe.compile(model, batch(1), parts=parts, effort=EFFORT, **given)
    pipe.load_state_dict(whole)
    return pipe


def check_against_whole_stages(pipe: fxpipe.Pipeline) -> None:
    expected = compiled(1, ranks=1).run_local(batch(MICROBATCHES))
    found = pipe.run_local(batch(MICROBATCHES), measure_memory=True)
    assert relative_error(found.loss, expected.loss) <= 1e-12
    assert too_far(found.grads, expected.grads, 1e-12) == {}
    # Beside the losses.
    of_lanes = [peak for peak in pipe.plan.prediction.peak_memory for _ in range(2)]
    assert all(a <= b + 64 for a, b in zip(found.peak_saved, of_lanes, strict=True))


def exchanges(pipe: fxpipe.Pipeline) -> list[tuple[set[str], set[str]]]:
    """Per rank what its exchanges give, and what it ends."""
    return [
        ({*re.findall(r"(\w+) = begin_\w+\(", program)}, {*re.findall(r"\bend\((\w+), 2\)", program)})
        for program in pipe.artifact.programs
    ]


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zb", marks=pytest.mark.variation)])
def test_equal_exchanges_whose_results_are_used_in_different_parts(schedule):
    """Each begin has one end."""
    pipe = compiled(ranks=1, schedule=schedule)
    ((begun, _),) = exchanges(pipe)
    assert len(begun) > 3
    check_against_whole_stages(pipe)


@pytest.mark.parametrize(
    "options",
    [
        {"ranks": 3},
        {"ranks": 2, "split_points": ["layers.1"]},
        pytest.param({"ranks": 2, "split_points": ["layers.3"]}, marks=pytest.mark.variation),
        pytest.param({"ranks": 2, "schedule": "zb-v"}, marks=pytest.mark.variation),
        pytest.param({"ranks": 4, "recompute": "full"}, marks=pytest.mark.variation),
    ],
    ids=str,
)
def test_an_exchange_ends_on_the_rank_on_which_it_begins(options):
    pipe = compiled(**options)
    assert all(begun == ended for begun, ended in exchanges(pipe))
    check_against_whole_stages(pipe)


def test_until_it_ends_an_exchange_holds_what_it_gives_and_what_arrives():
    pipe = compiled(ranks=1)
    held = [edge.bytes for edge in pipe.plan.costs.edges if edge.exchange]
    assert min(held) == 2 * ROWS * WIDTH * 8
    (rank,) = pipe.check().ranks
    assert (rank.peak_bytes,) == pipe.plan.prediction.peak_memory


def test_an_evaluation_has_whole_stages():
    pipe = compiled(ranks=2, evaluation=True)
    assert pipe.evaluation is not None
    assert pipe.evaluation.schedule.placement == (0, 1) != pipe.schedule.placement
    expected = compiled(1, ranks=1).run_local(batch(MICROBATCHES)).loss
    assert relative_error(pipe.evaluation.run_local(batch(MICROBATCHES)).loss, expected) <= 1e-12


def test_only_what_is_on_its_way_between_lanes_arrives_and_once():
    pipe = compiled(ranks=1)
    (program,) = pipe.artifact.programs
    end = re.search(r"    (\w+) = end\((\w+), 2\)\n", program)
    assert end is not None
    program = program.replace("\nend = ", "\nnegate = torch.ops.aten.neg_.default\nend = ", 1)
    program = program.replace("\nend = ", "\nclone_of = torch.ops.aten.clone.default\nend = ", 1)
    for edit, says in (
        (f"{end[0]}{end[0]}", "has overwritten"),
        (f"    {end[2]} = clone_of({end[2]})\n{end[0]}", "not on its way between lanes"),
        (f"    {end[2]} = negate({end[2]})\n{end[0]}", "which is on its way between lanes"),
    ):
        programs = (program.replace(end[0], edit, 1),)
        found = replace(pipe, artifact=replace(pipe.artifact, programs=programs)).check()
        assert not found.holds
        assert says in str(found.problems[0]), edit
