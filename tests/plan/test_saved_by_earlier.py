"""Pipelines, programs and checkpoints that earlier versions saved still load and run.

``saved_by_earlier/make.py`` wrote them; ``losses.json`` has the losses that that version computed.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

import fxpipe

SAVED = Path(__file__).with_name("saved_by_earlier")
LOSSES = json.loads((SAVED / "losses.json").read_text())
BATCH = {name: torch.tensor(values) for name, values in LOSSES["batch"].items()}

#: Programs are compared with their sums: one that was edited gets a warning.
pytestmark = [pytest.mark.usefixtures("double"), pytest.mark.filterwarnings("error:.*was edited")]


@pytest.mark.parametrize("name", ["vocabulary", "offloaded", "trained"])
def test_pipelines(name, recwarn):
    pipe = fxpipe.load(SAVED / name)
    assert not [x for x in recwarn if "edited" in str(x.message)]  # the files are as they were saved
    assert pipe.run_local(BATCH).loss.item() == pytest.approx(LOSSES["losses"][name][0], rel=1e-12)
    assert pipe.simulate().seconds == pytest.approx(pipe.plan.prediction.seconds, rel=1e-9)


def test_costs_for_other_sizes():
    pipe = fxpipe.load(SAVED / "vocabulary")
    assert pipe.simulate(sizes={"microbatch": 6}).seconds > pipe.simulate().seconds


def test_a_run_goes_on_from_a_checkpoint(tmp_path):
    shutil.copytree(SAVED / "checkpoints", tmp_path / "checkpoints")
    pipe = fxpipe.load(SAVED / "trained")
    optimizer = pipe.optimizer(torch.optim.Adam, lr=0.1)
    with fxpipe.Checkpointer(pipe, tmp_path / "checkpoints", optimizer=optimizer) as checkpoints:
        assert checkpoints.resume()
        assert float(pipe.step(BATCH)) == pytest.approx(LOSSES["losses"]["trained"][-1], rel=1e-12)


def test_a_checkpoint_without_a_pipeline():
    read = fxpipe.read_checkpoint(SAVED / "checkpoints")
    assert read.model["embedding.weight"].shape == (12, 4)
