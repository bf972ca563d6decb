"""Real text that every machine has: the sources of the installed Python's standard library.

    documents = standard_library()                    # about 2 MB of Python
    tokenizer = train_tokenizer(documents, 4096)      # byte-level BPE, trained on the spot
    tokens = tokenize(documents, tokenizer)           # int64 [n]
    for batch in batches(tokens, batch=16, sequence=128, seed=0): ...

Everything here is deterministic: processes that run the same Python get the same tokens and batches.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

PACKAGES = ("asyncio", "collections", "concurrent", "email", "http", "importlib", "json", "logging")


def standard_library(byte_budget: int = 2_000_000) -> list[str]:
    """The standard library's sources, one string a file: top-level modules by name, then `PACKAGES`.

    The last file is cut where the budget of bytes ends. Bytes that are no UTF-8 become U+FFFD.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(root.glob("*.py"))
    for package in PACKAGES:
        paths += sorted((root / package).rglob("*.py"))
    documents: list[str] = []
    left = byte_budget
    for path in paths:
        if left <= 0:
            break
        content = path.read_bytes()[:left]
        left -= len(content)
        documents.append(content.decode("utf-8", errors="replace"))
    if not documents:
        raise FileNotFoundError(
            f"no Python sources in {root}: this Python came without its standard library's text"
        )
    return documents


def train_tokenizer(documents: Sequence[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE of at most `vocabulary` tokens (256 bytes and the most frequent merges).

    Any text can be encoded, and decoding gives it back exactly. Short texts run out of merges early.
    """
    if vocabulary < 256:
        raise ValueError(f"a byte-level vocabulary holds the 256 bytes at least, got {vocabulary}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def tokenize(documents: Sequence[str], tokenizer: Tokenizer) -> Tensor:
    """The tokens of all documents, one after the other: int64 [n]."""
    encodings = tokenizer.encode_batch_fast(documents)
    return torch.cat([torch.tensor(encoding.ids, dtype=torch.int64) for encoding in encodings])


def batches(tokens: Tensor, batch: int, sequence: int, seed: int) -> Iterator[dict[str, Tensor]]:
    """Endless batches of windows at random places in `tokens` (int64 [n], n ≥ sequence).

    Each is {"input_ids": int64 [batch, sequence], "labels": the same values}: the causal language
    models of Hugging Face shift the labels themselves. The seed alone decides which windows come.
    """
    if len(tokens) < sequence:
        raise ValueError(f"a window of {sequence} tokens does not fit into a text of {len(tokens)}")
    windows = tokens.unfold(0, sequence, 1)  # a view, [n - sequence + 1, sequence]
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(windows), (batch,), generator=generator)
        input_ids = windows[starts]
        yield {"input_ids": input_ids, "labels": input_ids.clone()}
