"""The steps that are written for lists of microbatches are the captured step, as programs are."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from lengths_model import words

import fxpipe
from fxpipe.certificate.check import check
from fxpipe.plan.captured import CapturedStep

pytestmark = pytest.mark.usefixtures("double_in_module")

LISTS = ((5, 16, 2, 9, 9), (16, 16), (3, 16, 16, 4, 7, 2, 12))
# Of a replica that has as many microbatches as there are places, in the places of their numbers.
PLACES = "        if m >= len(rt.places): return\n        m = rt.places[m]\n"
SETTINGS = {
    "post-validation": {"schedule": "zb-h1", "validation": "post"},
    "V": {"schedule": "zb-v", "recompute": "full"},
    "vocabulary": {"schedule": "zb-h1", "vocab_parallel": "1-barrier"},
    "ZeRO 3": {"replicas": 2, "schedule": "zb-h1", "shard": "parameters"},
}


def problems(pipe: fxpipe.Pipeline, lengths: tuple[int, ...], edit: tuple[str, str] = ("", "")) -> list[str]:
    """What the certificate says of the step for these lengths, at those of the example, after an edit."""
    artifact, number, is_one = pipe.artifact, len(lengths), pipe.plan.replicas == 1
    one = [{"sequence": length} for length in lengths]
    others = () if is_one else ((one[:1], (1.0,)),)
    step = artifact.write_step(one, [1.0] * number, others, not is_one)
    assert all(PLACES in text for text in step.texts) != is_one
    heads = [program.partition("\ndef step(")[0] for program in artifact.programs]
    programs = [f"{a}\n{b.replace(PLACES, '')}" for a, b in zip(heads, step.texts, strict=True)]
    # The gradient of a microbatch's loss begins with its share.
    captured = artifact.captured.replace(repr(1 / pipe.plan.step.microbatches), repr(1 / number))
    plan = replace(artifact.plan, step=pipe.plan.step.with_microbatches(number))
    programs = [re.sub(*edit, program) if edit[0] else program for program in programs]
    return [str(each) for each in check(plan, programs, CapturedStep.from_json(captured, "")).problems]


@pytest.mark.parametrize("setting", SETTINGS)
def test_steps_of_lists_are_the_captured_step(setting):
    pipe = words(**SETTINGS[setting])
    for lengths in LISTS:
        assert problems(pipe, lengths) == []


@pytest.mark.parametrize(
    ("edit", "found"),
    [((r"\bW0\(1\)", "pass"), "W0.1 does not run"), ((r"\bW0\(1\)", "W0(0)"), "has no value of 0")],
    ids=["left out", "another one"],
)
def test_faults_are_seen(edit, found):
    assert any(found in each for each in problems(words(**SETTINGS["ZeRO 3"]), LISTS[0], edit))
