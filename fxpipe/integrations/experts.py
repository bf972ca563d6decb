"""Expert parallelism, a style for torch's ``parallelize_module``: each lane holds some experts of a mixture.

``tokens="whole"``                            ``tokens="divided"``
every lane runs its experts on all tokens     every lane routes its share of the tokens
                                              dispatch: rows to the lanes of their experts
experts                                       experts
one sum over the lanes                        combine: rows back, weighted sum, one gather

The exchange of divided tokens has room for a fixed number of rows from each lane to each other, so that
shapes do not depend on data.  The ops are torch's: the style also runs in eager, a process for each lane.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from fxpipe.errors import OptionError
from fxpipe.integrations.lane_values import distributed, exchanged, joined, share, with_summed_gradient
from fxpipe.integrations.summed_gradients import local_parameters, parameters_of
from fxpipe.plan.dtensors import note_length
from fxpipe.plan.lanes import padded


class ExpertParallel(ParallelStyle):
    """Shards the experts of a module over the lanes, and brings tokens to them.  Where the lanes cannot share
    them evenly, zeros that no token goes to fill up the last lanes.

    The module's parameters have its experts as their first dimension, and its forward maps
    (tokens [T, hidden], experts of each token [T, k], their weights [T, k]) to [T, hidden], as that of the
    mixtures of transformers does.

    tokens: "whole", or "divided" over the lanes.
    capacity: of divided tokens, the rows that one lane may send to another, as a multiple of those that it
        sends if all experts get equally many; None has room for any routing.
    beyond: what happens to rows beyond the capacity.  "error": the step ends with a RunError on all lanes.
        "drop": these experts add nothing to their tokens.
    skips: whether the forward leaves out experts whose number is that of its experts or larger; otherwise
        such rows are computed and do not count.
    number: the attribute of the module with the number of its experts, if it has one; in the forward it is
        that of the lane.
    counts: whether the module gets buffers ``expert_loads`` (int64[experts]: the rows that training has sent
        to each) and ``expert_drops`` (int64[]: those beyond the capacity).  Replicas keep those of the first.

    Raises OptionError, in ``parallelize_module``, for a module that is none of experts.
    """

    def __init__(
        self,
        *,
        tokens: Literal["whole", "divided"] = "whole",
        capacity: float | None = None,
        beyond: Literal["error", "drop"] = "error",
        skips: bool = False,
        number: str = "num_experts",
        counts: bool = False,
    ):
        if tokens not in ("whole", "divided"):
            raise OptionError(f"tokens is 'whole' or 'divided', not {tokens!r}.")
        if beyond not in ("error", "drop"):
            raise OptionError(f"beyond is 'error' or 'drop', not {beyond!r}.")
        if capacity is not None and tokens == "whole":
            raise OptionError('A capacity is that of an exchange, which only tokens="divided" has.')
        if capacity is not None and not (isinstance(capacity, int | float) and capacity > 0):
            raise OptionError(f"capacity is a number above 0, or None, not {capacity!r}.")
        self.tokens, self.capacity, self.beyond = tokens, capacity, beyond
        self.skips, self.number, self.counts = skips, number, counts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        experts = _number_of_experts(module, device_mesh)
        each = -(-experts // device_mesh.size())
        for owner, name, parameter in parameters_of(module):
            if experts % device_mesh.size():
                note_length(owner, name, experts)
            shared = distribute_tensor(
                padded(parameter.data, 0, each * device_mesh.size()),
                device_mesh,
                [Shard(0)] * device_mesh.ndim,
                src_data_rank=self.src_data_rank,
            )
            owner.register_parameter(name, nn.Parameter(shared, parameter.requires_grad))
        if self.counts:
            counts = torch.zeros(experts, dtype=torch.int64, device=next(module.parameters()).device)
            module.register_buffer("expert_loads", counts)
            module.register_buffer("expert_drops", counts.new_zeros(()))
        local = partial(_on_parts, module, module.forward, self.number, each)
        # Here, where every process makes its groups, and not in a trace, which may be that of one alone.
        lanes = device_mesh if device_mesh.ndim == 1 else device_mesh._flatten()
        module.forward = partial(self._forward, module, local, device_mesh, lanes, experts)
        return module

    def _forward(
        self,
        module: nn.Module,
        local: Callable[..., torch.Tensor],
        mesh: DeviceMesh,
        lanes: DeviceMesh,
        experts: int,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        given = [hidden_states, top_k_index, top_k_weights]
        placements = hidden_states.placements if isinstance(hidden_states, DTensor) else None
        each, index = -(-experts // lanes.size()), _all_rows(top_k_index)
        run = partial(_divided if self.tokens == "divided" else _whole, local, lanes, each, each * self.skips)
        if self.counts and module.training:
            with torch.no_grad():
                rows = index.reshape(-1, 1) == torch.arange(experts, device=index.device)
                module.get_buffer("expert_loads").add_(rows.sum(0))
        if self.tokens == "whole":
            result = distributed(run(*map(_all_rows, given)), mesh)
            return _all_rows(result) if placements is None else result.redistribute(placements=placements)
        # Within ContextParallel the tokens are divided before; lanes with the same ones share them out.
        alike: DeviceMesh | None = lanes
        divided = [getattr(each, "dim", None) == 0 for each in placements or ()]
        if placements is not None and divided[0]:
            alike = None if all(divided) else mesh[(mesh.mesh_dim_names or ())[-1]]
            by_lane = [*placements] if all(divided) else [placements[0], Replicate()]
            given = [distributed(x, mesh).redistribute(placements=by_lane).to_local() for x in given]
        else:
            by_lane, given = [Replicate()] * mesh.ndim, [*map(_all_rows, given)]
        result = self._exchanging(module, run, lanes, alike, each, given)
        if placements is None:
            return result
        shape, stride = hidden_states.shape, hidden_states.stride()
        return DTensor.from_local(result, mesh, by_lane, run_check=False, shape=shape, stride=stride)

    def _exchanging(
        self,
        module: nn.Module,
        run: Callable[..., torch.Tensor],
        lanes: DeviceMesh,
        alike: DeviceMesh | None,
        each: int,
        given: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """What the experts of all lanes give for tokens.  alike: the lanes that have the same ones."""
        if alike is None:
            return run(self._room(module, lanes, each, given[1], None), *given)
        tokens, more = len(given[0]), -len(given[0]) % alike.size()
        of_none = (0, each * lanes.size(), 0)
        padded = [_padded(x, more, value) if more else x for x, value in zip(given, of_none, strict=True)]
        shares = [share(x, alike, 0) for x in padded]
        of_all = padded[1] if alike is lanes else None
        result = run(self._room(module, lanes, each, shares[1], of_all), *shares)
        return joined(result, alike, Shard(0))[:tokens]

    def _room(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        each: int,
        index: torch.Tensor,
        of_all: torch.Tensor | None,
    ) -> int:
        """The rows that an exchange has room for, from each lane to each other.

        index: the experts of this lane's tokens.  of_all: of all tokens, those of each lane behind the other,
        where this lane has them.
        """
        room = len(index) * min(index.shape[1], each)
        if self.capacity is None:
            return room
        room = min(room, ceil(self.capacity * index.numel() / mesh.size()))
        with torch.no_grad():
            of_all = joined(index, mesh, Shard(0)) if of_all is None else of_all
            owners = of_all.reshape(mesh.size(), -1, 1) // each
            rows = (owners == torch.arange(mesh.size(), device=index.device)).sum(1)
            drops = (rows - room).clamp(min=0).sum()
            if self.beyond == "error":
                torch._assert_async(
                    drops == 0,
                    f"More than {room} rows of a mixture go from one lane to another, its capacity of "
                    f"{self.capacity:g}. Compile with a larger one, or with beyond='drop'",
                )
            elif self.counts and module.training:
                module.get_buffer("expert_drops").add_(drops)
        return room


def _number_of_experts(module: nn.Module, mesh: DeviceMesh) -> int:
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    numbers = {shape[:1] for shape in shapes.values()}
    if mesh.ndim > 2 or (mesh.ndim == 2 and not mesh.mesh_dim_names):
        raise OptionError(
            "ExpertParallel is for a mesh of one dimension, or of two with names within ContextParallel, not "
            f"{mesh}."
        )
    if len(numbers) != 1 or () in numbers:
        raise OptionError(
            "ExpertParallel is for a module whose parameters all have its experts as their first dimension; "
            f"this {type(module).__name__} has {shapes or 'no parameters'}."
        )
    try:
        inspect.signature(module.forward).bind(None, None, None)
    except TypeError as error:
        raise OptionError(
            f"The forward of a {type(module).__name__} does not take (tokens, experts of each, their "
            "weights), by which ExpertParallel brings tokens to experts."
        ) from error
    ((experts,),) = numbers
    return experts


def _on_parts(
    module: nn.Module, forward: Callable[..., torch.Tensor], number: str, each: int, *args: torch.Tensor
) -> torch.Tensor:
    """Run a module with the experts of this lane alone."""
    experts = getattr(module, number, None)
    if experts is not None:
        setattr(module, number, each)
    try:
        with local_parameters(module):
            return forward(*args)
    finally:
        if experts is not None:
            setattr(module, number, experts)


def _whole(
    local: Callable[..., torch.Tensor],
    mesh: DeviceMesh,
    each: int,
    absent: int,
    x: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """All tokens through the experts of each lane, and the sum of what these give."""
    x, weights = (with_summed_gradient(value, mesh) for value in (x, weights))
    index = index - mesh.get_local_rank() * each
    here = (index >= 0) & (index < each)
    result = local(x, torch.where(here, index, absent), torch.where(here, weights, 0))
    return joined(result, mesh, Partial())


def _divided(
    local: Callable[..., torch.Tensor],
    mesh: DeviceMesh,
    each: int,
    absent: int,
    room: int,
    x: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """A lane's share of the tokens, whose rows go to their experts and back; all shares have as many.  Of an
    index beyond all experts there is no row."""
    lanes = mesh.size()
    tokens, top_k = index.shape
    pairs = index.reshape(-1)
    owners = pairs // each
    is_of = owners.unsqueeze(1) == torch.arange(lanes, device=pairs.device)
    places = ((is_of.cumsum(0) - 1) * is_of).sum(1)  # of each row among those for its lane
    kept = is_of.any(1) & (places < room)
    places = torch.where(kept, owners * room + places, lanes * room)

    rows = torch.arange(len(pairs), device=pairs.device)
    # Places that no row takes get the first one, for an expert that skips it or whose result nobody reads.
    sources = pairs.new_zeros(lanes * room + 1).scatter(0, places, rows)[:-1]
    experts = pairs.new_full((lanes * room + 1,), absent).scatter(0, places, pairs % each)[:-1]
    received = exchanged(x[sources // top_k], mesh)
    numbers = exchanged(experts, mesh).unsqueeze(1)
    back = exchanged(local(received, numbers, received.new_ones(numbers.shape)), mesh)
    of_rows = back[torch.where(kept, places, 0)].view(tokens, top_k, -1)
    counted = torch.where(kept.view(tokens, top_k), weights, 0)
    result = (of_rows * counted.unsqueeze(-1)).sum(1)
    return result.to(x.dtype)


def _all_rows(value: torch.Tensor) -> torch.Tensor:
    """All rows of a value, which lanes may have divided."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _padded(value: torch.Tensor, rows: int, with_value: int) -> torch.Tensor:
    return nn.functional.pad(value, (0, 0, 0, rows), value=with_value)
