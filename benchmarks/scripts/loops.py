"""What loops do beside a step: stop early, pass over bad batches, count, normalize, drop out."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn
from torch.nn import functional as F

import fxpipe
from benchmarks.scripts.models import (
    INPUTS,
    OUTPUTS,
    Classifier,
    Regressor,
    classes,
    numbers,
)
from benchmarks.scripts.script import (
    WHOLE_MODEL,
    Run,
    few,
    microbatches,
    piped,
    plain,
)


@plain
def early_stop(run: Run) -> None:
    model, data = Regressor(), numbers(3)
    opt = torch.optim.AdamW(model.parameters(), lr=0.4)
    best, weights, patience = math.inf, None, 2
    for _ in range(6):
        for batch in data[:2]:
            model(**batch).backward()
            opt.step()
            opt.zero_grad()
        with torch.no_grad():
            validation = model(**data[2]).item()
        run.note("validation", validation)
        if validation < best:
            best, weights, patience = validation, copy.deepcopy(model.state_dict()), 2
        else:
            patience -= 1
        if not patience:
            break
    model.load_state_dict(weights)
    with torch.no_grad():
        run.note("best", model(**data[2]))
    run.weights(model.state_dict())


@piped(early_stop, "2", "4")
def _(run: Run) -> None:
    data = numbers(3)
    pipe = fxpipe.compile(Regressor(), few(data[0]), **run.options, evaluation=True)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.4)
    best, weights, patience = math.inf, None, 2
    for _ in range(6):
        for batch in data[:2]:
            pipe.step(batch)
            opt.step()
            opt.zero_grad()
        validation = pipe.evaluate(data[2]).item()
        run.note("validation", validation)
        if validation < best:
            best, weights, patience = validation, pipe.full_state_dict(rank=None), 2
        else:
            patience -= 1
        if not patience:
            break
    pipe.load_state_dict(weights)
    run.note("best", pipe.evaluate(data[2]))
    run.weights(pipe.full_state_dict())


@piped(early_stop, "2", "4", variant="the model's own state dict", error=WHOLE_MODEL)
def _(run: Run) -> None:
    model, data = Regressor(), numbers(3)
    pipe = fxpipe.compile(model, few(data[0]), **run.options, evaluation=True)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.4)
    best, weights = math.inf, None
    for _ in range(6):
        for batch in data[:2]:
            pipe.step(batch)
            opt.step()
            opt.zero_grad()
        validation = pipe.evaluate(data[2]).item()
        if validation < best:
            best, weights = validation, copy.deepcopy(model.state_dict())
    model.load_state_dict(weights)
    run.note("best", pipe.evaluate(data[2]))
    run.weights(model.state_dict())


@plain
def bad_batches(run: Run) -> None:
    model = Regressor()
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step, batch in enumerate(numbers(4)):
        try:
            if step == 2:
                raise ValueError("a file is damaged")
            loss = model(**batch)
        except ValueError:
            continue
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(model.state_dict())


@piped(bad_batches)
def _(run: Run) -> None:
    data = numbers(4)
    pipe = fxpipe.compile(Regressor(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for step, batch in enumerate(data):
        try:
            if step == 2:
                raise ValueError("a file is damaged")
            loss = pipe.step(batch)
        except ValueError:
            continue
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(pipe.full_state_dict())


@piped(bad_batches, variant="on one rank alone", error=r"step 3|batch|calls")
def _(run: Run) -> None:
    data = numbers(4)
    pipe = fxpipe.compile(Regressor(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for step, batch in enumerate(data):
        try:
            if step == 2 and run.rank == 1:
                raise ValueError("a file is damaged")
            loss = pipe.step(batch)
        except ValueError:
            continue
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(pipe.full_state_dict())


@piped(bad_batches, variant="of another shape, caught", equal=True)
def _(run: Run) -> None:
    data = numbers(4)
    pipe = fxpipe.compile(Regressor(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for step, batch in enumerate(data):
        try:
            loss = pipe.step({"x": batch["x"][:, :-1], "y": batch["y"]} if step == 2 else batch)
        except (ValueError, RuntimeError, fxpipe.FxpipeError):
            continue
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(pipe.full_state_dict())


@piped(bad_batches, variant="of another shape on one rank, caught", error=r"Rank 1 failed .*shape")
def _(run: Run) -> None:
    data = numbers(4)
    pipe = fxpipe.compile(Regressor(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for step, batch in enumerate(data):
        wrong = step == 2 and run.rank == 1
        try:
            loss = pipe.step({"x": batch["x"], "y": batch["y"][:, :-1]} if wrong else batch)
        except fxpipe.BatchError:
            continue
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(pipe.full_state_dict())


@plain
def skipped_nan(run: Run) -> None:
    model, data = Regressor(), numbers(4)
    data[1]["x"][3] = math.nan
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)
    for batch in data:
        loss = model(**batch)
        if not torch.isfinite(loss):
            continue
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(model.state_dict())


@piped(skipped_nan)
def _(run: Run) -> None:
    data = numbers(4)
    data[1]["x"][3] = math.nan
    pipe = fxpipe.compile(Regressor(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for batch in data:
        loss = pipe.step(batch)
        if not torch.isfinite(loss):
            opt.zero_grad()
            continue
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(pipe.full_state_dict())


@piped(skipped_nan, variant="skip_nonfinite", equal=True)
def _(run: Run) -> None:
    data = numbers(4)
    data[1]["x"][3] = math.nan
    pipe = fxpipe.compile(Regressor(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05, skip_nonfinite=True)
    for batch in data:
        loss = pipe.step(batch)
        opt.step()
        opt.zero_grad()
        if torch.isfinite(loss):
            run.note("loss", loss)
    run.weights(pipe.full_state_dict())


@plain
def metrics(run: Run) -> None:
    model, data = Classifier(), classes(4)
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)
    running, right = 0.0, 0
    for batch in data:
        logits = model(**batch)
        loss = F.cross_entropy(logits, batch["labels"])
        loss.backward()
        opt.step()
        opt.zero_grad()
        running = 0.9 * running + 0.1 * loss.item()
        right += (logits.detach().argmax(-1) == batch["labels"]).sum().item()
    run.note("running", running)
    run.note("right", right)
    run.weights(model.state_dict())


@piped(metrics, "2", "4")
def _(run: Run) -> None:
    data = classes(4)

    def loss_fn(logits, batch):
        right = (logits.argmax(-1) == batch["labels"]).sum()
        return F.cross_entropy(logits, batch["labels"]), {"right": right}

    pipe = fxpipe.compile(Classifier(), few(data[0]), **run.options, loss_fn=loss_fn, outputs=["right"])
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    running, right = 0.0, 0
    for batch in data:
        result = pipe.step(batch, outputs=["right"], outputs_on="all")
        opt.step()
        opt.zero_grad()
        running = 0.9 * running + 0.1 * result.loss.item()
        right += result.outputs["right"].sum().item()
    run.note("running", running)
    run.note("right", right)
    run.weights(pipe.full_state_dict())


class Normalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(INPUTS, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(),
            nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, OUTPUTS)
        )  # fmt: skip

    def forward(self, x, y):
        return F.mse_loss(self.body(x), y)


@plain
def batch_norm(run: Run) -> None:
    model, data = Normalized(), numbers(4)
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    for batch in data[:3]:
        losses = [model(**rows) / 4 for rows in microbatches(batch)]
        sum(losses).backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", sum(losses))
    with torch.no_grad():
        run.note("evaluation", model.eval()(**data[3]))
    run.weights(model.state_dict())


@piped(batch_norm, "2", "4")
def _(run: Run) -> None:
    data = numbers(4)
    pipe = fxpipe.compile(Normalized(), few(data[0]), **run.options, evaluation=True)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.5)
    for batch in data[:3]:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    run.note("evaluation", pipe.evaluate(data[3]))
    run.weights(pipe.full_state_dict())


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(INPUTS, 8), nn.Linear(8, 8), nn.Linear(8, OUTPUTS)

    def forward(self, x, y):
        x = F.dropout(self.first(x).relu(), 0.3, self.training)
        return F.mse_loss(self.third(F.dropout(self.second(x).relu(), 0.3, self.training)), y)


def _dropout(run: Run) -> None:
    data = numbers(4)
    pipe = fxpipe.compile(Dropped(), few(data[0]), **run.options, evaluation=True)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for batch in data[:3]:
        run.note("loss", pipe.step(run.rows(batch)))
        opt.step()
        opt.zero_grad()
    run.note("evaluation", pipe.evaluate(run.rows(data[3])))
    run.weights(pipe.full_state_dict())


@plain
def dropout(run: Run) -> None:
    _dropout(run)  # a pipeline of one rank in one process: no other one draws its numbers


@piped(dropout, "2", "2x2")
def _(run: Run) -> None:
    _dropout(run)
