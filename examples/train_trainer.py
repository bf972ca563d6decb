"""Fine-tune a Hugging Face model by Hugging Face's Trainer, on the ranks of a pipeline.

    torchrun --nproc-per-node 2 examples/train_trainer.py
    torchrun --nproc-per-node 2 examples/train_trainer.py --resume   # from its last checkpoint

It is a script for transformers' own Trainer, but for the import and ``pipeline=``: the losses are those of
``python examples/train_trainer.py --plain``.
"""

from __future__ import annotations

import argparse
import os

import torch
from text import standard_library, tokenize, train_tokenizer

SEQUENCE, VOCABULARY = 64, 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--bytes", type=int, default=200_000, help="the amount of text")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--plain", action="store_true", help="transformers' own Trainer, in one process")
    options = parser.parse_args()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import transformers
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    from fxpipe.integrations.trainer import Trainer

    documents = standard_library(options.bytes)
    tokens = tokenize(documents, train_tokenizer(documents, VOCABULARY)).long()
    pieces = tokens[: len(tokens) // SEQUENCE * SEQUENCE].view(-1, SEQUENCE)
    rows = [{"input_ids": piece, "labels": piece} for piece in pieces]

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_attention_heads=4,
        num_key_value_heads=2, num_hidden_layers=options.layers, max_position_embeddings=SEQUENCE,
    )  # fmt: skip
    model = LlamaForCausalLM(config)  # or from_pretrained(…)
    args = TrainingArguments(
        "build/trainer",
        per_device_train_batch_size=2,  # the rows of a microbatch
        gradient_accumulation_steps=8,  # the microbatches of a step
        max_steps=options.steps,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        logging_steps=5,
        eval_strategy="steps",
        eval_steps=10,
        save_steps=10,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.accelerator.is_available(),
    )
    data = {"train_dataset": rows[:-32], "eval_dataset": rows[-32:]}
    if options.plain:
        trainer = transformers.Trainer(model, args, **data)
    else:
        trainer = Trainer(model, args, **data, pipeline={"schedule": "zb-h1"}, figures=True)
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model("build/trainer/last")  # from_pretrained opens it


if __name__ == "__main__":
    main()
