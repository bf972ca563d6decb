"""The models of ``prediction.py``: those of the examples, and small ones of other kinds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from report import ROOT
from torch import nn

sys.path.insert(0, str(ROOT / "examples"))


def demo() -> tuple[nn.Module, Any]:
    """The GPT-2 of examples/demo.py."""
    from demo import ROWS, SEQUENCE, VOCABULARY, make_model

    ids = torch.randint(VOCABULARY, (ROWS, SEQUENCE), generator=torch.Generator().manual_seed(1))
    return make_model(), {"input_ids": ids, "labels": ids.clone()}


def llama() -> tuple[nn.Module, Any]:
    """The Llama of examples/train_hf.py: small, so that most of its time is the overhead of ops."""
    from train_hf import ROWS, SEQUENCE, VOCABULARY
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=SEQUENCE,
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    ids = torch.randint(VOCABULARY, (ROWS, SEQUENCE), generator=torch.Generator().manual_seed(1))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.first = nn.GroupNorm(8, width), nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.first(self.norm(x).relu()).relu())
        return x + found


class Images(nn.Module):
    """A classifier of images with residual convolutions."""

    def __init__(self, width: int = 48, depth: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(depth)))
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        features = self.blocks(self.stem(images)).mean((2, 3))
        return nn.functional.cross_entropy(self.head(features), labels)


def vision() -> tuple[nn.Module, Any]:
    return Images(), {"images": torch.randn(4, 3, 32, 32), "labels": torch.randint(10, (4,))}


class Adapted(nn.Module):
    """A frozen linear layer, and a trained product of low rank beside it."""

    def __init__(self, width: int, rank: int = 8) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.frozen(x) + self.up(self.down(x))
        return found


class LowRank(nn.Module):
    def __init__(self, width: int = 256, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(Adapted(width), nn.SiLU()) for _ in range(depth)))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) - y).square().mean()


def lora() -> tuple[nn.Module, Any]:
    return LowRank(), {"x": torch.randn(512, 256), "y": torch.randn(512, 256)}


class Perceptron(nn.Module):
    """Only products and a function: with it the kinds of ops were chosen."""

    def __init__(self, width: int = 512, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x).square().mean()
        return found


def perceptron() -> tuple[nn.Module, Any]:
    return Perceptron(), {"x": torch.randn(256, 512)}


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "perceptron": perceptron,
    "demo": demo,
    "train_hf": llama,
    "vision": vision,
    "lora": lora,
}
