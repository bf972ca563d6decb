"""Fine-tune a Hugging Face model on samples of any length, packed into microbatches without padding.

    torchrun --nproc-per-node 4 examples/train_chats.py

A sample is a question, whose labels are ignored, and an answer: the first lines of a function of Python's
standard library, and its body.  Each microbatch has as many samples as fit, and the length that these have; a
step has as many microbatches as its samples fill, in the order that is the fastest for their lengths.
"""

from __future__ import annotations

import argparse
import ast
import os
from collections.abc import Sequence
from functools import partial

import torch
from text import standard_library, train_tokenizer
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader

import fxpipe

#: The longest sample, what shorter ones fill together, and the tokens of a step.
LONGEST, TOKENS, STEP, VOCABULARY = 256, 128, 1536, 1024


def functions(documents: Sequence[str]) -> list[tuple[str, str]]:
    """The functions of Python sources: the first line of each, with its docstring, and the rest."""
    found = []
    for document in documents:
        try:
            tree = ast.parse(document)
        except SyntaxError:  # a file that is cut off
            continue
        lines = document.splitlines(keepends=True)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and len(node.body) > 1:
                first, *rest = node.body
                begin = rest[0].lineno if ast.get_docstring(node) else first.lineno
                question = "".join(lines[node.lineno - 1 : begin - 1])
                found.append((question, "".join(lines[begin - 1 : node.end_lineno])))
    return found


def sample(tokenizer: Tokenizer, question: str, answer: str) -> dict[str, Tensor]:
    """The tokens of both, at most those of the longest sample; the labels of the question are ignored."""
    asked, answered = (torch.tensor(tokenizer.encode(text).ids) for text in (question, answer))
    tokens = torch.cat([asked, answered]).long()[:LONGEST]
    labels = tokens.clone()
    labels[: len(asked)] = -100
    return {"input_ids": tokens, "labels": labels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--bytes", type=int, default=400_000, help="the amount of text")
    options = parser.parse_args()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import LlamaConfig, LlamaForCausalLM

    documents = standard_library(options.bytes)
    tokenizer = train_tokenizer(documents, VOCABULARY)
    samples = [sample(tokenizer, *each) for each in functions(documents)]
    samples = [each for each in samples if (each["labels"] != -100).any()]

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_attention_heads=4,
        num_key_value_heads=4, num_hidden_layers=options.layers, max_position_embeddings=LONGEST,
        use_cache=False,
    )  # fmt: skip
    model = fxpipe.use_packed_attention(LlamaForCausalLM(config))  # or from_pretrained(…)
    longest = max(samples, key=lambda each: len(each["input_ids"]))
    (example,) = fxpipe.pack([longest], tokens=LONGEST, multiple=LONGEST)
    pipe = fxpipe.compile(
        model, example, ranks=4, microbatches=STEP // TOKENS, schedule="zb", dimensions={"sequence": LONGEST}
    )
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=3e-3)

    lengths = [len(each["input_ids"]) for each in samples]
    steps = fxpipe.PackedSteps(lengths, tokens=TOKENS, step_tokens=STEP)
    collate = partial(fxpipe.pack, tokens=TOKENS)
    loader = DataLoader(samples, batch_sampler=steps, collate_fn=collate)  # type: ignore[arg-type]
    first = pipe.runtime.rank == 0
    if first:
        text = sum(lengths) / len(lengths) / max(lengths)
        print(
            f"{len(samples)} samples of {min(lengths)} to {max(lengths)} tokens; padded, {text:.0%} were text"
        )
    while pipe.step_number < options.steps:
        for microbatches in loader:
            loss = pipe.step(microbatches)
            optimizer.step()
            optimizer.zero_grad()
            if first and (pipe.step_number % 10 == 0 or pipe.step_number == options.steps):
                taken = [each["input_ids"].shape[1] for each in microbatches]
                print(f"step {pipe.step_number:4d}  loss {loss:.3f}  microbatches of {taken} tokens")
            if pipe.step_number == options.steps:
                break


if __name__ == "__main__":
    main()
