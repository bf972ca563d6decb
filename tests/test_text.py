"""The text that the demo trains on: the standard library, its tokens, the batches."""

import sys
from itertools import islice
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from text import batches, standard_library, tokenize, train_tokenizer

BUDGET = 100_000


@pytest.fixture(scope="module")
def documents():
    return standard_library(BUDGET)


def test_documents_are_the_installed_sources_up_to_the_budget(documents):
    import __future__ as first

    assert documents[0] == Path(first.__file__).read_bytes().decode()
    assert sum(len(document.encode()) for document in documents) == pytest.approx(BUDGET, abs=3)


def test_a_budget_beyond_the_top_level_goes_on_with_packages():
    import json.decoder

    assert Path(json.decoder.__file__).read_text(encoding="utf-8") in standard_library(100_000_000)


def test_decoded_tokens_give_the_text_again(documents):
    tokenizer = train_tokenizer(documents, 512)
    tokens = tokenize(documents, tokenizer)

    assert tokenizer.decode(tokens.tolist()) == "".join(documents)
    assert tokens.dtype == torch.int64
    assert 0 <= tokens.min() <= tokens.max() < 512
    assert len(tokens) < 0.7 * BUDGET  # the merges shorten the text


def test_text_never_seen_is_encoded_too(documents):
    tokenizer = train_tokenizer(documents, 256)
    text = "naïve → 東京 \x00\r\n\t 🙂"

    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode(text).ids) == len(text.encode())  # 256 tokens: one a byte


def test_training_twice_gives_the_same_tokenizer(documents):
    tokenizer = train_tokenizer(documents, 512)

    assert tokenizer.get_vocab_size() == 512
    assert tokenizer.to_str() == train_tokenizer(documents, 512).to_str()


def test_a_vocabulary_below_the_bytes_is_refused(documents):
    with pytest.raises(ValueError, match="256 bytes at least, got 100"):
        train_tokenizer(documents, 100)


def test_batches_are_windows_of_the_tokens():
    tokens = torch.arange(1000)

    for batch in islice(batches(tokens, batch=4, sequence=16, seed=0), 50):
        assert batch.keys() == {"input_ids", "labels"}
        assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
        assert batch["input_ids"].shape == (4, 16)
        starts = batch["input_ids"][:, :1]
        assert torch.equal(batch["input_ids"], starts + torch.arange(16))
        assert torch.equal(batch["labels"], batch["input_ids"])


def test_the_seed_decides_the_batches():
    def first_three(seed):
        some = islice(batches(torch.arange(1000), batch=2, sequence=8, seed=seed), 3)
        return torch.stack([batch["input_ids"] for batch in some])

    assert torch.equal(first_three(seed=1), first_three(seed=1))
    assert not torch.equal(first_three(seed=1), first_three(seed=2))


def test_a_window_may_be_the_whole_text_but_not_more():
    batch = next(batches(torch.arange(8), batch=2, sequence=8, seed=0))
    assert batch["input_ids"].tolist() == [list(range(8))] * 2

    with pytest.raises(ValueError, match="window of 9 tokens does not fit into a text of 8"):
        next(batches(torch.arange(8), batch=2, sequence=9, seed=0))
