"""The result of a compilation: run, train, save, simulate, draw."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import torch
from torch import fx

from fxpipe.cost.symbolic import Expressions, PlanWork
from fxpipe.errors import RunError, SizeError
from fxpipe.ir.graph import Section
from fxpipe.plan import files
from fxpipe.plan.artifact import Artifact, Plan
from fxpipe.runtime.outputs import On, StepResult
from fxpipe.runtime.process import Process
from fxpipe.runtime.rank import Runtime
from fxpipe.schedule.costs import StageCost
from fxpipe.schedule.ops import Schedule
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.schedule.simulation.timeline import Timeline
from fxpipe.training.model_state import ModelState
from fxpipe.training.optimizer import PipelineOptimizer
from fxpipe.training.runner import LocalResult, Runner
from fxpipe.vocabulary.rows import rows_of


@dataclass(frozen=True, eq=False)
class Stage:
    """One stage: the names of its parameters, the costs with which the schedule was made, and its sections
    (none if the pipeline was loaded, or compiled by another rank)."""

    index: int
    rank: int
    parameters: tuple[str, ...]
    costs: StageCost
    sections: tuple[Section, ...]
    work: PlanWork | None

    @cached_property
    def expressions(self) -> Expressions:
        """The costs as sympy expressions of the named lengths.

        Raises SizeError where the pipeline was compiled without ``dimensions``.
        """
        return _named(self.work).expressions(self.index)


@dataclass(eq=False)
class Pipeline:
    """The result of ``fxpipe.compile`` and ``fxpipe.load``.

    ``parameters`` and ``buffers`` are the model's own tensors: training the pipeline trains the model (under
    torchrun, the part that this rank holds).  If the tensors of ``model`` are replaced, the next step uses
    the new ones.  ``evaluation``: the forward in eval mode alone on the same tensors, if it was compiled.
    """

    artifact: Artifact
    parameters: dict[str, torch.nn.Parameter]
    buffers: dict[str, torch.Tensor]
    device: torch.device
    process: Process | None
    model: torch.nn.Module | None = None
    graph: fx.Graph | None = None
    sections: tuple[Section, ...] = ()
    directory: Path | None = None
    offload_directory: Path | None = None
    evaluation: Pipeline | None = None

    def with_evaluation(self, artifact: Artifact) -> Pipeline:
        """The pipeline with one for the forward alone, which works on the same tensors."""
        directory = None if self.directory is None else files.evaluation_directory(self.directory)
        forward = replace(self, artifact=artifact, directory=directory, sections=(), graph=None)
        return replace(self, evaluation=forward)

    @cached_property
    def _state(self) -> ModelState:
        return ModelState(self.plan, self.parameters, self.buffers, self.device, self.model)

    @cached_property
    def _runner(self) -> Runner:
        return Runner(
            self.artifact, self._state, self.device, self.process, self.directory, self.offload_directory
        )

    @property
    def artefact(self) -> Artifact:
        """The old spelling of ``artifact``."""
        warnings.warn("Pipeline.artefact is now Pipeline.artifact", DeprecationWarning, stacklevel=2)
        return self.artifact

    @property
    def plan(self) -> Plan:
        return self.artifact.plan

    @property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(
            Stage(
                s.stage,
                s.rank,
                s.parameters,
                cost,
                tuple(x for x in self.sections if x.stage == s.stage),
                self.plan.work,
            )
            for s, cost in zip(self.plan.stages, self.plan.costs.stages, strict=True)
        )

    @property
    def schedule(self) -> Schedule:
        return self.plan.ordered

    def simulate(self, sizes: Mapping[str, int] | None = None) -> Timeline:
        """Simulate the step: times, bubbles and the bytes that each rank holds between ops.

        sizes: other lengths than the example's, ``{"microbatch": 2, "sequence": 4096}``; the names
            must be in ``dimensions`` of ``compile``.  Stages and schedule do not change.
        Raises SizeError for an unknown name and for a length below one.
        """
        costs = self.plan.costs
        return simulate(self.schedule, costs if sizes is None else _named(self.plan.work).costs(costs, sizes))

    def run_local(
        self,
        batch: Any,
        *,
        step: int = 0,
        threads: int = 1,
        measure_memory: bool = False,
        outputs: Sequence[str] = (),
    ) -> LocalResult:
        """Run one step of all ranks in this process, in turns.

        batch: leading dimension = microbatches × the example's.  step: number of the step, for random
        numbers.  threads: intra-op threads of each rank; 1 is what torchrun gives, and then the result is
        bit for bit what torchrun's ranks compute.  measure_memory: also find each rank's peak of saved bytes.
        outputs: as for ``step``.
        Buffers are updated as in training; parameters and their ``.grad`` are left alone.
        """
        return self._runner.run_local(batch, step, threads, measure_memory, outputs)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the outputs that a step can be asked for: those of ``compile(…, outputs=[…])``."""
        return tuple(output.name for output in self.plan.step.outputs)

    @overload
    def step(self, batch: Any) -> torch.Tensor: ...
    @overload
    def step(self, batch: Any, *, outputs: Sequence[str], outputs_on: On = None) -> StepResult: ...
    def step(
        self, batch: Any, *, outputs: Sequence[str] | None = None, outputs_on: On = None
    ) -> torch.Tensor | StepResult:
        """Run one training step of this rank; return the loss of the whole batch, on every rank.

        outputs: names of ``pipe.outputs``; then a ``StepResult`` with the loss and their values is returned.
        outputs_on: the rank that is to have them, or ``"all"``; by default each stays on the rank that
        computes it.

        Gradients are added to the parameters' ``.grad``.  Needs torchrun with one process per rank (a
        pipeline of one rank runs without it).  If a rank fails, all ranks raise RunError with its message,
        and their processes end soon after, whether or not the error is caught.
        """
        if outputs is None and not self.plan.step.has_loss:
            raise RunError(
                f"The model has no loss: ask for outputs=[…]. The pipeline gives {', '.join(self.outputs)}."
            )
        result = self._runner.step(batch, outputs or (), outputs_on)
        return _loss(result) if outputs is None else result

    @overload
    def evaluate(self, batch: Any) -> torch.Tensor: ...
    @overload
    def evaluate(self, batch: Any, *, outputs: Sequence[str], outputs_on: On = None) -> StepResult: ...
    def evaluate(
        self, batch: Any, *, outputs: Sequence[str] | None = None, outputs_on: On = None
    ) -> torch.Tensor | StepResult:
        """Run the forward alone, in eval mode if the pipeline trains; return the loss of the whole batch.

        outputs, outputs_on: as for ``step``.  The weights are those of the last optimizer step.  Without
        torchrun ``pipe.evaluation.run_local(batch)`` runs all ranks.
        Raises RunError if the pipeline was compiled to train alone.
        """
        pipe = self.evaluation
        if pipe is None:
            if any(held.gradients for held in self.plan.tensors):
                raise RunError(
                    "The pipeline has no programs for evaluation: compile it with evaluation=True, or "
                    "compile model.eval() once more with gradients=False."
                )
            pipe = self
        if outputs is None:
            return pipe.step(batch)
        return pipe.step(batch, outputs=outputs, outputs_on=outputs_on)

    def parameter(self, name: str) -> torch.nn.Parameter:
        """A parameter by name, or the rows of one that a rank holds (``"lm_head.weight[0:128]"``)."""
        return self._state.parameter(name)

    @property
    def runtime(self) -> Runtime:
        """The runtime of this process's rank."""
        return self._runner.runtime

    def optimizer(
        self, cls: type[torch.optim.Optimizer], *, clip_grad_norm: float | None = None, **options: Any
    ) -> PipelineOptimizer:
        """A torch optimizer of this rank's parameters; ``clip_grad_norm`` clips by the norm of the whole
        model."""
        self._state.follow_model()
        rt = self.runtime
        held = {name: self.parameter(name) for name in self.plan.tensors[rt.rank].gradients}
        owner = {name: r for r, t in reversed(list(enumerate(self.plan.tensors))) for name in t.gradients}
        counted = {name: p for name, p in held.items() if owner[name] == rt.rank}
        total = self.process.all_reduce_sum if self.process is not None else float
        return PipelineOptimizer(cls(list(held.values()), **options), counted, total, clip_grad_norm)

    def synchronize(self) -> None:
        """Copy each parameter and buffer from the rank that holds it to all ranks.

        Under torchrun a rank trains only the tensors that it holds.  All ranks must call this before
        ``state_dict``, or before another pipeline of the same model runs.  Raises RunError if this process
        does not have the whole model (a loaded pipeline, a model on the meta device).
        """
        if self.process is None:
            return
        self._state.follow_model()
        sent: set[str] = set()
        for rank, held in enumerate(self.plan.tensors):
            for name in (*held.parameters, *held.buffers):
                if name in sent:
                    continue
                sent.add(name)
                rows = rows_of(name)
                known = self.parameters if rows or name in held.parameters else self.buffers
                tensor = known.get(rows.table if rows else name)
                if tensor is None or tensor.is_meta:
                    raise RunError(f"This process has no {name} to give a value to: it holds its part alone.")
                whole_tensor = tensor.detach()
                self.process.broadcast_(whole_tensor[rows.begin : rows.end] if rows else whole_tensor, rank)

    def synchronise(self) -> None:
        """The old spelling of ``synchronize``."""
        warnings.warn("Pipeline.synchronise is now Pipeline.synchronize", DeprecationWarning, stacklevel=2)
        self.synchronize()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers under the model's names (under torchrun only this rank's are trained, until
        ``synchronize`` is called)."""
        self._state.follow_model()
        return {name: t.detach() for name, t in (*self.parameters.items(), *self.buffers.items())}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load values of parameters and buffers; this also gives tensors to a model on the meta device.

        Call it before ``optimizer`` and the first ``step``.  Raises ArtifactError for a name that is
        missing or has another shape.
        """
        self._state.load(state)

    def save(self, path: str | Path) -> None:
        """Write programs, plan, weights with their checksums, and pictures to a new directory.

        Under torchrun every rank calls it and writes the weights that it holds.  Raises ArtifactError if
        the directory is not empty; then nothing is written.
        """
        self._state.follow_model()
        ranks = range(self.plan.ranks) if self.process is None else [self.process.rank]
        for rank in ranks:
            self._state.check_values(rank)
        with files.new_directory(Path(path), self.process) as draft:
            for rank in ranks:
                files.write_tensors(
                    self._state.saved_by(rank, self.artifact.constants),
                    self.artifact.programs[rank],
                    draft,
                    rank,
                )
            if self.evaluation is not None:
                files.write_evaluation(self.evaluation.artifact, draft, ranks)
            if 0 in ranks:
                files.write_programs(self.artifact, draft)
                if self.graph is not None:
                    self.draw(draft)

    def explain(self) -> None:
        """Print the reasons for the schedule: the candidates of ``schedule="auto"``, the fastest first, with
        each one's step, peak memory, and offloaded and recomputed values."""
        from rich.console import Console  # imported here, as training does not need it

        from fxpipe.viz.explanation import explain

        explain(self.plan, Console(markup=False, emoji=False))

    def draw(self, path: str | Path, expand: tuple[int, str] | None = None) -> list[Path]:
        """Write pictures of the graph and of the schedule into a directory; return the files.

        expand: (stage, phase), say ``(1, "B")``: one section, drawn node by node as well.
        """
        from fxpipe.viz.pictures import draw

        return draw(self, Path(path), expand)


def _loss(result: StepResult) -> torch.Tensor:
    assert result.loss is not None, "a step without a loss is asked for outputs"
    return result.loss


def _named(work: PlanWork | None) -> PlanWork:
    if work is None:
        raise SizeError(
            "Costs are known for the example's sizes alone. Name its dimensions when you compile, for "
            'example with dimensions={"sequence": 256}.'
        )
    return work
