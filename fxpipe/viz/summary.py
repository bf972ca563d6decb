"""A pipeline in a few lines, for ``repr`` and for notebooks."""

from __future__ import annotations

from collections.abc import Sequence

from fxpipe.errors import number_of, shortened
from fxpipe.plan.artifact import Plan
from fxpipe.plan.memory import RankMemory, rank_memory
from fxpipe.schedule.costs import StageCost
from fxpipe.schedule.units import bubble_text, bytes_text, seconds_text, units_of


def summary(plan: Plan) -> list[str]:
    """The decisions, the prediction and the memory of the ranks in at most seven lines."""
    predicted, step = plan.prediction, plan.step
    replicas = f", {plan.replicas} replicas" if plan.replicas > 1 else ""
    replicas += f", shard {plan.shard}" if plan.shard else ""
    lanes = f" of {plan.lanes.number} lanes" if plan.lanes.number > 1 else ""
    ranks, stages = number_of(plan.ranks, "rank") + lanes, number_of(len(plan.stages), "stage")
    microbatches = number_of(step.microbatches, "microbatch")
    lines = [
        f"{plan.model} on {ranks}{replicas}: {stages}, {microbatches}, schedule {plan.schedule}",
        f"predicted: step {seconds_text(predicted.seconds)}, {throughput_text(plan, predicted.seconds)}, "
        f"span bubble {bubble_text(predicted.span_bubble)}"
        + (f", costs of {plan.device}" if plan.device else ""),
    ]
    memory = rank_memory(plan, predicted.peak_memory)
    text = units_of(plan.memory_limit).memory
    fullest = max(range(plan.ranks), key=lambda rank: memory[rank].peak)
    most = memory[fullest]
    lines.append(
        f"memory: at most {text(most.peak)}, on rank {fullest} (parameters {text(most.fixed.parameters)}, "
        f"gradients {text(most.fixed.gradients)}, activations {text(most.activations)})"
        + (f"; limit {plan.memory_limit}" if plan.memory_limit else "")
    )
    if max(each.adamw for each in memory):
        total, rank = max((each.peak + each.adamw, rank) for rank, each in enumerate(memory))
        lines.append(f"with AdamW's state: at most {text(total)}, on rank {rank}")
    if step.outputs:
        lines.append(f"outputs: {', '.join(output.name for output in step.outputs[:8])}")
    return [shortened(line, 200) for line in lines]


def throughput_text(plan: Plan, seconds: float) -> str:
    """What all replicas get done in a second: "12,345 tokens/s"."""
    done, unit = plan.per_second(max(seconds, 1e-30), plan.replicas)
    return f"{done:,.4g} {unit}/s" if done < 1000 else f"{done:,.0f} {unit}/s"


def costs_text(cost: StageCost) -> str:
    """The costs of one microbatch on a stage: "F 1.2 ms, B 1.4 ms, W 1.1 ms; saves 12 MiB a microbatch"."""
    f, b, w = map(seconds_text, (cost.forward, cost.backward, cost.weight))
    return f"F {f}, B {b}, W {w}; saves {bytes_text(cost.saved_activations)} a microbatch"


def memory_rows(memory: Sequence[RankMemory], limit: str) -> list[tuple[str, ...]]:
    """A row for each rank, below their names."""
    text = units_of(limit).memory
    rows: list[tuple[str, ...]] = [MEMORY]
    for rank, total in enumerate(memory):
        fixed = total.fixed
        sizes = fixed.parameters, fixed.gradients, total.other, total.activations, total.peak, total.adamw
        rows.append((str(rank), *map(text, sizes)))
    return rows


#: ``other``: buffers, outputs, the memory of sums over replicas, and all else in a limit.
MEMORY = ("rank", "parameters", "gradients", "other", "activations", "peak", "+ AdamW")
