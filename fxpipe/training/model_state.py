"""The tensors that a pipeline trains: the model's parameters and buffers, and the shards held by ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fxpipe.errors import ArtifactError, RunError
from fxpipe.plan.artifact import Plan
from fxpipe.runtime.rank import Runtime
from fxpipe.vocabulary.rows import rows_of


@dataclass(eq=False)
class ModelState:
    """``parameters`` and ``buffers``: by the model's names.  ``model``: if the pipeline was compiled in this
    process; its tensors may be replaced between two steps."""

    plan: Plan
    parameters: dict[str, torch.nn.Parameter]
    buffers: dict[str, torch.Tensor]
    device: torch.device
    model: torch.nn.Module | None
    _rows: dict[str, torch.nn.Parameter] = field(default_factory=dict)

    def follow_model(self) -> None:
        """Use the tensors that the model holds now.  Raises RunError if a shape or dtype changed."""
        if self.model is None:
            return
        now: dict[str, torch.Tensor] = dict(self.model.named_parameters())
        now |= self.model.named_buffers()
        held: tuple[dict[str, Any], ...] = (self.parameters, self.buffers)
        for mine in held:
            for name, old in mine.items():
                new = now.get(name)
                if new is not None and new.is_meta:
                    continue  # load_state_dict gave the pipeline its own tensors
                layout = self.plan.layouts.get(name)
                if layout is None:  # no rank uses it
                    continue
                if new is None or (tuple(new.shape), str(new.dtype)) != (layout.shape, layout.dtype):
                    found = "is gone" if new is None else f"is now {new.dtype} of shape {tuple(new.shape)}"
                    raise RunError(
                        f"The model's {name}, {layout.dtype} of shape {layout.shape}, {found}. Compile the "
                        "model again."
                    )
                if new is not old:
                    mine[name] = new

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
        params = {n: self.parameter(n).detach() for n in held.parameters}
        return params, {n: self.buffers[n] for n in held.buffers}

    def accumulators(self, rt: Runtime) -> dict[str, torch.Tensor]:
        """Make the parameters' ``.grad`` the accumulators of the program.

        A gradient that the step changes as a whole (by a sum over ranks, or division by the count) must not
        include an earlier step's: it gets a new accumulator, and the ``.grad`` to add it to is returned.
        """
        held = [set(t.gradients) for t in self.plan.tensors]
        earlier = {}
        for name in self.plan.tensors[rt.rank].gradients:
            parameter = self.parameter(name)
            worked_on = self.plan.step.has_count or sum(name in names for names in held) > 1
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif worked_on:
                earlier[name] = parameter.grad
            rt.grads[name] = torch.zeros_like(parameter) if name in earlier else parameter.grad
        return earlier

    def zero_gradients(self, rank: int) -> dict[str, torch.Tensor]:
        """New gradient accumulators for a rank."""
        return {n: torch.zeros_like(self.parameter(n)) for n in self.plan.tensors[rank].gradients}

    def store_buffers(self, runtime: Runtime) -> None:
        """Copy the buffers that a step changed to the model's buffers."""
        for name, value in runtime.buffers.items():
            if value is not self.buffers[name]:
                runtime.buffers[name] = self.buffers[name].copy_(value)

    def saved_by(self, rank: int, constants: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """All tensors of a rank's safetensors file."""
        held = self.plan.tensors[rank]
        tensors: dict[str, torch.Tensor] = {n: constants[n] for n in held.constants}
        tensors |= {n: self.parameter(n) for n in held.parameters}
        return tensors | {n: self.buffers[n] for n in held.buffers}

    def check_values(self, rank: int) -> None:
        """Raise RunError if a tensor of the rank is on the meta device."""
        held = self.plan.tensors[rank]
        tensors: dict[str, torch.Tensor] = {n: self.parameter(n) for n in held.parameters} | {
            n: self.buffers[n] for n in held.buffers
        }
        missing = [name for name, tensor in tensors.items() if tensor.is_meta]
        if missing:
            raise RunError(
                f"The model is on the meta device: {missing[0]} has no values. "
                "Give them with pipe.load_state_dict(…) before you run or save the pipeline."
            )

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """See ``Pipeline.load_state_dict``."""
        self.follow_model()
        self._rows.clear()
        for tensors in (self.parameters, self.buffers):
            for name, old in list(tensors.items()):
                if name not in state or state[name].shape != old.shape:
                    found = f"has shape {tuple(state[name].shape)}" if name in state else "is missing"
                    raise ArtifactError(f"{name}, of shape {tuple(old.shape)}, {found} in the state dict.")
                if not old.is_meta:
                    old.data.copy_(state[name])
                    continue
                value = state[name].to(self.device, old.dtype, copy=True)
                trained = isinstance(old, torch.nn.Parameter)
                tensors[name] = torch.nn.Parameter(value, old.requires_grad) if trained else value  # type: ignore
