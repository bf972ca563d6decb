"""A step of a LightningModule as a model that fxpipe compiles.

training_step(batch, batch_idx)      ──►   forward(batch) -> {"loss": loss, "logged": [1 + n]}
    self.log("train_loss", loss)           calls: ("train_loss", {…}), …
    return loss
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NoReturn

import torch
from lightning.pytorch import LightningModule
from torch import nn

from fxpipe.errors import OptionError
from fxpipe.runtime.torch_private import storage_number

#: What a step cannot use of a LightningModule: a program would compute with the values of the first one, and
#: has no optimizers and no processes.
_ABSENT = (
    "current_epoch", "global_step", "trainer", "fabric", "global_rank", "local_rank", "logger", "loggers",
    "manual_backward", "optimizers", "lr_schedulers", "toggle_optimizer", "untoggle_optimizer", "all_gather",
)  # fmt: skip

#: By the names that ``self.log`` has for them.
_REDUCTIONS: dict[Any, Any] = {"mean": torch.mean, "sum": torch.sum, "max": torch.amax, "min": torch.amin}


@dataclass(frozen=True)
class Logged:
    """What a step logs.  ``calls``: name and options of each; ``losses``: the places of those that log the
    loss itself."""

    calls: tuple[tuple[str, dict[str, Any]], ...]
    losses: tuple[int, ...]

    def give(self, module: LightningModule, values: torch.Tensor, loss: torch.Tensor | None) -> None:
        """Log what the microbatches have, reduced as Lightning reduces steps, by their mean if it is not said
        otherwise.  values: [microbatches · (1 + calls)]."""
        by_call = values.view(-1, 1 + len(self.calls)).T[1:]
        for place, ((name, options), of_each) in enumerate(zip(self.calls, by_call, strict=True)):
            reduce = options.get("reduce_fx", "mean")
            value = _REDUCTIONS.get(reduce, reduce)(of_each)
            module.log(name, value if loss is None or place not in self.losses else loss, **options)


class TracedStep(nn.Module):
    """Computes what a step of the module returns and logs; its tensors are the module's own."""

    PREFIX = "module."

    def __init__(self, module: LightningModule, name: str):
        super().__init__()
        self.name = name
        parameters = inspect.signature(getattr(module, name)).parameters
        if "dataloader_iter" in parameters:
            raise OptionError(f"{name} takes dataloader_iter: let it take a batch.")
        # Lightning passes the numbers of batch and loader by place, under whatever names.
        self.numbers = [
            each.name
            for each in [*parameters.values()][1:]
            if each.name in ("batch_idx", "dataloader_idx")
            or (each.kind is each.POSITIONAL_OR_KEYWORD and each.default is each.empty)
        ]
        self.module: Any = _apart(module)
        self._of_lightning = {"log", "log_dict", *vars(LightningModule())}
        # A compilation puts attributes back as they were, but for queues.
        self._told: SimpleQueue[Logged] = SimpleQueue()

    def follow(self, module: LightningModule) -> None:
        """Give the module's copy what hooks or a script have set since: a step compares its attributes with
        those that were compiled."""
        now = ((name, x) for name, x in vars(module).items() if name not in self._of_lightning)
        vars(self.module).update(now)

    def logged(self) -> Logged | None:
        """What the step has logged when it was traced; None on a rank that did not trace it."""
        logged = None
        while not self._told.empty():
            logged = self._told.get()
        return logged

    def forward(self, batch: Any) -> dict[str, torch.Tensor]:
        calls: list[tuple[str, dict[str, Any]]] = []
        values: list[Any] = []

        def log(name: str, value: Any, *more: object, **options: Any) -> None:
            if more or not isinstance(value, torch.Tensor | int | float):
                raise OptionError(
                    f"self.log({name!r}, …) in {self.name} takes a tensor or a number, and options by name; "
                    f"it gets a {type(value).__name__}. Log what else there is in a hook, such as "
                    "on_train_batch_end."
                )
            calls.append((name, {key: x for key, x in options.items() if key != "sync_dist"}))
            values.append(value)

        def log_dict(dictionary: Mapping[str, Any], **options: Any) -> None:
            for name, value in dictionary.items():
                log(name, value, **options)

        self.module.log, self.module.log_dict = log, log_dict
        numbers = {number: _NoNumber(number) for number in self.numbers}
        result = getattr(self.module, self.name)(batch, **numbers)
        loss = result.get("loss") if isinstance(result, Mapping) else result
        tensors = [x for x in (loss, *values) if isinstance(x, torch.Tensor)]
        if not tensors:
            raise OptionError(f"{self.name} returns no loss and logs no tensor: there is nothing to compute.")
        first = tensors[0].detach().reshape(())
        losses = (k for k, x in enumerate(values) if x is loss or _is_detached(x, loss))
        self._told.put(Logged(tuple(calls), tuple(losses)))
        found = {"logged": torch.stack([first, *(_number(x, first) for x in values)])}
        return found | {"loss": loss} if self.training and isinstance(loss, torch.Tensor) else found


def _is_detached(x: Any, loss: Any) -> bool:
    """Whether a value is a loss without its graph."""
    if not isinstance(x, torch.Tensor) or not isinstance(loss, torch.Tensor):
        return False
    return x.numel() == loss.numel() == 1 and storage_number(x) == storage_number(loss)


def _number(value: Any, like: torch.Tensor) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().reshape(()).to(like.dtype)
    return torch.full_like(like, value)


def _apart(module: LightningModule) -> LightningModule:
    """The module with its tensors and submodules, without the Trainer and what changes from step to step."""

    def absent(name: str) -> property:
        def refused(self: object) -> NoReturn:
            raise OptionError(
                f"A step of {type(module).__name__} uses self.{name}, which a program does not have. Compute "
                "with it in a hook, such as on_train_batch_end, or give a number with the batch."
            )

        return property(refused)

    apart = copy.copy(module)
    apart.__dict__["_trainer"] = None
    kind = type(module)
    # What fxpipe finds by the names in a step's code leads into the Trainer by none of these.
    own: dict[str, Any] = {name: absent(name) for name in _ABSENT} | {"log": _no_log, "log_dict": _no_log}
    apart.__class__ = type(kind.__name__, (kind,), own)
    return apart


def _no_log(module: object, *args: object, **kwargs: object) -> None:
    """A forward of ``TracedStep`` has its own in the place of this."""


class _NoNumber:
    """``batch_idx``, of which a program knows nothing: its use is an error."""

    def __init__(self, name: str):
        self.name = name


def _no_number(number: _NoNumber, *_: object) -> NoReturn:
    raise OptionError(
        f"The step uses {number.name}, which a program does not have. Compute with it in a hook, such as "
        "on_train_batch_end."
    )


_OPERATORS = "add sub mul floordiv truediv mod eq ne lt le gt ge int float index bool hash str"
for _operator in _OPERATORS.split(" "):
    setattr(_NoNumber, f"__{_operator}__", _no_number)
