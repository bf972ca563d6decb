"""Runs that are killed, fail, are preempted and end, at every place, and are started again each time."""

from collections import Counter

import pytest
from campaign import KINDS, PLACES, campaign, fault_of

pytestmark = [pytest.mark.slow, pytest.mark.waits]

FAULTS = 10
RANKS = {2: 0, 3: FAULTS}  # number of ranks -> of the first fault


def test_every_place_and_kind_is_met():
    faults = [fault_of(first + k, ranks) for ranks, first in RANKS.items() for k in range(FAULTS)]
    assert len(faults) >= 20
    assert Counter(fault.place for fault in faults).keys() == set(PLACES)
    assert min(Counter(fault.kind for fault in faults)[kind] for kind in KINDS) >= 4


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.variation)])
def test_the_result_is_that_of_an_undisturbed_run(ranks, tmp_path):
    """Bit for bit, each rank soon ends after a fault, and nothing is left behind."""
    result = campaign(tmp_path, ranks, RANKS[ranks], FAULTS, vocab_parallel=ranks == 3)
    assert len(result["met"]) == FAULTS
    assert result["same"]
    assert result["steps"] == 0
    assert result["slowest"] < 20.0  # the next attempt begins in it, beside other tests; alone it takes 5 s
    assert result["left"] == []
