"""Numbers as expressions of lengths: from values at a few points, and as text."""

import pytest
import torch
from torch import fx

from fxpipe.ir.size import Size, size_names, sized, without_names

ONE, POINTS = ("sequence",), [(16,), (2,), (15,), (9,)]
TWO, PAIRS = ("source", "target"), [(16, 10), (2, 3), (15, 9), (9, 6), (5, 8), (12, 4), (7, 9)]


@pytest.mark.parametrize(
    ("text", "function"),
    {
        "sequence": lambda s: s,
        "64 * sequence": lambda s: 64 * s,
        "sequence - 1": lambda s: s - 1,
        "3 - sequence": lambda s: 3 - s,
        "sequence * sequence": lambda s: s * s,
        "(sequence * sequence + sequence) // 2": lambda s: s * (s + 1) // 2,
        "7": lambda s: 7,
        "None": lambda s: s // 2,
    }.items(),
)
def test_numbers_of_one_length(text, function):
    size = sized([function(*point) for point in POINTS], ONE, POINTS)
    assert repr(size) == text
    if size is not None:
        for length in range(2, 17):
            assert eval(text, {"sequence": length}) == function(length)


@pytest.mark.parametrize(
    ("text", "function"),
    {
        "source": lambda s, t: s,
        "4 * source * target": lambda s, t: 4 * s * t,
        "source + target - 1": lambda s, t: s + t - 1,
        "None": lambda s, t: max(s, t),
    }.items(),
)
def test_numbers_of_two_lengths(text, function):
    assert repr(sized([function(*point) for point in PAIRS], TWO, PAIRS)) == text


def test_a_size_is_the_number_of_the_example():
    size = sized([2 * s for (s,) in POINTS], ONE, POINTS)
    assert isinstance(size, Size)
    assert size == 32
    assert size.at({"sequence": 5}) == 10
    assert torch.ops.aten.full.default([size], 1.0).shape == (32,)


def test_expressions_with_one_value_at_the_example_differ():
    assert Size(16, ONE, ((1, 1, 1),)) != Size(16, ONE, ((1, 1, 0), (15, 1, 0)))
    assert Size(16, ONE, ((1, 1, 1),)) == Size(16, ONE, ((1, 1, 1),))


def test_no_whole_number_at_a_length():
    half = Size(8, ONE, ((1, 2, 1),))
    assert half.at({"sequence": 6}) == 3
    with pytest.raises(ValueError, match="sequence // 2 is 7/2"):
        half.at({"sequence": 7})


def test_names_in_the_arguments_of_ops():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.ops.aten.reshape.default, (x, [Size(6, TWO, ((1, 1, 0, 1),)), -1]))
    assert size_names(graph.nodes) == ["target"]
    without_names(graph)
    assert size_names(graph.nodes) == []
    assert [*graph.nodes][1].args[1] == [6, -1]
