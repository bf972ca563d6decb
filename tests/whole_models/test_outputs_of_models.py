"""Logits, hidden states and losses of Hugging Face models: in training, in evaluation, in inference."""

import models
import pytest
import torch
from zoo import EFFORT, cut, relative_error, too_far

import fxpipe

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("double")]

MICROBATCHES = 3


def case_of(name):
    return models.in_precision(models.MODELS[name], torch.float64)


def compiled(model, example, **options):
    return fxpipe.compile(
        model, example, ranks=2, microbatches=MICROBATCHES, schedule="zb-v", effort=EFFORT, **options
    )


@pytest.mark.in_ci("gpt2")
@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "t5",
        *(pytest.param(x, marks=pytest.mark.variation) for x in ("vit", "mixtral", "llama", "bert")),
    ],
)
def test_logits_and_losses(name):
    case = case_of(name)
    model, batch, names = case.build(), case.data(MICROBATCHES), ["logits", "loss"]
    pipe = compiled(model, case.example(), outputs=names, evaluation=True)
    parts = [model(**part) for part in cut(batch, MICROBATCHES)]
    expected = {"logits": torch.cat([p.logits for p in parts]), "loss": torch.stack([p.loss for p in parts])}
    for found in (pipe.run_local(batch, outputs=names), pipe.evaluation.run_local(batch, outputs=names)):
        assert too_far(found.outputs, expected, 1e-9) == {}
        assert relative_error(found.loss, expected["loss"].mean()) <= 1e-9


def test_dropout_in_training_alone():
    torch.manual_seed(0)
    model = models.gpt2(resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3).train()
    example, batch = models.words(2), models.words(2 * MICROBATCHES)
    pipe = compiled(model, example, outputs=["logits"], evaluation=True)
    found = pipe.evaluation.run_local(batch, outputs=["logits"])
    assert model.training
    assert (
        relative_error(pipe.run_local(batch, outputs=["logits"]).outputs["logits"], found.outputs["logits"])
        > 0.1
    )
    result = model.eval()(**batch)
    assert too_far(found.outputs, {"logits": result.logits}, 1e-9) == {}


@pytest.mark.variation
def test_inference_with_hidden_states():
    torch.manual_seed(0)
    model = models.gpt2().eval()
    ids = models.words(2 * MICROBATCHES)["input_ids"]
    given = {"output_hidden_states": True, "use_cache": True}
    names = ["logits", "hidden_states.0", "hidden_states.2"]
    pipe = compiled(model, {"input_ids": ids[:2], **given}, gradients=False, outputs=names)
    found = pipe.run_local({"input_ids": ids, **given}, outputs=names)
    result = model(input_ids=ids, **given)
    expected = {"logits": result.logits} | {f"hidden_states.{k}": result.hidden_states[k] for k in (0, 2)}
    assert found.loss is None
    assert too_far(found.outputs, expected, 1e-9) == {}
    with pytest.raises(fxpipe.CaptureError, match=r"no output 'loss'|No loss"):
        compiled(model, {"input_ids": ids[:2], **given}, gradients=False, outputs=["loss"])


@pytest.mark.in_ci("False")
@pytest.mark.parametrize("labels", [True, False])
def test_outputs_as_a_tuple(labels):
    """``return_dict=False``: the loss is found by its form, and its absence too."""
    torch.manual_seed(0)
    model = models.gpt2()
    given = {"return_dict": False, "use_cache": False}
    batch, example = models.words(2 * MICROBATCHES) | given, models.words(2) | given
    if not labels:
        del example["labels"]
        with pytest.raises(fxpipe.CaptureError, match="No loss: the model returned tuple"):
            compiled(model, example)
        return
    pipe = compiled(model, example, outputs=["1"])
    found = pipe.run_local(batch, outputs=["1"])
    results = [model(**part) for part in cut(batch, MICROBATCHES)]
    assert relative_error(found.loss, torch.stack([loss for loss, _ in results]).mean()) <= 1e-9
    assert too_far(found.outputs, {"1": torch.cat([logits for _, logits in results])}, 1e-9) == {}
