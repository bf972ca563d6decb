"""Trains with "barrier" and with "post" side by side, where gradients are infinite, NaN, or to be clipped."""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.training.ahead import Ahead

RANKS, MICROBATCHES, ROWS, WIDTH = 4, 6, 2, 4
POKES = (0.0, 0.0, 0.0, 0.0, 30.0, 3e38, math.inf, math.nan)


class _Poke(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, poke: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(poke)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (poke,) = ctx.saved_tensors
        return grad, poke.sum().reshape(1), None


class Poked(nn.Module):
    """The batch says what the gradient of each block's ``scale`` is."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(RANKS))
        self.scales = nn.ParameterList(torch.zeros(1) for _ in range(RANKS))
        self.dropout = nn.Dropout(0.3)
        if tied:
            self.blocks[-1].weight = self.blocks[0].weight

    def forward(self, x: torch.Tensor, y: torch.Tensor, poke: torch.Tensor) -> torch.Tensor:
        for k, (block, scale) in enumerate(zip(self.blocks, self.scales, strict=True)):
            x = _Poke.apply(self.dropout(torch.tanh(block(x))), scale, poke[:, k])
        return F.mse_loss(x, y)


class Drifting(torch.optim.Optimizer):
    """A user's own: its state of a parameter has a list and a number, too."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state.setdefault("steps", 0)
                state.setdefault("seen", []).append(float(p.grad.abs().max() > 1.0))
                state["steps"] += 1
                p.sub_(group["lr"] / state["steps"] * p.grad.sign() * len(state["seen"]))


@dataclass(frozen=True)
class Setting:
    """One run.  ``pokes``: of each step and rank.  ``events``: before a step."""

    optimizer: str
    options: dict[str, Any]
    pokes: tuple[tuple[float, ...], ...]
    events: dict[int, str]
    schedules: bool
    to_none: bool
    accumulates: bool
    seed: int


def setting(seed: int) -> Setting:
    draw = random.Random(seed)
    steps = draw.randint(2, 6)
    rates = {"AdamW": 0.01, "SGD": 0.05, "Drifting": 0.01}
    name = draw.choice([*rates])
    options: dict[str, Any] = {"lr": rates[name]}
    if name == "SGD":
        options["momentum"] = 0.9
    options |= draw.choice(
        [
            {"clip_grad_norm": 1.0},
            {"clip_grad_norm": 20.0},
            {"clip_grad_norm": 20.0, "norm_type": math.inf},
            {"skip_nonfinite": True},
            {"skip_nonfinite": True, "clip_grad_norm": 1.0},
            {"skip_nonfinite": True, "clip_grad_norm": 20.0},
        ]
    )
    wild = draw.random()
    pokes = tuple(
        tuple(draw.choice(POKES) if draw.random() < wild else 0.0 for _ in range(RANKS)) for _ in range(steps)
    )
    kinds = ("evaluate", "state", "norm", "checkpoint", "alike", "rank 1 reads")
    events = {k: draw.choice(kinds) for k in range(1, steps) if draw.random() < 0.25}
    flags = [draw.random() < 0.5 for _ in range(3)]
    return Setting(name, options, pokes, events, flags[0], flags[1], flags[2] and name != "Drifting", seed)


def batch(seed: int, pokes: Sequence[float]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = ROWS * MICROBATCHES
    x, y = (torch.randn(rows, WIDTH, generator=generator) for _ in range(2))
    return {"x": x, "y": y, "poke": torch.tensor(pokes).expand(rows, RANKS) / ROWS}


CLASSES = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD, "Drifting": Drifting}


def train(
    pipe: fxpipe.Pipeline, start: dict[str, torch.Tensor], run: Setting, validation: str
) -> Iterator[Any]:
    """What a user can see, in order."""
    pipe.load_state_dict(start)
    pipe.step_number = 0

    def made() -> Any:
        own = pipe.optimizer(
            CLASSES[run.optimizer],
            groups=[{"params": "scales.*", "lr": 0.0}],
            validation=validation,
            **run.options,
        )
        own.zero_grad(set_to_none=True)
        return own

    optimizer = made()
    for k, pokes in enumerate(run.pokes):
        event = run.events.get(k, "")
        if event == "evaluate":
            yield pipe.evaluate(batch(1, [0.0] * RANKS))
        elif event == "state":
            yield from optimizer.state_dict()["state"].values()
        elif event == "norm":
            yield optimizer.last_norm, optimizer.skipped
        elif event == "alike":
            pipe.check_alike()
        elif event == "rank 1 reads" and pipe.runtime.rank == 1:
            yield optimizer.skipped
        elif event == "checkpoint":
            with tempfile.TemporaryDirectory() as directory:
                (place,) = pipe.process.gather(directory.encode())[:1]
                with fxpipe.Checkpointer(pipe, Path(place.decode()), optimizer=optimizer) as checkpoints:
                    checkpoints.save()
                optimizer = made()
                with fxpipe.Checkpointer(pipe, Path(place.decode()), optimizer=optimizer) as checkpoints:
                    assert checkpoints.resume()
                pipe.process.gather(b"")
        loss = pipe.step(batch(100 * run.seed + k, pokes))
        if run.accumulates and k % 2:
            loss = pipe.step(batch(100 * run.seed + 50 + k, [0.0] * RANKS))
        yield loss
        optimizer.step()
        if run.schedules:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * 0.9
        optimizer.zero_grad(set_to_none=run.to_none)
    if run.optimizer != "Drifting":
        yield optimizer.state_dict()["state"]
    yield optimizer.last_norm, optimizer.skipped
    yield [
        (name, pipe.parameters[name].detach().clone())
        for name in sorted(pipe.artifact.plan.tensors[pipe.runtime.rank].parameters)
    ]


def bits(value: Any) -> Any:
    """A value whose parts are equal if their bits are."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), str(value.dtype), value.detach().contiguous().numpy().tobytes()
    if isinstance(value, dict):
        return [(key, bits(x)) for key, x in value.items()]
    if isinstance(value, list | tuple):
        return [bits(x) for x in value]
    return repr(value)


def compiled(tied: bool, **options: Any) -> tuple[fxpipe.Pipeline, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = Poked(tied)
    start = {name: x.detach().clone() for name, x in model.state_dict().items()}
    example = {name: x[:ROWS] for name, x in batch(0, [0.0] * RANKS).items()}
    given = {"ranks": RANKS, "microbatches": MICROBATCHES, "schedule": "zb-h1", "effort": 0.02} | options
    return fxpipe.compile(model, example, evaluation=True, **given), start


def check(numbers: Sequence[int], tied: bool, options: dict[str, Any]) -> int:
    """Returns an exit code; prints what differs, and how often an update was taken back."""
    pipe, start = compiled(tied, **options)
    taken, before = [0], Ahead.taken_back

    def counted(ahead: Ahead, *arguments: Any) -> Any:
        taken[0] += 1
        return before(ahead, *arguments)

    Ahead.taken_back = counted  # type: ignore[method-assign]

    for number in numbers:
        run = setting(number)
        found = {}
        for validation in ("barrier", "post"):
            found[validation] = [bits(x) for x in train(pipe, start, run, validation)]
        if found["barrier"] != found["post"]:
            pairs = zip(found["barrier"], found["post"], strict=True)
            first = next(k for k, (a, b) in enumerate(pairs) if a != b)
            print(f"rank {pipe.runtime.rank}, {number}: the value {first} differs: {run}", flush=True)
            return 1
    print(f"taken back: {taken[0]}", flush=True)
    return 0
