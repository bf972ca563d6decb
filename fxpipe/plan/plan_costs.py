"""The costs of a plan: as it was made, for other sizes than the example's, on another device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fxpipe.cost.known_devices import device_named
from fxpipe.cost.symbolic import PlanWork
from fxpipe.errors import SizeError
from fxpipe.plan.artifact import Plan
from fxpipe.schedule.costs import Costs, Link


def costs_of(plan: Plan, sizes: Mapping[str, int] | None = None, device: str | None = None) -> Costs:
    """The plan's costs; with ``sizes`` at these lengths, with ``device`` the analytic costs on it.

    Raises SizeError for lengths that the plan does not know, and if it knows none but the example's;
    ScheduleError for an unknown device.
    """
    costs = plan.costs
    if device is not None:
        hardware = device_named(device)
        if costs.link is not None:
            costs = replace(costs, link=Link(1 / hardware.offload_bandwidth, costs.link.ranks))
        return known_work(plan.work).on(hardware).analytic(costs, sizes or {})
    return costs if sizes is None else known_work(plan.work).costs(costs, sizes)


def known_work(work: PlanWork | None) -> PlanWork:
    """Raises SizeError where the pipeline was compiled without ``dimensions``."""
    if work is None:
        raise SizeError(
            "Costs are known for the example's sizes alone, and for the device of the compilation. Name its "
            'dimensions when you compile, for example with dimensions={"sequence": 256}, or with '
            "dimensions={}, which names none but the microbatch."
        )
    return work
