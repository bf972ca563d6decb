"""Runs the programs of all ranks of a pipeline in this process."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Self, TypeVar

import torch

from fxpipe.errors import BatchError, RunError, at_least_one, printable
from fxpipe.plan.artifact import Artifact, Plan
from fxpipe.plan.rows import joined
from fxpipe.plan.saved import files
from fxpipe.plan.step import POSITIONS
from fxpipe.runtime.batch.documents import has_several, shares_of
from fxpipe.runtime.batch.lengths import are_listed, check_values, lengths_of, of_replicas, or_example
from fxpipe.runtime.batch.microbatches import batch_leaves
from fxpipe.runtime.batch.outputs import Collected, Listed, requested
from fxpipe.runtime.batch.which_programs import are_others, says
from fxpipe.runtime.debug.finite import Check, Finite
from fxpipe.runtime.debug.recording import Recording, check_ops
from fxpipe.runtime.job.process import Process
from fxpipe.runtime.program.accelerator import is_accelerator
from fxpipe.runtime.program.ambient import as_traced
from fxpipe.runtime.program.comm import Comm
from fxpipe.runtime.program.lanes import running
from fxpipe.runtime.program.load_program import Program, load_program
from fxpipe.runtime.program.offload import TIMEOUT, Offloader, default_tier, open_store
from fxpipe.runtime.program.rank import Runtime
from fxpipe.runtime.program.record import Clock, DeviceClock, Record
from fxpipe.runtime.ranks.agreement import check_agreement
from fxpipe.runtime.ranks.lanes import LocalLanes
from fxpipe.runtime.ranks.local import LocalComm, LocalWorld
from fxpipe.runtime.ranks.local_replicas import LocalReplicas
from fxpipe.runtime.ranks.tracked_memory import SavedBytes
from fxpipe.runtime.ranks.turns import run_all
from fxpipe.runtime.replays.replays import Replays
from fxpipe.runtime.torch_private import zero_each
from fxpipe.training.model.accumulators import zero_buckets, zero_gradients
from fxpipe.training.model.model_state import ModelState
from fxpipe.training.model.pending_update import PendingUpdate
from fxpipe.training.model.shards import are_divided
from fxpipe.training.run.batch_orders import BatchOrders
from fxpipe.training.run.local_result import NO_LOOKS, LocalResult, Looks
from fxpipe.training.run.local_shards import divide, gradients

T = TypeVar("T")
R = TypeVar("R")


@dataclass(eq=False)
class LocalRanks:
    """The runtimes of all ranks in this process.  ``replays``: of their step, if it is replayed, for which
    ``shares`` have the parameters and buffers of which each lane has another share."""

    world: LocalWorld
    runtimes: list[Runtime]
    replays: Replays | None = None
    shares: list[dict[str, torch.Tensor]] = field(default_factory=list)


@dataclass(eq=False)
class LocalRunner:
    """The programs of a pipeline, and the runtimes of its ranks.

    ``directory``: of the programs' files; None if the pipeline was not saved.  ``assumed``: other programs,
    for batches that are as their plan assumes.
    """

    artifact: Artifact
    state: ModelState
    device: torch.device
    process: Process | None
    directory: Path | None
    offload_directory: Path | None
    first_step: int = 0
    updates: PendingUpdate = field(default_factory=PendingUpdate)
    assumed: Artifact | None = None
    _ranks_to_replay: LocalRanks | None = None

    @property
    def plan(self) -> Plan:
        return self.artifact.plan

    @cached_property
    def _for_assumed(self) -> Self | None:
        """The runner of the programs for batches that are as their plan assumes, on the same tensors."""
        return None if self.assumed is None else self._beside(self.assumed)

    def _beside(self, artifact: Artifact) -> Self:
        """A runner of other programs on the same tensors."""
        directory = None if self.directory is None else files.directory_of(artifact.plan, self.directory)
        return replace(self, artifact=artifact, assumed=None, directory=directory, _ranks_to_replay=None)

    def as_traced(self) -> contextlib.AbstractContextManager[None]:
        """Torch's global state as in the trace, for a block that runs programs."""
        return as_traced(self.plan.step.default_dtype, self.device)

    def run_local(
        self,
        batch: object,
        step: int,
        threads: int,
        measure_memory: bool,
        replay: bool,
        looks: Looks,
    ) -> LocalResult:
        """See ``Pipeline.run_local``."""
        at_least_one("threads", threads)
        self._check_local(replay, measure_memory or bool(looks))
        spec, other = self.plan.step, self._for_assumed
        batches = of_replicas(spec, batch, self.plan.replicas)
        of_each = _of_each(batches, lambda one: or_example(spec, lengths_of(spec, one)))
        each = [*zip(batches, of_each, strict=True)]
        if other is not None:
            when = other.plan.when
            if are_others(when, [says(when, spec, one, len(lengths)) for one, lengths in each]):
                return other.run_local(batch, step, threads, measure_memory, replay, looks)
        _of_each(each, lambda one: check_values(spec, *one))
        shares = [shares_of(spec, one, lengths) for one, lengths in each]
        of_all = [*zip(of_each, shares, strict=True)]
        programs, places = self._orders.of(of_all, self._local_programs), self._orders.places(of_all)
        wanted = requested(looks.outputs, None, spec.outputs, spec.ranks)
        is_list = are_listed(batch, spec)
        check_ops(looks.record, [op for program in programs for op in program.ops_of(places[0])])
        self.updates.settle()
        self.state.check_unchanged(self.state.follow_model())
        for one in batches:
            self._warn_of_mixed(one)
        # What is replayed has the same memory in each step, and what is measured is activations alone.
        ranks = self._ranks_replayed() if replay else self._ranks(divides=not measure_memory)
        world, runtimes = ranks.world, ranks.runtimes
        for rt in runtimes:
            rt.step_number, rt.collected = step, Collected(wanted, is_list, bool(spec.lengths))
            rt.expect(spec, of_each, places)
        meters = [SavedBytes(self._tensors_of(rt, batch)) for rt in runtimes] if measure_memory else []
        if replay:
            losses = self._replay_locally(ranks, batch, threads)
        else:
            losses = self._run_locally(world, runtimes, batches, programs, threads, looks, meters)
        for rt in runtimes[: world.ranks * world.lanes]:  # of replica 0: all replicas have the same sums
            self.state.store_buffers(rt)
        grads = self._grads_of(ranks)
        if replay:  # the next one writes to the same memory
            grads = {name: grad.clone() for name, grad in grads.items()}
        collected, listed = _outputs_of(runtimes[:: world.lanes])
        return LocalResult(
            losses[0],
            grads,
            tuple(runtimes),
            tuple(m.peak for m in meters),
            {} if is_list else {name: collected[name] for name in wanted},
            {name: listed[name] for name in wanted} if is_list else {},
        )

    def _check_local(self, replay: bool, looks: bool) -> None:
        """Raise RunError for a step that cannot be run so.  looks: whether anything is to be seen of it."""
        if self.process is not None and self.plan.ranks * self.plan.lanes.number > 1:
            raise RunError(
                "run_local runs all ranks in this process, which under torchrun holds the tensors of one of "
                "them. Call pipe.step(batch) on all ranks, or start the script as one process."
            )
        if replay and self.plan.step.lengths:
            raise RunError(
                "A captured step is replayed for one length, and the programs take several: leave out "
                "replay=True, or dimensions of fxpipe.compile."
            )
        if replay and looks:
            raise RunError(
                "A replay has no ops to look at: leave out replay=True where run_local is to measure "
                "memory, to give outputs, to check or to record."
            )

    def _grads_of(self, ranks: LocalRanks) -> dict[str, torch.Tensor]:
        """The gradients of whole parameters, by the names that the model has for them."""
        by_name = joined(gradients(self.plan, ranks.world, ranks.runtimes))
        return {name: by_name[name] for name in self.state.parameters if name in by_name}

    def _warn_of_mixed(self, batch: object) -> None:
        """Warn, once, of packed documents that look at each other."""
        if self._mixes and has_several(self.plan.step, batch):
            self._mixes = False
            warnings.warn(_MIXED, stacklevel=2)

    @cached_property
    def _mixes(self) -> bool:
        return self.plan.step.mixes and self.plan.trains and (self.process is None or self.process.leads)

    def _run_locally(
        self,
        world: LocalWorld,
        runtimes: Sequence[Runtime],
        batches: Sequence[object],
        programs: Sequence[Program],
        threads: int,
        looks: Looks = NO_LOOKS,
        meters: Sequence[SavedBytes] = (),
    ) -> list[torch.Tensor | None]:
        """Run a step of all ranks by these programs, on the batches of the replicas; return their losses."""
        mains: list[Callable[[], object]] = []
        for number, rt in enumerate(runtimes):
            replica = number // (world.ranks * world.lanes)
            program = self._recorded(programs[rt.rank], rt, {} if replica else looks.record, number)
            mains.append(partial(self._run_replica, program, rt, number, batches[replica], looks.check))
        for number, meter in enumerate(meters):
            mains[number] = partial(_metered, mains[number], runtimes[number], meter)
        return run_all(
            world, mains, lambda number: runtimes[number].current_op or "its start", threads, self.device
        )

    def _ranks(self, *, divides: bool = False) -> LocalRanks:
        """New runtimes of all ranks.  divides: whether each owns rows alone of what the plan divides."""
        world = LocalWorld(self.plan.ranks, self.plan.replicas, self.plan.lanes.number)
        divides = divides and are_divided(self.plan, world.replicas)
        runtimes = [
            self._local_runtime(world, rank, replica, lane, divides=divides)
            for replica in range(world.replicas)
            for rank in range(world.ranks)
            for lane in range(world.lanes)
        ]
        return LocalRanks(world, runtimes)

    def _ranks_replayed(self) -> LocalRanks:
        """The runtimes of all ranks whose step is captured; new ones where none is."""
        known = self._ranks_to_replay
        if known is None or known.replays is None or known.replays.reason:
            self._ranks_to_replay = self._ranks()
            self._ranks_to_replay.replays = None if known is None else known.replays
        assert self._ranks_to_replay is not None
        return self._ranks_to_replay

    def _replay_locally(
        self, ranks: LocalRanks, batch: object, threads: int
    ) -> Sequence[torch.Tensor | None]:
        def run(runtimes: Sequence[Runtime], batch: object) -> list[torch.Tensor | None]:
            batches = of_replicas(self.plan.step, batch, self.plan.replicas)
            return self._run_locally(ranks.world, runtimes, batches, self._local_programs, threads)

        ranks.replays = ranks.replays or Replays("always", self.device, run)
        ranks.replays.run = run
        ranks.shares = ranks.shares or [{} for _ in ranks.runtimes]
        for rt, shares in zip(ranks.runtimes, ranks.shares, strict=True):
            zero_each([*rt.grads.values()])
            state = self.state if rt.lanes is None else self.state.of_lane(rt.lanes.index)
            rt.params, rt.buffers = state.params_and_buffers(rt.rank)
            for values in rt.params, rt.buffers:
                for name in values.keys() & self.plan.lanes.shared:
                    # The same memory in each step, where torch would copy the share to other memory.
                    values[name] = shares.setdefault(name, torch.empty_like(values[name])).copy_(values[name])
        return ranks.replays.step(ranks.runtimes, batch)

    def _local_runtime(
        self, world: LocalWorld, rank: int, replica: int, lane: int, *, divides: bool = False
    ) -> Runtime:
        comm, offloader = LocalComm(world, rank, replica, lane), self._offloader(rank)
        state = self.state.of_lane(lane)
        if divides:
            rt = self._runtime_of(rank, comm, {}, offloader, state)
            divide(rt, state, world, replica, lane)
        elif world.replicas == 1 and not self.plan.lanes.summed:
            rt = self._runtime_of(rank, comm, zero_gradients(state, rank), offloader, state)
        else:
            grads, buckets = zero_buckets(state, rank, world.replicas)
            rt = self._runtime_of(rank, comm, grads, offloader, state)
            rt.buckets = buckets
        if world.replicas > 1 and not divides:
            rt.replicas = LocalReplicas(world, rank, replica, lane)
        if world.lanes > 1:
            rt.lanes, summed = LocalLanes(world, rank, replica, lane), {*self.plan.lanes.summed.values()}
            rt.summing_lanes = {each: LocalReplicas(world, rank, replica, lane, each) for each in summed}
        return rt

    def _run_program(
        self, program: Program, rt: Runtime, number: int, batch: object, check: Check = None
    ) -> torch.Tensor | None:
        """Run a step of a program; return its loss.  number: of the process, in errors."""
        file = program.step.__code__.co_filename
        finite = None if check is None else Finite(rt, number, file, batch)
        with running(rt.lanes), finite or contextlib.nullcontext():
            loss: torch.Tensor | None = program.step(rt, batch)
        if finite is not None:
            finite.check_loss(loss)
        return loss

    def _run_replica(self, program: Program, rt: Runtime, number: int, batch: object, check: Check) -> object:
        loss = self._run_program(program, rt, number, batch, check)
        self.state.follow_first_replica(rt)
        return loss

    def _recorded(self, program: Program, rt: Runtime, record: Mapping[str, Path], number: int) -> Program:
        """A copy of the program that records those of these ops that it runs.

        number: of the rank or process, in files.
        """
        if record and rt.lanes is not None:
            raise RunError("Ops of lanes cannot be recorded: they need those of the other lanes.")
        if not record.keys() & {*program.ops_of(rt.places)}:
            return program
        source, dtype = self.artifact.programs[rt.rank], self.plan.step.default_dtype
        recorded = Recording(record, rt, number, source, dtype).of(self._program(rt.rank))
        return recorded.with_step(program.text, program.ops) if program.text else recorded

    @cached_property
    def _orders(self) -> BatchOrders:
        return BatchOrders(self.artifact, self.process)

    @cached_property
    def _local_programs(self) -> tuple[Program, ...]:
        """The programs of all ranks."""
        programs = [self._program(rank) for rank in range(self.plan.ranks)]
        check_agreement({rank: program.traffic for rank, program in enumerate(programs)}, lambda texts: texts)
        return tuple(programs)

    def _program(self, rank: int) -> Program:
        name = f"rank{rank}.py"
        if self.directory is None:
            return load_program(self.artifact.programs[rank], f"<fxpipe {printable(self.plan.model)} {name}>")
        return load_program(self.artifact.programs[rank], str(self.directory / name))

    def _runtime_of(
        self,
        rank: int,
        comm: Comm,
        grads: dict[str, torch.Tensor],
        offloader: Offloader | None,
        state: ModelState | None = None,
    ) -> Runtime:
        """The runtime of a rank.  state: that of one lane, where this process runs several."""
        self.state.check_values(rank)
        params, buffers = (state or self.state).params_and_buffers(rank)
        constants = self.artifact.constants
        return Runtime(
            rank=rank,
            spec=self.plan.step,
            comm=comm,
            params=params,
            grads=grads,
            buffers=buffers,
            constants={n: constants[n].to(self.device) for n in self.plan.tensors[rank].constants},
            step_number=self.first_step,
            offloader=offloader,
            device=self.device,
            record=Record(DeviceClock(self.device) if is_accelerator(self.device) else Clock()),
        )

    def _offloader(self, rank: int) -> Offloader | None:
        if self.plan.tier is None or not self.plan.pools[rank]:
            return None
        tier = default_tier(self.device)  # the plan may be made on another machine
        timeout = TIMEOUT if self.process is None else self.process.timeout
        store = open_store(tier, self.plan.pools[rank], self.offload_directory, self.device, timeout)
        return Offloader(store, self.device)

    @staticmethod
    def _tensors_of(rt: Runtime, batch: object) -> list[torch.Tensor]:
        """The tensors that a rank also holds between steps."""
        tensors = [*rt.params.values(), *rt.grads.values(), *rt.buffers.values(), *rt.constants.values()]
        return tensors + [x for _, x in batch_leaves(batch) if isinstance(x, torch.Tensor)]


_MIXED = (
    f"{POSITIONS} begin anew within rows, and the model only adds or rotates by them: the samples of a row "
    "look at each other. For a decoder of transformers set use_cache=False in its config before it is "
    "compiled, or call fxpipe.use_packed_attention(model); else train on samples one by one."
)


def _of_each(batches: Sequence[T], run: Callable[[T], R]) -> list[R]:
    """Run a function of the batch of each replica; its BatchErrors name the replica, if there are several."""
    results = []
    for replica, batch in enumerate(batches):
        try:
            results.append(run(batch))
        except BatchError as error:
            if len(batches) == 1:
                raise
            raise BatchError(f"Replica {replica}: {error}") from error
    return results


def _outputs_of(runtimes: Sequence[Runtime]) -> tuple[dict[str, torch.Tensor], Listed]:
    """What was asked for, of all microbatches of all replicas: as one tensor, and one by one."""
    of_each = [rt.collected.joined(rt.rank, rt.spec.microbatches) for rt in runtimes]
    collected = {
        name: torch.cat([outputs[name] for outputs in of_each if name in outputs])
        for name in {name for outputs in of_each for name in outputs}
    }
    listed: Listed = {}
    for rt in runtimes:
        for name, values in rt.collected.in_order(rt.rank).items():
            listed.setdefault(name, []).extend(values)
    return collected, listed


def _metered(main: Callable[[], object], rt: Runtime, meter: SavedBytes) -> object:
    rt.record.at_op, rt.record.at_arrival = meter.between_ops, meter.arrived
    rt.record.at_once, rt.record.at_free = meter.ignore, meter.measure
    with meter:
        return main()
