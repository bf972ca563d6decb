"""Supervised training, and the ways to save, evaluate and copy a model that trains."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fxpipe
from benchmarks.scripts.models import (
    INPUTS,
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


@piped(supervised, variant="parameters_to_vector", error=WHOLE_MODEL)
def _(run: Run) -> None:
    _, model = _trained(run)
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    sizes = [p.numel() for p in Regressor().parameters()]
    shapes = [p.shape for p in Regressor().parameters()]
    parts = [part.view(shape) for part, shape in zip(vector.split(sizes), shapes, strict=True)]
    run.weights(dict(zip(model.state_dict(), parts, strict=True)))


@piped(supervised, variant="another model loads its state dict", error=WHOLE_MODEL)
def _(run: Run) -> None:
    _, model = _trained(run)
    other = Regressor()
    other.load_state_dict(model.state_dict())
    run.weights(other.state_dict())


@piped(supervised, variant="weights copied one by one", error=WHOLE_MODEL)
def _(run: Run) -> None:
    _, model = _trained(run)
    other = Regressor()
    with torch.no_grad():
        for old, new in zip(other.parameters(), model.parameters(), strict=True):
            old.copy_(new)
    run.weights(other.state_dict())


@piped(supervised, variant="torch.export of the model", error=WHOLE_MODEL)
def _(run: Run) -> None:
    _, model = _trained(run)
    batch = numbers(5)[4]
    program = torch.export.export(model.eval(), (), batch)
    run.note("evaluation", program.module()(**batch))


@piped(supervised, variant="eager training afterwards", error=WHOLE_MODEL)
def _(run: Run) -> None:
    model, data = Regressor(), numbers(4)
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for batch in data[:2]:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    for batch in data[2:]:
        run.note("loss", model(**batch))


@piped(supervised, variant="the number of parameters", equal=True, error=WHOLE_MODEL)
def _(run: Run) -> None:
    pipe, model = _trained(run)
    assert sum(p.numel() for p in model.parameters()) == 227
    run.weights(pipe.full_state_dict())


@piped(
    supervised, variant="noise that the loop draws", differs="the script adds noise", error=r"same batches"
)
def _(run: Run) -> None:
    torch.manual_seed(100 + run.rank)
    data = numbers(2)
    pipe = fxpipe.compile(Regressor(), few(data[0]), **run.options)
    for batch in data:
        run.note("loss", pipe.step(batch | {"x": batch["x"] + 0.1 * torch.randn(BATCH, INPUTS)}))


@piped(
    supervised, variant="model.double() after compile", equal=True, error=r"dtype|synchronize|full_state_dict"
)
def _(run: Run) -> None:
    model, data = Regressor(), numbers(4)
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    model.double().to("cpu").train()
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for batch in data:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


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
