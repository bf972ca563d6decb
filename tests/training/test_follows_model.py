"""What the user does between compile and step: the step is that of the model as it is now, or an error."""

import argparse
import collections
import contextlib
import dataclasses
import functools
import gc
import operator
import os
import random
import sys
import threading
import types
import warnings
import weakref
from contextvars import ContextVar
from fractions import Fraction
from unittest import mock

import numpy as np
import pytest
import torch
from equality import LIMIT, eager_step
from torch import nn
from zoo import relative_error, too_far

import fxpipe
from fxpipe.python_state.walk import PythonState
from fxpipe.training.guards.python_guards import PythonGuards

WIDTH = 8


class Chain(nn.Module):
    """Halves an integer, which gives the default dtype, and keeps a running scale."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) + torch.arange(WIDTH) / 3
        self.scale = self.scale * 0.9 + 0.1 * x.detach().mean(0)
        return (x * self.scale).square().mean()


def compiled(model: nn.Module, batch: torch.Tensor, **options) -> fxpipe.Pipeline:
    given = {"ranks": 2, "schedule": "zb-h1"} | options
    return fxpipe.compile(model, (batch[:2],), microbatches=3, **given)


def replace_parameter(model):
    model.layers[0].weight = nn.Parameter(torch.eye(WIDTH))


def replace_buffer(model):
    model.scale = torch.full((WIDTH,), 0.5)


def assign_state(model):
    model.load_state_dict({n: t * 0.5 for n, t in model.state_dict().items()}, assign=True)


def give_data(model):
    model.layers[1].weight.data = torch.eye(WIDTH)


def run_eager(model):
    model(torch.ones(4, WIDTH))  # replaces the buffer


CHANGES = [replace_parameter, replace_buffer, assign_state, give_data, run_eager]


@pytest.mark.in_ci("1-replace_buffer", "1-assign_state", "1-give_data", "1-run_eager", "2-assign_state")
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_model_is_given_other_tensors(change, ranks):
    torch.manual_seed(0)
    model, batch = Chain(), torch.randn(6, WIDTH)
    pipe = compiled(model, batch, ranks=ranks)
    run = pipe.run_local if ranks > 1 else pipe.step
    run((batch,))
    change(model)
    model.zero_grad()
    expected = Chain()
    expected.load_state_dict(model.state_dict())
    loss, grads = eager_step(expected, (batch,), 3, None)
    result = run((batch,))
    found = result.grads if ranks > 1 else {n: p.grad for n, p in model.named_parameters()}
    assert relative_error(result.loss if ranks > 1 else result, loss) <= 1e-6
    assert too_far(found, grads, 1e-5) == {}
    assert relative_error(model.scale, expected.scale) <= 1e-6
    assert torch.equal(pipe.state_dict()["layers.0.weight"], model.layers[0].weight)


def test_the_model_is_converted():
    batch = torch.randn(6, WIDTH)
    model = Chain()
    pipe = compiled(model, batch)
    model.double()
    with pytest.raises(fxpipe.RunError, match=r"now torch.float64 of shape \(8, 8\)\. Compile the model"):
        pipe.run_local((batch,))


def test_the_model_is_moved():
    batch = torch.randn(6, WIDTH)
    model = Chain()
    pipe = compiled(model, batch)
    pipe.model_state.device = torch.device("cuda", 1)
    with pytest.raises(
        fxpipe.RunError, match=r"weight is on cpu, and the pipeline was compiled for cuda:1\. Move"
    ):
        pipe.run_local((batch,))


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_switched_on_around_a_step(ranks):
    torch.manual_seed(0)
    model, batch = Chain(), torch.randn(6, WIDTH)
    pipe = compiled(model, batch, ranks=ranks)
    run = pipe.run_local if ranks > 1 else pipe.step
    before = {n: b.clone() for n, b in model.named_buffers()}
    expected = run((batch,))
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.load_state_dict(before, strict=False)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode(), torch.device("meta"):
            found = run((batch,))
    finally:
        torch.set_default_dtype(torch.float32)
    if ranks > 1:
        assert torch.equal(found.loss, expected.loss)
        assert all(torch.equal(g, expected.grads[n]) for n, g in found.grads.items())
    else:
        assert torch.equal(found, expected)
        assert all(torch.equal(p.grad, grads[n]) for n, p in model.named_parameters())
        run((batch,))  # its gradients are no tensors of inference mode


class Opaque:
    def __init__(self) -> None:
        self.x = torch.ones(2, WIDTH)

    def __repr__(self) -> str:
        return "Opaque()"


class WithMore(Chain):
    def forward(self, x, more):
        return super().forward(x)


@pytest.mark.parametrize("leaf", [np.ones((2, WIDTH)), Opaque()], ids=["numpy", "object"])
def test_a_batch_that_cannot_be_looked_into(leaf):
    with pytest.raises(fxpipe.BatchError, match=r"'1' is a .*, which fxpipe cannot look into"):
        fxpipe.compile(WithMore(), (torch.ones(2, WIDTH), leaf), ranks=2, microbatches=3, schedule="gpipe")


class Writing(nn.Module):
    """Decides by the history of its input, and writes to the others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, y, t):
        h = self.linear(x)
        y.mul_(2)
        t.add_(1)
        return ((h * 3 if x.requires_grad else h) + y).square().mean() * t.mean()


def test_leaves_that_a_forward_asks_or_writes_to():
    model, x, y, t = Writing(), torch.randn(6, WIDTH), torch.randn(4, WIDTH), torch.ones(4)
    options = {"ranks": 1, "microbatches": 2, "schedule": "1f1b", "check": False}
    with pytest.raises(
        fxpipe.BatchError, match=r"leaf '1', which shares memory with the leaf '0'\. A program"
    ):
        fxpipe.compile(model, (x[:2], x[1:3], t[:2]), **options)
    with pytest.raises(fxpipe.BatchError, match="leaf '2', which has no dimensions"):
        fxpipe.compile(model, (x[:2], y[:2], t[0]), **options)
    pipe = fxpipe.compile(model, (x[:2], y[:2], t[:2]), **options)
    columns = torch.stack([x[:4], y], 2)
    x, y = columns[..., 0], columns[..., 1]  # they lie in turns
    loss = pipe.run_local((x, y, t)).loss
    assert relative_error(loss, model(x, y.clone(), t.clone())) <= 1e-6
    with pytest.raises(fxpipe.BatchError, match="leaf '1', which shares memory with the leaf '0'"):
        pipe.run_local((x, x[:], t))
    with pytest.raises(fxpipe.BatchError, match="requires_grad of '0' is True and was False in the example"):
        pipe.run_local((x.clone().requires_grad_(), y, t))


class Strided(nn.Module):
    """Decides by the strides of what it is given, or else of what it computes."""

    def __init__(self, given: bool) -> None:
        super().__init__()
        self.linear, self.given = nn.Linear(WIDTH, WIDTH), given

    def forward(self, x):
        y = self.linear(x)
        return (y.square() if (x if self.given else y).is_contiguous() else y).mean()


@pytest.mark.parametrize("given", [False, True])
def test_a_forward_asks_for_strides(given):
    """A program decides by those of the example; what it computes has the same as there."""
    model, x = Strided(given), torch.randn(WIDTH, 6).T
    options = {"ranks": 1, "microbatches": 3, "schedule": "1f1b", "check": False}
    pipe = fxpipe.compile(model, (x[:2].contiguous(),), **options)
    pipe.run_local((x.contiguous(),))
    told = pytest.warns(
        UserWarning, match=r"microbatch of '0' has the strides \(1, 6\), .* example, \(8, 1\)"
    )
    with told if given else contextlib.nullcontext():
        assert relative_error(pipe.run_local((x,)).loss, model(x.contiguous())) <= 1e-6


class Overwritten(nn.Module):
    """Operands that die in an op which reads them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x):
        x = self.layers[0](x).exp()
        x = torch.addmm(x, x.new_ones(len(x), len(x)), x)
        x = self.layers[1](x).exp()
        x = x.masked_scatter(x.detach().roll(1) > 1, x)
        x = self.layers[2](x).exp()
        return x.index_copy(0, torch.arange(len(x) - 1, -1, -1), x)[0].square().mean()


def test_no_result_over_an_operand_that_is_read_twice():
    torch.manual_seed(0)
    model, batch = Overwritten().double(), torch.randn(6, WIDTH, dtype=torch.float64) * 0.1
    loss, grads = eager_step(model, (batch,), 3, None)
    result = compiled(model, batch, recompute="full").run_local((batch,))
    assert relative_error(result.loss, loss) <= LIMIT
    assert too_far(result.grads, grads, LIMIT) == {}
    forward = compiled(model, batch, gradients=False).run_local((batch,))
    assert relative_error(forward.loss, loss) <= LIMIT


@dataclasses.dataclass
class Config:
    scale: float = 1.0
    norm: str = "none"
    deep: float = 1.0


class Mixer(nn.Module):
    repeats = 1  # of the class

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop, self.between = nn.Dropout(0.0), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.power, self.kind, self.bias, self.shape = 2, "plain", True, (1, 1)
        self.activation, self.config, self.rates, self.seen = torch.tanh, Config(), [0.5, 0.25], 0
        self.log: dict[str, list[float]] = {"losses": []}

    def mix(self, x):
        return self.between(self.linear(x)) * self.rates[0] * self.repeats

    def forward(self, x):
        if not self.training:
            self.seen = len(x)
        x = self.drop(self.activation(self.mix(x)) ** self.power * self.config.scale)
        return (self.last(x) + float(self.bias) + len(self.kind)).square().mean()

    def unused(self):
        return self.power


def other(*args):
    return args[-1]


class Derived(Mixer):
    """Has no method of its own."""


class Doubled(nn.Linear):
    pass


#: Names of settings and their values -> how they are set.
VALUES = {
    "power was 2 when it was compiled, and is 3: programs run with 2": lambda m: (m, "power", 3),
    "kind was 'plain' .* and is 'wide'": lambda m: (m, "kind", "wide"),
    "bias was True .* and is False": lambda m: (m, "bias", False),
    r"shape was \(1, 1\) .* and is \(2, 2\)": lambda m: (m, "shape", (2, 2)),
    "config.scale was 1.0 .* and is 2.0": lambda m: (m.config, "scale", 2.0),
    r"rates.0 was 0.5 .* and is 0.1": lambda m: (m, "rates", [0.1, 0.25]),
    r"drop.p was 0.0 .* and is 0.5": lambda m: (m.drop, "p", 0.5),
    r"between.0.training was True .* and is False": lambda m: (m.between[0], "training", False),
    r"Mixer.repeats was 1 .* and is 2": lambda m: (Mixer, "repeats", 2),
}
CODE = {
    r"activation was .*tanh when .* is .*other \(test_follows_model.py:\d+\)": lambda m: (
        m,
        "activation",
        other,
    ),
    r"forward was .*Mixer.forward .* is .*other \(test_follows": lambda m: (
        m,
        "forward",
        types.MethodType(other, m),
    ),
    r"mix was .*Mixer.mix .* and is <lambda>": lambda m: (m, "mix", lambda x: x),
    r"test_follows_model.Mixer.mix was .*Mixer.mix \(.*\) when .* and is .*other": lambda m: (
        Mixer,
        "mix",
        other,
    ),
    r"Mixer.forward was .*Mixer.forward .* is .*other": lambda m: (Mixer, "forward", other),
    r"test_follows_model.Derived.forward was None .* and is .*other": lambda m: (Derived, "forward", other),
    r"Linear.forward was torch.*Linear.forward": lambda m: (nn.Linear, "forward", other),
    r"last was torch.nn.modules.linear.Linear .* and is .*Doubled": lambda m: (
        m,
        "last",
        Doubled(WIDTH, WIDTH),
    ),
    r"between.1 was .*ReLU .* and is .*GELU": lambda m: (m.between, "1", nn.GELU()),
    r"config was .*Config when .* and is .*Namespace": lambda m: (m, "config", argparse.Namespace(scale=1.0)),
}


@pytest.fixture(scope="module")
def mixer():
    model = Derived()
    options = {"ranks": 1, "microbatches": 2, "schedule": "1f1b", "check": False}
    return model, lambda: fxpipe.compile(model, (torch.ones(2, WIDTH),), **options)


BATCH = (torch.ones(4, WIDTH),)


@contextlib.contextmanager
def changed(thing, name, value):
    has = name in {**vars(thing), **vars(thing).get("_modules", {})}
    before = getattr(thing, name)
    setattr(thing, name, value)
    try:
        yield
    finally:
        setattr(thing, name, before) if has else delattr(thing, name)


def test_the_python_of_a_model_changes(mixer):
    model, compiled_again = mixer
    pipe = compiled_again()
    before = pipe.run_local(BATCH).loss
    for message, change in VALUES.items():
        with changed(*change(model)), pytest.warns(UserWarning, match=message):
            assert pipe.run_local(BATCH).loss == before
    for message, change in CODE.items():
        with changed(*change(model)), pytest.raises(fxpipe.RunError, match=message):
            pipe.run_local(BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pipe.run_local(BATCH).loss == before
        with changed(model, "power", 3):
            pipe.run_local(BATCH)  # no second warning


FACTOR = {"of": {"loss": 1.0}}
LOCAL = threading.local()
LOCAL.gain = 1.0


class Rates:
    rate, table = 1.0, {"rate": 1.0}


class Gain:
    def __init__(self) -> None:
        self.gain = 1.0

    def __call__(self, x, table=[1.0]):  # noqa: B006 - the mistake
        return x * self.gain * table[0]


def amplified(x):
    return x * amplified.gain


amplified.gain = 1.0


def doubled(x, times=1.0):
    return x * times


def tripled(x, times=1.0):
    return 3 * x * times


@functools.cache
def rate():
    return Rates.rate * Rates().table["rate"]


class Slots:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class Alone:
    """What is reached by a weak reference alone."""

    scale = 1.0


ALONE = Alone()
LAYERED = collections.ChainMap({"scale": 1.0})
SETTINGS = types.ModuleType("settings_of_reader")
SETTINGS.scale = 1.0
WRITTEN = 1.0


class Reader(nn.Module):
    """A forward that reads numbers from all kinds of places."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)
        self.config, self.slots, self.rng = Config(norm=Config()), Slots(), random.Random(1)
        self.linear.weight.scale, self.act = 1.0, Gain()
        self.register_buffer("mask", None)
        self.tuples, self.names, self.number = ((1.0, 2.0), [3.0]), {"a"}, np.int64(2)
        self.table, self.array = torch.ones(WIDTH), np.ones(WIDTH, "float32")
        self.half, self.bytes = Fraction(1, 2), bytearray(b"ab")
        self.proxy = types.MappingProxyType({"scale": 1.0})
        self.other = weakref.ref(ALONE)

    def forward(self, x):
        from settings_of_reader import scale

        x = (
            self.drop(self.linear(x))
            * self.linear.weight.scale
            * self.config.norm.scale
            * self.slots.scale
            * self.tuples[0][0]
        )
        x = doubled(x * float(self.half) * len(self.bytes) * self.proxy["scale"])
        x = x * len(self.names) * int(self.number) * self.table * torch.as_tensor(self.array)
        x = x * float(os.environ.get("SCALE_OF_READER", "1")) * scale * self.other().scale * LAYERED["scale"]
        x = x * globals()["WRITTEN"] * operator.attrgetter("config.norm.deep")(self)
        x = self.act(x if self.mask is None else x * self.mask)
        return x * self.extra if hasattr(self, "extra") else x


def loss_of(model):
    """A loss function that reads a variable, a module and a table; and changes, each with its message."""
    weight, crit, table = 1.0, nn.HuberLoss(), {"w": torch.ones(WIDTH)}
    acts, power = [torch.square], ContextVar("power", default=1.0)

    def loss(output, microbatch):
        output = amplified(acts[0](output) ** power.get()) * rate() * LOCAL.gain
        return crit(output, microbatch[0]) * weight * FACTOR["of"]["loss"] * table["w"].mean()

    def reweigh():
        nonlocal weight
        weight = 3.0

    return loss, {
        r"weight in loss \(test_follows_model.py:\d+\) was 1.0 .* and is 3.0": reweigh,
        r"crit.delta was 1.0 .* and is 0.5": lambda: setattr(crit, "delta", 0.5),
        r"table.w has other values": lambda: table.update(w=torch.zeros(WIDTH)),
        r"acts.0 was torch.*square when .* is torch.*abs": lambda: acts.__setitem__(0, torch.abs),
        r"acts.1 was None .* and is torch.*abs": lambda: acts.append(torch.abs),
        r"power.value was 1.0 .* and is 2.0": lambda: power.set(2.0),
        r"gain in .*amplified \(.*\) was 1.0 .* and is 2.0": lambda: setattr(amplified, "gain", 2.0),
        r"Rates.rate was 1.0 .* and is 2.0": lambda: setattr(Rates, "rate", 2.0),
        r"Rates.table.rate was 1.0 .* and is 2.0": lambda: Rates.table.update(rate=2.0),
        r"LOCAL.gain was 1.0 .* and is 2.0": lambda: setattr(LOCAL, "gain", 2.0),
        r"model's act.gain was 1.0 .* and is 2.0": lambda: setattr(model.act, "gain", 2.0),
        r"table.0 was 1.0 .* and is 2.0": lambda: Gain.__call__.__defaults__[0].__setitem__(0, 2.0),
        r"FACTOR.of.loss was 1.0 .* and is 2.0": lambda: FACTOR["of"].update(loss=2.0),
        r"config.norm.scale was 1.0 .* and is 2.0": lambda: setattr(model.config.norm, "scale", 2.0),
        r"model's WRITTEN in .* was 1.0 .* and is 2.0": lambda: globals().update(WRITTEN=2.0),
        r"config.norm.deep was 1.0 .* and is 2.0": lambda: setattr(model.config.norm, "deep", 2.0),
        r"slots.scale was 1.0 .* and is 2.0": lambda: setattr(model.slots, "scale", 2.0),
        r"linear.weight.scale was 1.0 .* and is 2.0": lambda: setattr(model.linear.weight, "scale", 2.0),
        r"tuples.0 was \(1.0, 2.0\)": lambda: setattr(model, "tuples", ((5.0, 2.0), [3.0])),
        r"names was frozenset": lambda: model.names.add("b"),
        r"number was .*2.* and is .*3": lambda: setattr(model, "number", np.int64(3)),
        r"model's table has other values": lambda: model.table.fill_(2.0),
        r"model's array has other values": lambda: model.array.fill(2.0),
        r"mask was None .* is 'a buffer'": lambda: setattr(model, "mask", torch.ones(WIDTH)),
        r"extra was None": lambda: setattr(model, "extra", nn.Parameter(torch.ones(WIDTH))),
        r"half was Fraction\(1, 2\) .* and is Fraction\(1, 3\)": lambda: setattr(
            model, "half", Fraction(1, 3)
        ),
        r"os.environ.SCALE_OF_READER was None .* and is b'2'": lambda: os.environ.update(SCALE_OF_READER="2"),
        r"settings_of_reader.scale was 1.0 .* and is 2.0": lambda: setattr(SETTINGS, "scale", 2.0),
        r"other.scale was 1.0 .* and is 2.0": lambda: setattr(ALONE, "scale", 2.0),
        r"LAYERED.maps.0.scale was 1.0 .* and is 2.0": lambda: LAYERED.update(scale=2.0),
        r"bytes was b'ab' .* and is b'abc'": lambda: model.bytes.extend(b"c"),
        r"proxy.scale was 1.0 .* and is 2.0": lambda: setattr(
            model, "proxy", types.MappingProxyType({"scale": 2.0})
        ),
        r"times in .*doubled .* was 1.0 .* and is 2.0": lambda: setattr(doubled, "__defaults__", (2.0,)),
        r"code of .*doubled .* was doubled .*\d\) .* and is tripled": lambda: setattr(
            doubled, "__code__", tripled.__code__
        ),
        r"training was True .* model.train\(\)": model.eval,
    }


def test_what_a_model_and_its_loss_function_read_changes(monkeypatch):
    monkeypatch.setenv("SCALE_OF_READER", "1")  # for its end
    monkeypatch.delenv("SCALE_OF_READER")
    monkeypatch.setitem(sys.modules, "settings_of_reader", SETTINGS)
    model = Reader()
    loss, changes = loss_of(model)
    code = doubled.__defaults__, doubled.__code__
    options = {"ranks": 1, "microbatches": 2, "schedule": "1f1b", "check": False}
    pipe = fxpipe.compile(model, (torch.ones(2, WIDTH),), loss_fn=loss, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = pipe.run_local(BATCH).loss
    for message, change in changes.items():
        change()
        with pytest.warns(UserWarning, match=message):
            assert pipe.run_local(BATCH).loss == before
    FACTOR["of"]["loss"] = 1.0
    doubled.__defaults__, doubled.__code__ = code
    model.drop.__class__ = nn.Identity
    with pytest.raises(fxpipe.RunError, match=r"drop was .*Dropout .* is .*Identity"):
        pipe.run_local(BATCH)


def test_one_parameter_becomes_two():
    model = Mixer()
    model.last.weight = model.linear.weight
    options = {"ranks": 1, "microbatches": 2, "schedule": "1f1b", "check": False}
    pipe = fxpipe.compile(model, (torch.ones(2, WIDTH),), **options)
    shared = model.last.weight
    model.linear.weight = model.last.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    pipe.run_local(BATCH)  # still one
    model.last.weight = shared
    with pytest.raises(fxpipe.RunError, match=r"last.weight was linear.weight too when"):
        pipe.run_local(BATCH)


def test_a_nested_batch(mixer):
    with pytest.raises(fxpipe.BatchError, match="is a tensor nested"):
        mixer[1]().run_local((torch.nested.nested_tensor([*BATCH[0]]),))


def stays_as_it_was(model):
    model.drop.p = float("0.0")


def is_what_the_forward_sets(model):
    model.eval()(*BATCH)
    model.train()


def is_no_part_of_the_forward(model):
    model.epoch, model.unused, model.handle = 3, other, Config()
    model.log["losses"].append(3.0)
    model.config.square = "float32"  # the name of a method of tensors that the forward calls


def is_another_module_of_the_same_kind(model):
    model.between[0] = nn.Linear(WIDTH, WIDTH)


HARMLESS = [
    stays_as_it_was,
    is_what_the_forward_sets,
    is_no_part_of_the_forward,
    is_another_module_of_the_same_kind,
]


@pytest.mark.filterwarnings("error")
def test_changes_that_programs_do_not_mind(mixer):
    model, compiled_again = mixer
    pipe = compiled_again()
    for change in HARMLESS:
        change(model)
        loss = pipe.run_local(BATCH).loss
    assert relative_error(loss, model(*BATCH)) <= 1e-6


def test_a_pipeline_does_not_keep_what_it_compares():
    def build():
        model = Mixer()
        model.activation = lambda x: model.linear(x)
        model.mix = types.MethodType(Mixer.mix, model)
        return weakref.ref(model), PythonGuards(model)

    (model, settings), _ = build(), gc.collect()
    assert model() is None
    assert settings.changes(Mixer())


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_only_other_objects_are_searched():
    model = Mixer()
    model.traced = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    settings = PythonGuards(model)
    with mock.patch.object(PythonState, "of", side_effect=AssertionError):
        assert settings.changes(model) == []
        model.power, model.config.scale, model.rates[1], model.seen = 3, 2.0, 0.5, 7
        assert [change.name for change in settings.changes(model)] == ["config.scale", "power", "rates.1"]
        assert settings.changes(model) == []
        model.power, model.config.scale = 2, 3.0
        assert [*map(str, settings.changes(model))] == [
            "The model's config.scale was 1.0 when it was compiled, and is 3.0: programs run with 1.0."
        ]
    model.table = torch.ones(WIDTH)  # a constant of programs, as it were
    settings = PythonGuards(model, constants=[weakref.ref(model.table)])
    address, others = id(model.table), []
    del model.table
    while len(others) < 100 and (not others or id(others[-1]) != address):
        others.append(torch.zeros(WIDTH))
    model.table = others[-1]
    assert [change.name for change in settings.changes(model)] == ["table"]
    model.config = Config(scale=4.0)
    assert [change.now for change in settings.changes(model) if change.name == "config.scale"] == [4.0]
    with mock.patch.object(PythonState, "of", side_effect=AssertionError):
        assert settings.changes(model) == []
    model.activation = lambda x: x
    settings, address = PythonGuards(model), id(model.activation)
    model.activation = None
    others = []
    while len(others) < 100 and (not others or id(others[-1]) != address):
        others.append(lambda x: x + 1)
    model.activation = others[-1]
    assert [change.name for change in settings.changes(model)] == ["activation"]


def test_a_cache_in_a_default_is_no_setting():
    def cached(x, known={}):  # noqa: B006 - the cache
        return known.setdefault("x", x)

    model = nn.Linear(WIDTH, WIDTH)
    model.act, model.forward = cached, lambda x: model.act(x)
    settings = PythonGuards(model)
    cached(1.0)
    assert settings.changes(model) == []


def test_a_step_where_a_script_validates_is_told():
    """It trains: its gradients would come to those of the next update."""
    torch.manual_seed(0)
    model, batch = Chain(), torch.randn(6, WIDTH)
    told = pytest.warns(UserWarning, match="trains as ever.*call pipe.evaluate")
    pipe = compiled(model, batch, ranks=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.step((batch,))
    with told, torch.no_grad():
        pipe.step((batch,))
    pipe = compiled(model, batch, ranks=1)
    model.eval()
    with told:
        pipe.step((batch,))
    pipe = compiled(model, batch, ranks=1)  # as it trains without dropout
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.step((batch,))


def test_a_batch_that_is_to_get_gradients_is_told():
    model, batch = Chain(), torch.randn(6, WIDTH)
    pipe = compiled(model, batch, ranks=1)
    with pytest.warns(
        UserWarning, match="tensor of the batch requires a gradient, and pipe.step computes none"
    ):
        pipe.step((batch.requires_grad_(),))


def test_autocast_around_a_step_is_told():
    """The programs have no casts, unless they were compiled under it."""
    batch = torch.randn(6, WIDTH)
    pipe = compiled(Chain(), batch, ranks=1)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.warns(UserWarning, match="runs as it was compiled, without casts to torch.bfloat16"):
            pipe.step((batch,))
        pipe = compiled(Chain(), batch, ranks=1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pipe.step((batch,))


def test_hooks_for_saved_tensors_around_a_step_are_told():
    batch = torch.randn(6, WIDTH)
    pipe = compiled(Chain(), batch, ranks=1)
    with (
        torch.autograd.graph.save_on_cpu(),
        pytest.warns(
            UserWarning, match="hooks for saved tensors, as those of save_on_cpu, keeps activations"
        ),
    ):
        pipe.step((batch,))


def test_a_step_whose_gradients_wait_for_others_is_told(monkeypatch):
    """``accumulate`` of accelerate, whose backward would divide the loss."""
    accelerate = pytest.importorskip("accelerate")
    monkeypatch.setattr(accelerate.state.GradientState, "_shared_state", {})
    state = accelerate.state.GradientState()
    batch = torch.randn(6, WIDTH)
    pipe = compiled(Chain(), batch, ranks=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.step((batch,))
    state._set_sync_gradients(False)
    with pytest.warns(UserWarning, match=r"within Accelerator.accumulate adds .* undivided"):
        pipe.step((batch,))


class Writes(Chain):
    def forward(self, x):
        x *= 2
        return super().forward(x)


def test_a_batch_that_plain_torch_would_have_changed_is_told():
    """Where it comes again as it was."""
    batch, other = torch.randn(6, WIDTH), torch.randn(6, WIDTH)
    pipe = compiled(Writes(), batch, ranks=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.step((batch,))
        pipe.step((other,))
        batch.copy_(other)  # the loop's own buffer
        pipe.step((batch,))
    with pytest.warns(UserWarning, match="forward writes to '0' of the batch, which stays as it was"):
        pipe.step((other,))


def test_a_number_that_is_read_of_a_tensor_changes():
    factor, batch = torch.tensor(2.0), (torch.randn(4, WIDTH),)
    pipe = fxpipe.compile(
        nn.Linear(WIDTH, WIDTH),
        (batch[0][:2],),
        loss_fn=lambda y, _: factor.item() * y.square().mean(),
        ranks=1,
        microbatches=2,
        schedule="1f1b",
    )
    before = pipe.run_local(batch).loss
    factor.fill_(3.0)
    with pytest.warns(UserWarning, match="factor in .* has other values than when it was compiled"):
        assert pipe.run_local(batch).loss == before


class Cooling(nn.Linear):
    """Reads a property that a script sets."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self._heat = 1.0

    @property
    def heat(self) -> float:
        return self._heat

    @heat.setter
    def heat(self, value: float) -> None:
        self._heat = value

    def forward(self, x):
        return (super().forward(x) / self.heat).square().mean()


def test_a_property_that_a_script_sets_is_told():
    model, batch = Cooling(), torch.randn(6, WIDTH)
    pipe = compiled(model, batch, ranks=1)
    model.heat = 0.5
    with pytest.warns(UserWarning, match="_heat was 1.0 when it was compiled, and is 0.5"):
        pipe.run_local((batch,))
