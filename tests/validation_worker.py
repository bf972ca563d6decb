"""Trains with "barrier" and with "post" side by side, where gradients are infinite, NaN, or to be clipped."""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from launch import forked
from torch import nn

import fxpipe
from fxpipe.runtime.program.rank import Runtime
from fxpipe.training.model import speculative_update as ahead
from fxpipe.training.model.pending_update import PendingUpdate
from fxpipe.training.model.rollback import Rollback
from fxpipe.training.model.speculative_update import SpeculativeUpdate
from fxpipe.training.optimizer import make_optimizer
from fxpipe.training.optimizer.optimizer import PipelineOptimizer
from fxpipe.training.optimizer.speculation_policy import SpeculationPolicy

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
        return grad, (grad.sum() * 0 + poke.sum()).reshape(1), None  # in the stage of x


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

    dtype = next(iter(start.values())).dtype

    def made() -> Any:
        own = pipe.optimizer(
            CLASSES[run.optimizer],
            groups=[{"params": "scales.*", "lr": 0.0}],
            validation=validation,
            master_weights=dtype == torch.bfloat16,
            **run.options,
        )
        own.zero_grad(set_to_none=True)
        return own

    def given(seed: int, pokes: Sequence[float]) -> dict[str, torch.Tensor]:
        whole = batch(seed + 7 * pipe.replica, pokes)
        return {name: x.to(dtype) for name, x in whole.items()}

    optimizer = made()
    for k, pokes in enumerate(run.pokes):
        event = run.events.get(k, "")
        if event == "evaluate":
            yield pipe.evaluate(given(1, [0.0] * RANKS))
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
        loss = pipe.step(given(100 * run.seed + k, pokes))
        if run.accumulates and k % 2:
            loss = pipe.step(given(100 * run.seed + 50 + k, [0.0] * RANKS))
        yield loss
        optimizer.step()
        if run.schedules:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * 0.9
        optimizer.zero_grad(set_to_none=run.to_none)
    if run.optimizer != "Drifting":
        yield optimizer.state_dict()["state"]
    yield optimizer.last_norm, optimizer.skipped
    names = pipe.model_state.owned_by(pipe.process.rank).gradients
    yield [(name, pipe.parameter(name).detach().clone()) for name in names]


def bits(value: Any) -> Any:
    """A value whose parts are equal if their bits are."""
    if isinstance(value, torch.Tensor):
        return (
            tuple(value.shape),
            str(value.dtype),
            value.detach().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
    if isinstance(value, dict):
        return [(key, bits(x)) for key, x in value.items()]
    if isinstance(value, list | tuple):
        return [bits(x) for x in value]
    return repr(value)


def compiled(
    tied: bool, dtype: torch.dtype, **options: Any
) -> tuple[fxpipe.Pipeline, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = Poked(tied).to(dtype)
    start = {name: x.detach().clone() for name, x in model.state_dict().items()}
    example = {name: x[:ROWS].to(dtype) for name, x in batch(0, [0.0] * RANKS).items()}
    given = {"ranks": RANKS, "microbatches": MICROBATCHES, "schedule": "zb-h1", "effort": 0.02} | options
    return fxpipe.compile(model, example, evaluation=True, **given), start


FAULTS: dict[str, Callable[[], tuple[Any, str, Any]]] = {}


def fault(function: Callable[[], tuple[Any, str, Any]]) -> Callable[[], tuple[Any, str, Any]]:
    """A class or a module, the name of a function of it, and what takes its place."""
    FAULTS[function.__name__] = function
    return function


@fault
def copies_are_freed_early() -> tuple[Any, str, Any]:
    """And their memory is used for something else."""
    before = Rollback.of

    def of(optimizer: Any, earlier: Rollback | None = None) -> Rollback:
        undo = before(optimizer)
        for value in undo.values:
            value.fill_(3.0)
        return undo

    return Rollback, "of", staticmethod(of)


@fault
def state_is_not_taken_back() -> tuple[Any, str, Any]:
    before = Rollback.of
    return Rollback, "of", staticmethod(lambda own, _: replace(before(own), state=dict(own.state)))


@fault
def gradients_are_those_of_now() -> tuple[Any, str, Any]:
    """Where ``zero_grad(set_to_none=True)`` came before the verdict, none."""
    return ahead, "set_grads", lambda parameters, grads: None


@fault
def options_are_those_of_now() -> tuple[Any, str, Any]:
    return Rollback, "options_of_then", lambda undo, optimizer: contextlib.nullcontext()


@fault
def keys_are_not_those_of_the_first_time() -> tuple[Any, str, Any]:
    before = Runtime._take_back

    def taken_back(rt: Runtime, *arguments: Any) -> None:
        before(rt, *arguments)
        rt.step_number += 1

    return Runtime, "_take_back", taken_back


@fault
def forwards_are_not_run_again() -> tuple[Any, str, Any]:
    return PendingUpdate, "stand", lambda updates: updates._correct() is None


@fault
def the_verdict_is_that_of_another_step() -> tuple[Any, str, Any]:
    before, last = PipelineOptimizer._settle, []

    def settled(optimizer: PipelineOptimizer) -> bool:
        gathered = optimizer._ahead.gathered
        last.append(gathered())
        optimizer._ahead.gathered = lambda: last[max(0, len(last) - 2)]
        return before(optimizer)

    return PipelineOptimizer, "_settle", settled


def check(
    numbers: Sequence[int],
    tied: bool,
    options: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    faults: Sequence[str] = (),
) -> None:
    """Print the settings of which a value differs, and with each fault whether one does."""
    pipe, start = compiled(tied, dtype, **options)
    taken, before = [0], SpeculativeUpdate.taken_back

    def counted(ahead: SpeculativeUpdate, *arguments: Any) -> Any:
        taken[0] += 1
        return before(ahead, *arguments)

    SpeculativeUpdate.taken_back = counted  # type: ignore[method-assign]
    SpeculationPolicy.goes_ahead = lambda _: True  # type: ignore[method-assign] - whatever the ranks' pace is here

    def values(number: int, validation: str) -> list[Any]:
        return [bits(x) for x in train(pipe, start, setting(number), validation)]

    right = {number: values(number, "barrier") for number in numbers}
    for number, expected in right.items():
        found = values(number, "post")
        if found != expected:
            first = next(k for k, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b)
            print(f"{number}: the value {first} differs: {setting(number)}", flush=True)
    print(f"taken back: {taken[0]}", flush=True)

    def differs(number: int) -> bool:
        found = b"no" if values(number, "post") == right[number] else b"yes"
        return b"yes" in pipe.process.gather(found)

    for name in faults:
        owner, attribute, changed = FAULTS[name]()
        # The trials of each optimizer would find some of them.
        no_trials = mock.patch.object(make_optimizer, "check_groups")
        with mock.patch.object(owner, attribute, changed), no_trials:
            if any(map(differs, numbers)):
                print(f"caught: {name}", flush=True)


def campaign() -> None:
    """Of the settings named on the command line, in all pipelines below."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=int, nargs=2, default=[0, 1000], metavar=("FIRST", "END"))
    first, end = parser.parse_args().settings
    share = -(-(end - first) // len(PIPELINES))
    for k, (name, given) in enumerate(PIPELINES.items()):
        numbers = range(first + k * share, min(end, first + (k + 1) * share))
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as logs:
            done = forked(4, check, numbers, *given, dtype=torch.float32, logs=Path(logs), limit=3600.0)
        wrong = sum("differs" in line for out in done.stdout for line in out.splitlines())
        taken = " ".join(re.findall(r"taken back: (\d+)", "".join(done.stdout)))
        print(
            f"{name}: {len(numbers)} settings, {wrong} values differ, updates taken back by rank: {taken}, "
            f"exit code {done.code}, {time.monotonic() - begun:.0f} s",
            flush=True,
        )


EACH = {"split_points": ["blocks.1", "blocks.2", "blocks.3"]}
#: Whether the model is tied, the options of ``compile``, and the dtype.
PIPELINES: dict[str, tuple[bool, dict[str, Any], torch.dtype]] = {
    "zb-h1": (False, EACH, torch.float32),
    "zb-v, tied": (True, {"schedule": "zb-v"}, torch.float32),
    "1f1b, tied, bfloat16 with masters": (True, EACH | {"schedule": "1f1b"}, torch.bfloat16),
    "2 replicas, ZeRO 1": (False, {"ranks": 2, "replicas": 2, "shard": "optimizer"}, torch.float32),
    "2 replicas, ZeRO 3, tied": (True, {"ranks": 2, "replicas": 2, "shard": "parameters"}, torch.float32),
}


if __name__ == "__main__":
    campaign()
