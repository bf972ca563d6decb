"""The text of a captured step, which nobody has to trust."""

from __future__ import annotations

import json

import pytest

from fxpipe.errors import ArtifactError
from fxpipe.plan.captured import CAPTURED_FORMAT, CapturedStep


def text_of(argument: object) -> str:
    """A step of one op with this argument."""
    op = {"name": "a", "target": "aten.relu.default", "args": [argument], "kwargs": {}}
    nothing = {"inputs": [], "loss": None, "count": None, "outputs": {}, "grads": {}, "buffers": {}}
    return json.dumps({"format": CAPTURED_FORMAT, **nothing, "ops": [op], "checks": []})


@pytest.mark.parametrize("depth", [20, 700])
@pytest.mark.parametrize("wrapped", [lambda inner: [inner], lambda inner: {"complex": inner}])
def test_arguments_that_are_nested_deeply_are_refused(depth, wrapped):
    argument: object = 1
    for _ in range(depth):
        argument = wrapped(argument)
    with pytest.raises(ArtifactError, match=r"^step is damaged: ops has an op whose arguments are nested"):
        CapturedStep.from_json(text_of(argument), "step")


def test_lists_in_lists_are_read():
    argument = [[{"float": "inf"}], [[1, 2]]]
    assert CapturedStep.from_json(text_of(argument), "step").ops[0].args == (argument,)
