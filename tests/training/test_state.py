"""State dicts: names, values, and what is refused."""

import copy
import types

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.errors import ArtifactError, OptionError, RunError
from fxpipe.training.model.accumulators import accumulators
from fxpipe.training.model.model_state import ModelState
from fxpipe.training.model.state_dict import full_state_dict, load_state_dict
from fxpipe.training.weights.tensor_values import InMemory


class Tied(nn.Module):
    """A tied weight, a persistent counter, and a table that no state dict holds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(8, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 4), persistent=False)
        self.register_buffer("seen", torch.zeros(()))

    def reset_parameters(self) -> None:
        self.scale.copy_(torch.linspace(0.5, 1.5, 4))

    def forward(self, x):
        self.seen += 1
        return self.head(torch.tanh(self.middle(self.embed(x) * self.scale))).square().mean()


TOKENS = {"x": torch.arange(8).reshape(2, 4)}


def pipeline(model: nn.Module, **options) -> fxpipe.Pipeline:
    given = {"ranks": 2, "microbatches": 2, "schedule": "1f1b"} | options
    return fxpipe.compile(model, {"x": TOKENS["x"][:1]}, **given)


def test_it_is_the_models_own_state_dict(tmp_path):
    """Both ways, strictly, also of a pipeline that was saved and loaded."""
    model = Tied()
    pipe = pipeline(model)
    other = Tied()
    with torch.no_grad():
        for tensor in other.state_dict().values():
            tensor += 1
    pipe.load_state_dict(other.state_dict())
    pipe.save(tmp_path / "saved")
    for found in (pipe, fxpipe.load(tmp_path / "saved")):
        assert list(found.state_dict()) == list(found.full_state_dict()) == list(model.state_dict())
        fresh = Tied()
        fresh.load_state_dict(found.state_dict())
        for name, tensor in other.state_dict().items():
            assert torch.equal(fresh.state_dict()[name], tensor)
            assert torch.equal(found.full_state_dict()[name], tensor)
    assert model.state_dict()["middle.bias"].data_ptr() == pipe.state_dict()["middle.bias"].data_ptr()


def without(name: str) -> dict[str, torch.Tensor]:
    return {key: t for key, t in Tied().state_dict().items() if key != name}


def test_a_tied_weight_needs_one_of_its_names():
    pipe = pipeline(Tied())
    for name in ("embed.weight", "head.weight"):
        state = {key: torch.full_like(t, 2.0) for key, t in without(name).items()}
        pipe.load_state_dict(state)
        assert torch.equal(pipe.state_dict()[name], torch.full((8, 4), 2.0))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (without("middle.bias"), "middle.bias, of shape .4,., is missing"),
        ({**without(""), "middle.skew": torch.ones(4)}, "middle.skew, which the model does not have"),
        ({**without(""), "middle.bias": torch.ones(5)}, "middle.bias, of shape .4,., has shape .5,."),
        ({**without(""), "head.weight": torch.ones(8, 4)}, "one tensor in the model"),
    ],
)
def test_states_that_are_refused(state, message):
    pipe = pipeline(Tied())
    before = copy.deepcopy(pipe.state_dict())
    with pytest.raises(ArtifactError, match=message):
        pipe.load_state_dict(state)
    assert all(torch.equal(t, before[name]) for name, t in pipe.state_dict().items())


@pytest.mark.parametrize("rank", [2, -1, "0"])
def test_a_rank_that_is_none(rank):
    """It would get the whole model, and all others an empty dict."""
    process = types.SimpleNamespace(world_size=2, world_rank=0)
    with pytest.raises(OptionError, match="must be a process from 0 to 1, or None"):
        full_state_dict(types.SimpleNamespace(process=process, gathered=lambda: ()), rank)


def test_not_strictly():
    pipe = pipeline(Tied())
    before = copy.deepcopy(pipe.state_dict())
    pipe.load_state_dict({"middle.bias": torch.ones(4), "unknown": torch.ones(1)}, strict=False)
    after = pipe.state_dict()
    assert torch.equal(after.pop("middle.bias"), torch.ones(4))
    assert all(torch.equal(t, before[name]) for name, t in after.items())


def test_a_model_on_the_meta_device():
    """Buffers that no state dict holds are made as the model makes them."""
    with torch.device("meta"):
        model = Tied()
    pipe = pipeline(model)
    with pytest.raises(RunError, match="meta device"):
        pipe.run_local(TOKENS)
    pipe.load_state_dict(Tied().state_dict())
    expected = pipeline(Tied()).run_local(TOKENS)
    assert torch.equal(pipe.run_local(TOKENS).loss, expected.loss)


def test_a_model_on_the_meta_device_whose_buffer_nothing_makes():
    with torch.device("meta"):
        model = Tied()
    model.reset_parameters = lambda: None
    pipe = pipeline(model)
    with pytest.raises(ArtifactError, match="scale is on the meta device"):
        pipe.load_state_dict(Tied().state_dict())
    pipe.load_state_dict({**Tied().state_dict(), "scale": Tied().scale})
    assert torch.equal(pipe.run_local(TOKENS).loss, pipeline(Tied()).run_local(TOKENS).loss)


class Labelled(Tied):
    def forward(self, x, y):
        hidden = torch.tanh(self.middle(self.embed(x) * self.scale))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


def test_rows_of_a_table_on_the_meta_device():
    """A rank loads its rows while the model lives, and uses the model's own table when that has values."""
    with torch.device("meta"):
        model = Labelled()
    given = {"x": TOKENS["x"][:1], "y": TOKENS["x"][:1]}
    pipe = fxpipe.compile(model, given, ranks=2, microbatches=2, schedule="1f1b", vocab_parallel=True)
    process = types.SimpleNamespace(rank=1, ranks=2, world_rank=1, replicas=1, lane=0, lanes=1)
    parameters, buffers = dict(pipe.parameters), dict(pipe.buffers)
    state = ModelState(pipe.plan, parameters, buffers, torch.device("cpu"), process, lambda: model)
    real = Labelled()
    load_state_dict(state, InMemory(real.state_dict()), strict=True)
    assert "embed.weight" not in state.parameters
    state.follow_model()
    assert torch.equal(state.parameter("embed.weight[4:8]"), real.embed.weight[4:8])
    model.to_empty(device="cpu")
    model.load_state_dict({name: t + 1 for name, t in real.state_dict().items()})
    state.follow_model()
    assert torch.equal(state.parameter("embed.weight[4:8]"), real.embed.weight[4:8] + 1)
    assert state.parameters["embed.weight"] is model.embed.weight


def test_weights_go_to_a_model(tmp_path):
    pipe = pipeline(Tied())
    pipe.load_state_dict({name: torch.full_like(t, 3.0) for name, t in pipe.state_dict().items()})
    pipe.save(tmp_path / "saved")
    model = Tied()
    fxpipe.load(tmp_path / "saved").synchronize(model)
    assert all(torch.equal(t, torch.full_like(t, 3.0)) for t in model.state_dict().values())
    with pytest.raises(RunError, match=r"no .* of shape"):
        pipe.synchronize(nn.Linear(4, 4))


def test_the_number_of_the_step():
    pipe = pipeline(Tied(), ranks=1)
    assert pipe.step_number == 0
    pipe.step(TOKENS)
    assert pipe.step_number == 1
    pipe.step_number = 7
    pipe.step(TOKENS)
    assert pipe.step_number == 8


# -- accumulators -----------------------------------------------------------------------------------------


class Counted(nn.Module):
    """Tied; its loss is a (sum, count)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.third = nn.Linear(4, 4)
        self.third.weight = self.first.weight

    def forward(self, x):
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def sum_and_count(output, batch):
    return output.square().sum(), (batch["x"] > 0).sum()


@pytest.mark.parametrize("change", ["none", "zero", "zero, add", "zero, step"])
def test_a_step_has_one_set_of_gradients_unless_it_adds_to_others(change):
    """Of a (sum, count) whose division must leave the gradients of earlier steps alone."""
    torch.manual_seed(1)
    model, batch = Counted(), {"x": torch.randn(4, 4)}
    pipe = fxpipe.compile(
        model, {"x": batch["x"][:2]}, ranks=1, microbatches=2, loss_fn=sum_and_count, schedule="1f1b"
    )
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.0)
    pipe.step(batch)
    of_a_step = {name: p.grad.clone() for name, p in model.named_parameters()}
    expected = of_a_step
    match change:
        case "none":
            optimizer.zero_grad(set_to_none=True)
        case "zero":
            optimizer.zero_grad()
        case "zero, add":
            optimizer.zero_grad()
            model.second.bias.grad += 1
            expected = {**of_a_step, "second.bias": of_a_step["second.bias"] + 1}
        case "zero, step":
            optimizer.zero_grad()
            pipe.step(batch)
            expected = {name: 2 * grad for name, grad in of_a_step.items()}
    pipe.step(batch)
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, expected[name])
    own = [pipe.runtime.grads[name] is p.grad for name, p in model.named_parameters()]
    match change:
        case "none" | "zero":
            assert all(own)
        case "zero, add":
            assert own.count(False) == 1
        case _:
            assert not any(own)


def test_tied_gradients_of_earlier_steps_are_summed_once():
    """They stay where they are, on the first rank that has them."""
    model = Tied()
    pipe = pipeline(model)
    state, (first, second) = pipe.model_state, range(2)
    tied = "embed.weight"
    assert all(tied in held.gradients for held in pipe.plan.tensors)
    earlier = torch.randn(8, 4)

    def accumulator(rank: int) -> torch.Tensor:
        rt = types.SimpleNamespace(rank=rank, grads={}, replicas=None, shards={})
        model.embed.weight.grad = earlier.clone()
        accumulators(state, rt)
        assert rt.grads[tied] is model.embed.weight.grad
        return rt.grads[tied]

    assert torch.equal(accumulator(first), earlier)
    assert not accumulator(second).any()
