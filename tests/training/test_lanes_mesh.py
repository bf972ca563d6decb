"""Lanes with replicas, shards, checkpoints and saved pipelines train as the plain model does in eager."""

import subprocess
import sys
from pathlib import Path

import lanes_worker as worker
import pytest
import torch
from lanes_worker import HALF, MESHES, PROCESSES, STEPS, WITHOUT_LANES
from launch import forked
from marks import with_variations
from safetensors.torch import load_file
from zoo import relative_error

import fxpipe

pytestmark = [pytest.mark.slow, pytest.mark.waits]

LIMIT = 1e-12
Values = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def directory(request, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("lanes")
    here = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    meshes = {item.callspec.params["name"] for item in here} | {WITHOUT_LANES}
    run = forked(PROCESSES, worker.run, directory, meshes, dtype=torch.float64, logs=directory / "logs")
    assert run.code == 0, run
    return directory


@pytest.fixture(scope="module")
def eager() -> Values:
    """The losses and norms of the plain model, and all that training has given it."""
    torch.set_default_dtype(torch.float64)
    try:
        model, found = worker.made(), {}
        clip = worker.OPTIONS["clip_grad_norm"]
        optimizer = torch.optim.AdamW(model.parameters(), lr=worker.OPTIONS["lr"])
        for step, batch in enumerate(worker.batches()):
            if step == HALF:
                found["evaluated"] = model(**worker.batches()[0])
            found[f"loss {step}"] = loss = model(**batch)
            loss.backward()
            found[f"norm {step}"] = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.set_default_dtype(torch.float32)
    state = {p: name for name, p in model.named_parameters()}
    found |= {f"{key} of {state[p]}": x for p, own in optimizer.state.items() for key, x in own.items()}
    return {name: x.detach() for name, x in (found | model.state_dict()).items()}


def values(directory: Path) -> Values:
    """All that a run is at its end."""
    end = fxpipe.read_checkpoint(directory / "end")
    assert end.step_number == STEPS
    state = {f"{key} of {name}": x for name, own in end.optimizer.items() for key, x in own.items()}
    return end.model | state


def measured(directory: Path) -> Values:
    """Of all processes, which have measured the same."""
    first, *others = (load_file(directory / f"measured {k}") for k in range(PROCESSES))
    assert all(
        torch.equal(other[name], x) for other in others for name, x in first.items() if "back" not in name
    )
    return first


#: With divided rows, the optimizer is divided as well.
@pytest.mark.variation
@pytest.mark.parametrize(
    "name",
    with_variations(["whole", *(name for name in MESHES if name != "1 x 2 x 2")], ["2 x 1 x 2"]),
)
def test_each_mesh_trains_as_eager_and_counts_each_share_once_in_the_norm(directory, eager, name):
    found = values(directory / name)
    assert found.keys() == {key for key in eager if not key.startswith(("loss ", "norm ", "evaluated"))}
    for key, x in (found | measured(directory / name)).items():
        assert relative_error(x, eager[key]) < LIMIT, key


def test_the_same_mesh_goes_on_bit_for_bit_from_a_checkpoint_and_a_saved_pipeline(directory):
    found, expected = values(directory / "loaded"), values(directory / "whole")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], x) for name, x in expected.items())
    later = measured(directory / "loaded")
    assert all(torch.equal(x, measured(directory / "whole")[name]) for name, x in later.items())


def test_a_checkpoint_of_a_run_without_lanes_is_read_with_lanes(directory):
    found, expected = values(directory / "back"), values(directory / WITHOUT_LANES)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], x) for name, x in expected.items())


def test_updates_ahead_of_the_verdict_on_some_lanes_give_the_same_bits(directory):
    found, expected = values(directory / "ahead"), values(directory / "whole")
    assert all(torch.equal(found[name], x) for name, x in expected.items())
    back = [int(load_file(directory / "ahead" / f"measured {k}")["taken back"]) for k in range(PROCESSES)]
    assert min(back[::2]) > 0, back
    ahead, whole = measured(directory / "ahead"), measured(directory / "whole")
    assert all(
        torch.equal(ahead[f"{what} {k}"], whole[f"{what} {k}"])
        for what in ("loss", "norm")
        for k in range(STEPS)
    )


def test_the_exported_weights_are_those_of_the_checkpoint(directory):
    exported = load_file(directory / "export" / "model.safetensors")
    found = fxpipe.read_checkpoint(directory / "whole" / "end").model
    assert found.keys() == exported.keys()
    assert all(torch.equal(found[name], x) for name, x in exported.items())


@pytest.mark.usefixtures("double")
def test_a_saved_pipeline_runs_all_lanes_in_one_process(directory):
    pipe = fxpipe.load(directory / "pipe")
    assert pipe.lanes == 2
    model = worker.made()
    model.load_state_dict(pipe.full_state_dict())
    found, batch = pipe.run_local(worker.batches()[0]), worker.batches()[0]
    loss = model(**batch)
    loss.backward()
    assert relative_error(found.loss, loss) < LIMIT
    for name, parameter in model.named_parameters():
        assert relative_error(found.grads[name], parameter.grad) < LIMIT, name


def test_a_saved_pipeline_is_checked_without_its_model(directory):
    command = [sys.executable, "-m", "fxpipe", "check", str(directory / "pipe")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "The programs of all ranks compute the captured step" in run.stdout
