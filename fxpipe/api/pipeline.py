"""The result of a compilation: run, train, save."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar, overload

import torch

from fxpipe.api.figures import StepClock, figures_of
from fxpipe.api.hints import Named
from fxpipe.api.views import Views
from fxpipe.api.weights import Weights
from fxpipe.errors import OptionError, RunError
from fxpipe.plan.artifact import Artifact, Validation
from fxpipe.plan.libraries import not_imported
from fxpipe.plan.saved import files
from fxpipe.runtime.batch.outputs import On, StepResult
from fxpipe.runtime.debug.finite import Check, checked
from fxpipe.runtime.debug.recording import checked_record
from fxpipe.runtime.job.tracebacks import brief_methods
from fxpipe.runtime.program.rank import Runtime
from fxpipe.training.guards.guards import Traced
from fxpipe.training.model.partial_model import register, share_model
from fxpipe.training.model.save import save
from fxpipe.training.optimizer.make_optimizer import make_optimizer
from fxpipe.training.optimizer.optimizer import PipelineOptimizer
from fxpipe.training.optimizer.step_loss import StepLoss
from fxpipe.training.run.local_result import LocalResult, Looks
from fxpipe.training.run.runner import Runner
from fxpipe.viz.notebook import ShownResult, shown_as

T = TypeVar("T")


@brief_methods
@dataclass(eq=False, repr=False, kw_only=True)
class Pipeline(Weights, Views):
    """The result of ``fxpipe.compile`` and ``fxpipe.load``.

    ``parameters`` and ``buffers`` are the model's own tensors: training the pipeline trains the model (under
    torchrun, the part that this rank holds; the rest of the model is freed).  If the tensors of the model
    are replaced, the next step uses the new ones.
    ``evaluation``: the forward in eval mode alone on the same tensors, if it was compiled, which has
    ``is_evaluation``.  ``assumed``: the programs for batches that are as their plan assumes.  ``like``: the
    pipeline whose steps this one goes on with.
    """

    offload_directory: Path | None = None
    first_step: int = 0
    assumed: Artifact | None = None
    evaluation: Pipeline | None = None
    is_evaluation: bool = False
    like: Pipeline | None = None
    _clock: StepClock = field(default_factory=StepClock, init=False)
    _optimizer: weakref.ref[PipelineOptimizer] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.parameters, self.buffers = _named(self.parameters), _named(self.buffers)
        if self.then is None:
            self.then = Traced(self.parameters, None)

    def with_others(self, artifacts: Iterable[Artifact]) -> Pipeline:
        """The pipeline with other programs on its tensors: those for batches that are as their plan assumes,
        and those of the forward in eval mode."""
        pipe = self
        for artifact in artifacts:
            is_assumed = bool(artifact.plan.when)
            pipe = replace(pipe, assumed=artifact) if is_assumed else pipe._with_evaluation(artifact)
        return pipe

    def _with_evaluation(self, artifact: Artifact) -> Pipeline:
        """The pipeline with one for the forward alone, which works on the same tensors."""
        directory = None if self.directory is None else files.directory_of(artifact.plan, self.directory)
        process = None if self.process is None else self.process.for_evaluation()
        forward = replace(
            self,
            artifact=artifact,
            directory=directory,
            process=process,
            is_evaluation=True,
            assumed=None,
            like=None,
            sections=(),
            graph=None,
        )
        return replace(self, evaluation=forward)

    def share_model(self, model: torch.nn.Module) -> None:
        """Keep this process's part of the model, under torchrun: its other tensors are elsewhere."""
        assert self.process is not None
        with self.process.agreed("compile"):
            register(self.model_state)
        self.share_values()
        share_model(self.model_state)
        pipe = weakref.ref(self)  # a finalizer keeps what its function has, and the model may live longer

        def let_go() -> None:
            if (living := pipe()) is not None:
                living.let_model_go()

        weakref.finalize(model, let_go).atexit = False

    def let_model_go(self) -> None:
        """Keep the rows that this process holds, and not the tables: there is no model any more."""
        self.model_state.let_go()

    @cached_property
    def _runner(self) -> Runner:
        return Runner(
            self.artifact,
            self.model_state,
            self.device,
            self.process,
            self.directory,
            self.offload_directory,
            self.first_step,
            assumed=self.assumed,
            is_evaluation=self.is_evaluation,
            updates=self.updates,
            like=None if self.like is None else self.like._runner,
        )

    def run_local(
        self,
        batch: object,
        *,
        step: int = 0,
        threads: int = 1,
        measure_memory: bool = False,
        outputs: Sequence[str] = (),
        check: Check = None,
        record: Mapping[str, str | Path] | None = None,
        replay: bool = False,
    ) -> LocalResult:
        """Run one step of all ranks in this process, in turns.

        batch: leading dimension = microbatches × the example's, of all replicas.  Where dimensions have
        names, also a list of microbatches, or one with such a list for each replica.  step: number of the
        step, for random numbers.  threads: intra-op threads of each rank; 1 is what torchrun gives, and then
        the result is bit for bit what torchrun's ranks compute.  measure_memory: also find each rank's peak
        of saved bytes.
        outputs, check, record: as for ``step``.  replay: capture the step of all ranks as one CUDA graph, and
        replay it in later calls (docs/replay.md); the ops of a replay have no times.
        Buffers are updated as in training; parameters and their ``.grad`` are left alone.
        Raises RunError under torchrun, where a process has the program and the tensors of one rank.
        """
        looks = Looks(outputs, None, checked(check), checked_record(record))
        with self._runner.as_traced():
            result = self._runner.run_local(batch, step, threads, measure_memory, replay, looks)
        return shown_as(ShownResult, result)

    @overload
    def step(
        self, batch: object, *, check: Check = None, record: Mapping[str, str | Path] | None = None
    ) -> torch.Tensor: ...
    @overload
    def step(
        self,
        batch: object,
        *,
        outputs: Sequence[str],
        outputs_on: On = None,
        check: Check = None,
        record: Mapping[str, str | Path] | None = None,
    ) -> StepResult: ...
    def step(
        self,
        batch: object,
        *,
        outputs: Sequence[str] | None = None,
        outputs_on: On = None,
        check: Check = None,
        record: Mapping[str, str | Path] | None = None,
    ) -> torch.Tensor | StepResult:
        """Run one training step of this rank; return the loss of the whole batch, on every rank.

        batch: the same on all ranks, which is checked; a rank needs only the leaves that ``leaves`` names.
            Where dimensions have names, also a list of microbatches, each of its own lengths, on each replica
            of any number.
        outputs: names of ``pipe.outputs``; then a ``StepResult`` with the loss and their values is returned.
        outputs_on: the rank that is to have them, or ``"all"``; by default each stays on the rank that
            computes it.
        check: ``"finite"`` raises RunError with the op that makes the first NaN or infinity, its module, the
            line of the model and of the program, rank and microbatch.  Slow: it looks at all results.
        record: ops and the directories to which what they are given is written, ``{"F1.3": "recorded"}``,
            for ``fxpipe replay recorded F1.3``.

        Gradients are added to the parameters' ``.grad``.  Needs torchrun with one process per rank (a
        pipeline of one rank runs without it).  If all ranks refuse the batch (BatchError), nothing has
        changed, and a script that catches it may go on with another one.  If a rank fails, all ranks raise
        RunError with its message, and their processes end soon after, whether or not the error is caught.
        """
        self._check_asked(outputs)
        if self.artifact.plan.trains and self.then is not None:
            written = {leaf.name for leaf in self.artifact.plan.step.batch.leaves if leaf.written}
            self.then.warn_before_step(self.of(), batch, written)
        looks = Looks(outputs or (), outputs_on, checked(check), checked_record(record))
        with self._clock.step(self._share), self._runner.as_traced():
            result = self._runner.step(batch, looks)
        if result.loss is not None and self.artifact.plan.trains:
            loss = result.loss.as_subclass(StepLoss)  # its backward() has run
            loss.divisors = None if self.process is None else self._runner.rank_digests.changes.divisors
            result = replace(result, loss=loss)
        return _loss(result) if outputs is None else result

    def _share(self) -> float:
        """The tokens of the last step relative to those of the plan's, of all replicas."""
        spec = self.artifact.plan.step
        if not spec.lengths:
            return 1.0
        of_replicas, example = self._runner.last.of_replicas, {one.name: one.example for one in spec.lengths}
        tokens = sum(map(spec.tokens, of_replicas)) / len(of_replicas)
        return tokens / spec.tokens([example] * spec.microbatches)

    def _check_asked(self, outputs: Sequence[str] | None) -> None:
        if outputs is None and not self.artifact.plan.step.has_loss:
            raise RunError(
                f"The model has no loss: ask for outputs=[…]. The pipeline gives {', '.join(self.outputs)}."
            )

    @overload
    def evaluate(self, batch: object) -> torch.Tensor: ...
    @overload
    def evaluate(self, batch: object, *, outputs: Sequence[str], outputs_on: On = None) -> StepResult: ...
    def evaluate(
        self, batch: object, *, outputs: Sequence[str] | None = None, outputs_on: On = None
    ) -> torch.Tensor | StepResult:
        """Run the forward alone, in eval mode if the pipeline trains; return the loss of the whole batch.

        batch: the last one of an epoch may have fewer rows: the loss is the mean over those that are there,
            of which the outputs are.
        outputs, outputs_on: as for ``step``.  The weights are those of the last optimizer step.  Without
        torchrun ``pipe.evaluation.run_local(batch)`` runs all ranks.
        Raises RunError if the pipeline was compiled to train alone.
        """
        pipe = self.evaluation
        if pipe is None:
            if self.artifact.plan.trains:
                raise RunError(
                    "The pipeline has no programs for evaluation: compile it with evaluation=True, or "
                    "compile model.eval() once more with gradients=False."
                )
            pipe = self
        self.updates.settle()
        with self._clock.stopped(), pipe.model_state.borrowing(self._runner.gather_parameters()):
            pipe._check_asked(outputs)
            with pipe._runner.as_traced():
                result = pipe._runner.evaluate(batch, Looks(outputs or (), outputs_on))
            return _loss(result) if outputs is None else result

    def prepare(self, batch: object) -> None:
        """Begin to look for the fastest order of the microbatches of a later batch, while the step before
        runs; ``batch``: a list as for ``step``, whose lengths alone are read.  All ranks call it, or none.

        Without it ``step`` looks for the order itself.  Raises BatchError as that does for lengths that
        programs do not take, and for ranks that differ.
        """
        self._runner.prepare(batch)

    def figures(self) -> dict[str, float]:
        """Figures of the last steps for any logger (W&B, TensorBoard, JSON); waits for no other rank.

        ``step``: the number of the last one.  ``seconds``: of a step with what the script does around it,
        evaluations left out: the mean since the last call.  ``tokens/s`` or ``samples/s``: of all ranks and
        replicas.  ``MFU``: the model's FLOPs, without
        recomputation, relative to the peak of all devices; of microbatches as long as the example, where the
        data sheet of this device is known.  ``memory``: the most bytes that torch has had on an accelerator.
        ``bubble``: this rank's idle share from its first op to its last, of steps that are not replayed, and
        ``predicted``, that of the plan or of the order of a list of microbatches.
        ``norm``: of the gradients of the last update, where the optimizer has computed it.
        Raises RunError before the first step.
        """
        seconds, share = self._clock.take()
        if math.isnan(seconds):
            raise RunError("No step has run yet: figures are those of steps.")
        last = self._runner.last
        figures = figures_of(
            self.plan,
            self.step_number - 1,
            seconds,
            last.runtime.record.spans,
            self.replicas,
            self.device,
            share,
            last.bubble,
        )
        optimizer = self.last_optimizer
        if optimizer is not None and (norm := optimizer.known_norm) is not None:
            figures["norm"] = float(norm)
        return figures

    def ask_to_stop(self) -> None:
        """Ask all ranks to end the run, as a SIGTERM does where a Checkpointer is: ``stops`` tells, on all
        ranks after the same step."""
        self._runner.stop_asked = True

    def stops(self) -> bool:
        """Whether a rank was asked to stop before its last step began; the same on all ranks."""
        return self._runner.stops or (self.process is None and self._runner.stop_asked)

    @property
    def last_optimizer(self) -> PipelineOptimizer | None:
        """What ``optimizer`` has made last, while the script has it."""
        return None if self._optimizer is None else self._optimizer()

    @property
    def runtime(self) -> Runtime:
        """The runtime of this process's rank."""
        return self._runner.runtime

    def optimizer(
        self,
        cls: Callable[..., torch.optim.Optimizer],
        *parameters: object,
        groups: Sequence[Mapping[str, object]] = (),
        clip_grad_norm: float | None = None,
        norm_type: float = 2.0,
        skip_nonfinite: bool | int = False,
        master_weights: bool = False,
        validation: Validation | None = None,
        changes_gradients: bool = False,
        **options: object,
    ) -> PipelineOptimizer:
        """An optimizer of this rank's parameters; all ranks must make the same.

        cls: a torch optimizer class, called with the parameters and ``options`` (``fused``, ``foreach`` …).
        groups: other options by name, ``[{"params": ["*.bias", "*norm*"], "weight_decay": 0.0}]``, or another
            class, ``[{"params": ["layers.*.weight"], "class": torch.optim.Muon, "lr": 0.02}]``.
        clip_grad_norm: the largest norm of all gradients of the model, of ``norm_type``.
        skip_nonfinite: leave out (and count in ``skipped``) steps whose gradients hold infinities or NaN, at
            most 100 one after the other, or this number; otherwise they are treated as by
            ``torch.nn.utils.clip_grad_norm_``.
        master_weights: update float32 copies of parameters with fewer bits, which get their values after each
            step.
        validation: with "post" ranks do not wait for each other before they update (docs/schedules.md); by
            default the one of ``compile``.
        changes_gradients: the script changes gradients, or parameters, between ``pipe.step`` and ``step`` by
            what needs no values of other ranks (docs/training.md); else it may only divide all by the number
            of steps that add up, or multiply all by what follows ``grad_norm()``.
        Raises RunError for optimizers that update a parameter by values which other ranks hold, and with
        "post" for those whose update cannot be taken back.
        """
        if parameters or "params" in options:
            raise OptionError(
                "pipe.optimizer gives the class the parameters of the model that this rank holds: leave out "
                'yours. Other options for some of them: groups=[{"params": ["*.bias"], "weight_decay": 0.0}].'
            )
        optimizer = make_optimizer(
            self.model_state,
            self.runtime.rank,
            cls,
            options,
            groups,
            master_weights,
            validation or self.artifact.plan.validation,
            None if self.process is None else self._runner.rank_digests.changes,
            changes_gradients,
            largest=clip_grad_norm,
            norm_type=norm_type,
            skip_nonfinite=skip_nonfinite,
        )
        if self.process is not None:
            self._runner.rank_digests.optimizer = optimizer
        self._optimizer = weakref.ref(optimizer)
        return optimizer

    @property
    def step_number(self) -> int:
        """The number of the next step: of those that were run before, also by the run that was saved or
        checkpointed.  Dropout's random numbers depend on it."""
        return self._runner.step_number

    @step_number.setter
    def step_number(self, number: int) -> None:
        self._runner.step_number = number

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write programs, plan, weights with their checksums, and pictures to a new directory.

        overwrite: put it in the place of a pipeline that was saved there, with its weights and what was
            edited in its programs.  A directory that holds anything else is left as it is.
        Under torchrun every rank calls it; rank 0 writes the files of all.  Warns of ops of the script, which
        another process has to register before it loads the programs.  Raises ArtifactError, on all ranks, if
        the directory is not empty or cannot be written; then nothing in it has changed.
        """
        self.check_alike()
        forward = None if self.evaluation is None else self.evaluation.artifact
        others = [artifact for artifact in (self.assumed, forward) if artifact is not None]
        draw = self._write_views if self.graph is not None else None
        target = files.as_path(path, "pipe.save")
        save(self.artifact, others, self.model_state, self.step_number, target, draw, overwrite)
        if (ops := not_imported(self.plan.libraries)) and (self.process is None or self.process.leads):
            warnings.warn(f"The programs call {'; '.join(ops)}.", stacklevel=2)


def _named(tensors: dict[str, T]) -> Named[str, T]:
    """The mapping that a pipeline shares with its evaluation: one object, made once."""
    return tensors if isinstance(tensors, Named) else Named(tensors)


def _loss(result: StepResult) -> torch.Tensor:
    assert result.loss is not None, "a step without a loss is asked for outputs"
    return result.loss
