"""What loops log and keep beside the loss: numbers that a forward or a loss function leaves in attributes and
meters, results and gradients of earlier steps, gradients of inputs."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from benchmarks.scripts.models import Mlp, Regressor, numbers
from benchmarks.scripts.script import Run, few, piped, plain


class Noted(nn.Module):
    """Leaves the square of its output in an attribute, as models do with an auxiliary loss."""

    def __init__(self, first: object = 0.0) -> None:
        super().__init__()
        self.body, self.penalty, self.stats = Mlp(), first, {}

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        output = self.body(x)
        self.penalty = output.square().mean()
        self.stats["largest"] = output.detach().abs().mean()
        return output


def _loss(model: Noted, output: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(output, y) + 0.1 * model.penalty


@plain
def left_in_attributes(run: Run) -> None:
    model = Noted()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in numbers(3):
        loss = _loss(model, model(**batch), batch["y"])
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
        run.note("penalty", model.penalty)
        run.note("largest", model.stats["largest"])
    run.weights(model.state_dict())


def _left(run: Run, model: Noted, what: str = "", **options: Any) -> None:
    data = numbers(3)
    pipe = fxpipe.compile(
        model, few(data[0]), loss_fn=lambda o, b: _loss(model, o, b["y"]), **(run.options | options)
    )
    opt = pipe.optimizer(torch.optim.SGD, lr=0.1)
    for batch in data:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
        if what == "penalty":
            run.note("penalty", model.penalty)
        if what == "stats":
            run.note("largest", model.stats.get("largest", -1.0))
    run.weights(pipe.full_state_dict())


@piped(left_in_attributes, variant="read by the loss function")
def _(run: Run) -> None:
    _left(run, Noted())


@piped(left_in_attributes, variant="a number first, read by the loop", warning="leaves a tensor")
def _(run: Run) -> None:
    _left(run, Noted(), "penalty")


@piped(left_in_attributes, variant="a tensor first, read by the loop", warning="leaves a tensor")
def _(run: Run) -> None:
    _left(run, Noted(torch.zeros(())), "penalty")


@piped(left_in_attributes, variant="a dict, read by the loop", warning="leaves a tensor")
def _(run: Run) -> None:
    model = Noted()
    model(**numbers(1)[0])
    _left(run, model, "stats")


class Meter:
    """A mean of numbers."""

    def __init__(self) -> None:
        self.sum = self.count = 0.0

    def update(self, value: float, n: int = 1) -> None:
        self.sum += value * n
        self.count += n

    @property
    def avg(self) -> float:
        return self.sum / max(self.count, 1)


@plain
def meters(run: Run) -> None:
    model, meter = Regressor(), Meter()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in numbers(3):
        loss = F.mse_loss(model.body(batch["x"]), batch["y"])
        meter.update(loss.item(), len(batch["x"]))
        loss.backward()
        opt.step()
        opt.zero_grad()
    run.note("mean", meter.avg)
    run.weights(model.state_dict())


class Bare(Regressor):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.body(x)


def _metered(run: Run, loss_fn: Any, mean: Any) -> None:
    data = numbers(3)
    pipe = fxpipe.compile(Bare(), few(data[0]), loss_fn=loss_fn, **run.options)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.1)
    for batch in data:
        pipe.step(batch)
        opt.step()
        opt.zero_grad()
    run.note("mean", mean())
    run.weights(pipe.full_state_dict())


@piped(meters, variant="item() in the loss function", error=r"keep it a tensor")
def _(run: Run) -> None:
    meter = Meter()

    def loss_fn(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        loss = F.mse_loss(output, batch["y"])
        meter.update(loss.item(), len(output))
        return loss

    _metered(run, loss_fn, lambda: meter.avg)


@piped(meters, variant="tensors in a list of the loss function", warning="leaves a tensor")
def _(run: Run) -> None:
    kept: list[Tensor] = []

    def loss_fn(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        loss = F.mse_loss(output, batch["y"])
        kept.append(loss.detach())
        return loss

    _metered(run, loss_fn, lambda: sum(kept) / max(len(kept), 1))


@piped(meters, variant="a tensor that the loss function adds to", error="make it a buffer")
def _(run: Run) -> None:
    total = torch.zeros(2)

    def loss_fn(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        loss = F.mse_loss(output, batch["y"])
        total[0] += loss.detach() * len(output)
        total[1] += len(output)
        return loss

    _metered(run, loss_fn, lambda: total[0] / total[1].clamp(min=1))


@piped(meters, variant="a running number of the loss function", warning=r"changes the variable")
def _(run: Run) -> None:
    running = {"mean": 0.0, "n": 0}

    def loss_fn(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        loss = F.mse_loss(output, batch["y"])
        running["n"] += 1
        running["mean"] = running["mean"] + (loss.detach() - running["mean"]) / running["n"]
        return loss

    _metered(run, loss_fn, lambda: running["mean"])


@plain
def kept_results(run: Run) -> None:
    model = Regressor()
    opt = torch.optim.SGD(model.parameters(), lr=0.3)
    losses, norms, evaluations = [], [], []
    for batch in numbers(3):
        loss = model(**batch)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        opt.step()
        opt.zero_grad()
        losses.append(loss.detach())
        with torch.no_grad():
            evaluations.append(model(**batch))
    run.note("losses", *losses)
    run.note("norms", *norms)
    run.note("evaluations", *evaluations)


@piped(kept_results)
def _(run: Run) -> None:
    data = numbers(3)
    pipe = fxpipe.compile(Regressor(), few(data[0]), evaluation=True, **run.options)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.3, clip_grad_norm=0.5)
    losses, norms, evaluations = [], [], []
    for batch in data:
        losses.append(pipe.step(batch))
        opt.step()
        norms.append(opt.last_norm)
        opt.zero_grad()
        evaluations.append(pipe.evaluate(batch))
    run.note("losses", *losses)
    run.note("norms", *norms)
    run.note("evaluations", *evaluations)


@plain
def angle_between_gradients(run: Run) -> None:
    model = Regressor()
    opt = torch.optim.SGD(model.parameters(), lr=0.3)
    before = None
    for batch in numbers(4):
        model(**batch).backward()
        now = {name: p.grad for name, p in model.named_parameters()}
        if before is not None:
            for name, grad in now.items():
                run.note(f"angle {name}", F.cosine_similarity(grad.flatten(), before[name].flatten(), 0))
        before = now
        opt.step()
        opt.zero_grad()


def _angles(run: Run, set_to_none: bool) -> None:
    data, before = numbers(4), None
    pipe = fxpipe.compile(Regressor(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.3)
    for batch in data:
        pipe.step(batch)
        now = {name: p.grad for name, p in pipe.parameters.items() if p.grad is not None}
        if before is not None:
            for name, grad in now.items():
                run.note(f"angle {name}", F.cosine_similarity(grad.flatten(), before[name].flatten(), 0))
        before = now
        opt.step()
        opt.zero_grad(set_to_none=set_to_none)


@piped(angle_between_gradients)
def _(run: Run) -> None:
    _angles(run, True)


@plain
def adversarial_inputs(run: Run) -> None:
    model = Regressor()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in numbers(3):
        x = batch["x"].clone().requires_grad_()
        model(x, batch["y"]).backward()
        opt.zero_grad()
        moved = (x + 0.1 * x.grad.sign()).detach()
        loss = model(moved, batch["y"])
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(model.state_dict())


@piped(adversarial_inputs, variant="x.grad", warning="requires a gradient")
def _(run: Run) -> None:
    data = numbers(3)
    pipe = fxpipe.compile(Regressor(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.1)
    for batch in data:
        x = batch["x"].clone().requires_grad_()
        pipe.step({"x": x, "y": batch["y"]})
        opt.zero_grad()
        moved = (x + 0.1 * x.grad.sign()).detach() if x.grad is not None else x.detach()
        loss = pipe.step({"x": moved, "y": batch["y"]})
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(pipe.full_state_dict())


class Attacked(Regressor):
    """The step of the attack within the forward."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(F.mse_loss(self.body(x), y), x)
        return F.mse_loss(self.body((x + 0.1 * slope.sign()).detach()), y)


@piped(adversarial_inputs, variant="in the forward")
def _(run: Run) -> None:
    data = numbers(3)
    pipe = fxpipe.compile(Attacked(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.1)
    for batch in data:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


@plain
def rolled_back(run: Run) -> None:
    model = Regressor()
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    for i, batch in enumerate(numbers(5)):
        if i == 2:
            kept = copy.deepcopy(model.state_dict()), copy.deepcopy(opt.state_dict())
        loss = model(**batch)
        loss.backward()
        opt.step()
        opt.zero_grad()
        if i == 3:
            model.load_state_dict(kept[0])
            opt.load_state_dict(kept[1])
        run.note("loss", loss)
    run.weights(model.state_dict())


@piped(rolled_back)
def _(run: Run) -> None:
    data = numbers(5)
    pipe = fxpipe.compile(Regressor(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.1)
    for i, batch in enumerate(data):
        if i == 2:
            kept = pipe.full_state_dict(rank=None), copy.deepcopy(opt.state_dict())
        loss = pipe.step(batch)
        opt.step()
        opt.zero_grad()
        if i == 3:
            pipe.load_state_dict(kept[0])
            opt.load_state_dict(kept[1])
        run.note("loss", loss)
    run.weights(pipe.full_state_dict())


@piped(rolled_back, variant="by the rank's tensors")
def _(run: Run) -> None:
    data = numbers(5)
    pipe = fxpipe.compile(Regressor(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.1)
    for i, batch in enumerate(data):
        if i == 2:
            kept = (
                {n: p.detach().clone() for n, p in pipe.parameters.items()},
                copy.deepcopy(opt.state_dict()),
            )
        loss = pipe.step(batch)
        opt.step()
        opt.zero_grad()
        if i == 3:
            with torch.no_grad():
                for n, p in pipe.parameters.items():
                    p.copy_(kept[0][n])
            opt.load_state_dict(kept[1])
        run.note("loss", loss)
    run.weights(pipe.full_state_dict())


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = Mlp(outputs=4), Mlp(2, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mu, logvar = self.down(x).chunk(2, 1)
        return self.up(mu), mu, logvar


def _elbo(outputs: tuple[Tensor, Tensor, Tensor], x: Tensor) -> Tensor:
    again, mu, logvar = outputs
    kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return F.mse_loss(again, x, reduction="sum") + kl


@plain
def variational(run: Run) -> None:
    model = Autoencoder()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in numbers(3):
        loss = _elbo(model(batch["x"]), batch["x"])
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(model.state_dict())


@piped(variational, variant="a sum", warning="sum over rows that nothing divides")
def _(run: Run) -> None:
    data = [{"x": batch["x"]} for batch in numbers(3)]
    pipe = fxpipe.compile(Autoencoder(), few(data[0]), loss_fn=lambda o, b: _elbo(o, b["x"]), **run.options)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.01)
    for batch in data:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp(outputs=1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return -(self.body(x)[:, 0] * y[:, 0].sign()).mean()


@plain
def clamped_weights(run: Run) -> None:
    model = Critic()
    opt = torch.optim.RMSprop(model.parameters(), lr=0.05)
    for batch in numbers(3):
        loss = model(**batch)
        loss.backward()
        opt.step()
        opt.zero_grad()
        for p in model.parameters():
            p.data.clamp_(-0.2, 0.2)
        run.note("loss", loss)
    run.weights(model.state_dict())


def _clamped(run: Run, of: Any) -> None:
    model, data = Critic(), numbers(3)
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.RMSprop, lr=0.05)
    for batch in data:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
        for p in of(model, pipe):
            p.data.clamp_(-0.2, 0.2)
    run.weights(pipe.full_state_dict())


@piped(clamped_weights, variant="of the whole model", error=r"full_state_dict|synchronize")
def _(run: Run) -> None:
    _clamped(run, lambda model, pipe: model.parameters())


@piped(clamped_weights, variant="of the rank")
def _(run: Run) -> None:
    _clamped(run, lambda model, pipe: pipe.parameters.values())


class Normed(nn.Module):
    """Weights by torch's parametrizations."""

    def __init__(self) -> None:
        super().__init__()
        norm = torch.nn.utils.parametrizations.weight_norm
        self.body = nn.Sequential(
            norm(nn.Linear(6, 8)), nn.Tanh(), norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 3)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.body(x), y)


@plain
def weight_norm(run: Run) -> None:
    model = Normed()
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)
    for batch in numbers(3):
        loss = model(**batch)
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(model.state_dict())


@piped(weight_norm)
def _(run: Run) -> None:
    data = numbers(3)
    pipe = fxpipe.compile(Normed(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for batch in data:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


@piped(weight_norm, variant="torch.compile around the model")
def _(run: Run) -> None:
    data = numbers(3)
    pipe = fxpipe.compile(torch.compile(Normed()), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for batch in data:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    run.weights({k.removeprefix("_orig_mod."): v for k, v in (pipe.full_state_dict() or {}).items()})
