"""Small torch modules that are hard to pipeline, each with what it is fed.

All return their loss (a scalar), unless their case has a ``loss_fn``.  Every one is deep enough for
eight stages: most are a Chain of four blocks, of several ops each, with the difficulty somewhere in between.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe.compiler import compile as compiler

WIDTH, WORDS, LENGTH = 8, 11, 5
DEPTH = 4  # of most models: what happens between their blocks is of four kinds at most


def numbers(rows: int) -> dict[str, Any]:
    return {"x": torch.randn(rows, WIDTH), "y": torch.randn(rows, WIDTH)}


def tokens(rows: int) -> dict[str, Any]:
    return {"ids": torch.randint(WORDS, (rows, LENGTH)), "labels": torch.randint(WORDS, (rows, LENGTH))}


def images(rows: int) -> dict[str, Any]:
    return {"x": torch.randn(rows, 3, 8, 8), "y": torch.randn(rows, 3, 8, 8)}


def sequences(rows: int) -> dict[str, Any]:
    return {"x": torch.randn(rows, LENGTH, WIDTH), "y": torch.randn(rows, LENGTH, WIDTH)}


def short_sequences(rows: int) -> dict[str, Any]:
    """For layers whose ops are traced step by step."""
    return {name: x[:, :3] for name, x in sequences(rows).items()}


@dataclass(frozen=True)
class Case:
    """``batch(rows)`` makes a batch of that many rows, in torch's default float type."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss_fn: Callable[..., Any] | None = None
    rows: int = 2  # of one microbatch

    def build(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.model()

    def example(self) -> Any:
        torch.manual_seed(1)
        return self.batch(self.rows)

    def data(self, microbatches: int) -> Any:
        torch.manual_seed(2)
        return self.batch(self.rows * microbatches)


@dataclass(frozen=True)
class Eager:
    """What one process gets: the loss, ``grads`` of the parameters that have one, and the model after it."""

    loss: torch.Tensor
    grads: dict[str, torch.Tensor]
    model: nn.Module


def cut(batch: Any, microbatches: int) -> list[Any]:
    """The microbatches of a batch; what is no tensor is in each of them."""
    leaves, spec = pytree.tree_flatten(batch)
    return [
        pytree.tree_unflatten(
            [x.chunk(microbatches)[m] if isinstance(x, torch.Tensor) else x for x in leaves], spec
        )
        for m in range(microbatches)
    ]


def eager(
    model: nn.Module, batch: Any, microbatches: int, loss_fn: Callable[..., Any] | None = None
) -> Eager:
    """Accumulate the gradients of the mean of the microbatch losses on a copy of the model.

    For a ``loss_fn`` that gives (sum, count): of the sum of all sums over the sum of all counts.
    """
    model = copy.deepcopy(model)
    sums, counts = [], []
    for microbatch in cut(batch, microbatches):
        output = model(*microbatch) if isinstance(microbatch, tuple) else model(**microbatch)
        loss = output if loss_fn is None else loss_fn(output, microbatch)
        total, count = loss if isinstance(loss, tuple) else (loss, 1)
        sums.append(total)
        counts.append(torch.as_tensor(count))
    loss = torch.stack(sums).sum() / torch.stack(counts).sum()
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Eager(loss.detach(), grads, model)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference as a share of the largest element; exact zeros must be met exactly."""
    difference, scale = (found - expected).abs().max().item(), expected.abs().max().item()
    return difference / scale if scale else (0.0 if difference == 0 else float("inf"))


LIMIT = 1e-10  # relative, in double precision
EFFORT = 0.02  # of schedule searches in tests that hold for any schedule: the default takes seconds


@dataclass(frozen=True)
class Shape:
    """How a case is compiled.  ``check``: False where other tests have the certificate of such programs."""

    ranks: int
    schedule: str = "1f1b"
    stages_per_rank: int | None = None
    placement: str | None = None
    seed: int = 0
    vocab_parallel: bool | str = False
    gradients: bool = True
    offload: bool | float = False
    evaluation: bool = False
    grad_dtype: torch.dtype | None = None
    recompute: bool | str = False
    backend: str = "eager"
    replicas: int | None = None
    shard: str | None = None
    check: bool = True


def compiled(case: Case, model: nn.Module, microbatches: int, shape: Shape) -> fxpipe.Pipeline:
    return fxpipe.compile(
        model,
        case.example(),
        ranks=shape.ranks,
        replicas=shape.replicas,
        shard=shape.shard,
        microbatches=microbatches,
        schedule=shape.schedule,
        stages_per_rank=shape.stages_per_rank,
        placement=shape.placement,
        loss_fn=case.loss_fn,
        seed=shape.seed,
        vocab_parallel=shape.vocab_parallel,
        gradients=shape.gradients,
        evaluation=shape.evaluation,
        grad_dtype=shape.grad_dtype,
        offload=fxpipe.Offload(shape.offload, bandwidth=1e12),
        recompute=shape.recompute,
        backend=shape.backend,
        check=shape.check,
        effort=EFFORT,
    )


def too_far(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], limit: float = LIMIT):
    """The names of the tensors whose shape or values are not as expected, each with its error."""
    assert found.keys() == expected.keys()
    assert {n: t.shape for n, t in found.items()} == {n: t.shape for n, t in expected.items()}
    errors = {name: relative_error(t, expected[name]) for name, t in found.items()}
    return {name: e for name, e in errors.items() if not e <= limit}


@contextlib.contextmanager
def in_double_precision() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


_captured: dict[Any, dict[bool, list[Any]]] = {}


@contextlib.contextmanager
def captured_once(*key: Hashable) -> Iterator[None]:
    """Within, ``compile`` takes the graphs that it captured within the same key before.

    Tracing is most of the time of small models, and what is traced depends on the model and its mode, its
    loss, the example, the number of microbatches and whether there are gradients: all but the last must be
    the same for a key.  The last keys are kept.
    """
    whole, capture = (*key, torch.get_default_dtype()), compiler.capture
    known = _captured.setdefault(whole, {True: [], False: []})
    if len(_captured) > 4:
        del _captured[next(iter(_captured))]
    calls = {True: itertools.count(), False: itertools.count()}  # with named dimensions there are several

    def captured(*arguments: Any) -> Any:
        gradients = arguments[5].gradients
        call, graphs = next(calls[gradients]), known[gradients]
        if call == len(graphs):
            graphs.append(capture(*arguments))
        return graphs[call]

    with mock.patch.object(compiler, "capture", captured):
        yield


def built_and_compiled(case: Case, microbatches: int, shape: Shape) -> tuple[nn.Module, fxpipe.Pipeline]:
    """A new model of the case, as ``build`` makes it, and its pipeline, captured once for all shapes."""
    model = case.build()
    with captured_once(case, microbatches):
        return model, compiled(case, model, microbatches, shape)


def check_against_eager(case: Case, microbatches: int, shape: Shape, limit: float = LIMIT) -> None:
    """Loss, the set of gradients and their values, and the buffers afterwards."""
    model, pipe = built_and_compiled(case, microbatches, shape)
    batch = case.data(microbatches)
    expected = eager(model, batch, microbatches, case.loss_fn)
    result = pipe.run_local(batch)
    assert relative_error(result.loss, expected.loss) <= limit
    assert too_far(result.grads, expected.grads, limit) == {}
    assert too_far(dict(model.named_buffers()), dict(expected.model.named_buffers()), limit) == {}


# -- building blocks ----------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.outer(F.gelu(self.inner(self.norm(x))))


class Chain(nn.Module):
    """``depth`` blocks; subclasses change what happens between them (``between``)."""

    def __init__(self, depth: int = DEPTH, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(depth)])

    def between(self, x, i):
        return x

    def forward(self, x, y):
        for i, block in enumerate(self.blocks):
            x = self.between(block(x), i)
        return F.mse_loss(x, y)


# -- weights that are used more than once ---------------------------------------------------------------


class TiedHead(nn.Module):
    """The head's weight is the embedding's, first stage and last."""

    def __init__(self, depth: int = DEPTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(depth)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids, labels):
        logits = self.head(self.blocks(self.embedding(ids)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class TiedThrice(TiedHead):
    """The same weight in the middle as well, there and back."""

    def forward(self, ids, labels):
        x = self.blocks[:2](self.embedding(ids))
        x = F.softmax(self.head(x), -1) @ self.embedding.weight + x
        logits = self.head(self.blocks[2:](x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class SharedLayer(Chain):
    """One layer, called after every second block."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)

    def between(self, x, i):
        return x + torch.tanh(self.shared(x)) if i % 2 else x


class Temperature(Chain):
    """A 0-d parameter, used in all stages."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def between(self, x, i):
        return x * self.scale


class SumOfWeights(Chain):
    """Two weights have one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.other = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def between(self, x, i):
        return F.linear(x, self.one + self.other) if i == 2 else x


class LearnedTables(nn.Module):
    """A class token and a positional table: parameters that go into the values themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(LENGTH + 1, WIDTH))
        self.blocks = nn.Sequential(*[Block() for _ in range(DEPTH)])

    def forward(self, x, y):
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return F.mse_loss(self.blocks(x)[:, 0], y[:, 0])


class WeightNorm(Chain):
    def __init__(self) -> None:
        super().__init__(6, lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)))

    def between(self, x, i):
        return torch.tanh(x)


# -- values that go far ---------------------------------------------------------------------------------


class UNet(nn.Module):
    """Skips from each level down to the same level up; strided and transposed convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.down1, self.down2 = (
            nn.Conv2d(4, 8, 3, stride=2, padding=1),
            nn.Conv2d(8, 16, 4, stride=2, padding=1),
        )
        self.middle = nn.Conv2d(16, 16, 3, padding=2, dilation=2)
        self.up2, self.up1 = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.ConvTranspose2d(16, 4, 2, stride=2)
        self.mix = nn.Conv2d(8, 8, 3, padding=1, groups=2, bias=False)
        self.last = nn.Conv2d(8, 3, 1)

    def forward(self, x, y):
        a = F.silu(self.first(x))
        b = F.silu(self.down1(a))
        c = self.middle(F.silu(self.down2(b)))
        up = torch.cat([F.silu(self.up2(c)), b], 1)
        up = torch.cat([F.silu(self.up1(up)), a], 1)
        return F.mse_loss(self.last(F.silu(self.mix(up))), y)


class EncoderDecoder(nn.Module):
    """What the encoder gives is attended to by all decoder blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*[Block() for _ in range(3)])
        self.queries, self.keys, self.values = (
            nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)]) for _ in range(3)
        )

    def forward(self, source, x, y):
        memory = self.encoder(source)
        for query, key, value in zip(self.queries, self.keys, self.values, strict=True):
            x = x + F.scaled_dot_product_attention(query(x), key(memory), value(memory))
        return F.mse_loss(x, y)


class LossesOnTheWay(Chain):
    """Each block adds to the loss (deep supervision, load balancing)."""

    def forward(self, x, y):
        loss = x.new_zeros(())
        for i, block in enumerate(self.blocks):
            x = block(x)
            loss = loss + (i + 1) * F.mse_loss(x, y)
        return loss


class IntegerCrossing(Chain):
    """The next block's input is looked up by what the block before decided."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(WIDTH, WIDTH) for _ in range(DEPTH)])

    def forward(self, x, y):
        choice = x.argmax(-1)
        for block, table in zip(self.blocks, self.tables, strict=True):
            x = block(x) + table(choice)
            choice = x.argmax(-1)
        return F.mse_loss(x, y) + table(choice).sum()


# -- the shape in which values cross ---------------------------------------------------------------------


class Transposed(Chain):
    def between(self, x, i):
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)  # rows are not contiguous


class Expanded(Chain):
    def forward(self, x, y):
        for block in self.blocks:
            x = block(x).mean(1, keepdim=True).expand_as(y)
        return F.mse_loss(x, y)


class Sliced(Chain):
    def between(self, x, i):
        return torch.cat([x, 2 * x, x.flip(-1)], -1)[..., i : i + WIDTH]


class MultiOutput(Chain):
    """chunk, split, unbind and topk between the blocks."""

    def between(self, x, i):
        if i % 4 == 0:
            a, b = x.chunk(2, -1)
            return torch.cat([b * torch.sigmoid(a), a], -1)
        if i % 4 == 1:
            a, b, c = x.split([1, 3, 4], -1)
            return torch.cat([c, a, b], -1)
        if i % 4 == 2:
            return torch.stack(x.unbind(-1)[::-1], -1)
        values, indices = x.topk(WIDTH, -1)
        return x.scatter(-1, indices.flip(-1), values)


class Complex(Chain):
    def between(self, x, i):
        spectrum = torch.fft.rfft(x)
        return torch.fft.irfft(spectrum * torch.polar(torch.ones_like(spectrum.real), spectrum.abs()), WIDTH)


class Conjugated(Chain):
    """All blocks read a conjugate and the imaginary part of another, which PyTorch computes lazily."""

    def forward(self, x, y):
        x = self.blocks[0](x)
        conjugate = torch.complex(x, y).conj()
        negative = torch.complex(x.mean(), y.mean()).conj().imag
        for block in self.blocks[1:]:
            x = block(x)
            x = x + (conjugate * torch.complex(x, x)).real * conjugate.imag + negative
        return F.mse_loss(x, y)


# -- what autograd really ran ----------------------------------------------------------------------------


class _Round(torch.autograd.Function):
    """Rounds; lets gradients through where the input is small (no derivative of anything)."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1) * 1.5


class StraightThrough(Chain):
    def between(self, x, i):
        return _Round.apply(x)


class Teacher(Chain):
    """The student is drawn towards a teacher without gradients and towards its own detached past."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(*[Block() for _ in range(3)])

    def forward(self, x, y):
        past = x
        with torch.no_grad():
            goal = self.blocks[0](self.teacher(x))
        for block in self.blocks:
            x = block(x)
            past = (past + x).detach()
        return F.mse_loss(x, y) + F.mse_loss(x, goal) + F.l1_loss(x, past)


class TensorHook(Chain):
    """Gradients are scaled by a hook on the value."""

    def between(self, x, i):
        x.register_hook(lambda gradient: gradient * 0.5)
        return x


class GradientPenalty(nn.Module):
    """The loss holds a gradient with respect to the input, so that the backward is a second one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block() for _ in range(4)])

    def forward(self, x, y):
        x = x.clone().requires_grad_()
        energy = self.blocks(x)
        (force,) = torch.autograd.grad(energy.square().sum(), x, create_graph=True)
        return F.mse_loss(force, y)


class Checkpointed(Chain):
    """Two blocks at a time are run again in the backward."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)

    def pair(self, x, i):
        return self.blocks[i + 1](self.drop(self.blocks[i](x)))

    def forward(self, x, y):
        for i in range(0, len(self.blocks), 2):
            x = checkpoint(self.pair, x, i, use_reentrant=False)
        return F.mse_loss(x, y)


class CheckpointedReentrant(Chain):
    """In the old way: no gradient reaches what has no argument that needs one, or lies in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def pair(self, x, i):
        x = self.blocks[i](x)
        return self.blocks[i + 1](x), [x * self.scale]

    def forward(self, x, y):
        past = 0.0
        for i in range(0, len(self.blocks), 2):
            x, (seen,) = checkpoint(self.pair, x, i, use_reentrant=True)
            past = past + seen.square().mean()
            x = x * self.scale
        return F.mse_loss(x, y) + past


class _Reversible(torch.autograd.Function):
    """(a, b) becomes (a + f(b), b); its backward finds a again and calls backward() of f."""

    @staticmethod
    def forward(ctx, a, b, block):
        ctx.block = block
        ctx.save_for_backward(b)
        return a + block(b), b.clone()

    @staticmethod
    def backward(ctx, of_a, of_b):
        (b,) = ctx.saved_tensors
        with torch.enable_grad():
            b = b.detach().requires_grad_()
            ctx.block(b).backward(of_a)
        return of_a, of_b + b.grad, None


class Reversible(Chain):
    def forward(self, x, y):
        a, b = self.blocks[0](x), self.blocks[1](x)
        for block in self.blocks[2:]:
            b, a = _Reversible.apply(a, b, block)
        return F.mse_loss(self.blocks[0](a + b), y)


class FrozenAndUnused(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.blocks[0].requires_grad_(False)
        self.blocks[2].inner.weight.requires_grad_(False)
        self.blocks[3].outer.bias.requires_grad_(False)


# -- writing in place, buffers ---------------------------------------------------------------------------


class InPlace(Chain):
    def between(self, x, i):
        x = x.clone()
        if i % 4 == 0:
            x.mul_(1.5).relu_()
        elif i % 4 == 1:
            x += x.flip(-1) ** 2
            x[:, 0] = 0.5
        elif i % 4 == 2:
            x.masked_fill_(x > 1, 1.0)
        else:
            x.index_put_((torch.tensor([0, 1]), torch.tensor([2, 3])), x.new_ones(2))
            x[:, ::2] *= x[:, 1::2].clone()
        return x


class BatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = []
        for _ in range(DEPTH):
            layers += [nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, x, y):
        return F.mse_loss(self.layers(x), y)


class ReassignedBuffers(Chain):
    """Buffers that the forward reads and then replaces: a running mean and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.tensor(0))

    def between(self, x, i):
        if i == 2:
            x = x - self.mean
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            self.calls = self.calls + 1
        return x


class KeepsInput(Chain):
    """A buffer takes the place of what came in, untouched."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(2, WIDTH))

    def forward(self, x, y):
        self.last.copy_(x)
        return super().forward(x, y)


# -- arguments and outputs -------------------------------------------------------------------------------


class Nested(Chain):
    """Dicts in dicts, a list, an integer that decides the control flow, a None and a flag."""

    def forward(self, inputs, times, scale=None, mode="sum"):
        x = inputs["left"]["x"] + inputs["right"][0] * inputs["right"][1]
        for block in self.blocks:
            for _ in range(times):
                x = block(x)
        x = x if scale is None else x * scale
        return x.square().sum() if mode == "sum" else F.mse_loss(x, inputs["left"]["y"])


def nested(rows: int) -> dict[str, Any]:
    inputs = {
        "left": {"x": torch.randn(rows, WIDTH), "y": torch.randn(rows, WIDTH)},
        "right": [torch.randn(rows, WIDTH), torch.randn(rows, 1)],
    }
    return {"inputs": inputs, "times": 2, "scale": None, "mode": "mean"}


class Output:
    def __init__(self, loss: torch.Tensor):
        self.loss = loss


class LossAttribute(Chain):
    def forward(self, x, y):
        return Output(super().forward(x, y))


class NoLoss(Chain):
    """Gives its last value in a dict, for a ``loss_fn``."""

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return {"last": x}


def mean_outside(output, batch):
    return F.mse_loss(output["last"], batch["y"])


def sum_and_count(output, batch):
    """Rows whose label is positive count, so that each microbatch has another count."""
    mask = (batch["y"] > 0.3).to(output["last"])
    return ((output["last"] - batch["y"]).square() * mask).sum(), mask.sum()


def sum_and_integer(output, batch):
    return (output["last"] - batch["y"]).square().sum(), batch["y"].numel()


def sum_and_given(output, batch):
    """The count comes with the batch."""
    return (output["last"] - batch["y"]).square().sum(), batch["y"][0, 0].abs()


# -- torch's own layers ----------------------------------------------------------------------------------


class Transformer(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, x, y):
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=x.dtype)
        return F.mse_loss(self.layers(x, mask=mask, is_causal=True), y)


class Attention(Chain):
    def __init__(self) -> None:
        super().__init__(block=lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True))

    def forward(self, x, y):
        for block in self.blocks:
            mixed, weights = block(x, x, x)
            x = x + mixed * weights.amax(-1, keepdim=True)
        return F.mse_loss(x, y)


class ChannelsLast(UNet):
    def __init__(self) -> None:
        super().__init__()
        self.to(memory_format=torch.channels_last)

    def forward(self, x, y):
        return super().forward(x.contiguous(memory_format=torch.channels_last), y)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.first, self.second = (
            kind(WIDTH, WIDTH, 2, batch_first=True),
            kind(WIDTH, WIDTH, batch_first=True),
        )

    def forward(self, x, y):
        x, _ = self.first(x)
        x, _ = self.second(x)
        return F.mse_loss(x, y)


class Experts(Chain):
    """Each row goes to its two best experts (computed densely, summed by index)."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def between(self, x, i):
        if i != 2:
            return x
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        gates = torch.zeros_like(x[:, :3]).scatter(-1, chosen, weights)
        return x + sum(gates[:, e : e + 1] * expert(x) for e, expert in enumerate(self.experts))


class Dropout(nn.Module):
    """Dropout, and noise drawn by the forward itself."""

    def __init__(self, depth: int = DEPTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(Block(), nn.Dropout(0.3)) for _ in range(depth)])

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x + 0.1 * torch.randn_like(x))
        return F.mse_loss(x, y)


CASES = {
    "tied_head": Case(TiedHead, tokens),
    "tied_thrice": Case(TiedThrice, tokens),
    "shared_layer": Case(SharedLayer, numbers),
    "scalar_parameter": Case(Temperature, numbers),
    "sum_of_weights": Case(SumOfWeights, numbers),
    "learned_tables": Case(LearnedTables, sequences),
    "weight_norm": Case(WeightNorm, numbers),
    "unet": Case(UNet, images),
    "channels_last": Case(ChannelsLast, images),
    "encoder_decoder": Case(
        EncoderDecoder, lambda rows: {"source": torch.randn(rows, 3, WIDTH), **sequences(rows)}
    ),
    "losses_on_the_way": Case(LossesOnTheWay, numbers),
    "integer_crossing": Case(IntegerCrossing, numbers),
    "transposed": Case(Transposed, sequences),
    "expanded": Case(Expanded, sequences),
    "sliced": Case(Sliced, numbers),
    "multi_output": Case(MultiOutput, numbers),
    "complex": Case(Complex, numbers),
    "conjugated": Case(Conjugated, numbers),
    "straight_through": Case(StraightThrough, numbers),
    "teacher": Case(Teacher, numbers),
    "tensor_hook": Case(TensorHook, numbers),
    "gradient_penalty": Case(GradientPenalty, numbers),
    "checkpointed": Case(Checkpointed, numbers),
    "checkpointed_reentrant": Case(CheckpointedReentrant, numbers),
    "reversible": Case(Reversible, numbers),
    "frozen_and_unused": Case(FrozenAndUnused, numbers),
    "in_place": Case(InPlace, numbers),
    "batch_norm": Case(BatchNorm, images),
    "batch_norm_eval": Case(lambda: BatchNorm().eval(), images),
    "reassigned_buffers": Case(ReassignedBuffers, numbers),
    "nested_arguments": Case(Nested, nested),
    "tuple_of_arguments": Case(Chain, lambda rows: tuple(numbers(rows).values())),
    "loss_attribute": Case(LossAttribute, numbers, lambda output, _: output.loss),
    "keeps_input": Case(KeepsInput, numbers),
    "loss_outside": Case(NoLoss, numbers, mean_outside),
    "sum_and_count": Case(NoLoss, numbers, sum_and_count),
    "sum_and_integer": Case(NoLoss, numbers, sum_and_integer),
    "sum_and_given": Case(NoLoss, numbers, sum_and_given),
    "transformer_layer": Case(Transformer, sequences),
    "multihead_attention": Case(Attention, sequences),
    "lstm": Case(lambda: Recurrent(nn.LSTM), short_sequences),
    "gru": Case(lambda: Recurrent(nn.GRU), short_sequences),
    "experts": Case(Experts, numbers),
}
