"""The tensor and expert parallelism that transformers plans for its models, by ``parallelize_module``.

transformers' plan: {"model.layers.*.self_attn.q_proj": "colwise", …}, its own hooks, its own launcher
here:               parallelize(model, mesh["tp"]), and the model is compiled like any other
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fxpipe.errors import OptionError
from fxpipe.integrations.context import ContextParallel
from fxpipe.integrations.experts import ExpertParallel
from fxpipe.integrations.head_parallel import HeadParallel
from fxpipe.integrations.lane_values import with_summed_gradient
from fxpipe.integrations.padded_parallel import PaddedParallel
from fxpipe.integrations.summed_gradients import SummedGradients, local_parameters
from fxpipe.integrations.tensor_plan import dims_of

#: A word of transformers' plans -> the style of a module.
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel,
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_colwise": lambda: ColwiseParallel(output_layouts=Replicate()),
    "replicated_with_grad_allreduce": SummedGradients,
    "sequence_parallel": SequenceParallel,
}
#: Words of modules that all lanes hold whole where values are DTensors; torch's rules sum their gradients.
_WHOLE = (None, "replicate", "replicated_with_grad_allreduce", "sequence_parallel")
#: Words of an attention whose values have all heads on each lane; there norms have whole gradients.
_WHOLE_HEADS = {
    "colwise": "colwise_gather_output",
    "rowwise": "rowwise_split_input",
    "replicated_with_grad_allreduce": "replicate",
    "mla_kv_a_proj": "replicate",
}
#: Modules that give the heads of keys, and those of queries.
_OF_KEYS = ("k_proj", "qkv_proj", "kv_b_proj", "query_key_value", "c_attn", "Wqkv", "wqkv", "qkv")
_OF_QUERIES = ("q_proj", "q_norm", "o_proj")
#: Words of modules of experts, of which lanes hold some each; their parameters have words of their own.
_EXPERTS = ("moe_tp_experts", "ep_dispatch_experts")


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    experts: ExpertParallel | None = None,
    plan: Mapping[str, str] | None = None,
    context: Mapping[str, int] | None = None,
) -> nn.Module:
    """Distribute a model of transformers over the lanes of a mesh, by the plan of its configuration.

    Each lane gets some of the experts of a mixture, whole, also where the plan cuts each of them.  Where the
    lanes cannot share the heads of attention evenly, its projections give whole values, and ``HeadParallel``
    shares them out; other layers that they cannot share evenly are ``PaddedParallel``, or whole on all lanes
    along the second dimension of a mesh.  Weights that the model ties are tied again.  Returns the model, of
    which each process has all values before.

    mesh: of one dimension; with ``context`` of two, where lanes along the first divide the sequences and
        those along the second share the layers by the plan.
    experts: the style of experts; by default all tokens go through those of every lane.
    plan: module, as a pattern -> style; by default ``model.tp_plan`` with ``model.ep_plan``.
    context: the arguments whose sequences the lanes divide, with their dimension ({"input_ids": 1}), by
        ``ContextParallel``: then the lanes share nothing of the plan but experts.

    Raises OptionError for a style that has no counterpart, and a model without a plan.
    """
    words = dict(plan) if plan is not None else {**_plan(model, "tp"), **_plan(model, "ep")}
    if context is not None and mesh.ndim == 1:
        words = {path: word for path, word in words.items() if word in _EXPERTS}
    elif not words:
        raise OptionError(
            f"{type(model).__name__} has no plan of tensor parallelism. Give one by modules: "
            'parallelize(model, mesh, plan={"*.up": "colwise", "*.down": "rowwise"}).'
        )
    words, heads = _of_uneven_heads(model, mesh.size(-1), _with_tied(model, words))
    if mesh.ndim > 1:
        _share_beside_context(model, mesh, words, context, experts)
        return model
    for path, module in [*model.named_modules()]:
        word = words.get(_pattern(path))
        if word in _EXPERTS:
            _share_experts(module, mesh, experts)
        elif word == "local_params":
            of_own = {name: words.get(_pattern(f"{path}.{name}")) for name in _own(module)}
            _share_own_parameters(module, of_own, mesh)
        elif word == "mla_kv_a_proj":
            _sum_rotary_gradient(module, model.config.get_text_config().qk_rope_head_dim, mesh)  # type: ignore[union-attr, operator]
        elif word not in (None, "replicate"):
            if word not in _STYLES:
                raise OptionError(
                    f"The plan of {type(model).__name__} has {word!r} for {path}, which has no counterpart "
                    f"here. Give a plan without it (that module is then whole on all lanes). Known are "
                    f"{', '.join((*_STYLES, *_EXPERTS, 'local_params', 'mla_kv_a_proj'))}."
                )
            parallelize_module(module, mesh, _style(module, word, mesh))
        if _pattern(path) in heads:
            parallelize_module(module, mesh, HeadParallel(heads[_pattern(path)]))
    if context is not None:
        parallelize_module(model, mesh, ContextParallel(context))
    _tie(model)
    return model


def _style(module: nn.Module, word: str, mesh: DeviceMesh) -> ParallelStyle:
    style = _STYLES[word]()
    return PaddedParallel(style) if _is_uneven(module, style, mesh.size()) else style


def _is_uneven(module: nn.Module, style: ParallelStyle, lanes: int) -> bool:
    """Whether lanes cannot share a layer evenly."""
    if not (
        isinstance(module, nn.Linear | nn.Embedding) and isinstance(style, ColwiseParallel | RowwiseParallel)
    ):
        return False
    dims = dims_of(module, style, "The plan")
    return any(module.get_parameter(name).shape[dim] % lanes for name, dim in dims.items())


def _tie(model: nn.Module) -> None:
    if hasattr(model, "tie_weights"):
        model.tie_weights()  # type: ignore[operator]


def _share_experts(module: Any, mesh: DeviceMesh, experts: ExpertParallel | None) -> None:
    style = copy.copy(experts) if experts else ExpertParallel()
    # Experts of transformers that know of it skip those of other lanes.
    if hasattr(module, "_is_expert_parallel"):
        module._is_expert_parallel = style.skips = True
    parallelize_module(module, mesh, style)


def _share_beside_context(
    model: nn.Module,
    mesh: DeviceMesh,
    words: Mapping[str, str],
    context: Mapping[str, int] | None,
    experts: ExpertParallel | None,
) -> None:
    if context is None or mesh.ndim > 2:
        raise OptionError(
            "parallelize takes a mesh of one dimension, or of two with context=: sequences along the first, "
            f"the plan along the second; not {mesh.mesh_dim_names} with context={context}."
        )
    styles = {path: words.get(_pattern(path)) for path, _ in model.named_modules()}
    tensor: dict[str, ParallelStyle] = {}
    for path, word in styles.items():
        if word in _EXPERTS:
            _share_experts(model.get_submodule(path), mesh, experts)
        if word in (*_WHOLE, *_EXPERTS):
            continue
        style = _STYLES[word]() if word in _STYLES else None
        if not isinstance(style, ColwiseParallel | RowwiseParallel):
            raise OptionError(
                f"The plan of {type(model).__name__} has {word!r} for {path}, which has no form beside "
                "divided sequences. Give a mesh of one dimension, or a plan without it."
            )
        if not _is_uneven(model.get_submodule(path), style, mesh.size(-1)):  # else whole on all lanes
            tensor[path] = style
    parallelize_module(model, mesh, ContextParallel(context, tensor))
    _tie(model)


def _plan(model: nn.Module, kind: str) -> Mapping[str, str]:
    """The plan of a model and of its parts, by their names in the model."""
    of_model: Any = getattr(model, f"{kind}_plan", None) or getattr(model, f"_{kind}_plan", None)
    return of_model or {}


def _pattern(path: str) -> str:
    """model.layers.0.mlp -> model.layers.*.mlp"""
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)


def _with_tied(model: nn.Module, words: Mapping[str, str]) -> dict[str, str]:
    """A plan that cuts a table as the layer that it is tied to, where it names the layer alone."""
    of_rows = {"colwise", "colwise_gather_output", "colwise_rep"}
    cut = {
        id(module.weight)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and words.get(_pattern(path)) in of_rows
    }
    tables = {
        _pattern(path): "embedding_rowwise"
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding) and id(module.weight) in cut
    }
    return tables | dict(words)


def _of_uneven_heads(
    model: nn.Module, lanes: int, words: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, Literal["whole", "divided"]]]:
    """A plan by which attention gets all heads on each lane where lanes cannot share them evenly, and the
    modules of such attention, by which queries these have."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    queries, keys = (getattr(config, f"num_{name}_heads", None) for name in ("attention", "key_value"))
    uneven = [isinstance(heads, int) and heads % lanes > 0 for heads in (queries, keys)]
    named = ((*path.rpartition(".")[::2], word) for path, word in words.items())
    of = (
        {owner for owner, name, word in named if name in _OF_KEYS and word == "colwise"}
        if any(uneven)
        else ()
    )
    changed, ways = dict(words), dict[str, Literal["whole", "divided"]]()
    for owner in of:
        inside = {path: path.rpartition(".")[2] for path in words if path.startswith(f"{owner}.")}
        # Too few heads of keys: each lane keeps its heads of queries, if attention alone reads both.
        is_sdpa = getattr(config, "_attn_implementation", None) == "sdpa"
        is_divided = not uneven[0] and is_sdpa and "k_proj" in inside.values()
        ways[owner] = "divided" if is_divided else "whole"
        for path, name in inside.items():
            if not (is_divided and name in _OF_QUERIES):
                changed[path] = _WHOLE_HEADS.get(words[path], words[path])
        if not is_divided and changed.get(owner) == "local_params":  # numbers of its own for each head
            changed[owner] = "replicate"
    return changed, ways


def _own(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(recurse=False))


def _share_own_parameters(module: nn.Module, words: Mapping[str, str | None], mesh: DeviceMesh) -> None:
    """Share parameters of the module itself, as a number for each head, and run it on those of a lane."""
    forward = module.forward
    for name, parameter in _own(module).items():
        if words[name] == "colwise":
            share = distribute_tensor(parameter.data, mesh, [Shard(max(parameter.dim() - 2, 0))])
            module.register_parameter(name, nn.Parameter(share, parameter.requires_grad))

    def on_own(*args: Any, **kwargs: Any) -> Any:
        with local_parameters(module, is_deep=False):
            return forward(*args, **kwargs)

    module.forward = on_own


def _sum_rotary_gradient(module: nn.Module, width: int, mesh: DeviceMesh) -> None:
    """The last columns of what the module gives go to the heads of each lane without a layer between, whose
    input gradient would be summed: so theirs is summed here."""
    forward = module.forward

    def summed(*args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = forward(*args, **kwargs)
        first, last = result.split([result.shape[-1] - width, width], -1)
        return torch.cat([first, with_summed_gradient(last, mesh)], -1)

    module.forward = summed
