"""Loss and every gradient of Hugging Face models against one process that accumulates the microbatches."""

import pytest
import torch
from models import MODELS, in_precision, label, next_word_loss, own_loss, same_word_loss
from zoo import Case, Shape, built_and_compiled, eager, relative_error, too_far

pytestmark = pytest.mark.slow

MICROBATCHES = 4
LIMIT = {torch.float32: 1e-5, torch.float64: 1e-10}
SINGLE, DOUBLE = torch.float32, torch.float64

# Each model meets both numbers of ranks, every schedule and both precisions.
SHAPES = [
    (Shape(2, "gpipe"), DOUBLE),
    (Shape(4, "1f1b"), DOUBLE),
    (Shape(2, "zb-h1"), SINGLE),
    (Shape(4, "zb-h1"), DOUBLE),
]
CHUNKED = {
    "gpt2": (Shape(2, "1f1b", 2, "plain"), DOUBLE),
    "llama": (Shape(2, "zb-h1", 2, "v"), DOUBLE),
    "gemma2": (Shape(4, "zb-h1", 2, "v"), SINGLE),
    "deepseek_v3": (Shape(2, "zb-h1", 2, "plain"), DOUBLE),
    "mixtral": (Shape(4, "1f1b", 2, "v"), SINGLE),
    "t5": (Shape(2, "zb-h1", 2, "v"), DOUBLE),
    "vit": (Shape(2, "1f1b", 2, "v"), SINGLE),
    "bert": (Shape(2, "gpipe", 2, "v"), DOUBLE),
}
OUTSIDE = {
    "gpt2": next_word_loss,
    "qwen3": next_word_loss,
    "bert": same_word_loss,
    "vit": same_word_loss,
}


def check(case: Case, shape: Shape, dtype: torch.dtype) -> None:
    """Against eager; without a ``loss_fn`` the loss is the output's own."""
    case = in_precision(case, dtype)
    model, pipe = built_and_compiled(case, MICROBATCHES, shape)
    batch = case.data(MICROBATCHES)
    expected = eager(model, batch, MICROBATCHES, case.loss_fn or own_loss)
    result = pipe.run_local(batch)
    assert {g.dtype for g in result.grads.values()} == {dtype}
    assert relative_error(result.loss, expected.loss) <= LIMIT[dtype]
    assert too_far(result.grads, expected.grads, LIMIT[dtype]) == {}


@pytest.mark.parametrize(("shape", "dtype"), SHAPES, ids=label)
@pytest.mark.parametrize("name", MODELS)
def test_labels_in_the_forward(name, shape, dtype):
    check(MODELS[name], shape, dtype)


@pytest.mark.parametrize("name", CHUNKED)
def test_two_stages_a_rank(name):
    check(MODELS[name], *CHUNKED[name])


@pytest.mark.parametrize("name", OUTSIDE)
def test_loss_outside(name):
    case = MODELS[name]

    class WithoutLabels(torch.nn.Module):
        """Takes the labels, as the batch holds them, and makes no use of them."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = case.model()

        def forward(self, labels, **inputs):
            return self.inner(**inputs)

    check(Case(WithoutLabels, case.batch, OUTSIDE[name]), Shape(4, "zb-h1"), DOUBLE)
