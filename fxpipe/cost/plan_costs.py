"""The costs of a plan: as it was made, for other sizes than the example's, on another device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fxpipe.cost.analytic import rates_of
from fxpipe.cost.devices.cluster import Cluster
from fxpipe.cost.devices.device import Device
from fxpipe.cost.devices.known_devices import device_named
from fxpipe.cost.exchange import Bytes, StageTensors, exchanges
from fxpipe.cost.update import update_on
from fxpipe.errors import SizeError
from fxpipe.plan.artifact import Plan
from fxpipe.plan.rows import ShardName
from fxpipe.plan.work import Expressions, PlanWork, Work
from fxpipe.schedule.costs import Costs, Exchange, Link


def costs_of(
    plan: Plan,
    sizes: Mapping[str, int] | None = None,
    device: str | None = None,
    ranks_per_machine: int | None = None,
) -> Costs:
    """The plan's costs; with ``sizes`` at these lengths, with ``device`` the analytic costs on it.

    ranks_per_machine: of the device's machines; by default those of the plan.
    Raises SizeError for lengths that the plan does not know, and if it knows none but the example's;
    ScheduleError for an unknown device.
    """
    costs = plan.costs
    if ranks_per_machine is not None:
        costs = replace(costs, ranks_per_machine=ranks_per_machine)
    if device is not None:
        hardware = device_named(device)
        costs = replace(costs, exchanges=_exchanges_on(plan, hardware, costs.ranks_per_machine))
        if costs.link is not None:
            costs = replace(costs, link=Link(1 / hardware.offload_bandwidth, costs.link.ranks))
        work = known_work(plan.work)
        by_rank = {rank: work.rates_of(stage) for stage, rank in enumerate(plan.placement)}
        # A rank without stages has none of its own.
        rates = [by_rank.get(rank, work.rates) for rank in range(plan.ranks)]
        costs = replace(costs, update=update_on(costs.update, rates, hardware))
        return work_on(work, hardware).analytic(costs, sizes or {})
    return costs if sizes is None else known_work(plan.work).costs(costs, sizes)


def _exchanges_on(plan: Plan, device: Device, ranks_per_machine: int | None) -> tuple[Exchange, ...]:
    """What the replicas of a plan exchange, in the time of the links between such devices."""
    if not plan.costs.exchanges:
        return ()
    sizes: dict[int, StageTensors] = {}
    for stage in plan.stages:
        trained = set(plan.tensors[stage.rank].gradients)
        names = [name for name in stage.parameters if name in trained]
        others = [name for name in stage.parameters if name not in trained]
        number = {name: plan.lanes.divisor(name) for name in stage.parameters}
        sizes[stage.stage] = StageTensors(
            Bytes.of((plan.gradient_bytes(name), number[name]) for name in names),
            Bytes.of((plan.layouts[name].nbytes, number[name]) for name in names),
            Bytes.of((plan.layouts[name].nbytes, number[name]) for name in others),
            Bytes.of((plan.gradient_bytes(n), number[n]) for n in names if plan.lanes.sums(ShardName(n))),
        )
    per_use = any(exchange.per_use for exchange in plan.costs.exchanges)
    cluster = Cluster((device,) * plan.ranks)
    return exchanges(
        cluster,
        plan.placement,
        sizes,
        plan.lanes.number,
        plan.replicas,
        plan.shard,
        per_use,
        ranks_per_machine,
    )


def known_work(work: PlanWork | None) -> PlanWork:
    """The work of a plan.  Raises SizeError where the pipeline was compiled without ``dimensions``."""
    if work is None:
        raise SizeError(
            "Costs are known for the example's sizes alone, and for the device of the compilation. Name its "
            'dimensions when you compile, for example with dimensions={"sequence": 256}, or with '
            "dimensions={}, which names none but the microbatch."
        )
    return work


def work_on(work: PlanWork, device: Device) -> PlanWork:
    """The work with the rates of another device."""

    def there(ops: tuple[Work, ...]) -> tuple[Work, ...]:
        return tuple(replace(op, rate=device.rate(op.arithmetic, op.kind)) for op in ops)

    stages = [
        replace(s, forward=there(s.forward), backward=there(s.backward), weight=there(s.weight))
        for s in work.stages
    ]
    return replace(work, stages=tuple(stages), rates=rates_of(device), stage_rates=())


def expressions(work: PlanWork, stage: int) -> Expressions:
    """The costs of a stage as sympy expressions of the named lengths."""
    import sympy  # here, as it takes a quarter of a second and few pipelines need it

    symbols = [sympy.Symbol(name) for name in work.lengths]
    return work.stage(stage, symbols, sympy.Max)
