"""Runs the programs of a pipeline: one rank's under torchrun, or all ranks' in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from fxpipe.errors import FxpipeError, RunError
from fxpipe.names import printable
from fxpipe.plan.artifact import Artifact, Plan
from fxpipe.runtime.agreement import Traffic, check_agreement
from fxpipe.runtime.ambient import as_traced
from fxpipe.runtime.batch import batch_leaves
from fxpipe.runtime.comm import Comm, DistributedComm
from fxpipe.runtime.heap import give_back_large_tensors
from fxpipe.runtime.load_program import Program, load_program
from fxpipe.runtime.local import LocalComm, LocalWorld, run_all
from fxpipe.runtime.memory import SavedBytes
from fxpipe.runtime.offloader import Offloader, check_tier, open_store
from fxpipe.runtime.outputs import Collected, On, StepResult, move, requested
from fxpipe.runtime.process import Process
from fxpipe.runtime.rank import Runtime
from fxpipe.strict import structure, unstructure
from fxpipe.training.model_state import ModelState
from fxpipe.vocabulary.rows import whole


@dataclass(frozen=True, eq=False)
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


@dataclass(eq=False)
class Runner:
    """``directory``: of the programs' files; None if the pipeline was not saved."""

    artifact: Artifact
    state: ModelState
    device: torch.device
    process: Process | None
    directory: Path | None
    offload_directory: Path | None

    @property
    def plan(self) -> Plan:
        return self.artifact.plan

    def run_local(
        self, batch: Any, step: int, threads: int, measure_memory: bool, outputs: Sequence[str]
    ) -> LocalResult:
        """See ``Pipeline.run_local``."""
        with as_traced(self.plan.step.default_dtype, self.device):
            return self._run_local(batch, step, threads, measure_memory, outputs)

    def _run_local(
        self, batch: Any, step: int, threads: int, measure_memory: bool, outputs: Sequence[str]
    ) -> LocalResult:
        spec = self.plan.step
        wanted = requested(outputs, None, spec.outputs, spec.ranks)
        self.state.follow_model()
        world = LocalWorld(self.plan.ranks)
        runtimes = tuple(
            self._runtime_of(rank, LocalComm(world, rank), self.state.zero_gradients(rank))
            for rank in range(self.plan.ranks)
        )
        for runtime in runtimes:
            runtime.step_number = step
            runtime.collected = Collected(wanted)
        mains: list[Callable[[], Any]] = [partial(self._local_steps[rt.rank], rt, batch) for rt in runtimes]
        meters = [SavedBytes(self._given(rt, batch)) for rt in runtimes] if measure_memory else []
        for runtime, meter in zip(runtimes, meters, strict=False):
            mains[runtime.rank] = partial(_metered, mains[runtime.rank], runtime, meter)
        losses = run_all(world, mains, lambda rank: runtimes[rank].current_op or "its start", threads)
        found = whole({name: grad for rt in reversed(runtimes) for name, grad in rt.grads.items()})
        for runtime in runtimes:
            self.state.store_buffers(runtime)
        grads = {name: found[name] for name in self.state.parameters if name in found}
        given = [rt.collected.joined(rt.rank, spec.microbatches) for rt in runtimes]
        collected = {name: value for own in given for name, value in own.items()}
        return LocalResult(
            losses[0],
            grads,
            runtimes,
            tuple(m.peak for m in meters),
            {name: collected[name] for name in wanted},
        )

    def step(self, batch: Any, outputs: Sequence[str], outputs_on: On) -> StepResult:
        """See ``Pipeline.step``."""
        with as_traced(self.plan.step.default_dtype, self.device):
            return self._step(batch, outputs, outputs_on)

    def _step(self, batch: Any, outputs: Sequence[str], outputs_on: On) -> StepResult:
        rt = self.runtime
        rt.start()
        try:
            spec = self.plan.step
            rt.collected = Collected(requested(outputs, outputs_on, spec.outputs, spec.ranks))
            self.state.follow_model()
            rt.params, rt.buffers = self.state.held_by(rt.rank)
            earlier = self.state.accumulators(rt)
            loss = self._own_step(rt, batch)
            found = self._outputs(rt, outputs_on)
        except Exception as error:
            raise self._failure(error, rt) from error
        for name, grad in earlier.items():
            grad.add_(rt.grads[name])
        self.state.store_buffers(rt)
        return StepResult(loss, found)

    def _outputs(self, rt: Runtime, on: On) -> dict[str, torch.Tensor]:
        """The outputs of the last step that this rank is to have."""
        wanted, microbatches = rt.collected.wanted, self.plan.step.microbatches
        found = rt.collected.joined(rt.rank, microbatches)
        rt.collected = Collected()  # the caller alone keeps them
        return move(found, wanted, on, self.process, microbatches, self.device)

    @cached_property
    def runtime(self) -> Runtime:
        """The runtime of this process's rank."""
        plan = self.plan
        if plan.tier == "disk":
            give_back_large_tensors()
        if self.process is not None:
            self.process.watch()
            comm: Comm = DistributedComm(
                self.device, self.process.rank, plan.ranks, plan.channels, plan.collectives
            )
            return self._runtime_of(self.process.rank, comm, {})
        if plan.ranks > 1:
            raise RunError(
                f"This pipeline has {plan.ranks} ranks and this is one process. Start the script with "
                f"torchrun --nproc-per-node {plan.ranks}, or run all ranks here with pipe.run_local(batch)."
            )
        return self._runtime_of(0, LocalComm(LocalWorld(1), 0), {})

    def _runtime_of(self, rank: int, comm: Comm, grads: dict[str, torch.Tensor]) -> Runtime:
        held = self.plan.tensors[rank]
        self.state.check_values(rank)
        params, buffers = self.state.held_by(rank)
        return Runtime(
            rank=rank,
            spec=self.plan.step,
            comm=comm,
            params=params,
            grads=grads,
            buffers=buffers,
            constants={n: self.artifact.constants[n].to(self.device) for n in held.constants},
            offloader=self._offloader(rank),
        )

    def _offloader(self, rank: int) -> Offloader | None:
        tier = self.plan.tier
        if tier is None:
            return None
        check_tier(tier, self.device, self.offload_directory)
        store = partial(open_store, tier, self.plan.pools[rank], self.offload_directory, self.device)
        return Offloader(store, self.device)

    @staticmethod
    def _given(rt: Runtime, batch: Any) -> list[torch.Tensor]:
        """The tensors that a rank also holds between steps."""
        held = [*rt.params.values(), *rt.grads.values(), *rt.buffers.values(), *rt.constants.values()]
        return held + [x for _, x in batch_leaves(batch) if isinstance(x, torch.Tensor)]

    @cached_property
    def _own_step(self) -> Callable[[Runtime, Any], torch.Tensor | None]:
        """The step function of this process's rank, after a check that the ranks' programs agree."""
        if self.process is None:
            return self._local_steps[0]
        program = self._program(self.process.rank)
        given = self.process.gather(json.dumps(unstructure(program.traffic)).encode())
        check_agreement([structure(json.loads(data), Traffic) for data in given])
        return program.step

    @cached_property
    def _local_steps(self) -> tuple[Callable[[Runtime, Any], torch.Tensor | None], ...]:
        """The step functions of all ranks."""
        programs = [self._program(rank) for rank in range(self.plan.ranks)]
        check_agreement([program.traffic for program in programs])
        return tuple(program.step for program in programs)

    def _program(self, rank: int) -> Program:
        name = f"rank{rank}.py"
        if self.directory is None:
            return load_program(self.artifact.programs[rank], f"<fxpipe {printable(self.plan.model)} {name}>")
        return load_program(self.artifact.programs[rank], str(self.directory / name))

    def _failure(self, error: Exception, rt: Runtime) -> Exception:
        """Notify the other ranks of an error on this rank; return the error to raise."""
        message = f"Rank {rt.rank} failed in {rt.current_op or 'its start'}: {type(error).__name__}: {error}"
        if self.process is None:
            return error if isinstance(error, FxpipeError) else RunError(message)
        if isinstance(error, RunError):
            first = self.process.find_failure()
            if first is not None:
                return RunError(f"{first} (Rank {rt.rank} stopped in {rt.current_op or 'its start'}.)")
        self.process.leave_failure(message)
        return error if isinstance(error, FxpipeError) else RunError(message)


def _metered(main: Callable[[], Any], rt: Runtime, meter: SavedBytes) -> Any:
    rt.record.at_op, rt.record.at_arrival = meter.between_ops, meter.arrived
    with meter:
        return main()
