"""Names of nodes: the module that computes a value, and the op's name for the value."""

import torch
import torch.nn.functional as F
from torch import nn

from fxpipe.capture.trace import capture
from fxpipe.ir.node_names import short_paths
from fxpipe.ir.nodes import copy_graph, copy_node, new_node
from fxpipe.ir.storage import call_nodes


def test_short_paths_keep_their_numbers_and_what_tells_them_apart():
    layers = [f"transformer.h.{k}.attn" for k in range(3)]
    others = ["transformer.h.1.mlp", "transformer.wte", "encoder.2.norm", "decoder.0.norm", "0", ""]
    assert short_paths({*layers, *others}) == {
        **{path: f"h.{k}.attn" for k, path in enumerate(layers)},
        "transformer.h.1.mlp": "h.1.mlp",
        "transformer.wte": "wte",
        "encoder.2.norm": "encoder.2.norm",
        "decoder.0.norm": "decoder.0.norm",
        "0": "model.0",
        "": "",
    }


def test_an_end_that_two_modules_have_does_not_name_either():
    assert short_paths({"a.b.c", "a.d.c"}) == {"a.b.c": "b.c", "a.d.c": "d.c"}
    assert short_paths({"a.b", "b"}) == {"a.b": "a.b", "b": "b"}


class Several(nn.Module):
    """Ops with several results."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        first, last = self.norm(x).split(3)
        largest, _ = last.max(0)
        attended = F.scaled_dot_product_attention(x[None, None], first[None, None], first[None, None])
        return attended.sum() + largest.sum()


def test_results_are_named_by_their_op():
    """By its schema (a maximum's ``values``), else by that of its backward (``mean``), else as the op."""
    graph = capture(Several(), {"x": torch.randn(6, 4)}, None, 1.0, torch.device("cpu")).graph
    names = {node.name for node in call_nodes(graph)}
    assert {"norm_layer_norm", "norm_mean", "norm_rstd"} <= names
    assert {"model_split", "model_split_1", "model_values", "model_indices"} <= names
    assert {"model_output", "model_logsumexp", "d_model_unsqueeze_2", "d_norm_weight"} <= names
    assert not [name for name in names if "item" in name]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.out(x) + x
        return x + self.norm(x)


class Residuals(nn.Module):
    """Layers whose inputs two of their ops read, and a linear layer that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList([Residual() for _ in range(3)])
        self.twice = nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.twice(self.twice(x)).sum()


def test_a_sum_of_gradients_belongs_to_the_module_that_it_is_of():
    """The gradient of a layer's input to the layer, not to that before, and of a parameter to its module; the
    gradient of a value in a layer to the op that computes the value."""
    graph = capture(Residuals(), {"x": torch.randn(6, 4)}, None, 1.0, torch.device("cpu")).graph
    added = [n for n in call_nodes(graph) if n.target is torch.ops.aten.add.Tensor]
    assert {n.name: n.meta["origin"].path for n in added if n.meta["origin"].backward} == {
        "d_twice_bias": "twice",
        "d_twice_weight": "twice",
        "d_layers_2_add": "layers.2.out",
        "d_layers_1_add_1": "layers.2",
        "d_layers_1_add": "layers.1.out",
        "d_layers_0_add_1": "layers.1",
        "d_layers_0_add": "layers.0.out",
        "d_first_addmm": "layers.0",
    }


def test_a_copy_of_a_graph_is_that_of_its_nodes():
    """Also what the next nodes are called, and what a search for nodes finds."""
    graph = capture(Several(), (torch.randn(6, 4),), lambda y, _: y.sum(), 0.5, torch.device("cpu")).graph
    last = next(reversed(call_nodes(graph)))
    with graph.inserting_before(last):
        for name in ("add", "add_7", "_3", "__3", "x_", "x_y"):  # add is given again, as a later name
            graph.create_node("call_function", torch.add, (last.args[0], 1), name=name)
    single, nodes = torch.fx.Graph(), {}
    for node in graph.nodes:
        nodes[node] = copy_node(single, node, nodes.__getitem__)
    copy = copy_graph(graph)
    assert str(copy) == str(single) == str(graph)
    assert [n.meta for n in copy.nodes] == [n.meta for n in graph.nodes]
    assert len(copy.nodes) == len(single.nodes)
    found = [g.find_nodes(op="call_function", target=torch.add) for g in (copy, single)]
    assert [*map(str, found[0])] == [*map(str, found[1])] != []
    assert {n.graph for n in found[0]} == {copy}
    for name in ("add", "add_7", "_3", "__3", "x_", "x_y", "new", "new_2"):
        a, b = (g.create_node("call_function", torch.add, name=name) for g in (copy, single))
        assert a.name == b.name
    copy.lint()
    source = found[0][0].all_input_nodes[0]
    copy.erase_node(found[0][1])
    assert found[0][1] not in source.users
    assert found[0][0] in source.users


def test_a_name_of_an_erased_node_is_not_given_again():
    """The certificate knows messages by the names of captured values."""
    graph = torch.fx.Graph()
    for name in ("clone", "clone_1"):
        graph.create_node("call_function", torch.clone, name=name)
    graph.erase_node(next(iter(graph.nodes)))
    copies = copy_graph(graph), copy_graph(copy_graph(graph))
    for each in (graph, *copies):
        assert new_node(each, "call_function", torch.clone, (), {}, "clone").name == "clone_2"


class Crossing(nn.Module):
    """Two values that are added up crosswise: the gradient of each is a sum of the same two sums."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        a, b = self.first(x), self.second(x)
        for _ in range(40):
            a, b = a + b, b + a
        return (a * b).mean()


def test_sums_of_sums_take_no_more_with_each_step():
    step = capture(Crossing(), (torch.randn(2, 4),), None, 1.0, torch.device("cpu"))
    assert len(step.graph.nodes) > 80
