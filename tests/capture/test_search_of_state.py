"""Where capture looks for state: in the globals that code names, not in those called like an attribute."""

import dis
import inspect
import types
from collections import OrderedDict

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.runtime.functions import name_and_line, names_in


class Unread:
    """Looking into it is an error; it stands for a large program."""

    def __getattribute__(self, name):
        assert name != "__dict__", "the search has come here"
        return super().__getattribute__(name)


class Lazy(OrderedDict):
    """Its methods import what it names, as those of a registry of models do."""

    def items(self):
        raise ImportError

    __iter__ = keys = values = clear = update = items


width, relu = Unread(), Unread()
counts, lazy = [0], Lazy(a=1)
settings = types.ModuleType("settings")
settings.counts, settings.unread = [0], Unread()
settings.least, settings.none = float("nan"), float("nan")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.width = 4
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        def count():
            counts[0] += 1

        count()
        settings.counts[0] += 1
        settings.least, settings.none = 0.5, settings.none + 1
        lazy["b"] = 2
        return self.linear(x).relu().mean() / self.width


def test_globals_are_told_from_attributes():
    batch = torch.randn(4, 4)
    with pytest.warns(UserWarning, match="The forward changes") as warned:
        pipe = fxpipe.compile(Net(), (batch[:2],), ranks=1, microbatches=2, schedule="1f1b", check=False)
    assert counts == settings.counts == [0]
    assert [*OrderedDict.items(lazy)] == [("a", 1)]
    messages = [str(each.message).partition(". A program")[0] for each in warned]
    assert messages == [
        f"The forward changes {name}"
        for name in ("settings.least", "settings.counts", "the global counts of test_search_of_state")
    ]
    assert pipe.run_local((batch,)).loss.isfinite()


def sample(module):
    global counts
    counts = module.first.second(width)
    module.third = [relu * 2 for relu in module.fourth]
    from os import path as found

    return lambda: super(nn.Module, found).fifth


def test_names_of_code():
    names = names_in(sample.__code__)
    assert names.globals == {"counts", "width", "super", "nn"}
    assert names.attributes == {"first", "second", "fourth", "path", "Module", "fifth"}
    assert names.modules == {"os"}
    assert names.stored == {"third"}
    for function in (function for _, function in inspect.getmembers(torch.nn.functional, inspect.isfunction)):
        given = names_in(function.__code__)
        for op in dis.get_instructions(function.__code__):
            if op.opcode in dis.hasname:
                assert op.argval in set().union(*given)


def is_function(x, kind=types.FunctionType):
    return isinstance(x, kind)


class AsksForFunctions(nn.Module):
    """As torchvision's models do, for a class whose ``__code__`` is no code."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(3, 3), types.FunctionType

    def forward(self, x):
        return self.layer(x).sum() * (2 if is_function(is_function) and is_function(x, self.kind) else 3)


def test_the_class_of_functions_is_reached():
    assert name_and_line(types.FunctionType) == "builtins.function"
    assert name_and_line(is_function).startswith(f"{__name__}.is_function (test_search_of_state.py:")
    x, model = torch.ones(2, 3), AsksForFunctions()
    pipe = fxpipe.compile(model, (x[:1],), ranks=1, microbatches=2, schedule="gpipe")
    torch.testing.assert_close(pipe.run_local((x,)).loss, (model(x[:1]) + model(x[1:])) / 2)
