"""What of the arguments of Hugging Face's Trainer has no meaning for a pipeline: one sentence for each.

All processes have the same arguments, so all of them refuse alike, before anything long begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from fxpipe.errors import OptionError

#: Argument of TrainingArguments -> whether a value is refused, and why.
_REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "deepspeed": (bool, "the ranks of the pipeline hold the model; leave it out"),
    "fsdp": (bool, "the ranks of the pipeline hold the model; leave it out"),
    "parallelism_config": (bool, "the pipeline is the parallelism; leave it out"),
    "fp16": (bool, "a pipeline has no GradScaler; use bf16=True"),
    "fp16_full_eval": (bool, "the weights that are evaluated are those that are trained; leave it out"),
    "bf16_full_eval": (bool, "the weights that are evaluated are those that are trained; leave it out"),
    "torch_compile": (bool, 'stages are compiled by pipeline={"backend": "inductor"}; leave it out'),
    "auto_find_batch_size": (bool, "a pipeline is compiled for one size; give a memory_limit in pipeline="),
    "neftune_noise_alpha": (
        lambda x: x is not None,
        "hooks of a model stay as they were when it was compiled; add the noise in its forward",
    ),
    "debug": (bool, "hooks of modules do not run in a step; use pipe.step(batch, check='finite')"),
    "enable_jit_checkpoint": (bool, "one rank alone would write; use save_steps"),
    "save_on_each_node": (bool, "the first rank writes the files of all; leave it out"),
    "train_sampling_strategy": (
        lambda x: x == "batch_rebalance",
        "its batches have different numbers of rows; use another one",
    ),
}
#: Methods of Trainer that are not public and that fxpipe's replaces, or calls.
_REPLACED = (
    "_clip_grad_norm", "_get_grad_norm", "_get_num_items_in_batch", "_load_best_model",
    "_load_from_checkpoint", "_load_optimizer_and_scheduler", "_move_model_to_device", "_prepare_inputs",
    "_save", "_save_optimizer_and_scheduler", "_save_rng_state", "_track_num_input_tokens", "_wrap_model",
)  # fmt: skip
#: Options of ``fxpipe.compile`` that follow from those of the Trainer.
_FOLLOW = (
    "microbatches", "batch", "devices", "replicas", "shard", "loss_fn", "mean", "gradients", "evaluation",
    "outputs", "like",
)  # fmt: skip
#: What a class for optimizers gets of the model itself, which no rank holds whole.
_OF_MODEL = ("params", "model", "optimizer_dict")


def check_arguments(args: Any) -> None:
    """Raise OptionError for the first argument that is refused."""
    for name, (is_refused, why) in _REFUSED.items():
        value = getattr(args, name, None)
        if is_refused(value):
            raise OptionError(f"{name}={value!r:.60} has no meaning for fxpipe's Trainer: {why}.")


def check_given(
    cls: Any, plain: Any, model: object, named: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Raise OptionError for other arguments of the constructor that cannot be.

    cls, plain: the class, and that of transformers.  named: what goes to that.  options: of the pipeline.
    """
    lacking = [name for name in _REPLACED if not hasattr(plain, name)]
    if lacking:
        raise OptionError(
            f"fxpipe's Trainer needs a transformers whose Trainer has {lacking[0]}, as 5.23 does."
        )
    if not isinstance(model, nn.Module) or named.get("model_init") is not None:
        raise OptionError("fxpipe's Trainer takes a model, and no model_init: make the model before.")
    if cls.compute_loss is not plain.compute_loss:
        raise OptionError(
            f"{cls.__name__} has a compute_loss of its own, and the model runs on several ranks: give what "
            "is behind its output as compute_loss_func=(outputs, labels, num_items_in_batch) -> loss."
        )
    if options.get("validation") == "post":
        raise OptionError(
            "pipeline has validation='post', and the Trainer has the norm of each step before its callbacks "
            "run: leave it out."
        )
    for name in _FOLLOW:
        if name in options and not (name == "microbatches" and {"dimensions", "example"} <= options.keys()):
            raise OptionError(
                f"pipeline has {name!r}, which follows from the arguments of the Trainer: a microbatch has "
                "per_device_train_batch_size rows, and a step gradient_accumulation_steps microbatches."
            )


def check_optimizer(kind: object, options: Mapping[str, Any], name: Any) -> None:
    """Raise OptionError for an optimizer that is made of the model, or by a function of it."""
    if not isinstance(kind, type) or any(option in options for option in _OF_MODEL):
        raise OptionError(
            f"optim={getattr(name, 'value', name)!r} is made of the whole model, of which a rank holds a "
            "part. Use another one, such as adamw_torch, or give optimizer_cls_and_kwargs=(class, options)."
        )
