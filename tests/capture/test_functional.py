"""In-place ops are made functional as a second trace of the whole graph would make them: where they stand, or
by a second trace of the ops that they meet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from fxpipe.capture import functional
from fxpipe.capture.trace import Captured, capture
from fxpipe.errors import CaptureError
from fxpipe.ir import compat
from fxpipe.ir.compat import FakeMode, make_fx
from fxpipe.ir.storage import call_nodes


class Net(nn.Module):
    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.first, self.last, self.between = nn.Linear(4, 6), nn.Linear(6, 3), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.between(self.first(x))).square().mean()


def dropped(h: torch.Tensor) -> torch.Tensor:
    return F.dropout(h, 0.3) + h


def masked(h: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(h)
    mask.masked_fill_(h.detach() > 0, 2.0)
    before = mask * 3  # of the mask as it is before the next write
    mask.mul_(0.5).add_(before)
    return h * mask + before


def added_to_itself(h: torch.Tensor) -> torch.Tensor:
    h = h * 2
    h += h
    return h


def other_dtype(h: torch.Tensor) -> torch.Tensor:
    count = torch.zeros_like(h, dtype=torch.int64)
    count.add_(3).eq_(3)
    return h * count


def in_rows(h: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(h)
    out[:, 1:3] = h[:, 0:2]  # writes to a view
    out.mul_(2)
    return out + h


def read_through_a_view(h: torch.Tensor) -> torch.Tensor:
    out = h.clone()
    row = out[0]
    out.mul_(3)
    return out + row


def transposed(h: torch.Tensor) -> torch.Tensor:
    scale = torch.ones_like(h.t()).add_(1)
    return h * scale.t()


def item_of_several(h: torch.Tensor) -> torch.Tensor:
    values = h.sort(-1)[0]
    values.view(-1)[:3].mul_(2)
    return values + h


def added_to_its_like(h: torch.Tensor) -> torch.Tensor:
    one, other = (h * 2).sin(), (h * 3).sin()  # alike ops on the same layouts
    one += other
    return one * other


def alike_in_rows(h: torch.Tensor) -> torch.Tensor:
    one, other, third = ((h * k).sort(-1)[0] for k in (2, 3, 4))
    one[:, 1:3] = other[:, 0:2]
    one[:, 3:5] += third[:, 0:2]
    return one * other + third


class Buffer(nn.Module):
    def __init__(self, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]):
        super().__init__()
        self.register_buffer("value", torch.ones(6))
        self.change = change

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.change(h, self.value)


def counted(h: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    before = value * 2
    value.add_(1)
    return h * value + before  # as it is after the write


def overwritten(h: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    value.copy_(h.detach().mean(0))
    return h * 2


def averaged(h: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    value.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)  # writes twice
    return h * value


def seen_before(h: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    row = value[1:3]
    value.add_(1)
    return h * row.sum()


def evaluated() -> nn.Module:
    """A batch norm that is frozen within a training step: its backward reads the running statistics."""
    norm = nn.BatchNorm1d(6).eval()
    norm.running_mean, norm.running_var = torch.linspace(-1, 1, 6), torch.linspace(0.5, 3, 6)
    return norm


ALONE = {
    "dropped": dropped,
    "masked": masked,
    "itself": added_to_itself,
    "its like": added_to_its_like,
    "other dtype": other_dtype,
    "batch norm": nn.Sequential(nn.BatchNorm1d(6), nn.ReLU(inplace=True)),
    "batch norm in evaluation": evaluated(),
    "counted": Buffer(counted),
    "overwritten": Buffer(overwritten),
}
SHARED = {
    "rows": in_rows,
    "read through a view": read_through_a_view,
    "item of several": item_of_several,
    "alike in rows": alike_in_rows,
    "batch norm twice": nn.Sequential(*[nn.BatchNorm1d(6)] * 2),
    "averaged": Buffer(averaged),
    "buffer seen before": Buffer(seen_before),
}
ALL = {**ALONE, **SHARED, "transposed": transposed}


def captured(between: Callable[[torch.Tensor], torch.Tensor]) -> Captured:
    torch.manual_seed(0)
    return capture(Net(between), {"x": torch.randn(5, 4)}, None, 1.0, torch.device("cpu"))


def structure(found: Captured) -> list[Any]:
    """The ops, what they use (a node by its position), and how their values lie in memory."""

    def layout(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.dtype, tuple(value.shape), value.stride()
        return [layout(v) for v in value] if isinstance(value, (tuple, list)) else value

    position = {node: k for k, node in enumerate(found.graph.nodes)}

    def used(arguments: Any) -> str:
        return str(fx.map_arg(arguments, lambda node: f"%{position[node]}"))

    return [
        (str(n.target), used(n.args), used(n.kwargs), n.meta["origin"].backward, layout(n.meta["val"]))
        for n in call_nodes(found.graph)
    ] + [used(found.graph.output_node().args)]


def names(found: Captured) -> list[Any]:
    """Those of the forward: autograd's marks of gradients are lost in a second trace."""
    forward = (n for n in call_nodes(found.graph) if not n.meta["origin"].backward)
    return [(n.name, str(n.meta["origin"])) for n in forward]


class RetraceOfAll(functional._Retrace):
    def __init__(self, module: fx.GraphModule):
        super().__init__(module)
        self._again = {*module.graph.nodes}


@pytest.mark.in_ci("dropped", "rows")
@pytest.mark.parametrize("name", ALL)
def test_the_same_graph_as_of_a_second_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = captured(ALL[name])
    monkeypatch.setattr(functional, "_functional_form", lambda node, known: None)
    monkeypatch.setattr(functional, "_Retrace", RetraceOfAll)
    expected = captured(ALL[name])
    assert structure(found) == structure(expected)
    if name in ALONE:  # a second trace makes views again, which takes up names
        assert names(found) == names(expected)


NUMBERS = ["itself", "its like", "rows", "item of several", "alike in rows", "batch norm in evaluation"]


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_those_of_eager(name: str) -> None:
    found, x = captured(ALL[name]), torch.randn(5, 4)
    torch.manual_seed(0)
    model = Net(ALL[name])
    inputs = [n.meta["input"] for n in found.graph.find_nodes(op="placeholder")]
    values = {**dict(model.named_parameters()), **dict(model.named_buffers()), "x": x}
    run = fx.Interpreter(fx.GraphModule(nn.Module(), found.graph)).run
    outputs = run(*(values[given.name].detach() for given in inputs))
    loss = model(x)
    loss.backward()
    torch.testing.assert_close(outputs.loss, loss.detach(), rtol=1e-6, atol=1e-6)
    for key, parts in outputs.grads.items():
        torch.testing.assert_close(sum(parts), model.get_parameter(key).grad, rtol=1e-5, atol=1e-6)


@pytest.mark.in_ci("dropped", "rows", "item of several", "batch norm twice")
@pytest.mark.parametrize("name", ALL)
def test_only_what_shares_memory_takes_a_second_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    retraces: list[functional._Retrace] = []

    class Watched(functional._Retrace):
        def __init__(self, module: Any):
            retraces.append(self)
            super().__init__(module)

    monkeypatch.setattr(functional, "_Retrace", Watched)
    captured(ALL[name])
    assert len(retraces) == (name in SHARED)
    for retrace in retraces:
        copied = Counter(str(node.target) for node in retrace._copies)
        assert (copied["aten.addmm.default"], copied["aten.mm.default"]) == (2, 3)  # of both linear layers
        assert not any(functional.is_mutating(node) for node in retrace._copies)


@pytest.mark.parametrize(
    "write",
    [
        lambda value, h: torch._foreach_add_([value, value], 1.0),
        lambda value, h: torch.batch_norm(h, None, None, value, value, True, 0.1, 1e-5, False),
    ],
)
def test_an_op_that_writes_twice_to_one_tensor_is_refused(write: Callable[..., Any]) -> None:
    """Eager adds 2; torch's functionalization computes both values from the old one, which adds 1."""

    def change(h: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        write(value, h.detach())
        return h * value

    with pytest.raises(CaptureError, match="writes to one tensor twice"):
        captured(Buffer(change))


def test_values_that_are_traced_again_keep_their_layout() -> None:
    """Also where the functional form gives other strides than the in-place one had: ops behind are copied."""

    def step(x: torch.Tensor) -> torch.Tensor:
        changed = x * 2
        changed[0] = 1
        return (changed.sum(0) * 3).exp()

    mode, x = compat.FakeMode(), torch.arange(24.0).reshape(4, 6)
    inputs = [mode.from_tensor(x)]
    with mode:
        module = compat.make_fx(step)(*inputs)
    (read,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList)
    (product,) = read.users
    with mode:
        read.meta["val"] = product.meta["val"] = torch.empty_strided((6,), (2,))
        found = functional.functionalize(module, inputs)
    (product,) = found.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)[1:]
    assert product.meta["val"].stride() == (2,)
    torch.testing.assert_close(found(x), step(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.relu_(),
        lambda x: x.mul_(2.0),
        lambda x: x.add_(x.exp(), alpha=2),
        lambda x: x.masked_fill_(x > 0, 1.0),
        lambda x: x.clamp_(min=0.0),
        lambda x: x.zero_(),
        lambda x: x.index_add_(0, torch.zeros(4, dtype=torch.int64), x.exp()),
    ],
)
def test_the_op_of_the_name_without_underscore_is_what_a_trace_of_the_op_alone_gives(write):
    with FakeMode() as mode:
        (node,) = filter(functional.is_mutating, traced(write, mode).nodes)
        by_name, by_trace = functional._of_twin(node), functional._traced_alone(node)
    assert by_name is not None
    assert [(n.op, n.target, str(n.args), n.kwargs) for n in renamed(by_name)] == [
        (n.op, n.target, str(n.args), n.kwargs) for n in renamed(by_trace)
    ]


@pytest.mark.parametrize(
    "write", [lambda x: x.unsqueeze_(0), lambda x: x.t_(), lambda x: torch.rrelu_(x, training=True)]
)
def test_an_op_that_changes_a_shape_or_something_else_has_no_twin(write):
    with FakeMode() as mode:
        node = next(filter(functional.is_mutating, traced(write, mode).nodes))
        assert functional._of_twin(node) is None


def traced(write, mode):
    return make_fx(lambda x: write(x.clone()))(mode.from_tensor(torch.ones(4, 4))).graph


def renamed(graph):
    for number, node in enumerate(graph.nodes):
        node.target = f"x{number}" if node.op == "placeholder" else node.target
        node.name = f"x{number}"
    return graph.nodes
