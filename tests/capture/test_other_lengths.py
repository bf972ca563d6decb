"""Which lengths of microbatches a step is one for, and why it is for no others."""

import itertools
import math
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.capture.lengths import _points, resized
from fxpipe.plan.step import NamedLength

WIDTH, LENGTH = 4, 32


class Net(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.function(self.first(x))).square().sum()


def halves(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[1] // 2
    return torch.cat([x[:, :half], x[:, half:].tanh()], 1)


def above_twelve(x: torch.Tensor) -> torch.Tensor:
    return x.tanh() if x.shape[1] > 12 else x


def weighted(x: torch.Tensor) -> torch.Tensor:
    return x * torch.tensor([float(n) for n in range(x.shape[1])])[:, None]


def multiples_of_five(x: torch.Tensor) -> torch.Tensor:
    return x if x.shape[1] % 5 else x.tanh()


def short_and_branching(x: torch.Tensor) -> torch.Tensor:
    """Beside the branch, x[:, :-1] of two is another layout."""
    x = x[:, :-1].clone(memory_format=torch.preserve_format)
    return x.reshape(-1, WIDTH).tanh() if x.shape[1] % 7 == 2 else x.reshape(-1, WIDTH)


def step_of(function: Callable[[torch.Tensor], torch.Tensor]) -> fxpipe.Pipeline:
    x = torch.randn(2, LENGTH, WIDTH)
    with torch.random.fork_rng():
        return fxpipe.compile(Net(function), (x,), ranks=1, microbatches=2, dimensions={"time": LENGTH})


@pytest.mark.in_ci("any", "branch", "bits", "rounded")
@pytest.mark.parametrize(
    ("function", "lengths"),
    [
        pytest.param(lambda x: x.cumsum(1) / x.shape[1], (2, LENGTH, 1), id="any"),
        pytest.param(halves, (8, LENGTH, 8), id="floor division"),
        pytest.param(above_twelve, (16, LENGTH, 1), id="branch"),
        pytest.param(lambda x: x.tanh() if x.shape[1] & ~1 == 26 else x, (8, LENGTH, 8), id="bits"),
        pytest.param(
            lambda x: x.tanh() if math.ceil(x.shape[1] / 2) == 13 else x, (8, LENGTH, 8), id="rounded"
        ),
    ],
)
def test_lengths_that_a_step_takes(function, lengths):
    pipe = step_of(function)
    (length,) = pipe.lengths
    assert (length.name, length.least, length.example, length.step) == ("time", *lengths)
    if length.least > 2:  # as they are not all, the line is told that is in the way
        with pytest.raises(fxpipe.BatchError, match=r"Others would be .*test_other_lengths\.py:\d+"):
            pipe.run_local([(torch.randn(2, 3, WIDTH),)])
    with pytest.raises(fxpipe.BatchError, match=r"a longer one\.$"):
        pipe.run_local([(torch.randn(2, LENGTH + 1, WIDTH),)])


def test_a_length_that_is_too_short_costs_one_trace():
    """The lengths between it and the example's are traced where the shortest is of the same ops."""
    run = mock.Mock()

    def branching(x: torch.Tensor) -> torch.Tensor:
        run(x.shape[1])
        return above_twelve(x)

    assert step_of(branching).lengths[0].least == 16
    traced = {call.args[0] for call in run.call_args_list}
    assert traced >= {2, 4, 16, LENGTH - 1}
    assert not traced & {16 + 1, 17 + 1}  # between 2 or 4 and the longest


@pytest.mark.in_ci("constant", "quotient")
@pytest.mark.parametrize(
    ("function", "why"),
    [
        pytest.param(
            weighted, r"constant 'constant_0', a tensor that the model's Python makes", id="constant"
        ),
        pytest.param(
            multiples_of_five, r"compares a length at .*test_other_lengths.py:\d+ in a way", id="branch"
        ),
        # It decides otherwise for lengths in between alone, of which none is traced.
        pytest.param(lambda x: x.tanh() if 13 <= x.shape[1] / 2 < 14 else x, "otherwise", id="quotient"),
        pytest.param(
            short_and_branching,
            r"compares a length at .*test_other_lengths.py:\d+, and decides otherwise for time \d+ than for "
            "the example. The step is made of other ops",
            id="other ops",
        ),
    ],
)
def test_a_step_for_the_length_of_the_example_alone(function, why):
    x = torch.randn(2, LENGTH, WIDTH)
    pipe = fxpipe.compile(Net(function), (x,), ranks=1, microbatches=2, dimensions={"time": LENGTH})
    assert pipe.lengths == ()
    shorter = torch.randn(4, LENGTH - 2, WIDTH)
    with pytest.raises(fxpipe.BatchError, match=f"No other lengths are possible.*{why}"):
        pipe.step((shorter,))
    with pytest.raises(fxpipe.BatchError, match=f"list of microbatches.*{why}"):
        pipe.step([(x,), (x,)])
    pipe.step((torch.randn(4, LENGTH, WIDTH),))


def in_windows(size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def mixed(x: torch.Tensor) -> torch.Tensor:
        parts = x.view(len(x), x.shape[1] // size, size, WIDTH)
        return (parts @ parts.transpose(2, 3) @ parts).view_as(x)

    return mixed


@pytest.mark.in_ci("16-4")
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(("length", "window"), [(24, 8), (16, 8), (16, 4), (96, 32)])
def test_multiples_of_a_window(length, window):
    """However few of them there are: of three or two each is traced."""
    model = Net(in_windows(window))
    examples = [(torch.randn(2, n, WIDTH),) for n in range(window, length + 1, window)]
    pipe = fxpipe.compile(
        model, examples[-1], ranks=1, microbatches=2, dimensions={"time": length}, mean="microbatch"
    )
    assert pipe.lengths == (NamedLength("time", length, window, window),)
    result = pipe.run_local(examples)
    loss = sum(model(*one) for one in examples) / len(examples)
    torch.testing.assert_close(result.loss, loss.detach())
    for (name, _), gradient in zip(
        model.named_parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True
    ):
        torch.testing.assert_close(result.grads[name], gradient)


def test_one_window():
    x = torch.randn(2, 8, WIDTH)
    pipe = fxpipe.compile(Net(in_windows(8)), (x,), ranks=1, microbatches=2, dimensions={"time": 8})
    with pytest.raises(
        fxpipe.BatchError, match="multiples of a number alone, give an example of two of them"
    ):
        pipe.run_local([(x,), (x,)])


def test_the_beginning_of_an_example():
    x = torch.arange(24.0).view(2, 3, 4).transpose(1, 2).requires_grad_()
    number = torch.tensor(3)
    short = resized({"x": x, "number": number}, {"time": 4}, {"time": 2})
    assert short["number"] is number
    assert torch.equal(short["x"], x[:, :2])
    assert short["x"].requires_grad
    assert short["x"].is_leaf
    assert short["x"].stride() == (6, 1, 2)


def test_rows_of_an_example_come_again():
    x, labels = torch.arange(24).view(2, 3, 4), torch.tensor([5, 6])
    sizes = {"rows": 2, "time": 3}, {"rows": 5, "time": 2}
    more = resized({"x": x, "labels": labels}, *sizes, "rows")
    assert more["labels"].tolist() == [5, 6, 5, 6, 5]
    assert torch.equal(more["x"], x[[0, 1, 0, 1, 0], :2])


@pytest.mark.parametrize("names", [(10, 16), (10, 16, 12), ("rows", 16), ("rows", 16, 12)])
def test_points_tell_expressions_apart(names):
    """No two sums of three terms have the same values at all of them."""
    lengths = [
        NamedLength("rows", 2, 2, 1, leading=True) if n == "rows" else NamedLength(f"of {n}", n, 2, 1)
        for n in names
    ]
    points = [{each.name: each.example for each in lengths}, *_points(lengths)]
    terms = [e for e in itertools.product(range(3), repeat=len(lengths)) if sum(e) <= 2]
    values = np.array([[math.prod(map(pow, point.values(), e)) for e in terms] for point in points])
    scaled = values / values.max(0)
    for six in itertools.combinations(range(len(terms)), 6):
        assert np.linalg.matrix_rank(scaled[:, six], tol=1e-10) == 6
