"""A number that the script changes between two steps, in each place where losses read such numbers.

Numbers that Python reads are fixed when a model is compiled: the next step follows, warns or ends.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import types
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from benchmarks.scripts.models import Classifier, Mlp, numbers
from benchmarks.scripts.script import MICROBATCHES, Run, few, microbatches, piped, plain

BEFORE, AFTER, CHANGED_AT = 0.1, 0.7, 2

Loss = Callable[[Tensor, dict[str, Tensor]], Tensor]


@plain
def changed_number(run: Run) -> None:
    model = Classifier()
    opt = torch.optim.SGD(model.parameters(), lr=0.2)
    number = BEFORE
    for step, batch in enumerate(numbers(4)):
        if step == CHANGED_AT:
            number = AFTER
        loss = weighted(model(batch["x"]), batch, number)
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(model.state_dict())


def weighted(output: Tensor, batch: dict[str, Tensor], number: float | Tensor) -> Tensor:
    return F.mse_loss(output, batch["y"]) + number * output.square().mean()


class Free(Classifier):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.body(x)


def place(name: str, *, error: str = r"was|changed|compile again", warning: str = r"was|changed") -> Callable:
    """Register a variant: a function that returns the loss and what changes its number."""

    def register(make: Callable[[], tuple[Loss, Callable[[], None]]]) -> None:
        def script(run: Run) -> None:
            data = numbers(4)
            loss_fn, change = make()
            model = Free()
            pipe = fxpipe.compile(model, few(data[0]), **run.options, loss_fn=loss_fn)
            opt = pipe.optimizer(torch.optim.SGD, lr=0.2)
            for step, batch in enumerate(data):
                if step == CHANGED_AT:
                    change()
                run.note("loss", pipe.step(batch))
                opt.step()
                opt.zero_grad()
            run.weights(pipe.full_state_dict())

        piped(changed_number, variant=name, equal=True, error=error, warning=warning)(script)

    return register


@piped(changed_number, "2", "4", variant="in the batch", equal=True)
def _(run: Run) -> None:
    data = numbers(4)
    number = torch.tensor(BEFORE)
    pipe = fxpipe.compile(
        Leaf(),
        few(data[0]) | {"number": number},
        **run.options,
        loss_fn=lambda output, batch: weighted(output, batch, batch["number"]),
    )
    opt = pipe.optimizer(torch.optim.SGD, lr=0.2)
    for step, batch in enumerate(data):
        if step == CHANGED_AT:
            number = torch.tensor(AFTER)
        run.note("loss", pipe.step(batch | {"number": number}))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


class Leaf(Classifier):
    def forward(self, x: Tensor, y: Tensor, number: Tensor) -> Tensor:
        return self.body(x)


@place("a variable of a closure")
def _():
    number = BEFORE

    def change() -> None:
        nonlocal number
        number = AFTER

    return lambda output, batch: weighted(output, batch, number), change


GLOBAL = BEFORE


@piped(
    changed_number,
    variant="a closure, and no name for the model",
    equal=True,
    error=r"number",
    warning=r"number",
)
def _(run: Run) -> None:
    data = numbers(4)
    number = BEFORE
    pipe = fxpipe.compile(
        Free(), few(data[0]), **run.options, loss_fn=lambda output, batch: weighted(output, batch, number)
    )
    opt = pipe.optimizer(torch.optim.SGD, lr=0.2)
    for step, batch in enumerate(data):
        if step == CHANGED_AT:
            number = AFTER
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


@place("a global")
def _():
    global GLOBAL
    GLOBAL = BEFORE

    def change() -> None:
        global GLOBAL
        GLOBAL = AFTER

    return lambda output, batch: weighted(output, batch, GLOBAL), change


ARGUMENTS = argparse.Namespace(number=BEFORE)


@place("arguments of the command line")
def _():
    ARGUMENTS.number = BEFORE
    return (
        lambda output, batch: weighted(output, batch, ARGUMENTS.number),
        lambda: setattr(ARGUMENTS, "number", AFTER),
    )


@place("a simple namespace in a dict")
def _():
    settings = {"loss": types.SimpleNamespace(number=BEFORE)}
    return (
        lambda output, batch: weighted(output, batch, settings["loss"].number),
        lambda: setattr(settings["loss"], "number", AFTER),
    )


class Scaled(torch.autograd.Function):
    """Scales the gradient by an attribute of its class, as losses of experts do."""

    scale = BEFORE

    @staticmethod
    def forward(ctx, output):
        ctx.save_for_backward(output)
        return output.square().mean()

    @staticmethod
    def backward(ctx, gradient):
        (output,) = ctx.saved_tensors
        return gradient * Scaled.scale * 2 * output / output.numel()


@plain
def scale_of_a_backward(run: Run) -> None:
    model = Classifier()
    opt = torch.optim.SGD(model.parameters(), lr=0.2)
    Scaled.scale = BEFORE
    for step, batch in enumerate(numbers(4)):
        if step == CHANGED_AT:
            Scaled.scale = AFTER
        output = model(batch["x"])
        loss = F.mse_loss(output, batch["y"]) + Scaled.apply(output)
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(model.state_dict())


def _scaled(run: Run, change: Callable[[], None]) -> None:
    data = numbers(4)
    Scaled.scale = BEFORE
    model = Free()
    pipe = fxpipe.compile(
        model,
        few(data[0]),
        **run.options,
        loss_fn=lambda output, batch: F.mse_loss(output, batch["y"]) + Scaled.apply(output),
    )
    opt = pipe.optimizer(torch.optim.SGD, lr=0.2)
    for step, batch in enumerate(data):
        if step == CHANGED_AT:
            change()
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


@piped(scale_of_a_backward, variant="a float of the class", equal=True, error=r"scale", warning=r"scale")
def _(run: Run) -> None:
    _scaled(run, lambda: setattr(Scaled, "scale", AFTER))


@piped(scale_of_a_backward, variant="a tensor takes its place", equal=True, error=r"scale", warning=r"scale")
def _(run: Run) -> None:
    _scaled(run, lambda: setattr(Scaled, "scale", torch.tensor(AFTER)))


class Holder:
    number = BEFORE

    @staticmethod
    def term(output: Tensor) -> Tensor:
        return Holder.number * output.square().mean()

    @classmethod
    def named(cls, output: Tensor) -> Tensor:
        return cls.number * output.square().mean()


@place("an attribute of a class, in a static method")
def _():
    Holder.number = BEFORE
    return (
        lambda output, batch: F.mse_loss(output, batch["y"]) + Holder.term(output),
        lambda: setattr(Holder, "number", AFTER),
    )


@place("an attribute of a class, in a class method")
def _():
    Holder.number = BEFORE
    return (
        lambda output, batch: F.mse_loss(output, batch["y"]) + Holder.named(output),
        lambda: setattr(Holder, "number", AFTER),
    )


class Term:
    """An object that the loss makes in each step."""

    def __init__(self) -> None:
        self.number = Holder.number

    def __call__(self, output: Tensor) -> Tensor:
        return self.number * output.square().mean()


@place("a constructor that reads an attribute of a class")
def _():
    Holder.number = BEFORE
    return (
        lambda output, batch: F.mse_loss(output, batch["y"]) + Term()(output),
        lambda: setattr(Holder, "number", AFTER),
    )


@place("an environment variable")
def _():
    os.environ["NUMBER_OF_THE_LOSS"] = str(BEFORE)

    def change() -> None:
        os.environ["NUMBER_OF_THE_LOSS"] = str(AFTER)

    return (
        lambda output, batch: weighted(output, batch, float(os.environ["NUMBER_OF_THE_LOSS"])),
        change,
    )


@place("a tensor of a closure, filled")
def _():
    number = torch.tensor(BEFORE)
    return lambda output, batch: weighted(output, batch, number), lambda: number.fill_(AFTER) and None


@place("a tensor of a closure, read as a number")
def _():
    number = torch.tensor(BEFORE)
    return lambda output, batch: weighted(output, batch, number.item()), lambda: number.fill_(AFTER)


@place("a tensor of a list, replaced")
def _():
    values = [torch.tensor(BEFORE)]
    return (
        lambda output, batch: weighted(output, batch, values[0]),
        lambda: values.__setitem__(0, torch.tensor(AFTER)),
    )


@place("a partial function")
def _():
    loss = functools.partial(weighted, number=BEFORE)
    return loss, lambda: loss.keywords.update(number=AFTER)


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.number = BEFORE

    def forward(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return weighted(output, batch, self.number)


@place("an attribute of a criterion")
def _():
    criterion = Criterion()
    return criterion, lambda: setattr(criterion, "number", AFTER)


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("number", torch.tensor(BEFORE))

    def forward(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return weighted(output, batch, self.number)


@place("a buffer of a criterion", error=r"buffer|number", warning=r"number|constant")
def _():
    criterion = Buffered()
    return criterion, lambda: criterion.number.fill_(AFTER) and None


@dataclass(frozen=True)
class Settings:
    number: float


class Scheduled:
    """A schedule of a coefficient, as callbacks of trainers have them."""

    def __init__(self) -> None:
        self.settings, self.history = Settings(BEFORE), [BEFORE]

    def advance(self) -> None:
        self.settings = replace(self.settings, number=AFTER)
        self.history.append(AFTER)


@place("frozen settings that are replaced")
def _():
    schedule = Scheduled()
    return lambda output, batch: weighted(output, batch, schedule.settings.number), schedule.advance


@place("the last of a list")
def _():
    schedule = Scheduled()
    return lambda output, batch: weighted(output, batch, schedule.history[-1]), schedule.advance


@place("the rate of another optimizer")
def _():
    other = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=BEFORE)
    return (
        lambda output, batch: weighted(output, batch, other.param_groups[0]["lr"]),
        lambda: other.param_groups[0].update(lr=AFTER),
    )


class Counting(nn.Module):
    """Anneals by a counter of its own calls, in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.calls = Mlp(), 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return weighted(self.body(x), {"y": y}, math.exp(-0.2 * self.calls))


class CountingBuffer(nn.Module):
    """The same in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp()
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return weighted(self.body(x), {"y": y}, (-0.2 * self.calls).exp())


@plain
def counted_calls(run: Run) -> None:
    model = Counting()
    opt = torch.optim.SGD(model.parameters(), lr=0.2)
    for batch in numbers(3):
        losses = [model(**rows) / MICROBATCHES for rows in microbatches(batch)]
        sum(losses).backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", sum(losses))
    run.weights(model.state_dict())


def _counted(run: Run, model: nn.Module) -> None:
    data = numbers(3)
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.2)
    for batch in data:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


@piped(counted_calls, "2", "4", variant="a buffer", equal=True)
def _(run: Run) -> None:
    _counted(run, CountingBuffer())


@piped(counted_calls, variant="a Python counter", warning=r"other ops|calls", error=r"calls")
def _(run: Run) -> None:
    _counted(run, Counting())


@plain
def trained_criterion(run: Run) -> None:
    model, criterion = Classifier(), Uncertain()
    opt = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.2)
    for batch in numbers(3):
        loss = criterion(model(batch["x"]), batch)
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(model.state_dict(), "model")
    run.note("scale", criterion.scale)


class Uncertain(nn.Module):
    """Learns the scale of its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(output, batch["y"]) * (-self.scale).exp() + self.scale


class WithCriterion(nn.Module):
    def __init__(self, model: nn.Module, criterion: nn.Module) -> None:
        super().__init__()
        self.model, self.criterion = model, criterion

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.criterion(self.model(x), {"y": y})


@piped(trained_criterion, "2", "4", variant="in one module with the model", equal=True)
def _(run: Run) -> None:
    data = numbers(3)
    pipe = fxpipe.compile(WithCriterion(Classifier(), Uncertain()), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.2)
    for batch in data:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    state = pipe.full_state_dict()
    run.weights({k.removeprefix("model."): v for k, v in state.items() if k.startswith("model.")}, "model")
    if state:
        run.note("scale", state["criterion.scale"])


@piped(trained_criterion, "2", variant="as loss_fn", error=r"loss function Uncertain trains .*one nn\.Module")
def _(run: Run) -> None:
    data = numbers(3)
    criterion = Uncertain()
    pipe = fxpipe.compile(Free(), few(data[0]), **run.options, loss_fn=criterion)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.2)
    for batch in data:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict(), "model")
    run.note("scale", criterion.scale)
