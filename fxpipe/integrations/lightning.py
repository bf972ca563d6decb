"""A strategy by which Lightning's Trainer trains a pipeline, under torchrun: a process for each rank.

Lightning calls                  which here is
training_step, backward          a step of the pipeline, which was traced from ``training_step``
self.log in it                   the same call with what the microbatches have, reduced
optimizers, schedulers           the module's own, of which a rank updates the parameters that it holds
validation_step, test_step       a forward in eval mode, of one microbatch
a checkpoint                     Lightning's, of the whole model and optimizer, written by the first rank

To Lightning each rank is the only process, as all ranks take the same batches; but only the first one writes.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

try:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.accelerators import CUDAAccelerator
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning_utilities.core.apply_func import apply_to_collection
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"PipelineStrategy needs Lightning: pip install 'fxpipe[lightning]' ({error})"
    ) from error

import fxpipe
from fxpipe.errors import OptionError
from fxpipe.integrations.traced_step import Logged, TracedStep

_ACCUMULATES = "accumulate_grad_batches: give larger batches, and PipelineStrategy more microbatches"


class PipelineStrategy(SingleDeviceStrategy):
    """``Trainer(strategy=PipelineStrategy(microbatches=8, schedule="zb-h1"))``.

    microbatches: of a batch of the training data, whose rows they divide.
    changes_gradients: hooks of the module or of callbacks change gradients by what needs no values of other
        ranks, as for ``pipe.optimizer``.
    options: of ``fxpipe.compile``; ``ranks`` is by default the number of processes.

    ``pipe``: the pipeline, which is compiled by the first batch.  All ranks make the same calls.
    Raises OptionError, on all ranks, for what a pipeline does not do: manual optimization, several
    optimizers, accumulated batches, a GradScaler, ``predict``.
    """

    strategy_name = "fxpipe"

    def __init__(self, *, microbatches: int, changes_gradients: bool = False, **options: Any):
        super().__init__()
        self.microbatches, self.options = microbatches, options
        self._changes_gradients = changes_gradients
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.pipe: fxpipe.Pipeline | None = None
        self._steps: dict[object, tuple[fxpipe.Pipeline, TracedStep, Logged]] = {}
        self._gradients: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._norms: Any = None
        self._compiled: LightningModule | None = None
        self._step_number = 0
        self._rows: list[int] = []
        """Of the tensors of the first batch."""

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None, "a run has begun"
        return self.lightning_module

    # Processes

    @property
    def is_global_zero(self) -> bool:
        return int(os.environ.get("RANK", "0")) == 0

    @property
    def root_device(self) -> torch.device:
        is_gpu = isinstance(self.accelerator, CUDAAccelerator)
        return torch.device("cuda", self.local_rank) if is_gpu else torch.device("cpu")

    def setup_environment(self) -> None:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
            dist.init_process_group("gloo")  # for what Lightning itself tells the ranks
        super().setup_environment()

    def barrier(self, *args: object, **kwargs: object) -> None:
        if dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        objects = [obj]
        if dist.is_initialized():
            dist.broadcast_object_list(objects, src)
        return objects[0]

    # A run

    def setup(self, trainer: Any) -> None:
        if self._compiled not in (None, self._module):
            raise OptionError("A PipelineStrategy is of one module: make another for this one.")
        if refusal := self._refusal(trainer):
            raise OptionError(f"{refusal}.")
        trainer.num_sanity_val_steps = 0  # the training step is compiled first, as it decides the cuts
        super().setup(trainer)
        if len(self.optimizers) > 1:
            raise OptionError("configure_optimizers gives several optimizers, and a pipeline has one.")
        for optimizer in self.optimizers:
            closure = inspect.signature(optimizer.step).parameters.get("closure")
            if closure is not None and closure.default is closure.empty:
                raise OptionError(
                    f"{type(optimizer).__name__} runs the step several times for an update: take an "
                    "optimizer that runs it once, such as AdamW."
                )
        self.precision_plugin.clip_grad_by_norm = self._clip  # type: ignore[method-assign]

    def _refusal(self, trainer: Any) -> str:
        """Why a run is refused; empty if it is not."""
        if type(self._module).backward is not LightningModule.backward:
            return (
                "backward of the module would not run: a step of a pipeline has its backward in it. Remove "
                "it; what it changes of the loss belongs to training_step"
            )
        if not self._module.automatic_optimization:
            return (
                "automatic_optimization=False: a step of a pipeline has its backward in it. Remove it; "
                "training_step returns the loss"
            )
        if trainer.accumulate_grad_batches != 1:
            return _ACCUMULATES
        if getattr(self.precision_plugin, "scaler", None) is not None:
            return "precision='16-mixed' needs a GradScaler, which a pipeline does not have: take bf16-mixed"
        return ""

    def model_to_device(self) -> None:
        if self.pipe is None:
            super().model_to_device()

    def teardown(self) -> None:
        """Leave tensors where they are: a rank holds a part of them."""
        self.precision_plugin.teardown()
        self.checkpoint_io.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()

    # Steps

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._module.trainer.accumulate_grad_batches != 1:  # which callbacks may set
            raise OptionError(f"{_ACCUMULATES}.")
        pipe, _, logged = self._step_of("training_step", batch, self.microbatches)
        if self._norms is None:
            self._begin(pipe)
        held = [p for group in self.optimizers[0].param_groups for p in group["params"]]
        # A module may zero them by itself, which comes between both; a step writes to what it gave before.
        zeroes = type(self._module).optimizer_zero_grad is not LightningModule.optimizer_zero_grad
        before = [p.grad.clone() if zeroes and p.grad is not None else None for p in held]
        self._norms.zero_grad()
        result = pipe.step((batch,), outputs=["logged"], outputs_on="all")
        assert result.loss is not None, "training_step has one"
        loss = result.loss.as_subclass(torch.Tensor)
        logged.give(self._module, result.outputs["logged"], loss)
        updated = {*map(id, held)}
        for parameter in pipe.parameters.values():
            if id(parameter) not in updated:  # it counts in no norm, and nothing adds up
                parameter.grad = None
        # Lightning zeroes gradients between the forward and the backward, which adds those of this step.
        self._gradients = [(p, p.grad) for p in held if p.grad is not None]
        for parameter, gradient in zip(held, before, strict=True):
            parameter.grad = gradient
        return loss

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = self.precision_plugin.pre_backward(closure_loss, self._module)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self._gradients = []
        return self.precision_plugin.post_backward(loss, self._module)

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Run the step of the pipeline, then the update; not within it, as Lightning does: fxpipe compares
        what lies between."""
        result = self.precision_plugin._wrap_closure(model or self._module, optimizer, closure)
        optimizer.step(**kwargs)
        return result

    def validation_step(self, batch: Any, *args: Any, **kwargs: Any) -> None:
        self._evaluate("validation_step", batch)

    def test_step(self, batch: Any, *args: Any, **kwargs: Any) -> None:
        self._evaluate("test_step", batch)

    def predict_step(self, *args: Any, **kwargs: Any) -> None:
        raise OptionError("predict: call strategy.pipe.synchronize() on all ranks, and the module itself.")

    def _evaluate(self, name: str, batch: Any) -> None:
        pipe, _, logged = self._step_of(name, batch, 1)
        number = pipe.step_number
        result = pipe.evaluate((batch,), outputs=["logged"], outputs_on="all")
        pipe.step_number = number  # dropout's numbers go on as without an evaluation
        logged.give(self._module, result.outputs["logged"], None)

    def _step_of(
        self, name: str, batch: Any, microbatches: int
    ) -> tuple[fxpipe.Pipeline, TracedStep, Logged]:
        """The pipeline of a step of the module; one for each shape of batches that are evaluated."""
        trains, shapes = name == "training_step", list[tuple[int, ...]]()
        apply_to_collection(batch, torch.Tensor, lambda x: shapes.append(tuple(x.shape)))
        key = (name, () if trains else tuple(shapes))
        if trains and "dimensions" not in self.options:
            rows = [shape[0] for shape in shapes if shape]
            self._rows = self._rows or rows
            if rows != self._rows:
                raise OptionError(
                    f"The train loader gives a batch of {rows} rows, and its first one had {self._rows}: "
                    "give it drop_last=True."
                )
        if key not in self._steps:
            step, options = TracedStep(self._module, name), dict(self.options)
            if self.pipe is None:
                options.setdefault("ranks", int(os.environ.get("WORLD_SIZE", "1")))
            else:
                of_first = ("ranks", "split_points", "vocab_parallel", "grad_dtype")
                options = {k: x for k, x in options.items() if k not in of_first} | {"like": self.pipe}
            options |= {"gradients": trains, "outputs": ["logged"], "microbatches": microbatches}
            was = self._module.training
            step.train(trains)
            with self.precision_plugin.forward_context():
                pipe = fxpipe.compile(step, (_first(batch, microbatches),), **options)
            step.train(was)
            self._steps[key] = pipe, step, self.broadcast(step.logged())
            self.pipe, self._compiled = self.pipe or pipe, self._module
        self._steps[key][1].follow(self._module)
        return self._steps[key]

    def _begin(self, pipe: fxpipe.Pipeline) -> None:
        """Leave the optimizer the state of what this rank holds."""
        held, state = {*map(id, pipe.parameters.values())}, self.optimizers[0].state
        for parameter in [p for p in state if id(p) not in held]:
            del state[parameter]
        by_value = self._module.trainer.gradient_clip_algorithm not in (None, "norm")
        changes = by_value or self._changes_gradients
        # For all gradients: it updates nothing.
        self._norms = pipe.optimizer(torch.optim.SGD, lr=0.0, changes_gradients=changes)
        pipe.step_number = self._step_number

    def _clip(self, optimizer: Any, clip_val: float) -> None:
        held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        clip_grads_with_norm_(held, clip_val, self._norms.grad_norm())

    # Checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self.pipe is None:
            return super().lightning_module_state_dict()
        return {n.removeprefix(TracedStep.PREFIX): x for n, x in self.pipe.full_state_dict().items()}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The state of all ranks, as torch's optimizer of the whole model has it; on the first rank."""
        state: dict[str, Any] = super().optimizer_state(optimizer)
        if self.pipe is None or not dist.is_initialized():
            return state
        found: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(state["state"], found if self.is_global_zero else None)
        merged = {place: of for of_rank in found if of_rank for place, of in of_rank.items()}
        return {**state, "state": dict(sorted(merged.items()))}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        number = self._step_number if self.pipe is None else self.pipe.step_number
        super().save_checkpoint({**checkpoint, "fxpipe_step": number}, filepath, storage_options)
        self.barrier()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._step_number = checkpoint.get("fxpipe_step", 0)
        if self.pipe is not None:
            self.pipe.step_number = self._step_number
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self.pipe is None:
            super().load_model_state_dict(checkpoint, strict)
        else:
            state = {TracedStep.PREFIX + name: x for name, x in checkpoint["state_dict"].items()}
            self.pipe.load_state_dict(state, strict)


def _first(batch: Any, microbatches: int) -> Any:
    """The first microbatch of a batch."""

    def first(x: torch.Tensor) -> torch.Tensor:
        if x.dim() and len(x) % microbatches:
            raise OptionError(
                f"{microbatches} microbatches cannot share a batch of {len(x)} rows evenly: give the loader "
                "another batch_size, and drop_last=True."
            )
        return x[: len(x) // microbatches] if x.dim() else x

    return apply_to_collection(batch, torch.Tensor, first)
