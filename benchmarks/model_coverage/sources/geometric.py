"""PyTorch Geometric's models and convolutions on a small graph, whose edges are a buffer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import nn

from benchmarks.model_coverage.case import Builder, Subject, leaves_loss

LIBRARY = "torch_geometric"
NODES, WIDTH, CLASSES = 10, 8, 4
#: Each node to the next two.
SOURCE = [i for i in range(NODES) for _ in (1, 2)]
TARGET = [(i + step) % NODES for i in range(NODES) for step in (1, 2)]

MODELS: dict[str, Callable[[], nn.Module]] = {
    "GCN": lambda: pyg.GCN(WIDTH, 16, 2, CLASSES),
    "GCN_batch_norm": lambda: pyg.GCN(WIDTH, 16, 2, CLASSES, norm="batch_norm"),
    "GCN_jumping": lambda: pyg.GCN(WIDTH, 16, 3, CLASSES, jk="cat"),
    "GAT": lambda: pyg.GAT(WIDTH, 16, 2, CLASSES, heads=2),
    "GATv2": lambda: pyg.GAT(WIDTH, 16, 2, CLASSES, heads=2, v2=True),
    "GIN": lambda: pyg.GIN(WIDTH, 16, 2, CLASSES),
    "GraphSAGE": lambda: pyg.GraphSAGE(WIDTH, 16, 2, CLASSES),
    "EdgeCNN": lambda: pyg.EdgeCNN(WIDTH, 16, 2, CLASSES),
    "PNA": lambda: pyg.PNA(
        WIDTH,
        16,
        2,
        CLASSES,
        aggregators=["mean", "max", "std"],
        scalers=["identity", "amplification"],
        deg=torch.tensor([0, 0, NODES]),
    ),
    "GraphUNet": lambda: pyg.GraphUNet(WIDTH, 16, CLASSES, depth=2),
    "DeepGCN": lambda: _Deep(),
    "Transformer": lambda: _Stack(pyg.TransformerConv, heads=2, concat=False),
}
CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "ChebConv": {"K": 2},
    "GraphConv": {},
    "TAGConv": {"K": 2},
    "ARMAConv": {"num_stacks": 2},
    "SGConv": {"K": 2},
    "SSGConv": {"alpha": 0.1},
    "LEConv": {},
    "ClusterGCNConv": {},
    "FeaStConv": {"heads": 2},
    "SuperGATConv": {"heads": 2, "concat": False},
    "ResGatedGraphConv": {},
    "MFConv": {},
    "GENConv": {},
    "EGConv": {"num_heads": 4},
    "PDNConv": None,
    "GeneralConv": {},
    "FiLMConv": {},
    "AntiSymmetricConv": None,
}  # type: ignore[dict-item]


class _Stack(nn.Module):
    def __init__(self, convolution: Callable[..., nn.Module], **given: Any) -> None:
        super().__init__()
        self.first = convolution(WIDTH, 16, **given)
        self.second = convolution(16, CLASSES, **given)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x, edges).relu(), edges)


class _Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 16)
        self.layers = nn.ModuleList(
            pyg.DeepGCNLayer(pyg.GENConv(16, 16), pyg.LayerNorm(16), nn.ReLU(), block="res+")
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for layer in self.layers:
            x = layer(x, edges)
        return x


class OnGraph(nn.Module):
    """A row of a batch is a graph of ``NODES`` nodes; the graphs of a microbatch lie side by side."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("edges", torch.tensor([SOURCE, TARGET]))

    def forward(self, x: torch.Tensor) -> Any:
        rows = x.shape[0]
        shifts = NODES * torch.arange(rows).repeat_interleave(len(SOURCE))
        return self.model(x.flatten(0, 1), self.edges.repeat(1, rows) + shifts)


def build(make: Callable[[], nn.Module]) -> Subject:
    return Subject(OnGraph(make()), lambda rows: (torch.randn(rows, NODES, WIDTH),), leaves_loss)


def cases() -> dict[str, Builder]:
    found = {name: partial(build, make) for name, make in MODELS.items()}
    for name, given in CONVOLUTIONS.items():
        if given is not None:
            found[name] = partial(build, partial(_Stack, getattr(pyg, name), **given))
    return found
