"""Train a language model on real text on four ranks, with evaluation and checkpoints.

    torchrun --nproc-per-node 4 examples/train_text.py

Interrupt it and start it again: it goes on from the last checkpoint in build/text. ``--steps 120`` afterwards
trains on. The model is that of transformer.py, written for one process.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from text import batches, standard_library, tokenize, train_tokenizer
from transformer import LanguageModel

import fxpipe

MICROBATCHES, ROWS, LENGTH, VOCABULARY = 8, 2, 64, 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps between two evaluations")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--bytes", type=int, default=400_000, help="the amount of text")
    parser.add_argument("--build", type=Path, default=Path("build/text"))
    options = parser.parse_args()

    # All ranks make the same model and draw the same batches; the step compares them.
    documents = standard_library(options.bytes)
    tokens = tokenize(documents, train_tokenizer(documents, VOCABULARY))
    held_out = len(tokens) // 10
    torch.manual_seed(0)
    model = LanguageModel(VOCABULARY, layers=options.layers, length=LENGTH)

    def batch_of(step: int) -> dict[str, torch.Tensor]:
        """The step alone decides it, so a run that resumes goes on with the right batch."""
        return next(batches(tokens[held_out:], MICROBATCHES * ROWS, LENGTH, seed=step))

    unseen = next(batches(tokens[:held_out], MICROBATCHES * ROWS, LENGTH, seed=0))
    example = {name: tensor[:ROWS] for name, tensor in unseen.items()}  # one microbatch
    pipe = fxpipe.compile(
        model, example, ranks=4, microbatches=MICROBATCHES, schedule="zb-h1", evaluation=True
    )
    optimizer = pipe.optimizer(
        torch.optim.AdamW,
        lr=2e-3,
        weight_decay=0.1,
        clip_grad_norm=1.0,
        groups=[{"params": ["*norm*", "*.bias", "position"], "weight_decay": 0.0}],
    )
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    first = pipe.runtime.rank == 0
    with fxpipe.Checkpointer(
        pipe, options.build, optimizer=optimizer, state={"rate": rate}, every=20
    ) as checkpoints:
        if checkpoints.resume() and first:
            print(f"resumed after {pipe.step_number} steps")
        while pipe.step_number < options.steps:
            loss = pipe.step(batch_of(pipe.step_number))
            optimizer.step()
            optimizer.zero_grad()
            rate.step()
            checkpoints.step()
            if pipe.step_number % options.every == 0:
                on_unseen = pipe.evaluate(unseen)  # on all ranks, as each computes its part
                if first:
                    print(f"step {pipe.step_number:4d}  loss {loss:.3f}  on unseen text {on_unseen:.3f}")
        checkpoints.save()


if __name__ == "__main__":
    main()
