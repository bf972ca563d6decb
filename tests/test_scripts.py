"""Whole training scripts on two ranks beside plain torch: a few of ``python -m benchmarks.scripts``."""

from pathlib import Path

import pytest
import torch
from launch import Run, forked

from benchmarks.scripts import kinds
from benchmarks.scripts.script import SCRIPTS
from benchmarks.scripts.verdict import judge
from benchmarks.scripts.worker import run_all

pytestmark = [pytest.mark.slow, pytest.mark.waits]

EQUAL = ("early stop", "short last batch", "accumulation", "policy gradient", "proximal policy")
#: The last of them ends the ranks.
ERROR = "supervised: torch.save on rank 0"


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("scripts")


@pytest.fixture(scope="module")
def ran(directory) -> Run:
    kinds.load()
    plain = {SCRIPTS[name].plain for name in (*EQUAL, ERROR)}
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        run_all(str(directory), "1", tuple(plain))
    finally:
        torch.set_default_dtype(before)
    arguments = str(directory), "2", (*EQUAL, ERROR)
    return forked(2, run_all, *arguments, dtype=torch.float64, logs=directory / "logs")


@pytest.mark.parametrize("name", EQUAL)
def test_numbers_are_those_of_plain_torch(ran, directory, name):
    verdict = judge(directory, "2", SCRIPTS[name], False)
    assert verdict.word == "equal", f"{verdict.text}\n{ran}"


def test_a_part_of_the_model_is_not_saved_for_the_whole(ran, directory):
    verdict = judge(directory, "2", SCRIPTS[ERROR], False)
    assert verdict.word == "error", f"{verdict.text}\n{ran}"
    assert "pipe.full_state_dict()" in verdict.text
