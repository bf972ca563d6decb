"""Scripts of Hugging Face's Trainer and of Lightning: on ranks, and beside them in one process."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel, TrainerCallback, TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss

EXAMPLES = Path(__file__).parents[1] / "examples"
WORDS, LENGTH, ROWS = 24, 6, 29  # an epoch has three whole steps, and one whose last microbatch has one row


class Rows(torch.utils.data.Dataset):
    """Sequences; some labels of each are ignored, of some rows nearly all."""

    def __init__(self, rows: int = ROWS, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(WORDS, (rows, LENGTH), generator=generator)
        keeps = torch.rand(rows, LENGTH, generator=generator) < torch.linspace(0.3, 1, rows)[:, None]
        self.labels = torch.where(keeps, self.ids, -100)
        self.labels[:, -1] = self.ids[:, -1]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, k: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[k], "labels": self.labels[k]}


class Tied(PreTrainedModel):
    """A language model of transformers whose tables are one tensor."""

    config_class = PretrainedConfig
    _tied_weights_keys = {"head.weight": "table.weight"}  # noqa: RUF012 - as transformers has it

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.table = nn.Embedding(WORDS, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(8, WORDS, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids, labels=None, **loss_options):
        hidden = self.table(input_ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return {"logits": self.head(hidden)}


def tied() -> nn.Module:
    torch.manual_seed(0)
    return Tied(PretrainedConfig(tie_word_embeddings=True, vocab_size=WORDS)).double()


def arguments(directory: Path, **more: Any) -> TrainingArguments:
    options: dict[str, Any] = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "per_device_eval_batch_size": 5,
        "max_steps": 5, "learning_rate": 1e-2, "warmup_steps": 2, "max_grad_norm": 0.5,
        "weight_decay": 0.1, "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True,
        "disable_tqdm": True, "seed": 3,
    }  # fmt: skip
    return TrainingArguments(str(directory), **(options | more))


def exact_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """The loss of a causal language model, in the dtype of its logits."""
    logits, targets = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    if num_items_in_batch is None:
        return F.cross_entropy(logits, targets)
    return F.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


def accuracy(predicted: Any) -> dict[str, float]:
    right = (predicted.predictions[:, :-1].argmax(-1) == predicted.label_ids[:, 1:]).sum()
    return {"right": float(right)}


#: Two epochs, each with a last step of fewer rows; evaluates, saves and goes back to the best weights.
WHOLE = {
    "max_steps": 8, "eval_strategy": "steps", "eval_steps": 5, "save_strategy": "steps", "save_steps": 5,
    "load_best_model_at_end": True, "metric_for_best_model": "loss",
}  # fmt: skip


def whole(cls: Any, directory: Path, more: dict[str, Any], **options: Any) -> Any:
    """A Trainer of the whole script."""
    given = {"train_dataset": Rows(), "eval_dataset": Rows(7, seed=1)}
    given |= {"compute_loss_func": exact_loss, "compute_metrics": accuracy}
    return cls(tied(), arguments(directory, **WHOLE, **more), **given, **options)


def run_examples(directory: str) -> None:
    """The examples in a small size."""
    os.chdir(directory)
    sys.path.insert(0, str(EXAMPLES))
    for name, *options in (
        ("train_trainer.py", "--steps", "1", "--layers", "2", "--bytes", "10000"),
        ("train_lightning.py", "--steps", "3", "--layers", "2"),
    ):
        sys.argv = [name, *options]
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def train_on_ranks(directory: str) -> None:
    """The whole script on ranks; then from its checkpoint on."""
    import accelerate_worker
    import lightning_worker

    from fxpipe.integrations.trainer import Trainer

    accelerate_worker.main(directory)
    told: dict[str, Any] = {}
    for name, checkpoint in (("trained", None), ("resumed", f"{directory}/trained/checkpoint-5")):
        trainer = whole(Trainer, Path(directory) / name, {}, pipeline={"schedule": "zb-h1", "check": False})
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model(f"{directory}/{name}/last")
        told[name] = trainer.state.log_history
        told[f"{name} best"] = trainer.state.best_model_checkpoint
    predicted = trainer.predict(Rows(3, seed=2))
    told["predicted"] = predicted.predictions.tolist()
    told["lightning"] = lightning_worker.train_on_ranks(Path(directory, "lightning"))
    told["held"] = len(trainer.pipe.parameters)
    Path(directory, f"told{os.environ['RANK']}.json").write_text(json.dumps(told))


class Means(nn.Module):
    """Its loss is the mean over the labels of a microbatch, whatever the others have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = PretrainedConfig()  # which Trainer reads
        self.table, self.layer = nn.Embedding(WORDS, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, WORDS)

    def forward(self, input_ids, labels=None):
        logits = self.head(torch.tanh(self.layer(self.table(input_ids))))
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class OfOneRow(Means):
    """It scales one row alone."""

    def forward(self, input_ids, labels=None):
        output = super().forward(input_ids, labels)
        return {**output, "loss": output["loss"] * (1 if len(input_ids) > 1 else 2)}


class Counts(Means):
    """Its loss is that of a causal language model, which divides by the number of labels of a step."""

    loss_type = "ForCausalLM"

    def forward(self, input_ids, labels=None, **loss_options):
        logits = super().forward(input_ids)["logits"]
        if labels is None:
            return {"logits": logits}
        return {"loss": ForCausalLMLoss(logits, labels, WORDS, **loss_options), "logits": logits}


class CountsAll(Counts):
    """The Trainer does not know that the loss leaves out each row's first label, as of GPT-2's."""

    loss_type = None


class Between(TrainerCallback):
    """Changes clipped gradients, and from then on by which norm they are clipped."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **named):
        assert model is not None
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad *= 2
        args.max_grad_norm *= 0.8


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        rows = Rows()
        return (rows[k] for k in range(len(rows)))


class Uneven(torch.utils.data.Dataset):
    """Samples of 2 to LENGTH tokens, some of whose labels are ignored."""

    def __init__(self, number: int = ROWS, seed: int = 0):
        rows = Rows(number, seed)
        lengths = [2 + 5 * k % (LENGTH - 1) for k in range(number)]
        self.samples = [{name: x[-n:].tolist() for name, x in rows[k].items()} for k, n in enumerate(lengths)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, k: int) -> dict[str, list[int]]:
        return self.samples[k]


def padded(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A microbatch as long as its longest sample."""
    longest = max(len(sample["labels"]) for sample in samples)
    ends = {"input_ids": 0, "labels": -100}
    return {
        name: torch.tensor([sample[name] + [end] * (longest - len(sample[name])) for sample in samples])
        for name, end in ends.items()
    }


def trimmed(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A microbatch as long as its own rows need."""
    length = max(2, *(int((row["labels"] != -100).sum()) for row in rows))
    return {name: torch.stack([row[name][-length:] for row in rows]) for name in rows[0]}
