"""The peak of saved bytes of each rank: as simulated, and as measured while the programs run."""

import pytest
import torch
from models import MODELS, in_precision, label
from zoo import CASES, Case, Shape, built_and_compiled, compiled

from fxpipe.compiler.choice.refine_cuts import LighterCuts

pytestmark = pytest.mark.slow

MICROBATCHES = 6
SHAPES = [Shape(2, "1f1b"), Shape(2, "zb-h1", 2, "v"), Shape(4, "zb-h1")]
CHECKED = {name: MODELS[name] for name in ("gpt2", "llama", "t5")} | {
    name: CASES[name] for name in ("unet", "encoder_decoder", "transformer_layer")
}


def peaks(case: Case, shape: Shape, microbatches: int = MICROBATCHES) -> tuple[list[float], list[int]]:
    _, pipe = built_and_compiled(case, microbatches, shape)
    result = pipe.run_local(case.data(microbatches), measure_memory=True)
    return list(pipe.simulate().peak_memory), list(result.peak_saved)


RUNS = [(name, shape) for name in CHECKED for shape in SHAPES]
VARIATIONS = [(name, SHAPES[0]) for name in CHECKED if name not in ("gpt2", "unet")]
VARIATIONS += [(name, shape) for name in ("llama", "t5") for shape in SHAPES[1:]]
VARIATIONS += [("encoder_decoder", SHAPES[-1])]


@pytest.mark.in_ci("gpt2-4-zb-h1", "unet-2-zb-h1-2v")
@pytest.mark.parametrize(
    ("name", "shape"),
    [pytest.param(*run, marks=[pytest.mark.variation] if run in VARIATIONS else []) for run in RUNS],
    ids=label,
)
def test_simulated_peak_is_within_5_percent_of_the_measured_one(name, shape):
    simulated, measured = peaks(CHECKED[name], shape)
    assert len(measured) == shape.ranks
    assert simulated == pytest.approx(measured, rel=0.05)


@pytest.mark.variation
def test_double_precision_holds_twice_the_bytes():
    single, double = (
        peaks(in_precision(MODELS["vit"], dtype), Shape(2, "zb-h1"))
        for dtype in (torch.float32, torch.float64)
    )
    assert single[1] == pytest.approx([x / 2 for x in double[1]], rel=0.05)


def test_first_rank_of_1f1b_holds_no_more_microbatches_than_ranks(monkeypatch):
    monkeypatch.setattr(LighterCuts, "moved", lambda self: None)  # where depends on the schedule
    few, many = (peaks(MODELS["gpt2"], Shape(4, "1f1b"), m)[1] for m in (4, 12))
    assert few == pytest.approx(many, rel=0.01)


@pytest.mark.variation
def test_gpipe_holds_all_microbatches():
    few, many = (peaks(MODELS["gpt2"], Shape(2, "gpipe"), m)[1] for m in (3, 6))
    assert many == pytest.approx([2 * x for x in few], rel=0.05)


def test_nothing_is_measured_unless_asked_for():
    case = CASES["unet"]
    assert compiled(case, case.build(), 2, Shape(2)).run_local(case.data(2)).peak_saved == ()
