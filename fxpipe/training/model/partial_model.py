"""The model in the hands of the user under torchrun: of each tensor this process has its pipelines' part.

A tensor that no pipeline of this process has is elsewhere (``Elsewhere``): it takes no memory, and its use is
an error.  ``synchronize`` brings the values of all of them, until a step changes them.
"""

from __future__ import annotations

import json
import sys
import traceback
import weakref
from functools import cache
from types import FrameType
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from fxpipe.errors import RunError
from fxpipe.plan.artifact import Plan
from fxpipe.plan.attribute_state import kept_slots
from fxpipe.plan.rows import ShardName
from fxpipe.runtime.job.process import Process
from fxpipe.runtime.job.user_line import is_of_user
from fxpipe.runtime.torch_private import after_each_update
from fxpipe.training.model.elsewhere import Elsewhere, hide, is_elsewhere, send_away, show
from fxpipe.training.model.pending_update import PendingUpdate

if TYPE_CHECKING:
    from fxpipe.training.model.model_state import ModelState

#: The training of the pipelines that were compiled in this process, as long as they or their optimizers live.
_compiled: weakref.WeakSet[ModelState] = weakref.WeakSet()
#: Those whose model is whole.
_watched: weakref.WeakSet[ModelState] = weakref.WeakSet()


def register(state: ModelState) -> None:
    """Take a new pipeline as one that has this process's part of its model, beside the others of it.

    Raises RunError where another one trains tensors of this model that would be on other ranks here.
    """
    state.registered = {name: weakref.ref(tensor) for name, tensor in registered(state.of()).items()}
    for other in _compiled:  # all are compared before any rows are shared, so an error changes nothing
        if text := _difference(state, other):
            raise RunError(text)
    for other in _compiled:
        _share_rows(state, other)
    _compiled.add(state)


def share_model(state: ModelState) -> None:
    """Free what no pipeline has here of the model of a new pipeline; to others it is not whole any more."""
    _free(state, state.plan.tensor_names)
    for other in _compiled:
        if other is not state and _common(state, other):
            other.synchronized, other.whole = False, None
            unwatch_updates(other)


def free_others(state: ModelState) -> None:
    """Free the copies of what other ranks have, as values have changed.  A pipeline that only evaluates frees
    those of tensors that it changes."""
    if any(state.parameters is other.parameters for other in _compiled):
        _free(state, state.plan.tensor_names if state.plan.trains else {*state.plan.changed})
        state.aliases.hide()


def _free(state: ModelState, names: set[str]) -> None:
    """Free those of these tensors of the model that no pipeline has here; of what this one changes, also the
    copies of others, which have earlier values."""
    if not names:
        return
    for each in _compiled:
        each.let_go()  # rows of tables have memory of their own
    tensors, changed = tensors_of(state), changed_by(state.plan)
    others = {
        id(tensor)
        for other in _compiled
        if other is not state
        for name, tensor in tensors_of(other).items()
        if name in whole_names(other)
    }
    leaving: dict[str, torch.Tensor] = {}
    for name in names - whole_names(state) & tensors.keys():
        tensor = tensors[name]
        is_anothers = id(tensor) in others and name not in changed
        if not (tensor.is_meta or is_elsewhere(tensor) or is_anothers):
            leaving[name] = tensor
    trained = {name: tensor for name, tensor in leaving.items() if name in changed}
    state.aliases.add(trained, {id(tensor) for tensor in tensors.values()})
    for tensor in leaving.values():
        send_away(tensor, state.classes_elsewhere.of(tensor))
    model = state.of()
    if model is not None and (unregistered := names - whole_names(state) - tensors.keys()):
        for name, slot in kept_slots(model).items():
            value = slot.get()
            if name in unregistered and value is not None and not is_elsewhere(value):
                value = value.detach()  # code may keep the old one
                send_away(value, state.classes_elsewhere.of(value))
                slot.put(value)


def _difference(new: ModelState, other: ModelState) -> str:
    """How two pipelines of a model place a tensor that one of them changes, if not alike; else "".

    One that does not train may have copies, which ``synchronize`` of the other fills.
    """
    if not (new.plan.trains and other.plan.trains):
        return ""
    for name, theirs in _common(new, other):
        changed = name in changed_by(new.plan), theirs in changed_by(other.plan)
        here, there = _parts(new, name), _parts(other, theirs)
        alike = here == there
        if changed == (False, True):  # which reads it alone, and may do so on fewer ranks
            alike = here.items() <= there.items()
        elif changed == (True, False):
            alike = there.items() <= here.items()
        if any(changed) and not alike:
            return (
                f"{name} would be on {_ranks_text(here)}, and another pipeline of this model "
                f"({other.plan.model}) has it on {_ranks_text(there)}: neither would see what the other "
                "trains. Compile this one with like=pipe, the other one, or with its split_points; or call "
                "the other's synchronize() and let it and its optimizer go before this one is compiled."
            )
    return ""


def _common(new: ModelState, other: ModelState) -> list[tuple[str, str]]:
    """The names, in both, of the tensors that are part of two models."""
    names = {id(tensor): name for name, tensor in tensors_of(other).items()}
    return [(name, names[id(tensor)]) for name, tensor in tensors_of(new).items() if id(tensor) in names]


def _parts(state: ModelState, name: str) -> dict[int, frozenset[tuple[int, int]]]:
    """The processes that own a tensor, each with its rows."""
    rows_of = (
        (k, frozenset((n.begin, n.end) for n in tensors.state if n.tensor == name))
        for k, tensors in enumerate(state.owned)
    )
    return {process: rows for process, rows in rows_of if rows}


def _ranks_text(parts: dict[int, frozenset[tuple[int, int]]]) -> str:
    """The processes, each with its rows where it has no more."""
    each = []
    for process, rows in parts.items():
        spans = ", ".join(f"{begin}:{end}" for begin, end in sorted(rows) if end < sys.maxsize)
        each.append(f"process {process}{f' (rows {spans})' if spans else ''}")
    return ", ".join(each) or "no process"


def sharing(state: ModelState) -> list[ModelState]:
    """The other pipelines that train tensors of this one's model."""
    return [
        other for other in _compiled if other is not state and other.plan.trains and _common(state, other)
    ]


def _share_rows(new: ModelState, other: ModelState) -> None:
    """Train the rows of tables that another pipeline has by the same parameters."""
    tables = {theirs: name for name, theirs in _common(new, other)}
    for rows, parameter in (other.rows | other.parameters).items():
        theirs = ShardName(rows)
        if theirs.is_part and theirs.tensor in tables:
            new.rows[ShardName.of_rows(tables[theirs.tensor], theirs.begin, theirs.end)] = parameter


def hide_stale(state: ModelState) -> None:
    """Hide the parameters of which other replicas have rows with newer values, after an update."""
    assert state.process is not None
    rank, tensors = state.process.rank, tensors_of(state)
    current = {*state.owned_by(rank).gradients}
    for name in state.plan.tensors[rank].gradients:
        if name not in current and name in tensors and not is_elsewhere(tensors[name]):
            hide(tensors[name], state.classes_elsewhere.of(tensors[name]))


def show_stale(state: ModelState) -> None:
    """Show them again, as their rows have come."""
    tensors = tensors_of(state)
    for name in whole_names(state) & tensors.keys():
        show(tensors[name])


def updates_of(model: nn.Module) -> PendingUpdate:
    """The last update of a pipeline that has tensors of this model; new ones if there is none."""
    ids = {id(tensor) for tensor in registered(model).values()}
    others = (other for other in _compiled if any(id(tensor) in ids for tensor in tensors_of(other).values()))
    return next((other.updates for other in others), PendingUpdate())


def names_by_rank(
    model: nn.Module, other: ModelState
) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]:
    """The names of a model's tensors that may be used on each rank of another pipeline, and of the parameters
    that it has there; nothing if the model has no tensor of it.

    What that one does not use itself, and has on a rank for the whole model's sake, may be used on any.
    """
    theirs = {id(tensor): name for name, tensor in tensors_of(other).items()}
    names = {name: theirs.get(id(tensor)) for name, tensor in registered(model).items()}
    known, plan = other.plan.tensor_names, other.plan
    if not known.intersection(names.values()):
        return (), ()
    in_stages = {ShardName(name).tensor for stage in plan.stages for name in stage.parameters}
    buffers = {name.tensor for tensors in plan.tensors for name in tensors.buffers}
    used = in_stages | buffers | changed_by(plan)
    ranks = [{name.tensor for name in tensors.state} for tensors in plan.tensors]
    whole = [{*tensors.parameters} for tensors in plan.tensors]
    return (
        tuple(
            tuple(sorted(n for n, their in names.items() if their in here or their not in used))
            for here in ranks
        ),
        tuple(tuple(sorted(n for n, their in names.items() if their in here)) for here in whole),
    )


def watch_updates(state: ModelState) -> None:
    """Take a step of any optimizer of the model's tensors as a change of values, as long as it is whole."""
    _hook_all_optimizers()
    _watched.add(state)


def unwatch_updates(state: ModelState) -> None:
    _watched.discard(state)


@cache
def _hook_all_optimizers() -> None:
    after_each_update(_updated)


def _updated(optimizer: Optimizer) -> None:
    for state in [*_watched]:
        ids = {id(tensor) for tensor in tensors_of(state).values()}
        if any(id(parameter) in ids for group in optimizer.param_groups for parameter in group["params"]):
            state.changed()


def registered(model: nn.Module | None) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a model by name."""
    return {} if model is None else dict((*model.named_parameters(), *model.named_buffers()))


def tensors_of(state: ModelState) -> dict[str, torch.Tensor]:
    """The registered tensors of the model, or what is left of them where a module around them is gone."""
    model = state.of()
    if model is not None:
        return registered(model)
    return {name: tensor for name, ref in state.registered.items() if (tensor := ref()) is not None}


def trained_tensors(state: ModelState) -> dict[str, torch.Tensor]:
    """Find the tensors to which training gives new values."""
    trained = changed_by(state.plan)
    return {name: tensor for name, tensor in tensors_of(state).items() if name in trained}


def pipelines_of(model: nn.Module, process: Process) -> list[ModelState]:
    """The pipelines that have a part of this model elsewhere on any process; the same on all, which call it.

    Raises RunError if one is gone.
    """
    numbers_here = {type(x).explain.number for x in registered(model).values() if isinstance(x, Elsewhere)}
    numbers = {n for text in process.gather(json.dumps([*numbers_here]).encode()) for n in json.loads(text)}
    states = {state.process.tag: state for state in _compiled if state.process is not None}
    with process.agreed("compile"):
        if numbers - states.keys():
            raise RunError(
                f"A part of this {type(model).__name__} is on other ranks, and the pipeline that has it is "
                "gone. Call pipe.synchronize() on all ranks before you let a pipeline go, and compile its "
                "model again then."
            )
    return [states[number] for number in sorted(numbers)]


def changed_by(plan: Plan) -> set[str]:
    """The names of the tensors to which training gives new values."""
    return plan.trained | {*plan.changed}


def whole_names(state: ModelState) -> set[str]:
    """The tensors of which this process has more than rows."""
    return {name for name in (*state.parameters, *state.buffers) if not ShardName(name).is_part}


def _name_of(tensor: torch.Tensor, state: ModelState) -> str:
    model = state.of()
    attributes = {} if model is None else {name: slot.get() for name, slot in kept_slots(model).items()}
    return next((name for name, x in (tensors_of(state) | attributes).items() if x is tensor), "")


def trained_elsewhere(name: str) -> str:
    """The error of a pipeline that needs a tensor here which another one changes on another rank."""
    return (
        f"{name} is trained by another pipeline of this model, which has it on other ranks. Call that one's "
        "synchronize() on all ranks before this one runs, or compile this one with like=pipe, so that each "
        "tensor is where that one has it."
    )


class Explanation:
    """Why a tensor of a pipeline's model cannot be used in this process, and what can be."""

    def __init__(self, state: ModelState):
        assert state.process is not None
        self.plan, self.rank, self.number = state.plan, state.process.rank, state.process.tag
        self.state = weakref.ref(state)
        self._has_warned = False

    def __call__(self, tensor: torch.Tensor) -> str:
        state, rank = self.state(), self.rank
        name = "" if state is None else _name_of(tensor, state)
        if state is not None and name in whole_names(state):
            return (
                f"Other replicas have newer values of rows of {name}: call pipe.full_state_dict() or "
                "pipe.evaluate(batch) instead, or pipe.synchronize() first, on all ranks."
            )
        stages = ", ".join(s.modules for s in self.plan.stages if s.rank == rank and s.modules) or "no layer"
        return (
            f"{name or 'This tensor'} is on {self._place(name)}, and rank {rank} holds {stages} "
            f"of this {self.plan.model}: call pipe.full_state_dict(), pipe.evaluate(batch) or "
            "pipe.load_state_dict(state) instead, or pipe.synchronize() first, on all ranks, which fills the "
            "model until the next step. pipe.parameters and pipe.buffers are what this rank holds; "
            "pipe.average(…) makes averages of weights."
        )

    def gradient_is_read(self, tensor: torch.Tensor, frame: FrameType) -> None:
        """Note, once, to warn the user's code that a norm of the gradients here is of a part of the model,
        unless it divides them: where they are compared, that shows.

        Optimizers, also the user's, ask all parameters, and update those that have one.
        """
        state = self.state()
        if self._has_warned or state is None or not (tensor.requires_grad and is_of_user(frame)):
            return
        callers = (caller.f_locals.get("self") for caller, _ in traceback.walk_stack(frame))
        if any(isinstance(caller, Optimizer) for caller in callers):
            return
        self._has_warned = True
        name = _name_of(tensor, state)
        text = (
            f"{name or 'This tensor'} has no gradient on rank {self.rank}, as it is on {self._place(name)}: "
            "what is computed here of all gradients, such as their norm, is of a part of the model. "
            "opt.grad_norm() is the norm of all, and opt.last_norm that of the last update with "
            "clip_grad_norm=. What changes each gradient by itself is right: in a loop over pipe.parameters, "
            "which this rank holds, it has no warning."
        )
        state.reads.append((text, frame.f_code.co_filename, frame.f_lineno))

    def is_written_there(self, tensor: torch.Tensor) -> bool:
        """Whether it is a buffer that other ranks have whole: the script runs on them, too."""
        state = self.state()
        name = "" if state is None else _name_of(tensor, state)
        return any(name in tensors.buffers for tensors in self.plan.tensors)

    def _place(self, name: str) -> str:
        names = [{n.tensor for n in tensors.state} for tensors in self.plan.tensors]
        ranks = [rank for rank, on_rank in enumerate(names) if name in on_rank]
        if ranks in ([], [self.rank]):  # it may have got another name, as pruning gives
            return "other ranks"
        return f"rank {ranks[0]}" if len(ranks) == 1 else f"the ranks {', '.join(map(str, ranks))}"
