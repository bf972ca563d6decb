"""Replicas that do not fit together: one clear error on every process, and no hang."""

import json
import re
import time

import pytest
import replicas_that_differ_worker as worker
import torch
from launch import forked, printed
from replicas_worker import RANKS, REPLICAS

from fxpipe.errors import CaptureError

pytestmark = [pytest.mark.slow, pytest.mark.waits]

PROCESSES = RANKS * REPLICAS
#: What differs, and what every process says.
ERRORS = {
    "no multiple": r"RunError: The pipeline has 3 ranks and there are 4 processes\. Start it with torchrun "
    r"--nproc-per-node 3, or a multiple of it for replicas, or compile with ranks=4",
    "other replicas": r"RunError: The pipeline has 2 ranks in 3 replicas and there are 4 processes\. .*"
    r"--nproc-per-node 6, or compile with ranks=4, replicas=1",
    "replicas beside a mesh": r"OptionError: The mesh has 2 replicas, and replicas is 3",
    "ranks first": r"OptionError: ranks is a DeviceMesh .*with the dimensions pp, dp, .*the ranks last",
    "ranks apart": r"OptionError: ranks is a DeviceMesh of the processes \[\[0, 2\], \[1, 3\]\], and a "
    r"pipeline needs \[replica · ranks \+ rank\]",
    "mesh of three": r"OptionError: ranks is a DeviceMesh of the processes \[\[\[0, 1\], \[2, 3\]\]\]",
    "other options": r"RunError: Rank 2 has shard='optimizer' in the arguments of fxpipe.compile, and rank 0 "
    r"shard=None",
    "buffer": r"(CaptureError|RunError): .*The step changes mean, which is in no state dict",
    "other plans": r"RunError: Rank 2 has another .*plan.json than rank 0",
    "earlier version": r"RunError: .*saved by a version of fxpipe that knows no replicas\. Compile it again, "
    r"or start as many processes as it has ranks: 2",
    "edited": r"RunError: Rank 3, of replica 1, runs another rank1.py than rank 1, of replica 0: line \d+ is "
    r"'.*reduce_gradients\(1\).*', and there '.*reduce_gradients\(0\).*'",
}
#: What processes say where a step fails, in the order of ``worker.FAILURES``.
FAILURES = (
    r"BatchError: 'x' has 3 rows, .* 4 are needed",
    r"Rank [23] has ended, after 1 step|waits for the other .*(?s:.)*got no answer",
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("replicas")
    run = forked(PROCESSES, worker.differ, directory, dtype=torch.float64, logs=directory / "logs")
    assert run.code == 0, run
    return directory


def test_all_processes_say_what_differs(directory):
    for process in range(PROCESSES):
        errors, warned = json.loads((directory / f"{process}.json").read_text())
        assert errors.keys() == ERRORS.keys()
        for name, expected in ERRORS.items():
            assert re.match(expected, errors[name]), (name, process, errors[name])
        assert warned["own rows"] == []
        same = [text for text in warned["same rows"] if "All replicas have the same batch in step 0" in text]
        assert len(same) == len(warned["same rows"]) == (process == 0)


def test_a_step_that_fails_on_one_replica_ends_all(directory):
    """Those that torch's agent has not ended before say why, or as far as they came that they wait."""
    begun, attempts, logs = time.monotonic(), len(FAILURES), directory / "failures"
    run = forked(PROCESSES, worker.fail, directory, dtype=torch.float64, logs=logs, restarts=attempts - 1)
    assert run.code != 0
    assert time.monotonic() - begun < attempts * worker.LIMIT
    for attempt, expected in enumerate(FAILURES):
        said = [*filter(None, printed(logs, "stderr", PROCESSES, attempt))]
        assert said
        assert all(re.search(expected, text) for text in said), (attempt, said)


@pytest.mark.parametrize("buffer", [False, True])
def test_state_of_each_replica_is_refused_as_it_is_compiled(buffer):
    with pytest.raises(CaptureError, match="The step changes mean, which is in no state dict"):
        worker.compiled(worker.Remembers(buffer), replicas=REPLICAS)
