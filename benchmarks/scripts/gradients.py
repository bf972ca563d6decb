"""What scripts do with gradients before they step: clip, add up, scale, log, add noise."""

from __future__ import annotations

import math

import torch
from torch import nn

import fxpipe
from benchmarks.scripts.models import (
    Regressor,
    numbers,
)
from benchmarks.scripts.script import BY_RANK, EVERYWHERE, WHOLE_MODEL, Run, few, piped, plain


@plain
def clipping(run: Run) -> None:
    model = Regressor()
    opt = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for batch in numbers(4):
        loss = model(**batch)
        loss.backward()
        run.note("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(model.state_dict())


@piped(clipping, *EVERYWHERE)
def _(run: Run) -> None:
    data = numbers(4)
    pipe = fxpipe.compile(Regressor(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.5, momentum=0.9, clip_grad_norm=0.1)
    for batch in data:
        loss = pipe.step(run.rows(batch))
        opt.step()
        run.note("norm", opt.last_norm)
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(pipe.full_state_dict())


@piped(clipping, *EVERYWHERE, variant="torch's clip_grad_norm_ stays", error=r"clip_grad_norm=")
def _(run: Run) -> None:
    model, data = Regressor(), numbers(4)
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.5, momentum=0.9)
    for batch in data:
        loss = pipe.step(run.rows(batch))
        run.note("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(pipe.full_state_dict())


@piped(clipping, variant="a norm by hand", error=r"clip_grad_norm=")
def _(run: Run) -> None:
    model, data = Regressor(), numbers(4)
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.5, momentum=0.9)
    for batch in data:
        run.note("loss", pipe.step(batch))
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        for gradient in gradients:
            gradient.mul_((0.1 / (norm + 1e-6)).clamp(max=1.0))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


@plain
def clipping_of_values(run: Run) -> None:
    model = Regressor()
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    for batch in numbers(3):
        loss = model(**batch)
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.02)
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(model.state_dict())


@piped(clipping_of_values, equal=True, error=r"gradient")
def _(run: Run) -> None:
    model, data = Regressor(), numbers(3)
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.5)
    for batch in data:
        loss = pipe.step(batch)
        nn.utils.clip_grad_value_(model.parameters(), 0.02)
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(pipe.full_state_dict())


@plain
def accumulation(run: Run) -> None:
    model = Regressor()
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)
    data = numbers(6)
    for i in range(0, 6, 2):
        for batch in data[i : i + 2]:
            loss = model(**batch)
            loss.backward()
            run.note("loss", loss)
        opt.step()
        opt.zero_grad()
    run.weights(model.state_dict())


@piped(accumulation, *EVERYWHERE)
def _(run: Run) -> None:
    data = numbers(6)
    pipe = fxpipe.compile(Regressor(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for i in range(0, 6, 2):
        for batch in data[i : i + 2]:
            run.note("loss", pipe.step(run.rows(batch)))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


@plain
def accumulation_of_means(run: Run) -> None:
    model = Regressor()
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    data = numbers(6)
    for i in range(0, 6, 2):
        for batch in data[i : i + 2]:
            loss = model(**batch) / 2
            loss.backward()
            run.note("loss", loss)
        opt.step()
        opt.zero_grad()
    run.weights(model.state_dict())


@piped(accumulation_of_means)
def _(run: Run) -> None:
    data = numbers(6)
    pipe = fxpipe.compile(Regressor(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.5)
    for i in range(0, 6, 2):
        for batch in data[i : i + 2]:
            run.note("loss", pipe.step(batch) / 2)
        for group in opt.param_groups:
            for parameter in group["params"]:
                parameter.grad /= 2
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


@piped(accumulation_of_means, variant="(loss / 2).backward() stays", error=r"backward has run|opt\.step")
def _(run: Run) -> None:
    data = numbers(2)
    pipe = fxpipe.compile(Regressor(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.5)
    for batch in data:
        loss = pipe.step(batch) / 2
        loss.backward()
    opt.step()


@plain
def gradients_by_name(run: Run) -> None:
    model = Regressor()
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)
    for batch in numbers(2):
        model(**batch).backward()
        squares = {name: p.grad.square().sum() for name, p in model.named_parameters() if p.grad is not None}
        for name, square in squares.items():
            run.note(f"square {name}", square)
        run.note("norm", sum(squares.values()).sqrt())
        opt.step()
        opt.zero_grad()
    run.weights(model.state_dict())


@piped(gradients_by_name)
def _(run: Run) -> None:
    data = numbers(2)
    pipe = fxpipe.compile(Regressor(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05, clip_grad_norm=math.inf)
    for batch in data:
        pipe.step(batch)
        for stage in pipe.stages:
            for name in stage.parameters:
                if stage.rank == run.rank:
                    run.note(f"square {name}", pipe.parameter(name).grad.square().sum())
        opt.step()
        run.note("norm", opt.last_norm)
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


@piped(gradients_by_name, variant="of model.named_parameters()", warning=r"opt\.grad_norm\(\) is the norm")
def _(run: Run) -> None:
    model, data = Regressor(), numbers(2)
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for batch in data:
        pipe.step(batch)
        squares = {name: p.grad.square().sum() for name, p in model.named_parameters() if p.grad is not None}
        run.note("norm", sum(squares.values()).sqrt())
        opt.step()
        opt.zero_grad()


@plain
def scaled_gradients(run: Run) -> None:
    model = Regressor()
    opt = torch.optim.SGD(model.parameters(), lr=0.3)
    scaler = torch.amp.GradScaler("cpu")
    for batch in numbers(3):
        loss = model(**batch)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(model.state_dict())


@piped(scaled_gradients, variant="scale(loss).backward()", error=r"backward has run|GradScaler|bfloat16")
def _(run: Run) -> None:
    data = numbers(3)
    pipe = fxpipe.compile(Regressor(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.3)
    scaler = torch.amp.GradScaler("cpu")
    for batch in data:
        loss = pipe.step(batch)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()


@piped(scaled_gradients, "2", "4", variant="scaler.step(opt)", error=r"GradScaler")
def _(run: Run) -> None:
    data = numbers(3)
    pipe = fxpipe.compile(Regressor(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.3)
    scaler = torch.amp.GradScaler("cpu")
    for batch in data:
        run.note("loss", pipe.step(batch))
        scaler.scale(torch.ones(()))
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


@piped(scaled_gradients, variant="unscale_ of torch's optimizer", error=r"GradScaler")
def _(run: Run) -> None:
    model, data = Regressor(), numbers(3)
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    opt = torch.optim.SGD(model.parameters(), lr=0.3)
    scaler = torch.amp.GradScaler("cpu")
    for batch in data:
        run.note("loss", pipe.step(batch))
        scaler.scale(torch.ones(()))
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


@plain
def noisy_gradients(run: Run) -> None:
    model = Regressor()
    opt = torch.optim.SGD(model.parameters(), lr=0.3)
    torch.manual_seed(5)
    for batch in numbers(3):
        loss = model(**batch)
        loss.backward()
        for p in model.parameters():
            p.grad.add_(torch.randn_like(p), alpha=0.01)
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(model.state_dict())


@piped(noisy_gradients, "2", "4", variant="of the parameters that have one", error=BY_RANK)
def _(run: Run) -> None:
    model, data = Regressor(), numbers(3)
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.3)
    torch.manual_seed(5)
    for batch in data:
        run.note("loss", pipe.step(batch))
        for p in model.parameters():
            if p.grad is not None:
                p.grad.add_(torch.randn_like(p), alpha=0.01)
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


@plain
def normalized_gradients(run: Run) -> None:
    model = Regressor()
    opt = torch.optim.SGD(model.parameters(), lr=0.3)
    for batch in numbers(3):
        loss = model(**batch)
        loss.backward()
        for p in model.parameters():
            p.grad.div_(p.grad.norm() + 1e-6)
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(model.state_dict())


@piped(normalized_gradients, variant="each by itself", equal=True, error=BY_RANK)
def _(run: Run) -> None:
    model, data = Regressor(), numbers(3)
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.3)
    for batch in data:
        run.note("loss", pipe.step(batch))
        for p in model.parameters():
            if p.grad is not None:
                p.grad.div_(p.grad.norm() + 1e-6)
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


@plain
def hooks_on_gradients(run: Run) -> None:
    model = Regressor()
    for p in model.body[0].parameters():
        p.register_hook(lambda grad: 0.1 * grad)
    opt = torch.optim.SGD(model.parameters(), lr=0.3)
    for batch in numbers(3):
        loss = model(**batch)
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(model.state_dict())


@piped(hooks_on_gradients, "2", "4")
def _(run: Run) -> None:
    model, data = Regressor(), numbers(3)
    for p in model.body[0].parameters():
        p.register_hook(lambda grad: 0.1 * grad)
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.3)
    for batch in data:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


@piped(hooks_on_gradients, variant="after compile", error=rf"hook|{WHOLE_MODEL}")
def _(run: Run) -> None:
    model, data = Regressor(), numbers(3)
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    for p in model.body[0].parameters():
        p.register_hook(lambda grad: 0.1 * grad)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.3)
    for batch in data:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())
