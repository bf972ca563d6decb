"""Shows a pipeline: its plan, stages and predictions, pictures, a report and a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torch import fx

from fxpipe.api.hints import missing
from fxpipe.certificate.check import check_artifact
from fxpipe.certificate.problems import Certificate
from fxpipe.cost.batch_order import BatchPlanner, named_lengths, sample_cost
from fxpipe.cost.plan_costs import costs_of, expressions, known_work
from fxpipe.errors import OptionError, RunError, SizeError, at_least_one, number_of, one_of
from fxpipe.ir.graph import Section
from fxpipe.plan.artifact import Artifact, Plan, Validation
from fxpipe.plan.libraries import import_libraries
from fxpipe.plan.saved import files
from fxpipe.plan.step import SHARES, NamedLength
from fxpipe.plan.work import Expressions, PlanWork
from fxpipe.runtime.batch.documents import share_of
from fxpipe.runtime.job.process import Process
from fxpipe.runtime.job.tracebacks import brief_methods
from fxpipe.schedule.costs import StageCost
from fxpipe.schedule.ops import VALIDATIONS, Schedule
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.schedule.simulation.steps import Steps, simulate_steps
from fxpipe.schedule.simulation.timeline import Timeline
from fxpipe.viz.notebook import ShownSteps, ShownTimeline, pipeline_html, shown_as, stage_html
from fxpipe.viz.summary import costs_text, summary

#: What the classes of fxpipe use of a pipeline, and its users do not.
_INTERNAL = {
    "artifact", "assumed", "directory", "first_step", "is_evaluation", "let_model_go", "like", "model_state",
    "of", "offload_directory", "process", "rows", "share_model", "updates", "with_others",
}  # fmt: skip

if TYPE_CHECKING:
    from fxpipe.viz.report.write import ReportSource


@dataclass(frozen=True, eq=False, repr=False)
class Stage:
    """A stage of a pipeline, as a user sees it: the names of its parameters, the costs with which the
    schedule was made, and its sections (none if the pipeline was loaded, or compiled by another rank).
    ``shapes``: of its parameters."""

    index: int
    rank: int
    parameters: tuple[str, ...]
    costs: StageCost
    sections: tuple[Section, ...]
    work: PlanWork | None
    shapes: Mapping[str, tuple[int, ...]]

    @cached_property
    def expressions(self) -> Expressions:
        """The costs as sympy expressions of the named lengths.

        Raises SizeError where the pipeline was compiled without ``dimensions``.
        """
        return expressions(known_work(self.work), self.index)

    def __repr__(self) -> str:
        parameters = number_of(len(self.parameters), "parameter")
        return f"Stage({self.index}, rank {self.rank}: {parameters}; {costs_text(self.costs)})"

    def _repr_html_(self) -> str:
        """Show its costs for one microbatch and its parameters in a notebook."""
        return stage_html(f"stage {self.index} on rank {self.rank}", self.costs, self.shapes)


@brief_methods
@dataclass(eq=False, repr=False, kw_only=True)
class Views:
    """The properties by which a pipeline shows itself.  ``graph``, ``sections``: of the captured step; none
    if the pipeline was loaded, or compiled by another rank."""

    artifact: Artifact
    graph: fx.Graph | None = None
    sections: tuple[Section, ...] = ()
    directory: Path | None = None
    process: Process | None

    def __repr__(self) -> str:
        lines = summary(self.artifact.plan)
        if self.process is not None:
            lines.append(f"this process is rank {self.process.rank} of replica {self.process.replica}")
        return "\n  ".join([f"Pipeline of {lines[0]}", *lines[1:]])

    def _repr_html_(self) -> str:
        """The text of ``repr`` with the simulated step and the memory of each rank, for notebooks."""
        # Under torchrun the ops of the other ranks would have to be fetched by all.
        return pipeline_html(self.artifact.plan, with_picture=self.process is None)

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in _INTERNAL]

    def __getattr__(self, name: str) -> Any:
        if hasattr(type(self), name):  # a property that raised AttributeError
            return object.__getattribute__(self, name)
        raise missing(name, dir(self))

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise RunError(
            "A pipeline is not called like a model: pipe.step(batch) trains under torchrun, "
            "pipe.run_local(batch) runs all ranks here, pipe.evaluate(batch) gives the loss alone."
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise RunError(
            "A pipeline cannot be pickled or copied, as torch.save and copy.deepcopy do: pipe.save(path) "
            "writes it for fxpipe.load(path), and pipe.state_dict() has its weights."
        )

    @property
    def plan(self) -> Plan:
        """All decisions and predictions; under torchrun this fetches the ops of other ranks, once."""
        return self.artifact.whole_plan

    @property
    def replicas(self) -> int:
        """The number of replicas that train together: of processes, or of those of ``run_local``."""
        return self.artifact.plan.replicas if self.process is None else self.process.replicas

    @property
    def replica(self) -> int:
        """The number of the replica that this process belongs to: it takes the rows of that."""
        return 0 if self.process is None else self.process.replica

    @property
    def lanes(self) -> int:
        """The number of processes that share each op of a rank: 1 of a model without DTensors."""
        return self.artifact.plan.lanes.number

    @property
    def stages(self) -> tuple[Stage, ...]:
        plan = self.artifact.plan
        return tuple(
            Stage(
                s.stage,
                s.rank,
                s.parameters,
                cost,
                tuple(x for x in self.sections if x.stage == s.stage),
                plan.work,
                {name: plan.whole_layout(name).shape for name in s.parameters},
            )
            for s, cost in zip(plan.stages, plan.costs.stages, strict=True)
        )

    @property
    def schedule(self) -> Schedule:
        return self.plan.ordered

    def simulate(
        self,
        sizes: Mapping[str, int] | None = None,
        *,
        device: str | None = None,
        lengths: Sequence[Mapping[str, int] | int] | None = None,
        documents: Sequence[Sequence[int]] | None = None,
    ) -> Timeline:
        """Simulate the step: times, bubbles and the bytes that each rank holds between ops.

        lengths: of each microbatch of a batch, ``[{"sequence": 512}, …]`` or ``[512, …]``: the step in the
            order that ``step`` runs for them (docs/lengths.md).
        documents: with ``lengths``, the lengths of the samples that are packed in each, ``[[300, 212], …]``.
        sizes: other lengths than the example's, ``{"microbatch": 2, "sequence": 4096}``; the names
            must be in ``dimensions`` of ``compile``.  Stages and schedule do not change.
        device: the name of a device, ``"B200"``: the analytic times on it.  Needs ``dimensions`` too ({} is
            enough).
        Raises SizeError for an unknown name and for a length below one, ScheduleError for an unknown device.
        """
        if lengths is None and documents is not None:
            raise SizeError("documents are of microbatches: give their lengths, too.")
        if lengths is not None:
            if sizes is not None or device is not None:
                raise SizeError(
                    "lengths are those of a batch on the plan's device: leave out sizes and device."
                )
            named, spec = named_lengths(self.lengths, lengths), self.plan.step
            if documents is not None and len(documents) != len(named):
                raise SizeError(
                    f"documents are of {len(documents)} microbatches, and lengths of {len(named)}."
                )
            shares = []
            for m, packed in enumerate(documents or ()):
                tokens = spec.tokens([named[m]])
                if min(packed, default=1) < 1 or sum(packed) > tokens:
                    raise SizeError(f"documents[{m}] is {packed!r}, in a microbatch of {tokens} tokens.")
                shares.append(share_of(packed, tokens) / SHARES)
            timeline = BatchPlanner.of(self.plan).timeline(named, shares)
        else:
            timeline = simulate(self.schedule, costs_of(self.plan, sizes, device))
        return shown_as(ShownTimeline, timeline, model=self.plan.model)

    def simulate_steps(
        self,
        steps: int = 1,
        *,
        validation: Validation | None = None,
        sizes: Mapping[str, int] | None = None,
        device: str | None = None,
    ) -> Steps:
        """Simulate steps one behind the other, with the updates between them: ``.period`` is the seconds a
        step once they repeat (docs/schedules.md).

        steps: at least so many.  validation: by default the one that the pipeline was compiled for.
        sizes, device: as for ``simulate``, which raises the same errors.
        """
        at_least_one("steps", steps)
        if validation is not None:
            one_of("validation", validation, VALIDATIONS)
        plan = self.plan
        costs = costs_of(plan, sizes, device)
        shown = simulate_steps(plan.ordered, costs, validation or plan.validation, steps)
        return shown_as(ShownSteps, shown, model=plan.model)

    def leaves(self, rank: int | None = None) -> tuple[str, ...]:
        """The names of the leaves of a batch that a rank needs (by default this process's); its batches may
        lack the others."""
        if rank is None:
            rank = 0 if self.process is None else self.process.rank
        return self.artifact.plan.step.leaves[rank]

    @property
    def lengths(self) -> tuple[NamedLength, ...]:
        """The dimensions of microbatches that may have other lengths than the example's (docs/lengths.md)."""
        return self.artifact.plan.step.lengths

    @property
    def sample_cost(self) -> tuple[float, float]:
        """What ``fxpipe.pack`` and ``PackedSteps`` take as ``cost``: (a, b) of the seconds a · L + b · L² for
        a sample of L tokens on the busiest rank; b is 0 where attention does not compute samples alone."""
        return sample_cost(self.plan)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the outputs that a step can be asked for: those of ``compile(…, outputs=[…])``."""
        return tuple(output.name for output in self.artifact.plan.step.outputs)

    def check(self) -> Certificate:
        """Check the programs of all ranks, as they are now, against the captured step (docs/certificate.md).

        It runs their text, not on tensors but on terms; of programs for batches without padding as well, and
        gives the first certificate that does not hold.  Raises RunError on other ranks than the first, which
        alone has all programs, and for a pipeline that was saved by an earlier version.  Imports the modules
        that the plan names for ops of other libraries; raises ArtifactError where that fails.
        """
        if self.process is not None and not self.process.leads:
            raise RunError("Rank 0 alone has the programs of all ranks: call check() there.")
        import_libraries(self.plan.libraries, str(self.directory or "The pipeline"))
        artifacts = [each for each in (self.artifact, self.assumed) if each is not None]
        certificates = [check_artifact(artifact) for artifact in artifacts]
        return next((each for each in certificates if not each.holds), certificates[0])

    def explain(self) -> None:
        """Print the reasons for the schedule: the candidates of ``schedule="auto"``, the fastest first, with
        each one's step, peak memory, and offloaded and recomputed values."""
        from rich.console import Console  # imported here, as training does not need it

        from fxpipe.viz.explanation import explain

        explain(self.plan, Console(markup=False, emoji=False))

    def draw(self, path: str | Path, expand: tuple[int, str] | None = None, *, steps: int = 1) -> list[Path]:
        """Write pictures of the graph and of the schedule into a directory; return the files.

        expand: (stage, phase), say ``(1, "B")``: one section, drawn node by node as well.
        steps: the schedule of so many steps; more than one are such as repeat, with the updates behind them.
        """
        from fxpipe.viz.pictures import draw

        directory = files.as_path(path, "pipe.draw")
        if directory.suffix in (".svg", ".png", ".pdf", ".jpg", ".jpeg"):
            raise OptionError(
                f"pipe.draw writes several pictures into a directory, and {directory} is the name of one. "
                "Give a directory; `fxpipe draw` writes the schedule of a saved pipeline as one file."
            )
        at_least_one("steps", steps)
        shown = self.simulate() if steps == 1 else self.simulate_steps(steps + 1).last(steps)
        with files.writing(directory):
            return draw(self.plan, self.graph, self.sections, shown, directory, expand)

    def report(self, path: str | Path) -> Path:
        """Write everything known about the pipeline as one HTML file that needs no network; return the file.

        It has the timeline of all ranks with what each waits for, memory by kind, the graph, stages, links
        and candidates (docs/report.md).  A loaded pipeline's has the measured step beside the predicted one,
        if one was recorded in its directory.
        """
        from fxpipe.viz.report.write import write_report

        return write_report(self._source(), files.as_path(path, "pipe.report", "a file"))

    def trace(self, path: str | Path) -> Path:
        """Write the predicted step, and the recorded one if there is one, as a trace for Perfetto; return the
        file."""
        from fxpipe.viz.trace import write_trace

        return write_trace(self._source(), files.as_path(path, "pipe.trace", "a file"))

    def _source(self) -> ReportSource:
        from fxpipe.viz.report.write import live_source

        return live_source(self.plan, self.artifact.programs, self.graph, self.sections, self.directory)

    def _write_views(self, directory: Path) -> None:
        """Write what is to be looked at, for ``save``: the pictures, and the graph for the report."""
        from fxpipe.viz.report.graph_record import graph_record, write_graph

        self.draw(directory)
        assert self.graph is not None, "a pipeline without a graph has no views"
        write_graph(graph_record(self.graph, self.sections, self.plan), directory)
