"""The shapes of Llama 3 70B, to be planned without hardware; from this directory:

fxpipe plan --model plan_70b:llama --device H100 --devices 256 --nodes 32 --batch 1024 \\
    --memory-limit 80GiB --grad-dtype float32 --optimizer-bytes 12 --recompute auto
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH = 8192


def llama(rows: int = 1):
    """The model in bfloat16, and a microbatch; ``fxpipe plan`` calls this on the meta device."""
    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=LENGTH,
        rope_theta=500000.0,
        use_cache=False,
    )
    ids = torch.zeros(rows, LENGTH, dtype=torch.long)
    return LlamaForCausalLM(config).bfloat16(), {"input_ids": ids, "labels": ids}
