"""Runs the programs of a pipeline: one rank's under torchrun, or all ranks' in this process."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from fxpipe.errors import FxpipeError, OptionError, RunError, printable
from fxpipe.plan.artifact import Artifact, Plan
from fxpipe.plan.lanes import LanePlan
from fxpipe.plan.rows import whole
from fxpipe.runtime.job.process import Process
from fxpipe.runtime.program.accelerator import is_accelerator
from fxpipe.runtime.program.ambient import as_traced
from fxpipe.runtime.program.batch import batch_leaves, given_leaves, rows_of_replica
from fxpipe.runtime.program.comm import Comm, NoAnswer
from fxpipe.runtime.program.lanes import running
from fxpipe.runtime.program.offload import TIMEOUT, Offloader, check_tier, open_store
from fxpipe.runtime.program.outputs import MOST_SHOWN, Collected, On, StepResult, requested, shown
from fxpipe.runtime.program.rank import Runtime
from fxpipe.runtime.program.record import DeviceClock, HostClock, Record
from fxpipe.runtime.ranks.agreement import check_agreement, check_replicas
from fxpipe.runtime.ranks.connect import connect
from fxpipe.runtime.ranks.finite import Check, Finite
from fxpipe.runtime.ranks.heap import give_back_large_tensors
from fxpipe.runtime.ranks.lanes import LocalLanes
from fxpipe.runtime.ranks.load_program import Collective, Program, load_program
from fxpipe.runtime.ranks.local import LocalComm, LocalWorld
from fxpipe.runtime.ranks.local_replicas import LocalReplicas
from fxpipe.runtime.ranks.recording import Recording, check_ops
from fxpipe.runtime.ranks.replicas import DistributedReplicas
from fxpipe.runtime.ranks.tracked_memory import SavedBytes
from fxpipe.runtime.ranks.turns import run_all
from fxpipe.training.accumulators import (
    Finish,
    accumulators,
    begin_buckets,
    sharded_bucket,
    zero_buckets,
)
from fxpipe.training.course import Course
from fxpipe.training.model_state import ModelState
from fxpipe.training.move_outputs import move_outputs
from fxpipe.training.same_batch import (
    SAME_OPTIONS,
    Facts,
    all_alike,
    any_stops,
    difference,
    options_differ,
    words,
)
from fxpipe.training.updates import Updates
from fxpipe.training.warm_up import WarmUp


@dataclass(frozen=True, eq=False, repr=False)
class LocalResult:
    """``loss``: of the whole batch, 0-d.  ``grads``: parameter name -> gradient of the mean loss.
    ``runtimes``: the ranks' runtimes, with their records.  ``peak_saved``: per rank the maximum number of
    bytes held between two ops, if measured.  ``outputs``: those that were asked for, as in
    :class:`StepResult`; the loss is None if the model has none."""

    loss: torch.Tensor | None
    grads: dict[str, torch.Tensor]
    runtimes: tuple[Runtime, ...]
    peak_saved: tuple[int, ...]
    outputs: dict[str, torch.Tensor]

    def __repr__(self) -> str:
        elements = sum(grad.numel() for grad in self.grads.values())
        parts = [f"grads of {len(self.grads)} parameters with {elements} elements"] if self.grads else []
        if self.peak_saved:
            parts.append(f"peak_saved={[*self.peak_saved[:MOST_SHOWN]]}")
        return f"LocalResult({', '.join([*shown(self.loss, self.outputs), *parts])})"


@dataclass(eq=False)
class Runner:
    """``directory``: of the programs' files; None if the pipeline was not saved.

    ``stop_asked``: whether this rank was asked to end the run.  ``stops``: whether one of the ranks was,
    before the last step; the same on all ranks.  ``is_evaluation``: whether it is that of ``pipe.evaluate``.
    """

    artifact: Artifact
    state: ModelState
    device: torch.device
    process: Process | None
    directory: Path | None
    offload_directory: Path | None
    first_step: int = 0
    stop_asked: bool = False
    stops: bool = False
    is_evaluation: bool = False
    updates: Updates = field(default_factory=Updates)

    @property
    def plan(self) -> Plan:
        return self.artifact.plan

    @property
    def step_number(self) -> int:
        """See ``Pipeline.step_number``."""
        return self.runtime.step_number if "runtime" in self.__dict__ else self.first_step

    @step_number.setter
    def step_number(self, number: int) -> None:
        self.first_step = number
        if "runtime" in self.__dict__:
            self.runtime.step_number = number

    def run_local(
        self,
        batch: Any,
        step: int,
        threads: int,
        measure_memory: bool,
        outputs: Sequence[str],
        check: Check,
        record: Mapping[str, Path],
    ) -> LocalResult:
        """See ``Pipeline.run_local``."""
        if self.process is not None and self.plan.ranks * self.plan.lanes.number > 1:
            raise RunError(
                "run_local runs all ranks in this process, which under torchrun holds the tensors of one of "
                "them. Call pipe.step(batch) on all ranks, or start the script as one process."
            )
        with as_traced(self.plan.step.default_dtype, self.device):
            return self._run_local(batch, step, threads, measure_memory, outputs, check, record)

    def _run_local(
        self,
        batch: Any,
        step: int,
        threads: int,
        measure_memory: bool,
        outputs: Sequence[str],
        check: Check,
        record: Mapping[str, Path],
    ) -> LocalResult:
        spec = self.plan.step
        if type(threads) is not int or threads < 1:
            raise OptionError(f"threads is {threads!r} and must be a whole number, at least 1.")
        wanted = requested(outputs, None, spec.outputs, spec.ranks)
        check_ops(record, [op for program in self._local_programs for op in program.ops])
        self.updates.settle()
        self.state.check_unchanged(self.state.follow_model())
        world = LocalWorld(self.plan.ranks, self.plan.replicas, self.plan.lanes.number)
        runtimes = [
            self._local_runtime(world, rank, replica, lane)
            for replica in range(world.replicas)
            for rank in range(world.ranks)
            for lane in range(world.lanes)
        ]
        mains: list[Callable[[], Any]] = []
        for number, rt in enumerate(runtimes):
            rt.step_number = step
            rt.collected = Collected(wanted)
            replica = number // (world.ranks * world.lanes)
            rows = rows_of_replica(spec.batch, batch, spec.microbatches, replica, world.replicas)
            program = self._recorded(self._local_programs[rt.rank], rt, {} if replica else record, number)
            mains.append(partial(self._run_program, program, rt, rows, check))
        meters = [SavedBytes(self._given(rt, batch)) for rt in runtimes] if measure_memory else []
        for number, meter in enumerate(meters):
            mains[number] = partial(_metered, mains[number], runtimes[number], meter)
        losses = run_all(
            world, mains, lambda number: runtimes[number].current_op or "its start", threads, self.device
        )
        first = runtimes[: world.ranks * world.lanes]
        ranks = [first[begin : begin + world.lanes] for begin in range(0, len(first), world.lanes)]
        gradients = [_whole_gradients(self.plan.lanes, [rt.grads for rt in own]) for own in ranks]
        found = whole({name: grad for own in reversed(gradients) for name, grad in own.items()})
        for runtime in first:
            self.state.store_buffers(runtime)
        grads = {name: found[name] for name in self.state.parameters if name in found}
        given = [rt.collected.joined(rt.rank, spec.microbatches) for rt in runtimes[:: world.lanes]]
        collected = {
            name: torch.cat([own[name] for own in given if name in own])
            for name in {name for own in given for name in own}
        }
        return LocalResult(
            losses[0],
            grads,
            tuple(runtimes),
            tuple(m.peak for m in meters),
            {name: collected[name] for name in wanted},
        )

    def _local_runtime(self, world: LocalWorld, rank: int, replica: int, lane: int) -> Runtime:
        comm, offloader = LocalComm(world, rank, replica, lane), self._offloader(rank)
        self.state.check_values(rank)
        state = self.state.of_lane(lane)
        if world.replicas == 1:
            rt = self._runtime_of(rank, comm, state.zero_gradients(rank), offloader, state)
        else:
            grads, buckets = zero_buckets(state, rank, world.replicas)
            rt = self._runtime_of(rank, comm, grads, offloader, state)
            rt.replicas, rt.buckets = LocalReplicas(world, rank, replica, lane), buckets
        rt.lanes = LocalLanes(world, rank, replica, lane) if world.lanes > 1 else None
        return rt

    def _run_program(
        self, program: Program, rt: Runtime, batch: Any, check: Check = None
    ) -> torch.Tensor | None:
        """Run a step of a program; return its loss."""
        file = program.step.__code__.co_filename
        with running(rt.lanes), contextlib.nullcontext() if check is None else Finite(rt, file):
            loss: torch.Tensor | None = program.step(rt, batch)
        if rt.replicas is not None:
            self.state.follow_first_replica(rt)
        return loss

    def _recorded(self, program: Program, rt: Runtime, record: Mapping[str, Path], number: int) -> Program:
        """A copy of the program that records those of these ops that it runs.

        number: of the rank or process, in files.
        """
        if record and rt.lanes is not None:
            raise RunError("Ops of lanes cannot be recorded: they need those of the other lanes.")
        if not record.keys() & {*program.ops}:
            return program
        source, dtype = self.artifact.programs[rt.rank], self.plan.step.default_dtype
        return Recording(record, rt, number, source, dtype).of(self._program(rt.rank))

    def step(
        self, batch: Any, outputs: Sequence[str], outputs_on: On, check: Check, record: Mapping[str, Path]
    ) -> StepResult:
        """See ``Pipeline.step``."""
        with as_traced(self.plan.step.default_dtype, self.device):
            return self._step(batch, outputs, outputs_on, check, record)

    def _step(
        self, batch: Any, outputs: Sequence[str], outputs_on: On, check: Check, record: Mapping[str, Path]
    ) -> StepResult:
        rt, program, spec = self.runtime, self._own_program, self.plan.step
        self._warm_up.run(rt, program, batch, lambda: self._words(Facts(self.artifact.number), batch))
        rt.start()
        number = rt.step_number
        with self._watched(rt, program):
            try:
                wanted = requested(outputs, outputs_on, spec.outputs, spec.ranks)
                rt.collected = Collected.of(wanted, rt.rank, spec.microbatches, self.device)
                self.updates.check()
                self.state.check_unchanged(self.state.follow_model())
                self.state.changed()
                rt.params, rt.buffers = self.state.held_by(rt.rank)
                self._warm_up.settle(rt, program, batch)
                asked = "" if outputs_on is None else f"{sorted(rt.collected.wanted)} on {outputs_on}"
                compare = self._begin_comparison(batch, number, asked)
                begin_buckets(self.state, rt)
                finish: list[Finish] = []
                rt.validate = partial(self._validate, rt, finish)
                if not program.has_warm_up:
                    self.updates.settle()
                if self.updates.are_settled:
                    self._begin_gradients(rt, finish)
                with self._warm_up.memory(number):
                    number_in_files = 0 if self.process is None else self.process.world_rank
                    recorded = self._recorded(program, rt, record, number_in_files)
                    loss = self._run_program(recorded, rt, batch, check)
                self.state.stale = False
                compare()
                found = self._outputs(rt, outputs_on)
            except NoAnswer as error:
                raise self._no_answer(error) from None
            except Exception as error:
                raise self._failure(error, rt, number) from error
        for end in finish:
            end()
        self.state.store_buffers(rt)
        return StepResult(loss, found)

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
        finish.append(accumulators(self.state, rt))
        if self.process is not None:
            self.course.begin_digests()

    def gather_parameters(self) -> dict[str, torch.Tensor]:
        """Get the rows of parameters that other replicas own, and have updated since the last step.  All
        ranks call it alike.

        Returns the parameters that this process does not keep, by name.
        """
        state, process = self.state, self.process
        if process is None or process.replicas == 1 or not (state.stale or state.divides_parameters):
            return {}
        shards = self.runtime.shards
        assert shards is not None
        found: dict[str, torch.Tensor] = {}
        with process.watch.collective():
            for names, division in state.divisions(process.rank):
                bucket = sharded_bucket(state, names, division, process.replica)
                given = bucket.parameters or (bucket.own_rows(),)
                shards.wait(shards.gather(given, bucket.begins))
                found |= {} if bucket.parameters else bucket.views(given[0])
        state.stale = False
        return found

    def _outputs(self, rt: Runtime, on: On) -> dict[str, torch.Tensor]:
        """The outputs of the last step that this rank is to have."""
        wanted, microbatches = rt.collected.wanted, self.plan.step.microbatches
        found = rt.collected.joined(rt.rank, microbatches)
        rt.collected = Collected()  # the caller alone keeps them
        return move_outputs(found, wanted, on, self.process, microbatches, self.device)

    @cached_property
    def runtime(self) -> Runtime:
        """The runtime of this process's rank."""
        plan = self.plan
        if plan.tier == "disk":
            give_back_large_tensors()
        if self.process is not None:
            offloader = self._offloader(self.process.rank)
            collectives = self._own_collectives()
            comm = connect(self.process, self.device, plan.channels, plan.collectives, collectives)
            rt = self._runtime_of(self.process.rank, comm, {}, offloader)
            rt.replicas, rt.lanes = comm.abreast, comm.lanes
            rt.shards = comm.abreast if plan.shard else None
            if comm.on_streams and comm.abreast is not None:
                self._exchange_once(comm.abreast)
            if comm.lanes is not None:
                comm.lanes.waits = partial(setattr, rt, "waiting")
            return rt
        if plan.ranks * plan.lanes.number > 1:
            lanes = plan.lanes.number
            of_lanes = f" of {lanes} lanes" if lanes > 1 else ""
            raise RunError(
                f"This pipeline has {plan.ranks} ranks{of_lanes} and this is one process. Start the script "
                f"with torchrun --nproc-per-node {plan.ranks * lanes}, or run all ranks here with "
                "pipe.run_local(batch)."
            )
        return self._runtime_of(0, LocalComm(LocalWorld(1), 0), {}, self._offloader(0))

    def _exchange_once(self, replicas: DistributedReplicas) -> None:
        """Exchange zeros of the size of each bucket: a communicator connects for each kind and size."""
        assert self.process is not None
        with self.process.watch.collective():
            for names, division in self.state.divisions(self.process.rank):
                bucket = sharded_bucket(self.state, names, division, self.process.replica)
                replicas.wait(replicas.reduce(bucket.whole, bucket.begins, bucket.whole, mean=False))
                if self.plan.shard:
                    replicas.wait(replicas.gather((bucket.whole,), bucket.begins))

    def _constants(self, rank: int) -> dict[str, torch.Tensor]:
        return {n: self.artifact.constants[n].to(self.device) for n in self.plan.tensors[rank].constants}

    def _runtime_of(
        self,
        rank: int,
        comm: Comm,
        grads: dict[str, torch.Tensor],
        offloader: Offloader | None,
        state: ModelState | None = None,
    ) -> Runtime:
        """state: that of one lane, where this process runs several."""
        self.state.check_values(rank)
        params, buffers = (state or self.state).held_by(rank)
        return Runtime(
            rank=rank,
            spec=self.plan.step,
            comm=comm,
            params=params,
            grads=grads,
            buffers=buffers,
            constants=self._constants(rank),
            step_number=self.first_step,
            offloader=offloader,
            device=self.device,
            record=Record(DeviceClock(self.device) if is_accelerator(self.device) else HostClock()),
        )

    def _offloader(self, rank: int) -> Offloader | None:
        tier = self.plan.tier
        if tier is None or not self.plan.pools[rank]:
            return None
        check_tier(tier, self.device, self.offload_directory)
        timeout = TIMEOUT if self.process is None else self.process.timeout
        store = open_store(tier, self.plan.pools[rank], self.offload_directory, self.device, timeout)
        return Offloader(store, self.device)

    @staticmethod
    def _given(rt: Runtime, batch: Any) -> list[torch.Tensor]:
        """The tensors that a rank also holds between steps."""
        held = [*rt.params.values(), *rt.grads.values(), *rt.buffers.values(), *rt.constants.values()]
        return held + [x for _, x in batch_leaves(batch) if isinstance(x, torch.Tensor)]

    @cached_property
    def _own_program(self) -> Program:
        """The program of this process's rank, after a check that the ranks' programs agree."""
        if self.process is None:
            return self._local_programs[0]
        return self._checked_program[0]

    @cached_property
    def _checked_program(self) -> tuple[Program, bool]:
        """The program of this process's rank, and whether the traffic of all ranks' programs is known."""
        process = self.process
        assert process is not None
        with process.agreed("read its program"):
            program = self._program(process.rank)
        if process.replicas > 1:
            text = self.artifact.programs[process.rank]
            check_replicas(text, process.world_rank, process.ranks, process.lanes, process.gather)
        return program, check_agreement({process.rank: program.traffic}, self._gather_texts)

    def _gather_texts(self, own: list[str]) -> list[str]:
        assert self.process is not None
        return [data.decode() for data in self.process.gather_in_replica(own[0].encode())]

    def _own_collectives(self) -> list[Collective]:
        """The collectives of a step; none if an edited program does not show them."""
        program, is_known = self._checked_program
        return program.collectives() if is_known else []

    def _watched(self, rt: Runtime, program: Program) -> contextlib.AbstractContextManager[None]:
        """For the time of a step."""
        if self.process is None:
            return contextlib.nullcontext()
        return self.process.watch.step(
            rt, program.ops, self._named(rt.step_number), trains=not self.is_evaluation
        )

    def _named(self, step: int) -> str:
        return f"{'evaluation' if self.is_evaluation else 'step'} {step}"

    @cached_property
    def _warm_up(self) -> WarmUp:
        return WarmUp(self.state, self.device, self.process)

    @cached_property
    def course(self) -> Course:
        """Of this process's rank, under torchrun."""
        assert self.process is not None
        # What is gathered for an evaluation alone is compared as training's.
        compares = not self.process.has_different_devices(self.device) and not self.state.borrowed
        return Course(self.state, self.process.rank, compares)

    def _begin_comparison(self, batch: Any, number: int, asked: str) -> Callable[[], None]:
        """Start to compare batch and training with the other ranks; return the function that ends it.

        That raises RunError if the ranks differ.  All ranks have sent their words long before it waits.
        number: of the step.  asked: see ``Course.facts``.
        """
        process, leaves = self.process, self.plan.step.batch.tensors
        if process is None:
            return lambda: None
        facts = self.course.facts(self.artifact.number, self.stop_asked, asked)
        step, own = self._named(number), self._words(facts, batch)
        gathered = process.begin_gather(own, f"step {number}")

        def compare() -> None:
            ranks = gathered()
            self.stops = any_stops(ranks)
            problem = difference(ranks, leaves, step, facts.names, process.replicas)
            if problem is not None:
                optimizer = self.course.optimizer
                if options_differ(ranks):
                    options = {} if optimizer is None else optimizer.options()
                    process.check_alike(options, f"the optimizer in {step}", SAME_OPTIONS)
                raise RunError(problem)
            first = number == self.first_step and process.leads and process.replicas > 1
            if first and all_alike(ranks, leaves, process.replicas):
                warnings.warn(_ALL_ALIKE.format(step=step), stacklevel=2)

        return compare

    def _words(self, facts: Facts, batch: Any) -> torch.Tensor:
        """The words that this rank compares with those of the others."""
        spec = self.plan.step.batch
        return words(facts, spec.tensors, given_leaves(spec, batch))

    @cached_property
    def _local_programs(self) -> tuple[Program, ...]:
        """The programs of all ranks."""
        programs = [self._program(rank) for rank in range(self.plan.ranks)]
        check_agreement({rank: program.traffic for rank, program in enumerate(programs)}, lambda own: own)
        return tuple(programs)

    def _program(self, rank: int) -> Program:
        name = f"rank{rank}.py"
        if self.directory is None:
            return load_program(self.artifact.programs[rank], f"<fxpipe {printable(self.plan.model)} {name}>")
        return load_program(self.artifact.programs[rank], str(self.directory / name))

    def _no_answer(self, error: NoAnswer) -> RunError:
        """The error to raise if another rank does not answer."""
        return error if self.process is None else self.process.watch.lost(error)

    def _failure(self, error: Exception, rt: Runtime, step: int) -> Exception:
        """Notify the other ranks of an error on this rank; return the error to raise."""
        name = self._named(step)
        where = f"in {rt.current_op} of {name}" if rt.current_op else f"at the start of {name}"
        lane = "" if rt.lanes is None else f", lane {rt.lanes.index},"
        number = f"{rt.rank}{lane}" if self.process is None else self.process.world_rank
        message = f"Rank {number} failed {where}: {type(error).__name__}: {error}"
        if self.process is not None:
            self.process.watch.failures.leave(message)
        return error if isinstance(error, FxpipeError) else RunError(message)


_ALL_ALIKE = (
    "All replicas have the same batch in {step}: what one learns, they all do. Give each its own rows: a "
    "DistributedSampler takes num_replicas=pipe.replicas and rank=pipe.replica."
)


def _whole_gradients(lanes: LanePlan, given: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Those of a rank, from those of its lanes."""
    return {name: lanes.joined(name, [grads[name] for grads in given]) for name in given[0]}


def _metered(main: Callable[[], Any], rt: Runtime, meter: SavedBytes) -> Any:
    rt.record.at_op, rt.record.at_arrival = meter.between_ops, meter.arrived
    rt.record.at_cast = meter.ignore
    with meter:
        return main()
