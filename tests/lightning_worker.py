"""A script of Lightning: on ranks, and beside them in one process."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fxpipe.integrations.lightning import PipelineStrategy

QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x):
        return self.body(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        right = (logits.argmax(-1) == y).double()
        self.log_dict({"right": right.mean(), "rate": 2.0})
        self.log("number right", right.sum(), reduce_fx="sum")
        self.log("largest", logits.max(), reduce_fx="max", on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))

    def test_step(self, batch, number):
        return self.validation_step(batch, 0)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        rate = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rate, "interval": "step"}}


def loaders(rows: int = 8) -> tuple[DataLoader, DataLoader]:
    """Of four batches, and of two, of which the last one has fewer rows."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 6, generator=generator), torch.randint(4, (40,), generator=generator)
    data = TensorDataset(x[:32], y[:32]), TensorDataset(x[32:], y[32:])
    return DataLoader(data[0], batch_size=rows), DataLoader(data[1], batch_size=5)


def fit(directory: Path, epochs: int, path: Path | None = None, **options: Any) -> pl.Trainer:
    """Train, from a checkpoint on if there is one; write one at the end of each epoch."""
    kept = ModelCheckpoint(directory / "kept", save_top_k=-1)
    trainer = pl.Trainer(
        max_epochs=epochs, gradient_clip_val=0.5, logger=CSVLogger(directory), log_every_n_steps=1,
        callbacks=[kept], num_sanity_val_steps=0, **(QUIET | options),
    )  # fmt: skip
    trainer.fit(Net(), *loaders(), ckpt_path=path)
    return trainer


def numbers(directory: Path) -> str:
    """What was logged."""
    return (directory / "lightning_logs" / "version_0" / "metrics.csv").read_text()


def train_on_ranks(directory: Path) -> list[dict[str, float]]:
    """Two epochs, and the second one once more from the end of the first one on."""

    def strategy() -> PipelineStrategy:
        return PipelineStrategy(microbatches=4, schedule="zb-h1")

    first = fit(directory / "trained", 2, devices=2, strategy=strategy())
    path = directory / "trained" / "kept" / "epoch=0-step=4.ckpt"
    second = fit(directory / "resumed", 2, path, devices=2, strategy=strategy())
    return [{name: float(x) for name, x in each.callback_metrics.items()} for each in (first, second)]
