"""Fine-tuning: masked labels, adapters, frozen layers, prompts, resized tables, new weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from benchmarks.scripts.models import WIDTH, WORDS, LanguageModel, Output, texts
from benchmarks.scripts.script import (
    BATCH,
    EVERYWHERE,
    Run,
    few,
    piped,
    plain,
)


def prompts(count: int) -> list[dict[str, Tensor]]:
    """Texts whose labels are masked in other places and numbers in each row."""
    data = texts(count, length=8)
    for batch in data:
        lengths = torch.arange(BATCH) % 6 + 1
        batch["labels"] = batch["labels"].masked_fill(torch.arange(8) < lengths[:, None], -100)
    return data


def finetuned(run: Run, model: nn.Module, data: list, **options: object) -> fxpipe.Pipeline:
    """The loop of most scripts here: AdamW, its losses and the weights at the end."""
    pipe = fxpipe.compile(model, few(data[0]), **run.options, **options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for batch in data:
        run.note("loss", pipe.step(run.rows(batch)))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())
    return pipe


def plainly(run: Run, model: nn.Module, data: list) -> None:
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for batch in data:
        loss = model(**batch).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(model.state_dict())


@plain
def masked_labels(run: Run) -> None:
    plainly(run, LanguageModel(), prompts(3))


@piped(masked_labels, *EVERYWHERE)
def _(run: Run) -> None:
    finetuned(run, LanguageModel(), prompts(3))


class Counted(LanguageModel):
    """Gives the sum and the count of its labels, as the pages ask for an exact mean."""

    def forward(self, input_ids, labels):
        logits, following = super().forward(input_ids).logits[:, :-1], labels[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum"), (
            following != -100
        ).sum()


@piped(masked_labels, *EVERYWHERE, variant="sum and count", equal=True)
def _(run: Run) -> None:
    finetuned(run, Counted(), prompts(3), loss_fn=lambda output, batch: output)


@plain
def padded_row(run: Run) -> None:
    data = prompts(2)
    for batch in data:
        batch["labels"][3] = -100
    plainly(run, LanguageModel(), data)


@piped(padded_row, *EVERYWHERE)
def _(run: Run) -> None:
    data = prompts(2)
    for batch in data:
        batch["labels"][3] = -100
    finetuned(run, LanguageModel(), data)


@plain
def padded_microbatch(run: Run) -> None:
    data = prompts(2)
    for batch in data:
        batch["labels"][2:4] = -100
    plainly(run, LanguageModel(), data)


@piped(padded_microbatch, *EVERYWHERE)
def _(run: Run) -> None:
    data = prompts(2)
    for batch in data:
        batch["labels"][2:4] = -100
    finetuned(run, LanguageModel(), data)


@plain
def masked_evaluation(run: Run) -> None:
    model, data = LanguageModel(), prompts(3)
    plainly(run, model, data[:2])
    with torch.no_grad():
        run.note("evaluation", model(**data[2]).loss)


@piped(masked_evaluation, *EVERYWHERE)
def _(run: Run) -> None:
    data = prompts(3)
    pipe = finetuned(run, LanguageModel(), data[:2], evaluation=True)
    run.note("evaluation", pipe.evaluate(run.rows(data[2])))


class Weighted(LanguageModel):
    """A mean over tokens of other weights: a mask that multiplies, not ignored labels."""

    def forward(self, input_ids, labels):
        logits = self.head(self.hidden(input_ids))
        mask = (labels != -100).to(logits.dtype)
        each = F.cross_entropy(logits.flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none")
        return Output((each * mask.flatten()).sum() / mask.sum(), logits)


@plain
def mean_over_a_mask(run: Run) -> None:
    plainly(run, Weighted(), prompts(3))


@piped(mean_over_a_mask, equal=True, differs="docs/training.md: the mean of the microbatches' losses")
def _(run: Run) -> None:
    finetuned(run, Weighted(), prompts(3))


class Classes(LanguageModel):
    """Cross-entropy with weights of classes, whose mean divides by the weights of the labels."""

    def forward(self, input_ids, labels):
        logits = self.head(self.hidden(input_ids))
        weight = torch.arange(1, WORDS + 1, dtype=logits.dtype)
        return Output(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight), logits)


@plain
def class_weights(run: Run) -> None:
    plainly(run, Classes(), texts(3))


@piped(class_weights, *EVERYWHERE)
def _(run: Run) -> None:
    finetuned(run, Classes(), texts(3))


class Adapted(nn.Module):
    """A frozen linear layer and its low-rank adapter."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, base.out_features, bias=False)
        nn.init.normal_(self.up.weight, std=0.1)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def _adapted() -> LanguageModel:
    model = LanguageModel().requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.out = Adapted(block.qkv), Adapted(block.out)
    return model


@plain
def low_rank_adapters(run: Run) -> None:
    model = _adapted()
    plainly(run, model, texts(3))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    run.weights(trained, "adapter")


@piped(low_rank_adapters, *EVERYWHERE)
def _(run: Run) -> None:
    model = _adapted()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    pipe = finetuned(run, model, texts(3))
    run.weights({k: v for k, v in pipe.full_state_dict().items() if k in trained}, "adapter")


@piped(low_rank_adapters, variant="merged into the model", error=r"full_state_dict|synchronize")
def _(run: Run) -> None:
    model = _adapted()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    finetuned(run, model, texts(3))
    adapters = {name: p.data for name, p in model.named_parameters() if name in trained}
    run.weights(adapters, "adapter")


@plain
def frozen_between_epochs(run: Run) -> None:
    model, data = LanguageModel(), texts(4)
    model.embedding.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    plainly(run, model, data[:2])
    model.requires_grad_(True)
    plainly(run, model, data[2:])


@piped(frozen_between_epochs)
def _(run: Run) -> None:
    model, data = LanguageModel(), texts(4)
    model.embedding.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    finetuned(run, model, data[:2]).synchronize()
    model.requires_grad_(True)
    finetuned(run, model, data[2:])


@piped(frozen_between_epochs, variant="without synchronize", error=r"synchronize|like=|another pipeline")
def _(run: Run) -> None:
    model, data = LanguageModel(), texts(4)
    model.embedding.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    finetuned(run, model, data[:2])
    model.requires_grad_(True)
    finetuned(run, model, data[2:], split_points=["blocks.1"])


@piped(frozen_between_epochs, variant="the same pipeline", error=r"requires_grad")
def _(run: Run) -> None:
    model, data = LanguageModel(), texts(4)
    model.embedding.requires_grad_(False)
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for batch in data:
        pipe.step(batch)
        opt.step()
        opt.zero_grad()
        model.requires_grad_(True)


def _resized(model: LanguageModel, words: int) -> None:
    table, head = nn.Embedding(words, WIDTH), nn.Linear(WIDTH, words, bias=False)
    with torch.no_grad():
        table.weight.zero_()[:WORDS] = model.embedding.weight
        head.weight.zero_()[:WORDS] = model.head.weight
    model.embedding, model.head = table, head


@plain
def resized_table(run: Run) -> None:
    model, data = LanguageModel(), texts(4)
    plainly(run, model, data[:2])
    _resized(model, WORDS + 3)
    for batch in data[2:]:
        batch["input_ids"][:, 0] = WORDS + 1
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)
    for batch in data[2:]:
        loss = model(**batch).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("more", loss)
    run.weights(model.state_dict(), "resized")


def _continued(run: Run, model: nn.Module, data: list) -> None:
    for batch in data:
        batch["input_ids"][:, 0] = WORDS + 1
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for batch in data:
        run.note("more", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict(), "resized")


@piped(resized_table, "2", "4")
def _(run: Run) -> None:
    model, data = LanguageModel(), texts(4)
    finetuned(run, model, data[:2]).synchronize()
    _resized(model, WORDS + 3)
    _continued(run, model, data[2:])


@piped(resized_table, variant="without synchronize", equal=True, error=r"synchronize|full_state_dict|like=")
def _(run: Run) -> None:
    model, data = LanguageModel(), texts(4)
    finetuned(run, model, data[:2])
    _resized(model, WORDS + 3)
    _continued(run, model, data[2:])


class Soft(nn.Module):
    """Prompt tuning: trained vectors before a frozen model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = LanguageModel().requires_grad_(False)
        self.prompt = nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, input_ids, labels):
        x = torch.cat([self.prompt.expand(len(input_ids), -1, -1), self.model.embedding(input_ids)], 1)
        for block in self.model.blocks:
            x = block(x)
        logits = self.model.head(x)[:, 2:-1]
        return Output(F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()), logits)


@plain
def prompt_tuning(run: Run) -> None:
    plainly(run, Soft(), texts(3))


@piped(prompt_tuning, "2", "4")
def _(run: Run) -> None:
    finetuned(run, Soft(), texts(3))


@plain
def initialized_after_compile(run: Run) -> None:
    model = LanguageModel()
    torch.manual_seed(7)
    model.apply(_normal)
    plainly(run, model, texts(2))


def _normal(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.3)


@piped(initialized_after_compile, "2", "4", equal=True, error=r"synchronize|full_state_dict|before")
def _(run: Run) -> None:
    model, data = LanguageModel(), texts(2)
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    torch.manual_seed(7)
    model.apply(_normal)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for batch in data:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


@piped(initialized_after_compile, variant="load_state_dict into the model", equal=True,
       error=r"pipe\.load_state_dict|synchronize")  # fmt: skip
def _(run: Run) -> None:
    model, data = LanguageModel(), texts(2)
    torch.manual_seed(0)
    other = LanguageModel()
    torch.manual_seed(7)
    other.apply(_normal)
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    model.load_state_dict(other.state_dict())
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for batch in data:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())
