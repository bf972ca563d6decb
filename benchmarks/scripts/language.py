"""Language models: tied tables, experts, batches of tokenizers, two lengths, checkpointing, autocast."""

from __future__ import annotations

from collections import UserDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from benchmarks.scripts.finetune import finetuned, plainly, prompts
from benchmarks.scripts.models import WIDTH, WORDS, Block, LanguageModel, Output, texts
from benchmarks.scripts.script import (
    BATCH,
    EVERYWHERE,
    Run,
    few,
    piped,
    plain,
)


@plain
def tied_table(run: Run) -> None:
    plainly(run, LanguageModel(tied=True), texts(3))


@piped(tied_table, *EVERYWHERE)
def _(run: Run) -> None:
    finetuned(run, LanguageModel(tied=True), texts(3))


@piped(tied_table, "2", "2x2", variant="split vocabulary", equal=True)
def _(run: Run) -> None:
    finetuned(run, LanguageModel(tied=True), texts(3), vocab_parallel=True)


class Encoding(UserDict):
    """What tokenizers of transformers give: a mapping that is no dict."""


@plain
def batch_encoding(run: Run) -> None:
    plainly(run, LanguageModel(), [Encoding(batch) for batch in texts(2)])


@piped(batch_encoding, equal=True, error=r"dict\(")
def _(run: Run) -> None:
    data = texts(2)
    pipe = fxpipe.compile(LanguageModel(), Encoding(few(data[0])), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for batch in data:
        run.note("loss", pipe.step(Encoding(batch)))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


class Items(LanguageModel):
    """The loss of transformers' trainer: a sum, divided by the labels of the whole batch."""

    def forward(self, input_ids, labels, num_items_in_batch):
        logits = self.head(self.hidden(input_ids))[:, :-1]
        total = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        return Output(total / num_items_in_batch, logits)


@plain
def items_in_batch(run: Run) -> None:
    data = prompts(3)
    data[1]["labels"][:3] = -100
    for batch in data:
        batch["num_items_in_batch"] = int((batch["labels"][:, 1:] != -100).sum())
    plainly(run, Items(), data)


@piped(items_in_batch, "2", "4")
def _(run: Run) -> None:
    data = prompts(3)
    data[1]["labels"][:3] = -100
    for batch in data:
        batch["num_items_in_batch"] = (batch["labels"][:, 1:] != -100).sum()
    pipe = fxpipe.compile(Items(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for batch in data:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


@piped(items_in_batch, variant="as a Python number", equal=True, error=r"torch\.tensor")
def _(run: Run) -> None:
    data = prompts(3)
    data[1]["labels"][:3] = -100
    for batch in data:
        batch["num_items_in_batch"] = int((batch["labels"][:, 1:] != -100).sum())
    pipe = fxpipe.compile(Items(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for batch in data:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


class Following(nn.Module):
    """Multi-token prediction: a second head behind a block of its own, the table tied."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.block = LanguageModel(tied=True), Block()
        self.join = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, input_ids, labels):
        hidden = self.model.hidden(input_ids)
        first = F.cross_entropy(self.model.head(hidden[:, :-1]).flatten(0, 1), labels[:, 1:].flatten())
        x = self.join(torch.cat([hidden[:, :-1], self.model.embedding(input_ids[:, 1:])], -1))
        second = self.model.head(self.block(x)[:, :-1])
        return Output(first + 0.3 * F.cross_entropy(second.flatten(0, 1), labels[:, 2:].flatten()), second)


@plain
def multi_token_prediction(run: Run) -> None:
    plainly(run, Following(), texts(3))


@piped(multi_token_prediction, *EVERYWHERE)
def _(run: Run) -> None:
    finetuned(run, Following(), texts(3))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3, bias=False)
        self.up, self.down = (nn.Parameter(torch.randn(3, WIDTH, WIDTH) * 0.3) for _ in range(2))

    def forward(self, x):
        share = self.gate(x).softmax(-1)
        top = share.topk(2, -1)
        mask = torch.zeros_like(share).scatter(-1, top.indices, top.values)
        hidden = torch.einsum("btd,edf->btef", x, self.up).relu()
        balance = 3 * ((mask > 0).to(x.dtype).mean((0, 1)) * share.mean((0, 1))).sum()
        return x + torch.einsum("bte,btef,efd->btd", mask, hidden, self.down), balance


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Experts() for _ in range(4))
        self.coefficient = 0.02

    def forward(self, input_ids, labels):
        x, balances = self.embedding(input_ids), []
        for layer in self.layers:
            x, balance = layer(x)
            balances.append(balance)
        loss = F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return Output(loss + self.coefficient * sum(balances), x)


def _of_microbatches(run: Run, model: nn.Module, data: list) -> None:
    """The balance is that of a microbatch, as where gradients accumulate."""
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)
    for batch in data:
        losses = [model(**{k: v[i : i + 2] for k, v in batch.items()}).loss / 4 for i in range(0, BATCH, 2)]
        sum(losses).backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", sum(losses))
    run.weights(model.state_dict())


@plain
def balanced_experts(run: Run) -> None:
    _of_microbatches(run, Mixture(), texts(3))


@piped(balanced_experts, *EVERYWHERE)
def _(run: Run) -> None:
    finetuned(run, Mixture(), texts(3))


@plain
def annealed_coefficient(run: Run) -> None:
    model = Mixture()
    _of_microbatches(run, model, texts(1))
    model.coefficient = 0.5
    _of_microbatches(run, model, texts(2, seed=3))


@piped(
    annealed_coefficient, equal=False, warning=r"coefficient", error=r"coefficient", variant="a Python number"
)
def _(run: Run) -> None:
    model, data = Mixture(), texts(1) + texts(2, seed=3)
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for step, batch in enumerate(data):
        if step == 1:
            run.weights(pipe.full_state_dict())
            opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
            model.coefficient = 0.5
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


class Annealed(Mixture):
    def __init__(self) -> None:
        super().__init__()
        del self.coefficient
        self.register_buffer("coefficient", torch.tensor(0.02), persistent=False)


@piped(annealed_coefficient, "2", "4", variant="a buffer", equal=True)
def _(run: Run) -> None:
    model, data = Annealed(), texts(1) + texts(2, seed=3)
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for step, batch in enumerate(data):
        if step == 1:
            run.weights(pipe.full_state_dict())
            opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
            model.coefficient.fill_(0.5)
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


def _lengths(count: int) -> list[dict[str, Tensor]]:
    return [texts(1, seed=i, length=(4, 8)[i % 2])[0] for i in range(count)]


@plain
def two_lengths(run: Run) -> None:
    plainly(run, LanguageModel(), _lengths(4))


@piped(two_lengths, "2", "4", variant="the same split points", equal=True, error=r"like=")
def _(run: Run) -> None:
    model, data = LanguageModel(), _lengths(4)
    points = [f"blocks.{i}" for i in (range(1, 4) if run.ranks == 4 else (2,))]
    short, long = (
        fxpipe.compile(model, few(batch), **run.options, split_points=points) for batch in data[:2]
    )
    opt = short.optimizer(torch.optim.AdamW, lr=0.05)
    for i, batch in enumerate(data):
        run.note("loss", (short, long)[i % 2].step(batch))
        opt.step()
        opt.zero_grad()
    run.weights(short.full_state_dict())


@piped(two_lengths, "2", "4", variant="each cut by itself", error=r"like=|synchronize")
def _(run: Run) -> None:
    model, data = LanguageModel(), _lengths(4)
    points = (["blocks.1", "blocks.2", "blocks.3"], ["blocks.0", "blocks.2", "blocks.3"])
    if run.ranks == 2:
        points = ["blocks.1"], ["blocks.3"]
    short, long = (
        fxpipe.compile(model, few(batch), **run.options, split_points=at)
        for batch, at in zip(data[:2], points, strict=True)
    )
    opt = short.optimizer(torch.optim.AdamW, lr=0.05)
    for i, batch in enumerate(data):
        run.note("loss", (short, long)[i % 2].step(batch))
        opt.step()
        opt.zero_grad()
    run.weights(short.full_state_dict())


@piped(two_lengths, *EVERYWHERE, variant="like=", equal=True)
def _(run: Run) -> None:
    model, data = LanguageModel(), _lengths(4)
    short = fxpipe.compile(model, few(data[0]), **run.options)
    long = fxpipe.compile(model, few(data[1]), **run.options, like=short)
    opt = short.optimizer(torch.optim.AdamW, lr=0.05)
    for i, batch in enumerate(data):
        run.note("loss", (short, long)[i % 2].step(run.rows(batch)))
        opt.step()
        opt.zero_grad()
    run.weights(short.full_state_dict())


@piped(two_lengths, variant="one pipeline", error=r"shape|length|pad")
def _(run: Run) -> None:
    finetuned(run, LanguageModel(), _lengths(4))


@plain
def checkpointed_activations(run: Run) -> None:
    plainly(run, LanguageModel(), texts(3))


class Checkpointed(LanguageModel):
    reentrant = False

    def hidden(self, input_ids):
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@piped(checkpointed_activations, "2", "4")
def _(run: Run) -> None:
    finetuned(run, Checkpointed(), texts(3))


@piped(checkpointed_activations, variant="reentrant", equal=True)
def _(run: Run) -> None:
    model = Checkpointed()
    model.reentrant = True
    finetuned(run, model, texts(3))


class Single(LanguageModel):
    """float32, its blocks under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.float()

    def forward(self, input_ids, labels):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self.head(self.hidden(input_ids))
        return Output(F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten()), logits)


@plain
def autocast(run: Run) -> None:
    model = Single()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in texts(3):
        losses = [model(**{k: v[i : i + 2] for k, v in batch.items()}).loss / 4 for i in range(0, BATCH, 2)]
        for loss in losses:
            loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", sum(losses))
    run.weights(model.state_dict())


@piped(autocast, "2", "4", tolerance=3e-3)
def _(run: Run) -> None:
    data = texts(3)
    pipe = fxpipe.compile(Single(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.1)
    for batch in data:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())
