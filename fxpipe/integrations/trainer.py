"""Hugging Face's Trainer on a pipeline, under torchrun: a process for each rank.

Trainer's loop calls             which here is
training_step                    kept until the last one of an update, then a step of the pipeline
optimizer.step, the norm         those of ``pipe.optimizer``, which clips by the norm of all ranks
prediction_step                  ``pipe.evaluate``
save_model                       the whole model on the first rank, as ``save_pretrained`` writes it
saving and loading of a state    a ``Checkpointer`` in the directory ``fxpipe`` of a checkpoint
"""

from __future__ import annotations

import glob
import shutil
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

try:
    import accelerate  # noqa: F401 - without it transformers' Trainer begins, and fails later
    import transformers
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"fxpipe's Trainer needs transformers and accelerate: pip install 'fxpipe[trainer]' ({error})"
    ) from error

import fxpipe
from fxpipe.errors import ArtifactError, OptionError
from fxpipe.integrations.sizes import Microbatch, Sizes, rows_of
from fxpipe.integrations.trainer_arguments import check_arguments, check_given, check_optimizer
from fxpipe.integrations.trainer_loss import COUNT, counted, is_mean, loss_of
from fxpipe.integrations.trainer_process import (
    as_first,
    as_only_process,
    kept_random_numbers,
    ranks_of,
    together,
)

#: The directory in a checkpoint of the Trainer from which training goes on.
_STATE = "fxpipe"


class Trainer(transformers.Trainer):
    """``transformers.Trainer`` whose steps are those of a pipeline.

    pipeline: options of ``fxpipe.compile`` (schedule, memory_limit, recompute …).  ``ranks`` is by default
        the number of processes.  ``example``: a microbatch as the collator makes it, by default of the first
        rows of the training data; with ``dimensions`` one of the longest.
    outputs: the tensors of the model's output that ``predict`` and ``compute_metrics`` get.
    weights: a directory of Hugging Face, from which each rank reads its part of a model on the meta device.
    figures: whether those of ``pipe.figures()`` are logged with the loss.
    All else is as for ``transformers.Trainer``.  A microbatch has ``per_device_train_batch_size`` rows, and a
    step ``gradient_accumulation_steps`` microbatches.  A collator may make a list of microbatches of so many
    rows, as ``fxpipe.pack`` does: with ``dimensions``, ``example`` and ``microbatches``, for how many of a
    step the schedule is.

    Losses, norms, learning rates, metrics and weights are those of ``transformers.Trainer`` in one process,
    but for the random numbers of dropout.  ``pipe`` is compiled by the first call of ``train``, ``evaluate``
    or ``predict``; all ranks make the same calls.
    Raises OptionError, on all ranks, for arguments that have no meaning for a pipeline.
    """

    model: Any
    state: Any
    lr_scheduler: Any

    def __init__(
        self,
        model: nn.Module,
        args: Any = None,
        *more: Any,
        pipeline: Mapping[str, Any] | None = None,
        outputs: Sequence[str] = ("logits",),
        weights: str | Path | None = None,
        figures: bool = False,
        **named: Any,
    ):
        args = args if args is not None else transformers.TrainingArguments("tmp_trainer")
        check_arguments(args)
        check_given(type(self), transformers.Trainer, model, named, pipeline or {})
        ranks = ranks_of(model, (pipeline or {}).get("ranks"), args)
        as_only_process(args)
        self._options, self._outputs, self._figures = {**(pipeline or {}), "ranks": ranks}, outputs, figures
        self._updates: Any = None
        self._accumulated = 0
        self._given: list[list[Microbatch]] = []
        super().__init__(model, args, *more, **named)
        if self.optimizer is not None or self.lr_scheduler is not None:
            raise OptionError(
                "optimizers= are made of a whole model: give optimizer_cls_and_kwargs=(class, options), and "
                "the scheduler by lr_scheduler_type."
            )
        first = None if weights is None else Path(weights)
        self._sizes = Sizes(self.model, self._options, loss_of(self), partial(_context, args), first)

    @property
    def pipe(self) -> fxpipe.Pipeline | None:
        """The pipeline; None before it is compiled."""
        return self._sizes.first

    def get_train_dataloader(self) -> Any:
        with as_first(self.args):  # workers of all ranks draw the same random numbers
            return super().get_train_dataloader()

    def _compile(self) -> fxpipe.Pipeline:
        """The pipeline that trains."""
        if self.pipe is not None:
            if not self.pipe.plan.trains:
                raise OptionError("This Trainer has evaluated without training data: make another to train.")
            return self.pipe
        example = self._example()
        count = self._get_num_items_in_batch([example], self.args.device)
        self._accumulated = self.args.gradient_accumulation_steps
        microbatches = self._options.get("microbatches", self._accumulated)
        if microbatches == 1 and self._options["ranks"] > 1 and self.args.process_index == 0:
            warnings.warn(
                "gradient_accumulation_steps=1 makes steps of one microbatch, in which ranks run one after "
                "the other. Give several times as many as ranks, and per_device_train_batch_size fewer rows.",
                stacklevel=2,
            )
        mean = is_mean(self, count)
        return self._sizes.compile_first(counted(example, count), microbatches, is_mean=mean)

    def _example(self) -> dict[str, Any]:
        if "example" in self._options:
            return self._prepare_inputs(dict(self._options["example"]))
        with kept_random_numbers():
            loader, rows = self.get_train_dataloader(), self._train_batch_size
            data = loader.dataset
            is_stream = isinstance(data, torch.utils.data.IterableDataset)
            items = [*islice(data, rows)] if is_stream else [data[k % len(data)] for k in range(rows)]
            (example,) = self._microbatches(loader.collate_fn(items))
            return example

    def _microbatches(self, inputs: Any) -> list[dict[str, Any]]:
        """Make microbatches of a collator's result.  Raises OptionError for a list that was not announced."""
        if isinstance(inputs, list) and not self._sizes.takes_lists:
            raise OptionError(
                "The collator makes lists of microbatches: give pipeline={'dimensions': {'sequence': the "
                "longest}, 'example': a microbatch of that, 'microbatches': about how many make a step}."
            )
        parts = inputs if isinstance(inputs, list) else [inputs]
        return [self._prepare_inputs(dict(each)) for each in parts]

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        parts = [part for each in batch_samples for part in (each if isinstance(each, list) else [each])]
        return super()._get_num_items_in_batch(parts, device)

    def floating_point_ops(self, inputs: Any) -> int:
        parts = inputs if isinstance(inputs, list) else [inputs]
        return sum(super(Trainer, self).floating_point_ops(each) for each in parts)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        for each in inputs if isinstance(inputs, list) else [inputs]:
            super()._track_num_input_tokens(each)  # type: ignore[no-untyped-call]

    # Steps

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        self._given = []
        if self._accumulated not in (0, self.args.gradient_accumulation_steps):
            raise OptionError(
                f"gradient_accumulation_steps was {self._accumulated} when the pipeline was compiled, and is "
                f"{self.args.gradient_accumulation_steps}: make another Trainer for steps of another size."
            )
        return super().get_batch_samples(*args, **kwargs)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Keep a microbatch; run the step with the last one of an update.  Returns the loss of the step then
        and 0 before: their sum is that of what ``transformers.Trainer`` returns."""
        if self._updates is None:
            raise OptionError(
                f"{type(self).__name__} makes its optimizer of the whole model, of which a rank holds a "
                "part: give optimizer_cls_and_kwargs=(class, options), and remove its create_optimizer."
            )
        if callable(switch := getattr(self.optimizer, "train", None)):
            switch()
        parts = self._microbatches(inputs)
        self._given.append([counted(each, num_items_in_batch) for each in parts])
        if len(self._given) < self.current_gradient_accumulation_steps:
            return torch.zeros((), device=self.args.device)
        loss = self._sizes.step(self._given, is_mean=is_mean(self, num_items_in_batch))
        return loss.to(self.args.device)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return model if isinstance(model, _OnRanks) else _OnRanks(model, self)

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Compile the pipeline, and make the optimizer of this rank's parameters."""
        if self.optimizer is None:
            args = self.args
            of_args = self.get_optimizer_cls_and_kwargs(args, self.model)
            kind, options = self.optimizer_cls_and_kwargs or of_args
            check_optimizer(kind, options, args.optim)
            pipe = self._compile()
            decayed = {*self.get_decay_parameter_names(self.model)}
            trained = [name for name, p in self.model.named_parameters() if p.requires_grad]
            parts = [name for name in trained if name in decayed], [n for n in trained if n not in decayed]
            groups = [
                {"params": [*map(glob.escape, names)], "weight_decay": decay}
                for names, decay in zip(parts, (args.weight_decay, 0.0), strict=True)
                if names
            ]
            self._updates = pipe.optimizer(kind, groups=groups, **options)
            self.optimizer = self._updates
        return self.optimizer

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        return self._updates.clip_grad_norm_(self.args.max_grad_norm)  # type: ignore[no-any-return]

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> torch.Tensor:
        return self._updates.grad_norm() if grad_norm is None else grad_norm  # type: ignore[no-any-return]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if self._figures and "grad_norm" in logs and self.pipe is not None:
            figures = self.pipe.figures()
            logs |= {name: x for name, x in figures.items() if name not in ("step", "norm")}
        super().log(logs, *args, **kwargs)

    # Evaluation

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        if self.train_dataset is not None:
            self._compile()
        return super().evaluation_loop(*args, **kwargs)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        if isinstance(inputs, list):
            return self._evaluated(inputs, prediction_loss_only), None, None
        inputs = self._prepare_inputs(dict(inputs))
        has_labels = bool(self.label_names) and all(inputs.get(name) is not None for name in self.label_names)
        has_loss = has_labels or (not self.label_names and self.can_return_loss)
        names = [] if prediction_loss_only else [n for n in self._outputs if n not in (ignore_keys or ())]
        if not has_loss and not names:
            return None, None, None
        sizes = self.args.per_device_train_batch_size, self.args.eval_batch_size
        if has_loss and self.compute_loss_func is not None:  # it may divide by the rows of the batch
            sizes = (rows_of(inputs),) * 2
        count = self._divisor([inputs]) if has_loss else None
        batch = counted(inputs, count)
        result = self._sizes.evaluate(batch, *sizes, names, has_loss=has_loss, divisor=COUNT)
        loss = None if result.loss is None else result.loss.to(self.args.device)
        if prediction_loss_only:
            return loss, None, None
        labels = _only([inputs[name] for name in self.label_names]) if has_labels else None
        return loss, _only([result.outputs[name].to(self.args.device) for name in names]), labels

    def _evaluated(self, inputs: list[Any], prediction_loss_only: bool) -> torch.Tensor:
        """The loss of a list of microbatches."""
        if not prediction_loss_only:
            raise OptionError(
                "The collator makes lists of microbatches, which have no rows to predict: leave out "
                "compute_metrics, or give evaluation a collator of its own by get_eval_dataloader."
            )
        parts = self._microbatches(inputs)
        count = self._divisor(parts)
        return self._sizes.evaluate_list([counted(each, count) for each in parts]).to(self.args.device)

    def _divisor(self, microbatches: list[Any]) -> Any:
        """The number of labels by which the loss of an evaluation divides; None: by its own."""
        if getattr(self, "_loss_shifts_labels", True) and self.compute_loss_func is None:
            return None
        return self._get_num_items_in_batch(microbatches, self.args.device)

    # Saving, and going on

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model as ``save_pretrained`` does; all ranks call it, and wait for the first."""
        if self.pipe is None:
            return super().save_model(output_dir, _internal_call)
        state = self.pipe.full_state_dict()
        with together(self.pipe, "save the model"):
            if self.args.should_save:
                self._save(output_dir, state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        pipe, directory = self._compile(), Path(output_dir) / _STATE
        with together(pipe, "save the optimizer"):
            if self.args.should_save:  # Trainer writes over an earlier run in its directory
                shutil.rmtree(directory, ignore_errors=True)
        with self._kept(directory) as kept:
            kept.save()

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:  # all ranks have the same states, and read this file
            super()._save_rng_state(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        path = Path(resume_from_checkpoint)
        if (path / "optimizer.pt").exists():
            raise ArtifactError(
                f"{path} is of transformers.Trainer, whose optimizer keeps its state in another form. To go "
                "on with the weights and a new optimizer, open it by from_pretrained."
            )
        if not (path / _STATE).is_dir() and not [*path.glob("*.safetensors*")]:
            raise ArtifactError(f"{path} is no checkpoint of the Trainer.")
        if not (path / _STATE).is_dir() or any(p.is_meta for p in self.model.parameters()):
            if self.pipe is None:
                self._sizes.weights = path
            else:
                self.pipe.load_state_dict(path)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and (directory := Path(checkpoint) / _STATE).is_dir():
            with self._kept(directory) as kept:
                kept.resume()

    def _load_best_model(self) -> None:
        pipe, path = self._compile(), Path(self.state.best_model_checkpoint)
        if not (path / _STATE).is_dir():
            pipe.load_state_dict(path)
            return
        number = pipe.step_number
        with fxpipe.Checkpointer(pipe, path / _STATE) as kept:
            kept.resume()
        pipe.step_number = number

    def _kept(self, directory: Path) -> fxpipe.Checkpointer:
        state = {"lr_scheduler": self.lr_scheduler}
        pipe, updates = self._compile(), self._updates
        return fxpipe.Checkpointer(pipe, directory, optimizer=updates, state=state, asynchronous=False)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not any(p.is_meta for p in model.parameters()):
            super()._move_model_to_device(model, device)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        raise OptionError("hyperparameter_search makes a model for each trial: start a run for each instead.")


class _OnRanks(nn.Module):
    """What the loop of the Trainer takes for its model: the parameters are on the ranks of the pipeline."""

    def __init__(self, model: nn.Module, trainer: Trainer):
        super().__init__()
        self.model = model
        self._of = (trainer,)  # in a tuple, as it is no module of this one

    def zero_grad(self, set_to_none: bool = True) -> None:
        (trainer,) = self._of
        if trainer._updates is not None:
            trainer._updates.zero_grad()

    def train(self, mode: bool = True) -> _OnRanks:
        return self  # a program has its mode

    def forward(self, *args: object, **kwargs: object) -> None:
        raise OptionError(
            "The model runs in steps of the pipeline alone: give its loss as compute_loss_func."
        )


def _context(args: Any) -> Any:
    """Autocast where the arguments ask for it."""
    return torch.autocast(args.device.type, torch.bfloat16) if args.bf16 else nullcontext()


def _only(values: Sequence[Any]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)
