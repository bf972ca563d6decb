"""The data that every rank's runtime needs beside its program: a part of plan.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Annotated, Literal, NamedTuple

from fxpipe.plan.field_types import Dtype, FloatingDtype, Shape, Size, Terms
from fxpipe.strict import between

MOST_RANKS, MOST_LENGTH = 1 << 16, 1 << 31

Tier = Literal["host", "disk"]
"""The offload stores: pinned memory beside a GPU, a file beside the CPU."""

Replay = Literal["", "auto", "always"]
"""Whether ranks replay their captured steps: where that is faster, or always."""

Shard = Literal["", "optimizer", "gradients", "parameters"]
"""What replicas divide between them, with all that stands before it: the optimizer's state, the gradients
behind their sum, the parameters between their uses.  Empty: nothing."""
SHARDS: tuple[Shard, ...] = ("optimizer", "gradients", "parameters")


class Asked(NamedTuple):
    """What a forward asks of tensors beside their values, shapes and dtypes: ``requires_grad`` of any but
    parameters, ``strides`` of those of the microbatch."""

    requires_grad: bool = False
    strides: bool = False


ASKED_NOTHING = Asked()


@dataclass(frozen=True)
class Leaf:
    """One leaf of the example microbatch.  ``shape`` and ``dtype`` for a tensor, else ``value`` as text."""

    name: str
    shape: Shape | None
    stride: tuple[Size, ...]
    dtype: str
    value: str
    requires_grad: bool | None = None
    """That of the example's tensor, if the forward asks for it."""
    written: bool = False
    """Whether the forward writes to its memory."""
    strided: bool = False
    """Whether it asks for the strides."""
    unread: bool = False
    """Whether neither forward nor loss_fn reads it."""


@dataclass(frozen=True)
class BatchSpec:
    """The leaves of the example microbatch."""

    leaves: tuple[Leaf, ...]

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of the leaves that are tensors."""
        return tuple(leaf.name for leaf in self.leaves if leaf.shape is not None)

    def with_lengths(self, lengths: Mapping[int, int], rows: int | None) -> BatchSpec:
        """The leaves of a microbatch of other lengths.  lengths: by that of the example, of all dimensions
        but the leading one.  rows: the length of that, if it is another one."""
        return BatchSpec(tuple(_with_lengths(leaf, lengths, rows) for leaf in self.leaves))


def _with_lengths(leaf: Leaf, lengths: Mapping[int, int], rows: int | None) -> Leaf:
    if not leaf.shape:
        return leaf
    shape = (rows or leaf.shape[0], *(lengths.get(n, n) for n in leaf.shape[1:]))
    if shape == leaf.shape:
        return leaf
    stride, step = [0] * len(shape), 1
    # In the order in which the example's elements lie, without gaps.
    for d in sorted(range(len(shape)), key=lambda d: (leaf.stride[d], -d)):
        stride[d], step = step, step * shape[d]
    return replace(leaf, shape=shape, stride=tuple(stride))


def counted(tensors: Iterable[tuple[Sequence[int], str]]) -> tuple[str, tuple[int, ...]]:
    """The unit in which the data of a step are counted, and the lengths whose product is their number in a
    microbatch: "tokens" where the first tensor of the example is a sequence of integers in each row, [rows,
    length]; else "samples", its rows.

    tensors: shape and dtype of each, "torch.int64".
    """
    shape, dtype = next(((shape, dtype) for shape, dtype in tensors if shape), ((1,), ""))
    if "int" in dtype and len(shape) == 2:
        return "tokens", tuple(shape)
    return "samples", tuple(shape[:1])


@dataclass(frozen=True)
class NamedLength:
    """A dimension of microbatches that may have other lengths than the example's.

    ``example``: the longest, that of the example.  ``least``: the shortest.  ``step``: lengths between them
    are multiples of it.  ``leading``: it is the number of rows, of which shorter microbatches may have more
    than the example (``most``).
    """

    name: str
    example: Annotated[int, between(1, MOST_LENGTH)]
    least: Annotated[int, between(1, MOST_LENGTH)]
    step: Annotated[int, between(1, MOST_LENGTH)]
    leading: bool = False

    def most(self, others: Iterable[NamedLength], lengths: Mapping[str, int]) -> int:
        """The longest in a microbatch of these lengths, in which no tensor is larger than in the example."""
        if not self.leading:
            return self.example
        each = (self.example * other.example // lengths[other.name] for other in others if other != self)
        return min(each, default=self.example)


def refused(names: Sequence[NamedLength], lengths: Mapping[str, int]) -> tuple[str, str] | None:
    """The name of the first of some lengths that programs do not take, and those that they take, as a
    sentence; None if they take all."""
    # The rows last: how many there may be follows from the other lengths.
    for each in sorted(names, key=lambda each: each.leading):
        most = each.most(names, lengths)
        if not each.least <= lengths[each.name] <= most or lengths[each.name] % each.step:
            multiples = f", multiples of {each.step}" if each.step > 1 else ""
            others = [f"{one.name} {lengths[one.name]}" for one in names if each.leading and one != each]
            beside = f" with {', '.join(others)}" if others else ""
            if each.leading and lengths[each.name] < each.least:
                remedy = "give more rows in fewer microbatches, or rows that the loss does not count."
            elif each.leading:
                remedy = "give fewer rows in more microbatches, or compile with a larger example."
            else:
                remedy = "pad a shorter one, and compile with a longer example for a longer one."
            text = f"The programs take {each.name} from {each.least} to {most}{multiples}{beside}: {remedy}"
            return each.name, text
    return None


POSITIONS = "position_ids"
"""The leaf by which models keep packed samples apart, as ``fxpipe.pack`` makes it."""
SHARES = 16
"""In so many parts the share of attention is known that packed documents have of that of all tokens."""


@dataclass(frozen=True)
class Documents:
    """The leaf by which attention knows the packed documents of a microbatch: their boundaries, as [0, 700,
    1200, 1200], or the positions of its tokens, which rise by 1 in each."""

    leaf: str
    are_positions: bool


@dataclass(frozen=True)
class Table:
    """A leaf whose values are rows of a table that has so many, as words and positions are, or labels of so
    many classes.

    ``least``: the least value, as -``rows`` where -1 is the last row; None for any.  ``ignored``: a value
    that is none.  ``margins``: of each dimension how many values at its begin and at its end are not read.
    """

    leaf: str
    rows: Annotated[int, between(1, MOST_LENGTH)]
    least: int | None = 0
    ignored: int | None = None
    margins: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Boundaries:
    """A leaf of the boundaries of packed documents in so many ``tokens`` of a microbatch, a polynomial of its
    lengths.  ``margins``: see ``Table``."""

    leaf: str
    tokens: Terms
    margins: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class OutputSpec:
    """An output that can be asked for; a part of plan.json.

    ``rank``: which computes it.  ``shape``, ``dtype``: of one microbatch; the dtype as text, "torch.float32".
    """

    name: str
    rank: int
    shape: Shape
    dtype: Dtype


@dataclass(frozen=True)
class OrderedStep:
    """The function ``step`` of each rank's program for the microbatches of one batch, as text.

    ``ops``: those that it calls, by rank.  Without texts it is the program's own.  ``bubble``: the largest
    idle share of a rank from its first op to its last, as simulated; None where that is not known.
    """

    texts: tuple[str, ...]
    ops: tuple[tuple[str, ...], ...]
    bubble: float | None


@dataclass(frozen=True)
class StepSpec:
    """The data that every rank's runtime needs beside its program; a part of plan.json."""

    ranks: Annotated[int, between(1, MOST_RANKS)]
    microbatches: int
    batch: BatchSpec
    loss_rank: int
    loss_dtype: FloatingDtype
    """Its dtype as text: "torch.float32"."""
    has_count: bool
    """Whether the loss is a (sum, count)."""
    seed: int
    default_dtype: FloatingDtype
    """The default dtype of torch in the trace."""
    leaves: tuple[tuple[str, ...], ...]
    """The names of the leaves of the batch that the program of each rank uses."""
    outputs: tuple[OutputSpec, ...] = ()
    """Those that a step can be asked for."""
    has_loss: bool = True
    """Without it the step is a forward for its outputs alone."""
    lengths: tuple[NamedLength, ...] = ()
    """The dimensions of microbatches that may have other lengths than the example's."""
    one_length: str = ""
    """Why there are none, where dimensions were named."""
    totals: tuple[str, ...] = ()
    """The leaves by whose numbers, of all microbatches of a replica, the loss divides."""
    documents: Documents | None = None
    """Where a microbatch's time depends on those that are packed in it."""
    mixes: bool = False
    """Whether the step has positions by which it keeps none apart."""
    tables: tuple[Table, ...] = ()
    """The tables of which leaves of the batch are rows."""
    boundaries: tuple[Boundaries, ...] = ()
    """The leaves that divide tokens into documents."""
    fewer: str = ""
    """Why programs take no other lengths."""

    def batch_at(self, lengths: Mapping[str, int]) -> BatchSpec:
        """The leaves of a microbatch of these lengths, all of them named."""
        others = {each.example: lengths[each.name] for each in self.lengths if not each.leading}
        rows = next((lengths[each.name] for each in self.lengths if each.leading), None)
        return self.batch.with_lengths(others, rows)

    @property
    def halved_lengths(self) -> list[dict[str, int]]:
        """The lengths of the example, half of them, a quarter, down to the least."""
        all_lengths, shorter = list[dict[str, int]](), {each.name: each.example for each in self.lengths}
        while shorter not in all_lengths:
            all_lengths.append(shorter)
            halves = {each.name: shorter[each.name] // 2 // each.step * each.step for each in self.lengths}
            shorter = {each.name: max(each.least, halves[each.name]) for each in self.lengths}
        return all_lengths

    def tokens(self, lengths: Iterable[Mapping[str, int]]) -> int:
        """The number of what ``counted`` counts in microbatches of these lengths."""
        numbers = Counter(tuple(each.items()) for each in lengths)
        return sum(number * self._tokens(dict(each)) for each, number in numbers.items())

    def _tokens(self, lengths: Mapping[str, int]) -> int:
        leaves = self.batch_at(lengths).leaves
        return prod(counted((leaf.shape or (), leaf.dtype) for leaf in leaves)[1])

    def with_microbatches(self, number: int) -> StepSpec:
        """The data of a step of another number of microbatches."""
        return self if number == self.microbatches else replace(self, microbatches=number)

    def at(self, lengths: Mapping[str, int]) -> StepSpec:
        """The data of steps whose microbatches all have these lengths."""
        named = (replace(each, example=lengths[each.name]) for each in self.lengths)
        return replace(self, batch=self.batch_at(lengths), lengths=tuple(named))
