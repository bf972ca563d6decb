"""What ``compile`` tells of losses that are no mean over microbatches, beside what is measured.

Measured in float64: the loss of a batch and its gradients beside the means over its microbatches. *missed*:
another loss, and nothing was told. *alarms*: told, and the same loss (rows in another order, of which a mean
is taken, are among them).

``--part drawn``: losses of 3 to 9 ops that are drawn, of two layers, in any order of dimensions.
``--part written``: losses as people write them, drawn of targets, errors, weights, divisors and terms.
Measured is what a step gives, of which divisors by counts are the whole batch's.
``--part models``: the models of ``benchmarks/model_coverage``, with the mean square of their outputs or their
own loss.

    python benchmarks/rows.py --part drawn --number 1000 --output benchmarks/results/rows.txt
"""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from report import ROOT, Report
from torch import nn
from torch.utils import _pytree as pytree

import fxpipe

sys.path.insert(0, str(ROOT))

from benchmarks.model_coverage import libraries  # noqa: F401 - it makes them importable
from benchmarks.model_coverage.case import Subject, _plain
from benchmarks.model_coverage.examine import in_double, made, seeded
from benchmarks.model_coverage.reference import accumulate, loss_of
from benchmarks.model_coverage.sources import all_cases

MICROBATCHES, WORDS, LENGTH, WIDTH = 4, 6, 3, 4
#: A loss, or gradient, that is off by more is another one; models may compute in single precision.
DRAWN_BOUND, MODEL_BOUND = 1e-9, 2e-6
SECONDS = 60  # for a model
Value = torch.Tensor
#: An op: the values, a dimension of the first one, and whether of two forms it has the second.
Op = Callable[[Value, Value, int, bool], Value]


def fixed(*shape: int) -> Value:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def numbers(x: Value) -> Value:
    return (x * 10).long().abs() % WORDS


def of_each(x: Value) -> Value:
    return x.flatten(1).sum(1)


#: The ops by the number of dimensions that they need.
OPS: dict[int, list[Op]] = {
    0: [
        lambda x, y, d, b: x.tanh() if b else x.square(),
        lambda x, y, d, b: (x * 0.3).exp() if b else x * -2.0,
        lambda x, y, d, b: x + y if b else x * y,
        lambda x, y, d, b: torch.where(x > 0, x, x.sin()) if b else x.masked_fill(x < 0, 0.1),
        lambda x, y, d, b: torch.stack([x, x.cos()], d),
        lambda x, y, d, b: x.unsqueeze(d),
    ],
    1: [
        lambda x, y, d, b: x.softmax(d) if b else x.logsumexp(d),
        lambda x, y, d, b: x.sum(d) if b else x.mean(d),
        lambda x, y, d, b: x.cumsum(d) if b else (x + 2).norm(dim=d),
        lambda x, y, d, b: x @ fixed(x.shape[-1], 5),
        lambda x, y, d, b: torch.cat([x, x.sin()], d),
        lambda x, y, d, b: x[: len(x) // 2] if b else x[-1],
        lambda x, y, d, b: x.flip(d) if b else x.roll(1, d),
        lambda x, y, d, b: x.sort(d).values if b else x.topk(1, d).values,
        lambda x, y, d, b: x.gather(d, x.argmax(d, keepdim=True)) if b else x.amax(d),
        lambda x, y, d, b: x - x.mean(d, keepdim=True) if b else F.normalize(x + 1, dim=d),
        lambda x, y, d, b: F.layer_norm(x, x.shape[-1:]) if b else F.pad(x, (0, 1)),
        lambda x, y, d, b: x.unsqueeze(1).expand(len(x), 2, *x.shape[1:]),
        lambda x, y, d, b: F.embedding(numbers(x), fixed(WORDS, WIDTH)),
        lambda x, y, d, b: F.one_hot(numbers(x), WORDS) * x[..., None],
        lambda x, y, d, b: sum(row.square().mean() for row in x) / len(x) if b else x.repeat_interleave(2, d),
    ],
    2: [
        lambda x, y, d, b: x.transpose(0, d) if b else x.transpose(-1, d),
        lambda x, y, d, b: x.flatten(0, 1) if b else x.reshape(len(x), -1),
        lambda x, y, d, b: x.select(-1, -1),
        lambda x, y, d, b: x[torch.arange(len(x)), of_each(x).gt(0).long() % x.shape[1]],
        lambda x, y, d, b: torch.zeros(WORDS).index_add(0, numbers(of_each(x)), of_each(x)),
        lambda x, y, d, b: torch.cdist(x, x + 1) if b else x @ x.transpose(-1, -2),
    ],
    3: [
        lambda x, y, d, b: torch.einsum("abc,abd->acd", x, x),
        lambda x, y, d, b: F.scaled_dot_product_attention(x, x, x),
    ],
}  # fmt: skip


@dataclass(frozen=True)
class Step:
    """Where an op takes its values from, and which one it is, as random numbers."""

    of: float
    other: float
    op: float
    dim: float
    form: bool

    def apply(self, values: list[Value]) -> Value | None:
        """None where the op does not take such values."""
        x, y = values[int(self.of * len(values))], values[int(self.other * len(values))]
        ops = [op for dims in range(min(x.dim(), 3) + 1) for op in OPS[dims]]
        with contextlib.suppress(RuntimeError, IndexError):
            return ops[int(self.op * len(ops))](x, y, int(self.dim * max(1, x.dim())), self.form)
        return None


class Drawn(nn.Module):
    """Two layers, and a loss that is drawn."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.layer, self.table = nn.Linear(WIDTH, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.steps = [
            Step(draw.random() ** 0.3, draw.random(), draw.random(), draw.random(), draw.random() < 0.5)
            for _ in range(draw.randint(3, 9))
        ]

    def forward(self, x: Value, y: Value) -> Value:
        values = [self.layer(x).tanh(), self.table(y), x, self.layer.weight.sum(0)]
        for step in self.steps:
            value = step.apply(values)
            if value is not None and value.numel() < 5_000:
                values.append(value)
        self.dims = [value.dim() for value in values]
        return values[-1].square().mean() + values[-2].mean()


def drawn(seed: int, rows: int) -> Subject:
    torch.manual_seed(seed)

    def batch(count: int) -> tuple[Value, Value]:
        return torch.randn(count, LENGTH, WIDTH), torch.randint(WORDS, (count, LENGTH))

    return Subject(Drawn(seed), batch)


def off_by(subject: Subject, batch: Any, microbatches: int) -> float:
    """The largest relative error of the means over microbatches."""
    parameters = [p for p in subject.model.parameters() if p.requires_grad]
    for p in parameters:
        p.grad = None
    mean = accumulate(subject, batch, microbatches)
    grads = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    loss = loss_of(subject, batch).reshape(())
    loss.backward()
    errors = [(mean.loss - loss.detach()).abs() / loss.detach().abs().clamp_min(1e-6)]
    largest = max((p.grad.abs().max() for p in parameters if p.grad is not None), default=torch.tensor(1.0))
    for p, grad in zip(parameters, grads, strict=True):
        if p.grad is not None and grad is not None:
            errors.append((p.grad - grad).abs().max() / largest.clamp_min(1e-6))
    return float(max(errors))


def told(subject: Subject, example: Any) -> str:
    """The warning of a loss that microbatches have otherwise, shortened; "" without one."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        fxpipe.compile(
            subject.model,
            example,
            ranks=1,
            microbatches=MICROBATCHES,
            schedule="1f1b",
            loss_fn=subject.loss_fn,
            check=False,
        )
    texts = [str(x.message) for x in given if 'mean="microbatch"' in str(x.message)]
    return re.sub(r", of which.*?whole batch's:|Each microbatch.*", "", texts[0])[:110] if texts else ""


def of_drawn(first: int, number: int, rows: int) -> Iterator[tuple[str, float, str]]:
    for seed in range(first, first + number):
        subject = drawn(seed, rows)
        try:
            batch = subject.batch(rows * MICROBATCHES)
            off = off_by(subject, batch, MICROBATCHES)
            dims = subject.model.dims
            loss_of(subject, subject.batch(rows))
            if subject.model.dims != dims:
                continue  # where as many rows as columns broadcast, other ops apply
            text = told(subject, subject.batch(rows))
        except (RuntimeError, IndexError, fxpipe.FxpipeError):
            continue  # eager or capture refuses it
        yield f"{seed}", off / DRAWN_BOUND, text


#: By name, of a batch's outputs [rows, length, width], its targets alike, labels, and weights of its rows.
TARGETS: dict[str, Callable[[Value, Value], Value]] = {
    "t": lambda t, w: t,
    "t - t.mean(0)": lambda t, w: t - t.mean(0),
    "t / t.std()": lambda t, w: t / t.std(),
    "t - t.mean(-1)": lambda t, w: t - t.mean(-1, keepdim=True),
    "t * w": lambda t, w: t * w[:, None, None],
    "t + w.mean()": lambda t, w: t + w.mean(),
}
OUTPUTS: dict[str, Callable[[Value, Value], Value]] = {
    "o": lambda o, w: o,
    "o.tanh()": lambda o, w: o.tanh(),
    "o - o.mean(1)": lambda o, w: o - o.mean(1, keepdim=True),
    "o + w.mean()": lambda o, w: o + w.mean(),
    "o / o.norm(-1)": lambda o, w: o / o.norm(dim=-1, keepdim=True),
    "o - o.mean((0, 1))": lambda o, w: o - o.mean((0, 1)),
    "o.log_softmax(-1) + o.mean((0, 1))": lambda o, w: o.log_softmax(-1) + o.mean((0, 1)),
}
WEIGHTS: dict[str, Callable[[Value, Value], Value]] = {
    "1": lambda m, w: torch.ones_like(m),
    "m": lambda m, w: m,
    "w": lambda m, w: w[:, None].expand_as(m),
    "m * w": lambda m, w: m * w[:, None],
    "w / w.mean()": lambda m, w: (w / w.mean())[:, None].expand_as(m),
    "m / m.sum(1)": lambda m, w: m / m.sum(1, keepdim=True).clamp(min=1),
}
DIVISORS: dict[str, Callable[[Value, Value, float], Value | float]] = {
    "s.sum()": lambda s, m, c: s.sum(),
    "m.sum()": lambda s, m, c: m.sum(),
    "m.sum() + c": lambda s, m, c: m.sum() + c,
    "s.sum().clamp(c)": lambda s, m, c: s.sum().clamp(min=c),
    "s.mean()": lambda s, m, c: s.mean(),
    "s.numel()": lambda s, m, c: s.numel(),
    "s.mean() + c": lambda s, m, c: s.mean() + c,
    "max(m.sum(), c)": lambda s, m, c: torch.maximum(m.sum(), torch.tensor(c)),
    "m.count_nonzero()": lambda s, m, c: m.count_nonzero(),
    "len(m)": lambda s, m, c: len(m),
    "c": lambda s, m, c: c,
    "m.sum() ** 0.5": lambda s, m, c: m.sum() ** 0.5,
    "s.sum() / len(m) + c": lambda s, m, c: s.sum() / len(m) + c,
    "m.sum(1).mean()": lambda s, m, c: m.sum(1).mean(),
}
REDUCED = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits)


def early(draw: random.Random, names: Iterable[str]) -> str:
    """One of the first names more often than one of the last."""
    known = [*names]
    return known[int(len(known) * draw.random() ** 2)]


class Written(nn.Module):
    """Two layers, and a loss of one or two terms that are drawn; ``text``: of it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        kinds = (self._error, self._error, self._reduced, self._labels)
        terms = [draw.choice(kinds)(draw) for _ in range(draw.randint(1, 2))]
        self.terms, self.last = [term for _, term in terms], draw.choice(("",) * 8 + ("sqrt", "log"))
        self.text = f"{self.last}({' + '.join(text for text, _ in terms)})"

    def _error(self, draw: random.Random) -> tuple[str, Any]:
        """A sum of weighted errors of tokens, divided."""
        o, t, s, d = (early(draw, each) for each in (OUTPUTS, TARGETS, WEIGHTS, DIVISORS))
        kind, c, is_mean = draw.choice(REDUCED), draw.choice((1e-8, 1e-3, 1.0, 5.0)), draw.random() < 0.3

        def term(out: Value, target: Value, labels: Value, m: Value, w: Value) -> Value:
            errors = kind(OUTPUTS[o](out, w), TARGETS[t](target, w), reduction="none").mean(-1)
            weights = WEIGHTS[s](m, w)
            total = (errors * weights).mean() if is_mean else (errors * weights).sum()
            return total / DIVISORS[d](weights, m, c)

        return f"{kind.__name__}({o}, {t}) * {s} {'mean' if is_mean else 'sum'} / {d} c={c}", term

    def _reduced(self, draw: random.Random) -> tuple[str, Any]:
        o, t, kind = early(draw, OUTPUTS), early(draw, TARGETS), draw.choice(REDUCED)
        weighted = kind in REDUCED[:2] and draw.random() < 0.3

        def term(out: Value, target: Value, labels: Value, m: Value, w: Value) -> Value:
            more = {"weight": w[:, None, None].expand_as(out)} if weighted else {}
            return kind(OUTPUTS[o](out, w), TARGETS[t](target, w), **more)

        return f"{kind.__name__}({o}, {t}{', weight=w' if weighted else ''})", term

    def _labels(self, draw: random.Random) -> tuple[str, Any]:
        o, reduction = early(draw, OUTPUTS), draw.choice(("mean", "mean", "sum", "none"))
        d, c = early(draw, DIVISORS), draw.choice((1e-8, 1.0, 5.0))
        more = draw.choice(({}, {"weight": fixed(WIDTH).abs()}, {"label_smoothing": 0.1}))

        def term(out: Value, target: Value, labels: Value, m: Value, w: Value) -> Value:
            logits = OUTPUTS[o](out, w).transpose(1, 2)
            if "log_softmax" in o and "label_smoothing" not in more:
                loss = F.nll_loss(logits, labels, reduction=reduction, **more)
            else:
                loss = F.cross_entropy(logits, labels, reduction=reduction, **more)
            if reduction == "none":
                loss = (loss.sum(1) / m.sum(1).clamp(min=1)).mean()
            return loss / DIVISORS[d](m, m, c) if reduction == "sum" else loss

        return f"cross_entropy({o}, {reduction}, {[*more]}) / {d} c={c}", term

    def forward(self, x: Value, t: Value, labels: Value, w: Value) -> Value:
        out, m = self.head(self.layer(x).tanh()), (labels != -100).to(x.dtype)
        loss = sum(term(out, t, labels, m, w) for term in self.terms)
        return loss.sqrt() if self.last == "sqrt" else loss.abs().log() if self.last == "log" else loss


def written_batch(rows: int) -> tuple[Value, ...]:
    labels = torch.randint(WIDTH, (rows, LENGTH)).masked_fill(torch.rand(rows, LENGTH) < 0.4, -100)
    return torch.randn(rows, LENGTH, WIDTH), torch.rand(rows, LENGTH, WIDTH), labels, torch.rand(rows)


def of_written(first: int, number: int, rows: int) -> Iterator[tuple[str, float, str]]:
    for seed in range(first, first + number):
        torch.manual_seed(seed)
        model, batch = Written(seed), written_batch(rows * MICROBATCHES)
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            pipe = fxpipe.compile(
                model,
                tuple(leaf[:rows] for leaf in batch),
                ranks=1,
                microbatches=MICROBATCHES,
                schedule="1f1b",
                check=False,
            )
        step, loss = pipe.run_local(batch), model(*batch)
        if not loss.isfinite():
            continue
        loss.backward()
        assert step.loss is not None
        largest = max(float(p.grad.abs().max()) for p in model.parameters())
        errors = [float((step.loss - loss.detach()).abs() / loss.detach().abs().clamp_min(1e-6))]
        for name, p in model.named_parameters():
            errors.append(float((step.grads[name] - p.grad).abs().max()) / max(largest, 1e-6))
        texts = [str(x.message) for x in given if 'mean="microbatch"' in str(x.message)]
        yield f"{seed} {model.text}", max(errors) / DRAWN_BOUND, texts[0][:80] if texts else ""


def mean_square(output: Any, batch: Any = None) -> Value:
    leaves = [
        x for x in pytree.tree_leaves(_plain(output)) if isinstance(x, torch.Tensor) and x.requires_grad
    ]
    return sum((x.square().mean() if x.dim() else x) for x in leaves if x.is_floating_point())  # type: ignore


def of_models(first: int, every: int, rows: int) -> Iterator[tuple[str, float, str]]:
    def build(case: Any) -> Subject:
        subject = in_double(seeded(case.build))
        return Subject(subject.model, subject.batch, subject.loss_fn and mean_square)

    def stop(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    for case in list(all_cases().values())[first::every]:
        signal.alarm(SECONDS)
        try:
            batch = made(build(case), rows * MICROBATCHES)
            if off_by(build(case), batch, 1) > MODEL_BOUND:
                continue  # its loss is drawn, or moves with its buffers
            off = off_by(build(case), batch, MICROBATCHES)
            yield case.key, off / MODEL_BOUND, told(build(case), made(build(case), rows))
        except Exception:  # noqa: BLE001 - whatever a library raises: the case is left out
            continue
        finally:
            signal.alarm(0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("drawn", "written", "models"), default="drawn")
    parser.add_argument("--number", type=int, default=300, help="of drawn losses")
    parser.add_argument("--first", type=int, default=0, help="seed, or model")
    parser.add_argument("--every", type=int, default=5, help="of the models")
    parser.add_argument("--rows", type=int, default=2, help="of a microbatch")
    parser.add_argument("--output", type=Path, help="keep what is printed in this file")
    options = parser.parse_args()
    report = Report("Losses that join the rows of a microbatch, told and measured")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    number = options.every if options.part == "models" else options.number
    part = {"drawn": of_drawn, "written": of_written, "models": of_models}[options.part]
    cases = part(options.first, number, options.rows)
    counts, odd = Counter[str](), list[tuple[str, str, str, str]]()
    for name, off, text in cases:
        kind = ("told" if text else "missed") if off > 1 else "alarm" if text else "quiet"
        counts[kind] += 1
        if kind in ("missed", "alarm"):
            odd.append((name, kind, f"{off:.1e}", text))
    report.line(f"\nPart {options.part}, {options.rows} rows in a microbatch")
    names = ("quiet", "told", "missed", "alarm")
    report.table(["losses", *names], [[f"{counts.total()}", *(f"{counts[name]}" for name in names)]])
    if odd:
        report.line()
        report.table(["case", "kind", "error / bound", "what is told"], odd)
    report.save(options.output)


if __name__ == "__main__":
    main()
