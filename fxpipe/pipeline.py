"""A compiled pipeline as the user holds it: run, train, save, simulate, draw."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import fx

from fxpipe.cost.symbolic import Expressions, PlanWork
from fxpipe.errors import ArtefactError, FxpipeError, RunError, SizeError
from fxpipe.ir.graph import Section
from fxpipe.names import printable
from fxpipe.plan import artifact as files
from fxpipe.plan.artifact import Artefact, Plan
from fxpipe.runtime.agreement import Traffic, check_agreement
from fxpipe.runtime.ambient import as_traced
from fxpipe.runtime.away import Away, check_tier, open_store
from fxpipe.runtime.batch import batch_leaves
from fxpipe.runtime.comm import Comm, DistributedComm
from fxpipe.runtime.heap import give_back_large_tensors
from fxpipe.runtime.local import LocalComm, LocalWorld, run_all
from fxpipe.runtime.memory import SavedBytes
from fxpipe.runtime.process import Process
from fxpipe.runtime.program import Program, load_program
from fxpipe.runtime.rank import Runtime
from fxpipe.schedule.costs import StageCost
from fxpipe.schedule.ops import Schedule
from fxpipe.schedule.simulator import simulate
from fxpipe.schedule.timeline import Timeline
from fxpipe.strict import structure, unstructure
from fxpipe.training.optimizer import PipelineOptimizer
from fxpipe.viz.explanation import explain
from fxpipe.viz.pictures import draw
from fxpipe.vocabulary.rows import rows_of, whole


@dataclass(frozen=True, eq=False)
class Stage:
    """One stage: its parameters' names, the costs that the schedule was made with, and its sections (none
    where the pipeline was loaded or compiled by another rank)."""

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


@dataclass(frozen=True, eq=False)
class LocalResult:
    """``loss``: of the whole batch, 0-d.  ``grads``: parameter name -> gradient of the mean loss.
    ``runtimes``: the ranks' runtimes, with what they recorded.  ``peak_saved``: per rank the most bytes
    that it held between two ops, if that was to be measured."""

    loss: torch.Tensor
    grads: dict[str, torch.Tensor]
    runtimes: tuple[Runtime, ...]
    peak_saved: tuple[int, ...]


@dataclass(eq=False)
class Pipeline:
    """What ``fxpipe.compile`` and ``fxpipe.load`` return.

    ``parameters`` and ``buffers`` are the model's own tensors: training the pipeline trains the model
    (under torchrun, the part of it that this rank holds).  Where ``model``, which was compiled, was given
    other ones since, the next step works on those.
    """

    artefact: Artefact
    parameters: dict[str, torch.nn.Parameter]
    buffers: dict[str, torch.Tensor]
    device: torch.device
    process: Process | None
    model: torch.nn.Module | None = None
    graph: fx.Graph | None = None
    sections: tuple[Section, ...] = ()
    directory: Path | None = None
    offload_directory: Path | None = None
    _rows: dict[str, torch.nn.Parameter] = field(default_factory=dict)

    @property
    def plan(self) -> Plan:
        return self.artefact.plan

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
        """The step as simulated: times, bubbles and the bytes that each rank holds between ops.

        sizes: other lengths than the example's, ``{"microbatch": 2, "sequence": 4096}``; ``compile`` must
            have been given the names, as ``dimensions``.  Stages and schedule stay as they are.
        Raises SizeError for an unknown name and for a length below one.
        """
        costs = self.plan.costs
        return simulate(self.schedule, costs if sizes is None else _named(self.plan.work).costs(costs, sizes))

    def run_local(
        self, batch: Any, *, step: int = 0, threads: int = 1, measure_memory: bool = False
    ) -> LocalResult:
        """Run one step of all ranks in this process, the programs taking turns.

        batch: leading dimension = microbatches × the example's.  step: number of the step, for random
        numbers.  threads: intra-op threads of each rank; 1 is what torchrun gives, and then the result is
        bit for bit what torchrun's ranks compute.  measure_memory: also find each rank's peak of saved bytes.
        Buffers are updated as in training; parameters and their ``.grad`` are left alone.
        """
        with self._as_traced():
            return self._run_local(batch, step, threads, measure_memory)

    def _run_local(self, batch: Any, step: int, threads: int, measure_memory: bool) -> LocalResult:
        self._follow_model()
        world = LocalWorld(self.plan.ranks)
        runtimes = tuple(
            self._runtime_of(rank, LocalComm(world, rank), self._zeros(rank))
            for rank in range(self.plan.ranks)
        )
        for runtime in runtimes:
            runtime.step_number = step
        mains: list[Callable[[], Any]] = [partial(self._local_steps[rt.rank], rt, batch) for rt in runtimes]
        meters = [SavedBytes(self._given(rt, batch)) for rt in runtimes] if measure_memory else []
        for runtime, meter in zip(runtimes, meters, strict=False):
            mains[runtime.rank] = partial(_metered, mains[runtime.rank], runtime, meter)
        losses = run_all(world, mains, lambda rank: runtimes[rank].current_op or "its start", threads)
        found = whole({name: grad for rt in reversed(runtimes) for name, grad in rt.grads.items()})
        for runtime in runtimes:
            self._store_buffers(runtime)
        grads = {name: found[name] for name in self.parameters if name in found}
        return LocalResult(losses[0], grads, runtimes, tuple(m.peak for m in meters))

    def step(self, batch: Any) -> torch.Tensor:
        """Run one training step of this rank; return the loss of the whole batch, on every rank.

        Gradients are added to the parameters' ``.grad``.  Needs torchrun with one process a rank (a
        pipeline of one rank runs as it is).  If a rank fails, all raise RunError with its message, and
        their processes end soon after, whether or not the error is caught.
        """
        with self._as_traced():
            return self._step(batch)

    def _step(self, batch: Any) -> torch.Tensor:
        rt = self.runtime
        rt.start()
        try:
            self._follow_model()
            rt.params, rt.buffers = self._held(rt.rank)
            earlier = self._accumulators(rt)
            loss = self._own_step(rt, batch)
        except Exception as error:
            raise self._failure(error, rt) from error
        for name, grad in earlier.items():
            grad.add_(rt.grads[name])
        self._store_buffers(rt)
        return loss

    def _as_traced(self) -> AbstractContextManager[None]:
        return as_traced(self.plan.step.default_dtype, self.device)

    def _follow_model(self) -> None:
        """Take the parameters and buffers that the model holds now; raise RunError where they do not fit."""
        if self.model is None:
            return
        now: dict[str, torch.Tensor] = dict(self.model.named_parameters())
        now |= self.model.named_buffers()
        held: tuple[dict[str, Any], ...] = (self.parameters, self.buffers)
        for mine in held:
            for name, old in mine.items():
                new = now.get(name)
                if new is not None and new.is_meta:
                    continue  # load_state_dict gave the pipeline tensors of its own
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

    def _accumulators(self, rt: Runtime) -> dict[str, torch.Tensor]:
        """Give the program the parameters' ``.grad`` to add to.

        What the step works on as a whole (sums over ranks, division by the count) must not hold an
        earlier step's gradient: it gets fresh zeros, and the ``.grad`` to add them to is returned.
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

    def parameter(self, name: str) -> torch.nn.Parameter:
        """A parameter, or the rows of one that a rank holds: they share its memory, and have a gradient of
        their own size."""
        rows = rows_of(name)
        if rows is None or name in self.parameters:
            return self.parameters[name]
        table = self.parameters[rows.table]
        part = table.detach()[rows.begin : rows.end]
        if name not in self._rows:
            self._rows[name] = torch.nn.Parameter(part, table.requires_grad)
        elif self._rows[name].data_ptr() != part.data_ptr():  # the table has other memory now
            self._rows[name].data = part
        return self._rows[name]

    def optimizer(
        self, cls: type[torch.optim.Optimizer], *, clip_grad_norm: float | None = None, **options: Any
    ) -> PipelineOptimizer:
        """A torch optimiser over this rank's parameters; ``clip_grad_norm`` is of the whole model's norm."""
        self._follow_model()
        rt = self.runtime
        held = {name: self.parameter(name) for name in self.plan.tensors[rt.rank].gradients}
        owner = {name: r for r, t in reversed(list(enumerate(self.plan.tensors))) for name in t.gradients}
        counted = {name: p for name, p in held.items() if owner[name] == rt.rank}
        total = self.process.sum if self.process is not None else float
        return PipelineOptimizer(cls(list(held.values()), **options), counted, total, clip_grad_norm)

    def synchronise(self) -> None:
        """Give every rank the values that each parameter and buffer has on the rank that holds it.

        Under torchrun a rank trains what it holds and leaves the rest of its model as it was.  All ranks call
        this, before ``state_dict``, or before another pipeline of the same model is run.  Raises RunError
        where this process has not the whole model (a loaded pipeline, a model on the meta device).
        """
        if self.process is None:
            return
        self._follow_model()
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
                self.process.spread(whole_tensor[rows.begin : rows.end] if rows else whole_tensor, rank)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers under the model's names (under torchrun only this rank's are trained, until
        ``synchronise`` is called)."""
        self._follow_model()
        return {name: t.detach() for name, t in (*self.parameters.items(), *self.buffers.items())}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Give parameters and buffers their values; a model on the meta device gets its tensors by this.

        Call it before ``optimizer`` and the first ``step``.  Raises ArtefactError for a name that is
        missing or has another shape.
        """
        self._follow_model()
        self._rows.clear()
        for tensors in (self.parameters, self.buffers):
            for name, old in list(tensors.items()):
                if name not in state or state[name].shape != old.shape:
                    found = f"has shape {tuple(state[name].shape)}" if name in state else "is missing"
                    raise ArtefactError(f"{name}, of shape {tuple(old.shape)}, {found} in the state dict.")
                if not old.is_meta:
                    old.data.copy_(state[name])
                    continue
                value = state[name].to(self.device, old.dtype, copy=True)
                trained = isinstance(old, torch.nn.Parameter)
                tensors[name] = torch.nn.Parameter(value, old.requires_grad) if trained else value  # type: ignore

    def save(self, path: str | Path) -> None:
        """Write programs, plan, weights with their checksums, and pictures to a new directory.

        Under torchrun every rank calls it and writes the weights that it holds.  Raises ArtefactError if
        the directory is not empty; then nothing is written.
        """
        self._follow_model()
        ranks = range(self.plan.ranks) if self.process is None else [self.process.rank]
        for rank in ranks:
            self._need_values(rank)
        with files.new_directory(Path(path), self.process) as draft:
            for rank in ranks:
                files.write_tensors(self._tensors_of(rank), self.artefact.programs[rank], draft, rank)
            if 0 in ranks:
                files.write_programs(self.artefact, draft)
                if self.graph is not None:
                    self.draw(draft)

    def explain(self) -> None:
        """Print why it has the schedule that it has: what ``schedule="auto"`` tried, the fastest first, with
        each one's step, peak memory, and what was moved or made again."""
        explain(self.plan, Console(markup=False, emoji=False))

    def draw(self, path: str | Path, expand: tuple[int, str] | None = None) -> list[Path]:
        """Write pictures of the graph and of the schedule into a directory; return the files.

        expand: (stage, phase), say ``(1, "B")``: one section, drawn node by node as well.
        """
        return draw(self, Path(path), expand)

    @cached_property
    def runtime(self) -> Runtime:
        """What this process's program runs on."""
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
        self._need_values(rank)
        params, buffers = self._held(rank)
        return Runtime(
            rank=rank,
            spec=self.plan.step,
            comm=comm,
            params=params,
            grads=grads,
            buffers=buffers,
            constants={n: self.artefact.constants[n].to(self.device) for n in held.constants},
            away=self._away(rank),
        )

    def _held(self, rank: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The parameters and buffers that a rank works on."""
        held = self.plan.tensors[rank]
        params = {n: self.parameter(n).detach() for n in held.parameters}
        return params, {n: self.buffers[n] for n in held.buffers}

    def _away(self, rank: int) -> Away | None:
        tier = self.plan.tier
        if tier is None:
            return None
        check_tier(tier, self.device, self.offload_directory)
        store = partial(open_store, tier, self.plan.pools[rank], self.offload_directory, self.device)
        return Away(store, self.device)

    @staticmethod
    def _given(rt: Runtime, batch: Any) -> list[torch.Tensor]:
        """The tensors that a rank holds whether or not a step runs."""
        held = [*rt.params.values(), *rt.grads.values(), *rt.buffers.values(), *rt.constants.values()]
        return held + [x for _, x in batch_leaves(batch) if isinstance(x, torch.Tensor)]

    def _need_values(self, rank: int) -> None:
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

    def _zeros(self, rank: int) -> dict[str, torch.Tensor]:
        return {n: torch.zeros_like(self.parameter(n)) for n in self.plan.tensors[rank].gradients}

    @cached_property
    def _own_step(self) -> Callable[[Runtime, Any], torch.Tensor]:
        """Of this process's rank, once all ranks have found that their programs fit together."""
        if self.process is None:
            return self._local_steps[0]
        program = self._program(self.process.rank)
        given = self.process.gather(json.dumps(unstructure(program.traffic)).encode())
        check_agreement([structure(json.loads(data), Traffic) for data in given])
        return program.step

    @cached_property
    def _local_steps(self) -> tuple[Callable[[Runtime, Any], torch.Tensor], ...]:
        """Of all ranks."""
        programs = [self._program(rank) for rank in range(self.plan.ranks)]
        check_agreement([program.traffic for program in programs])
        return tuple(program.step for program in programs)

    def _program(self, rank: int) -> Program:
        name = f"rank{rank}.py"
        if self.directory is None:
            return load_program(self.artefact.programs[rank], f"<fxpipe {printable(self.plan.model)} {name}>")
        return load_program(self.artefact.programs[rank], str(self.directory / name))

    def _tensors_of(self, rank: int) -> dict[str, torch.Tensor]:
        held = self.plan.tensors[rank]
        tensors: dict[str, torch.Tensor] = {n: self.artefact.constants[n] for n in held.constants}
        tensors |= {n: self.parameter(n) for n in held.parameters}
        return tensors | {n: self.buffers[n] for n in held.buffers}

    def _store_buffers(self, runtime: Runtime) -> None:
        """What the step did to buffers, done to the model's."""
        for name, value in runtime.buffers.items():
            if value is not self.buffers[name]:
                runtime.buffers[name] = self.buffers[name].copy_(value)

    def _failure(self, error: Exception, rt: Runtime) -> Exception:
        """What to raise for an error on this rank, after the other ranks were told of it."""
        message = f"Rank {rt.rank} failed in {rt.current_op or 'its start'}: {type(error).__name__}: {error}"
        if self.process is None:
            return error if isinstance(error, FxpipeError) else RunError(message)
        if isinstance(error, RunError):
            first = self.process.find_failure()
            if first is not None:
                return RunError(f"{first} (Rank {rt.rank} stopped in {rt.current_op or 'its start'}.)")
        self.process.leave_failure(message)
        return error if isinstance(error, FxpipeError) else RunError(message)


def _named(work: PlanWork | None) -> PlanWork:
    if work is None:
        raise SizeError(
            "Costs are known for the example's sizes alone. Name its dimensions when you compile, for "
            'example with dimensions={"sequence": 256}.'
        )
    return work


def _metered(main: Callable[[], Any], rt: Runtime, meter: SavedBytes) -> Any:
    rt.record.at_op, rt.record.at_arrival = meter.between_ops, meter.arrived
    with meter:
        return main()
