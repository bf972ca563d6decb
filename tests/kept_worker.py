"""Models that keep state in plain attributes, trained beside eager PyTorch, also under torchrun."""

from __future__ import annotations

import dataclasses
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from equality import LIMIT, eager_step
from safetensors.torch import save_file
from torch import nn
from zoo import EFFORT, relative_error, too_far

import fxpipe
from fxpipe.plan.attribute_state import kept_slots

WIDTH, LENGTH, ROWS, MICROBATCHES = 4, 3, 2, 3


def batch_of(number: int, rows: int = ROWS * MICROBATCHES) -> tuple[torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return (torch.randn(rows, LENGTH, WIDTH, generator=generator),)


def zeros() -> torch.Tensor:
    return torch.zeros(1, ROWS, WIDTH)


class Recurrent(nn.Module):
    """An LSTM whose state is a tuple, of one tensor at first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        zero = zeros()
        self.keep(zero, zero)

    def keep(self, h, c):
        self.hidden = (h, c)

    def kept(self):
        return self.hidden

    def forward(self, x):
        y, (h, c) = self.lstm(torch.tanh(self.first(x)), self.kept())
        self.keep(h.detach(), c.detach())
        return self.last(y).square().mean()


class State(NamedTuple):
    h: torch.Tensor
    c: torch.Tensor


class InANamedTuple(Recurrent):
    def keep(self, h, c):
        self.hidden = State(h, c)


@dataclasses.dataclass
class Data:
    h: torch.Tensor
    c: torch.Tensor


class InADataClass(Recurrent):
    def keep(self, h, c):
        self.hidden = Data(h, c)

    def kept(self):
        return self.hidden.h, self.hidden.c


class Nested(Recurrent):
    """In a dict of tuples, of which the forward changes a part."""

    def keep(self, h, c):
        if not hasattr(self, "hidden"):
            self.hidden = {"lstm": [None], 3: (1, "a", None)}
        self.hidden["lstm"][0] = h
        self.hidden[3] = (*self.hidden[3][:2], c)

    def kept(self):
        return self.hidden["lstm"][0], self.hidden[3][2]


class DetachedWhenRead(Recurrent):
    """The state has the history of the last step, which the next one does not use."""

    def forward(self, x):
        y, self.hidden = self.lstm(torch.tanh(self.first(x)), tuple(h.detach() for h in self.hidden))
        return self.last(y).square().mean()


class OnTheFirstBatch(DetachedWhenRead):
    def keep(self, h, c):
        self.hidden = None

    def forward(self, x):
        if self.hidden is None:
            self.hidden = zeros(), zeros()
        return super().forward(x)


class WithHistory(Recurrent):
    def forward(self, x):
        y, self.hidden = self.lstm(torch.tanh(self.first(x)), self.hidden)
        return self.last(y).square().mean()


class InTraining(Recurrent):
    """Evaluation reads the state, and does not change it."""

    def keep(self, h, c):
        if self.training:
            super().keep(h, c)


class Memories(nn.Module):
    """A memory for each layer, all replaced at the end of the forward (Transformer-XL)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.memories = [torch.zeros(ROWS, LENGTH, WIDTH) for _ in self.layers]

    def forward(self, x):
        hidden = []
        for layer, memory in zip(self.layers, self.memories, strict=True):
            hidden.append(x)
            x = torch.tanh(layer(torch.cat([memory, x], 1)))[:, -LENGTH:] + memory.mean()
        with torch.no_grad():
            pairs = zip(self.memories, hidden, strict=True)
            self.memories = [torch.cat([old, new], 1)[:, 1 : 1 + LENGTH] for old, new in pairs]
        return x.square().mean()


class Layer(nn.Module):
    """Writes to its average in place, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.average = nn.Linear(WIDTH, WIDTH), torch.zeros(2, WIDTH)
        self.count = torch.tensor(0)

    def forward(self, x):
        with torch.no_grad():
            self.average[0].mul_(0.5).add_(x.mean((0, 1)))
            self.count += 1
        return torch.tanh(self.linear(x)) + self.average[0].clone() / self.count


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(3)))

    def forward(self, x):
        return self.layers(x).square().mean()


class Swaps(nn.Module):
    """Reads a tensor that it did not compute, but moved there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.left, self.right = torch.ones(WIDTH), torch.zeros(WIDTH)

    def forward(self, x):
        y = self.linear(x) + self.left
        self.left, self.right = self.right, self.left
        return y.square().mean()


class Moves(nn.Module):
    """Tensors that move on in a queue, and a teacher's parameters in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.past = deque([torch.full((ROWS, LENGTH, WIDTH), float(k)) for k in range(3)], maxlen=3)
        self.teacher = [p.detach().clone() for p in self.linear.parameters()]

    def forward(self, x):
        with torch.no_grad():
            for old, new in zip(self.teacher, self.linear.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)
        y = self.linear(x) + sum(weight * old for weight, old in enumerate(self.past, 1))
        self.past.append(x.detach())
        return F.mse_loss(torch.tanh(y), F.linear(x, *self.teacher))


def build(model: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return model()


def pipeline(model: nn.Module, **options: Any) -> fxpipe.Pipeline:
    asked = {"ranks": 2, "schedule": "1f1b"} | options
    return fxpipe.compile(model, batch_of(0, ROWS), microbatches=MICROBATCHES, effort=EFFORT, **asked)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """All tensors in attributes, as copies."""
    return {name: slot.get().detach().clone().double() for name, slot in kept_slots(model).items()}


def step_eager(model: nn.Module, number: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A step of eager PyTorch and of SGD."""
    loss, grads = eager_step(model, batch_of(number), MICROBATCHES, None)
    _descend(model, grads)
    return loss, grads


def _descend(model: nn.Module, grads: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter -= 0.3 * grads[name]


def train_beside_eager(pipe: fxpipe.Pipeline, model: nn.Module, expected: nn.Module, steps: int = 3) -> None:
    """Loss, gradients and state of each step."""
    for step in range(steps):
        loss, grads = step_eager(expected, step)
        found = pipe.run_local(batch_of(step), step=step)
        _descend(model, found.grads)
        assert relative_error(found.loss, loss) <= LIMIT
        assert too_far(found.grads, grads, LIMIT) == {}
        assert too_far(state_of(model), state_of(expected), LIMIT) == {}


def main(directory: Path) -> None:
    """On each rank: train, reset the state by hand, and write what the model keeps."""
    model = build(Memories)
    pipe = pipeline(model)
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.3)
    for step in range(3):
        if step == 2:
            model.memories = [torch.ones_like(memory) for memory in model.memories]
        pipe.step(batch_of(step))
        optimizer.step()
        optimizer.zero_grad()
    pipe.synchronize()
    save_file(state_of(model), directory / f"kept.{pipe.model_state.process.rank}.safetensors")
