"""One contender of ``vs_torch.py --part a``: trains a GPT-2 for some steps, and measures time and memory.

A case may name another ``vocabulary`` (``vocab_worker.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from worker import Worker, resident, start_counting_memory

import fxpipe

LAYERS, HIDDEN, SEQUENCE, VOCABULARY = 8, 512, 256, 8192
WARM_UP = 1


def build(vocabulary: int = VOCABULARY) -> GPT2LMHeadModel:
    """The model, the same in every process.  Untied: hand-made stages of torch cannot share a weight."""
    config = GPT2Config(
        n_layer=LAYERS,
        n_embd=HIDDEN,
        n_head=8,
        n_positions=SEQUENCE,
        vocab_size=vocabulary,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"
    return model


def example(microbatches: int = 1, vocabulary: int = VOCABULARY) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocabulary, (microbatches, SEQUENCE), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


class Part(nn.Module):
    """A contiguous part of the model: ``layers``, the embedding before the first, the head after the last."""

    def __init__(self, model: GPT2LMHeadModel, layers: range) -> None:
        super().__init__()
        body = model.transformer
        self.blocks = nn.ModuleList(body.h[i] for i in layers)
        self.embeddings = nn.ModuleList([body.wte, body.wpe]) if layers.start == 0 else None
        self.head = nn.Sequential(body.ln_f, model.lm_head) if layers.stop == LAYERS else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embeddings is not None:
            tokens, positions = self.embeddings
            x = tokens(x) + positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


def torch_contender(worker: Worker) -> tuple[Callable[[], float | None], Callable[[], None]]:
    name, microbatches = worker.case["schedule"], worker.case["microbatches"]
    model, batch = build(_vocabulary(worker)), example(microbatches, _vocabulary(worker))
    from torch_pipeline import SCHEDULES, TorchPipeline

    each = LAYERS // (worker.ranks * SCHEDULES[name].stages_per_rank)
    loss_fn = partial(_loss, model.loss_function, _vocabulary(worker))
    pipeline = TorchPipeline(
        name,
        worker.rank,
        worker.ranks,
        microbatches,
        lambda stage: Part(model, range(stage * each, (stage + 1) * each)),
        loss_fn,
    )
    return lambda: pipeline.step(batch["input_ids"], batch["labels"]), pipeline.zero_grad


def _loss(
    loss_function: Callable[..., torch.Tensor], vocabulary: int, logits: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    return loss_function(logits=logits, labels=labels, vocab_size=vocabulary)


def fxpipe_contender(worker: Worker) -> tuple[Callable[[], float | None], Callable[[], None]]:
    pipe = fxpipe.load(worker.case["directory"])
    batch = example(worker.case["microbatches"], _vocabulary(worker))

    def zero_grad() -> None:
        for parameter in pipe.parameters.values():
            if parameter.grad is not None:
                parameter.grad.zero_()

    return lambda: float(pipe.step(batch)), zero_grad


def eager_contender(worker: Worker) -> tuple[Callable[[], float | None], Callable[[], None]]:
    """One process, the same microbatches one after the other."""
    microbatches = worker.case["microbatches"]
    model, batch = build(_vocabulary(worker)), example(microbatches, _vocabulary(worker))

    def step() -> float:
        total = 0.0
        for i in range(microbatches):
            loss = model(**{name: x[i : i + 1] for name, x in batch.items()}).loss / microbatches
            loss.backward()
            total += float(loss)
        return total

    return step, lambda: model.zero_grad(set_to_none=False)


def _vocabulary(worker: Worker) -> int:
    return worker.case.get("vocabulary", VOCABULARY)


CONTENDERS = {"fxpipe": fxpipe_contender, "torch": torch_contender, "eager": eager_contender}


def main() -> None:
    worker = Worker.join()
    step, reset = CONTENDERS[worker.case["contender"]](worker)
    before = start_counting_memory()
    seconds, loss = worker.time_steps(step, reset, WARM_UP, worker.case["steps"])
    memory = worker.gather((before, resident()))
    worker.finish(
        {"seconds": seconds, "loss": loss, "before": [m[0] for m in memory], "peak": [m[1] for m in memory]}
    )


if __name__ == "__main__":
    main()
