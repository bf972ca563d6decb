"""The weights of a pipeline: given, read, averaged and shared, on the ranks that hold them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from fxpipe.errors import OptionError
from fxpipe.plan.artifact import Artifact
from fxpipe.plan.saved import files
from fxpipe.runtime.job.process import Process, agreed
from fxpipe.runtime.job.tracebacks import brief_methods
from fxpipe.runtime.job.user_line import called_function
from fxpipe.training.guards.guards import Traced
from fxpipe.training.model.initialize import initialize_model
from fxpipe.training.model.model_state import ModelState
from fxpipe.training.model.pending_update import PendingUpdate
from fxpipe.training.model.save import new_directory
from fxpipe.training.model.state_dict import (
    copy_to_model,
    full_state_dict,
    load_state_dict,
    share_values,
    state_dict,
)
from fxpipe.training.optimizer.average import Average, Decay
from fxpipe.training.run.runner import Runner
from fxpipe.training.weights.pretrained import export, values_at
from fxpipe.training.weights.tensor_values import InMemory


@brief_methods
@dataclass(eq=False, repr=False, kw_only=True)
class Weights:
    """What a pipeline does with parameters and buffers, beside its steps.

    ``rows``: of tables of which this rank holds some, as parameters.  ``of``: gives the model, None if there
    is none; under torchrun a pipeline does not keep it alive.  ``then``: what the programs have taken from it
    once.
    """

    artifact: Artifact
    parameters: dict[str, torch.nn.Parameter]
    buffers: dict[str, torch.Tensor]
    rows: dict[str, torch.nn.Parameter] = field(default_factory=dict)
    device: torch.device
    process: Process | None
    of: Callable[[], torch.nn.Module | None] = lambda: None
    then: Traced | None = None
    updates: PendingUpdate = field(default_factory=PendingUpdate)

    @property
    def _runner(self) -> Runner:
        """The pipeline's own, by which ranks compare what they hold."""
        raise NotImplementedError

    @cached_property
    def model_state(self) -> ModelState:
        return ModelState(
            self.artifact.plan,
            self.parameters,
            self.buffers,
            self.device,
            self.process,
            self.of,
            self.then,
            rows=self.rows,
            updates=self.updates,
        )

    def parameter(self, name: str) -> torch.nn.Parameter:
        """A parameter by name, or the rows of one that a rank holds (``"lm_head.weight[0:128]"``)."""
        return self.model_state.parameter(name)

    def average(self, decay: Decay, *, into: Mapping[str, str] | None = None) -> Average:
        """An average of the weights over steps, made where they are; all ranks must make the same.

        decay: ``average = decay * average + (1 - decay) * weight`` at each call of its ``step()``, behind the
            optimizer's; or a function of the number of calls so far.  It begins with the weights of now.
        into: frozen parameters of the model that are the average of others, as a teacher's of a student's:
            ``{"teacher.*": "student.*"}``, patterns whose ``*`` stand for the same text.  Ranks that have
            the one get the other's values from those that have it.

        Without ``into`` each rank keeps the averages of what it trains, in float32 or wider, and the
        pipeline has them inside of ``with average.applied():``, for ``evaluate``, ``full_state_dict``,
        ``export``, ``save`` and ``synchronize``.  ``Checkpointer(…, state={"average": average})`` keeps it.
        Raises OptionError for names that do not fit, and another decay than from 0 to 1.
        """
        return Average(self.model_state, decay, into)

    def synchronize(self, model: torch.nn.Module | None = None) -> None:
        """Copy each parameter and buffer from the rank that holds it to the model, on every rank.

        Under torchrun a rank has only the tensors that it holds, and the use of others is an error.  All
        ranks call this before the model is used or saved, or before a pipeline that evaluates it on other
        ranks runs.  The next step or update frees the copies.  model: another one with the same names, for
        a pipeline that was loaded.  Raises RunError where the model has no memory of its own to copy to.
        """
        self.check_alike()
        copy_to_model(self.model_state, model)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers under the names of the model's own state dict, which
        ``model.load_state_dict`` takes; they share the pipeline's memory.

        Raises RunError under torchrun, where a rank holds a part of them: see ``full_state_dict``.
        """
        self.updates.settle()
        return state_dict(self.model_state)

    def full_state_dict(self, rank: int | None = 0) -> dict[str, torch.Tensor]:
        """A copy of ``state_dict`` of the whole model in the memory of the CPU, on one rank (None: on each);
        the others get an empty dict.  All ranks must call it.  Raises OptionError for a rank that is none."""
        self.check_alike()
        return full_state_dict(self.model_state, rank)

    def load_state_dict(self, state: Mapping[str, torch.Tensor] | str | Path, strict: bool = True) -> None:
        """Load values of parameters and buffers; this also gives tensors to a model on the meta device.

        state: of the whole model, or the path of a safetensors file, of a directory of Hugging Face with
            one or several of them, or of a checkpoint that ``torch.distributed.checkpoint`` wrote, of which
            each rank reads its part.  A tensor with two names may have one of them, and buffers that are not
            persistent may be missing.

        Call it on all ranks, before ``optimizer`` and the first ``step``.
        strict: raise ArtifactError for names that are missing or that the model does not have.
        Raises ArtifactError for another shape, and for two values of one tensor.
        """
        self.updates.settle()
        with agreed(self.process, "load the state dict"):
            if not isinstance(state, Mapping | str | Path):
                raise OptionError(f"state is {state!r:.60} and must be a mapping of tensors or a path.")
            for key, value in state.items() if isinstance(state, Mapping) else ():
                if isinstance(value, Mapping):
                    raise OptionError(
                        f"state[{key!r}] is a mapping, not a tensor: give the state dict in it, "
                        f"state[{key!r}]."
                    )
            values = values_at(Path(state)) if isinstance(state, str | Path) else InMemory(state)
            load_state_dict(self.model_state, values, strict)
        self.share_values()

    def initialize(self, fn: Callable[[torch.nn.Module], object] | None = None, *, seed: int = 0) -> None:
        """Give a model on the meta device its initial values, each on the ranks that hold it.

        As where a model is made on a device: all modules reset themselves (``reset_parameters``), then those
        of Hugging Face run ``_init_weights``, then ``fn(module)`` is called for each module, as by
        ``model.apply(fn)``.  Tensors that have values keep them.

        seed: with it, the name of a module decides the numbers that its functions draw, on devices of one
            model: the values are the same for any number of ranks, lanes, stages and split tables.

        Call it on all ranks, as long as the model lives, before ``optimizer`` and the first ``step``.  A rank
        makes the tensors that it holds in their places; of a split table, or a lane's share of a tensor, it
        makes the whole for a moment, before all others, and keeps its part.
        Raises RunError, naming it, for a parameter or buffer that none of these functions writes.
        """
        if self.process is not None:
            arguments = {"seed": repr(seed), "fn": getattr(fn, "__qualname__", type(fn).__name__)}
            self.process.check_alike(arguments, "pipe.initialize", "Call it with the same on all ranks.")
        with agreed(self.process, "initialize the model"):
            initialize_model(self.model_state, fn, seed)
        if self.process is not None and self.process.has_different_devices(self.device):
            self.share_values()  # their generators may differ

    def export(
        self, directory: str | Path, like: str | Path | None = None, *, largest_file: str = "5GB"
    ) -> None:
        """Write the whole model's weights to a new directory as Hugging Face does; all ranks must call it.

        like: a directory whose other files (config.json, the tokenizer's) are copied, so that
            ``from_pretrained`` opens the new one.  largest_file: weights beyond it are split over several.
        Raises ArtifactError, on all ranks, where the directory is not empty or cannot be written.
        """
        source = None if like is None else Path(like)
        target = files.as_path(directory, "pipe.export")
        with new_directory(target, self.process) as draft:
            state = self.full_state_dict()
            with agreed(self.process, "export"), files.writing(target):
                if state:  # on rank 0
                    export(state, draft, source, largest_file)

    def check_alike(self) -> None:
        """Raise RunError, on all ranks, unless they have made the same updates, and each tensor that several
        hold has the same values on them.

        Each step compares this as well, of the step before; ``save`` and the like call it first.
        """
        if (process := self._with_followed_model()) is not None:
            self._runner.rank_digests.check(process, called_function())

    def share_values(self) -> None:
        """Give each tensor that several ranks hold the values of the first of them.

        ``compile``, ``load`` and ``load_state_dict`` do it; call it, on all ranks, after other changes of
        values.
        """
        if (process := self._with_followed_model()) is None:
            return
        state, plan = self.model_state, self.artifact.plan
        if not state.divides_parameters:
            self._runner.gather_parameters()
        stored = state.stored_by(process.rank).state
        tensors_here = self.artifact.constants | {name: state.value(name) for name in stored}
        tensors = state.owned if state.divides_parameters else process.of_each(plan.tensors)
        share_values(process, tensors, tensors_here, plan.lanes)
        state.whole = None  # some ranks have got values, which no script has changed

    def _with_followed_model(self) -> Process | None:
        """This process among others, when the last update stands and the state follows the model."""
        self.updates.settle()
        if self.process is not None:
            with self.process.agreed("use its model"):
                self.model_state.follow_model()
        return self.process
