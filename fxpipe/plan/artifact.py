"""A compiled pipeline as data: a plan (decisions and predictions), a program for each rank, constants."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import prod
from typing import Annotated

import torch

from fxpipe.errors import number_of
from fxpipe.plan.branches import Branch, When
from fxpipe.plan.field_types import Dtype, GradDtype, Shape, Size
from fxpipe.plan.lanes import NO_LANES, LanePlan
from fxpipe.plan.libraries import Libraries
from fxpipe.plan.meshes import TriedMesh
from fxpipe.plan.number import number
from fxpipe.plan.rewrites import Rewrite
from fxpipe.plan.rows import ShardName
from fxpipe.plan.step import MOST_RANKS, OrderedStep, Replay, Shard, StepSpec, Tier, counted
from fxpipe.plan.tensors import dtype_of, gradient_dtype, is_dense
from fxpipe.plan.work import PlanWork
from fxpipe.schedule.candidate_row import Recompute, Tried
from fxpipe.schedule.costs import MOST_STAGES, Costs
from fxpipe.schedule.ops import Phase, Schedule, Transfer, parse_ops
from fxpipe.schedule.ops import Validation as Validation
from fxpipe.schedule.stages import Vocabulary
from fxpipe.strict import Fits, NonNegative, Share, at_least, between, entries, unstructure

FORMAT = 2
MOST_TRIED = 4096


@dataclass(frozen=True)
class StagePlan:
    """One stage: the rank that holds it, the modules that it begins and ends with, its parameters."""

    stage: int
    rank: int
    first: str
    last: str
    parameters: tuple[str, ...]

    @property
    def modules(self) -> str:
        """The modules as text; "" if there is none beside the model itself."""
        first, last = (path or "the model itself" for path in (self.first, self.last))
        if not (self.first or self.last):
            return ""
        return first if first == last else f"{first} … {last}"


@dataclass(frozen=True)
class Bucket:
    """Gradients of a rank, of one dtype, that are summed over the replicas together, in this order.

    ``before``: the first op that uses one of their parameters, ``after``: the last one that adds to one of
    them, as text.  Of frozen parameters these are the names, ``after`` is the last op that uses one.
    """

    before: str
    after: str
    gradients: tuple[ShardName, ...]


@dataclass(frozen=True)
class RankTensors:
    """The names of one rank's tensors; ``gradients``: the parameters that it accumulates gradients for;
    ``buckets`` have each of these once (none in pipelines that earlier versions saved).  ``frozen``: the
    parameters without gradients that replicas divide, in buckets as well, whose numbers follow."""

    parameters: tuple[ShardName, ...]
    buffers: tuple[ShardName, ...]
    constants: tuple[ShardName, ...]
    gradients: tuple[ShardName, ...]
    buckets: tuple[Bucket, ...] = ()
    frozen: tuple[Bucket, ...] = ()

    @property
    def state(self) -> tuple[ShardName, ...]:
        """The parameters and buffers."""
        return self.parameters + self.buffers

    @property
    def names(self) -> tuple[ShardName, ...]:
        return self.state + self.constants

    @property
    def exchanged(self) -> tuple[Bucket, ...]:
        """All buckets, in the order of their numbers."""
        return self.buckets + self.frozen


def holders(names: Iterable[Iterable[ShardName]]) -> dict[ShardName, list[int]]:
    """The ranks that hold each name, in order; ``names``: those of each rank."""
    ranks_of: dict[ShardName, list[int]] = {}
    for rank, rank_names in enumerate(names):
        for name in rank_names:
            ranks_of.setdefault(name, []).append(rank)
    return ranks_of


@dataclass(frozen=True)
class TensorLayout:
    """The layout of a tensor that a rank holds.  ``dtype`` as text: "torch.float32"."""

    shape: Shape
    stride: tuple[Size, ...]
    dtype: Dtype

    @staticmethod
    def from_tensor(tensor: torch.Tensor) -> TensorLayout:
        """The layout, contiguous where the tensor does not fill its memory (a file cannot hold that)."""
        # On the meta device: only its strides are asked for.
        dense = tensor if is_dense(tensor) else torch.empty(tensor.shape, device="meta")
        return TensorLayout(tuple(tensor.shape), dense.stride(), str(tensor.dtype))

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        itemsize: int = dtype_of(self.dtype).itemsize
        return self.elements * itemsize

    def empty(self, device: torch.device) -> torch.Tensor:
        """A tensor of this layout without values."""
        return torch.empty_strided(self.shape, self.stride, dtype=dtype_of(self.dtype), device=device)


@dataclass(frozen=True)
class Prediction:
    """What the simulator predicts, in seconds and bytes."""

    seconds: Annotated[float, Fits(lambda seconds: seconds > 0, "above 0")]
    span_bubble: Share
    makespan_bubble: Share
    peak_memory: tuple[NonNegative, ...]


@dataclass(frozen=True)
class OffloadSlot:
    """What a stage's F can move for its B or its W: the bytes of the example in a pool, and the tensors."""

    stage: Size
    user: Phase
    bytes: Size
    tensors: Size


@dataclass(frozen=True)
class HeldBytes:
    """Bytes that a rank holds throughout a step, one of several replicas included.

    ``results``: outputs of a whole batch, new values of buffers, what is computed once a step.
    ``exchange``: the memory of a sum over replicas.  ``optimizer``: its state, as ``optimizer_bytes`` has it.
    ``copies``: what takes back an update that was made ahead of the verdict on it.
    """

    parameters: Size = 0
    gradients: Size = 0
    buffers: Size = 0
    results: Size = 0
    exchange: Size = 0
    optimizer: Size = 0
    copies: Size = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, each.name) for each in fields(self))


@dataclass(frozen=True)
class Plan:
    """All decisions and predictions; plan.json is this and nothing else.

    Fields that plans of earlier versions have not come last, and are empty there.
    """

    format: int
    version: str
    model: str
    """The name of its class."""
    schedule: str
    """The name of its family, or that of the user's own."""
    placement: Annotated[tuple[int, ...], entries(1, MOST_STAGES)]
    """The rank of each stage."""
    order: tuple[str, ...]
    """The schedule as text, a line a rank."""
    step: StepSpec
    stages: tuple[StagePlan, ...]
    costs: Costs
    channels: tuple[tuple[int, int], ...]
    """The ordered pairs of ranks that send each other messages."""
    tensors: tuple[RankTensors, ...]
    layouts: dict[str, TensorLayout]
    """Those of parameters (and of the rows that ranks hold), buffers and constants: of one lane."""
    prediction: Prediction
    vocabulary: Vocabulary | None = None
    """The stages that are not the model's own."""
    collectives: int = 0
    """The number of communicators that all ranks share."""
    work: PlanWork | None = None
    """The costs for other sizes, where dimensions were named."""
    tried: Annotated[tuple[Tried, ...], entries(0, MOST_TRIED)] = ()
    """The candidates of ``auto``."""
    recompute: Recompute = ""
    transfers: tuple[Transfer, ...] = ()
    """Offloads and reloads."""
    tier: Tier | None = None
    """The offload store."""
    pools: tuple[Size, ...] = ()
    """The bytes of each rank in the offload store."""
    state: tuple[tuple[str, str], ...] = ()
    """The names of a state dict in the model's order, each with the name of its tensor: two for a tensor with
    two names, none for a buffer that is not persistent."""
    device: str = ""
    """The device whose description the costs are from, as text."""
    grad_dtype: GradDtype = ""
    """The dtype of gradients; "" for that of each parameter."""
    replicas: Annotated[int, between(1, MOST_RANKS)] = 1
    """For so many the schedule was made, and ``run_local`` runs them; other numbers can run the programs."""
    shard: Shard = ""
    """What replicas divide between them."""
    lanes: LanePlan = NO_LANES
    """Those of each rank, where the model has DTensors."""
    validation: Validation = "barrier"
    """The schedule was made for steps with it."""
    replay: Replay = ""
    """Whether ranks replay captured steps."""
    meshes: Annotated[tuple[TriedMesh, ...], entries(0, MOST_TRIED)] = ()
    """Those that were compared to choose ranks and replicas."""
    own_hooks: tuple[str, ...] = ()
    """The functions of hooks that the forward registers by itself."""
    changed: tuple[str, ...] = ()
    """The buffers to which a step gives new values."""
    memory_limit: str = ""
    """As it was given; "" for none."""
    limits: Annotated[tuple[NonNegative, ...], entries(0, MOST_RANKS)] = ()
    """What the limit leaves to the activations of each rank, beside what it holds."""
    held: Annotated[tuple[HeldBytes, ...], entries(0, MOST_RANKS)] = ()
    """What each rank holds throughout a step."""
    batch_means: tuple[str, ...] = ()
    """What the loss divides by, as text, where all microbatches take its mean over the batch."""
    own_means: tuple[str, ...] = ()
    """The same, where each microbatch has its own."""
    rewrites: tuple[Rewrite, ...] = ()
    """The rules that gave the step other kernels."""
    libraries: Libraries = field(default_factory=dict)
    """The ops of others than torch, with the modules that register them."""
    flops: dict[str, NonNegative] = field(default_factory=dict)
    """Of the captured step of one microbatch by arithmetic (``bfloat16``), without recomputation."""
    head_chunks: Annotated[int, at_least(1)] = 1
    """The parts of the output layer."""
    assumed: dict[str, float] = field(default_factory=dict)
    """A leaf of the batch -> the number that all of its elements are, where the programs are for such batches
    alone."""
    undivided: tuple[str, ...] = ()
    """The parameters of which one replica owns all, with ``shard``."""
    slots: Annotated[tuple[OffloadSlot, ...], entries(0, MOST_STAGES)] = ()
    """What ranks move to the offload store."""
    branch: Branch | None = None
    """The answer of the microbatches to a question of the model's code, where the programs are for these
    alone."""

    @property
    def when(self) -> When:
        """The batches that the programs are for, where they are for some alone."""
        return When(self.assumed, self.branch)

    def __repr__(self) -> str:
        """Short: ``to_json`` has all of it."""
        things = {"rank": self.ranks, "microbatch": self.step.microbatches, "stage": len(self.stages)}
        numbers = ", ".join(number_of(number, thing) for thing, number in things.items())
        return f"<Plan of {self.model}: {numbers}, schedule {self.schedule}>"

    @property
    def ranks(self) -> int:
        return self.step.ranks

    def per_second(self, seconds: float, replicas: int) -> tuple[float, str]:
        """What replicas get done in a second of a step that takes so many, and its unit: "tokens"."""
        unit, lengths = counted((leaf.shape or (), leaf.dtype) for leaf in self.step.batch.leaves)
        return prod(lengths) * self.step.microbatches * replicas / seconds, unit

    @property
    def tensor_names(self) -> set[str]:
        """The names of the model's parameters and buffers."""
        return {name.tensor for rank in self.tensors for name in rank.state}

    @property
    def trained(self) -> set[str]:
        """The names of the parameters that get gradients."""
        return {name.tensor for rank in self.tensors for name in rank.gradients}

    @property
    def trains(self) -> bool:
        return any(rank.gradients for rank in self.tensors)

    def gradient_dtype(self, parameter: torch.dtype) -> torch.dtype:
        """The dtype in which the gradient of a parameter of this dtype is accumulated."""
        return gradient_dtype(parameter, dtype_of(self.grad_dtype))

    def gradient_bytes(self, name: str) -> int:
        """The bytes of the gradient of a parameter, or of rows of one, on a lane."""
        layout = self.layouts[name]
        itemsize: int = self.gradient_dtype(dtype_of(layout.dtype)).itemsize
        return layout.elements * itemsize

    def trains_as(self, other: Plan) -> bool:
        """Whether the programs take the tensors of another plan's on the same ranks, beside constants."""
        # Constants are each one's own.
        ours, theirs = ([replace(each, constants=()) for each in plan.tensors] for plan in (self, other))
        names = {name.tensor for each in ours for name in each.state}
        alike = all(self.layouts[name] == other.layouts[name] for name in names)
        return self.placement == other.placement and ours == theirs and alike

    def whole_layout(self, name: str) -> TensorLayout:
        """The layout of a parameter or buffer of all lanes together."""
        layout = self.layouts[name]
        if name not in self.lanes.shared:
            return layout
        shape = self.lanes.whole_shape(name, layout.shape)
        return replace(layout, shape=shape, stride=torch.empty(shape, device="meta").stride())

    @cached_property
    def ordered(self) -> Schedule:
        """The order and its transfers as a schedule.  Raises ScheduleError where a text in it is no op."""
        order = tuple(parse_ops(line) for line in self.order)
        return Schedule(
            self.schedule, self.placement, self.step.microbatches, order, self.vocabulary, self.transfers
        )

    @property
    def number(self) -> int:
        """A number that tells plans apart by their decisions, not by their predictions."""
        # Their order depends on the cut alone, which is told by other fields.
        layouts = sorted(self.layouts.items())
        decisions = (self.step, self.placement, self.order, self.transfers, self.tensors, layouts)
        return number(repr((self.model, *decisions, *self.undivided)).encode())

    def to_json(self) -> str:
        return json.dumps(unstructure(self), indent=1)


@dataclass(frozen=True, eq=False)
class Artifact:
    """What a compilation gives.  ``programs``: the source of every rank's program.  ``constants``: tensors
    the model made itself.

    Under torchrun only rank 0 has all of it.  The other ranks have their own constants and program (the texts
    of the others are empty), and a plan without ``order`` and ``transfers``, which grow with ranks times
    microbatches, ``tried``, and the edges of ``costs``.  ``ask``: gives them the whole plan; ``number``: that
    of the whole plan.  ``captured``: the captured step as JSON (``captured.py``), on rank 0 alone; empty
    where an earlier version saved it.  ``write_step``: the step for the lengths of each microbatch of a
    batch, on rank 0 alone, or None for that of the programs; None where these take the example's lengths
    alone.  ``steps``: what it writes from, as JSON (``compiler/step_writer.py``), on rank 0 alone; empty
    where there is none.
    """

    plan: Plan
    programs: tuple[str, ...]
    constants: dict[str, torch.Tensor]
    number: int
    ask: Callable[[], Plan] | None = None
    captured: str = ""
    steps: str = ""
    write_step: Callable[..., OrderedStep] | None = None

    @cached_property
    def whole_plan(self) -> Plan:
        return self.plan if self.ask is None else self.ask()
