"""A node whose name begins with ``d_`` is the gradient of the value that follows, as autograd computes it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from fxpipe.capture.gradient_names import GradientNames, root
from fxpipe.capture.trace import capture
from fxpipe.ir.node_names import Gradient
from fxpipe.ir.storage import call_nodes, graph_outputs

SCALE = 0.5


def example() -> dict[str, torch.Tensor]:
    return {"x": torch.linspace(-1, 1, 24).reshape(6, 4).cos()}


class Layers(nn.Module):
    """Three linear layers, between which an op of a test stands."""

    def __init__(self, between: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.between = between

    def forward(self, x):
        return self.between(self, self.first(x)).square().sum()


def residual(self, x):
    return self.norm(x + self.second(x))


def gate(self, x):
    return x * torch.sigmoid(x) * self.second(x)


def square_of_one_value(self, x):
    return x * x + self.second(x)


def parts(self, x):
    left, right = self.second(x).split(2, dim=1)
    return torch.cat([right * left, x[:, 1:3]], dim=1) + x


def attention(self, x):
    query, key, value = (y[None, None] for y in (x, self.second(x), self.norm(x)))
    return F.scaled_dot_product_attention(query, key, value)[0, 0] + x


def twice_a_weight(self, x):
    return self.second(self.second(x).relu())


def in_place(self, x):
    y = self.second(x)
    y[:, 0].mul_(x[:, 1])
    return torch.relu_(y * 3) + x


def checkpointed(self, x):
    return checkpoint(lambda y: self.norm(self.second(y).tanh() * y), x, use_reentrant=False)


def three_uses(self, x):
    return self.norm(x) + x.sin() + x.cos() + self.second(x)


BETWEEN = [
    residual, gate, square_of_one_value, parts, attention, twice_a_weight, in_place, checkpointed, three_uses
]  # fmt: skip


class Values:
    """The values of a captured step's nodes, on numbers.

    ``apart``: what the ops for which ``is_use`` holds read instead of ``of``: its copy.
    """

    def __init__(
        self, graph: fx.Graph, model: nn.Module, of: str = "", is_use: Callable[[fx.Node], bool] = bool
    ) -> None:
        self.values: dict[fx.Node, Any] = {}
        self.apart = torch.tensor(0.0)
        tensors = {**dict(model.named_parameters()), **example()}
        for node in graph.nodes:
            if node.op == "placeholder":
                self.values[node] = tensors[node.meta["input"].name]
            elif node.op == "call_function":
                with torch.set_grad_enabled(not node.meta["origin"].backward):
                    read = self.values
                    if is_use(node) and any(n.name == of for n in node.all_input_nodes):
                        read = self.values | {n: self.apart for n in node.all_input_nodes if n.name == of}
                    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), read.__getitem__)
                    self.values[node] = node.target(*args, **kwargs)
                    if node.name == of:
                        self.apart = self.values[node].view_as(self.values[node])
        self.by_name = {node.name: value for node, value in self.values.items()}


@pytest.fixture(params=BETWEEN, ids=lambda between: between.__name__)
def step(request, double):
    torch.manual_seed(0)
    model = Layers(request.param)
    return model, capture(model, example(), None, SCALE, torch.device("cpu")).graph


def gradients(graph: fx.Graph) -> dict[fx.Node, Gradient]:
    return {node: node.meta["gradient"] for node in call_nodes(graph) if "gradient" in node.meta}


def test_a_gradient_has_the_name_of_its_value(step):
    model, graph = step
    values = Values(graph, model)
    loss = values.values[graph_outputs(graph).loss]
    parameters = {name.replace(".", "_"): parameter for name, parameter in model.named_parameters()}
    whole = {node: gradient for node, gradient in gradients(graph).items() if not gradient.via}
    assert len(whole) > 5
    for node, gradient in whole.items():
        value = parameters.get(gradient.of.name, values.by_name.get(gradient.of.name))
        (expected,) = torch.autograd.grad(loss, [value], torch.tensor(SCALE), retain_graph=True)
        assert torch.allclose(values.values[node], expected), node.name
        assert node.name == f"d_{gradient.of.name}"


def test_a_summand_has_the_name_of_the_use_that_it_comes_from(step):
    """A module, if no other summand comes from there, else an op in it."""
    model, graph = step
    for node, gradient in gradients(graph).items():
        if not gradient.via or gradient.of.name.endswith(("weight", "bias")):
            continue
        via = gradient.via.removesuffix("_too")

        def is_use(use: fx.Node, via: str = via) -> bool:
            origin = use.meta["origin"]
            is_op = use.name == f"{origin.path or 'model'}_{via}"
            return not origin.backward and (is_op or origin.path == via)

        values = Values(graph, model, gradient.of.name, is_use)
        loss = values.values[graph_outputs(graph).loss]
        (expected,) = torch.autograd.grad(loss, [values.apart], torch.tensor(SCALE))
        first = f"d_{gradient.of.name}_via_{via}"
        assert node.name in (first, f"{first}_too")
        total = values.by_name[first] + values.by_name.get(f"{first}_too", 0)
        assert torch.allclose(total, expected), node.name


def test_all_that_a_backward_computes_for_a_value_with_several_uses_is_named():
    model = Layers(three_uses)
    graph = capture(model, example(), None, SCALE, torch.device("cpu")).graph
    names = {node.name for node in call_nodes(graph) if node.meta["origin"].backward}
    assert {"d_first_addmm", "d_first_addmm_via_norm", "d_first_addmm_via_second"} <= names
    assert {"d_first_addmm_via_sin", "d_first_addmm_via_cos"} <= names
    assert {"d_second_weight", "d_second_bias", "d_norm_weight", "d_norm_bias", "d_first_weight"} <= names


def test_names_of_the_forward_do_not_look_like_gradients():
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.d, self.bwd = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.bwd(self.d(x)).sum()

    graph = capture(Named(), example(), None, SCALE, torch.device("cpu")).graph
    forward = {node.name for node in call_nodes(graph) if not node.meta["origin"].backward}
    assert {"model_d_addmm", "model_bwd_addmm"} <= forward
    assert not [name for name in forward if name.startswith(("d_", "bwd_"))]


def test_transposes_that_undo_each_other_are_passed_once():
    graph = fx.Graph()
    ways = [graph.placeholder("x")]
    for _ in range(101):
        ways.append(graph.call_function(torch.ops.aten.t.default, (ways[-1],)))
    assert [root(node) for node in ways] == [*ways[:2]] * 51


class Recurrent(Layers):
    def forward(self, x):
        for _ in range(30):
            x = self.between(self, x)
        return x.square().sum()


def test_the_time_to_name_summands_is_linear_in_the_uses_of_a_value(monkeypatch):
    """As of the weights of a recurrent layer over many tokens."""
    looked_at = []
    texts = GradientNames._texts
    monkeypatch.setattr(GradientNames, "_texts", lambda self, use: looked_at.append(use) or texts(self, use))
    graph = capture(Recurrent(residual), example(), None, SCALE, torch.device("cpu")).graph
    summands = [gradient for gradient in gradients(graph).values() if gradient.via]
    assert len(summands) > 100
    assert len(looked_at) <= 3 * len(summands)
