"""Supervised training, and the ways to save, evaluate and copy a model that trains."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fxpipe
from benchmarks.scripts.models import (
    Regressor,
    numbers,
)
from benchmarks.scripts.script import (
    BATCH,
    EVERYWHERE,
    WHOLE_MODEL,
    Run,
    few,
    piped,
    plain,
)


@plain
def supervised(run: Run) -> None:
    model, data = Regressor(), numbers(5)
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)
    for batch in data[:4]:
        loss = model(**batch)
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    model.eval()
    with torch.no_grad():
        run.note("evaluation", model(**data[4]))
    run.weights(model.state_dict())


@piped(supervised, *EVERYWHERE)
def _(run: Run) -> None:
    model, data = Regressor(), numbers(5)
    pipe = fxpipe.compile(model, few(data[0]), **run.options, evaluation=True)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for batch in data[:4]:
        loss = pipe.step(run.rows(batch))
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.note("evaluation", pipe.evaluate(run.rows(data[4])))
    run.weights(pipe.full_state_dict())


def _trained(run: Run) -> tuple[fxpipe.Pipeline, nn.Module]:
    """The script above without what follows its last step."""
    model, data = Regressor(), numbers(4)
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for batch in data:
        run.note("loss", pipe.step(run.rows(batch)))
        opt.step()
        opt.zero_grad()
    return pipe, model


@piped(supervised, *EVERYWHERE, variant="synchronize, then the model", equal=True)
def _(run: Run) -> None:
    pipe, model = _trained(run)
    pipe.synchronize()
    with torch.no_grad():
        run.note("evaluation", model.eval()(**numbers(5)[4]))
    run.weights(model.state_dict())


@piped(supervised, "2", "4", variant="torch.save on rank 0", error=WHOLE_MODEL)
def _(run: Run) -> None:
    _, model = _trained(run)
    if run.rank == 0:
        torch.save(model.state_dict(), run.directory / "model.pt")
        run.weights(torch.load(run.directory / "model.pt"))


@piped(supervised, variant="torch.save of parameters", error=WHOLE_MODEL)
def _(run: Run) -> None:
    _, model = _trained(run)
    if run.rank == 0:
        run.weights({name: parameter.detach() for name, parameter in model.named_parameters()})


@piped(supervised, variant="deepcopy of the model", error=WHOLE_MODEL)
def _(run: Run) -> None:
    _, model = _trained(run)
    run.weights(copy.deepcopy(model).state_dict())


@piped(supervised, variant="pickle of the model", error=WHOLE_MODEL)
def _(run: Run) -> None:
    _, model = _trained(run)
    if run.rank == 0:
        torch.save(model, run.directory / "model.pt")
        run.weights(torch.load(run.directory / "model.pt", weights_only=False).state_dict())


@piped(supervised, "2", "4", variant="model(x) to evaluate", error=WHOLE_MODEL)
def _(run: Run) -> None:
    _, model = _trained(run)
    with torch.no_grad():
        run.note("evaluation", model.eval()(**numbers(5)[4]))


@piped(supervised, variant="norm of the weights", error=WHOLE_MODEL)
def _(run: Run) -> None:
    _, model = _trained(run)
    run.weights(
        {name: value.clone() for name, value in zip(model.state_dict(), model.parameters(), strict=True)}
    )


@piped(supervised, variant="a functional call", error=WHOLE_MODEL)
def _(run: Run) -> None:
    _, model = _trained(run)
    with torch.no_grad():
        parameters = dict(model.named_parameters())
        run.note("evaluation", torch.func.functional_call(model, parameters, (), numbers(5)[4]))


@piped(supervised, variant="a part of the model to evaluate", error=WHOLE_MODEL)
def _(run: Run) -> None:
    _, model = _trained(run)
    with torch.no_grad():
        x = numbers(5)[4]["x"]
        for layer in model.body:
            x = layer(x)
        run.note("evaluation", F.mse_loss(x, numbers(5)[4]["y"]))


@piped(supervised, variant="an optimizer of model.parameters()", equal=True, error=r"pipe\.optimizer")
def _(run: Run) -> None:
    model, data = Regressor(), numbers(4)
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    for batch in data:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


@piped(supervised, variant="loss.backward() stays", error=r"backward has run|opt\.step")
def _(run: Run) -> None:
    model, data = Regressor(), numbers(4)
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for batch in data:
        loss = pipe.step(batch)
        loss.backward()
        opt.step()
        opt.zero_grad()


@piped(supervised, variant="model.zero_grad()", equal=True)
def _(run: Run) -> None:
    model, data = Regressor(), numbers(4)
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for batch in data:
        run.note("loss", pipe.step(batch))
        opt.step()
        model.zero_grad()
    run.weights(pipe.full_state_dict())


@piped(supervised, variant="each rank shuffles", error=r"batch|generator")
def _(run: Run) -> None:
    model, batch = Regressor(), numbers(1, rows=4 * BATCH)[0]
    torch.manual_seed(run.rank)
    loader = DataLoader(TensorDataset(batch["x"], batch["y"]), batch_size=BATCH, shuffle=True)
    pipe = fxpipe.compile(model, few(numbers(1)[0]), **run.options)
    for x, y in loader:
        run.note("loss", pipe.step({"x": x, "y": y}))


@piped(supervised, variant="DistributedSampler over ranks", error=r"DistributedSampler|same batches")
def _(run: Run) -> None:
    model, batch = Regressor(), numbers(1, rows=8 * BATCH)[0]
    pipe = fxpipe.compile(model, few(numbers(1)[0]), **run.options)
    data = TensorDataset(batch["x"], batch["y"])
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data))
    for x, y in loader:
        run.note("loss", pipe.step({"x": x, "y": y}))
