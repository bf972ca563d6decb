"""Measured costs of models whose sections are hard to run on synthetic inputs."""

import pytest
import torch
from zoo import Case, Chain, eager, numbers, relative_error

import fxpipe

pytestmark = pytest.mark.usefixtures("double")


class Expanded(Chain):
    """Saves a value whose elements lie in the same memory."""

    def between(self, x, i):
        return x * torch.linalg.norm(x, dim=0).expand_as(x) * x.softmax(-1).amax(0).expand_as(x)


class Checked(Chain):
    """Branches on the data; small numbers would take the other branch."""

    def forward(self, x, y):
        return super().forward(x, y) if x.abs().max() > 0.3 else super().forward(y, x)


class Solved(Chain):
    def between(self, x, i):
        return torch.linalg.solve(x @ x.mT + torch.eye(len(x)), x)


@pytest.mark.parametrize("model", [Expanded, Checked])
def test_measured_costs(model):
    case = Case(model, numbers)
    pipe = fxpipe.compile(
        case.build(), case.example(), ranks=2, microbatches=2, schedule="1f1b", costs="measured"
    )
    assert all(cost.forward > 0 and cost.backward > 0 for cost in (s.costs for s in pipe.stages))
    batch = case.data(2)
    expected = eager(case.build(), batch, 2)
    assert relative_error(pipe.run_local(batch).loss, expected.loss) <= 1e-10


def test_an_op_that_needs_real_inputs():
    case = Case(Solved, numbers)
    with pytest.raises(fxpipe.ScheduleError, match=r"synthetic inputs.* lu_solve.* costs='analytic'"):
        fxpipe.compile(
            case.build(), case.example(), ranks=2, microbatches=2, schedule="1f1b", costs="measured"
        )
