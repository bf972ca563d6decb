"""The ops that a calibration times: of each kind some, at sizes from a few elements to more than caches hold.

Each has several sets of operands and takes them in turns, as the ops of a step do not find theirs in the
fastest cache, and allocates its result, as they do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch

from fxpipe.cost.kinds import MOVING
from fxpipe.plan.work import VIEW

aten = torch.ops.aten

#: Elements of a tensor of the ops that move bytes, and rows of square matrices.
ELEMENTS = tuple(1 << k for k in (4, 10, 13, 15, 17, 19, 21, 22))
ROWS = (8, 32, 64, 128, 256, 512, 1024)
LENGTHS = (8, 32, 64, 128, 256, 512)  # of sequences of 8 heads, 32 wide
SIDES = (4, 8, 16, 32, 64)  # of 2 images of 32 channels
THINNEST = 8
#: Sets of operands, as far as they have no more bytes than this.
SETS, SET_BYTES = 16, 1 << 27

#: FLOPs or bytes, and the ops of that size.
Sample = tuple[float, Sequence[Callable[[], object]]]


@dataclass(frozen=True)
class Maker:
    """Makes tensors of one device and dtype, from random numbers of its own."""

    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator

    def __call__(self, *shape: int) -> torch.Tensor:
        drawn = torch.randn(shape, generator=self.generator, device=self.device)
        return drawn.to(self.dtype)

    def turns(self, *shapes: tuple[int, ...]) -> Callable[[], tuple[torch.Tensor, ...]]:
        """Gives tensors of these shapes, each time of another set."""
        size = sum(torch.Size(shape).numel() for shape in shapes) * self.dtype.itemsize
        sets = [tuple(self(*s) for s in shapes) for _ in range(max(1, min(SETS, SET_BYTES // size)))]
        return cycle(sets).__next__


def samples(kind: str, make: Maker) -> list[Sample]:
    """The samples of a kind of ops, from the smallest on."""
    if kind in MOVING:
        sizes: Sequence[int] = ELEMENTS[:1] if kind == VIEW else ELEMENTS
        return [_moving(kind, make, n) for n in sizes]
    if "convolution" in kind:
        return [_convolution(make, side, kind) for side in SIDES]
    if "attention" in kind:
        return [_attention(make, length, "backward" in kind) for length in LENGTHS]
    if kind == "batched product":
        return [_batched(make, length) for length in LENGTHS]
    if kind == "thin product":
        return [_thin(make, rows) for rows in ROWS]
    return [_product(make, rows) for rows in ROWS]


def _product(make: Maker, n: int) -> Sample:
    """A linear layer's forward, its input's and its weight's gradient."""
    turn, total = make.turns((n, n), (n, n)), make(n, n)

    def forward() -> object:
        a, b = turn()
        return aten.mm.default(a, b.t())

    def backward() -> object:
        return aten.mm.default(*turn())

    def weight() -> object:
        a, b = turn()
        return aten.addmm_.default(total, a.t(), b)

    return 2 * n**3, (forward, backward, weight)


def _thin(make: Maker, n: int) -> Sample:
    """Products of rank ``THINNEST``, to as few columns, and from as few rows."""
    turn, narrow = make.turns((n, n)), make.turns((n, THINNEST), (THINNEST, n))

    def inner() -> object:
        a, b = narrow()
        return aten.mm.default(a, b)

    def columns() -> object:
        return aten.mm.default(turn()[0], narrow()[0])

    def rows() -> object:
        return aten.mm.default(narrow()[1], turn()[0])

    return 2 * n * n * THINNEST, (inner, columns, rows)


def _batched(make: Maker, n: int) -> Sample:
    turn = make.turns((8, n, 32), (8, n, 32))

    def scores() -> object:
        a, b = turn()
        return aten.bmm.default(a, b.transpose(1, 2))

    return 2 * 8 * n * n * 32, (scores,)


def _convolution(make: Maker, side: int, kind: str) -> Sample:
    turn = make.turns((2, 32, side, side), (32, 32, 3, 3), (2, 32, side, side))
    settings = [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    flops = 2 * 2 * 32 * 32 * 9 * side * side

    def forward() -> object:
        x, w, _ = turn()
        return aten.convolution.default(x, w, None, *settings)

    def backward(*wanted: bool) -> object:
        x, w, d = turn()
        return aten.convolution_backward.default(d, x, w, [32], *settings, [*wanted])

    if kind == "convolution":
        return flops, (forward,)
    wanted = (False, True, True) if kind == "convolution weight" else (True, False, False)
    return flops, (partial(backward, *wanted),)


def _attention(make: Maker, n: int, is_backward: bool) -> Sample:
    shape = 1, 8, n, 32
    turn = make.turns(shape, shape, shape, shape)
    product = 2 * 8 * n * n * 32

    def forward() -> object:
        q, k, v, _ = turn()
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    if not is_backward:
        return 2 * product, (forward,)
    with torch.enable_grad():
        q, k, v, d = (x.requires_grad_() for x in turn())
        result = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    node: Any = result.grad_fn  # without autograd's engine, which programs do not use
    return 5 * product, (lambda: node(d.detach()),)


def _moving(kind: str, make: Maker, n: int) -> Sample:
    width = min(n, 256)
    turn, item = make.turns((n // width, width), (n // width, width)), make.dtype.itemsize
    rows = torch.randint(n // width, (n // width,), generator=make.generator, device=make.device)

    def of_one(*ops: Callable[[torch.Tensor], object]) -> list[Callable[[], object]]:
        return [partial(lambda op: op(turn()[0]), op) for op in ops]

    def of_two(*ops: Callable[[torch.Tensor, torch.Tensor], object]) -> list[Callable[[], object]]:
        return [partial(lambda op: op(*turn()), op) for op in ops]

    match kind:
        case "view":
            return 0, of_one(lambda x: aten.view.default(x, [n]), aten.t.default)
        case "move":
            return 3 * n * item, of_two(aten.add.Tensor, aten.mul.Tensor)
        case "strided":
            side = 1 << (n.bit_length() - 1) // 2
            long = n // side
            return 2 * n * item, of_one(
                lambda x: aten.clone.default(x.view(side, long).t(), memory_format=torch.contiguous_format)
            )
        case "function":
            return 2 * n * item, of_one(aten.tanh.default, aten.gelu.default, aten.exp.default)
        case "reduction":
            return n * item, of_one(lambda x: aten.sum.dim_IntList(x, [0]), lambda x: aten.mean.dim(x, [1]))
        case "norm":
            return 2 * n * item, of_one(
                lambda x: aten.native_layer_norm.default(x, [width], None, None, 1e-5),
                lambda x: aten._log_softmax.default(x, -1, False),
            )
        case "lookup":
            return 2 * n * item, of_one(lambda x: aten.index_select.default(x, 0, rows))
        case _:
            return n * item, of_one(lambda x: aten.rand_like.default(x))
