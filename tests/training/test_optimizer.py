"""The optimizer of one rank's parameters, against torch's of the whole model."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.errors import OptionError, RunError
from fxpipe.training.clipping import Clipping
from fxpipe.training.make_optimizer import check_separable, grouped
from fxpipe.training.optimizer import PipelineOptimizer

CPU = torch.device("cpu")


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def pipeline(model: nn.Module) -> fxpipe.Pipeline:
    return fxpipe.compile(model, {"x": torch.ones(2, 4)}, ranks=1, microbatches=2, schedule="1f1b")


def batch(seed: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))}


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_the_same_training_as_in_torch(norm_type):
    """Clipping, groups by name, and a scheduler of the learning rate."""
    model = Squares()
    plain = copy.deepcopy(model)
    pipe = pipeline(model)
    decay = {"weight_decay": 0.0}
    ours = pipe.optimizer(
        torch.optim.AdamW,
        groups=[{"params": "*.bias", **decay}],
        lr=0.1,
        weight_decay=0.5,
        clip_grad_norm=0.05,
        norm_type=norm_type,
    )
    biases = [p for name, p in plain.named_parameters() if name.endswith("bias")]
    others = [p for name, p in plain.named_parameters() if not name.endswith("bias")]
    theirs = torch.optim.AdamW([{"params": biases, **decay}, {"params": others}], lr=0.1, weight_decay=0.5)
    rates = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in (ours, theirs)]
    for seed in range(3):
        loss = ours.step(lambda seed=seed: pipe.step(batch(seed)))
        expected = (plain(batch(seed)["x"][:2]) + plain(batch(seed)["x"][2:])) / 2
        expected.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05, norm_type)
        theirs.step()
        torch.testing.assert_close(loss, expected.detach())
        torch.testing.assert_close(ours.last_norm.float(), norm)
        assert norm > 0.05
        for optimizer, rate in zip((ours, theirs), rates, strict=True):
            optimizer.zero_grad()
            rate.step()
    assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"] == 0.0125
    for name, expected in plain.named_parameters():
        torch.testing.assert_close(pipe.parameters[name], expected)


@pytest.mark.parametrize(
    "wrong",
    [{"clip_grad_norm": x} for x in (-1, 0, float("nan"), "1")] + [{"norm_type": x} for x in (0, -2.0, None)],
    ids=str,
)
def test_norms_that_are_none(wrong):
    with pytest.raises(OptionError, match=r"is .* and must be a number above 0\."):
        pipeline(Squares()).optimizer(torch.optim.SGD, lr=1.0, **wrong)


def test_a_scheduler_and_hooks_take_it_as_any_optimizer():
    pipe = pipeline(Squares())
    optimizer = pipe.optimizer(torch.optim.SGD, lr=1.0, momentum=0.9)
    assert isinstance(optimizer, torch.optim.Optimizer)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    pipe.step(batch(0))
    optimizer.step()
    assert calls == ["pre", "post"]
    assert len(optimizer.state) == len(optimizer.optimizer.state) == 4
    saved = copy.deepcopy(optimizer.state_dict())
    pipe.step(batch(1))
    optimizer.step()
    optimizer.load_state_dict(saved)
    for parameter, name in optimizer.names.items():
        index = list(pipe.plan.tensors[0].gradients).index(name)
        assert torch.equal(
            optimizer.state[parameter]["momentum_buffer"], saved["state"][index]["momentum_buffer"]
        )


def test_gradients_are_freed_or_zeroed():
    pipe = pipeline(Squares())
    optimizer = pipe.optimizer(torch.optim.SGD, lr=1.0)
    pipe.step(batch(0))
    first = {name: p.grad.clone() for name, p in pipe.parameters.items()}
    optimizer.zero_grad()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in pipe.parameters.values())
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in pipe.parameters.values())
    pipe.step(batch(0))
    assert all(torch.equal(p.grad, first[name]) for name, p in pipe.parameters.items())


def test_steps_that_are_not_finite_without_end():
    """Those in a row count; ``True`` allows a hundred."""
    pipe = pipeline(Squares())
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.01, skip_nonfinite=2)

    def stepped(value: float) -> None:
        optimizer.zero_grad()
        pipe.step(batch(0))
        pipe.parameters["layers.0.bias"].grad[1] += value
        optimizer.step()

    for value in (float("nan"), float("inf"), 0.0, float("inf"), float("nan")):
        stepped(value)
    assert optimizer.skipped == 4
    with pytest.raises(RunError, match=r"of 3 steps in a row .* updates 4 to 6, with norms inf, nan, inf"):
        stepped(float("inf"))
    assert (Clipping(skip_nonfinite=True).most_skipped, Clipping(skip_nonfinite=1).most_skipped) == (100, 1)
    with pytest.raises(OptionError, match="skip_nonfinite is -1 and must be"):
        Clipping(skip_nonfinite=-1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_steps_that_are_not_finite(value):
    """Skipped and counted, or as torch's clipping treats them."""
    model = Squares()
    pipe = pipeline(model)
    skipping = pipe.optimizer(torch.optim.SGD, lr=1.0, skip_nonfinite=True)
    before = copy.deepcopy(model.state_dict())
    pipe.step(batch(0))
    pipe.parameters["layers.0.bias"].grad[1] = value
    skipping.step()
    assert skipping.skipped == 1
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    plain = copy.deepcopy(model)
    for (_, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        theirs.grad = ours.grad.clone()
    pipe.optimizer(torch.optim.SGD, lr=1.0, clip_grad_norm=1.0).step()
    nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
    assert all(p.isnan().any() for p in model.parameters()) == (value != value)


def test_groups_are_alike_on_all_ranks():
    """Each rank has all groups, also those of which it holds nothing; rows belong where their table does."""
    weight, rows = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    held = {"a.weight": weight, "table.weight[0:3]": rows}
    names = ["a.weight", "a.bias", "table.weight"]
    groups = grouped(held, [{"params": "*.bias", "lr": 1.0}, {"params": ["table.*"], "lr": 2.0}], names)
    assert [group["params"] for group in groups] == [[], [rows], [weight]]
    assert [group.get("lr") for group in groups] == [1.0, 2.0, None]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"params": "nothing.*"}], "matches 'nothing"),
        ([{"params": ["*.bias", "*nrom*"]}], r"matches '\*\.bias' or '\*nrom\*'"),
        ([{"lr": 1.0}], "names or patterns"),
        ([{"params": [torch.ones(1)]}], "names or patterns"),
    ],
)
def test_groups_that_are_refused(groups, message):
    with pytest.raises(OptionError, match=message):
        grouped({}, groups, ["a.weight"])


def test_groups_cannot_be_added_later():
    optimizer = pipeline(Squares()).optimizer(torch.optim.SGD, lr=1.0)
    with pytest.raises(RunError, match="groups="):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_optimizers_that_need_other_ranks_values():
    check_separable(torch.optim.AdamW, {"lr": 0.0, "fused": True}, CPU, {0})
    check_separable(torch.optim.Adafactor, {"lr": 0.1}, CPU, ())
    with pytest.raises(RunError, match="Adafactor updates rows"):
        check_separable(torch.optim.Adafactor, {"lr": 0.0}, CPU, {0})
    with pytest.raises(RunError, match="LBFGS updates a parameter by the values of others"):
        check_separable(torch.optim.LBFGS, {}, CPU, ())
    with pytest.raises(RunError, match="LBFGS needs a closure, which it calls several times"):
        pipeline(Squares()).optimizer(torch.optim.LBFGS)


@pytest.mark.parametrize("given", [lambda parameters: list(parameters), None, "AdamW", nn.Linear])
def test_what_is_no_optimizer(given):
    pipe = pipeline(Squares())
    with pytest.raises(OptionError, match="a class of torch optimizers"):
        pipe.optimizer(given)


class OtherRanks:
    """Another rank, with the sum of the squares of its gradients, or with the largest of them."""

    def __init__(self, value: float) -> None:
        self.value = torch.tensor([value], dtype=torch.float64)

    def begin_gather(self, words: torch.Tensor, call: str) -> Callable[[], torch.Tensor]:
        return lambda: torch.stack([words, self.value.view(torch.int64)])


def test_the_norm_is_of_all_ranks():
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 0.0])
    inner = torch.optim.SGD([parameter], lr=1.0)
    optimizer = PipelineOptimizer(inner, {parameter: "a"}, [parameter], OtherRanks(16.0), Clipping(1.0))
    optimizer.step()
    assert float(optimizer.last_norm) == 5.0
    torch.testing.assert_close(parameter.detach(), torch.tensor([-0.6, 0.0]))
    largest = PipelineOptimizer(inner, {}, [parameter], OtherRanks(7.0), Clipping(1.0, float("inf")))
    assert float(largest.grad_norm()) == 7.0
