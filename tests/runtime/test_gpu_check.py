"""``make gpu-check`` is seldom run: here its ranks run on the CPU, so that it does not rot."""

import json

import gpu_check_ranks
import pytest
import torch
from launch import forked

pytestmark = pytest.mark.waits

OPTIONS = {"schedule": "zb-v", "ranks": 2, "microbatches": 2, "vocab_parallel": "1-barrier"}


@pytest.mark.in_ci("memory")
@pytest.mark.parametrize(
    ("more", "found"),
    [
        pytest.param({}, {"error", "backend"}, marks=pytest.mark.variation),
        ({"post": 9}, {"error", "backend"}),
        ({"train": 2}, {"asked", "reserved", "backend"}),
    ],
    ids=["gradients", "post-validation", "memory"],
)
def test_its_ranks_run(tmp_path, more, found):
    result = tmp_path / "result.json"
    case = {"options": OPTIONS, "nccl": "", **more}
    ran = forked(2, gpu_check_ranks.run, case, str(result), dtype=torch.float32, logs=tmp_path / "logs")
    assert ran.code == 0, ran
    row = json.loads(result.read_text())
    assert row.keys() == found
    assert row["backend"] == "gloo"
    assert row.get("error", 0.0) < 1e-5
    assert row.get("asked", [0, 0]) == [0, 0]
