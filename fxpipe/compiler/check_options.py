"""The checks of options, by themselves and against each other, that hold for any model."""

from __future__ import annotations

from math import inf
from typing import Any, get_args

from fxpipe.compiler.options import Settings
from fxpipe.compiler.passes import PASS_NAMES
from fxpipe.cost.devices.known_devices import device_names, is_device_name
from fxpipe.errors import OptionError, at_least_one, number_of, one_of, suggested
from fxpipe.partition.parts import EXCHANGES
from fxpipe.plan.field_types import GRAD_DTYPES
from fxpipe.plan.rewrites import ASKED, RULES
from fxpipe.plan.step import Tier
from fxpipe.plan.tensors import dtype_of
from fxpipe.schedule.families.registry import FAMILIES
from fxpipe.schedule.ops import MOST_FORWARDS, Schedule
from fxpipe.schedule.placement import name_of
from fxpipe.schedule.search.fastest import AUTO, unknown_schedule


def check(options: Settings) -> None:
    """Raise OptionError for options that are wrong for any model."""
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
        if rule in ASKED:
            raise OptionError(f"without has {rule!r}, which only an option asks for: {ASKED[rule]}.")
    _check_numbers(options)
    if options.updates_ahead and not options.gradients:
        raise OptionError("Without gradients nothing is updated: leave out validation.")
    _check_costs(options)
    if options.fixed and options.dimensions is not None:
        raise OptionError(
            "dimensions traces the model at other lengths, at which the values of fixed inputs would not "
            "fit: leave out one of the two."
        )
    if options.evaluation and not options.gradients:
        raise OptionError("Without gradients the step is an evaluation itself: leave out evaluation.")
    if options.grad_dtype not in (None, *map(dtype_of, GRAD_DTYPES)):
        raise OptionError(
            f"grad_dtype is {options.grad_dtype!r} and must be None (the parameters' own), torch.float32 or "
            "torch.float64: sums in fewer bits lose what small gradients add."
        )
    if options.grad_dtype is not None and not options.gradients:
        raise OptionError("Without gradients nothing is accumulated: leave out grad_dtype.")
    _check_offload(options)
    if isinstance(options.schedule, Schedule):
        _check_whole(options, options.schedule)
    elif options.schedule not in (AUTO, *FAMILIES):
        raise OptionError(unknown_schedule(options.schedule))


def _check_numbers(options: Settings) -> None:
    mesh = options.mesh
    numbers: dict[str, Any] = {
        "ranks": mesh.ranks,
        "replicas": mesh.replicas,
        "microbatches": mesh.microbatches,
        "ranks_per_link": options.offload.ranks_per_link,
    }
    if options.head_chunks != AUTO:
        numbers["head_chunks"] = options.head_chunks
    for name in ("stages_per_rank", "ranks_per_machine"):
        if getattr(options, name) is not None:
            numbers[name] = getattr(options, name)
    for name, value in numbers.items():
        at_least_one(name, value)
    parts = options.parts
    if parts not in (AUTO, EXCHANGES) and (type(parts) is not int or parts < 1):
        raise OptionError(
            f"parts is {parts!r} and must be 'auto', 'exchanges' or the number of parts of each stage."
        )
    if parts == EXCHANGES and options.dimensions is not None:
        raise OptionError(
            "parts='exchanges' does not go with dimensions: what lanes exchange has one length."
        )
    stages = mesh.ranks * (options.stages_per_rank or 1) * (parts if isinstance(parts, int) else 1)
    if stages * mesh.microbatches > MOST_FORWARDS:
        raise OptionError(
            f"{number_of(mesh.microbatches, 'microbatch')} on {number_of(stages, 'stage')} are more than "
            f"{MOST_FORWARDS:,} forwards a step. Take fewer, larger microbatches, or accumulate the "
            "gradients of several steps."
        )
    if options.head_chunks not in (1, AUTO) and options.dimensions is not None:
        raise OptionError("head_chunks does not go with dimensions: at other lengths parts have other sizes.")
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


def _check_costs(options: Settings) -> None:
    costs, known = options.costs, ", ".join(device_names())
    if isinstance(costs, tuple):
        unknown = [name for name in costs if not (isinstance(name, str) and is_device_name(name))]
        if unknown:
            like = suggested(unknown[0], device_names())
            raise OptionError(
                f"costs has {unknown[0]!r} and must have names of devices.{like} Known: {known}."
            )
        if len(costs) != options.mesh.ranks:
            raise OptionError(
                f"costs names {number_of(len(costs), 'device')} for {number_of(options.mesh.ranks, 'rank')}: "
                "name one for each."
            )
    elif not isinstance(costs, str) or not (costs in ("analytic", "measured") or is_device_name(costs)):
        raise OptionError(
            f"costs is {costs!r} and must be 'analytic', 'measured' or the name of a device, or a list with "
            f"one for each rank.{suggested(costs, ('analytic', 'measured', *device_names()))} Known: {known}."
        )


def _check_offload(options: Settings) -> None:
    share, tier, bandwidth = options.offload.share, options.offload.tier, options.offload.bandwidth
    if isinstance(share, str):
        known = share == AUTO
    else:
        known = share is None or (isinstance(share, (int, float)) and 0 <= share <= 1)
    if not known:
        raise OptionError(f"offload is {share!r} and must be True, False, 'auto', or a share from 0 to 1.")
    if tier is not None:
        one_of("The tier of offload", tier, get_args(Tier))
    if bandwidth is not None and not (isinstance(bandwidth, int | float) and 0 < bandwidth < inf):
        raise OptionError(f"The bandwidth of offload is {bandwidth!r} and must be bytes a second, above 0.")
    if share == AUTO and options.memory_limit is None:
        raise OptionError("offload='auto' moves as much as memory_limit asks for: give one.")
    if share is not None and not options.gradients:
        raise OptionError("Without gradients nothing is saved: leave out offload.")


def _check_whole(options: Settings, schedule: Schedule) -> None:
    """Raise OptionError for an option that a schedule by hand decides, as ranks, stages and memory."""
    for name, number in (("ranks", schedule.ranks), ("microbatches", schedule.microbatches)):
        if getattr(options.mesh, name) != number:
            raise OptionError(
                f"The schedule {schedule.name} is for {number} {name}, and {name} is "
                f"{getattr(options.mesh, name)}."
            )
    if options.updates_ahead and not name_of(schedule.placement, schedule.ranks):
        raise OptionError(
            f"The schedule {schedule.name} has a placement of its own, and validation='post' needs a plain "
            "one or a V: leave out validation."
        )
    for name in ("stages_per_rank", "placement", "memory_limit"):
        if name == "memory_limit" and options.offload.share == AUTO:
            continue
        if getattr(options, name) is not None:
            raise OptionError(f"The schedule {schedule.name} is given whole: leave out {name}.")
    if options.parts not in (AUTO, 1):
        raise OptionError(f"The schedule {schedule.name} is given whole, parts as stages: leave out parts.")
