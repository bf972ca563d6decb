"""Train a LightningModule by Lightning's Trainer, on the ranks of a pipeline.

    torchrun --nproc-per-node 2 examples/train_lightning.py

The model marks each letter of a text that occurs more than once in it.  It is a script for plain Lightning,
but for ``strategy=``: the losses are those of ``python examples/train_lightning.py --plain``.
"""

from __future__ import annotations

import argparse
import os

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fxpipe.integrations.lightning import PipelineStrategy

BUILD = "build/lightning"


class Marks(pl.LightningModule):
    def __init__(self, layers: int, width: int = 32):
        super().__init__()
        self.embedding = nn.Embedding(26, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 2)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def _loss(self, batch: list[Tensor], name: str) -> Tensor:
        text, labels = batch
        logits = self(text)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        right = (logits.argmax(-1) == labels).float().mean()
        self.log_dict({f"{name}_loss": loss, f"{name}_right": right}, on_epoch=True)
        return loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self._loss(batch, "train")

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._loss(batch, "val")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--plain", action="store_true", help="plain Lightning, in one process")
    options = parser.parse_args()
    pl.seed_everything(0, verbose=False)
    text = torch.randint(26, (1050, 12))
    labels = ((text[:, :, None] == text[:, None, :]).sum(-1) > 1).long()
    train = DataLoader(TensorDataset(text[:1000], labels[:1000]), batch_size=32, shuffle=True, drop_last=True)
    others = DataLoader(TensorDataset(text[1000:], labels[1000:]), batch_size=32)

    where = {"devices": 1}
    if not options.plain:
        ranks = int(os.environ["WORLD_SIZE"])
        where = {"devices": ranks, "strategy": PipelineStrategy(microbatches=8, schedule="zb-h1")}
    trainer = pl.Trainer(
        max_steps=options.steps, gradient_clip_val=1.0, logger=CSVLogger(BUILD), default_root_dir=BUILD,
        accelerator="auto" if torch.accelerator.is_available() else "cpu", log_every_n_steps=10,
        num_sanity_val_steps=0, enable_progress_bar=False, enable_model_summary=False, **where,
    )  # fmt: skip
    trainer.fit(Marks(options.layers), train, others)
    if trainer.is_global_zero:
        for name, number in sorted(trainer.callback_metrics.items()):
            print(f"{name} {float(number):.4f}")


if __name__ == "__main__":
    main()
