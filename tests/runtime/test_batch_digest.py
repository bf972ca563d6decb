"""How ranks compare their batches, find an attempt's name and leave their failures, without processes."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import count

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.errors import BatchError, OptionError, RunError
from fxpipe.plan.step import BatchSpec
from fxpipe.runtime.batch.microbatches import batch_spec, microbatches_of
from fxpipe.runtime.job.attempt import (
    NCCL_FAILED,
    agree_on_attempt,
    check_no_failure_of_nccl,
    forget_failure_of_nccl,
    forget_groups,
)
from fxpipe.runtime.job.digest import MOST, digest
from fxpipe.runtime.job.failure import Failures, Heartbeat
from fxpipe.runtime.job.heartbeat_survey import shared_survey, with_others
from fxpipe.runtime.job.limited_store import LimitedStore
from fxpipe.runtime.job.process import as_timeout
from fxpipe.training.optimizer.batch_digest import WORDS, Facts, all_alike, any_stops, difference, words

SOON = timedelta(seconds=20)


# -- digests ----------------------------------------------------------------------------------------------

KINDS = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.uint8,
    torch.bool,
]
SHAPES = [(), (1,), (7,), (8, 5), (3, 0), (4, 3, 50, 60), (3, 9000), (20000,), (20000, 3)]


def random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(shape, dtype=torch.float64) * 50).to(dtype)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_digests_of_equal_tensors(shape, dtype):
    tensor = random(shape, dtype)
    before = tensor.clone()
    found = digest(tensor)
    assert torch.equal(tensor, before), "the batch is left alone"
    assert found.dtype == torch.int64
    other_strides = before.movedim(0, -1).contiguous().movedim(-1, 0) if shape else before
    assert digest(other_strides) == found
    other_dtype = (
        {torch.complex64: torch.complex128}.get(dtype, torch.complex64) if dtype.is_complex else torch.float16
    )
    assert found not in (digest(before.reshape(*shape, 1)), digest(before.to(other_dtype)))


@given(st.data())
def test_each_row_counts(data):
    shape = data.draw(st.sampled_from([(6, 3), (5, 4000), (3, 2, 300, 70), (9000,), (9000, 2)]))
    tensor = random(shape, torch.float32)
    row = data.draw(st.integers(0, shape[0] - 1))
    other = tensor.clone()
    other[row] = random(shape[1:], torch.float32)
    assert digest(other) != digest(tensor)


def test_the_order_of_rows_counts():
    tokens = torch.randint(50000, (8, 1024))
    assert digest(tokens.flip(0)) != digest(tokens)
    assert digest(tokens.roll(1, 0)) != digest(tokens)


def test_rows_that_begin_alike():
    """As texts of which each begins with the same token, and a row has few elements in the sample."""
    tokens = torch.zeros(MOST, 9, dtype=torch.int64)
    other = tokens.clone()
    other[:, 1:] = 1
    assert digest(other) != digest(tokens)


# -- the words of all ranks -------------------------------------------------------------------------------

LEAVES = ["ids", "labels", "mask"]


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randint(100, (4, 6)) for name in LEAVES}


ALIKE = (Facts(1),) * 3


def table(*batches: dict[str, object], facts=ALIKE, leaves=LEAVES) -> str | None:
    rows = [words(own, leaves, b) for own, b in zip(facts, batches, strict=True)]
    assert {row.shape for row in rows} == {(WORDS,)}
    return difference(torch.stack(rows), leaves, "step 0", facts[0].names)


def test_ranks_that_agree():
    assert table(batch(), batch(), batch()) is None


def test_a_rank_with_another_leaf():
    other = batch()
    other["labels"][3, 5] += 1
    message = table(batch(), batch(), other)
    assert message is not None
    assert message.startswith("Rank 2 has other values in 'labels' of the batch than rank 0 in step 0. ")


def test_leaves_that_a_rank_was_not_given():
    first, last = batch(), batch()
    del first["labels"], last["ids"]
    assert table(first, {"mask": None}, last) is None
    last["mask"] = last["mask"] + 1
    assert table(first, {}, last).startswith("Rank 2 has other values in 'mask' of the batch than rank 0")
    assert table({}, first, last).startswith("Rank 2 has other values in 'mask' of the batch than rank 1")


def test_replicas_have_batches_of_their_own():
    first = batch()
    second = {name: x + 1 for name, x in first.items()}
    rows = [words(Facts(1), LEAVES, given) for given in (first, first, second, second)]
    assert difference(torch.stack(rows), LEAVES, replicas=2) is None
    assert not all_alike(torch.stack(rows), LEAVES, 2)
    message = difference(torch.stack([*rows[:3], rows[0]]), LEAVES, "step 0", replicas=2)
    assert message is not None
    assert message.startswith(
        "Rank 3 has other values in 'ids' of the batch than rank 2 of the same replica in step 0. "
    )
    absent = words(Facts(1), LEAVES, {})  # of a rank that needs none of them
    for sign in (1, -1):  # digests have both
        one, other = sign * rows[0].abs(), sign * rows[2].abs()
        assert all_alike(torch.stack([one, absent, absent, one]), LEAVES, 2)
        assert not all_alike(torch.stack([one, absent, absent, other]), LEAVES, 2)


OTHERS = {
    "plan": (Facts(1), Facts(2), Facts(1), "Rank 1 has another plan than rank 0"),
    "outputs": (
        *(Facts(1, asked=k) for k in (5, 5, 6)),
        "Rank 2 asks for other outputs than rank 0 in step 0",
    ),
    "updates": (
        *(Facts(1, updates=k) for k in (0, 8, 7)),
        "Rank 2 has called step() of its optimizer 6 times, and rank 1 7 times, before step 0. Call it",
    ),
    "gradients": (
        *(Facts(1, added=k) for k in (1, 0, 2)),
        "Rank 2 adds to the gradients of 1 earlier steps, and rank 0 to those of 0, in step 0. Call zero",
    ),
    "calls": (
        *(Facts(1, calls=k) for k in (-3, 0, 3)),
        "Rank 2 has called step(), zero_grad(), load_state_dict(), train() or eval() of its optimizer in "
        "another order than",
    ),
    "options": (
        *(Facts(1, options=k) for k in (-7, 0, 7)),
        "The optimizer of rank 2 has other options than that of rank 0 in step 0. Give",
    ),
    "weights": (
        *(Facts(1, written=k) for k in (0, 5, 6)),
        "Rank 2 has changed other weights of the model than rank 1 since pipe.synchronize(), or given them "
        "other values, before step 0",
    ),
    "values": (
        *(Facts(1, names=("mask", "weight"), digests=d) for d in ((3, 4), (0, 4), (3, 5))),
        "Rank 2 has other values of weight than rank 0, before step 0 began",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_rank_that_trains_otherwise(name):
    *facts, message = OTHERS[name]
    found = table(batch(), batch(), batch(), facts=facts)
    assert found is not None
    assert found.startswith(message)


def test_more_leaves_than_words():
    leaves = [f"leaf{k}" for k in range(100)]
    full = {name: torch.randn(2, 3) for name in leaves}
    changed = full | {"leaf99": torch.randn(2, 3)}
    assert table(full, full, full, leaves=leaves) is None
    message = table(full, full, changed, leaves=leaves)
    assert message is not None
    assert "'leaf37' or 'leaf99'" in message
    assert table({"leaf28": full["leaf28"]}, full, full, leaves=leaves) is None


# -- batches ----------------------------------------------------------------------------------------------


def spec() -> BatchSpec:
    return batch_spec({"x": torch.ones(2, 3), "y": torch.ones(2), "scale": 2.0})


def test_a_batch_with_the_leaves_that_are_needed():
    x, y = torch.randn(4, 3), torch.randn(4)
    for given_leaves in ({"x": x}, {"x": x, "y": None}, {"x": x, "scale": 2.0}):
        first, second = microbatches_of(spec(), given_leaves, 2, ["x"], None)
        assert torch.equal(first["x"], x[:2])
        assert torch.equal(second["x"], x[2:])
        assert "y" not in first
    assert microbatches_of(spec(), {}, 2, [], None) == [{}, {}]
    moved = microbatches_of(spec(), {"x": x, "y": y}, 2, ["x"], torch.device("meta"))
    assert all(part["x"].is_meta and not part["y"].is_meta for part in moved)
    with pytest.raises(BatchError, match=r"has leaves x, but .* this rank needs leaves x, y"):
        microbatches_of(spec(), {"x": x, "y": None}, 2, ["x", "y"], None)
    with pytest.raises(BatchError, match=r"'y' has shape \(3,\)|'y' has 3 rows"):
        microbatches_of(spec(), {"x": x, "y": y[:3]}, 2, ["x"], None)
    with pytest.raises(BatchError, match="leaves x, z, but the pipeline was compiled for leaves scale, x, y"):
        microbatches_of(spec(), {"x": x, "z": y}, 2, ["x"], None)


# -- attempts and failures --------------------------------------------------------------------------------


def joined(store: dist.Store, ranks: int) -> list[str]:
    """The names that the ranks of one attempt get, in as many threads."""
    found = [""] * ranks

    def join(rank: int) -> None:
        found[rank] = agree_on_attempt(store, rank, ranks, SOON)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_each_attempt_gets_a_name_of_its_own():
    """In a store that still has all keys of the attempts before."""
    store = dist.HashStore()
    names = [joined(store, 3) for _ in range(3)]
    assert all(len(set(attempt)) == 1 for attempt in names)
    assert len({attempt[0] for attempt in names}) == 3


def test_an_attempt_finds_no_groups_of_the_one_before():
    """Nor does it take what the user has put beside them."""
    store = dist.TCPStore("localhost", 0, is_master=True)
    default = dist.PrefixStore("default_pg", store)
    groups = ["cpu//0/1", "5//cpu//0/1", "cuda//cpu:cuda", "3fa//cuda//0"]
    for key in (*groups, "mine/0", "5/mine"):
        default.set(key, "")
    store.set("another", "")
    agree_on_attempt(
        dist.PrefixStore("fxpipe", store), 0, 1, SOON, when_joined=lambda: forget_groups(default)
    )
    assert sorted(default.list_keys()) == ["5/mine", "mine/0"]
    assert store.check(["another"])


def test_the_signal_of_a_failure_in_nccl_that_an_attempt_left():
    """Torch looks for it in the store without a prefix, and ends each process whose group finds it."""
    store = dist.HashStore()
    shared = LimitedStore(dist.PrefixStore("default_pg", dist.PrefixStore("0", store)), SOON)
    check_no_failure_of_nccl(shared)
    store.set(NCCL_FAILED, "")
    with pytest.raises(RunError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        check_no_failure_of_nccl(shared)
    forget_failure_of_nccl(shared)
    assert not store.check([NCCL_FAILED])
    check_no_failure_of_nccl(shared)


def test_groups_stay_until_all_have_joined():
    store, begun = dist.HashStore(), []
    with pytest.raises(RunError, match="missing: 1"):
        agree_on_attempt(store, 0, 2, timedelta(seconds=0.2), when_joined=lambda: begun.append(0))
    assert not begun


@pytest.mark.parametrize("versions", ["aab", "baa", "abb", "abc"])
def test_other_versions(versions):
    """All ranks say so, whichever has it, also where another one was answered before."""
    store, found = dist.HashStore(), {}

    def join(rank: int) -> None:
        with pytest.raises(RunError, match=r"runs ., and rank 0 .\. Install") as raised:
            agree_on_attempt(store, rank, 3, SOON, versions[rank])
        found[rank] = str(raised.value)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    assert found.keys() == {0, 1, 2}


def test_an_older_version_without_a_word_on_its_own():
    store = dist.HashStore()
    store.set("word/1", "0123")
    with pytest.raises(RunError, match="Rank 1 runs an older fxpipe, and rank 0 fxpipe "):
        agree_on_attempt(store, 0, 2, SOON)
    assert " " not in store.get("answer/0123").decode()


def test_ranks_that_do_not_join_in_time():
    store, soon = dist.HashStore(), timedelta(seconds=0.2)
    with pytest.raises(RunError, match="missing: 1, 2"):
        agree_on_attempt(store, 0, 3, soon)
    with pytest.raises(RunError, match=r"waited 0:00:00\.200000 for rank 0 to begin the run\. See its"):
        agree_on_attempt(store, 1, 3, soon)


def test_the_first_failure_is_the_one():
    store = dist.HashStore()
    first, second = Failures(store, 0, 2), Failures(store, 1, 2)
    assert first.find() is None
    assert second.leave("Rank 1 failed") == "Rank 1 failed"
    assert first.leave("Rank 0 failed") == "Rank 1 failed"
    assert first.find() == second.find() == "Rank 1 failed"


@pytest.mark.slow
def test_silent_ranks():
    store = dist.HashStore()
    first, second = Failures(store, 0, 2), Failures(store, 1, 2)
    first.show(1, "runs a step")
    second.show(1, "waits")
    beats = threading.Timer(0.3, lambda: first.show(2, "waits for rank 1"))
    beats.start()
    found = second.survey()
    assert [(sign.beats, sign.doing) for sign in found] == [(True, "waits for rank 1"), (False, "waits")]
    beats.join()


def test_ranks_that_look_at_each_other_are_not_silent():
    """Both complain of the same wait at the same time."""
    store, found = dist.HashStore(), {}
    ranks = [Failures(store, rank, 2) for rank in range(2)]

    def survey(rank: int) -> None:
        beats = count(2)
        found[rank] = ranks[rank].survey(lambda: ranks[rank].show(next(beats), "waits"))

    for failures in ranks:
        failures.show(1, "waits")
    threads = [threading.Thread(target=survey, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(sign.beats and sign.doing == "waits" for signs in found.values() for sign in signs)


class Counted(dist.HashStore):
    """``asked``: how often."""

    asked = 0

    def check(self, keys: list[str]) -> bool:
        self.asked += keys[0].startswith("rank/")
        return super().check(keys)


def surveyed(ranks: Sequence[Failures]) -> list[list[tuple[bool, str]]]:
    """What ranks find that look at each other at the same time."""

    beats = count(time.monotonic_ns())

    def survey(failures: Failures) -> list[tuple[bool, str]]:
        found = shared_survey(failures, "test", lambda: failures.show(next(beats), "waits"))
        return [(sign.beats, sign.doing) for sign in found]

    with ThreadPoolExecutor(len(ranks)) as pool:
        return [*pool.map(survey, ranks)]


@pytest.mark.slow
def test_one_rank_looks_at_all_others_for_all():
    store = Counted()
    ranks = [Failures(store, rank, 6) for rank in range(6)]
    for failures in ranks:
        failures.show(1, "waits")
    for _ in range(2):
        store.asked = 0
        assert surveyed(ranks[:5]) == [[*[(True, "waits")] * 5, (False, "waits")]] * 5
        assert store.asked == 2 * 6


def test_ranks_that_do_the_same_are_told_of_once():
    waits, runs = Heartbeat("1", "waits for rank 9", True), Heartbeat("1", "runs F0.1", True)
    gone = Heartbeat("1", "runs F0.2", False)
    survey = [waits, runs, waits, gone, *[waits] * 10]
    killed, rest = with_others(enumerate(survey), 0, "Rank 0 ends.").split("Rank 0 ends.")
    assert killed.startswith("Rank 3 gives no sign of life any more (killed, or out of memory)")
    assert rest == (
        " Rank 1 runs F0.1. Rank 2 waits for rank 9; so do ranks 4, 5, 6, 7, 8, 9, 10, 11 and 2 more."
    )
    assert with_others(enumerate([waits, runs, runs]), 0, "") == " Rank 1 runs F0.1; so does rank 2."


@pytest.mark.slow
def test_a_rank_that_is_gone_while_it_looks():
    store = Counted()
    ranks = [Failures(store, rank, 4) for rank in range(4)]
    for failures in ranks:
        failures.show(1, "waits")
    store.set("survey/test", "survey/by one that is gone")
    assert surveyed(ranks[:3]) == [[*[(True, "waits")] * 3, (False, "waits")]] * 3
    assert store.asked == 2 * 4
    store.set("survey/test", "survey/by one that is gone")
    threading.Timer(0.3, lambda: ranks[3].leave("Rank 3 failed")).start()
    assert surveyed(ranks[:3]) == [[]] * 3


def test_time_limits():
    assert as_timeout(None) is None
    assert as_timeout(1.5) == timedelta(seconds=1.5) == as_timeout(timedelta(seconds=1.5))
    for wrong in (0, -1.0, timedelta(), float("nan"), float("inf"), "10 minutes"):
        with pytest.raises(OptionError, match="is no time above 0"):
            as_timeout(wrong)


def test_one_rank_that_was_asked_to_stop_stops_all():
    rows = [words(Facts(7, stop=rank == 1), ["x"], {"x": torch.ones(2)}) for rank in range(3)]
    assert any_stops(torch.stack(rows))
    assert difference(torch.stack(rows), ["x"]) is None
    assert not any_stops(torch.stack([rows[0], rows[2]]))
