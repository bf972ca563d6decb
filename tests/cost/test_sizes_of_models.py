"""Costs of language models at other sizes than the example's, against a compilation at these sizes."""

from pathlib import Path

import pytest
import torch
import transformers as hf
from models import LENGTH, VOCABULARY, gpt2, llama
from test_sizes import check_against_fresh, two_stages

pytestmark = pytest.mark.slow


def text(rows: int, length: int, target: int | None = None) -> dict[str, torch.Tensor]:
    ids = torch.randint(VOCABULARY, (rows, length))
    return {"input_ids": ids, "labels": torch.randint(1, VOCABULARY, (rows, target or length))}


@pytest.mark.variation
@pytest.mark.parametrize(
    ("model", "split"),
    [
        pytest.param(lambda: gpt2(n_layer=2), "transformer.h.1", marks=pytest.mark.variation),
        (lambda: llama(num_hidden_layers=2), "model.layers.1"),
    ],
    ids=["gpt2", "llama"],
)
def test_language_models(model, split):
    model = model()
    pipe = two_stages(model, text(2, LENGTH), split, dimensions={"sequence": LENGTH})
    assert pipe.simulate({}).costs == pipe.plan.costs
    # Positions of few words are kept for the backward, those of many are computed again.
    fresh = two_stages(model, text(5, 12), split, dimensions={"sequence": 12})
    check_against_fresh(pipe, fresh, {"microbatch": 5, "sequence": 12})


@pytest.mark.variation
def test_encoder_decoder_with_two_lengths():
    config = hf.T5Config(
        num_layers=1,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_heads=4,
        vocab_size=VOCABULARY,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    model, split = hf.T5ForConditionalGeneration(config), "decoder.block.0.layer.1"
    pipe = two_stages(model, text(2, 10, 7), split, dimensions={"source": 10, "target": 7})
    # At these sizes the same masks are cheap enough to be computed again.
    fresh = two_stages(model, text(3, 9, 14), split, dimensions={"source": 9, "target": 14})
    check_against_fresh(pipe, fresh, {"microbatch": 3, "source": 9, "target": 14})


def test_the_example_of_70_billion_parameters(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    import plan_70b

    with torch.device("meta"):
        model, example = plan_70b.llama(rows=2)
    assert sum(p.numel() for p in model.parameters()) == 70_553_706_496
    assert example["input_ids"].shape == (2, plan_70b.LENGTH)
