"""Numbers that classes read which the code of a model only names: static methods, constructors, custom
functions, and objects that the forward makes; and what a loss function reads, also without the model."""

import argparse
import dataclasses
import types
import warnings
import weakref
from unittest import mock

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.python_state.walk import PythonState
from fxpipe.training.guards.guard_slots import GuardSlots
from fxpipe.training.guards.guards import Traced
from fxpipe.training.guards.python_guards import PythonGuards

BETA = 1.0


class Net(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.layer, self.act = nn.Linear(2, 2), act

    def forward(self, x):
        return self.act(self.layer(x))


def function(forward, backward):
    return type(
        "Scaled",
        (torch.autograd.Function,),
        {"scale": 1.0, "forward": staticmethod(forward), "backward": staticmethod(backward)},
    )


def in_forward():
    scaled = function(lambda ctx, x: x * scaled.scale, lambda ctx, gradient: gradient)
    return lambda x: scaled.apply(x), scaled, "scale"


def in_backward():
    scaled = function(lambda ctx, x: x * 1, lambda ctx, gradient: gradient * scaled.scale)
    return lambda x: scaled.apply(x), scaled, "scale"


def in_a_tensor():
    scaled = function(lambda ctx, x: x * 1, lambda ctx, gradient: gradient * scaled.scale)
    scaled.scale = torch.tensor(1.0)
    return lambda x: scaled.apply(x), scaled, "scale"


class Ops:
    scale = 1.0

    class Inner:
        scale = 1.0

    settings = types.SimpleNamespace(scale=1.0)

    @staticmethod
    def static(x):
        return x * Ops.scale

    @classmethod
    def of_class(cls, x):
        return x * cls.scale


class Inherits(Ops):
    pass


class Made:
    """Sets ``layer``, as the model has one; its own is gone after the forward."""

    start = 1.0

    def __init__(self):
        self.layer = Made.start

    def __call__(self, x):
        return x * self.layer


@dataclasses.dataclass
class Options:
    beta: float = dataclasses.field(default_factory=lambda: BETA)


class Entered:
    scale = 1.0

    def __enter__(self):
        return self.scale

    def __exit__(self, *_):
        pass


def entered(x):
    with Entered() as scale:
        return x * scale


class Layer(nn.Module):
    scale = 1.0

    def forward(self, x):
        return x * self.scale


class Named(type):
    @property
    def beta(cls):
        return cls._beta


class ByItsClass(metaclass=Named):
    _beta = 1.0


ARGUMENTS, SPACE = argparse.Namespace(beta=1.0), types.SimpleNamespace(beta=1.0)
WAYS = {
    "function, forward": in_forward,
    "function, backward": in_backward,
    "function, a tensor": in_a_tensor,
    "static method": lambda: (lambda x: Ops.static(x), Ops, "scale"),
    "class method": lambda: (lambda x: Inherits.of_class(x), Ops, "scale"),
    "nested class": lambda: (lambda x: x * Ops.Inner.scale, Ops.Inner, "scale"),
    "object in a class": lambda: (lambda x: x * Ops.settings.scale, Ops.settings, "scale"),
    "constructor": lambda: (lambda x: Made()(x), Made, "start"),
    "context": lambda: (entered, Entered, "scale"),
    "module that is made": lambda: (lambda x: Layer()(x), Layer, "scale"),
    "metaclass": lambda: (lambda x: x * ByItsClass.beta, ByItsClass, "_beta"),
    "Namespace": lambda: (lambda x: x * ARGUMENTS.beta, ARGUMENTS, "beta"),
    "SimpleNamespace": lambda: (lambda x: x * SPACE.beta, SPACE, "beta"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_number_that_changes(way, monkeypatch):
    act, owner, name = WAYS[way]()
    model, before = Net(act), getattr(owner, name)
    constants = [weakref.ref(before)] if isinstance(before, torch.Tensor) else []
    settings = PythonGuards(model, constants=constants)
    assert settings.changes(model) == []
    monkeypatch.setattr(owner, name, torch.tensor(3.0) if constants else 3.0)
    assert [change.name.rpartition(".")[2] for change in settings.changes(model)] == [name]
    monkeypatch.undo()
    assert settings.changes(model) == []
    gone = weakref.ref(model)
    del model
    assert gone() is None
    assert settings.changes(None) == []
    monkeypatch.setattr(owner, name, torch.tensor(5.0) if constants else 5.0)
    assert [change.name.rpartition(".")[2] for change in settings.changes(None)] == [name]


def doubled(x, times=1.0, *, more=1.0):
    return x * times * more


def with_variable():
    rate = 1.0

    def act(x):
        return x * rate

    def faster(value):
        nonlocal rate
        rate = value

    return act, lambda: faster(2.0)


class Slots:
    __slots__ = ("beta",)

    def __init__(self):
        self.beta = 1.0


class Holder(nn.Module):
    """What a module holds, each in the way of its kind."""

    def __init__(self):
        super().__init__()
        self.table, self.rates, self.slots, self.kind = {"beta": 1.0}, [1.0], Slots(), Ops()
        self.layer, self.act = nn.Linear(2, 2, bias=False), relu_of
        self.register_buffer("mask", None)
        self.registered = {}

    def forward(self, x):
        x = self.layer(x) * self.table["beta"] * self.rates[0] * self.slots.beta * self.kind.scale
        return doubled(self.act(x)) if self.mask is None else x * self.mask


def relu_of(x):
    return x.relu()


#: A change of each kind of owner -> what is told of it.
OF_EACH_KIND = {
    "table.beta was 1.0": lambda m: m.table.update(beta=2.0),
    "rates.0 was 1.0": lambda m: m.rates.__setitem__(0, 2.0),
    "rates.1 was None": lambda m: m.rates.append(2.0),
    "slots.beta was 1.0": lambda m: setattr(m.slots, "beta", 2.0),
    "kind was test_named_classes.Ops": lambda m: setattr(m.kind, "__class__", Inherits),
    "kind.scale was 1.0": lambda m: setattr(m.kind, "scale", 2.0),  # of the class before
    "layer.bias was None": lambda m: m.layer.register_parameter("bias", nn.Parameter(torch.ones(2))),
    "mask was None": lambda m: setattr(m, "mask", torch.ones(2)),
    "act was test_named_classes.relu_of": lambda m: setattr(m, "act", abs),
    "layer was torch.nn.modules.linear.Linear": lambda m: setattr(m, "layer", nn.Identity()),
    "forward was": lambda m: setattr(m, "forward", abs),
    "table.beta was 1.0 when it was compiled, and is None": lambda m: m.table.clear(),
    "times in test_named_classes.doubled": lambda m: setattr(doubled, "__defaults__", (2.0,)),
    "more in test_named_classes.doubled": lambda m: doubled.__kwdefaults__.update(more=2.0),
}


@pytest.mark.parametrize("told", OF_EACH_KIND)
def test_a_change_of_each_kind_of_owner(told):
    model, before = Holder(), (doubled.__defaults__, dict(doubled.__kwdefaults__))
    guards = PythonGuards(model)
    assert guards.changes(model) == []
    try:
        OF_EACH_KIND[told](model)
        assert told in "\n".join(map(str, guards.changes(model)))
    finally:
        doubled.__defaults__, doubled.__kwdefaults__ = before


def test_a_variable_of_a_closure():
    act, change = with_variable()
    guards = PythonGuards(model := Net(act))
    assert guards.changes(model) == []
    change()
    assert "rate in" in str(*guards.changes(model))


def test_a_step_looks_again_at_what_has_changed_alone():
    model = Net(lambda x: x * BETA * Ops.scale)
    guards = PythonGuards(model)
    with mock.patch.object(GuardSlots, "again", autospec=True, side_effect=GuardSlots.again) as again:
        assert guards.changes(model) == []
        assert not again.called
        model.layer.in_features = 3
        assert [change.name for change in guards.changes(model)] == ["layer.in_features"]
        assert [call.args[0].path for call in again.call_args_list] == ["layer"]
        assert guards.changes(model) == []


def of_torch():
    """A function that is no owner: nothing of its own is compared."""
    return types.FunctionType((lambda x: x).__code__, {"__name__": "torch.nn.functional"})


def test_another_function_at_the_address_of_one_that_is_freed():
    model = Net(of_torch())
    guards, address, others = PythonGuards(model), id(model.act), []
    model.act = None
    while len(others) < 100 and (not others or id(others[-1]) != address):
        others.append(of_torch())
    model.act = others[-1]
    assert "act was" in str(*guards.changes(model))


def test_python_is_walked_once_for_capture_and_guards():
    model, x = Net(torch.relu), torch.ones(4, 2)
    options = {"ranks": 1, "microbatches": 2, "schedule": "1f1b", "check": False, "evaluation": True}
    with mock.patch.object(PythonState, "of", side_effect=PythonState.of) as walks:
        pipe = fxpipe.compile(model, (x[:2],), loss_fn=lambda y, _: y.sum(), **options)
    assert walks.call_count == 1
    assert pipe.evaluation.then is pipe.then


@dataclasses.dataclass(frozen=True)
class Coefficients:
    beta: float


def test_what_a_loss_function_reads_once_the_model_is_gone(monkeypatch):
    """Numbers, objects that others replace, and what the forward's code reads beside the model."""
    beta, schedule = 1.0, types.SimpleNamespace(now=Coefficients(1.0), history=[1.0])

    def loss(output, batch):
        return beta * schedule.now.beta * schedule.history[-1] * output

    model = Net(lambda x: x * BETA)
    traced = Traced({}, model, python=PythonGuards(model, loss))
    del model
    traced.check({}, None, (), trains=True)
    for change, text in [
        (lambda: schedule.history.append(3.0), r"schedule\.history\.1 was None .* is 3\.0"),
        (lambda: setattr(schedule, "now", Coefficients(4.0)), r"schedule\.now\.beta was 1\.0 .* is 4\.0"),
    ]:
        change()
        with pytest.warns(UserWarning, match=text):
            traced.check({}, None, (), trains=True)
    beta = 2.0
    with pytest.warns(UserWarning, match=r"beta in .*loss .* was 1\.0 .* is 2\.0"):
        traced.check({}, None, (), trains=True)
    settings = PythonGuards(Net(free := lambda x: x * BETA))
    monkeypatch.setitem(globals(), "BETA", 3.0)
    assert "BETA" in str(*settings.changes(None))
    assert free(1.0) == 3.0


class Criterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.ones(2))
        self.scale = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, output, batch):
        return self.scale * self.weight * output


def replaced(criterion, name):
    kind = nn.Parameter if name == "scale" else torch.Tensor
    setattr(criterion, name, torch.full((2,), 2.0).as_subclass(kind))


CHANGES = {
    "filled": lambda criterion, name: getattr(criterion, name).fill_(2.0),
    "data": lambda criterion, name: getattr(criterion, name).data.fill_(2.0),
    "replaced": replaced,
}


@pytest.mark.parametrize("name", ["weight", "scale"])
@pytest.mark.parametrize("change", CHANGES)
def test_tensors_of_a_criterion(name, change):
    for loss_of in (lambda criterion: criterion, lambda criterion: lambda *xs: criterion(*xs)):
        criterion, model = Criterion(), Net(torch.relu)
        constants = criterion.weight, criterion.scale
        settings = PythonGuards(model, loss_of(criterion), [*map(weakref.ref, constants)])
        assert settings.changes(model) == []
        CHANGES[change](criterion, name)
        assert f"{name} has other values than when it was compiled" in str(*settings.changes(model))


@pytest.mark.parametrize("read", ["param_groups", "get_last_lr", "optimizer"])
def test_the_rate_of_another_optimizer(read):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(()))], lr=0.1)
    rate = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loss = {
        "param_groups": lambda output, batch: optimizer.param_groups[0]["lr"] * output,
        "get_last_lr": lambda output, batch: rate.get_last_lr()[0] * output,
        "optimizer": lambda output, batch: rate.optimizer.param_groups[0]["lr"] * output,
    }[read]
    model, holder = Net(torch.relu), Net(torch.relu)
    holder.trainer = optimizer  # which nothing reads
    settings, others = PythonGuards(model, loss), PythonGuards(holder)
    optimizer.step()
    assert settings.changes(model) == []
    rate.step()
    (change,) = settings.changes(model)
    assert (change.before, change.now) == (0.1, 0.05)
    assert others.changes(holder) == []


def test_constants_of_any_layout():
    model, pair = Net(torch.relu), torch.tensor([1 + 2j, 3 + 4j])
    model.tables = [
        pair.conj(),
        pair.conj().imag,
        pair.real.expand(3, 2).bool(),
        torch.ones(2).bfloat16()[::2],
    ]
    settings = PythonGuards(model, constants=[*map(weakref.ref, model.tables)])
    assert settings.changes(model) == []
    for table in model.tables:
        table.data.zero_()
    found = [change.name for change in settings.changes(model)]
    assert found == [f"tables.{k}" for k in range(4)]


def test_a_tensor_of_a_function_that_is_filled_in_place():
    act, owner, _ = in_a_tensor()
    model = Net(act)
    settings = PythonGuards(model, constants=[weakref.ref(owner.scale)])
    owner.scale.fill_(3.0)
    assert "has other values" in str(*settings.changes(model))


def test_a_global_that_a_field_of_an_object_is_made_from(monkeypatch):
    model = Net(lambda x: x * Options().beta)
    settings = PythonGuards(model)
    monkeypatch.setitem(globals(), "BETA", 3.0)
    assert "BETA" in str(*settings.changes(model))


class Counts:
    calls = 0

    @classmethod
    def act(cls, x):
        cls.calls += 1
        return x * (cls.calls > 0)


def test_what_a_method_of_a_class_sets_is_its_state():
    model = Net(lambda x: Counts.act(x))
    settings = PythonGuards(model)
    model(torch.ones(1, 2))
    assert settings.changes(model) == []


def test_what_a_constructor_sets_is_no_state_of_the_model():
    model = Net(lambda x: Made()(x))
    settings = PythonGuards(model)
    model.layer = nn.Linear(2, 2).requires_grad_(requires_grad=False)
    model.layer.forward = lambda x: x
    assert settings.changes(model)


class Annealed(nn.Module):
    """The script calls ``update``, as the forward calls that of a dict; ``Sized`` sets its own ``scale``."""

    def __init__(self):
        super().__init__()
        self.scaled, self.layer = Sized(), nn.Linear(2, 2)
        self.rate = self.scale = 1.0

    def update(self, rate):
        self.rate = rate

    def forward(self, x):
        kept = {}
        kept.update(x=self.layer(self.scaled(x)))
        return (kept["x"] * self.rate * self.scale).square().mean()


class Sized(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = 2  # as an eager forward leaves it

    def forward(self, x):
        self.scale = len(x.shape)
        return x / self.scale


@pytest.mark.parametrize("name", ["rate", "scale"])
def test_what_the_script_sets_by_a_name_that_code_sets_elsewhere(name):
    model, batch = Annealed(), {"x": torch.ones(2, 2)}
    pipe = fxpipe.compile(model, batch, ranks=1, microbatches=1, schedule="1f1b", check=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x=torch.ones(1, 2, 2))  # which sets what the forward sets
        pipe.step(batch)
    model.update(0.5) if name == "rate" else setattr(model, name, 0.5)
    with pytest.warns(match=f"The model's {name} was 1.0 when it was compiled, and is 0.5"):
        pipe.step(batch)


def hooked_module(model, hook):
    model.layer.register_forward_hook(lambda module, inputs, output: hook(output))


def hooked_gradient(model, hook):
    model.layer.weight.register_hook(hook)


@pytest.mark.parametrize("register", [hooked_module, hooked_gradient])
@pytest.mark.parametrize("changes", ["number", "tensor"])
def test_what_hooks_read(register, changes):
    model, batch = Annealed(), {"x": torch.ones(2, 2)}
    settings, mask = types.SimpleNamespace(factor=1.0), torch.ones(2)
    register(model, lambda x: x * mask * settings.factor)
    pipe = fxpipe.compile(model, batch, ranks=1, microbatches=1, schedule="1f1b", check=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.step(batch)
    if changes == "number":
        settings.factor = 0.5
    else:
        mask[0] = 0.0
    text = "factor was 1.0 when" if changes == "number" else "mask in .* has other values than when"
    with pytest.warns(match=text):
        pipe.step(batch)
