"""A torch optimizer of one rank's parameters that clips by the gradient norm of the whole model."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from fxpipe.errors import RunError
from fxpipe.plan.artifact import Validation
from fxpipe.plan.number import number
from fxpipe.plan.step import Replay
from fxpipe.runtime.job.process import Process
from fxpipe.runtime.job.user_line import called_function
from fxpipe.runtime.torch_private import copy_each, has_step_hooks, zero_each
from fxpipe.training.model.accumulators import is_zeroed, mark_zeroed
from fxpipe.training.model.pending_update import PendingUpdate
from fxpipe.training.model.rollback import Rollback
from fxpipe.training.model.speculative_update import SpeculativeUpdate, set_grad, set_grads
from fxpipe.training.optimizer.clipping import Clipping, check_norm
from fxpipe.training.optimizer.in_turns import Turns
from fxpipe.training.optimizer.optimizer_state import MASTER, check_parameters, named_state, without_masters
from fxpipe.training.optimizer.script_changes import ScriptChanges
from fxpipe.training.optimizer.several_optimizers import SeveralOptimizers
from fxpipe.training.optimizer.speculation_policy import SpeculationPolicy
from fxpipe.training.optimizer.step_loss import NO_SCALER
from fxpipe.training.optimizer.update_replays import UpdateReplays


@dataclass(eq=False)
class Counts:
    """How often an optimizer's ``step`` was called, and its ``zero_grad``.

    ``order``: the number of the order of its calls, without those that repeat the last one.
    """

    updates: int = 0
    zeroed: int = 0
    order: int = 0
    _last: str = "zero_grad"

    def called(self, name: str) -> None:
        if name != self._last:
            self.order, self._last = number(f"{self.order} {name}".encode()), name


class PipelineOptimizer(Optimizer):
    """Wraps a torch optimizer of this rank's parameters; ``step`` first clips, if asked to, by the norm of
    the gradients of all ranks.

    A gradient of another dtype than what is updated (``grad_dtype`` of ``fxpipe.compile``) is cast for the
    time of the update.  With master weights the wrapped optimizer updates these, wider copies of parameters,
    and each parameter gets its copy's value.

    With ``validation="post"`` a rank whose gradients are finite, and small enough if those of the other ranks
    are as in the last step, updates at once and goes on.  When it knows of all ranks, before its first
    backward of the next step, a wrong update is taken back and made again, or left out.  The values are those
    of "barrier", bit for bit.

    ``optimizer``: the wrapped one; both have the same ``param_groups`` and ``state``, so schedulers of the
    learning rate and hooks take this one.
    ``counts``: of its calls.
    ``names``: what is updated, a parameter or its master -> the parameter's name, or that of its rows.
    ``masters``: master -> parameter.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        names: Mapping[Parameter, str],
        counted: Sequence[Parameter],
        ranks: Process | None,
        clipping: Clipping = Clipping(),  # noqa: B008 - frozen
        masters: Mapping[Parameter, Parameter] | None = None,
        validation: Validation = "barrier",
        updates: PendingUpdate | None = None,
        changed: Callable[[], None] = lambda: None,
        script_changes: ScriptChanges | None = None,
        replay: tuple[Replay, torch.device] | None = None,
    ):
        """counted: the parameters that this rank counts in the norm (one rank counts a tied parameter).
        updates: of the pipeline.  changed: called behind each step.  script_changes: what is told of updates.
        replay: whether updates are replayed on a device, where they are known to stand.

        Raises RunError for a norm that is no number above 0.
        """
        self.optimizer = optimizer
        self.masters = dict(masters or {})
        self.names = dict(names)
        self.counts = Counts()
        self._turns = Turns({self.masters.get(p, p): name for p, name in self.names.items()})
        self._counted, self._ranks, self._clipping = counted, ranks, clipping
        self._validation, self._updates, self._changed = validation, updates or PendingUpdate(), changed
        self._script_changes = script_changes
        self._last_norm: torch.Tensor | None = None
        self._skipped, self._nonfinite = 0, list[float]()  # the norms of updates left out since the last one
        self._ahead: SpeculativeUpdate | None = None
        self._pace, self._begun = SpeculationPolicy(), time.perf_counter()  # begun: the last update
        self._undo: Rollback | None = None  # the last one, for its memory
        self._numbers: torch.Tensor | None = None  # of all ranks, of the last norm
        self._replays: UpdateReplays | None = None
        if replay is not None and replay[0]:
            self._replays = UpdateReplays(*replay, optimizer, self.names, self.masters)
        self._leaves_zeroed_out = True
        self._made, state = False, optimizer.state
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._made, self.state = True, state  # torch's constructor sets an empty one
        if script_changes is not None:
            script_changes.known.add(self)

    def __getattr__(self, name: str) -> Any:
        """Tell of what the wrapped class has beside torch's own: AttributeError says how it is called."""
        has = name != "optimizer" and not name.startswith("_") and hasattr(self.optimizer, name)
        raise AttributeError(
            f"pipe.optimizer wraps {self.kind}: {name} is opt.optimizer.{name}, which has the parameters of "
            "this rank alone, so it must need no values of others."
            if has
            else f"{type(self).__name__!r} object has no attribute {name!r}"
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Refuse a GradScaler, whose ``step`` asks this: it would divide what it never multiplied."""
        raise RunError(NO_SCALER)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clip and update; return the result of ``closure``, which is called first, if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._script_changes is not None:
            self._script_changes.compare()
        self.settle()
        self._turns.updates()
        self.counts.updates += 1
        self.counts.called("step")
        if not self._clipping.asks:
            self._make(None)
        elif self._validation == "post" and self._ranks is not None:
            self._begin(self._ranks)
        else:
            self._finish(self.grad_norm())
        self._changed()  # where an update was left out, too: replicas have to agree on it
        self._tell_of_update()
        return loss

    def _tell_of_update(self) -> None:
        if self._script_changes is not None:
            self._script_changes.writes.updated()

    @property
    def last_norm(self) -> torch.Tensor | None:
        """The norm before clipping, 0-d, where the last step computed it.  Waits for all ranks."""
        self.settle()
        return self._last_norm

    @property
    def known_norm(self) -> torch.Tensor | None:
        """``last_norm`` of the last update that stands, without a wait for other ranks."""
        return self._last_norm

    @property
    def skipped(self) -> int:
        """The number of steps that were left out as gradients were not finite.  Waits for all ranks."""
        self.settle()
        return self._skipped

    def settle(self) -> None:
        """Wait until the last update stands, where it was made ahead of the other ranks' verdict.

        Before a user reads or changes parameters, gradients or the optimizer's state by himself; what fxpipe
        does with them waits by itself.
        """
        self._updates.settle()

    def _finish(self, norm: torch.Tensor) -> None:
        """Clip and update, or leave the update out.  norm: of the gradients of all ranks."""
        self._last_norm = norm
        if self._clipping.leaves_out(norm):
            self._skip(norm)
            return
        self._nonfinite.clear()
        self._make(norm)

    def _make(self, norm: torch.Tensor | None) -> None:
        """Clip by a norm, if there is one, and update; as a replay, where there is one."""
        if self._replays is None or any(self._is_left_out(p.grad) for p in self._parameters()):
            self._clip_and_update(norm)
        else:
            self._replays.make(self._clip_and_update, norm)

    def _clip_and_update(self, norm: torch.Tensor | None) -> None:
        if norm is not None and self._clipping.largest is not None:
            clip_grads_with_norm_(self._parameters(), self._clipping.largest, norm)
        self._update()

    def _skip(self, norm: torch.Tensor) -> None:
        self._skipped += 1
        self._nonfinite.append(float(norm))
        last, most = self._nonfinite, self._clipping.most_skipped
        if len(last) > most:
            raise RunError(
                f"The gradients of {len(last)} steps in a row were not finite, and {most} may be left out: "
                f"those of the updates {self.counts.updates - most} to {self.counts.updates}, with norms "
                f"{', '.join(map(str, last[:8]))}{', …' if len(last) > 8 else ''}. Go on from an earlier "
                "checkpoint with a lower learning rate, look for the first NaN in the outputs of a step, or "
                f"allow more with skip_nonfinite={2 * most}."
            )

    def _begin(self, ranks: Process) -> None:
        """Begin to tell all ranks of the gradients of this one; update at once if that is likely to stand."""
        number, now = self._number().cpu(), time.perf_counter()
        seconds, self._begun = number.new_tensor(now - self._begun), now
        # The policy is asked in any case: all ranks must count the same updates to decide alike.
        goes_ahead = self._pace.goes_ahead() and self._is_likely(number, ranks.world_rank)
        # A hook reads what the update gives, and runs once.
        goes_ahead = goes_ahead and not (has_step_hooks(self) or has_step_hooks(self.optimizer))
        numbers = torch.stack([number, seconds])
        words = torch.cat([numbers.view(torch.int64), torch.tensor([goes_ahead], device="cpu")])
        gathered = ranks.begin_gather(words, "optimizer.step")  # travels while this rank updates
        updated, parameters = self._updated(), self._parameters()
        self._ahead = ahead = SpeculativeUpdate(gathered, None, [p.grad for p in parameters])
        if goes_ahead:
            earlier = self._undo
            ahead.undo = self._undo = Rollback.of(self.optimizer, earlier)
            if earlier is not None:  # the first copies take longer: they get their memory
                self._pace.copies = time.perf_counter() - ahead.begun
            self._update()
            for target, parameter, grad in zip(updated, parameters, ahead.grads, strict=True):
                name = self.names[target]
                ahead.watch(f"The parameter {name}", parameter)
                if target is not parameter:
                    ahead.watch(f"The master of {name}", target)
                if grad is not None:
                    ahead.watch(f"The gradient of {name}", grad)
        # Behind the update, as an error in that leaves none to be settled.
        self._updates.begin(self._settle, ahead.check)
        if not goes_ahead:
            self.settle()

    def _is_likely(self, number: torch.Tensor, rank: int) -> bool:
        """Whether an update is likely to stand: with the last numbers of the other ranks it would."""
        if not math.isfinite(number) or self._clipping.largest is None:
            return math.isfinite(number)
        if self._numbers is None:
            return False
        numbers = self._numbers.clone()
        numbers[rank] = number
        return self._clipping.is_plain(self._norm(numbers))

    def _settle(self) -> bool:
        """Wait for the numbers of all ranks, and correct an update that was wrong.

        Returns whether what the ranks have computed since then stands, the same on all of them.
        """
        ahead, self._ahead = self._ahead, None
        assert ahead is not None
        table = ahead.gathered()
        self._numbers, seconds = table[:, :2].T.contiguous().view(torch.float64)
        self._pace.measured(float(seconds.mean()))
        norm = self._last_norm = self._norm(self._numbers)
        is_plain = self._clipping.is_plain(norm)
        if ahead.undo is None:
            self._pace.waited(time.perf_counter() - ahead.begun)
            self._finish(norm)
        elif is_plain:
            self._nonfinite.clear()
        else:
            with ahead.taken_back(self.optimizer, self._parameters()):
                self._give_masters()
                self._changed()
                self._finish(norm)
            self._tell_of_update()
        if ahead.zeroes:
            self._zero()
        return is_plain or not table[:, 2].any()

    @torch.no_grad()
    def _update(self) -> None:
        """Step the wrapped optimizer on gradients of the dtype of what it updates; then give the parameters
        the values of their masters."""
        accumulated, left_out = {}, dict[Parameter, torch.Tensor]()
        for updated, parameter in zip(self._updated(), self._parameters(), strict=True):
            grad = parameter.grad
            if grad is not None and self._is_left_out(grad):
                left_out[parameter], parameter.grad = grad, None
            elif grad is not None and (updated is not parameter or grad.dtype != updated.dtype):
                accumulated[updated] = grad
                set_grad(updated, grad.to(updated.dtype))
        try:
            self.optimizer.step()
        finally:  # an error must not leave the user's gradients cast, nor masters with gradients
            set_grads([*left_out], [*left_out.values()])
            for updated, grad in accumulated.items():
                if updated in self.masters:
                    updated.grad = None
                else:
                    set_grad(updated, grad)
        self._give_masters()

    def _is_left_out(self, grad: torch.Tensor | None) -> bool:
        return grad is not None and self._leaves_zeroed_out and is_zeroed(grad)

    @torch.no_grad()
    def _give_masters(self) -> None:
        if self.masters:
            copy_each([*self.masters.values()], [*self.masters])

    def _updated(self) -> list[Parameter]:
        """The parameters, or masters, that the wrapped optimizer updates."""
        return [updated for group in self._updated_by_group() for updated in group]

    def _updated_by_group(self) -> list[list[Parameter]]:
        return [group["params"] for group in self.param_groups]

    def _parameters(self) -> list[Parameter]:
        """The model's parameters, in the same order."""
        return [self.masters.get(updated, updated) for updated in self._updated()]

    @torch.no_grad()
    def grad_norm(self) -> torch.Tensor:
        """The norm of all gradients of the model, on every rank; 0-d, of dtype float64.

        Waits for all ranks.
        """
        return self.begin_norm()()

    @torch.no_grad()
    def clip_grad_norm_(self, largest: float) -> torch.Tensor:
        """Clip the gradients of the whole model before ``step``; return the norm that they had, as
        ``grad_norm`` does.

        For a script that uses the clipped gradients; ``pipe.optimizer(…, clip_grad_norm=…)`` clips in
        ``step``.  Waits for all ranks.  Raises OptionError for a norm that is no number above 0.
        """
        check_norm("clip_grad_norm", largest)
        self.settle()
        norm = self.grad_norm()
        clip_grads_with_norm_(self._parameters(), largest, norm)
        return norm

    def begin_norm(self) -> Callable[[], torch.Tensor]:
        """Start to compute the norm of all gradients, of which each rank has its number; return the function
        that waits for the other ranks, and gives it."""
        if self._script_changes is not None:
            self._script_changes.norm_asked()
        number = self._number()
        if self._ranks is None:
            return lambda: self._clipping.norm(number)
        words = number.cpu().reshape(1).view(torch.int64)
        gathered = self._ranks.begin_gather(words, called_function())
        return lambda: self._norm(gathered()[:, 0].contiguous().view(torch.float64))

    @torch.no_grad()
    def _number(self) -> torch.Tensor:
        return self._clipping.number([p.grad for p in self._counted if p.grad is not None])

    def _norm(self, numbers: torch.Tensor) -> torch.Tensor:
        """The norm of which these are the numbers of all ranks."""
        device = next((p.device for p in self._counted), None)
        return self._clipping.norm(self._clipping.total(numbers).to(device))

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Zero the gradients.  By default they keep their memory, which saves its allocation in each step,
        and an update leaves out those to which nothing was added since, as if they were None.

        Those of an update that may have to be made again are zeroed when it stands.
        """
        self._leaves_zeroed_out = set_to_none is not False
        self.counts.zeroed += 1
        self.counts.called("zero_grad")
        if set_to_none:
            for parameter in self._parameters():
                parameter.grad = None
        elif self._ahead is not None:
            self._ahead.zeroes = True
        else:
            self._zero()

    @torch.no_grad()
    def _zero(self) -> None:
        grads = [grad for parameter in self._parameters() if (grad := parameter.grad) is not None]
        if grads:
            zero_each(grads)
            mark_zeroed(grads)

    def train(self) -> None:
        """Go on to train after ``eval``; for optimizers that have modes, as schedule-free ones have."""
        self._switch("train")

    def eval(self) -> None:
        """Give the parameters the values that are evaluated, and saved, where an optimizer has such."""
        self._switch("eval")

    @torch.no_grad()
    def _switch(self, mode: str) -> None:
        self.settle()
        self.counts.called(mode)
        for optimizer in dict.fromkeys(self.of_groups):
            if callable(switch := getattr(optimizer, mode, None)):
                switch()
                self._give_masters()
                self._changed()

    @property
    def of_groups(self) -> Sequence[Optimizer]:
        """The optimizer that updates each group."""
        if isinstance(self.optimizer, SeveralOptimizers):
            return self.optimizer.of_groups
        return [self.optimizer] * len(self.param_groups)

    @property
    def kind(self) -> str:
        """The classes of what is wrapped, as text."""
        return " and ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in self.of_groups))

    def options(self) -> dict[str, str]:
        """The options on which an update depends, as texts by name."""
        rules = self._clipping
        clipping: dict[str, object] = {"clip_grad_norm": rules.largest, "norm_type": rules.norm_type}
        clipping |= {"skip_nonfinite": rules.skip_nonfinite, "validation": self._validation}
        options = {"class": self.kind} | {name: _as_text(x) for name, x in clipping.items()}
        for k, group in enumerate(self.param_groups):
            at = f"groups[{k}]." if len(self.param_groups) > 1 else ""
            options |= {f"{at}{name}": _as_text(x) for name, x in group.items() if name != "params"}
        return options

    def state_of(self, updated: Parameter) -> dict[str, object]:
        """The wrapped optimizer's state of what it updates, with the master itself."""
        self.settle()
        master = {MASTER: updated.detach()} if updated in self.masters else {}
        return {**self.state.get(updated, {}), **master}

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state of this rank's parameters, with their names, and their masters.
        ``Checkpointer`` saves that of all ranks, by the model's names."""
        self.settle()
        masters = {k: self.state_of(x) for k, x in enumerate(self._updated()) if x in self.masters}
        return named_state(self.optimizer, masters, self._updated_by_group(), self.names)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Masters that the state does not hold get the values of the parameters.  Raises OptionError for what
        is no state of an optimizer, and for the state of other parameters: of another rank, or of a pipeline
        that was cut otherwise."""
        check_parameters(state_dict, self._updated_by_group(), self.names)
        self.settle()
        self.counts.called("load_state_dict")
        inner, masters = without_masters(state_dict)
        if masters and not self.masters:
            warnings.warn(
                "The state holds master weights, and this optimizer has none: training goes on with the "
                "parameters, which have fewer bits. Make it with master_weights=True to keep them.",
                stacklevel=2,
            )
        self.optimizer.load_state_dict(inner)
        if self._replays is not None:
            self._replays.restart()
        for k, updated in enumerate(self._updated()):
            if updated in self.masters:
                updated.copy_(masters.get(k, self.masters[updated]))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse later groups, as all ranks must have the same; torch's constructor calls this."""
        if self._made:
            raise RunError("Groups are given when the optimizer is made: pipe.optimizer(…, groups=[…]).")
        self.optimizer.param_groups.append(param_group)


def _as_text(value: object) -> str:
    """An option as text that is the same on all ranks, whose last digits may differ."""
    match value:
        case torch.Tensor() if value.numel() == 1 and value.device.type == "cpu":
            return _as_text(value.item())
        case float():
            return f"{value:.9g}"
        case None | bool() | int() | str():
            return str(value)
        case list() | tuple():
            return f"({', '.join(map(_as_text, value))})"
    return type(value).__name__
