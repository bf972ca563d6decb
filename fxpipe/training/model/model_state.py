"""The tensors that a pipeline trains: the model's parameters and buffers, and the shards held by ranks."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import nn

from fxpipe.errors import RunError, suggested
from fxpipe.plan.artifact import Plan, RankTensors, TensorLayout, holders
from fxpipe.plan.attribute_state import kept_slots, own_of_each_replica
from fxpipe.plan.rows import ShardName
from fxpipe.plan.spans import PartSpan, spans_of
from fxpipe.runtime.job.process import Process, own_ranks
from fxpipe.runtime.program.rank import Runtime
from fxpipe.runtime.torch_private import memory_of
from fxpipe.training.guards.guards import Traced
from fxpipe.training.model.aliases import Aliases
from fxpipe.training.model.elsewhere import Classes
from fxpipe.training.model.follow_model import follow
from fxpipe.training.model.partial_model import (
    Explanation,
    free_others,
    hide_stale,
    sharing,
    show_stale,
    trained_tensors,
    unwatch_updates,
    watch_updates,
)
from fxpipe.training.model.pending_update import PendingUpdate
from fxpipe.training.model.shards import are_divided, owned
from fxpipe.training.model.whole_model import WholeModel

#: What to warn of where code reads a gradient that other ranks have: the text, the file and the line.
Read = tuple[str, str, int]


@dataclass(eq=False)
class ModelState:
    """``parameters`` and ``buffers``: by the model's names; under torchrun those that this rank needs.

    A loaded pipeline holds rows as parameters of their own; one that was compiled in this process trains rows
    of the model's table as long as the model lives.  ``of``: gives the model that was compiled in this
    process, whose tensors may be replaced between two steps; None if there is none (any more): under torchrun
    a pipeline does not keep it alive, as a rank needs only its part.  ``synchronized``: whether the model of
    each rank has the trained values of all ranks.  ``stale``: whether other replicas have rows of parameters
    with newer values.  ``accumulators``: by the names of a bucket, those that stay between steps beside
    ``.grad``, which is a part of them; ``handed_out``: these gradients.  ``run``: a name of the run, the same
    after it was resumed. ``then``: its hooks and frozen parameters when it was compiled.  ``lane``: that of a
    state of one lane, made by a process that runs all.  ``rows``: the parameters of rows of tables.
    ``reads``: of gradients elsewhere, since the last comparison of gradients.
    ``registered``: the model's tensors under torchrun, which may live longer than a module around them.
    """

    plan: Plan
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    device: torch.device
    process: Process | None
    of: Callable[[], nn.Module | None]
    then: Traced | None = None
    synchronized: bool = False
    run: str = field(default_factory=lambda: secrets.token_hex(8))
    stale: bool = False
    accumulators: dict[tuple[ShardName, ...], torch.Tensor] = field(default_factory=dict)
    handed_out: dict[tuple[ShardName, ...], list[weakref.ref[torch.Tensor]]] = field(default_factory=dict)
    borrowed: dict[str, torch.Tensor] = field(default_factory=dict)
    lane: int | None = None
    rows: dict[str, nn.Parameter] = field(default_factory=dict)
    updates: PendingUpdate = field(default_factory=PendingUpdate)
    registered: dict[str, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    whole: WholeModel | None = None  # as synchronize has left the model, until a step changes it
    reads: list[Read] = field(default_factory=list)
    kept: frozenset[str] = frozenset()  # names of buffers that are in plain attributes of the model's modules

    def __post_init__(self) -> None:
        if self.process is not None and self.divides_parameters:
            tables = {name.tensor for name in self.stored_by(self.process.rank).parameters}
            for name in [name for name in self.parameters if ShardName(name).tensor not in tables]:
                del self.parameters[name]  # another replica stores it, and steps gather it
        if (model := self.of()) is not None:
            registered = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
            self.kept = frozenset(self.buffers.keys() - registered)

    @cached_property
    def classes_elsewhere(self) -> Classes:
        """The classes that the model's tensors get as long as this process does not have them."""
        return Classes(Explanation(self))

    @cached_property
    def aliases(self) -> Aliases:
        """Other tensors of the memory of these."""
        return Aliases(Explanation(self))

    @cached_property
    def owned(self) -> tuple[RankTensors, ...]:
        """The tensors that each process owns; without processes, those of each rank."""
        return self.plan.tensors if self.process is None else owned(self.plan, self.process.replicas)

    def owned_by(self, rank: int) -> RankTensors:
        """The tensors that this process owns, which has this rank, or all of them."""
        return self.owned[rank if self.process is None else self.process.world_rank]

    @cached_property
    def is_divided(self) -> bool:
        """Whether processes own rows of parameters."""
        return self.process is not None and are_divided(self.plan, self.process.replicas)

    @property
    def divides_parameters(self) -> bool:
        """Whether this process has, between steps, its own rows of the trained parameters alone."""
        return self.is_divided and self.plan.shard == "parameters"

    def stored_by(self, rank: int) -> RankTensors:
        """The tensors whose values this process has between steps, which has this rank, or all of them."""
        return self.owned_by(rank) if self.divides_parameters else self.plan.tensors[rank]

    def let_go(self) -> None:
        """See ``Pipeline.let_model_go``."""
        for table in list(self.parameters):
            parts: dict[str, nn.Parameter] = {name: self.parameter(name) for name in self.rows_of(table)}
            for part in parts.values():  # views of the table's memory, which is to be freed
                part.data = part.detach().clone()
            if parts:
                del self.parameters[table]
                self.parameters |= parts

    def rows_of(self, table: str) -> list[ShardName]:
        """The rows that this process holds of a table, or of rows of one; none in a process of all ranks."""
        names = () if self.process is None else self.stored_by(self.process.rank).parameters
        return [name for name in names if name.is_part and name != table and ShardName(table).contains(name)]

    def follow_model(self) -> dict[str, nn.Parameter]:
        """Use the tensors that the model holds now; return its parameters, if there is a model.

        Raises RunError if a shape, dtype or device changed.
        """
        model = self.of()
        return {} if model is None else follow(self, model)

    def has_all_lanes_of(self, name: str) -> bool:
        """Whether this process runs all lanes, of which each has another share of the tensor."""
        return self.process is None and self.lane is None and name in self.plan.lanes.shared

    def spans_of(self, name: ShardName, lane: int | None = None) -> dict[int, PartSpan]:
        """The part of the whole model's tensor that this process, or a lane, has under a name."""
        if self.has_all_lanes_of(name.tensor):
            return {}
        here = self.lane or 0 if self.process is None else self.process.lane
        return spans_of(self.plan, name, here if lane is None else lane)

    def of_lane(self, lane: int) -> ModelState:
        """The state of one lane, in a process that runs all."""
        lanes = self.plan.lanes
        if lanes.number == 1:
            return self
        parameters = {
            name: nn.Parameter(lanes.share(name, p.detach(), lane).contiguous(), p.requires_grad)
            for name, p in self.parameters.items()
        }
        buffers = {name: lanes.share(name, b, lane).contiguous() for name, b in self.buffers.items()}
        of_lane = replace(self, parameters=parameters, buffers=buffers, rows={})
        return replace(of_lane, of=lambda: None, then=None, lane=lane)

    def check_unchanged(self, named: dict[str, nn.Parameter]) -> None:
        """Raise RunError if the model's hooks or frozen parameters are other ones than the program's.

        named: as ``follow_model`` gives them.
        """
        if self.then is not None:
            model, layouts = self.of(), self.plan.layouts
            self.then.check(named | self.parameters, model, layouts, trains=self.plan.trains)

    def parameter(self, name: str) -> torch.nn.Parameter:
        """A parameter, or the rows of one that a rank holds; rows share the parameter's memory, and their
        gradient has their own size."""
        if name in self.parameters:
            return self.parameters[name]
        rows = ShardName(name)
        if not rows.is_part:
            raise RunError(
                f"This rank holds no parameter {name!r}.{suggested(name, self.parameters)} It has "
                f"{len(self.parameters)}: pipe.parameters."
            )
        table, first = self._table(rows)
        part = memory_of(table)[rows.begin - first : rows.end - first]
        if name not in self.rows:
            self.rows[name] = torch.nn.Parameter(part, table.requires_grad)
        elif self.rows[name].data_ptr() != part.data_ptr():  # the whole table has moved to other memory
            self.rows[name].data = part
        return self.rows[name]

    def stand_ins(self, rank: int) -> dict[str, torch.Tensor]:
        """Zeros for the parameters that the program of a rank gathers, to run it alone."""
        return {name: self.layout(name).empty(self.device).zero_() for name in self._gathered(rank)}

    def _gathered(self, rank: int) -> set[ShardName]:
        """The parameters that the program of a rank gathers, and that this process does not keep."""
        buckets = self.plan.tensors[rank].exchanged if self.divides_parameters else ()
        return {name for bucket in buckets for name in bucket.gradients}

    @contextmanager
    def borrowing(self, parameters: dict[str, torch.Tensor]) -> Iterator[None]:
        """Lend a block parameters that this process does not keep."""
        self.borrowed = parameters
        try:
            yield
        finally:
            self.borrowed = {}

    def _table(self, rows: ShardName) -> tuple[nn.Parameter, int]:
        """The parameter that has these rows, and the first row that it has."""
        if rows.tensor in self.parameters:
            return self.parameters[rows.tensor], 0
        for name in map(ShardName, self.parameters):
            if name.contains(rows):
                return self.parameters[name], name.begin
        raise KeyError(rows)

    def params_and_buffers(self, rank: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The parameters and buffers that a rank holds, but for parameters that its program gathers."""
        tensors = self.plan.tensors[rank]
        gathered = self._gathered(rank)
        params: dict[str, torch.Tensor] = {}
        for name in tensors.parameters:
            if name in self.borrowed:
                params[name] = self.borrowed[name]
            elif name not in gathered:
                params[name] = self.value(name)
        return params, {name: self.buffers[name] for name in tensors.buffers}

    def store_buffers(self, runtime: Runtime) -> None:
        """Give the model's buffers the values that a step gave them."""
        new = self._changed(runtime)
        self.write(new)
        runtime.buffers |= {name: self.buffers[name] for name in new}

    def follow_first_replica(self, runtime: Runtime) -> None:
        """Give the buffers that a step changed their values on replica 0, as DistributedDataParallel does.

        Raises RunError where a buffer is in no state dict: it is each replica's own.
        """
        if runtime.replicas is None or runtime.replicas.number == 1:
            return
        changed = self._changed(runtime)
        private = changed.keys() - {name for _, name in self.plan.state}
        if private:
            raise RunError(own_of_each_replica(min(private)))
        runtime.replicas.copy_first([*changed.values()])

    def _changed(self, runtime: Runtime) -> dict[str, torch.Tensor]:
        """The buffers to which a step gave new values."""
        return {name: value for name, value in runtime.buffers.items() if value is not self.buffers[name]}

    def write(self, values: Mapping[str, torch.Tensor]) -> None:
        """Give buffers other values, in their memory.  A plain attribute gets a new tensor: code may keep the
        old one."""
        attributes = values.keys() & self.kept
        model = self.of() if attributes else None
        slots = {} if model is None else kept_slots(model)
        for name, value in values.items():
            if name not in attributes:
                self.buffers[name].copy_(value)
                continue
            self.buffers[name] = value.detach().to(self.device, copy=True)
            if name in slots:
                slots[name].put(self.buffers[name])

    def check_values(self, rank: int) -> None:
        """Raise RunError if a tensor of the rank is on the meta device."""
        names = (name for name in self.stored_by(rank).state if name not in self.borrowed)
        missing = [name for name in names if self.value(name).is_meta]
        if missing and self.has_all_lanes_of(missing[0]):
            raise RunError(
                f"This process runs all lanes, and its model has one lane's share of {missing[0]}. Give the "
                "whole values, of before parallelize_module, with pipe.load_state_dict(…)."
            )
        if missing:
            raise RunError(
                f"The model is on the meta device: {missing[0]} has no values. "
                "Give them with pipe.load_state_dict(…) or pipe.initialize() before you run or save the "
                "pipeline."
            )

    def updated(self) -> None:
        """An optimizer has changed what this process owns."""
        self.changed()
        self.stale = self.is_divided
        if self.stale:
            for other in sharing(self):  # they have the same tensors under names of their own
                other.stale = True
        if self.stale and not self.divides_parameters:
            hide_stale(self)

    def refreshed(self) -> None:
        """The rows that other replicas own have come."""
        if self.stale:
            self.stale = False
            show_stale(self)

    def filled(self) -> None:
        """The model of this rank has the values of all ranks."""
        self.synchronized = True
        if self.process is None:
            return
        self.whole = WholeModel(trained_tensors(self))
        watch_updates(self)  # a script's own optimizer may change it now

    def changed(self) -> None:
        """Values of this rank have changed: the model no longer has those of all ranks."""
        self.synchronized, self.whole = False, None
        unwatch_updates(self)
        if self.process is not None:
            free_others(self)

    def gathered(self) -> Iterator[tuple[ShardName, int, torch.Tensor]]:
        """Yield each parameter and buffer as its first holders have it: the name, or that of rows, the lane,
        and the value; a share for each lane where lanes have shares.

        Under torchrun all ranks must call it, and get values as they are sent, one by one.
        """
        self.follow_model()
        for rank in own_ranks(self.process, self.plan.ranks):
            self.check_values(rank)
        for name, processes in holders(tensors.state for tensors in self.owned).items():
            if self.process is None:
                yield name, 0, self.value(name)
                continue
            first = self.plan.lanes.firsts(name.tensor, processes)
            for lane in self.plan.lanes.holders(name.tensor):
                yield name, lane, self._broadcast(name, first[lane])

    def _broadcast(self, name: ShardName, holder: int) -> torch.Tensor:
        """The value of a tensor on a process, on all of them; all call it."""
        assert self.process is not None
        here = self.process.world_rank == holder
        tensor = self.value(name) if here else self.layout(name).empty(self.device)
        self.process.broadcast_(tensor, holder)
        return tensor

    def layout(self, name: ShardName) -> TensorLayout:
        """The layout of a parameter, of any rows of one, or of a buffer."""
        if self.has_all_lanes_of(name):
            return self.plan.whole_layout(name)
        if name in self.plan.layouts:
            return self.plan.layouts[name]
        table = self.plan.layouts[name.tensor]
        return replace(table, shape=(name.end - name.begin, *table.shape[1:]))

    def pieces(self, name: ShardName) -> list[tuple[int, ShardName]]:
        """The parts of a parameter that processes own, by their first owners, which make all of it: of each
        the process and the name, that of rows where it has no more.

        name: as the plan has it, of a whole parameter or of rows; or of a buffer.
        """
        owners = holders(tensors.state for tensors in self.owned)
        named = [(piece, processes) for piece, processes in owners.items() if name.contains(piece)]
        if self.process is None:
            return [(processes[0], piece) for piece, processes in named]
        lanes = self.plan.lanes
        first = [(piece, lanes.firsts(piece.tensor, processes)) for piece, processes in named]
        return [(of[lane], piece) for piece, of in first for lane in lanes.holders(name.tensor)]

    def value(self, name: str) -> torch.Tensor:
        """The value of a parameter, or of rows of one, or of a buffer, that this rank holds."""
        return memory_of(self.buffers[name] if name in self.buffers else self.parameter(name))

    @contextmanager
    def filling(self, name: ShardName) -> Iterator[torch.Tensor]:
        """Yield the memory of a parameter, of rows of one, or of a buffer, that this rank holds, to a block
        that overwrites it.  A tensor on the meta device gets memory first."""
        if name not in self.kept or self.buffers[name].is_meta:
            yield self._memory(name)
            return
        value = torch.empty_like(self.buffers[name])
        yield value
        self.write({name: value})

    def _memory(self, name: ShardName) -> torch.Tensor:
        tensor: torch.Tensor = self.buffers[name] if name in self.buffers else self._table(name)[0]
        if not tensor.is_meta:
            return self.value(name)
        self.rows.clear()  # of no memory; those with memory are an optimizer's, and stay
        # A process of all ranks holds the other rows as well.
        target = name if self.process is not None else ShardName(name.tensor)
        memory = self.layout(target).empty(self.device)
        if name in self.buffers:
            self.buffers[name] = memory
        else:
            self.parameters[target] = nn.Parameter(memory, tensor.requires_grad)
        return self.value(name)

    def take_back(self, parameters: dict[str, nn.Parameter], buffers: dict[str, torch.Tensor]) -> None:
        """Hold the tensors of before an attempt that failed."""
        self.parameters.clear()
        self.parameters |= parameters
        self.buffers.clear()
        self.buffers |= buffers
        self.rows.clear()  # they are parts of other tensors now
