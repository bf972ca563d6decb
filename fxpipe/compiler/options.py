"""The options that the compiler reads: the one source of their docs and types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from fxpipe.cost.devices.known_devices import tier_of
from fxpipe.errors import OptionError, one_of
from fxpipe.ir.compiled import compiled_phases
from fxpipe.passes.level.recompute import Level
from fxpipe.plan.branches import Branch
from fxpipe.plan.meshes import Mesh
from fxpipe.plan.rewrites import RULES, Rule
from fxpipe.plan.step import Replay, Tier
from fxpipe.runtime.program.offload import default_tier
from fxpipe.schedule.formats.handwritten import is_file_name, read_schedule
from fxpipe.schedule.offload.planner import FULL
from fxpipe.schedule.ops import Objective, Phase, Schedule, Validation
from fxpipe.schedule.search.fastest import AUTO
from fxpipe.schedule.units import BYTES, parse_bytes


@dataclass(frozen=True)
class Offload:
    """Which saved activations leave their rank between the forward and the backward, and where to.

    share: of the saved bytes, from 0 to 1 (True: all, False or None: nothing), or ``"auto"``, as much as
        needed to keep ``memory_limit``.  The values that are needed last go first, and no more than can
        come back in time.
    tier: that the plan is for, ``"host"``, pinned memory beside a GPU, or ``"disk"``, beside the CPU; by
        default the one that goes with the device of ``costs``.  Processes use that of their own device.
    directory: of the disk tier, on a fast disk (by default the system's directory for temporary files).  Its
        files have no names and are gone with the process.
    bandwidth: bytes a second, one way, for the plan; by default measured if ``costs`` are, else that of the
        device's description.
    ranks_per_link: the number of neighboring ranks that share the link (two GPUs on one switch: 2).
    """

    share: bool | float | str | None = True
    tier: Tier | None = None
    directory: str | Path | None = None
    bandwidth: float | None = None
    ranks_per_link: int = 1

    def on(self, device: torch.device, costs: object) -> Offload:
        """The same with the share as a number, ``"auto"`` or None, and the tier of the device that costs
        name, or else of the device at hand."""
        first = costs[0] if isinstance(costs, tuple) and costs else costs
        tier = self.tier or (tier_of(first) if isinstance(first, str) else None) or default_tier(device)
        share = None if self.share is False else FULL if self.share is True else self.share
        return replace(self, share=share, tier=tier)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The text below a field is its documentation everywhere: in ``help(fxpipe.compile)``, in the table of
    docs/reference.md, and, its first sentence, in the help of commands that take the option."""

    # The step
    mean: Literal["batch", "microbatch"] = "batch"
    """What a loss is the mean of, where it divides by a number of labels or by the sum of a mask.
    ``"batch"``: it divides by that of the whole batch. ``"microbatch"``: each microbatch divides by its
    own, as in a loop of plain torch that accumulates gradients; the step takes the mean of these
    (docs/training.md)."""
    gradients: bool = True
    """Whether the step has a backward. False compiles the forward alone, for evaluation of
    ``model.eval()``: ``pipe.step`` and ``run_local`` then give the loss. With ``outputs`` it needs no
    loss."""
    grad_dtype: torch.dtype | None = None
    """The dtype of accumulated gradients, where that of parameters has fewer bits: they are summed and
    clipped in it, and ``.grad`` has it. ``torch.float32`` for a model of bfloat16, which loses bits from
    about 16 microbatches on. By default each parameter's own."""
    outputs: Sequence[str] = ()
    """Names of values that ``pipe.step(batch, outputs=[…])`` can give beside the loss: tensors in the
    model's output (``"logits"``, ``"0"`` of a tuple, ``"losses.ce"``; ``"output"`` if it is one tensor),
    metrics of ``loss_fn``, ``"loss"`` and ``"count"``, and the results of modules by their paths
    (``"blocks.3"``; ``"norm#1"`` of the second call)."""
    evaluation: bool = False
    """Whether to make the programs of ``pipe.evaluate`` as well: the forward in eval mode alone, for the
    same ranks."""
    seed: int = 0
    """The seed of dropout and other random ops. Their numbers depend on it, the step and the microbatch
    alone."""
    fixed: Sequence[str] = ()
    """Names of tensors of the example whose values are part of the program, for models whose Python code
    decides by them (``["image_grid_thw"]``). Every microbatch must hold the same values, else
    RunError."""

    # The schedule
    schedule: str | Schedule | Path = AUTO
    """The name of a family of schedules (docs/schedules.md), or ``"auto"``, the one with the shortest
    simulated step over all families, placements and one, two or four stages per rank. Also a Schedule, or the
    path of a schedule as text or as torch's CSV (``"mine.txt"``)."""
    validation: Validation = "barrier"
    """When ranks update their parameters: the ``validation`` of the optimizer with which the pipeline is
    to train, for the schedule (docs/schedules.md). With ``"post"`` the schedule is the one with the
    shortest simulated time a step of many, instead of that of one by itself."""
    stages_per_rank: int | None = None
    """The number of stages on each rank. By default what suits the schedule."""
    placement: Literal["plain", "v"] | None = None
    """The rank of each stage: ``plain`` (stage s on rank s mod ranks) or ``v`` (down the ranks and back up).
    By default what suits the schedule."""
    parts: int | Literal["auto", "exchanges"] = "auto"
    """In how many parts each stage is cut, which follow each other on its rank. Replicas that divide
    parameters gather those of one part at a time (docs/mesh.md). ``"exchanges"``: a part ends where the
    lanes of a rank exchange tokens or rows (docs/lanes.md). ``"auto"``: whole stages; in parts at
    exchanges if that is faster, as simulated; in 4, 8, … parts if ``shard="parameters"`` keeps
    ``memory_limit`` in no other way."""
    split_points: Sequence[str] | None = None
    """Paths of the modules that begin the second and later stages. By default the model is cut by cost."""
    effort: float | None = None
    """The effort of a search for a schedule: about the seconds of one core, and it uses all cores. By
    default two milliseconds for every op, and 8 seconds at most."""
    costs: str | Sequence[str] = "analytic"
    """The times that the schedule is made for: ``analytic`` (FLOPs and bytes on a description of the
    device at hand), ``measured`` (each section timed on it), the name of a device, ``"H100"``, which need
    not be here, the file of a calibrated one, ``"cpu.json"``, or a list with one for each rank
    (docs/costs.md)."""
    ranks_per_machine: int | None = None
    """The number of ranks that share a machine: messages between machines take the time of the network. By
    default torchrun's ``--nproc-per-node``, and without torchrun one machine has all ranks."""
    dimensions: Mapping[str, int] | None = None
    """Names for lengths of the example, ``{"sequence": 256}``: there microbatches may be shorter, each of
    its own length (docs/lengths.md), and ``pipe.simulate`` predicts costs for other lengths. Every
    dimension that is 256 long gets that name, but the leading one is ``microbatch``; with another name, or
    with that, it may have other lengths, too: ``{"rows": 2, "sequence": 256}``. Raises SizeError if the
    model's ops differ at two lengths."""

    # Memory
    memory_limit: float | str | None = None
    """The memory of each rank, in bytes or as ``"16GiB"``: for its parameters, gradients and buffers, and
    the values saved between ops. Leave room for the memory of a single op, and for the optimizer's state,
    unless ``optimizer_bytes`` counts it (docs/offload.md)."""
    optimizer_bytes: float = 0.0
    """The optimizer's state for each element of a trained parameter, in bytes: 8 for AdamW in float32, 12
    with ``master_weights``."""
    undivided: Sequence[str] = ()
    """Names or patterns (``"blocks.*.weight"``) of parameters of which one replica owns all, with
    ``shard``: for optimizers that update a matrix as a whole, such as Muon (docs/mesh.md)."""
    vocab_parallel: Literal["1-barrier", "2-barrier", "auto"] | bool = False
    """Whether to split the output layer with its cross-entropy, and the input embedding, over all ranks.
    ``"1-barrier"`` (or True) or ``"2-barrier"`` (ranks wait for each other once or twice a microbatch),
    or ``"auto"`` (docs/vocabulary.md)."""
    head_chunks: int | Literal["auto"] = 1
    """In how many parts of the tokens the output layer, its cross-entropy and their gradients are
    computed, one after the other, also of a shard with ``vocab_parallel`` (docs/vocabulary.md).
    ``"auto"``: whole or in parts of at least 128 tokens, whichever gives the faster step within
    ``memory_limit``, as simulated."""
    recompute: Level | Literal["auto", False] = False
    """Which forward values the backward recomputes instead of reading saved ones; gradients are
    bit-identical. ``"norms"`` (all but matrix products, convolutions and attention), ``"full"``, or
    ``"auto"``, the fastest of none and these within ``memory_limit``, as simulated."""
    offload: Offload | bool | float | Literal["auto"] = False
    """Which saved activations leave the rank until the backward needs them, for pinned memory (GPU) or a file
    (CPU): an :class:`fxpipe.Offload`, or its ``share`` alone, True, ``0.5``, or ``"auto"``, as much as
    ``memory_limit`` requires (docs/offload.md)."""

    # The programs
    backend: Literal["eager", "inductor"] = "eager"
    """What runs the ops. ``"inductor"``: before its first step each rank compiles the forward and
    backward of its stages with Inductor, PyTorch's own compiler (docs/inductor.md). Random numbers are
    the same, other results differ by rounding."""
    replay: Literal["auto"] | bool = False
    """Whether each rank captures its step once, as a CUDA graph, and replays it (docs/replay.md). True:
    always; ``"auto"``: if the first steps show that it is faster. The first three steps run both ways and
    must give the same bits; otherwise steps run op by op, and a warning says why."""
    print_after: str | None = None
    """The name of a rewrite, after which the graph is printed, one line a node, for each candidate
    (``"untie"``; docs/architecture.md lists them, and so does the error for another name)."""
    without: Sequence[Rule] = ()
    """Names of rules that are not to be applied: ``"causal-masks"``, ``"empty-masks"``, ``"batch-masks"``,
    ``"batch-branches"``, ``"joined-sums"``, ``"repeat-in-kernels"``, ``"compiled-weights"`` and
    ``"weights-once"`` (docs/models.md); ``fxpipe explain`` tells what they save."""
    check: bool = True
    """Whether to prove that the programs are the captured step (docs/certificate.md). False leaves it to
    ``pipe.check()`` and ``fxpipe check``."""


@dataclass(frozen=True, kw_only=True)
class Settings(Options):
    """Options as the compiler reads them: numbers for texts, what they leave to the device, and the mesh.

    ``on_ranks``, ``has_on_ranks``: with ``like``, per rank the tensors that may be used there, and the
    parameters that the other pipeline has.
    """

    mesh: Mesh
    outputs: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    undivided: tuple[str, ...] = ()
    without: tuple[Rule, ...] = ()
    schedule: str | Schedule = AUTO
    split_points: tuple[str, ...] | None = None
    costs: str | tuple[str, ...] = "analytic"
    memory_limit: float | None = None
    limit_text: str = ""
    """The memory limit as the user wrote it."""
    offload: Offload = Offload(share=None)
    per_use: bool = False
    """Whether parameters that replicas divide are gathered for single ops, to keep the limit."""
    on_ranks: tuple[tuple[str, ...], ...] = ()
    has_on_ranks: tuple[tuple[str, ...], ...] = ()
    assumed: Mapping[str, float] = field(default_factory=dict)
    branch: Branch | None = None
    """The answer of the microbatches, as ``assumed`` for those programs alone: see ``CaptureOptions``."""
    in_stages: tuple[frozenset[str], ...] = ()
    """The tensors of each of the model's stages, where it is to be cut as it was before."""

    @property
    def tier(self) -> Tier:
        """The offload store."""
        assert self.offload.tier is not None, "settings have the device's"
        return self.offload.tier

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules that may give the step other kernels."""
        # Who divides parameters wants no copies of whole ones throughout the step.
        without = {*self.without, *(["weights-once"] if self.mesh.divides_parameters else [])}
        return tuple(rule for rule in RULES if rule not in without)

    @property
    def compiled(self) -> frozenset[Phase]:
        """The phases whose sections, or parts of them, are compiled."""
        return compiled_phases(self.backend, self.rules)

    @property
    def replays(self) -> Replay:
        """Whether steps are replayed, as the plan has it."""
        return "auto" if self.replay == "auto" else "always" if self.replay else ""

    @property
    def offload_directory(self) -> Path | None:
        directory = self.offload.directory
        return None if directory is None else Path(directory)

    @property
    def updates_ahead(self) -> bool:
        """Whether ranks update before the gradients of all are known to be right."""
        return self.validation == "post"

    @property
    def objective(self) -> Objective:
        """What the schedule makes short."""
        return "period" if self.updates_ahead else "makespan"


def settle(options: Options, mesh: Mesh, device: torch.device) -> Settings:
    """The options for a mesh and a device.  Raises OptionError for values that no option can have."""
    check_choices(options)
    limit, costs, offload = options.memory_limit, options.costs, options.offload
    split_points, schedule = options.split_points, options.schedule
    settled: dict[str, Any] = {each.name: getattr(options, each.name) for each in fields(Options)} | {
        "outputs": tuple(dict.fromkeys(names_of(options.outputs, "outputs"))),
        "fixed": names_of(options.fixed, "fixed"),
        "undivided": names_of(options.undivided, "undivided"),
        "without": names_of(options.without, "without"),
        "schedule": read_schedule(schedule) if is_file_name(schedule) else schedule,
        "split_points": None if split_points is None else names_of(split_points, "split_points"),
        "costs": tuple(costs) if isinstance(costs, list | tuple) else costs,
        "memory_limit": None if limit is None else limit_of(limit),
        "limit_text": "" if limit is None else str(limit),
    }
    settled["offload"] = (offload if isinstance(offload, Offload) else Offload(offload)).on(
        device, settled["costs"]
    )
    return Settings(mesh=mesh, **settled)


def check_choices(options: Options) -> None:
    """Raise OptionError for an option whose type lists its values, and that has another one."""
    for name, kind in get_type_hints(type(options)).items():
        if choices := _choices(kind):
            one_of(name, getattr(options, name), choices)


def _choices(kind: object) -> tuple[object, ...]:
    """The values that a type lists; none for a type that has others."""
    if kind in (bool, type(None)):
        return (True, False) if kind is bool else (None,)
    if get_origin(kind) is Literal:
        return get_args(kind)
    parts = [_choices(part) for part in get_args(kind)] if get_origin(kind) in (Union, UnionType) else [()]
    return tuple(choice for part in parts for choice in part) if all(parts) else ()


def names_of(names: Iterable[str], option: str) -> tuple[object, ...]:
    """The names that an option lists.  Raises OptionError for anything else, and for one text."""
    if isinstance(names, str):
        raise OptionError(f"{option} is a list of names: give {[names]}.")
    listed = tuple(names) if isinstance(names, Iterable) else None
    if listed is None or not all(isinstance(name, str) for name in listed):
        raise OptionError(f"{option} is {names!r:.200} and must be a list of names.")
    return listed


def limit_of(text: float | str) -> float:
    """``"16GiB"``, ``"800 MB"`` or a number, in bytes.  Raises OptionError for any other text."""
    limit = parse_bytes(str(text))
    if limit is not None and limit < 1:
        raise OptionError(
            f"The memory limit is {text!r}, which is in bytes. Give the bytes of a rank's device, or a text "
            "such as '16GiB'."
        )
    if limit is None:
        raise OptionError(
            f"The memory limit is {text!r}; give a number of bytes above 0 or a text such as '16GiB' "
            f"(units: {', '.join(name for name in BYTES if name)})."
        )
    return limit
