"""One contender of ``offload.py``: trains a GPT-2 from a saved pipeline, and measures time and memory."""

from __future__ import annotations

import hashlib
import statistics
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel
from worker import Worker, resident, start_counting_memory

import fxpipe

LAYERS, HIDDEN, HEADS, SEQUENCE, VOCABULARY = 8, 768, 12, 1024, 4096
MIB = 2**20


def build(
    layers: int = LAYERS,
    hidden: int = HIDDEN,
    heads: int = HEADS,
    sequence: int = SEQUENCE,
    vocabulary: int = VOCABULARY,
) -> GPT2LMHeadModel:
    """The model, the same in every process."""
    config = GPT2Config(
        n_layer=layers,
        n_embd=hidden,
        n_head=heads,
        n_positions=sequence,
        vocab_size=vocabulary,
        activation_function="gelu_pytorch_tanh",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"
    return model


def example(
    microbatches: int = 1, sequence: int = SEQUENCE, vocabulary: int = VOCABULARY
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocabulary, (microbatches, sequence), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def main() -> None:
    worker = Worker.join()
    pipe = fxpipe.load(worker.case["pipeline"], offload_directory=worker.case["directory"])
    batch = example(worker.case["microbatches"])
    rt = pipe.runtime

    def reset() -> None:
        for grad in rt.grads.values():
            grad.zero_()

    spent: list[float] = []

    def step() -> float:
        before = time.process_time()
        loss = float(pipe.step(batch))
        spent.append(time.process_time() - before)
        return loss

    step()  # libraries and weights come into memory, gradients and the pool are made
    weights = sum(t.nbytes for held in (rt.params, rt.grads, rt.buffers) for t in held.values()) / MIB
    own = start_counting_memory() - weights
    between: list[float] = []
    rt.record.at_op = lambda _: between.append(resident("VmRSS"))
    rt.record.at_free = lambda: between.append(resident("VmRSS"))
    seconds, loss = worker.time_steps(step, reset, 0, worker.case["steps"])
    peak = resident()
    digest = hashlib.sha256()
    for name in sorted(rt.grads):
        digest.update(rt.grads[name].numpy().tobytes())
    memory = worker.gather(
        {
            "weights": weights,
            "own": own,
            "peak": peak,
            "between": max(between),
            "spent": statistics.median(spent[1:]),
            "bits": digest.hexdigest(),
        }
    )
    worker.finish({"seconds": seconds, "loss": loss, "ranks": memory})


if __name__ == "__main__":
    main()
