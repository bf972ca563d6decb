"""Habits that loops keep: validation by the step that trains, files of one rank, updates by hand, averages by
torch's classes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from benchmarks.scripts.models import Regressor, numbers
from benchmarks.scripts.script import WHOLE_MODEL, Run, few, piped, plain

DEPTH = 4


def _model() -> Regressor:
    return Regressor(depth=DEPTH)


@plain
def validated_by_turns(run: Run) -> None:
    model = _model()
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)
    for batch, other in zip(numbers(3), numbers(3, seed=2), strict=True):
        loss = model(**batch)
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
        with torch.no_grad():
            run.note("validation", model(**other))
    run.weights(model.state_dict())


def _validated(run: Run, around: Any = torch.enable_grad) -> None:
    model, data = _model(), numbers(3)
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for batch, other in zip(data, numbers(3, seed=2), strict=True):
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
        model.eval()
        with around():
            run.note("validation", pipe.step(other))
        model.train()
    run.weights(pipe.full_state_dict())


@piped(validated_by_turns, variant="no_grad around pipe.step", warning=r"trains as ever")
def _(run: Run) -> None:
    _validated(run, torch.no_grad)


@piped(validated_by_turns, variant="inference_mode around pipe.step", warning=r"trains as ever")
def _(run: Run) -> None:
    _validated(run, torch.inference_mode)


@piped(validated_by_turns, variant="model.eval() around pipe.step", warning=r"trains as ever")
def _(run: Run) -> None:
    _validated(run)


class Even(nn.Module):
    """Two halves alike, so that ranks have parameters of the same shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return F.mse_loss(x[:, :3], y)


@plain
def saved_optimizer(run: Run) -> None:
    model, data = Even(), numbers(4)
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)
    for batch in data:
        loss = model(**batch)
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(model.state_dict())


def _saved_optimizer(run: Run, by_rank: bool) -> None:
    data = numbers(4)
    file = run.directory / (f"opt{run.rank}.pt" if by_rank else "opt.pt")
    pipe = fxpipe.compile(Even(), few(data[0]), split_points=["layers.1"], **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for batch in data[:2]:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    state = pipe.full_state_dict(rank=None)
    if by_rank or run.rank == 0:
        torch.save(opt.state_dict(), file)
    torch.distributed.barrier()
    again = fxpipe.compile(Even(), few(data[0]), split_points=["layers.1"], **run.options)
    again.load_state_dict(state)
    opt = again.optimizer(torch.optim.AdamW, lr=0.05)
    opt.load_state_dict(torch.load(file))
    for batch in data[2:]:
        run.note("loss", again.step(batch))
        opt.step()
        opt.zero_grad()
    run.weights(again.full_state_dict())


@piped(saved_optimizer, variant="a file for each rank")
def _(run: Run) -> None:
    _saved_optimizer(run, True)


@piped(saved_optimizer, variant="rank 0's file on all ranks", error=r"Checkpointer")
def _(run: Run) -> None:
    _saved_optimizer(run, False)


@plain
def update_by_hand(run: Run) -> None:
    model = _model()
    for batch in numbers(3):
        loss = model(**batch)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
        run.note("loss", loss)
    run.weights(model.state_dict())


@piped(update_by_hand)
def _(run: Run) -> None:
    model, data = _model(), numbers(3)
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    for batch in data:
        loss = pipe.step(batch)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
        run.note("loss", loss)
    run.weights(pipe.full_state_dict())


@piped(update_by_hand, variant="through data")
def _(run: Run) -> None:
    model, data = _model(), numbers(3)
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    for batch in data:
        loss = pipe.step(batch)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.data.add_(parameter.grad, alpha=-0.1)
        model.zero_grad()
        run.note("loss", loss)
    run.weights(pipe.full_state_dict())


@piped(update_by_hand, variant="an optimizer from before compile")
def _(run: Run) -> None:
    model, data = _model(), numbers(3)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    for batch in data:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


@piped(update_by_hand, variant="zero_grad(set_to_none=False)")
def _(run: Run) -> None:
    model, data = _model(), numbers(3)
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.1)
    for batch in data:
        opt.zero_grad(set_to_none=False)
        run.note("loss", pipe.step(batch))
        opt.step()
    run.weights(pipe.full_state_dict())


@plain
def left_out_of_an_update(run: Run) -> None:
    model = _model()
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    for i, batch in enumerate(numbers(4)):
        loss = model(**batch)
        loss.backward()
        if i < 2:
            for parameter in model.body[0].parameters():
                parameter.grad = None
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(model.state_dict())


@piped(left_out_of_an_update)
def _(run: Run) -> None:
    model, data = _model(), numbers(4)
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.1)
    for i, batch in enumerate(data):
        run.note("loss", pipe.step(batch))
        if i < 2:
            for parameter in model.body[0].parameters():
                parameter.grad = None
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


@plain
def averaged_weights(run: Run) -> None:
    model = _model()
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8)
    )
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    for batch in numbers(3):
        loss = model(**batch)
        loss.backward()
        opt.step()
        opt.zero_grad()
        average.update_parameters(model)
        run.note("loss", loss)
    run.weights(average.module.state_dict())


def _averaged(run: Run, average_of: Any, update: Any) -> None:
    model, data = _model(), numbers(3)
    average = average_of(model)
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.1)
    for batch in data:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
        update(pipe, average, model)
    run.weights(average.module.state_dict())


@piped(averaged_weights, variant="torch's AveragedModel", error=WHOLE_MODEL)
def _(run: Run) -> None:
    _averaged(
        run,
        lambda m: torch.optim.swa_utils.AveragedModel(
            m, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8)
        ),
        lambda pipe, average, model: average.update_parameters(model),
    )


@piped(averaged_weights, variant="torch's AveragedModel behind synchronize")
def _(run: Run) -> None:
    def update(pipe, average, model):
        pipe.synchronize()
        average.update_parameters(model)

    _averaged(
        run,
        lambda m: torch.optim.swa_utils.AveragedModel(
            m, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8)
        ),
        update,
    )


class Shadow:
    """An average as many repositories write it: a list of tensors beside the model's."""

    def __init__(self, model: nn.Module, over: str) -> None:
        self.module, self.over, self.count = copy.deepcopy(model), over, 0

    def update(self, model: nn.Module) -> None:
        first, self.count = self.count == 0, self.count + 1
        pairs = zip(self.module.parameters(), model.parameters(), strict=True)
        with torch.no_grad():
            if self.over == "foreach":
                mine, theirs = zip(*pairs, strict=True)
                if first:
                    torch._foreach_copy_(mine, theirs)
                else:
                    torch._foreach_lerp_(mine, theirs, 0.2)
            else:
                for mine, theirs in pairs:
                    source = theirs.data if self.over == "data" else theirs.detach()
                    mine.copy_(source) if first else mine.lerp_(source, 0.2)


for _over in ("foreach", "data", "detach"):

    @piped(averaged_weights, variant=f"a shadow by {_over}", error=WHOLE_MODEL)
    def _(run: Run, over: str = _over) -> None:
        _averaged(run, lambda m: Shadow(m, over), lambda pipe, average, model: average.update(model))
