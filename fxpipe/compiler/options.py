"""The user's options, and their validation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

import torch

from fxpipe.compiler.passes import PASS_NAMES
from fxpipe.cost.known_devices import device_names, is_device_name
from fxpipe.errors import OptionError, at_least_one, number_of, suggested
from fxpipe.ir.sections import BACKENDS
from fxpipe.passes.level.recompute import LEVELS, Level
from fxpipe.plan.lanes import LanePlan
from fxpipe.plan.rewrites import RULES, Rule
from fxpipe.plan.step import SHARDS, TIERS, Shard, Tier
from fxpipe.plan.tensors import GRAD_DTYPES
from fxpipe.runtime.program.offload import default_tier
from fxpipe.schedule.families.registry import FAMILIES
from fxpipe.schedule.offload.planner import FULL
from fxpipe.schedule.ops import MOST_FORWARDS, VALIDATIONS, Schedule, Validation
from fxpipe.schedule.placement import PLACEMENTS, place
from fxpipe.schedule.search.fastest import AUTO, stages_and_placements, unknown_schedule
from fxpipe.schedule.units import BYTES, parse_bytes

BARRIERS: dict[str | bool, int] = {"1-barrier": 1, "2-barrier": 2, True: 1}

MEANS = ("batch", "microbatch")
"""Of what a loss that divides by a count of data is the mean."""


@dataclass(frozen=True)
class Offload:
    """Which saved activations leave their rank between the forward and the backward, and where to.

    share: of the saved bytes, from 0 to 1 (True: all, False or None: nothing), or ``"auto"``, as much as
        needed to keep ``memory_limit``.  The values that are needed last go first, and no more than can
        come back in time.
    tier: ``"host"``, pinned memory beside a GPU, or ``"disk"``, beside the CPU; by default the one that goes
        with the device.
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


def as_offload(offload: Offload | bool | float | str, device: torch.device) -> Offload:
    """``offload`` as a record: the share a number, ``"auto"`` or None, the tier the device's."""
    asked = offload if isinstance(offload, Offload) else Offload(share=offload)
    share = None if asked.share is False else FULL if asked.share is True else asked.share
    return replace(asked, share=share, tier=asked.tier or default_tier(device))


@dataclass(frozen=True)
class Options:
    """See ``fxpipe.compile``; None leaves the choice to the compiler.  ``memory_limit`` is in bytes."""

    ranks: int
    microbatches: int
    schedule: str | Schedule
    stages_per_rank: int | None
    placement: str | None
    split_points: tuple[str, ...] | None
    memory_limit: float | None
    costs: str | tuple[str, ...]
    seed: int
    replicas: int = 1
    shard: Shard | None = None
    optimizer_bytes: float = 0.0  # of an optimizer's state, for each element of a trained parameter
    per_use: bool = False  # of parameters that replicas divide: gathered for single ops, to keep the limit
    vocab_parallel: str | bool = False
    gradients: bool = True
    grad_dtype: torch.dtype | None = None
    recompute: str | bool = False
    offload: Offload = Offload(share=None)
    dimensions: Mapping[str, int] | None = None
    fixed: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    evaluation: bool = False
    effort: float | None = None
    ranks_per_machine: int | None = None
    backend: str = "eager"
    print_after: str | None = None
    check: bool = True
    without: tuple[str, ...] = ()
    limit_text: str = ""  # the memory limit as it was given
    # With ``like``, per rank the tensors that may be used there, and the parameters that the other one has.
    on_ranks: tuple[tuple[str, ...], ...] = ()
    has_on_ranks: tuple[tuple[str, ...], ...] = ()
    validation: Validation = "barrier"
    mean: str = "batch"

    @property
    def tier(self) -> Tier:
        """The offload store."""
        assert self.offload.tier is not None, "as_offload gives the device's"
        return self.offload.tier

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Those that may give the step other kernels."""
        return tuple(rule for rule in RULES if rule not in self.without)

    @property
    def offload_directory(self) -> Path | None:
        directory = self.offload.directory
        return None if directory is None else Path(directory)


def check(options: Options) -> None:
    """Raise OptionError for options that are wrong for any model."""
    if options.backend not in BACKENDS:
        raise OptionError(f"backend is {options.backend!r} and must be {' or '.join(map(repr, BACKENDS))}.")
    if options.print_after not in (None, *PASS_NAMES):
        raise OptionError(
            f"print_after is {options.print_after!r} and must be the name of a pass."
            f"{suggested(options.print_after, PASS_NAMES)} Known: {', '.join(PASS_NAMES)}."
        )
    for rule in options.without:
        if rule not in RULES:
            raise OptionError(
                f"without has {rule!r} and takes the names of rules.{suggested(rule, RULES)} Known: "
                f"{', '.join(RULES)}."
            )
    for name in ("gradients", "evaluation", "check"):
        if not isinstance(getattr(options, name), bool):
            raise OptionError(f"{name} is {getattr(options, name)!r} and must be True or False.")
    for name in (
        "ranks",
        "replicas",
        "microbatches",
        "stages_per_rank",
        "ranks_per_machine",
        "ranks_per_link",
    ):
        value = getattr(options.offload if name == "ranks_per_link" else options, name)
        chosen = name in ("stages_per_rank", "ranks_per_machine") and value is None
        if not chosen:
            at_least_one(name, value)
    stages = options.ranks * (options.stages_per_rank or 1)
    if stages * options.microbatches > MOST_FORWARDS:
        raise OptionError(
            f"{number_of(options.microbatches, 'microbatch')} on {number_of(stages, 'stage')} are more than "
            f"{MOST_FORWARDS:,} forwards a step. Take fewer, larger microbatches, or accumulate the "
            "gradients of several steps."
        )
    if options.shard not in (None, *SHARDS):
        raise OptionError(
            f"shard is {options.shard!r} and must be None or {' or '.join(map(repr, SHARDS))}: what replicas "
            "divide between them."
        )
    if options.validation not in VALIDATIONS:
        raise OptionError(
            f"validation is {options.validation!r} and must be {' or '.join(map(repr, VALIDATIONS))}: when "
            "ranks update their parameters."
        )
    if options.mean not in MEANS:
        raise OptionError(
            f"mean is {options.mean!r} and must be {' or '.join(map(repr, MEANS))}: of what a loss that "
            "divides by the number of its labels is the mean."
        )
    if options.validation == "post" and not options.gradients:
        raise OptionError("Without gradients nothing is updated: leave out validation.")
    state = options.optimizer_bytes
    if not (isinstance(state, int | float) and 0 <= state < inf):
        raise OptionError(
            f"optimizer_bytes is {state!r} and must be what the optimizer keeps for each element of a "
            "parameter, in bytes: 8 for AdamW in float32."
        )
    if type(options.seed) is not int or not -(2**63) <= options.seed < 2**63:
        raise OptionError(f"seed is {options.seed!r} and must be a whole number of 64 bits.")
    effort = options.effort
    if effort is not None and not (isinstance(effort, int | float) and 0 < effort < inf):
        raise OptionError(f"effort is {effort!r} and must be a number of seconds above 0.")
    _check_costs(options)
    if options.vocab_parallel not in (False, AUTO, *BARRIERS):
        raise OptionError(
            f"vocab_parallel is {options.vocab_parallel!r} and must be True, False, 'auto', '1-barrier' or "
            "'2-barrier'."
        )
    if options.recompute not in (False, AUTO, *LEVELS):
        known = ", ".join(repr(level) for level in (*LEVELS, AUTO))
        raise OptionError(f"recompute is {options.recompute!r} and must be False or one of {known}.")
    if options.fixed and options.dimensions is not None:
        raise OptionError(
            "dimensions traces the model at other lengths, at which the values of fixed inputs would not "
            "fit: leave out one of the two."
        )
    if options.evaluation and not options.gradients:
        raise OptionError("Without gradients the step is an evaluation itself: leave out evaluation.")
    if options.grad_dtype not in (None, *GRAD_DTYPES):
        raise OptionError(
            f"grad_dtype is {options.grad_dtype!r} and must be None (the parameters' own), torch.float32 or "
            "torch.float64: sums in fewer bits lose what small gradients add."
        )
    if options.grad_dtype is not None and not options.gradients:
        raise OptionError("Without gradients nothing is accumulated: leave out grad_dtype.")
    _check_offload(options)
    if options.placement not in (None, *PLACEMENTS):
        raise OptionError(
            f"Unknown placement {options.placement!r}.{suggested(options.placement, PLACEMENTS)} "
            f"Known: {', '.join(PLACEMENTS)}."
        )
    if isinstance(options.schedule, Schedule):
        _check_given(options, options.schedule)
    elif options.schedule not in (AUTO, *FAMILIES):
        raise OptionError(unknown_schedule(options.schedule))


def check_lanes(options: Options, lanes: LanePlan) -> None:
    """Raise OptionError for an option that a model with DTensors cannot have."""
    if lanes.number > 1 and options.vocab_parallel is not False:
        raise OptionError(
            "The model has DTensors, which do not go with vocab_parallel: lanes share the vocabulary if the "
            "plan of parallelize_module does. Leave it out."
        )


def _check_costs(options: Options) -> None:
    costs, known = options.costs, ", ".join(device_names())
    if isinstance(costs, tuple):
        unknown = [name for name in costs if not (isinstance(name, str) and is_device_name(name))]
        if unknown:
            like = suggested(unknown[0], device_names())
            raise OptionError(
                f"costs has {unknown[0]!r} and must have names of devices.{like} Known: {known}."
            )
        if len(costs) != options.ranks:
            raise OptionError(
                f"costs names {number_of(len(costs), 'device')} for {number_of(options.ranks, 'rank')}: "
                "name one for each."
            )
    elif not isinstance(costs, str) or not (costs in ("analytic", "measured") or is_device_name(costs)):
        raise OptionError(
            f"costs is {costs!r} and must be 'analytic', 'measured' or the name of a device, or a list with "
            f"one for each rank.{suggested(costs, ('analytic', 'measured', *device_names()))} Known: {known}."
        )


def _check_offload(options: Options) -> None:
    share, tier, bandwidth = options.offload.share, options.offload.tier, options.offload.bandwidth
    if isinstance(share, str):
        known = share == AUTO
    else:
        known = share is None or (isinstance(share, (int, float)) and 0 <= share <= 1)
    if not known:
        raise OptionError(f"offload is {share!r} and must be True, False, 'auto', or a share from 0 to 1.")
    if tier is not None and tier not in TIERS:
        raise OptionError(f"The tier of offload is {tier!r} and must be {' or '.join(map(repr, TIERS))}.")
    if bandwidth is not None and not (isinstance(bandwidth, int | float) and 0 < bandwidth < inf):
        raise OptionError(f"The bandwidth of offload is {bandwidth!r} and must be bytes a second, above 0.")
    if share == AUTO and options.memory_limit is None:
        raise OptionError("offload='auto' moves as much as memory_limit asks for: give one.")
    if share is not None and not options.gradients:
        raise OptionError("Without gradients nothing is saved: leave out offload.")


def _check_given(options: Options, schedule: Schedule) -> None:
    """A given schedule decides the numbers of ranks, microbatches and stages."""
    for name, found in (("ranks", schedule.ranks), ("microbatches", schedule.microbatches)):
        if getattr(options, name) != found:
            raise OptionError(
                f"The schedule {schedule.name} is for {found} {name}, and {name} is {getattr(options, name)}."
            )
    for name in ("stages_per_rank", "placement", "memory_limit"):
        if name == "memory_limit" and options.offload.share == AUTO:
            continue
        if getattr(options, name) is not None:
            raise OptionError(f"The schedule {schedule.name} is given whole: leave out {name}.")


def names_of(given: Iterable[str], option: str) -> tuple[str, ...]:
    """The names that an option lists.  Raises OptionError for anything else, and for one text."""
    if isinstance(given, str):
        raise OptionError(f"{option} is a list of names: give {[given]}.")
    names = tuple(given) if isinstance(given, Iterable) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise OptionError(f"{option} is {given!r:.200} and must be a list of names.")
    return names


def limit_of(given: float | str) -> float:
    """``"16GiB"``, ``"800 MB"`` or a number, in bytes.  Raises OptionError for any other text."""
    limit = parse_bytes(str(given))
    if limit is not None and limit < 1:
        raise OptionError(
            f"The memory limit is {given!r}, which is in bytes. Give the bytes of a rank's device, or a text "
            "such as '16GiB'."
        )
    if limit is None:
        raise OptionError(
            f"The memory limit is {given!r}; give a number of bytes above 0 or a text such as '16GiB' "
            f"(units: {', '.join(name for name in BYTES if name)})."
        )
    return limit


@dataclass(frozen=True)
class Candidates:
    """The candidate decisions of a compilation.

    ``placements``: the model's stages -> the names of their placements, each with the rank of every stage.
    ``barriers``: a microbatch, of vocabulary layers split over the ranks; None if they are not split.
    ``levels``: of recomputation; None for none.
    """

    placements: Mapping[int, Mapping[str, tuple[int, ...]]]
    barriers: tuple[int | None, ...]
    levels: tuple[Level | None, ...]


def candidates(options: Options) -> Candidates:
    """All combinations of these are tried; of stages only as many as the model can be cut into."""
    schedule, ranks = options.schedule, options.ranks
    placements: dict[int, dict[str, tuple[int, ...]]] = {}
    if isinstance(schedule, Schedule):
        placements[schedule.stages] = {"": schedule.placement}
    else:
        per_rank = options.stages_per_rank
        if schedule == AUTO and per_rank is None:
            if options.split_points is not None:
                per_rank = max(1, (len(options.split_points) + 1) // ranks)
            elif ranks == 1:
                per_rank = 1
        for stages, name in stages_and_placements(schedule, per_rank, options.placement):
            placements.setdefault(ranks * stages, {})[name] = place(name, ranks, stages)
    barriers: tuple[int | None, ...] = (None,)
    if ranks > 1 and options.vocab_parallel is not False:
        tried = {**BARRIERS, AUTO: (None, 1, 2)}[options.vocab_parallel]
        barriers = tried if isinstance(tried, tuple) else (tried,)
    levels: tuple[Level | None, ...] = (None,)
    if options.gradients and options.recompute is not False:
        every = (None, *LEVELS)
        levels = tuple(level for level in every if options.recompute in (AUTO, level))
    if options.memory_limit is None and options.recompute == AUTO:
        levels = (None,)  # nothing to gain: recomputation takes time for less memory
    return Candidates(placements, barriers, levels)
