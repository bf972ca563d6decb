"""The IR: nodes, values and sections of a training step.

The training step is one ``torch.fx.Graph``.  Three pieces of metadata hang on its nodes:

``node.meta["val"]``
    the fake tensor (or int, …) that the node produces: shape, dtype, device, strides;
``node.meta["origin"]``
    an :class:`Origin`: where in the user's model the node comes from;
``node.meta["color"]``
    a :class:`Color`: the stage and phase that run it (absent before partitioning).

A node of the backward that is the gradient of a value also has ``node.meta["gradient"]``, a
:class:`~fxpipe.ir.node_names.Gradient`, and a node that is repeated in the kernel of another one
``node.meta["fused"]``.  One of an output layer in parts has ``node.meta["chunk"]``, the number of its part.

A placeholder also carries ``node.meta["input"]``, an :class:`Input`.  The output node's single
argument is an :class:`Outputs`.

docs/architecture.md has a glossary of the words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from fxpipe.plan.tensors import sum_over_ranks as sum_over_ranks  # an op of the graph and of the runtime
from fxpipe.schedule.ops import Color as Color  # words of the graph, too
from fxpipe.schedule.ops import Phase as Phase

if TYPE_CHECKING:
    from torch import fx

_T = TypeVar("_T")


class Kind(StrEnum):
    """The kind of a value that crosses the border of a section."""

    PARAMETER = "parameter"
    ONCE = "once"  # computed once a step, as it is the same for all microbatches
    BUFFER = "buffer"
    CONSTANT = "constant"
    BATCH = "batch"  # a leaf of the user's microbatch
    KEY = "key"  # the random-number key of (seed, step, microbatch)
    VALUE = "value"  # computed by another section of the same microbatch
    OFFLOADED = "offloaded"  # the same, which can be offloaded between the two sections
    LOSS = "loss"
    COUNT = "count"
    OUTPUT = "output"  # computed here and asked for by the user; named after its node
    GRADIENT = "gradient"  # of a parameter: added to its accumulator


def read_buffer(buffer: _T) -> _T:
    """An op of the graph: the value of a buffer that the step changes, as the microbatch before left it.

    The one user of the buffer's placeholder, in the section that gives the new value; all other ops use this
    node, so that whoever reads the buffer later, or again, gets the value of its own microbatch.
    """
    return buffer


def offload(value: _T) -> _T:
    """An op of the graph: a value that can be offloaded; B and W use only the ``reload`` of the result."""
    return value


def reload(offloaded: _T) -> _T:
    """An op of the graph: the value that was given to ``offload``."""
    return offloaded


def batch_mean(value: _T) -> _T:
    """An op of the graph: the mean of a value over all microbatches of the batch, of all replicas.

    It follows from data alone, so that a program computes it before its first op.
    """
    return value


@dataclass(frozen=True, slots=True)
class Origin:
    """The place that a node comes from.

    ``path`` is the module path (``"transformer.h.3.attn"``, "" for the model itself), ``source`` the
    user's ``file:line``, ``seq`` autograd's sequence number of the forward op that the node is part
    of or differentiates (None where autograd recorded none), ``backward`` whether it ran in backward.
    """

    path: str = ""
    source: str = ""
    seq: int | None = None
    backward: bool = False

    def __str__(self) -> str:
        """The place as messages name it."""
        return f"{self.module}, {self.source or 'an unknown line'}"

    @property
    def is_of_autograd(self) -> bool:
        """Whether autograd's engine made the op, which is of no line of the model: a sum of gradients."""
        return self.backward and not self.path and not self.source

    @property
    def module(self) -> str:
        """``module 'h.3.attn'``, or ``the model itself``, for messages."""
        return f"module {self.path!r}" if self.path else "the model itself"


def origin_of(node: fx.Node) -> Origin:
    """The place that a traced node comes from, which one of capture's own does not have."""
    origin: Origin = node.meta.get("origin", Origin())
    return origin


def modules_around(a: Origin, b: Origin) -> int:
    """The number of modules, beside the model itself, of whose forward both ops are a part."""
    paths = (origin.path.split(".") if origin.path else [] for origin in (a, b))
    return sum(1 for _ in takewhile(lambda names: names[0] == names[1], zip(*paths, strict=False)))


def module_around(paths: Iterable[str]) -> str:
    """The path of the innermost module that all these are, or are part of; "" for the model itself."""
    columns = zip(*(path.split(".") for path in paths), strict=False)  # as far as the shortest goes
    return ".".join(column[0] for column in takewhile(lambda column: len({*column}) == 1, columns))


def modules_on(path: str) -> list[str]:
    """The paths of the modules that a path leads through, the outermost first, itself the last."""
    parts = path.split(".")
    return [".".join(parts[: k + 1]) for k in range(len(parts))]


@dataclass(frozen=True, slots=True)
class Input:
    """The source of a placeholder: ``name`` is the parameter's, buffer's or batch leaf's name.

    ``computed``: of ``Kind.ONCE``, the node that computes it, in a graph of its own.
    """

    kind: Kind
    name: str
    computed: fx.Node | None = None


class Outputs(NamedTuple):
    """The argument of the output node: what a microbatch of the step results in.

    ``loss``: a 0-d tensor, or None (a forward without a loss).
    ``count``: the number of terms that the loss is a sum of, or None (the loss is a mean).
    ``outputs``: the values that the user asks for beside the loss, by name.
    ``grads``: parameter -> the summands of its gradient.
    ``buffers``: the new value of every buffer that the step changes.
    ``checks``: ``expect`` ops, which must hold of the microbatch and run for nothing else.
    """

    loss: fx.Node | None
    count: fx.Node | None  # type: ignore[assignment]  # tuples have a method of that name
    outputs: dict[str, fx.Node]
    grads: dict[str, tuple[fx.Node, ...]]
    buffers: dict[str, fx.Node]
    checks: tuple[fx.Node, ...] = ()


@dataclass(frozen=True)
class Free:
    """The forward ops whose values sections may recompute: ``anywhere``, or only ``in_stage``, in the
    sections of their own stage.  ``of_weights``: those that are computed once a step, of which alone there is
    no stage."""

    anywhere: set[fx.Node]
    in_stage: set[fx.Node]
    of_weights: set[fx.Node] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Value:
    """One input or output of a section.

    ``name`` is unique in the whole step: a parameter name for PARAMETER and GRADIENT, the name of
    the node for VALUE, OFFLOADED and OUTPUT.  ``producer`` is the section that computes a VALUE or OFFLOADED,
    else None.  ``summands``: the values, one of each rank, whose sum arrives.  ``computed_from``: the step's
    inputs, of a value of ONCE.
    """

    kind: Kind
    name: str
    producer: Color | None = None
    summands: tuple[Value, ...] = ()
    computed_from: tuple[Value, ...] = ()

    @property
    def sources(self) -> tuple[Value, ...]:
        """The values that other sections give for it."""
        return self.summands or (self,)


@dataclass(frozen=True, eq=False)
class Section:
    """The extracted subgraph of one (stage, phase): a plain function from ``inputs`` to ``outputs``.

    ``built`` makes its ``graph`` on first use: the graphs of most cuts are never used.
    """

    color: Color
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    built: Callable[[], fx.Graph]

    @cached_property
    def graph(self) -> fx.Graph:
        """One placeholder an input, in order; returns a tuple, one entry an output."""
        return self.built()

    @property
    def step_inputs(self) -> Iterator[Value]:
        """The inputs, with what the section needs of the step's for those that are computed once."""
        for value in self.inputs:
            yield from (value, *value.computed_from)

    @property
    def stage(self) -> int:
        return self.color.stage

    @property
    def phase(self) -> Phase:
        return self.color.phase
