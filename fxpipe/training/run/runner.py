"""Runs one rank's program of a pipeline, under torchrun or as the only rank."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from fxpipe.errors import BatchError, FxpipeError, RunError, number_of
from fxpipe.plan.artifact import Artifact
from fxpipe.runtime.batch.lengths import Lengths, all_leaves, are_listed, checked
from fxpipe.runtime.batch.outputs import Collected, StepResult, requested
from fxpipe.runtime.batch.which_programs import are_others, says
from fxpipe.runtime.debug.finite import place_of_failure
from fxpipe.runtime.program.comm import NoAnswer
from fxpipe.runtime.program.load_program import Program
from fxpipe.runtime.program.rank import Runtime
from fxpipe.runtime.replays.replays import Replays
from fxpipe.training.model.accumulators import (
    NOTHING,
    Finish,
    accumulators,
    begin_buckets,
    check_rows,
    place_of,
    sharded_buckets,
)
from fxpipe.training.optimizer.batch_digest import (
    ABSENT,
    SAME_OPTIONS,
    Facts,
    all_alike,
    any_stops,
    difference,
    options_differ,
    refusing,
    weights_of,
    words,
)
from fxpipe.training.run.batch_orders import Batch, agreed_batch
from fxpipe.training.run.kept_gradients import KeptGradients
from fxpipe.training.run.local_result import Looks
from fxpipe.training.run.moved_outputs import outputs_of
from fxpipe.training.run.rank_digests import RankDigests
from fxpipe.training.run.rank_runner import RankRunner
from fxpipe.training.run.short_batches import short_batch
from fxpipe.training.run.warm_up import WarmUp


@dataclass(eq=False)
class Runner(RankRunner):
    """Runs the program of this process's rank.  ``stop_asked``: whether this rank was asked to end the run.
    ``stops``: whether one of the ranks was, before the last step; the same on all ranks.  ``is_evaluation``:
    whether it is that of ``pipe.evaluate``.  ``like``: that whose number of the step this one goes on with.
    ``of_replicas``: the lengths of the microbatches of each replica, in the last step.
    """

    stop_asked: bool = False
    stops: bool = False
    is_evaluation: bool = False
    like: Runner | None = None
    bubble: float | None = None
    of_replicas: Sequence[Sequence[Lengths]] = ()
    _last: Runner | None = None  # not itself, which would keep the model alive in a circle

    @property
    def last(self) -> Runner:
        """The runner of the last step: this one, or that of the programs for some batches."""
        return self if self._last is None else self._last

    def _beside(self, artifact: Artifact) -> Runner:
        other = super()._beside(artifact)
        if self.process is not None:
            other.process = self.process.for_assumed()
            other.rank_digests = self.rank_digests
        other._kept_gradients = self._kept_gradients
        return other

    @property
    def step_number(self) -> int:
        """See ``Pipeline.step_number``."""
        if self.like is not None and self.plan.trains:
            return self.like.step_number
        return self.runtime.step_number if "runtime" in self.__dict__ else self.first_step

    @step_number.setter
    def step_number(self, number: int) -> None:
        # A forward alone is no step of the training: dropout's numbers go on as without it.
        if self.like is not None and self.plan.trains:
            self.like.step_number = number
        self.first_step = number
        if "runtime" in self.__dict__:
            self.runtime.step_number = number

    def step(self, batch: object, looks: Looks) -> StepResult:
        """See ``Pipeline.step``."""
        if self.process is not None:
            self.process.watch.check()
        of_replicas = self._agreed(batch, is_checked=True)
        lengths, _ = of_replicas[0 if self.process is None else self.process.replica]
        self._last = self._for(batch, len(lengths))
        if self._last is not None:
            return self._step_of_other(self._last, batch, looks)
        rt, program = self.runtime, self._own_program
        if self.plan.step.lengths:
            (program,) = self._orders.of(of_replicas, [program])
        self.of_replicas, self.bubble = [each for each, _ in of_replicas], program.bubble
        rt.expect(self.plan.step, self.of_replicas, self._orders.places(of_replicas))
        spec = rt.spec
        self._warm_up.run(rt, program, batch, lambda: self._words(Facts(self.artifact.number), batch))
        rt.start()  # before the watch looks, which would tell of the last step's op
        number = rt.step_number = self.step_number
        with self._watched(rt, program):
            with self._refused_by_all(rt, number):
                wanted = requested(looks.outputs, looks.outputs_on, spec.outputs, spec.ranks)
                if not spec.lengths:
                    checked(spec, batch, lengths, spec.leaves[rt.rank])
                self.updates.check()
                self.state.check_unchanged(self.state.follow_model())
                if self.process is not None:
                    check_rows(self.state, rt.rank)
            self._warn_of_mixed(batch)
            try:
                rt.collected = Collected.of(
                    wanted,
                    rt.rank,
                    spec.microbatches,
                    self.device,
                    is_list=are_listed(batch, spec),
                    any_length=bool(spec.lengths),
                )
                written = ABSENT if self.process is None else self.rank_digests.written()
                self.state.changed()  # the copies of others' tensors are gone behind it
                rt.params, rt.buffers = self.state.params_and_buffers(rt.rank)
                self._warm_up.settle(rt, program, batch)
                self._warm_up.follow(rt, program)
                on = looks.outputs_on
                asked = "" if on is None else f"{sorted(rt.collected.wanted)} on {on}"
                # Sent before the program and read behind it, so that the words travel while it computes.
                compare = self._begin_comparison(batch, number, asked, written)
                begin_buckets(self.state, rt)
                finish: list[Finish] = []
                rt.validate = partial(self._validate, rt, finish)
                # A warm-up computes forwards before the last update stands, and asks ``validate`` behind
                # them; a replay cannot ask.
                if not program.has_warm_up or self._replays is not None:
                    self.updates.settle()
                if self.updates.are_settled:
                    self._begin_gradients(rt, finish)
                loss = self._run(program, rt, batch, looks)
                rt.validate = None  # which would keep this and the runtime alive in a circle
                self.state.refreshed()
                compare()  # before outputs move: ranks that differ would wait for other messages
                results, listed = outputs_of(rt, on, self.process)
            except NoAnswer as error:
                raise (error if self.process is None else self.process.watch.lost(error)) from None
            except Exception as error:  # whatever it is, the other ranks must hear of it
                raise self._failure(error, rt, number) from error
        self.step_number = rt.step_number
        for end in finish:
            end()
        if self._replays is not None and not rt.shards:
            self._kept_gradients.keep(rt)
        self.state.store_buffers(rt)
        if self.process is not None:
            self.rank_digests.stepped()
        return StepResult(loss, results, listed)

    def prepare(self, batch: object) -> None:
        """See ``Pipeline.prepare``."""
        self._orders.prepare(self._agreed(batch))

    def _agreed(self, batch: object, is_checked: bool = False) -> Batch:
        return agreed_batch(
            self.plan.step, batch, self.process, self._named(self.step_number), is_checked=is_checked
        )

    def _for(self, batch: object, microbatches: int) -> Runner | None:
        """The runner of the programs for batches like this alone; the same on all ranks and replicas."""
        other, process = self._for_assumed, self.process
        if other is None:
            return None
        said = [says(other.plan.when, self.plan.step, batch, microbatches)]
        if process is not None:
            # A rank without the leaves has no say, and one alone may refuse the batch later.
            say, of = torch.tensor(said, device="cpu"), f"the batch of {self._named(self.step_number)}"
            said = process.begin_gather(say, of)()[:, 0].tolist()
        return other if are_others(other.plan.when, said) else None

    def _step_of_other(self, other: Runner, batch: object, looks: Looks) -> StepResult:
        """A step by the programs of another runner, which goes on with this one's number of the step."""
        other.step_number, other.stop_asked = self.step_number, self.stop_asked
        result = other.step(batch, looks)
        self.step_number, self.stops = other.step_number, other.stops
        return result

    def _run(self, program: Program, rt: Runtime, batch: object, looks: Looks) -> torch.Tensor | None:
        """Run a program, or replay it; return its loss."""
        if self._replays is not None and not (looks or rt.weighted):
            (loss,) = self._replays.step([rt], batch)
        else:
            with self._warm_up.memory(rt.step_number):
                recorded = self._recorded(program, rt, looks.record, self._number_in_world)
                loss = self._run_program(recorded, rt, self._number_in_world, batch, looks.check)
        # No part of a replay, for whose end this rank waits before it gives the others its loss.
        self.state.follow_first_replica(rt)
        return loss

    @cached_property
    def _kept_gradients(self) -> KeptGradients:
        return KeptGradients(self.state)

    @cached_property
    def _replays(self) -> Replays | None:
        """The replays of this rank's step; None where none are wanted."""
        wanted, process = self.plan.replay, self.process
        if not wanted or self.is_evaluation:
            return None
        never = ""
        if process is not None and process.has_different_devices(self.device):
            never = "the ranks run on devices of several kinds"
        elif process is not None and process.sends_from_host(self.device):
            # A capture would send and receive, and no replay.
            never = "the ranks exchange messages over gloo, as those that share a GPU"
        return Replays(
            wanted,
            self.device,
            lambda runtimes, batch: [
                self._run_program(self._own_program, rt, self._number_in_world, batch) for rt in runtimes
            ],
            None if process is None else lambda: self._warm_up.memory(self.step_number),
            never,
        )

    def evaluate(self, batch: object, looks: Looks) -> StepResult:
        """A step of a forward, or several for a batch with fewer rows."""
        spec, rt = self.plan.step, self.runtime
        listed = are_listed(batch, spec)
        short = None if listed else short_batch(spec, batch, looks.outputs)
        if short is None:
            if rt.replicas is not None and not listed:  # another replica may have a short one
                rt.weighted = [(batch, [1.0] * spec.microbatches)]
            try:
                return self.step(batch, looks)
            finally:
                rt.weighted = ()
        if len(short.steps) > 1 and rt.replicas is not None and rt.replicas.number > 1:
            raise BatchError(
                f"{number_of(short.rows, 'row')} take {len(short.steps)} steps here, and perhaps another "
                f"number in the other replicas: give each a multiple of {short.size}, or drop the last ones."
            )
        batches = short.batches(spec, batch)
        # All steps at once, as means over the batch count the rows of all of them.
        rt.weighted = [(part, w) for part, (_, w) in zip(batches, short.steps, strict=True)]
        steps, sums, counts = [], 0.0, 0.0
        try:
            for part, (_, weights) in zip(batches, short.steps, strict=True):
                rt.losses.weights = weights
                steps.append(self.step(part, looks))
                sums, counts = sums + rt.total[0], counts + rt.total[1]
        finally:
            rt.weighted, rt.losses.weights = (), None
        loss = steps[0].loss
        if loss is not None:
            loss = (torch.tensor(sums, dtype=torch.float64) / counts).to(loss.dtype)
        return StepResult(loss, short.outputs(spec, [step.outputs for step in steps]))

    def _validate(self, rt: Runtime, finish: list[Finish]) -> bool:
        """Wait for the verdict on the last update; return whether the forwards so far stand."""
        stand = self.updates.stand()
        if not finish:
            self._begin_gradients(rt, finish)
        return stand

    def _begin_gradients(self, rt: Runtime, finish: list[Finish]) -> None:
        """Give the program its accumulators; ``finish`` gets what is to be done with them after the step.

        Before the step, where the last gradients are used: inside, memory for them could not be had safely.
        """
        is_lent = self._replays is not None and not rt.shards
        memory = self._kept_gradients.lend(rt.rank) if is_lent else NOTHING
        finish.append(accumulators(self.state, rt, memory))
        if self.process is not None:
            self.rank_digests.begin_digests()

    def gather_parameters(self) -> dict[str, torch.Tensor]:
        """Get the rows of parameters that other replicas own, and have updated.  All ranks call it alike.

        Returns the parameters that this process does not keep, by name.
        """
        state, process = self.state, self.process
        if process is None or not (state.stale or state.divides_parameters):
            return {}
        gathered: dict[str, torch.Tensor] = {}
        with process.watch.collective():
            for bucket in sharded_buckets(state, place_of(state)):
                rows, division = bucket.parameters or (bucket.own_rows(),), bucket.division
                shards = self.runtime.shards[division.lanes]
                shards.wait(shards.gather(rows, division.begins))
                gathered |= {} if bucket.parameters else bucket.views(rows[0])
        state.refreshed()
        return gathered

    def _watched(self, rt: Runtime, program: Program) -> contextlib.AbstractContextManager[None]:
        """Let the watch know of the step in a block, so that it can tell what this rank waits for."""
        if self.process is None:
            return contextlib.nullcontext()
        return self.process.watch.step(
            rt,
            self.process,
            program.ops_of(rt.places),
            self._named(rt.step_number),
            trains=not self.is_evaluation,
        )

    def _named(self, step: int) -> str:
        return f"{'evaluation' if self.is_evaluation else 'step'} {step}"

    @cached_property
    def _warm_up(self) -> WarmUp:
        return WarmUp(self.state)

    @cached_property
    def rank_digests(self) -> RankDigests:
        """The digests of this process's rank, under torchrun."""
        assert self.process is not None
        # What is gathered for an evaluation alone is compared as training's.
        compares = not self.process.has_different_devices(self.device) and not self.state.borrowed
        return RankDigests(self.state, self.process.rank, compares)

    @contextlib.contextmanager
    def _refused_by_all(self, rt: Runtime, number: int) -> Iterator[None]:
        """Run the checks of a step, before anything is sent or changed: where all ranks raise in it, the run
        can go on with another batch; where some do, it has failed."""
        try:
            yield
        except Exception as error:  # the model's checks may raise anything
            if self.process is None:
                raise
            refusal = words(Facts(self.artifact.number, refuses=True), (), {})
            ranks = self.process.begin_gather(refusal, f"step {number}")()
            if len(refusing(ranks)) < len(ranks):
                raise self._failure(error, rt, number) from error
            raise

    def _begin_comparison(self, batch: object, number: int, asked: str, written: int) -> Callable[[], None]:
        """Start to compare batch and training with the other ranks; return the function that ends it.

        That raises RunError if the ranks differ.  All ranks have sent their words long before it waits.
        number: of the step.  asked, written: see ``RankDigests.facts``.
        """
        process, leaves = self.process, self.plan.step.batch.tensors
        if process is None:
            return lambda: None
        facts = self.rank_digests.facts(self.artifact.number, self.stop_asked, asked, written)
        step, ours = self._named(number), self._words(facts, batch)
        gathered = process.begin_gather(ours, f"step {number}")

        def compare() -> None:
            ranks = gathered()
            if refuse := refusing(ranks):
                raise NoAnswer(f"rank {refuse[0]} does not run {step}")
            self.stops = any_stops(ranks)
            changes = self.rank_digests.changes
            problem = difference(ranks, leaves, step, facts.names, process.replicas, changes.resolution)
            if problem is not None:
                optimizer = self.rank_digests.optimizer
                if options_differ(ranks):
                    options = {} if optimizer is None else optimizer.options()
                    process.check_alike(options, f"the optimizer in {step}", SAME_OPTIONS)
                raise RunError(problem)
            changes.writes.tell(weights_of(ranks), step, warns=process.leads)
            first = number == self.first_step and process.leads and process.replicas > 1
            if first and all_alike(ranks, leaves, process.replicas):
                warnings.warn(_ALL_ALIKE.format(step=step), stacklevel=2)

        return compare

    def _words(self, facts: Facts, batch: object) -> torch.Tensor:
        """The words that this rank compares with those of the others."""
        spec = self.plan.step
        return words(facts, spec.batch.tensors, all_leaves(spec, batch))

    def _failure(self, error: Exception, rt: Runtime, step: int) -> Exception:
        """Notify the other ranks of an error on this rank; return the error to raise."""
        name = self._named(step)
        where = f"in {rt.current_op} of {name}" if rt.current_op else f"at the start of {name}"
        rank = f"Rank {self._number_in_world}"
        message = f"{rank} failed {where}{place_of_failure(error)}: {type(error).__name__}: {error}"
        if self.process is not None:
            self.process.watch.failures.leave(message)
        return error if isinstance(error, FxpipeError) else RunError(message)


_ALL_ALIKE = (
    "All replicas have the same batch in {step}: what one learns, they all do. Give each its own rows: a "
    "DistributedSampler takes num_replicas=pipe.replicas and rank=pipe.replica."
)
