"""Train a model with values across stages and two losses: attention residuals and multi-token prediction.

    torchrun --nproc-per-node 4 examples/train_mtp.py

Each block reads a mixture of the outputs of *all* blocks before it, and the second head, which predicts the
token behind the next one, uses the embedding and the output layer of the first. Where stages are modules that
hand one tensor on, both need caches and sums of gradients that are written by hand. Here the captured graph
says which stages use a value; the end of this script prints what travels between them.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from text import batches, standard_library, tokenize, train_tokenizer
from torch import Tensor, nn
from transformer import Block

import fxpipe

MICROBATCHES, ROWS, LENGTH, VOCABULARY = 8, 2, 48, 512


class Mixture(nn.Module):
    """A weighted sum of the values so far, with weights of each token's own: [rows, length, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.query = nn.RMSNorm(width), nn.Parameter(torch.zeros(width))

    def forward(self, values: list[Tensor]) -> Tensor:
        stacked = torch.stack(values)  # [values, rows, length, width]
        weights = (self.norm(stacked) @ self.query).softmax(0)
        return (weights[..., None] * stacked).sum(0)


class Model(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.mixtures = nn.ModuleList(Mixture(width) for _ in range(layers))
        self.blocks = nn.ModuleList(Block(width, heads=4) for _ in range(layers))
        self.join, self.second = nn.Linear(2 * width, width), Block(width, heads=4)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight  # tied, and used by both losses

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor | dict[str, Tensor]]:
        values = [self.embedding(input_ids) + self.position]
        for mixture, block in zip(self.mixtures, self.blocks, strict=True):
            values.append(block(mixture(values)))
        last = values[-1]
        # The second head sees the next token, and predicts the one behind it.
        joined = torch.cat([last[:, :-1], self.embedding(input_ids[:, 1:])], dim=-1)
        following = self.second(self.join(joined))
        losses = {"next": self.loss(last, labels[:, 1:]), "second": self.loss(following, labels[:, 2:])}
        return {"loss": losses["next"] + 0.3 * losses["second"], "losses": losses}

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.norm(hidden[:, : labels.shape[1]]))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--bytes", type=int, default=200_000, help="the amount of text")
    options = parser.parse_args()

    documents = standard_library(options.bytes)
    tokens = tokenize(documents, train_tokenizer(documents, VOCABULARY))
    data = batches(tokens, MICROBATCHES * ROWS, LENGTH, seed=0)
    example = {name: tensor[:ROWS] for name, tensor in next(data).items()}
    torch.manual_seed(0)
    pipe = fxpipe.compile(
        Model(options.width, options.layers),
        example,
        ranks=4,
        microbatches=MICROBATCHES,
        schedule="zb-h1",
        outputs=["losses.next", "losses.second"],
    )
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=2e-3, clip_grad_norm=1.0)
    first = pipe.runtime.rank == 0
    for step in range(options.steps):
        # The values of each microbatch, from the rank that computes them to rank 0.
        result = pipe.step(next(data), outputs=["losses.next", "losses.second"], outputs_on=0)
        optimizer.step()
        optimizer.zero_grad()
        if first and step % 10 == 0:
            losses = "  ".join(f"{name} {value.mean():.3f}" for name, value in result.outputs.items())
            print(f"step {step:4d}  loss {result.loss:.3f}  {losses}")
    if first:
        for edge in pipe.plan.costs.edges:
            ends = f"stage {edge.source.stage} -> {edge.target.stage}"
            print(f"{ends}, {edge.source.phase}: {edge.bytes:,.0f} bytes a microbatch")


if __name__ == "__main__":
    main()
