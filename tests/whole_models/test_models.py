"""Loss and every gradient of Hugging Face models against one process that accumulates the microbatches."""

import pytest
import torch
from models import MODELS, in_precision, label, next_word_loss, own_loss, same_word_loss
from zoo import Case, Shape, built_and_compiled, eager, relative_error, too_far

pytestmark = pytest.mark.slow

MICROBATCHES = 4
LIMIT = {torch.float32: 1e-5, torch.float64: 1e-10}
SINGLE, DOUBLE = torch.float32, torch.float64

# In this order a model is traced once for each precision. In double precision each model meets four ranks and
# a split backward; some meet two ranks, a backward in one piece and two stages a rank, in both placements.
ALWAYS = (Shape(2, "gpipe"), Shape(4, "zb-h1"))
CHUNKED = {
    "gpt2": (Shape(2, "1f1b", 2, "plain"),),
    "llama": (Shape(2, "zb-h1", 2, "v"),),
    "deepseek_v3": (Shape(2, "zb-h1", 2, "plain"),),
    "t5": (Shape(2, "zb-h1", 2, "v"),),
    "bert": (Shape(2, "gpipe", 2, "v"),),
}
# In single precision: the models that run other ops then (experts in one grouped product), one that mixes
# precisions in double (gemma2, as all descendants of Llama), and one that is not fed words.
IN_SINGLE = {
    "gemma2": (Shape(4, "zb-h1", 2, "v"),),
    "mixtral": (Shape(2, "zb-h1"), Shape(4, "1f1b", 2, "v")),
    "deepseek_v3": (Shape(2, "zb-h1"),),
    "vit": (Shape(2, "1f1b", 2, "v"),),
}
#: On two ranks each of these runs what gpt2, or one of CHUNKED, runs there: their own ops are met on four.
ON_FOUR = set(MODELS) - {"gpt2"}
#: test_vocabulary.py has all their gradients on three ranks and those of t5 with two stages a rank; mixtral
#: is met in single precision.
MET_ELSEWHERE = {
    *((name, ALWAYS[1]) for name in ("qwen3", "gemma2", "bert", "t5", "mixtral")),
    *((name, s) for name in ("bert", "t5") for s in CHUNKED[name]),
}
RUNS = [
    *(
        pytest.param(
            name,
            DOUBLE,
            shape,
            marks=[pytest.mark.variation]
            if (name in ON_FOUR and shape == ALWAYS[0]) or (name, shape) in MET_ELSEWHERE
            else [],
        )
        for name in MODELS
        for shape in (*ALWAYS, *CHUNKED.get(name, ()))
    ),
    *(
        pytest.param(name, SINGLE, shape, marks=[] if name == "mixtral" else [pytest.mark.variation])
        for name, shapes in IN_SINGLE.items()
        for shape in shapes
    ),
]
# Next words and classes; test_vocabulary.py has a loss outside of the other families.
OUTSIDE = {
    "gpt2": next_word_loss,
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
    # Some models take the loss in single precision.
    assert relative_error(result.loss, expected.loss) <= max(LIMIT[dtype], LIMIT[result.loss.dtype])
    assert too_far(result.grads, expected.grads, LIMIT[dtype]) == {}


@pytest.mark.in_ci("gpt2-fp64-2-1f1b-2plain", "llama-fp64-4-zb-h1")
@pytest.mark.parametrize(("name", "dtype", "shape"), RUNS, ids=label)
def test_labels_in_the_forward(name, dtype, shape):
    check(MODELS[name], shape, dtype)


@pytest.mark.in_ci("gpt2")
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
