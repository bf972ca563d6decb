"""What a compiled pipeline is on disk and on the wire: a plan, a program for each rank, tensors.

    rank0.py …  rank0.safetensors …  plan.json

Nothing is pickled.  A directory is written beside its place and moved there whole.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import cattrs
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from fxpipe.errors import ArtefactError
from fxpipe.expressions import PlanWork
from fxpipe.runtime.away import Tier
from fxpipe.runtime.process import Process
from fxpipe.runtime.rank import StepSpec
from fxpipe.schedule.costs import Costs
from fxpipe.schedule.ops import Transfer
from fxpipe.version import __version__
from fxpipe.vocabulary.stages import Vocabulary

FORMAT = 1
_converter = cattrs.Converter()


@dataclass(frozen=True)
class StagePlan:
    """One stage: the rank that holds it, the modules that it begins and ends with, its parameters."""

    stage: int
    rank: int
    first: str
    last: str
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class RankTensors:
    """The names of what one rank holds; ``gradients`` are the parameters that it accumulates for."""

    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    constants: tuple[str, ...]
    gradients: tuple[str, ...]


@dataclass(frozen=True)
class Prediction:
    """Of the simulator, in seconds and bytes."""

    seconds: float
    span_bubble: float
    makespan_bubble: float
    peak_memory: tuple[float, ...]


@dataclass(frozen=True)
class Attempt:
    """A schedule that ``auto`` looked at: what it was simulated to take, or ``why`` it was left out.

    ``seconds`` a step, ``peak_memory`` in bytes, of the rank that needs most.  ``barriers``: of the
    vocabulary layers spread over the ranks, 0 where they are not.  ``recompute``: what B makes again.
    ``moved``: bytes that leave the ranks in a step.
    """

    schedule: str
    stages_per_rank: int
    placement: str
    seconds: float | None
    span_bubble: float | None
    peak_memory: float | None
    why: str
    barriers: int = 0
    recompute: str = ""
    moved: float = 0.0


@dataclass(frozen=True)
class Plan:
    """All decisions and predictions; plan.json is this and nothing else.

    ``order``: the schedule as text, a line a rank.  ``vocabulary``: which stages are not the model's own.
    ``channels``: the ordered pairs of ranks that talk;
    ``collectives``: how many communicators all ranks share.
    ``shapes`` are those of parameters and buffers.  ``work``: the costs for other sizes, where dimensions
    were named.  ``tried``: what ``auto`` looked at.  ``transfers``: what leaves the ranks and comes back,
    ``tier``: where to, ``pools``: bytes that each rank needs there.
    """

    format: int
    version: str
    model: str
    schedule: str
    placement: tuple[int, ...]
    order: tuple[str, ...]
    step: StepSpec
    stages: tuple[StagePlan, ...]
    costs: Costs
    channels: tuple[tuple[int, int], ...]
    tensors: tuple[RankTensors, ...]
    shapes: dict[str, tuple[int, ...]]
    prediction: Prediction
    vocabulary: Vocabulary | None = None
    collectives: int = 0
    work: PlanWork | None = None
    tried: tuple[Attempt, ...] = ()
    recompute: str = ""
    transfers: tuple[Transfer, ...] = ()
    tier: Tier | None = None
    pools: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        return self.step.ranks

    def to_json(self) -> str:
        return json.dumps(_converter.unstructure(self), indent=1)

    @staticmethod
    def from_json(text: str, where: str) -> Plan:
        try:
            data = json.loads(text)
            found = data.get("format") if isinstance(data, dict) else None
            if found != FORMAT:
                raise ArtefactError(
                    f"{where} has format {found} and fxpipe {__version__} reads format {FORMAT}. "
                    "Compile and save the pipeline again with this version."
                )
            return _converter.structure(data, Plan)
        except (json.JSONDecodeError, cattrs.BaseValidationError, KeyError) as error:
            raise ArtefactError(
                f"{where} is damaged or cut short ({type(error).__name__}). Save the pipeline again."
            ) from error


@dataclass(frozen=True, eq=False)
class Artefact:
    """``programs``: the source of every rank's program.  ``constants``: tensors the model made itself."""

    plan: Plan
    programs: tuple[str, ...]
    constants: dict[str, torch.Tensor]


@contextlib.contextmanager
def new_directory(path: Path, process: Process | None) -> Iterator[Path]:
    """A directory to fill, which becomes ``path`` if all goes well and vanishes if not.

    Under torchrun all ranks fill the same one.
    """
    path = path.absolute()
    draft = path.with_name(f".{path.name}.draft")
    leads = process is None or process.rank == 0
    problem = _begin(path, draft) if leads else ""
    if process is not None:
        problem = process.share(problem.encode(errors="backslashreplace") if leads else None).decode()
    if problem:
        raise ArtefactError(problem)
    try:
        yield draft
        if process is not None:
            process.barrier()
        if leads:
            if path.exists():
                path.rmdir()
            draft.rename(path)
        if process is not None:
            process.barrier()
    finally:
        if leads:
            shutil.rmtree(draft, ignore_errors=True)


def _begin(path: Path, draft: Path) -> str:
    """Make the draft; return what stands in the way."""
    problem = taken(path)
    if problem:
        return problem
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        return f"{path} cannot be written: {error}"
    return ""


def taken(path: Path) -> str:
    """Why no pipeline can be saved at ``path``; empty if one can."""
    if path.exists() and not path.is_dir():
        return f"{path} is a file. Name a new directory to save the pipeline in."
    if path.exists() and any(path.iterdir()):
        return f"{path} is not empty. Name a new directory, or remove it first."
    return ""


def write_programs(artefact: Artefact, directory: Path) -> None:
    for rank, source in enumerate(artefact.programs):
        (directory / f"rank{rank}.py").write_text(source, encoding="utf-8")
    (directory / "plan.json").write_text(artefact.plan.to_json())


def write_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Tensors under their names; those that share memory are written one by one."""
    save_file({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}, path)


def read(directory: Path) -> tuple[Plan, tuple[str, ...]]:
    """Plan and programs of a saved pipeline."""
    if not (directory / "plan.json").is_file():
        raise ArtefactError(f"{directory} holds no saved pipeline: there is no plan.json in it.")
    text = (directory / "plan.json").read_text(errors="replace")
    plan = Plan.from_json(text, str(directory / "plan.json"))
    programs = []
    for rank in range(plan.ranks):
        for file in (f"rank{rank}.py", f"rank{rank}.safetensors"):
            if not (directory / file).is_file():
                raise ArtefactError(f"{directory} is cut short: {file} is missing. Save the pipeline again.")
        programs.append((directory / f"rank{rank}.py").read_text(encoding="utf-8"))
    return plan, tuple(programs)


def read_tensors(path: Path, plan: Plan, rank: int) -> dict[str, torch.Tensor]:
    """What the rank holds; raises ArtefactError if the file does not hold it, or in other shapes."""
    held = plan.tensors[rank]
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ArtefactError(f"{path} is damaged or cut short ({error}). Save the pipeline again.") from error
    missing = {*held.parameters, *held.buffers, *held.constants} - tensors.keys()
    if missing:
        raise ArtefactError(f"{path} does not hold {sorted(missing)[0]}. Save the pipeline again.")
    for name in (*held.parameters, *held.buffers):
        if tuple(tensors[name].shape) != plan.shapes[name]:
            raise ArtefactError(
                f"{path} holds {name} in shape {tuple(tensors[name].shape)}, and the programs need "
                f"{plan.shapes[name]}. Save the pipeline again."
            )
    return tensors
