"""Losses and forwards that take the rows of a batch together, by their place or by turns: what a microbatch
has of these is not what a batch has."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from benchmarks.scripts.models import INPUTS, OUTPUTS, WIDTH, WORDS, Mlp, classes, numbers
from benchmarks.scripts.script import BATCH, Run, few, piped, plain

Batches = list[dict[str, Tensor]]
OTHER = "of which fxpipe cannot take the whole batch's"
BY_PLACE, TURNS = "takes some rows by their place", "which the forward changes"


def rows(
    name: str, model: Callable[[int], nn.Module], data: Callable[[], Batches], told: str = "", **options: Any
) -> None:
    """Register a script of the ordinary loop.

    model: of the number of rows that its forward gets.  told: a pattern of the warning with which it may have
    other numbers.  options: of ``compile``.
    """

    def train(run: Run, step: Callable[[dict[str, Tensor]], Tensor], opt: torch.optim.Optimizer) -> None:
        for batch in data():
            run.note("loss", step(batch))
            opt.step()
            opt.zero_grad()

    def reference(run: Run) -> None:
        network, loss_fn = model(BATCH), options.get("loss_fn")

        def step(batch: dict[str, Tensor]) -> Tensor:
            loss = network(**batch) if loss_fn is None else loss_fn(network(batch["x"]), batch)
            loss.backward()
            return loss.detach()

        train(run, step, torch.optim.SGD(network.parameters(), lr=0.1))
        run.weights({k: v for k, v in network.state_dict().items() if k != "hidden"})

    def script(run: Run) -> None:
        example = few(data()[0])
        pipe = fxpipe.compile(model(len(next(iter(example.values())))), example, **run.options | options)
        train(run, pipe.step, pipe.optimizer(torch.optim.SGD, lr=0.1))
        run.weights({k: v for k, v in (pipe.full_state_dict() or {}).items() if k != "hidden"})

    reference.__name__ = name
    piped(plain(reference), warning=told)(script)


class Net(nn.Module):
    """A model with the loss in ``loss``."""

    def __init__(self, loss: Callable[..., Tensor], outputs: int = OUTPUTS) -> None:
        super().__init__()
        self.body, self.loss = Mlp(outputs=outputs), loss

    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        return self.loss(self, x, **others)


class Outputs(nn.Module):
    """Gives what a loss function takes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def of(loss: Callable[..., Tensor]) -> Callable[[int], nn.Module]:
    return lambda count: Net(loss)


def _labelled_half(net: Net, x: Tensor, labels: Tensor) -> Tensor:
    """As FixMatch: labels for the first half of the rows."""
    output, half = net.body(x), len(x) // 2
    sure, guess = output[half:].detach().softmax(-1).max(-1)
    others = F.cross_entropy(output[half:], guess, reduction="none") * (sure > 0.3)
    return F.cross_entropy(output[:half], labels[:half]) + others.mean()


def _two_views(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """As SimCLR, where the loop has put both views of all pictures into one batch."""
    one, other = F.normalize(net.body(x)).chunk(2)
    return (2 - 2 * (one * other).sum(-1)).mean()


def _views_of_rows(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """The same with views that the forward puts together."""
    return _two_views(net, torch.cat([x, x.sin()]), y)


def _pairs(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """As models of rewards: each second row is what was rejected."""
    scores = net.body(x)[:, 0]
    return -F.logsigmoid(scores[0::2] - scores[1::2]).mean()


def _feature_errors(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """The mean of the root mean square errors of several columns."""
    return F.mse_loss(net.body(x), y, reduction="none").mean(0).sqrt().mean()


def _dice(net: Net, x: Tensor, labels: Tensor) -> Tensor:
    """Of each class."""
    shares, wanted = net.body(x).softmax(-1), F.one_hot(labels, OUTPUTS).double()
    return 1 - ((2 * (shares * wanted).sum(0) + 1) / (shares.sum(0) + wanted.sum(0) + 1)).mean()


def _with_prior(net: Net, x: Tensor, labels: Tensor) -> Tensor:
    """Logits adjusted by how often the batch has each class."""
    counts = torch.bincount(labels, minlength=OUTPUTS)
    return F.cross_entropy(net.body(x) + (counts + 1).log(), labels)


def _relativistic(net: Net, x: Tensor, y: Tensor) -> Tensor:
    real, fake = net.body(x).mean(1), net.body(x + 1).mean(1)
    return F.softplus(fake.mean() - real).mean() + F.softplus(fake - real.mean()).mean()


def _inner_step(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """As MAML, with one task in a batch."""
    *layers, last = net.body
    hidden = x
    for layer in layers:
        hidden = layer(hidden)
    slope, *_ = torch.autograd.grad(F.mse_loss(last(hidden), y), last.weight, create_graph=True)
    return F.mse_loss(F.linear(hidden, last.weight - 0.5 * slope, last.bias), y)


def _moved(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """Along the gradient of the mean, whose size follows the number of rows."""
    x = x.detach().requires_grad_()
    slope, *_ = torch.autograd.grad(F.mse_loss(net.body(x), y), x)
    return F.mse_loss(net.body((x + 5 * slope).detach()), y)


def _by_labels(net: Net, x: Tensor, labels: Tensor) -> Tensor:
    """As adversarial training: along the sign of such a gradient."""
    x = x.detach().requires_grad_()
    slope, *_ = torch.autograd.grad(F.cross_entropy(net.body(x), labels), x)
    return F.cross_entropy(net.body((x + 0.1 * slope.sign()).detach()), labels)


rows("moved by gradients", of(_moved), lambda: numbers(3), "gradient of a mean over the rows")
rows("moved by signs", of(_by_labels), lambda: classes(3))
rows("labelled half", of(_labelled_half), lambda: classes(3), BY_PLACE)
rows("two views in a batch", of(_two_views), lambda: numbers(3), BY_PLACE)
rows("two views of each row", of(_views_of_rows), lambda: numbers(3))
rows("pairs of neighbours", of(_pairs), lambda: numbers(3))
rows("errors of columns", of(_feature_errors), lambda: numbers(3), OTHER)
rows("dice of classes", of(_dice), lambda: classes(3), OTHER)
rows("adjusted logits", of(_with_prior), lambda: classes(3), OTHER)
rows("relativistic", of(_relativistic), lambda: numbers(3), OTHER)
rows("inner step", of(_inner_step), lambda: numbers(3), OTHER)


class TimeFirst(nn.Module):
    """As torch's modules take sequences by default: [length, rows]."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(self.table(x))).flatten(0, 1), y.flatten())


class RecurrentTimeFirst(TimeFirst):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.GRU(WIDTH, WIDTH), First())


class First(nn.Module):
    def forward(self, results: tuple[Tensor, Tensor]) -> Tensor:
        return results[0]


def _sequences() -> Batches:
    draw = torch.Generator().manual_seed(3)
    return [{k: torch.randint(WORDS, (BATCH, 3), generator=draw) for k in "xy"} for _ in range(3)]


rows("sequences along the rows", lambda count: TimeFirst(), _sequences, "makes each row of several")
rows("recurrent along the rows", lambda count: RecurrentTimeFirst(), _sequences, BY_PLACE)


class Annealed(nn.Module):
    """Divides logits by a temperature that follows a counter of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp()
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return F.mse_loss(self.body(x) / torch.clamp(0.9**self.calls, min=0.1), y)


class Following(nn.Module):
    """A teacher that follows within the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp()
        self.teacher = copy.deepcopy(self.body).requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.body.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
            target = self.teacher(x + 0.1)
        output = self.body(x)
        return F.mse_loss(output, y) + F.mse_loss(output, target)


class Centered(nn.Module):
    """As DINO: a running center of the teacher's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp()
        self.register_buffer("center", torch.zeros(1, OUTPUTS))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        output = self.body(x)
        target = ((output.detach() - self.center) / 0.1).softmax(-1)
        self.center = 0.9 * self.center + 0.1 * output.detach().mean(0, keepdim=True)
        return -(target * F.log_softmax(output / 0.2, -1)).sum(-1).mean()


class Carried(nn.Module):
    """The hidden state of each row goes on in the next batch."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(INPUTS, WIDTH), nn.Linear(WIDTH, OUTPUTS)
        self.register_buffer("hidden", torch.zeros(count, WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.cell(x, self.hidden)
        self.hidden = hidden.detach()
        return F.mse_loss(self.head(hidden), y)


rows("counted in a buffer", lambda count: Annealed(), lambda: numbers(3), TURNS)
rows("follows in the forward", lambda count: Following(), lambda: numbers(3), TURNS)
rows("running center", lambda count: Centered(), lambda: numbers(3), TURNS)
rows("hidden states", Carried, lambda: numbers(3), "keeps a part for each row")


def _clamped(count: int) -> nn.Module:
    net = Net(lambda net, x, y: F.mse_loss(net.body(x), y))
    for parameter in net.parameters():
        parameter.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    return net


rows("clamped by hooks", _clamped, lambda: numbers(3), "hook of the gradient of .* is no linear function")


def _normalized(net: Net, x: Tensor, y: Tensor) -> Tensor:
    output = net.body(x)
    output.register_hook(lambda grad: grad / (grad.norm() + 1e-6))
    return F.mse_loss(output, y)


rows("normalized by a hook", of(_normalized), lambda: numbers(3), "number of the gradients of all rows")


def _by_a_leaf(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(output, batch["y"], reduction="sum") / batch["number"]


def _with_number(dtype: torch.dtype) -> Batches:
    return [batch | {"number": torch.tensor(BATCH + i, dtype=dtype)} for i, batch in enumerate(numbers(3))]


rows(
    "a sum by a number of the batch",
    lambda count: Outputs(),
    lambda: _with_number(torch.float64),
    loss_fn=_by_a_leaf,
)


def _puts(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    batch["guess"] = output.detach()
    return F.mse_loss(output, batch["y"])


@plain
def results_in_the_batch(run: Run) -> None:
    model = Outputs()
    for batch in numbers(2):
        _puts(model(batch["x"]), batch).backward()
        run.note("guess", batch["guess"])


@piped(results_in_the_batch, warning="puts 'guess' into its microbatch")
def _(run: Run) -> None:
    data = numbers(2)
    pipe = fxpipe.compile(Outputs(), few(data[0]), loss_fn=_puts, **run.options)
    for batch in data:
        pipe.step(batch)
        run.note("guess", batch.get("guess", torch.zeros(())))


class InPlace(nn.Module):
    """Normalizes what it gets, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x -= x.mean(1, keepdim=True)
        x *= 2
        return F.mse_loss(self.body(x), y)


rows("written batches", lambda count: InPlace(), lambda: [*numbers(1) * 2], "batch, which stays as it was")


@plain
def cast_around_the_step(run: Run) -> None:
    model, data = Outputs().float(), [{k: v.float() for k, v in batch.items()} for batch in numbers(2)]
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in data:
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(model(batch["x"]).float(), batch["y"])
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(model.state_dict())


@piped(cast_around_the_step, warning="runs as it was compiled, without casts")
def _(run: Run) -> None:
    data = [{k: v.float() for k, v in batch.items()} for batch in numbers(2)]
    pipe = fxpipe.compile(
        Outputs().float(), few(data[0]), loss_fn=lambda o, b: F.mse_loss(o.float(), b["y"]), **run.options
    )
    opt = pipe.optimizer(torch.optim.SGD, lr=0.1)
    for batch in data:
        with torch.autocast("cpu", torch.bfloat16):
            run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())
