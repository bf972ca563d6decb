"""Runs that are killed, fail, are preempted and end, at every place, and are started again each time."""

import json
import os
import subprocess
import sys
from collections import Counter

import campaign
import pytest
from campaign import KINDS, PLACES, fault_of

pytestmark = [pytest.mark.slow, pytest.mark.waits]

FAULTS = 7
RANKS = {2: 0, 3: FAULTS, 4: 2 * FAULTS}  # number of ranks -> of the first fault


def test_every_place_and_kind_is_met():
    faults = [fault_of(first + k, ranks) for ranks, first in RANKS.items() for k in range(FAULTS)]
    assert len(faults) >= 20
    assert Counter(fault.place for fault in faults).keys() == set(PLACES)
    assert min(Counter(fault.kind for fault in faults)[kind] for kind in KINDS) >= 4


def test_the_result_is_that_of_an_undisturbed_run():
    """Bit for bit, each rank soon ends after a fault, and nothing is left behind."""
    runs = {}
    for ranks, first in RANKS.items():  # at the same time, as they mostly wait
        command = [sys.executable, campaign.__file__, "--ranks", str(ranks), "--first", str(first)]
        command += ["--faults", str(FAULTS), *(["--vocab-parallel"] if ranks == 3 else [])]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        runs[ranks] = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    for ranks, run in runs.items():
        printed, _ = run.communicate(timeout=300)
        assert run.returncode == 0, ranks
        result = json.loads(printed.splitlines()[-1])
        assert len(result["met"]) == FAULTS
        assert result["same"]
        assert result["steps"] == 0
        assert result["slowest"] < 5.0 + 5.0  # five seconds for the next attempt to begin
        assert result["left"] == []
