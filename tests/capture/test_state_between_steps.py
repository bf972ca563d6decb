"""State of Python that a forward changes from step to step: an error or a warning that names the line."""

import contextvars
import functools
import queue
import random
import reprlib
import threading
import types
import warnings
import weakref
from collections import ChainMap, UserDict, deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe.capture.state.replay import Replay
from fxpipe.capture.trace import capture

WIDTH = 4
TOTAL = {"steps": 0, "last": None}


class Net(nn.Module):
    def __init__(self, between, state):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.between, self.state = between, state

    def forward(self, x):
        return self.second(self.between(self, torch.tanh(self.first(x)))).square().mean()


class Slots:
    __slots__ = ("steps",)

    def __init__(self):
        self.steps = 0


class OfAClass:
    steps = 0


class Halves(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Halves.calls += 1
        return gradient * Halves.calls


def traced(between, state=None, loss_fn=None) -> str:
    """The warnings of a capture, as text."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        capture(Net(between, state), (torch.randn(2, WIDTH),), loss_fn, 0.5, torch.device("cpu"))
    return "\n".join(str(w.message) for w in caught if w.category is UserWarning)


def keeps_in_a_list(self, x):
    self.state.append(x.detach())
    return x + sum(self.state)


def keeps_in_a_tuple(self, x):
    y, self.state = x if self.state is None else x + self.state[0], (x.detach(), 1)
    return y


def keeps_in_an_object(self, x):
    y = x if self.state is None else x + self.state.last
    self.state = OfAClass()
    self.state.last = x.detach()
    return y


def keeps_under_a_new_key(self, x):
    self.state[len(self.state)] = x.detach()
    return x + sum(self.state.values())


def keeps_in_a_global(self, x):
    y = x if TOTAL["last"] is None else x + TOTAL["last"]
    TOTAL["last"] = x.detach()
    return y


def keeps_random_numbers(self, x):
    self.state = torch.rand(WIDTH) if self.state is None else self.state
    return x + self.state


def keeps_of_a_parameter(self, x):
    self.state = self.first.weight.detach().sum(0) if self.state is None else self.state
    return x + self.state


def reads_the_first_of_its_results(self, x):
    y = x.sin().detach()
    self.state = y if self.state is None else self.state
    return x + self.state


def changes_a_table(self, x):
    """The second run does not make the table, and reads it as the first one left it."""
    if self.state[0] is None:
        self.state[0] = torch.arange(WIDTH)
    y = x + self.state[0]
    self.state[0][:2].add_(1)
    return y


CARRIED = {
    changes_a_table: lambda: [None],
    reads_the_first_of_its_results: lambda: None,
    keeps_in_a_list: list,
    keeps_in_a_tuple: lambda: None,
    keeps_in_an_object: lambda: None,
    keeps_under_a_new_key: dict,
    keeps_in_a_global: lambda: None,
    keeps_random_numbers: lambda: None,
    keeps_of_a_parameter: lambda: None,
}


@pytest.mark.parametrize("between", CARRIED)
def test_a_result_that_a_later_step_reads(between):
    with pytest.raises(
        fxpipe.CaptureError, match=r"keeps a result in .*test_state_between_steps.py:\d+.*buffer"
    ):
        traced(between, CARRIED[between]())
    assert TOTAL["last"] is None


def closure():
    steps = 0

    def between(self, x):
        nonlocal steps
        steps += 1
        return x * steps

    return between


def of_slots(self, x):
    self.state.steps += 1
    return x * self.state.steps


def of_a_class(self, x):
    OfAClass.steps += 1
    return x * OfAClass.steps


def of_a_global(self, x):
    TOTAL["steps"] += 1
    return x * TOTAL["steps"]


def of_an_iterator(self, x):
    return x * next(self.state)


def of_an_array(self, x):
    self.state += 1
    return x * float(self.state[0])


def of_the_values_of_an_array(self, x):
    self.state += 1
    return x * torch.from_numpy(self.state.copy())


def of_the_order_of_keys(self, x):
    key = next(iter(self.state))
    y = x + self.state.pop(key)
    self.state[key] = x.detach()
    return y


def of_a_default(self, x, seen=[]):  # noqa: B006
    seen.append(1)
    return x * len(seen)


def swapped_modules(self, x):
    self.first, self.second = self.second, self.first
    return x


def of_a_hook(self, x):
    def scaled(gradient):
        self.state[0] += 1
        return gradient * self.state[0]

    x.register_hook(scaled)
    return x


def of_a_grad_mode(self, x):
    self.state[0] += 1
    with torch.set_grad_enabled(self.state[0] > 1):
        return x + x.sin()


def of_a_constant(self, x):
    self.state[0] += 1
    return x * torch.tensor([1.0, self.state[0], 2.0, 3.0])


def of_a_first_write(self, x):
    if not self.state.eps:
        self.state.running_mean.add_(1)
    self.state.eps = 1
    return x


def of_the_way_to_the_same_ops(self, x):
    self.state[0] += 1
    a, b = x.sin(), x.cos()
    return torch.stack((a, b) if self.state[0] == 1 else (b, a))[0]


CHANGED = {
    "constant": (of_a_constant, lambda: [0]),
    "write": (of_a_first_write, lambda: nn.BatchNorm1d(WIDTH, eps=0)),
    "order of operands": (of_the_way_to_the_same_ops, lambda: [0]),
    "closure": (closure(), lambda: None),
    "slots": (of_slots, Slots),
    "class": (of_a_class, lambda: None),
    "global": (of_a_global, lambda: None),
    "iterator": (of_an_iterator, lambda: iter([1.0, 2.0, 3.0])),
    "array": (of_an_array, lambda: np.ones(1)),
    "values of an array": (of_the_values_of_an_array, lambda: np.ones(1, dtype="float32")),
    "order of keys": (of_the_order_of_keys, lambda: {key: torch.zeros(2, WIDTH) for key in "ab"}),
    "random": (lambda self, x: x * self.state.random(), lambda: random.Random(0)),
    "generator": (lambda self, x: x * float(self.state.random()), lambda: np.random.default_rng(0)),
    "default": (of_a_default, lambda: None),
    "modules": (swapped_modules, lambda: None),
    "hook": (of_a_hook, lambda: [0]),
    "custom function": (lambda self, x: Halves.apply(x), lambda: None),
    "grad mode": (of_a_grad_mode, lambda: deque([0])),
}


@pytest.mark.parametrize("name", CHANGED)
def test_ops_that_a_later_step_runs_otherwise(name):
    between, state = CHANGED[name]
    held = state()
    message = traced(between, held)
    assert "runs other ops when it runs again" in message
    assert "test_state_between_steps.py:" in message
    assert (OfAClass.steps, TOTAL["steps"], Halves.calls) == (0, 0, 0)
    assert of_a_default.__defaults__ == ([],)
    if name == "slots":
        assert held.steps == 0
    if name in ("iterator", "random", "generator", "array"):
        assert traced(between, held) == message  # the state is as it was before


GENERATORS = {
    "Python's": lambda: random.Random(0),
    **{
        name: lambda name=name: np.random.Generator(getattr(np.random, name)(0))
        for name in ("PCG64", "MT19937", "Philox", "SFC64")
    },
    "old": lambda: np.random.RandomState(0),
    "torch's": lambda: torch.Generator().manual_seed(0),
    "masked array": lambda: np.ma.masked_array([0.0, 1.0], [True, False]),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_state_that_is_no_attribute_is_seen_and_restored(name):
    def drawn(state):
        if isinstance(state, np.ndarray):
            state += 1
            return state.sum()
        if isinstance(state, torch.Generator):
            return state.manual_seed(state.initial_seed() + 1).initial_seed()
        return state.random()

    def between(self, x):
        return x * float(drawn(self.state))

    state = GENERATORS[name]()
    assert "runs other ops" in traced(between, state)
    assert [drawn(state) for _ in range(3)] == [
        drawn(fresh) for fresh in [GENERATORS[name]()] for _ in range(3)
    ]


TABLE_OF_CONTEXT = contextvars.ContextVar("table")


def table_of_context(self, x):
    if TABLE_OF_CONTEXT.get(None) is None:
        TABLE_OF_CONTEXT.set(torch.arange(WIDTH) / 3)
    return x * TABLE_OF_CONTEXT.get()


def table_in_an_attribute(self, x):
    if not hasattr(self.state, "table"):
        self.state.table = torch.arange(WIDTH) / 3
    return x * self.state.table


def table_under_a_key(self, x):
    if Halves not in self.state:
        self.state[Halves] = torch.arange(WIDTH) / 3
    return x * self.state[Halves]


def table_in_a_queue(self, x):
    if self.state.empty():
        self.state.put(torch.arange(WIDTH) / 3)
    return x * self.state.queue[0]


TABLES = {
    "context variable": (table_of_context, lambda: None),
    "thread variable": (table_in_an_attribute, threading.local),
    "namespace": (table_in_an_attribute, types.SimpleNamespace),
    "partial": (table_in_an_attribute, lambda: functools.partial(int)),
    "weak dict": (table_under_a_key, weakref.WeakKeyDictionary),
    "user's dict": (table_under_a_key, UserDict),
    "chain": (table_under_a_key, ChainMap),
    "queue": (table_in_a_queue, queue.Queue),
    "last in, first out": (table_in_a_queue, queue.LifoQueue),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_the_standard_library_are_restored(name):
    between, state = TABLES[name]
    net = Net(between, state())
    for _ in range(2):
        capture(net, (torch.randn(2, WIDTH),), None, 0.5, torch.device("cpu"))
    table = contextvars.copy_context().run(lambda: (net(torch.randn(2, WIDTH)), TABLE_OF_CONTEXT.get(None)))
    assert [type(x) for x in table if x is not None] == [torch.Tensor] * (2 if state() is None else 1)


class Kind(type):
    steps = 0


class Named(metaclass=Kind):
    class Inner:
        steps = 0

    space, steps, made = types.SimpleNamespace(steps=0), 0, 0

    def __init__(self):
        Named.made += 1

    @property
    def step(self):
        return self.steps

    @step.setter
    def step(self, value):
        type(self).steps = value

    @staticmethod
    @functools.cache
    def table():
        return torch.arange(WIDTH) / 3


def counted(x, owner, name):
    setattr(owner, name, getattr(owner, name) + 1)
    return x


SPACE = types.SimpleNamespace(steps=0)
#: What code does to a class that it only names -> what then is as it was.
NAMED = {
    "metaclass": (lambda self, x: counted(x, type(Named), "steps"), lambda: Kind.steps),
    "nested class": (lambda self, x: counted(x, Named.Inner, "steps"), lambda: Named.Inner.steps),
    "namespace of a class": (lambda self, x: counted(x, Named.space, "steps"), lambda: Named.space.steps),
    "namespace": (lambda self, x: counted(x, SPACE, "steps"), lambda: SPACE.steps),
    "constructor": (lambda self, x: x * bool(Named()), lambda: Named.made),
    "property": (lambda self, x: counted(x, Named(), "step"), lambda: Named.steps),
    "cached method": (lambda self, x: x * Named.table(), lambda: Named.table.cache_info().currsize),
}


@pytest.mark.parametrize("way", NAMED)
def test_state_of_classes_that_code_names_is_restored(way):
    between, state = NAMED[way]
    traced(between)
    assert state() == 0


def by_its_class(self, x):
    return x * 2 if type(x) is torch.Tensor else x


def by_the_name_of_its_class(self, x):
    return x * 2 if self.first.weight.__class__.__name__ in ("Parameter", "Buffer") else x


@pytest.mark.parametrize("between", [by_its_class, by_the_name_of_its_class])
def test_a_tensor_of_another_class(between):
    line = between.__code__.co_firstlineno + 1
    assert f"test_state_between_steps.py:{line}). In a trace tensors and parameters are of" in traced(between)


def test_classes_of_other_things():
    assert (
        traced(lambda self, x: x * 2 if type(self.state) is int and isinstance(x, nn.Parameter) else x) == ""
    )


def test_a_submodule_that_has_no_length():
    assert not traced(lambda self, x: self.state(x), torch.compile(nn.Linear(WIDTH, WIDTH)))


def test_a_generator_without_state():
    assert traced(lambda self, x: x, random.SystemRandom()) == ""


def test_a_new_counter_that_a_later_step_may_read():
    """Both runs take the same way; the attribute is there since the first one."""

    def every_fourth(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return x * 2 if self.calls % 4 == 0 else x

    assert "changes the model's calls" in traced(every_fourth)


def test_state_of_a_loss_function():
    class Scaled:
        def __init__(self):
            self.steps = 0

        def __call__(self, output, batch):
            self.steps += 1
            return output * self.steps

    loss = Scaled()
    assert "runs other ops" in traced(lambda self, x: x, loss_fn=loss)
    assert loss.steps == 0


def other_loss(output, state):
    losses = output.sin(), output.cos()
    return losses[state.steps > 1]


def other_end(output, state):
    y = output.sin()
    if state.steps == 1:
        state.running_mean.add_(1)
    return y


@pytest.mark.parametrize("end", [other_loss, other_end])
def test_a_second_run_of_the_same_ops_with_another_end(end):
    state = nn.BatchNorm1d(WIDTH)
    state.steps = 0

    def loss_fn(output, batch):
        state.steps += 1
        return end(output, state)

    assert "runs other ops when it runs again" in traced(lambda self, x: x, state, loss_fn)


def with_constants_and_random_numbers(self, x):
    return (
        nn.functional.dropout(x, 0.5) + torch.tensor(2.0) + torch.tensor([float("nan")] * WIDTH).nan_to_num()
    )


def with_a_table(self, x):
    x = x.tanh()
    if not self.state:
        self.state["table"] = torch.arange(WIDTH).sin()[None].repeat(2, 1)
    return x * self.state["table"]


def with_a_check(self, x):
    return x.sin() if (x == x).all() else x


def with_custom_functions(self, x):
    return torch.utils.checkpoint.checkpoint(torch.tanh, Twice.apply(x), use_reentrant=False)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


@pytest.mark.parametrize(
    "between", [with_constants_and_random_numbers, with_a_table, with_a_check, with_custom_functions]
)
def test_the_same_ops_are_not_recorded_again(between, monkeypatch):
    monkeypatch.setattr(Replay, "record", lambda self: pytest.fail("the second run is recorded"))
    assert traced(between, {}) == ""


def keeps_a_table(self, x):
    if x.shape not in self.state:
        self.state[x.shape] = torch.ones_like(x)
        self.state[x.shape][:, 0] = 3
    return x * self.state[x.shape]


def keeps_memory(self, x):
    memory = self.state.setdefault("memory", torch.empty(2, WIDTH))
    memory.copy_(x.detach())
    return x + memory


def keeps_a_nan(self, x):
    self.state["nan"] = float("nan")
    return x


def keeps_records(self, x):
    self.state.setdefault("records", []).append(x.detach())
    return x


def prints(self, x):
    str(f"x is {x}")
    return x


@pytest.mark.parametrize("between", [keeps_a_table, keeps_memory, keeps_a_nan, keeps_records, prints])
def test_tables_and_records_are_no_state(between):
    assert traced(between, {}) == ""


def in_a_thread(self, x):
    found = []
    thread = threading.Thread(target=lambda: found.append(x.sin()))
    thread.start()
    thread.join()
    return x + found[0]


def under_a_default_dtype(self, x):
    torch.set_default_dtype(torch.float64)
    return x + torch.arange(WIDTH) / 3


def makes_a_parameter(self, x):
    self.state = nn.Parameter(torch.ones(WIDTH))
    return x * self.state


REFUSED = {
    "runs ops in another thread": in_a_thread,
    "reads the text": lambda self, x: x if "nan" in str(x) else x * 2,
    "reads the text of": lambda self, x: x if f"{x.sum():.1f}" == "0.0" else x * 2,
    "reads the text of a": lambda self, x: x if reprlib.repr(x) else x * 2,  # by a line of Python's library
    "changes torch's default dtype": under_a_default_dtype,
    "gives the model the parameter .state.": makes_a_parameter,
    "reads the gradient": lambda self, x: x if self.first.weight.grad is None else x * 2,
    "reads how often": lambda self, x: x * (1 + x._version),
    "reads the address": lambda self, x: x if x.untyped_storage().data_ptr() else x * 2,
    "asks for the grad mode": lambda self, x: checkpoint(
        lambda y: y if torch.is_grad_enabled() else y * 2, x, use_reentrant=True
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_a_trace_cannot_tell(message):
    dtype = torch.get_default_dtype()
    with pytest.raises(fxpipe.CaptureError, match=rf"{message}.*test_state_between_steps.py:\d+"):
        traced(REFUSED[message])
    assert torch.get_default_dtype() is dtype
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    assert y.grad_fn._saved_result.data_ptr() == y.data_ptr()  # without hooks of a checkpoint


def test_text_that_is_only_printed():
    assert traced(lambda self, x: (f"a sum of {x.sum():.2f}, {x}", x)[1]) == ""


def test_a_gradient_of_what_is_not_trained():
    state = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
    assert traced(lambda self, x: x * self.state if self.state.grad is None else x, state) == ""
    state.grad = torch.ones(WIDTH)
    with pytest.raises(fxpipe.CaptureError, match="reads the gradient"):
        traced(lambda self, x: x * self.state if self.state.grad is None else x, state)
