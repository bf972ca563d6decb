"""The optimizer of one rank's parameters, against torch's of the whole model."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.errors import OptionError, RunError
from fxpipe.runtime.torch_private import fake_store
from fxpipe.training.model.rollback import Rollback
from fxpipe.training.optimizer.clipping import Clipping
from fxpipe.training.optimizer.groups import Group, groups_of, optimizer_of
from fxpipe.training.optimizer.optimizer import PipelineOptimizer
from fxpipe.training.optimizer.optimizer_trial import Table, check_groups

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


def test_a_state_of_other_parameters_is_refused():
    pipe = pipeline(Squares())
    optimizer = pipe.optimizer(torch.optim.SGD, lr=1.0, momentum=0.9)
    pipe.step(batch(0))
    optimizer.step()
    state = optimizer.state_dict()
    assert "param_names" not in optimizer.param_groups[0]
    (group,) = state["param_groups"]
    other = {**group, "param_names": [f"other.{name}" for name in group["param_names"]]}
    fewer = {**group, "params": group["params"][:1], "param_names": group["param_names"][:1]}
    unnamed = {name: value for name, value in group.items() if name != "param_names"}
    first = state["state"][0]["momentum_buffer"]
    wider = {0: {"momentum_buffer": torch.cat([first, first])}}
    before = copy.deepcopy(state)
    assert {type(name) for name in group["param_names"]} == {str}  # torch.load refuses other classes
    for wrong in (
        {**state, "param_groups": [other]},
        {**state, "param_groups": [fewer]},
        {**state, "param_groups": [group, group]},
        {"state": wider, "param_groups": [unnamed]},
    ):
        with pytest.raises(OptionError, match=r"this rank updates .*fxpipe\.Checkpointer"):
            optimizer.load_state_dict(wrong)
    assert equal_states(optimizer.state_dict(), before)
    optimizer.load_state_dict({**state, "param_groups": [unnamed]})
    assert equal_states(optimizer.state_dict(), before)


def equal_states(found, expected):
    return found["param_groups"] == expected["param_groups"] and all(
        torch.equal(found["state"][k][name], value)
        for k, own in expected["state"].items()
        for name, value in own.items()
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


@pytest.mark.parametrize("master_weights", [False, True], ids=["", "masters"])
@pytest.mark.parametrize("options", [{}, {"set_to_none": True}, {"set_to_none": False}], ids=str)
def test_an_update_without_gradients(options, master_weights):
    """Where a script zeroes them behind a step, as one whose loss is too large, momentum moves nothing;
    zeros that are asked for do."""
    dtype = torch.bfloat16 if master_weights else torch.float32
    model = Squares().to(dtype)
    plain = copy.deepcopy(model).float()
    rule = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    pipe = fxpipe.compile(
        model, {"x": torch.ones(2, 4, dtype=dtype)}, ranks=1, microbatches=2, schedule="1f1b"
    )
    ours = pipe.optimizer(torch.optim.SGD, master_weights=master_weights, **rule)
    theirs = torch.optim.SGD(plain.parameters(), **rule)
    for step in range(4):
        pipe.step({"x": batch(step)["x"].to(dtype)})
        for name, parameter in plain.named_parameters():
            parameter.grad = pipe.parameters[name].grad.clone().float()
        if step == 1:
            ours.zero_grad(**options)
            theirs.zero_grad(**options)
        ours.step()
        theirs.step()
        for name, parameter in plain.named_parameters():
            assert torch.equal(pipe.parameters[name], parameter.to(dtype)), (step, name)
        ours.zero_grad()
        theirs.zero_grad()


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
    own = [{"params": "*.bias", "lr": 1.0}, {"params": ["table.*"], "lr": 2.0}]
    groups = optimizer_of(groups_of(torch.optim.SGD, {"lr": 3.0}, own, names), held).param_groups
    assert [group["params"] for group in groups] == [[], [rows], [weight]]
    assert [group["lr"] for group in groups] == [1.0, 2.0, 3.0]
    all_named = groups_of(torch.optim.SGD, {}, [*own, {"params": "*"}], names)
    assert [{*group.names} for group in all_named] == [{"a.bias"}, {"table.weight"}, {"a.weight"}]


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
        groups_of(torch.optim.SGD, {}, groups, ["a.weight"])


def test_groups_cannot_be_added_later():
    optimizer = pipeline(Squares()).optimizer(torch.optim.SGD, lr=1.0)
    with pytest.raises(RunError, match="groups="):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


class Sophia(torch.optim.SGD):
    def update_hessian(self):
        pass


def test_methods_of_the_wrapped_class_are_those_of_this_rank():
    optimizer = pipeline(Squares()).optimizer(Sophia, lr=1.0)
    with pytest.raises(
        AttributeError, match=r"wraps Sophia: update_hessian is opt\.optimizer\.update_hessian,"
    ):
        optimizer.update_hessian()
    with pytest.raises(AttributeError, match="'PipelineOptimizer' object has no attribute 'update_hesian'"):
        optimizer.update_hesian()
    optimizer.optimizer.update_hessian()


def tried(cls, dims=(), ranks=2, shape=(32, 24), **options):
    kinds = {Table(shape, frozenset(dims)), Table(shape[:1])}
    check_groups([Group(cls, options)], [kinds], CPU, ranks=ranks)


def test_optimizers_that_need_other_ranks_values():
    tried(torch.optim.AdamW, {0, 1}, lr=0.0, fused=True)
    check_groups([Group(torch.optim.AdamW, {})], [{Table((0, 4)), Table(())}], CPU, ranks=2, undone=True)
    tried(torch.optim.Adafactor, lr=0.1)
    with pytest.raises(RunError, match="Adafactor updates rows"):
        tried(torch.optim.Adafactor, {0}, lr=0.0)
    for ranks in (1, 2):
        with pytest.raises(RunError, match="LBFGS evaluates the loss within its update"):
            tried(torch.optim.LBFGS, ranks=ranks)


class Base(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, **options):
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["steps"] = state.get("steps", 0) + 1
                p.sub_(group["lr"] * self.update(p.grad, group, state["steps"]))


def orthogonal(x):
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x


class Orthogonal(Base):
    """Muon by a flag of the group."""

    def update(self, grad, group, steps):
        return orthogonal(grad) if group.get("use_muon") and grad.ndim == 2 else grad


class LargeOnes(Base):
    def update(self, grad, group, steps):
        return orthogonal(grad) if grad.ndim == 2 and min(grad.shape) >= 16 else grad


class Late(Base):
    def update(self, grad, group, steps):
        return orthogonal(grad) if steps >= 5 and grad.ndim == 2 else grad


class AboveLimit(Base):
    """Clips the size of a tensor's update."""

    def update(self, grad, group, steps):
        return grad * 50 / max(1.0, float(grad.square().mean().sqrt()) * 50 / 60.0)


class Within(Base):
    def update(self, grad, group, steps):
        norm = float(grad.norm())
        return grad * (1.0 if norm < 0.01 or norm > 5 else 1 / (1 + norm))


class ClipsAll(Base):
    """By the norm of all its parameters, where that is large."""

    def step(self, closure=None):
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.norm = float(nn.utils.get_total_norm(grads))
        super().step()

    def update(self, grad, group, steps):
        return grad * min(1.0, 100.0 / (self.norm + 1e-9))


@pytest.mark.parametrize("cls", [Orthogonal, LargeOnes, Late, AboveLimit, Within])
def test_rows_that_depend_on_others_in_some_updates_alone(cls):
    """Above a size, from an update on, by an option of the group: where ranks hold all rows it is allowed."""
    group, rows = Group(cls, {}, {"use_muon": True}), frozenset([0])
    check_groups([group], [{Table((32, 24))}], CPU, ranks=2)
    with pytest.raises(RunError, match=f"{cls.__name__} updates rows of a parameter by the values of other"):
        check_groups([group], [{Table((32, 24), rows), Table((8,))}], CPU, ranks=2)


class OfSize(Base):
    """Joins rows whose gradients are about as large as it says, and no others."""

    def update(self, grad, group, steps):
        alike = 0.8 < float(grad.square().mean().sqrt()) / group["size"] < 3
        return grad - grad.mean(0) if alike and grad.ndim == 2 and steps > 1 else grad


@pytest.mark.parametrize("size", [10.0**k for k in range(-6, 7)])
def test_rows_that_depend_on_others_where_gradients_have_one_size(size):
    group, rows = Group(OfSize, {}, {"size": size}), frozenset([0])
    with pytest.raises(RunError, match="OfSize updates rows of a parameter by the values of other"):
        check_groups([group], [{Table((32, 24), rows)}], CPU, ranks=2)


class WithoutZeros(Base):
    """Leaves tables without a gradient as they are, and moves the others on by a momentum."""

    def update(self, grad, group, steps):
        return grad + 1e-3 if grad.any() else grad


class SmallGradients(Base):
    def update(self, grad, group, steps):
        return grad / grad.norm().clamp(min=1e-5 * grad.numel())


class Projected(Base):
    def update(self, grad, group, steps):
        return grad - grad.mean(0) if min(grad.shape) > 300 else grad


class InBlocks(Base):
    def update(self, grad, group, steps):
        return torch.cat([x / x.norm() for x in grad.reshape(-1).split(64)]).view_as(grad)


class FewElements(Base):
    def update(self, grad, group, steps):
        return grad if grad.numel() > 8 else grad.sign()


@pytest.mark.parametrize("cls", [LargeOnes, WithoutZeros, SmallGradients, Projected, InBlocks, FewElements])
def test_rows_that_depend_on_others_in_some_tables_alone(cls):
    """Not in the longest one, without a gradient, by rounding errors of it, in large ones, in blocks of which
    halves have whole ones, or in few rows."""
    other = {InBlocks: (16, 8), FewElements: (16, 8), Projected: (400, 350)}
    shapes = [(144, 8), other.get(cls, (24, 24))]
    with pytest.raises(RunError, match=f"{cls.__name__} updates rows of a parameter by the values of other"):
        check_groups([Group(cls, {})], [{Table(s, frozenset([0])) for s in shapes}], CPU, ranks=2)
    check_groups([Group(cls, {})], [{Table(s) for s in shapes}], CPU, ranks=2)


class CountsGroups(Base):
    """Its rate falls with the groups that it has updated: a rank that has nothing of one counts fewer."""

    def step(self, closure=None):
        self.updated = getattr(self, "updated", 0) + sum(bool(group["params"]) for group in self.param_groups)
        super().step()

    def update(self, grad, group, steps):
        return grad / self.updated


def test_a_rank_without_parameters_of_a_group():
    groups, kinds = [Group(CountsGroups, {}, {"lr": lr}) for lr in (0.1, 0.2)], [{Table((4, 4))}] * 2
    check_groups(groups, kinds, CPU, ranks=2)
    with pytest.raises(RunError, match="CountsGroups updates a parameter by the values of others"):
        check_groups(groups, kinds, CPU, ranks=2, lacks=True)


class Noisy(Base):
    def update(self, grad, group, steps):
        return grad + torch.randn_like(grad)


def test_a_class_that_draws_random_numbers():
    tried(Noisy, ranks=1)
    with pytest.raises(RunError, match=r"Noisy makes other updates .* as one that draws random numbers does"):
        tried(Noisy)


def test_parameters_that_depend_on_others_in_some_updates_alone():
    with pytest.raises(RunError, match="ClipsAll updates a parameter by the values of others"):
        tried(ClipsAll)
    tried(ClipsAll, ranks=1)


class SAM(Base):
    def __init__(self, params, base_optimizer, strict=True, **options):
        super().__init__(params, **options)
        self.base, self.strict = base_optimizer(self.param_groups, lr=0.1), strict

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is not None or not self.strict, "SAM requires a closure"
        if closure is None:
            return
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = nn.utils.get_total_norm([p.grad for p in parameters])
        moves = [0.05 * p.grad / norm for p in parameters]
        torch._foreach_add_(parameters, moves)
        closure()
        torch._foreach_sub_(parameters, moves)
        self.base.step()


@pytest.mark.parametrize("strict", [True, False])
def test_the_loss_within_an_update(strict):
    with pytest.raises(RunError, match="SAM evaluates the loss within its update, as SAM and L-BFGS do"):
        pipeline(Squares()).optimizer(SAM, base_optimizer=torch.optim.SGD, strict=strict)


class Gathers(Base):
    def update(self, grad, group, steps):
        torch.distributed.all_gather([torch.empty_like(grad)], grad)
        return grad


def test_communication_within_an_update():
    """It is refused before anything is sent."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # here: each worker would wait for it

    torch.distributed.init_process_group("fake", store=fake_store(), rank=0, world_size=1)
    try:
        for cls, options in (Gathers, {}), (ZeroRedundancyOptimizer, {"optimizer_class": torch.optim.SGD}):
            with pytest.raises(
                RunError, match=rf"{cls.__name__} communicates in its step \((allgather|broadcast)"
            ):
                tried(cls, lr=0.1, **options)
    finally:
        torch.distributed.destroy_process_group()


class Compiles(torch.optim.SGD):
    """Compiles its update, as torchao's optimizers of few bits do."""

    def step(self, closure=None):
        def update(x, grad, lr):
            return x - lr * grad

        for group in self.param_groups:
            for p in group["params"]:
                with torch.no_grad():
                    compiled = torch.compile(update, backend="eager", fullgraph=True)
                    p.copy_(compiled(p.detach(), p.grad, group["lr"]))


def test_an_update_that_is_compiled():
    """Also behind the trials, in which a mode of torch's looks at its ops."""
    model = Squares()
    pipe, plain = pipeline(model), copy.deepcopy(model)
    ours, theirs = pipe.optimizer(Compiles, lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        pipe.step(batch(step))
        plain(**batch(step)).backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for name, value in plain.state_dict().items():
        assert torch.allclose(pipe.state_dict()[name], value), name


class Sums(Base):
    """Makes its state in the constructor, as torch's Adagrad does, and goes on without it if it has none."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["sum"] = torch.full_like(p, 10.0)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                squares = self.state[p].setdefault("sum", torch.zeros_like(p)).add_(p.grad.square())
                p.sub_(group["lr"] * p.grad / (squares.sqrt() + 1e-8))


@pytest.mark.parametrize("biases", [[], [{"params": ["*.bias"], "class": torch.optim.SGD, "lr": 0.5}]])
def test_state_that_a_constructor_makes(biases):
    model = Squares()
    plain = copy.deepcopy(model)
    pipe = pipeline(model)
    ours = pipe.optimizer(Sums, groups=biases)
    names = [name for name, _ in plain.named_parameters() if not (biases and name.endswith("bias"))]
    theirs = [Sums([plain.get_parameter(name) for name in names])]
    if biases:
        theirs.append(torch.optim.SGD([layer.bias for layer in plain.layers], lr=0.5))
    for seed in range(2):
        pipe.step(batch(seed))
        plain(**batch(seed)).backward()
        for optimizer in [ours, *theirs]:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter)


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


def test_two_optimizers_that_update_a_parameter_in_turn(recwarn):
    shared, own = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))

    def optimizer(**parameters):
        inner = torch.optim.SGD([*parameters.values()], lr=1.0)
        return PipelineOptimizer(inner, {p: name for name, p in parameters.items()}, [], None)

    first, second, third = optimizer(shared=shared, own=own), optimizer(shared=shared), optimizer(own=own)
    for one in (second, third, second, first, first):
        one.step()
    assert not recwarn.list, "other parameters, and one that takes over"
    for one in (second, first, second):
        one.step()
    (warning,) = recwarn.list
    assert "Two optimizers of pipe.optimizer update shared in turn" in str(warning.message)


def test_gradients_are_clipped_before_the_update():
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 0.0])
    inner = torch.optim.SGD([parameter], lr=1.0)
    optimizer = PipelineOptimizer(inner, {parameter: "a"}, [parameter], OtherRanks(16.0))
    assert float(optimizer.clip_grad_norm_(1.0)) == 5.0
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.0]))
    parameter.grad *= 10  # which is clipped no more
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.tensor([-6.0, 0.0]))
    for wrong in (0, None):
        with pytest.raises(OptionError, match=rf"clip_grad_norm is {wrong} and must be a number above 0\."):
            optimizer.clip_grad_norm_(wrong)


# -- several classes, and modes ----------------------------------------------------------------------------

MATRICES = {"params": ["layers.*.weight"], "class": torch.optim.Muon, "lr": 0.02}


def split(model):
    """The matrices, and all other parameters."""
    both = ([], [])
    for name, parameter in model.named_parameters():
        both[not name.endswith("weight")].append(parameter)
    return both


def plain_step(model, seed, optimizers, largest):
    loss = (model(batch(seed)["x"][:2]) + model(batch(seed)["x"][2:])) / 2
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), largest)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def test_muon_for_matrices_and_adamw_for_the_rest(tmp_path):
    """One norm, one scheduler, one state dict, one checkpoint."""
    model = Squares()
    plain = copy.deepcopy(model)
    pipe = pipeline(model)

    def made():
        return pipe.optimizer(torch.optim.AdamW, lr=0.01, groups=[MATRICES], clip_grad_norm=0.05)

    matrices, rest = split(plain)
    theirs = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]
    ours = made()
    assert ours.options()["class"] == "Muon and AdamW"
    rates = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in (ours, *theirs)]
    for seed in range(4):
        loss = ours.step(lambda seed=seed: pipe.step(batch(seed)))
        torch.testing.assert_close(loss, plain_step(plain, seed, theirs, 0.05))
        ours.zero_grad()
        for rate in rates:
            rate.step()
        if seed == 1:
            with fxpipe.Checkpointer(pipe, tmp_path, optimizer=ours, state={"rate": rates[0]}) as checkpoints:
                checkpoints.save()
            pipe.step(batch(9))
            ours.step()
            ours.zero_grad()
            ours = made()
            rates[0] = torch.optim.lr_scheduler.ExponentialLR(ours, 0.5)
            with fxpipe.Checkpointer(pipe, tmp_path, optimizer=ours, state={"rate": rates[0]}) as checkpoints:
                assert checkpoints.resume()
        if seed == 2:
            state = copy.deepcopy(ours.state_dict())
            ours.state.clear()
            ours.load_state_dict(state)
    for name, expected in plain.named_parameters():
        torch.testing.assert_close(pipe.parameters[name], expected)
    assert [group["lr"] for group in ours.param_groups] == [0.02 / 16, 0.01 / 16]
    other = pipe.optimizer(torch.optim.AdamW, lr=0.01)
    with (
        fxpipe.Checkpointer(pipe, tmp_path, optimizer=other) as checkpoints,
        pytest.raises(fxpipe.ArtifactError, match="state of Muon and AdamW, and this run has AdamW"),
    ):
        checkpoints.resume()


def test_updates_of_several_classes_are_taken_back():
    parameters = {f"layers.0.{name}": nn.Parameter(torch.ones(3, 3)) for name in ("weight", "bias")}
    groups = groups_of(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, [MATRICES], parameters)
    optimizer = optimizer_of(groups, parameters)
    for parameter in parameters.values():
        parameter.grad = torch.eye(3)
    optimizer.step()
    before, state = copy.deepcopy(parameters), copy.deepcopy([*optimizer.state.values()])
    undo = Rollback.of(optimizer)
    optimizer.step()
    undo.take_back(optimizer)
    for name, parameter in parameters.items():
        assert torch.equal(parameter, before[name])
    assert [{k: x.tolist() for k, x in own.items()} for own in optimizer.state.values()] == [
        {k: x.tolist() for k, x in own.items()} for own in state
    ]
    assert all(own.state is optimizer.state for own in optimizer.optimizers)


def test_classes_that_get_no_parameters():
    groups = [MATRICES, {"params": "*.bias", "class": torch.optim.SGD}]
    with pytest.raises(OptionError, match=r'AdamW gets none. Leave the "class" of one group out.* with lr'):
        pipeline(Squares()).optimizer(torch.optim.AdamW, lr=0.1, groups=groups)
    with pytest.raises(OptionError, match=r"Muon cannot be made with no options: .*only supports 2D"):
        pipeline(Squares()).optimizer(torch.optim.SGD, groups=[{"params": "*", "class": torch.optim.Muon}])
    with pytest.raises(OptionError, match=r"Muon cannot be made with lr=0\.01: "):  # not with a trial's rate
        check_groups([Group(torch.optim.Muon, {"lr": 0.01})], [{Table((8,))}], CPU, ranks=2)


class UsesFlag(Base):
    def __init__(self, groups):
        for group in groups:
            assert "use_muon" in group
        super().__init__(groups)

    def update(self, grad, group, steps):
        return orthogonal(grad) if group["use_muon"] else grad


def test_a_class_whose_groups_all_have_a_flag():
    groups = [{"params": ["*.weight"], "use_muon": True}, {"params": ["*"], "use_muon": False}]
    optimizer = pipeline(Squares()).optimizer(UsesFlag, groups=groups)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]


class Averaging(torch.optim.Optimizer):
    """Schedule-free: trains between the values and their average, which is evaluated."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "train_mode": False, "updates": 0})

    @torch.no_grad()
    def switch(self, mode, weight):
        for group in self.param_groups:
            for p in group["params"] if group["train_mode"] != mode else ():
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], weight)
            group["train_mode"] = mode

    def train(self):
        self.switch(True, 0.1)

    def eval(self):
        self.switch(False, 1 - 1 / 0.9)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["train_mode"], "not in train mode"
            group["updates"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, 1 / group["updates"]).sub_(p.grad, alpha=0.1 * group["lr"])
                z.sub_(p.grad, alpha=group["lr"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biases", [[], [{"params": ["*.bias"], "class": torch.optim.SGD, "lr": 0.0}]])
def test_a_schedule_free_optimizer(dtype, biases):
    """Its modes reach it, alone or behind one of another class, and masters reach the parameters."""
    model = Squares().to(dtype)
    masters = copy.deepcopy(model).float()
    pipe = fxpipe.compile(
        model, {"x": torch.ones(2, 4, dtype=dtype)}, ranks=1, microbatches=2, schedule="1f1b", evaluation=True
    )
    ours = pipe.optimizer(Averaging, groups=biases, master_weights=dtype is not torch.float32)
    theirs = Averaging(p for name, p in masters.named_parameters() if not biases or "weight" in name)
    given = {name: x.to(dtype) for name, x in batch(0).items()}
    for _ in range(3):
        ours.train()
        theirs.train()
        pipe.step(given)
        for name, p in masters.named_parameters():
            p.grad = pipe.parameters[name].grad.float()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.eval()
        ours.zero_grad()
        expected = copy.deepcopy(masters).to(dtype)(given["x"])
        torch.testing.assert_close(pipe.evaluate(given), expected.detach())
        for name, p in masters.named_parameters():
            assert torch.equal(pipe.parameters[name], p.to(dtype))
    with pytest.raises(AssertionError, match="not in train mode"):
        ours.step()


def test_a_schedule_free_optimizer_is_resumed_in_the_mode_in_which_it_was_saved(tmp_path):
    """Its authors ask for eval() before a checkpoint, and the trial of its options makes an update."""
    finals = []
    for saves in (True, False):
        torch.manual_seed(0)
        pipe = pipeline(Squares())
        optimizer = pipe.optimizer(Averaging)
        with fxpipe.Checkpointer(pipe, tmp_path, optimizer=optimizer) as checkpoints:
            assert checkpoints.resume() != saves
            for step in range(pipe.step_number, 3):
                optimizer.train()
                pipe.step(batch(step))
                optimizer.step()
                optimizer.zero_grad()
                optimizer.eval()
                if saves and step == 1:
                    checkpoints.save()
        finals.append(pipe.full_state_dict())
    assert all(torch.equal(value, finals[1][name]) for name, value in finals[0].items())
