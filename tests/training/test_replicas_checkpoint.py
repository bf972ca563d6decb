"""A checkpoint of two replicas of two ranks goes on with other numbers of both, and other shards."""

from pathlib import Path

import pytest
import replicas_checkpoint_worker as worker
import torch
from launch import forked
from marks import with_variations
from replicas_checkpoint_worker import PROCESSES, RESUMED, SHARDS
from safetensors.torch import load_file
from zoo import relative_error

import fxpipe

pytestmark = [pytest.mark.slow, pytest.mark.waits]

LIMIT = 1e-12


@pytest.fixture(scope="module")
def directory(request, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("replicas")
    same = test_the_same_mesh_goes_on_bit_for_bit.__name__
    goes_on = [item.callspec.params["shard"] for item in request.session.items if item.originalname == same]
    run = forked(PROCESSES, worker.run, directory, goes_on, dtype=torch.float64, logs=directory / "logs")
    assert run.code == 0, run
    return directory


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All that a run is at its end."""
    end = fxpipe.read_checkpoint(directory / "end")
    assert end.step_number == worker.STEPS
    assert end.groups[0]["lr"] == pytest.approx(worker.OPTIONS["lr"] / 2**worker.STEPS)
    found = {f"optimizer {n}.{key}": value for n, own in end.optimizer.items() for key, value in own.items()}
    assert {name.rpartition(".")[2] for name in found} == {"step", "exp_avg", "exp_avg_sq"}
    return end.model | found


def values(directory: Path) -> dict[str, torch.Tensor]:
    """The same, and its last losses."""
    assert fxpipe.read_checkpoint(directory / "end").state["rows"]["next"] == worker.STEPS
    losses = load_file(directory / "losses")
    last = {f"loss {k}": losses[str(k)] for k in range(worker.CHECKPOINT, worker.STEPS)}
    return tensors(directory) | last


def check(found: Path, expected: Path, limit: float) -> None:
    found, expected = values(found), values(expected)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        same = torch.equal(found[name], value) if not limit else relative_error(found[name], value) < limit
        assert same, name


@pytest.mark.parametrize("shard", with_variations(SHARDS, ["optimizer"]))
def test_the_same_mesh_goes_on_bit_for_bit(directory, shard):
    check(directory / f"{shard} of {shard}", directory / f"{shard}", 0.0)


@pytest.mark.parametrize("shard", SHARDS)
def test_with_another_shard_level(directory, shard):
    of = (*SHARDS, SHARDS[0])[SHARDS.index(shard) + 1]
    check(directory / f"{shard} of {of}", directory / f"{of}", LIMIT)


@pytest.mark.parametrize("name", RESUMED)
def test_on_another_mesh(directory, name):
    check(directory / name, directory / f"{RESUMED[name][2]}", LIMIT)


@pytest.mark.parametrize("name", RESUMED)
def test_from_another_mesh(directory, name):
    found, expected = tensors(directory / f"back from {name}"), tensors(directory / name)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], x) for key, x in expected.items())


@pytest.mark.usefixtures("double")
def test_in_one_process(directory, tmp_path):
    worker.train(worker.compiled(1, 1, None), tmp_path, directory / "optimizer" / "half")
    check(tmp_path, directory / "optimizer", LIMIT)
