"""Experts of a mixture over the lanes: the loss and gradients of eager, and what a lane has no room for."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from equality import eager_step
from tensor_parallel import WIDTH, Experts, Mixture
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from zoo import relative_error, too_far

import fxpipe
from fxpipe.errors import OptionError, RunError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("double")]
LIMIT = 1e-12
EXPERTS, TOP_K, ROWS, LENGTH = 4, 2, 2, 5  # ten tokens: not a multiple of all numbers of lanes


class Net(nn.Module):
    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.mixture, self.other = (Mixture(experts, TOP_K) for _ in range(2))
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.first(x).tanh()
        x = x + self.mixture(x)
        return self.last(x + self.other(x)).square().sum()


def plan(**style) -> dict[str, fxpipe.ExpertParallel]:
    return {f"{name}.experts": fxpipe.ExpertParallel(**style) for name in ("mixture", "other")}


def batch(microbatches: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(microbatches * ROWS, LENGTH, WIDTH)}


def compiled(lanes: int, model: nn.Module | None = None, options=None, **style) -> fxpipe.Pipeline:
    model = model or Net()
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    with fxpipe.local_lanes(lanes) as mesh:
        parallelize_module(model, mesh, plan(**style))
        given = {"microbatches": 3, "schedule": "zb-h1", "effort": 0.1} | (options or {})
        pipe = fxpipe.compile(model, batch(1), ranks=2, **given)
    whole |= {name: x for name, x in model.named_buffers() if "expert_" in name}
    pipe.load_state_dict(whole)
    return pipe


def check_against_eager(pipe: fxpipe.Pipeline, expected: nn.Module) -> None:
    found = pipe.run_local(batch(3))
    loss, grads = eager_step(expected, batch(3), 3, None)
    assert relative_error(found.loss, loss) <= LIMIT
    assert found.grads.keys() == grads.keys()
    assert too_far(found.grads, grads, LIMIT) == {}


@pytest.mark.in_ci("divided-4-{'recompute': 'full', 'parts': 'exchanges', 'schedule': 'zb'}")
@pytest.mark.parametrize(
    ("tokens", "lanes", "options"),
    [
        ("whole", 2, {}),
        ("divided", 4, {"recompute": "full", "parts": "exchanges", "schedule": "zb"}),
        pytest.param("divided", 2, {"parts": "exchanges", "schedule": "1f1b"}, marks=pytest.mark.variation),
        pytest.param("divided", 2, {}, marks=pytest.mark.variation),
        pytest.param("whole", 4, {"recompute": "full"}, marks=pytest.mark.variation),
        *(
            pytest.param(tokens, 2, {"schedule": "zb-v"}, marks=pytest.mark.variation)
            for tokens in ("whole", "divided")
        ),
    ],
    ids=str,
)
def test_each_form_equals_eager(tokens, lanes, options):
    pipe = compiled(lanes, tokens=tokens, options=options)
    check_against_eager(pipe, Net())
    in_parts = len(pipe.schedule.placement) > pipe.plan.ranks * (
        2 if options.get("schedule") == "zb-v" else 1
    )
    assert in_parts == ("parts" in options)


def test_programs_that_exchange_otherwise_are_told():
    """What is on its way is read by its end alone, and by that of the same exchange."""
    pipe = compiled(2, tokens="divided", options={"parts": "exchanges"})
    program = pipe.artifact.programs[0]
    begun = re.search(r"    (\w+) = begin_all_to_all\((\w+), 2\)", program)
    end = re.search(rf"    (\w+) = end\({begun[1]}, 2\)", program)
    edits = (
        (begun[0], begun[0].replace("= begin_all_to_all", "= begin_all_gather")),
        (end[0], f"    {end[1]} = {begun[1]} + 0"),
        (end[0], f"    {end[1]} = all_to_all({begun[1]}, 2)"),
        (end[0], f"{end[0]}\n{end[0]}"),
    )
    for before, after in edits:
        programs = (program.replace(before, after, 1), *pipe.artifact.programs[1:])
        edited = replace(pipe, artifact=replace(pipe.artifact, programs=programs))
        assert before in program
        assert not edited.check().holds, after


@pytest.mark.variation
def test_three_lanes_with_tokens_that_three_does_not_divide():
    check_against_eager(compiled(3, Net(6), tokens="divided"), Net(6))


@pytest.mark.variation
def test_a_capacity_for_every_routing_drops_nothing():
    pipe = compiled(2, tokens="divided", capacity=2, counts=True)
    check_against_eager(pipe, Net())
    state = pipe.full_state_dict()
    assert state["mixture.experts.expert_drops"] == 0
    with torch.no_grad():
        model, x = Net(), batch(3)["x"]
        rows = model.first(x).tanh().flatten(0, 1)
        chosen = model.mixture.router(rows).topk(TOP_K).indices
    assert torch.equal(state["mixture.experts.expert_loads"], chosen.flatten().bincount(minlength=EXPERTS))


class Dropping(Experts):
    """Of each lane's rows for one lane, in their order, those beyond the room have no weight."""

    def __init__(self, lanes: int, room: int) -> None:
        super().__init__()
        self.lanes, self.room, self.drops = lanes, room, 0

    def forward(self, x, index, weights):
        kept, each = torch.ones_like(index), len(self.up) // self.lanes
        for tokens in torch.arange(len(x)).split(-(-len(x) // self.lanes)):
            rooms = [self.room] * self.lanes
            for token in tokens:
                for k, lane in enumerate((index[token] // each).tolist()):
                    kept[token, k] = rooms[lane] > 0
                    rooms[lane] -= 1
        self.drops += int((kept == 0).sum())
        return super().forward(x, index, weights * kept)


@pytest.mark.variation
def test_rows_beyond_the_capacity_are_dropped_and_counted():
    pipe = compiled(2, tokens="divided", capacity=0.9, beyond="drop", counts=True)
    model = Net()
    for mixture in (model.mixture, model.other):
        experts = Dropping(2, 5)  # ceil(0.9 * 5 tokens * 2 / 2 lanes)
        experts.load_state_dict(mixture.experts.state_dict())
        mixture.experts = experts
    check_against_eager(pipe, model)
    found = pipe.full_state_dict()
    drops = [model.mixture.experts.drops, model.other.experts.drops]
    assert min(drops) > 0
    assert [int(found[f"{name}.experts.expert_drops"]) for name in ("mixture", "other")] == drops


def test_rows_beyond_the_capacity_end_the_step_and_the_next_one_runs():
    pipe = compiled(2, tokens="divided", capacity=0.9)
    with pytest.raises(RunError, match=r"More than 5 rows .* capacity of 0.9.*module 'mixture.experts'"):
        pipe.run_local(batch(3))
    model = Net()
    with torch.no_grad():
        for mixture in (model.mixture, model.other):  # an expert of each lane for every token
            mixture.router.weight.mul_(1e-3)
            mixture.router.bias.copy_(torch.tensor([1.0, 0.0, 1.0, 0.0]))
    pipe.load_state_dict(model.state_dict())
    check_against_eager(pipe, model)


class Skipping(Experts):
    """Leaves out experts beyond its own, which have a column of their own."""

    def forward(self, x, index, weights):
        inner = torch.einsum("tw,ewi->eti", x, self.up) + self.bias.unsqueeze(1)
        each = torch.einsum("eti,eiw->etw", nn.functional.gelu(inner), self.down)
        counts = x.new_zeros(len(x), len(self.up) + 1).scatter_add(1, index, weights)
        return torch.einsum("te,etw->tw", counts[:, :-1], each)


@pytest.mark.variation
@pytest.mark.parametrize("tokens", ["whole", "divided"])
def test_a_forward_that_skips_experts_gets_the_number_behind_its_own(tokens):
    model = Net()
    for mixture in (model.mixture, model.other):
        experts = Skipping()
        experts.load_state_dict(mixture.experts.state_dict())
        mixture.experts = experts
    check_against_eager(compiled(2, model=model, tokens=tokens, skips=True), Net())


def test_what_cannot_be_shared():
    def applied(module):
        with fxpipe.local_lanes(3) as mesh:
            parallelize_module(module, mesh, fxpipe.ExpertParallel())

    linear = nn.Linear(6, 3)
    linear.bias = nn.Parameter(torch.zeros(4))
    with pytest.raises(OptionError, match=r"this Linear has \{'weight': \(3, 6\), 'bias': \(4,\)"):
        applied(linear)
    one = Experts(3)
    one.forward = lambda tokens: tokens
    with pytest.raises(OptionError, match="The forward of a Experts does not take"):
        applied(one)
    with pytest.raises(OptionError, match="this Dropout has no parameters"):
        applied(nn.Dropout())
    for style, says in (
        ({"tokens": "some"}, "tokens is"),
        ({"capacity": 1.5}, 'only tokens="divided" has'),
        ({"tokens": "divided", "capacity": 0}, "a number above 0"),
        ({"beyond": "stop"}, "beyond is"),
    ):
        with pytest.raises(OptionError, match=says):
            fxpipe.ExpertParallel(**style)
