"""The tensors that a pipeline trains: the model's parameters and buffers, and the shards held by ranks."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fxpipe.errors import RunError
from fxpipe.plan.artifact import Plan, holders
from fxpipe.plan.kept import kept_slots, kept_tensors
from fxpipe.plan.rows import rows_of, whole_name
from fxpipe.runtime.job.process import Process, own_ranks
from fxpipe.runtime.program.rank import Runtime
from fxpipe.training.optimizer import set_grad
from fxpipe.training.unchanged import Traced
from fxpipe.training.zeroed import take_zeroed


@dataclass(eq=False)
class ModelState:
    """``parameters`` and ``buffers``: by the model's names; under torchrun those that this rank needs.

    A loaded pipeline holds rows as parameters of their own; one that was compiled in this process trains rows
    of the model's table as long as the model lives.  ``of``: gives the model that was compiled in this
    process, whose tensors may be replaced between two steps; None if there is none (any more): under torchrun
    a pipeline does not keep it alive, as a rank needs only its part.  ``synchronized``: whether the model of
    each rank has the trained values of all ranks.  ``run``: a name of the run, the same after it was resumed.
    ``then``: its hooks and frozen parameters when it was compiled.
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
    _rows: dict[str, nn.Parameter] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()  # names of buffers that are in plain attributes of the model's modules

    def __post_init__(self) -> None:
        if (model := self.of()) is not None:
            registered = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
            self.kept = frozenset(self.buffers.keys() - registered)

    def let_go(self) -> None:
        """See ``Pipeline.let_model_go``."""
        for table in list(self.parameters):
            parts = {name: self.parameter(name) for name in self.rows_held(table)}
            for part in parts.values():
                part.data = part.detach().clone()
            if parts:
                del self.parameters[table]
                self.parameters |= parts
        self._rows.clear()

    def rows_held(self, table: str) -> dict[str, slice]:
        """The rows of a table that this process's rank holds; none in a process that runs all ranks."""
        held = () if self.process is None else self.plan.tensors[self.process.rank].parameters
        found = ((name, rows) for name in held if (rows := rows_of(name)) and rows.table == table)
        return {name: slice(rows.begin, rows.end) for name, rows in found}

    def follow_model(self) -> dict[str, nn.Parameter]:
        """Use the tensors that the model holds now; return its parameters, if there is a model.

        Raises RunError if a shape, dtype or device changed.
        """
        model = self.of()
        if model is None:
            return {}
        named = dict(model.named_parameters())
        now = {**named, **dict(model.named_buffers()), **kept_tensors(model, self.kept)}
        held: tuple[dict[str, Any], ...] = (self.parameters, self.buffers)
        for mine in held:
            for own_name, old in list(mine.items()):
                name = whole_name(own_name)
                new = now.get(name)
                if new is not None and new.is_meta:
                    continue  # load_state_dict gave the pipeline its own tensors
                layout = self.plan.layouts.get(name)
                if layout is None:  # no rank uses it
                    continue
                if new is None or (tuple(new.shape), str(new.dtype)) != (layout.shape, layout.dtype):
                    found = "is gone" if new is None else f"is now {new.dtype} of shape {tuple(new.shape)}"
                    remedy = "Put such a tensor there, or compile" if name in self.kept else "Compile"
                    raise RunError(
                        f"The model's {name}, {layout.dtype} of shape {layout.shape}, {found}. {remedy} the "
                        "model again."
                    )
                if new.device != self.device:
                    raise RunError(
                        f"The model's {name} is on {new.device}, and the pipeline was compiled for "
                        f"{self.device}. Move the model back, or compile it again."
                    )
                if own_name != name:  # rows, loaded when the model was on the meta device
                    del mine[own_name]
                if new is not old:
                    mine[name] = new
        return named

    def check_unchanged(self, named: dict[str, nn.Parameter]) -> None:
        """Raise RunError if the model's hooks or frozen parameters are other ones than the program's.

        named: as ``follow_model`` gives them.
        """
        if self.then is not None:
            trains = any(held.gradients for held in self.plan.tensors)
            self.then.check(named | self.parameters, self.of(), self.plan.layouts, trains=trains)

    def parameter(self, name: str) -> torch.nn.Parameter:
        """A parameter, or the rows of one that a rank holds; rows share the parameter's memory, and their
        gradient has their own size."""
        rows = rows_of(name)
        if rows is None or name in self.parameters:
            return self.parameters[name]
        table = self.parameters[rows.table]
        part = table.detach()[rows.begin : rows.end]
        if name not in self._rows:
            self._rows[name] = torch.nn.Parameter(part, table.requires_grad)
        elif self._rows[name].data_ptr() != part.data_ptr():  # the whole table has moved to other memory
            self._rows[name].data = part
        return self._rows[name]

    def held_by(self, rank: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The parameters and buffers that a rank holds."""
        held = self.plan.tensors[rank]
        params = {name: self.parameter(name).detach() for name in held.parameters}
        return params, {name: self.buffers[name] for name in held.buffers}

    def accumulators(self, rt: Runtime) -> dict[str, torch.Tensor]:
        """Make the parameters' ``.grad`` the accumulators of the program, of the plan's dtype.

        An earlier step's gradient must be counted once by a sum over ranks, so one of them keeps it, and must
        not be divided by this step's count: then the step gets new accumulators, and the ``.grad`` to add
        them to are returned.
        """
        trained = holders(held.gradients for held in self.plan.tensors)
        earlier = {}
        for name in self.plan.tensors[rt.rank].gradients:
            parameter = self.parameter(name)
            grad, dtype = parameter.grad, self.plan.gradient_dtype(parameter.dtype)
            held = self._zeros(parameter) if grad is None else grad.to(dtype)
            if held is not grad:
                set_grad(parameter, held)
            rt.grads[name] = held
            if grad is None or take_zeroed(grad):
                continue
            if self.plan.step.has_count:
                earlier[name] = held
                rt.grads[name] = self._zeros(parameter)
            elif rt.rank != trained[name][0]:  # which has the same one
                held.zero_()
        return earlier

    def _zeros(self, parameter: nn.Parameter) -> torch.Tensor:
        return torch.zeros_like(parameter, dtype=self.plan.gradient_dtype(parameter.dtype))

    def zero_gradients(self, rank: int) -> dict[str, torch.Tensor]:
        """New gradient accumulators for a rank."""
        return {n: self._zeros(self.parameter(n)) for n in self.plan.tensors[rank].gradients}

    def store_buffers(self, runtime: Runtime) -> None:
        """Give the model's buffers the values that a step gave them."""
        new = {name: value for name, value in runtime.buffers.items() if value is not self.buffers[name]}
        self.write(new)
        runtime.buffers |= {name: self.buffers[name] for name in new}

    def write(self, values: Mapping[str, torch.Tensor]) -> None:
        """Give buffers other values, in their memory.  A plain attribute gets a new tensor: code may keep the
        old one."""
        kept = values.keys() & self.kept
        model = self.of() if kept else None
        slots = {} if model is None else kept_slots(model)
        for name, value in values.items():
            if name not in kept:
                self.buffers[name].copy_(value)
                continue
            self.buffers[name] = value.detach().to(self.device, copy=True)
            if name in slots:
                slots[name].put(self.buffers[name])

    def check_values(self, rank: int) -> None:
        """Raise RunError if a tensor of the rank is on the meta device."""
        missing = [name for name in self.plan.tensors[rank].state if self.held(name).is_meta]
        if missing:
            raise RunError(
                f"The model is on the meta device: {missing[0]} has no values. "
                "Give them with pipe.load_state_dict(…) before you run or save the pipeline."
            )

    def changed(self) -> None:
        """Values of this rank have changed: the model no longer has those of all ranks."""
        self.synchronized = False

    def gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each parameter and buffer as its first holder has it: (name, or that of rows, value).

        Under torchrun all ranks must call it, and get values as they are sent, one by one.
        """
        self.follow_model()
        for rank in own_ranks(self.process, self.plan.ranks):
            self.check_values(rank)
        for name, (rank, *_) in holders(held.state for held in self.plan.tensors).items():
            here = self.process is None or self.process.rank == rank
            tensor = self.held(name) if here else self.plan.layouts[name].empty(self.device)
            if self.process is not None:
                self.process.broadcast_(tensor, rank)
            yield name, tensor

    def held(self, name: str) -> torch.Tensor:
        """The value of a parameter, or of rows of one, or of a buffer, that this rank holds."""
        return (self.buffers[name] if name in self.buffers else self.parameter(name)).detach()

    @torch.no_grad()
    def give(self, name: str, value: torch.Tensor) -> None:
        """Values for a parameter, or for rows of one, or for a buffer, that this rank holds; one on the meta
        device gets memory."""
        rows = rows_of(name)
        whole = name if rows is None or name in self.parameters else rows.table
        held: torch.Tensor = self.buffers[name] if name in self.buffers else self.parameters[whole]
        if name in self.buffers and not held.is_meta:
            self.write({name: value})
            return
        if not held.is_meta:
            self.held(name).copy_(value)
            return
        self._rows.clear()  # of no memory; those with memory are an optimizer's, and stay
        own = value.to(self.device, held.dtype, copy=True)
        if name in self.buffers:
            self.buffers[name] = own
        elif whole == name:
            self.parameters[name] = nn.Parameter(own, held.requires_grad)
        elif self.process is None:  # which holds the other rows as well
            table = self.plan.layouts[whole].empty(self.device)
            self.parameters[whole] = nn.Parameter(table, held.requires_grad)
            self.parameter(name).copy_(value)
        else:
            self.parameters[name] = nn.Parameter(own, held.requires_grad)

    def forget_rows(self) -> None:
        """Rows are parts of other tensors now."""
        self._rows.clear()
