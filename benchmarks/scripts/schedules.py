"""Learning rates, groups of parameters, and the batches of loaders."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import default_collate

import fxpipe
from benchmarks.scripts.models import (
    Classifier,
    LanguageModel,
    Regressor,
    classes,
    numbers,
    texts,
)
from benchmarks.scripts.script import (
    BATCH,
    EVERYWHERE,
    ROWS,
    Run,
    few,
    piped,
    plain,
)


@plain
def scheduled_rates(run: Run) -> None:
    model = Regressor()
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)
    warm_up = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: min(1.0, (step + 1) / 3))
    for batch in numbers(5):
        loss = model(**batch)
        loss.backward()
        opt.step()
        opt.zero_grad()
        warm_up.step()
        run.note("loss", loss)
        run.note("rate", opt.param_groups[0]["lr"])
    run.weights(model.state_dict())


@piped(scheduled_rates, *EVERYWHERE)
def _(run: Run) -> None:
    data = numbers(5)
    pipe = fxpipe.compile(Regressor(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    warm_up = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: min(1.0, (step + 1) / 3))
    for batch in data:
        loss = pipe.step(run.rows(batch))
        opt.step()
        opt.zero_grad()
        warm_up.step()
        run.note("loss", loss)
        run.note("rate", opt.param_groups[0]["lr"])
    run.weights(pipe.full_state_dict())


@piped(scheduled_rates, variant="rank 0 alone schedules", error=r"lr=")
def _(run: Run) -> None:
    data = numbers(5)
    pipe = fxpipe.compile(Regressor(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    warm_up = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: min(1.0, (step + 1) / 3))
    for batch in data:
        loss = pipe.step(batch)
        opt.step()
        opt.zero_grad()
        if run.rank == 0:
            warm_up.step()
        run.note("loss", loss)


@plain
def one_cycle(run: Run) -> None:
    model = Regressor()
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    cycle = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=5)
    for batch in numbers(5):
        loss = model(**batch)
        loss.backward()
        opt.step()
        cycle.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(model.state_dict())


@piped(one_cycle)
def _(run: Run) -> None:
    data = numbers(5)
    pipe = fxpipe.compile(Regressor(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.01)
    cycle = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=5)
    for batch in data:
        loss = pipe.step(batch)
        opt.step()
        cycle.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(pipe.full_state_dict())


@plain
def rate_set_by_hand(run: Run) -> None:
    model = Regressor()
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step, batch in enumerate(numbers(4)):
        for group in opt.param_groups:
            group["lr"] = 0.1 * 0.5 * (1 + math.cos(math.pi * step / 4))
        loss = model(**batch)
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
        run.note("loss", loss)
    run.weights(model.state_dict())


@piped(rate_set_by_hand)
def _(run: Run) -> None:
    data = numbers(4)
    pipe = fxpipe.compile(Regressor(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.1)
    for step, batch in enumerate(data):
        for group in opt.param_groups:
            group["lr"] = 0.1 * 0.5 * (1 + math.cos(math.pi * step / 4))
        loss = pipe.step(batch)
        opt.step()
        opt.zero_grad(set_to_none=True)
        run.note("loss", loss)
    run.weights(pipe.full_state_dict())


@plain
def plateau(run: Run) -> None:
    model, data = Regressor(), numbers(4)
    opt = torch.optim.AdamW(model.parameters(), lr=0.2)
    watch = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0)
    for batch in data[:3] * 2:
        loss = model(**batch)
        loss.backward()
        opt.step()
        opt.zero_grad()
        model.eval()
        with torch.no_grad():
            validation = model(**data[3])
        model.train()
        watch.step(validation)
        run.note("validation", validation)
        run.note("rate", opt.param_groups[0]["lr"])
    run.weights(model.state_dict())


@piped(plateau, *EVERYWHERE)
def _(run: Run) -> None:
    model, data = Regressor(), numbers(4)
    pipe = fxpipe.compile(model, few(data[0]), **run.options, evaluation=True)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.2)
    watch = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0)
    for batch in data[:3] * 2:
        pipe.step(run.rows(batch))
        opt.step()
        opt.zero_grad()
        model.eval()
        validation = pipe.evaluate(run.rows(data[3]))
        model.train()
        watch.step(validation)
        run.note("validation", validation)
        run.note("rate", opt.param_groups[0]["lr"])
    run.weights(pipe.full_state_dict())


@plain
def weight_decay_groups(run: Run) -> None:
    model = LanguageModel()
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]
    opt = torch.optim.AdamW(groups, lr=0.05)
    for batch in texts(3):
        loss = model(**batch).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(model.state_dict())


@piped(weight_decay_groups, *EVERYWHERE)
def _(run: Run) -> None:
    data = texts(3)
    pipe = fxpipe.compile(LanguageModel(), few(data[0]), **run.options)
    groups = [{"params": ["*.bias", "*norm*"], "weight_decay": 0.0}]
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05, weight_decay=0.5, groups=groups)
    for batch in data:
        loss = pipe.step(run.rows(batch))
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(pipe.full_state_dict())


@piped(
    weight_decay_groups,
    variant="groups of parameters by dimensions",
    equal=True,
    error=r"pipe\.optimizer|groups=",
)
def _(run: Run) -> None:
    model, data = LanguageModel(), texts(3)
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]
    opt = torch.optim.AdamW(groups, lr=0.05)
    for batch in data:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


@plain
def label_smoothing_from_tuples(run: Run) -> None:
    model, batch = Classifier(), classes(1, rows=3 * BATCH)[0]
    order = torch.Generator().manual_seed(5)
    data = TensorDataset(batch["x"], batch["labels"])
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)
    for x, labels in DataLoader(data, batch_size=BATCH, shuffle=True, generator=order):
        loss = F.cross_entropy(model(x), labels, label_smoothing=0.1)
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(model.state_dict())


@piped(label_smoothing_from_tuples, *EVERYWHERE)
def _(run: Run) -> None:
    model, batch = Classifier(), classes(1, rows=3 * BATCH)[0]
    order = torch.Generator().manual_seed(5)
    data = TensorDataset(batch["x"], batch["labels"])

    def loss_fn(logits, rows):
        return F.cross_entropy(logits, rows[1], label_smoothing=0.1)

    pipe = fxpipe.compile(model, data[:ROWS], **run.options, loss_fn=loss_fn)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for rows in DataLoader(data, batch_size=BATCH, shuffle=True, generator=order):
        loss = pipe.step(run.rows(rows))
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(pipe.full_state_dict())


class Plain(Classifier):
    """Whose forward takes the inputs alone."""

    def forward(self, x):
        return self.body(x)


@piped(label_smoothing_from_tuples, variant="forward takes no labels", equal=True, error=r"loss_fn|forward")
def _(run: Run) -> None:
    model, batch = Plain(), classes(1, rows=3 * BATCH)[0]
    order = torch.Generator().manual_seed(5)
    data = TensorDataset(batch["x"], batch["labels"])

    def loss_fn(logits, rows):
        return F.cross_entropy(logits, rows[1], label_smoothing=0.1)

    pipe = fxpipe.compile(model, data[:ROWS], **run.options, loss_fn=loss_fn)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for rows in DataLoader(data, batch_size=BATCH, shuffle=True, generator=order):
        run.note("loss", pipe.step(rows))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


@plain
def short_last_batch(run: Run) -> None:
    model, batch = Classifier(), classes(1, rows=2 * BATCH + 5)[0]
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)
    loader = DataLoader(TensorDataset(batch["x"], batch["labels"]), batch_size=BATCH)
    for x, labels in loader:
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    with torch.no_grad():
        losses = [F.cross_entropy(model(x), labels, reduction="sum") for x, labels in loader]
    run.note("evaluation", sum(losses) / len(loader.dataset))
    run.weights(model.state_dict())


@piped(short_last_batch, *EVERYWHERE)
def _(run: Run) -> None:
    model, batch = Classifier(), classes(1, rows=2 * BATCH + 5)[0]

    def loss_fn(logits, rows):
        return F.cross_entropy(logits, rows[1], ignore_index=-100, reduction="sum"), (rows[1] != -100).sum()

    def padded(rows):
        x, labels = default_collate(rows)
        missing = BATCH - len(x)
        return F.pad(x, (0, 0, 0, missing)), F.pad(labels, (0, missing), value=-100)

    loader = DataLoader(TensorDataset(batch["x"], batch["labels"]), batch_size=BATCH, collate_fn=padded)
    pipe = fxpipe.compile(
        model, few((batch["x"], batch["labels"])), **run.options, loss_fn=loss_fn, evaluation=True
    )
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for rows in loader:
        loss = pipe.step(run.rows(rows))
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    counts = [int((labels != -100).sum()) for _, labels in loader]
    losses = [pipe.evaluate(run.rows(rows)) * count for rows, count in zip(loader, counts, strict=True)]
    run.note("evaluation", sum(losses) / sum(counts))
    run.weights(pipe.full_state_dict())


@piped(short_last_batch, variant="the short batch as it is", equal=True, error=r"pad|drop_last")
def _(run: Run) -> None:
    model, batch = Classifier(), classes(1, rows=2 * BATCH + 5)[0]
    loader = DataLoader(TensorDataset(batch["x"], batch["labels"]), batch_size=BATCH)
    pipe = fxpipe.compile(
        model,
        few((batch["x"], batch["labels"])),
        **run.options,
        loss_fn=lambda logits, rows: F.cross_entropy(logits, rows[1]),
    )
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for rows in loader:
        run.note("loss", pipe.step(rows))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())
