"""The parameters, gradients, buffers and constants of each rank, and their bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx, nn

from fxpipe.compiler.buckets import MOST_BYTES
from fxpipe.cost.exchange import Bytes, StageTensors
from fxpipe.cost.update import Trained
from fxpipe.errors import CaptureError, LimitError
from fxpipe.ir.graph import Kind, Section
from fxpipe.ir.step_invariants import once_bytes
from fxpipe.ir.storage import graph_outputs
from fxpipe.plan.artifact import HeldBytes, RankTensors, TensorLayout, holders
from fxpipe.plan.attribute_state import kept_tensors, own_of_each_replica
from fxpipe.plan.dtensors import local
from fxpipe.plan.lanes import LanePlan
from fxpipe.plan.rows import ShardName
from fxpipe.plan.step import OutputSpec
from fxpipe.plan.tensors import gradient_dtype
from fxpipe.schedule.lowering.instructions import AllReduceGradient
from fxpipe.schedule.memory_text import WEIGHTS
from fxpipe.schedule.units import Units


def check_names(model: nn.Module) -> None:
    """Raise CaptureError for the name of a parameter or buffer that plan and files cannot represent."""
    for name, _ in (*model.named_parameters(), *model.named_buffers()):
        reason = ""
        if any("\ud800" <= c <= "\udfff" for c in name):
            reason = "it holds half of a surrogate pair, which is no text"
        elif name == "__metadata__":
            reason = "safetensors keeps that name for itself"
        elif ShardName(name).is_part:
            reason = "names that end so stand for some rows of a table"
        if reason:
            raise CaptureError(f"No pipeline can hold the parameter or buffer {name!r}: {reason}. Rename it.")


def tensor_ownership(
    model: nn.Module,
    sections: tuple[Section, ...],
    placement: tuple[int, ...],
    ranks: int,
    on_ranks: Sequence[Sequence[str]],
    has_on_ranks: Sequence[Sequence[str]],
) -> tuple[RankTensors, ...]:
    """The tensors of each rank.  Rank 0 also holds unused ones, so that a saved pipeline is complete; or the
    first rank on which they may lie.

    on_ranks, has_on_ranks: as in ``Options``.  What is trained here is, as a tied weight, on all ranks where
    the other pipeline has it: their copies stay the same.
    """
    used: list[dict[Kind, set[str]]] = [{k: set() for k in Kind} for _ in range(ranks)]
    for section in sections:
        for value in (*section.step_inputs, *section.outputs):
            used[placement[section.stage]][value.kind].add(value.name)
    trained = set().union(*(u[Kind.GRADIENT] for u in used))
    # Their copies on ranks of the other pipeline get the sum of the gradients, as those of tied weights do.
    for rank, there in enumerate(has_on_ranks):
        used[rank][Kind.GRADIENT] |= trained.intersection(there)
    assigned = set().union(*(u[Kind.PARAMETER] | u[Kind.GRADIENT] for u in used))
    # A table of which ranks hold rows is not unused.
    assigned |= {ShardName(name).tensor for name in assigned}
    buffers = set().union(*(u[Kind.BUFFER] for u in used))  # with frozen parameters that the step changes
    spare_parameters = {n for n, _ in model.named_parameters()} - assigned - buffers
    spare_buffers = {n for n, _ in model.named_buffers()} - buffers
    for kind, names in ((Kind.PARAMETER, spare_parameters), (Kind.BUFFER, spare_buffers)):
        for name in names:
            rank = next((rank for rank, allowed in enumerate(on_ranks) if name in allowed), 0)
            used[rank][kind].add(name)
    plans = []
    for u in used:
        parameters = u[Kind.PARAMETER] | u[Kind.GRADIENT]
        plans.append(
            RankTensors(
                parameters=_names(parameters),
                buffers=_names(u[Kind.BUFFER]),
                constants=_names(u[Kind.CONSTANT]),
                gradients=_names(parameters & trained),
            )
        )
    return tuple(plans)


def _names(names: Iterable[str]) -> tuple[ShardName, ...]:
    return tuple(map(ShardName, sorted(names)))


def state_names(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """The names of the model's state dict, each with the name of its tensor as a parameter or buffer."""
    names = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
    pairs = tuple(
        (key, names[id(t)]) for key, t in model.state_dict(keep_vars=True).items() if id(t) in names
    )
    left = {name for name, _ in model.named_parameters()}.difference(name for _, name in pairs)
    return pairs + tuple((name, name) for name in sorted(left))  # of a model that writes its own state dict


def check_state_of_replicas(model: nn.Module, graph: fx.Graph) -> None:
    """Raise CaptureError for a tensor that the step changes and that is in no state dict of the model."""
    unsaved = graph_outputs(graph).buffers.keys() - {name for _, name in state_names(model)}
    if unsaved:
        raise CaptureError(own_of_each_replica(min(unsaved)))


def leaves_used(
    sections: tuple[Section, ...], placement: tuple[int, ...], ranks: int
) -> tuple[tuple[str, ...], ...]:
    """Per rank the leaves of the batch that its sections read."""
    used: list[set[str]] = [set() for _ in range(ranks)]
    for section in sections:
        used[placement[section.stage]] |= {v.name for v in section.step_inputs if v.kind is Kind.BATCH}
    return tuple(tuple(sorted(names)) for names in used)


def tied_gradients(tensors: tuple[RankTensors, ...]) -> tuple[AllReduceGradient, ...]:
    """The sums of the gradients that several ranks make."""
    trained = holders(each.gradients for each in tensors)
    return tuple(AllReduceGradient(name, tuple(ranks)) for name, ranks in trained.items() if len(ranks) > 1)


def weight_bytes(
    tensors: Mapping[str, torch.Tensor], ownership: tuple[RankTensors, ...], grad_dtype: torch.dtype | None
) -> tuple[HeldBytes, ...]:
    """Per rank the bytes of its parameters, gradients and buffers.  tensors: as ``tensors_of`` gives them."""
    return tuple(
        HeldBytes(
            _nbytes(tensors, each.parameters),
            _gradient_bytes(tensors, each.gradients, grad_dtype),
            _nbytes(tensors, each.buffers),
        )
        for each in ownership
    )


def _nbytes(tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> int:
    return sum(tensors[name].nbytes for name in names)


def _gradient_bytes(
    tensors: Mapping[str, torch.Tensor], names: Iterable[str], grad_dtype: torch.dtype | None
) -> int:
    parameters = (tensors[name] for name in names)
    return sum(p.numel() * gradient_dtype(p.dtype, grad_dtype).itemsize for p in parameters)


def trained_parameters(
    tensors: Mapping[str, torch.Tensor],
    ownership: tuple[RankTensors, ...],
    grad_dtype: torch.dtype | None,
    lanes: LanePlan,
) -> tuple[tuple[Trained, ...], ...]:
    """Per rank the parameters that it updates.  tensors: as ``tensors_of`` gives them."""

    def trained(name: str) -> Trained:
        parameter = tensors[name]
        itemsize: int = gradient_dtype(parameter.dtype, grad_dtype).itemsize
        return Trained(parameter.numel(), parameter.itemsize, itemsize, lanes.divisor(name))

    return tuple(tuple(map(trained, each.gradients)) for each in ownership)


def copy_bytes(trained: Sequence[Sequence[Trained]]) -> tuple[int, ...]:
    """Per rank the bytes that it keeps from its update until it knows that all ranks' gradients are right:
    parameters or masters, and states, as they were."""
    return tuple(int(sum(one.copied for one in updated)) for updated in trained)


def with_replicas(
    weights: Sequence[HeldBytes],
    stages: Mapping[int, StageTensors],
    placement: Sequence[int],
    replicas: int,
    shard: str | None,
    per_use: bool,
) -> tuple[HeldBytes, ...]:
    """Per rank the bytes of ``weight_bytes`` as they are in a step of replicas, with those of exchanges, also
    between lanes.

    stages: as ``stage_tensors`` gives them.  per_use: whether a process has its rows alone, and whole
    parameters and gradients of the stage that runs, and of the next one.
    """
    totals = []
    for rank, whole in enumerate(weights):
        of_rank = [stages[stage] for stage, home in enumerate(placement) if home == rank and stage in stages]
        # The two largest last: a rank has whole parameters of the stage that runs and of the next one.
        of_rank.sort(key=lambda stage: stage.gradients.whole + stage.gathered(shard).whole)
        gathered = [stage.gathered(shard) for stage in of_rank]
        gradients = [stage.gradients for stage in of_rank]
        more_parameters = more_gradients = 0
        if per_use:
            more_parameters = _more_for_each_use(gathered, whole.parameters, replicas)
            more_gradients = _more_for_each_use(gradients, whole.gradients, replicas)
        elif shard == "parameters" and _are_divided(gathered, replicas):  # its rows, beside all that comes
            more_parameters = _rows(gathered, whole.parameters, replicas)
        totals.append(
            replace(
                whole,
                parameters=whole.parameters + more_parameters,
                gradients=whole.gradients + more_gradients,
                exchange=max(
                    min(MOST_BYTES, max((each.whole for each in gradients), default=0)) * (replicas > 1),
                    # What a lane gets of the others, then the sum, beside what all have.
                    2 * min(MOST_BYTES, max((stage.of_lanes.whole for stage in of_rank), default=0)),
                ),
            )
        )
    return tuple(totals)


def _are_divided(of_stages: Sequence[Bytes], replicas: int) -> bool:
    return replicas > 1 or any(each.part < each.whole for each in of_stages)


def _rows(of_stages: Sequence[Bytes], whole: int, replicas: int) -> int:
    """The bytes that a process owns.  whole: of all, where tensors of several stages count once."""
    total = sum(each.whole for each in of_stages)
    part = sum(each.part for each in of_stages) * (min(total, whole) / max(1, total))
    return int(part / replicas)


def _more_for_each_use(of_stages: Sequence[Bytes], whole: int, replicas: int) -> int:
    """The bytes of own rows and of the two last stages, beyond those of all.  whole: as for ``_rows``."""
    sizes = [each.whole for each in of_stages]
    total = min(sum(sizes), whole)
    return _rows(of_stages, whole, replicas) + min(sum(sizes[-2:]), total) - total


def tensors_in_stages(sections: Sequence[Section], stages: Sequence[int]) -> tuple[frozenset[str], ...]:
    """The names of the parameters and buffers of each of these stages."""
    names: dict[int, set[str]] = {stage: set() for stage in stages}
    for section in sections:
        values = (*section.step_inputs, *section.outputs)
        names.get(section.stage, set()).update(
            v.name for v in values if v.kind in (Kind.PARAMETER, Kind.BUFFER)
        )
    return tuple(frozenset(names[stage]) for stage in stages)


def stage_tensors(
    tensors: Mapping[str, torch.Tensor],
    ownership: tuple[RankTensors, ...],
    sections: Sequence[Section],
    grad_dtype: torch.dtype | None,
    lanes: LanePlan,
) -> dict[int, StageTensors]:
    """The bytes that the replicas, and the lanes, of each stage exchange at the end of a step.  tensors: as
    ``tensors_of`` gives them."""
    trained = {name for each in ownership for name in each.gradients}
    accumulated: defaultdict[int, set[str]] = defaultdict(set)
    frozen: defaultdict[int, set[str]] = defaultdict(set)
    for section in sections:
        accumulated[section.stage] |= {value.name for value in section.inputs if value.kind is Kind.GRADIENT}
        used = {value.name for value in section.step_inputs if value.kind is Kind.PARAMETER}
        frozen[section.stage] |= used - trained

    def divided(names: Iterable[str], nbytes: Callable[[str], int]) -> Bytes:
        return Bytes.of((nbytes(name), lanes.divisor(name)) for name in names)

    def gradient(name: str) -> int:
        return _gradient_bytes(tensors, [name], grad_dtype)

    def parameter(name: str) -> int:
        return tensors[name].nbytes

    return {
        stage: StageTensors(
            divided(gradients, gradient),
            divided(gradients, parameter),
            divided(frozen[stage], parameter),
            divided([n for n in gradients if lanes.sums(ShardName(n))], gradient),
        )
        for stage, gradients in accumulated.items()
        if gradients or frozen[stage]
    }


def outputs_of(graph: fx.Graph, placement: Sequence[int]) -> tuple[OutputSpec, ...]:
    """The outputs that the user asked for, with the ranks that compute them."""
    return tuple(
        OutputSpec(
            name,
            placement[node.meta["color"].stage],
            tuple(node.meta["val"].shape),
            str(node.meta["val"].dtype),
        )
        for name, node in graph_outputs(graph).outputs.items()
    )


def result_bytes(graph: fx.Graph, placement: Sequence[int], ranks: int, microbatches: int) -> tuple[int, ...]:
    """Per rank the bytes of what it holds until the step ends: its outputs of a whole batch, the new values
    of buffers (a step that fails leaves the old ones), and what it computes once."""
    total, named = [0] * ranks, graph_outputs(graph)
    for results, times in ((named.outputs, microbatches), (named.buffers, 1)):
        for node in results.values():
            total[placement[node.meta["color"].stage]] += times * node.meta["val"].nbytes
    once = map(once_bytes, computed_once(graph, placement, ranks))
    return tuple(size + of_step for size, of_step in zip(total, once, strict=True))


def computed_once(graph: fx.Graph, placement: Sequence[int], ranks: int) -> list[set[fx.Node]]:
    """Per rank what it computes once a step, and holds."""
    once: list[set[fx.Node]] = [set() for _ in range(ranks)]
    for node in graph.find_nodes(op="placeholder"):
        if (computed := node.meta["input"].computed) is not None:
            for user in node.users:
                once[placement[user.meta["color"].stage]].add(computed)
    return once


def activation_budget(limit: float, weights: Sequence[float], units: Units) -> tuple[float, ...]:
    """Per rank the bytes that the memory limit leaves for activations, given the bytes of its weights (and of
    the outputs that it collects).

    Raises LimitError if these alone reach the limit.
    """
    worst = max(range(len(weights)), key=weights.__getitem__)
    if weights[worst] >= limit:
        unit = " A number is in bytes: write '16GiB' for more." if limit < 1024 else ""
        raise LimitError(
            f"The memory limit is {units.memory(limit)}, and the {WEIGHTS} of rank {worst} alone take "
            f"{units.limit(weights[worst])}. Raise the limit or use more ranks.{unit}",
            weights[worst],
            is_least=True,
        )
    return tuple(limit - weight for weight in weights)


def layouts_of(
    model: nn.Module, ownership: tuple[RankTensors, ...], constants: Mapping[str, torch.Tensor]
) -> dict[str, TensorLayout]:
    """The layouts of parameters, buffers and constants, and of the rows of a parameter that a rank holds."""
    used = {name for h in ownership for name in h.constants}
    tensors = tensors_of(model, ownership) | {n: t for n, t in constants.items() if n in used}
    return {name: TensorLayout.from_tensor(tensor) for name, tensor in tensors.items()}


def tensors_of(model: nn.Module, ownership: tuple[RankTensors, ...]) -> dict[str, torch.Tensor]:
    """Parameters, buffers, and the rows of a parameter that a rank holds: of DTensors the own shards."""
    tensors = {n: local(t).detach() for n, t in (*model.named_parameters(), *model.named_buffers())}
    tensors |= kept_tensors(model, {n for h in ownership for n in h.buffers} - tensors.keys())
    for name in {n for h in ownership for n in h.parameters}:
        if name.is_part:
            tensors[name] = name.part_of(tensors[name.tensor])
    return tensors
