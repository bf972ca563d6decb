"""Adapt a frozen language model on four ranks with low-rank adapters (LoRA), and save the adapters alone.

    torchrun --nproc-per-node 4 examples/train_lora.py

A frozen weight has no gradient and no optimizer state, and its stage no product for one: the weight phase (W)
of the schedule has the adapters' gradients alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from text import batches, standard_library, tokenize, train_tokenizer
from torch import Tensor, nn
from transformer import LanguageModel

import fxpipe

MICROBATCHES, ROWS, LENGTH, VOCABULARY = 8, 2, 64, 1024


class Adapted(nn.Module):
    """A frozen linear layer, plus a product of two small matrices, which is zero at first."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.lora_a.T @ self.lora_b.T


def adapt(model: nn.Module, names: tuple[str, ...], rank: int) -> None:
    """Freeze the model, and put adapters around its linear layers of these names."""
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if name in names and isinstance(layer, nn.Linear):
                setattr(parent, name, Adapted(layer, rank))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--bytes", type=int, default=400_000, help="the amount of text")
    parser.add_argument("--output", type=Path, default=Path("build/adapters.safetensors"))
    options = parser.parse_args()

    documents = standard_library(options.bytes)
    tokens = tokenize(documents, train_tokenizer(documents, VOCABULARY))
    data = batches(tokens, MICROBATCHES * ROWS, LENGTH, seed=0)
    example = {name: tensor[:ROWS] for name, tensor in next(data).items()}

    torch.manual_seed(0)
    model = LanguageModel(VOCABULARY, layers=options.layers, length=LENGTH)  # or one that is pretrained
    adapt(model, ("query_key_value", "out", "up", "down", "head"), rank=8)
    pipe = fxpipe.compile(model, example, ranks=4, microbatches=MICROBATCHES, schedule="zb-h1")
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=5e-3)  # takes what is trained, nothing else
    first = pipe.runtime.rank == 0
    for step in range(options.steps):
        loss = pipe.step(next(data))
        optimizer.step()
        optimizer.zero_grad()
        if first and step % 10 == 0:
            print(f"step {step:4d}  loss {loss:.3f}")

    state = pipe.full_state_dict()  # on rank 0, whole; the others get an empty one
    if first:
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        adapters = {name: state[name] for name in trained}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        save_file(adapters, options.output)
        numbers = (sum(t.numel() for t in tensors.values()) for tensors in (adapters, state))
        print("trained {:,} of {:,} numbers: {}".format(*numbers, options.output))


if __name__ == "__main__":
    main()
