"""Models of transformers by their own plans of parallelism: the loss and gradients of eager."""

from __future__ import annotations

import pytest
import torch
from equality import eager_step
from torch import nn
from zoo import relative_error, too_far

import fxpipe
from fxpipe.errors import OptionError

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("double")]

SMALL = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 32, "max_position_embeddings": 16, "use_cache": False,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}


def qwen3_moe() -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        **SMALL, **EXPERTS, num_experts=4, head_dim=4, decoder_sparse_step=1, output_router_logits=True
    )
    return transformers.Qwen3MoeForCausalLM(config)


def gemma3() -> nn.Module:
    config = transformers.Gemma3TextConfig(**SMALL, head_dim=4, sliding_window=4)
    return transformers.Gemma3ForCausalLM(config)


def granite_swa() -> nn.Module:
    """Has numbers for each head, which are no module's weight."""
    config = transformers.GraniteSWAConfig(**SMALL, sliding_window=4)
    return transformers.GraniteSWAForCausalLM(config)


def deepseek_v2() -> nn.Module:
    config = transformers.DeepseekV2Config(
        **(SMALL | {"num_key_value_heads": 4}), **EXPERTS, n_routed_experts=4, n_group=2, topk_group=1,
        topk_method="group_limited_greedy", first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8,
        qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4,
    )  # fmt: skip
    return transformers.DeepseekV2ForCausalLM(config)


def made(kind) -> nn.Module:
    torch.manual_seed(0)
    model = kind().double()
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("batched_mm")
    return model


def batch(rows: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(0, SMALL["vocab_size"], (rows, 6))
    return {"input_ids": tokens, "labels": tokens}


def parallelize(model: nn.Module, **options) -> nn.Module:
    from fxpipe.integrations import transformers as integration

    with fxpipe.local_lanes(2) as mesh:
        return integration.parallelize(model, mesh, **options)


@pytest.mark.in_ci("deepseek_v2-2-whole-1e-06")
@pytest.mark.parametrize(
    ("kind", "lanes", "tokens", "limit"),
    # Norms and the head compute in single precision.
    [
        pytest.param(qwen3_moe, 2, "divided", 1e-6, marks=pytest.mark.variation),
        (deepseek_v2, 2, "whole", 1e-6),
        pytest.param(gemma3, 2, "whole", 1e-5, marks=pytest.mark.variation),
        pytest.param(granite_swa, 2, "whole", 1e-6, marks=pytest.mark.variation),
        # Too few heads of keys; nothing that lanes share evenly; no kernel whose heads they share.
        (gemma3, 4, "whole", 1e-5),
        pytest.param(qwen3_moe, 3, "divided", 1e-6, marks=pytest.mark.variation),
        pytest.param(deepseek_v2, 3, "divided", 1e-6, marks=pytest.mark.variation),
        pytest.param(granite_swa, 3, "whole", 1e-6, marks=pytest.mark.variation),
    ],
)
def test_a_plan_equals_eager(kind, lanes, tokens, limit):
    from fxpipe.integrations import transformers as integration

    model = made(kind)
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    with fxpipe.local_lanes(lanes) as mesh:
        integration.parallelize(model, mesh, fxpipe.ExpertParallel(tokens=tokens))
        pipe = fxpipe.compile(model, batch(2), ranks=2, microbatches=2, schedule="zb-h1")
    pipe.load_state_dict(whole)
    found = pipe.run_local(batch(4))
    model = made(kind)
    forward = model.forward
    model.forward = lambda **inputs: forward(**inputs).loss
    loss, grads = eager_step(model, batch(4), 2, None)
    assert relative_error(found.loss, loss) <= limit
    assert found.grads.keys() == grads.keys()
    assert too_far(found.grads, grads, limit) == {}
    shards = pipe.plan.lanes.axes[0].shards
    assert shards["model.layers.1.self_attn.o_proj.weight"] == 1
    if hasattr(model.config, "num_experts_per_tok"):
        assert shards["model.layers.1.mlp.experts.gate_up_proj"] == 0


@pytest.mark.variation
def test_a_table_is_cut_as_the_head_that_it_is_tied_to():
    config = transformers.Lfm2Config(
        **SMALL, layer_types=["full_attention", "conv"], tie_word_embeddings=True
    )
    model = transformers.Lfm2ForCausalLM(config).double()
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    forward, example = model.forward, batch(2)
    loss = forward(**batch(2)).loss.detach()
    assert "model.embed_tokens" not in model.tp_plan
    with fxpipe.local_lanes(3) as mesh:
        from fxpipe.integrations import transformers as integration

        integration.parallelize(model, mesh)
        pipe = fxpipe.compile(model, example, ranks=1, microbatches=1)
    assert pipe.plan.lanes.lengths == {"model.embed_tokens.weight": SMALL["vocab_size"]}
    pipe.load_state_dict(whole)
    assert relative_error(pipe.run_local(example).loss, loss) <= 1e-6


def test_what_has_no_plan():
    with pytest.raises(
        OptionError, match=r"'packed_colwise' for model\.layers\.0\.mlp\.up_proj, which has no"
    ):
        parallelize(made(gemma3), plan={"model.layers.*.mlp.up_proj": "packed_colwise"})
    with pytest.raises(OptionError, match="Linear has no plan of tensor parallelism"):
        parallelize(nn.Linear(2, 2))
