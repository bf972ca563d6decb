"""Steps over a backend that blocks where those of GPUs block: what would hang there must not hang here."""

import re

import blocking_worker as worker
import pytest
import torch
from blocking_worker import LIMIT_OF_A_HANG, shapes
from launch import forked
from marks import with_variations
from zoo import Shape

pytestmark = [pytest.mark.slow, pytest.mark.waits]

#: More microbatches than ranks, as many, and fewer.
MICROBATCHES = {2: [3], 3: [2], 4: [2]}
#: What is undone, and where it hangs.
FAULTS = {
    "the first message of a channel is in the step": (
        "lazy",
        Shape(2, "gpipe", vocab_parallel="1-barrier"),
        3,
    ),
    "the first collective of a kind is in the step": ("kinds", Shape(2, "1f1b", vocab_parallel=True), 4),
    "ops wait for sends before them": ("waits", Shape(2, "zb-h1", 2, "v"), 4),
    "ranks connect in different orders": ("order", Shape(3, "1f1b"), 2),
}
#: What is undone, where it is seen, and what is wrong then.
WRONG = {
    "what is sent is let go at once": ("kept", Shape(2, "1f1b"), "AssertionError: Shape"),
    "a message is several operations": ("one", Shape(2, "zb-v", 2, "v"), "a message is one operation"),
}


#: Every second family each; tests/schedule proves of all that their executions have no cycle.
@pytest.mark.parametrize("first", with_variations([0, 1], [1]))
@pytest.mark.parametrize("ranks", with_variations([2, 3, 4], [2, 4]))
def test_all_families_end_with_the_gradients_of_eager(ranks, first, tmp_path):
    asked = shapes(ranks)[first::2], MICROBATCHES[ranks]
    run = forked(ranks, worker.run, *asked, dtype=torch.float64, logs=tmp_path / "logs")
    assert run.code == 0, run


def test_replicas_end_with_the_gradients_of_eager(tmp_path):
    """Sums and gathers over them block at first, while the ranks of a pipeline wait for each other."""
    run = forked(4, worker.run, worker.REPLICAS, [3], dtype=torch.float64, logs=tmp_path / "logs")
    assert run.code == 0, run


@pytest.mark.in_ci("ops wait for sends before them")
@pytest.mark.parametrize("name", FAULTS)
def test_what_is_undone_hangs(name, tmp_path):
    fault, shape, microbatches = FAULTS[name]
    asked = [shape], [microbatches], fault, LIMIT_OF_A_HANG
    run = forked(shape.ranks, worker.run, *asked, dtype=torch.float64, logs=tmp_path / "logs")
    assert run.code != 0
    assert re.search(r"[Tt]imed? ?out", run.own + "".join(run.stderr)), run


@pytest.mark.variation
@pytest.mark.parametrize("name", WRONG)
def test_what_is_undone_is_wrong(name, tmp_path):
    fault, shape, message = WRONG[name]
    run = forked(2, worker.run, [shape], [4], fault, dtype=torch.float64, logs=tmp_path / "logs")
    assert run.code != 0
    assert message in "".join(run.stderr), run


def test_an_error_of_a_communicator_ends_all_ranks_with_one_message(tmp_path):
    """No wait of a host ends: the messages of each channel are lost from the third of a step on."""
    run = forked(3, worker.run, [Shape(3, "1f1b")], [4], "lost", dtype=torch.float64, logs=tmp_path / "logs")
    assert run.code != 0
    first = re.search(
        # The error may come while the op before still runs.
        r"Rank (\d) (?:waits for rank \d, to run|runs) (?:F|BW)\1\.\d \(.*\) of step 0, and got no answer: "
        r"a message from rank \d to rank \1, by blocking, failed with COMM_ERROR, .* go on from the last "
        r"checkpoint\.",
        run.stderr[0],
    )
    assert first, run
    said = [first[0].lower() in text.lower() for text in run.stderr]
    assert said == [True] * 3, run


def test_ranks_compare_batches_wherever_these_are(tmp_path):
    """On a device, on the CPU, and without any tensor, beside a backend for devices."""
    run = forked(3, worker.batches_on_devices, dtype=torch.float64, logs=tmp_path / "logs")
    assert run.code == 0, run


SETTLED = [
    Shape(3, "1f1b"),
    Shape(3, "zb-v", 2, "v"),
    Shape(3, "1f1b", vocab_parallel="2-barrier"),
]
#: What is undone, where it is seen, and what is found in the four steps of some rank.
UNSETTLED = {
    "the optimizer takes the memory of steps": ("pool", Shape(2, "1f1b"), r"memory \[(?!0, 0, 0, 0\])"),
    "dry runs keep nothing that is sent": ("kept", Shape(2, "zb-v", 2, "v"), r"memory \[[1-9]\d*, 0, 0, 0\]"),
    "the first step is the first run": ("dry", Shape(2, "1f1b"), r"first used \['aten"),
}


@pytest.mark.variation
def test_no_step_asks_the_device_for_memory_or_for_a_new_kernel(tmp_path):
    """By a model of torch's allocator: either may wait for messages under way."""
    run = forked(3, worker.trains_in_settled_memory, SETTLED, 4, dtype=torch.float64, logs=tmp_path / "logs")
    assert run.code == 0, run


@pytest.mark.variation
@pytest.mark.parametrize("name", UNSETTLED)
def test_what_is_undone_asks_the_device(name, tmp_path):
    fault, shape, message = UNSETTLED[name]
    asked = [shape], 6, fault
    run = forked(
        shape.ranks, worker.trains_in_settled_memory, *asked, dtype=torch.float64, logs=tmp_path / "logs"
    )
    assert run.code != 0
    assert re.search(message, "".join(run.stderr)), run
