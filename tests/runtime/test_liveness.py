"""Signs of life: which processes are gone, and errors that are written as a whole."""

import ast
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from pathlib import Path
from queue import Empty, SimpleQueue
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import fxpipe
from fxpipe.errors import RunError
from fxpipe.runtime.job import watch as watches
from fxpipe.runtime.job.failure import BEAT, ENDED, Failures, record
from fxpipe.runtime.job.last_works import lasting
from fxpipe.runtime.job.limited_store import LimitedStore, NoStore
from fxpipe.runtime.job.liveness import own_process, runs
from fxpipe.runtime.job.numbering import Numbering
from fxpipe.runtime.job.watch import ALONE, Watch
from fxpipe.runtime.program.comm import NoAnswer, Wait

OTHER = "import fxpipe.runtime.job.liveness as life; print(life.own_process(), flush=True); input()"


def other_process() -> tuple[subprocess.Popen, str]:
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return process, process.stdout.readline().strip()


def test_processes_that_run_and_are_gone():
    process, name = other_process()
    assert name != own_process()
    assert runs(own_process()) is True
    assert runs(name) is True
    process.send_signal(signal.SIGSTOP)
    assert runs(name) is True
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert runs(name) is False, "it has ended, and waits to be reaped"
    process.communicate()
    assert runs(name) is False
    machine, _, rest = own_process().partition("/")
    assert runs(f"{machine}/{os.getpid()}/1") is False, "another process had this number"
    assert runs(f"another {machine}/{rest}") is None
    assert runs("unknown") is None


@pytest.fixture
def watch_of(monkeypatch):
    """Makes that of a rank of several, whose thread does nothing, and which tells how it would end."""
    monkeypatch.setattr(Watch, "_run", lambda self: None)
    monkeypatch.setattr(Watch, "report_uncaught", lambda self: None)
    monkeypatch.setattr(watches.atexit, "register", lambda *_: None)
    monkeypatch.setattr("fxpipe.runtime.job.failure.SILENCE", 0.0)

    def watch_of(rank: int, ranks: int) -> Watch:
        watch = Watch(Failures(dist.HashStore(), rank, ranks), timedelta(seconds=100))
        watch.ends = []
        monkeypatch.setattr(watch, "_end", lambda error, grace: watch.ends.append(str(error)))
        return watch

    return watch_of


@pytest.fixture
def watch(watch_of):
    return watch_of(0, 3)


def beats_until_it_ends(
    watch: Watch, others: dict[int, str], most: int = 40, waiting: AbstractContextManager | None = None
) -> int | None:
    """While it waits, in one collective by default; the others do this, and show no new sign of life."""
    for rank, doing in others.items():
        watch.failures.store.set(f"rank/{rank}", f"7 {doing}")
    with waiting or watch.collective():
        for beat in range(most):
            watch._count()
            watch._check_awaited()
            if watch.ends:
                return beat
    return None


def test_a_rank_that_waits_for_one_that_was_killed_ends(watch):
    process, name = other_process()
    watch.failures.store.set("process/2", name)
    watch.failures.store.set("process/1", own_process())
    process.kill()
    process.communicate()
    assert beats_until_it_ends(watch, {1: "waits", 2: "runs F2.1 of step 3"}) * BEAT <= 2.0
    assert "Rank 2 gives no sign of life any more (killed, or out of memory)" in watch.ends[0]
    assert "the last was that it runs F2.1 of step 3" in watch.ends[0]
    assert "Rank 1 gives no sign of life any more" not in watch.ends[0]


def test_a_rank_that_is_stopped_or_in_a_long_call_is_waited_for(watch):
    for rank in (1, 2):
        watch.failures.store.set(f"process/{rank}", own_process())
    assert beats_until_it_ends(watch, {1: "waits", 2: "runs F2.1 of step 3"}) is None


def test_a_rank_that_cannot_be_seen_is_waited_for_longer(watch):
    """A tenth of the time limit."""
    assert beats_until_it_ends(watch, {1: "waits", 2: "runs"}) * BEAT == pytest.approx(10.0, abs=2 * BEAT)
    assert "(killed, out of memory, or stopped)" in watch.ends[0]


def test_a_rank_that_has_ended_may_have_done_its_part(watch):
    watch.failures.store.set("process/1", own_process())
    assert beats_until_it_ends(watch, {1: "waits", 2: f"{ENDED}, after 3 steps"}) is None


def test_a_rank_that_has_ended_sends_no_more_though_its_process_runs(watch):
    for rank in (1, 2):
        watch.failures.store.set(f"process/{rank}", own_process())
    ended = dict.fromkeys((1, 2), f"{ENDED}, after 3 steps")
    assert beats_until_it_ends(watch, ended) * BEAT == pytest.approx(ALONE, abs=2 * BEAT)
    assert "has ended, after 3 steps" in watch.ends[0]


def test_what_ends_a_rank_is_said_unless_the_script_was_interrupted(watch, monkeypatch, capsys):
    codes = list[int]()
    monkeypatch.setattr(watches, "record", lambda error: None)
    monkeypatch.setattr(Watch, "_keep_store", lambda self: None)
    monkeypatch.setattr(watches.os, "_exit", codes.append)
    for text in ("rank 1 has failed", f"rank 1 {watches.INTERRUPTED}"):
        Watch._end(watch, RunError(text), 0.0)
    assert capsys.readouterr().err == "fxpipe: rank 0 ends: rank 1 has failed\n"
    assert codes == [1, 1]


def test_only_who_waits_ends(watch):
    process, name = other_process()
    watch.failures.store.set("process/2", name)
    process.kill()
    process.communicate()
    for _ in range(40):
        watch._count()
        watch._check_awaited()
    assert watch.ends == []


RANK_0 = Wait("rank {}", 0)
#: What the process of a number waits for in a mesh, where one was killed: how it says so; None if it goes on.
WAITS = {
    (3, "2 x 2 x 1", RANK_0, 2): "Rank 3 waits for rank 2, to run F1.1 (stage 1, microbatch 1) of step 4",
    (3, "2 x 2 x 1", RANK_0, 0): None,
    (0, "2 x 2 x 1", Wait("the other replicas", "replicas"), 2): "the other replicas (rank 2), to run",
    (0, "2 x 2 x 1", Wait("the other replicas", "replicas"), 1): None,
    (1, "2 x 2 x 1", Wait("all ranks", "ranks"), 0): "Rank 1 waits for all ranks (rank 0), to run",
    (1, "2 x 2 x 1", Wait("all ranks", "ranks"), 2): None,
    (3, "1 x 2 x 2", RANK_0, 1): "Rank 3 waits for rank 1, to run",
    (3, "1 x 2 x 2", RANK_0, 0): None,
    (2, "1 x 2 x 2", Wait("the other lanes of its rank", "lanes"), 3): "lanes of its rank (rank 3), to run",
    (2, "1 x 2 x 2", Wait("the other lanes of its rank", "lanes"), 1): None,
    (6, "2 x 2 x 2", Wait("the loss of rank {}", 1), 6): None,
    (4, "2 x 2 x 2", Wait("the loss of rank {}", 1), 6): "Rank 4 waits for the loss of rank 6, to run",
    (5, "2 x 2 x 2", Wait("its offloaded activations", None), 4): None,
}


@pytest.mark.parametrize(("process", "mesh", "wait", "killed"), WAITS)
def test_the_process_that_is_waited_for_is_watched_and_named(watch_of, process, mesh, wait, killed):
    replicas, ranks, lanes = map(int, mesh.split(" x "))
    number = replicas * ranks * lanes
    watch = watch_of(process, number)
    for other in range(number):
        gone = other == killed != process
        watch.failures.store.set(f"process/{other}", f"{own_process()}0" if gone else own_process())
    numbering = Numbering(world_rank=process, world_size=number, ranks=ranks, lanes=lanes)
    runtime = SimpleNamespace(waiting=wait, current_op="F1.0", step_number=4)
    step = watch.step(runtime, numbering, ["F1.0", "F1.1"], "step 4", trains=True)
    beats = beats_until_it_ends(watch, dict.fromkeys(range(number), "runs"), 6, step)
    expected = WAITS[process, mesh, wait, killed]
    assert (beats is None) == (expected is None)
    if expected is not None:
        assert watch.ends[0].startswith(f"Rank {killed} gives no sign of life any more (killed")
        assert expected in watch.ends[0]


# -- the store --------------------------------------------------------------------------------------------


class StoppedStore(dist.HashStore):
    """Gives no answer about one key."""

    def check(self, keys):
        if keys == ["stopped"]:
            threading.Event().wait()
        return super().check(keys)


def test_a_call_of_a_store_that_is_stopped_ends():
    store = LimitedStore(StoppedStore(), timedelta(seconds=0.5))
    store.set("key", "value")
    assert (store.get("key"), store.check(["key"]), store.check(["none"])) == (b"value", True, False)
    with pytest.raises(dist.DistStoreError):
        store.wait(["none"], timedelta(seconds=0.1))
    begun, ends = time.monotonic(), []

    def call(key: str) -> None:
        with pytest.raises(NoStore, match=r"no answer for 0:00:00\.5"):
            store.check([key])
        ends.append(time.monotonic() - begun)

    first = threading.Thread(target=call, args=["stopped"])
    first.start()
    time.sleep(0.3)
    call("key")  # it waits for its turn
    first.join()
    assert all(0.4 < seconds < 0.75 for seconds in ends), "and no longer than the first one"
    call("key")
    assert ends[-1] < 0.8, "at once"


class TakenMeanwhile(SimpleQueue):
    """A queue whose only call another thread takes as soon as this one has seen it."""

    def empty(self):
        is_empty = super().empty()
        with suppress(Empty):
            self.get_nowait()
        return is_empty


def test_the_store_is_given_up_as_its_thread_takes_the_last_call():
    store = LimitedStore(dist.HashStore(), timedelta(seconds=0.2))
    caller = store._caller
    caller._calls = TakenMeanwhile()  # the thread waits for calls of the other queue

    def call() -> None:
        with pytest.raises(NoStore):
            store.get("key")

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()


def test_who_is_known_to_be_missing_without_a_store(watch_of):
    """The process that has the store does not answer, and may run."""
    watch = watch_of(2, 4)
    failures = watch.failures
    for rank, process in {0: own_process(), 1: own_process(), 3: f"{own_process()}0"}.items():
        failures.store.set(f"process/{rank}", process)
        failures.store.set(f"rank/{rank}", "7 runs F0.1 of step 3")
        failures.seen(rank)

    class Gone(dist.HashStore):
        def check(self, keys):
            raise NoStore("no answer for 0:01:00")

    watch.failures = Failures(
        Gone(), 2, 4, 0, _processes=failures._processes, _heartbeats=failures._heartbeats
    )
    error = str(watch.lost(NoAnswer("timed out")))
    assert error.startswith("Rank 3 gives no sign of life any more (killed")
    assert "got no answer: timed out. Rank 0 gives no sign of life (stopped, or in a long call)" in error
    assert error.endswith("The store that the ranks share is gone: no answer for 0:01:00.")
    assert "Rank 1" not in error


def test_a_run_that_fails_does_not_wait_for_the_store(watch_of, monkeypatch):
    """Where the script's own group has a shorter time limit than the store."""
    monkeypatch.setattr("fxpipe.runtime.job.failure.HURRY", 0.3)
    watch = watch_of(1, 2)

    class Stopped(dist.HashStore):
        def check(self, keys):
            threading.Event().wait()

    watch.failures = Failures(LimitedStore(Stopped(), timedelta(seconds=60)), 1, 2, 0)
    begun = time.monotonic()
    error = str(watch.lost(NoAnswer("timed out")))
    assert error.endswith("The store that the ranks share is gone: no answer for 0:00:00.300000.")
    assert time.monotonic() - begun < 2.0


class BusyStore(dist.HashStore):
    """One that answers nobody for a while, as where the process that has it is not run."""

    def __init__(self):
        super().__init__()
        self.is_asked, self.answers = threading.Event(), threading.Event()
        self.answers.set()

    def check(self, keys):
        self.is_asked.set()
        self.answers.wait()
        time.sleep(0.2)  # the thread gets its turn after the main one
        return super().check(keys)

    def set(self, key, value):
        self.answers.wait()
        super().set(key, value)


def test_the_thread_ends_before_the_process_though_the_store_is_busy(monkeypatch):
    monkeypatch.setattr(Watch, "report_uncaught", lambda self: None)
    monkeypatch.setattr(watches.atexit, "register", lambda *_: None)
    monkeypatch.setattr(watches, "BEAT", 0.01)
    store = BusyStore()
    watch = Watch(Failures(store, 0, 1), timedelta(seconds=100))
    store.answers.clear()
    store.is_asked.clear()
    assert store.is_asked.wait(10.0)
    monkeypatch.setattr(watches, "GRACE", 1.5)
    threading.Timer(1.7, store.answers.set).start()
    watch._stop()
    assert not watch._thread.is_alive()


# -- the end ----------------------------------------------------------------------------------------------


def test_tensors_of_a_work_live_until_the_next_one():
    """Else a thread of gloo might be the last to have them, when the interpreter ends."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group, alive = dist.group.WORLD, []
        for _ in range(2):
            tensor = torch.ones(4)
            alive.append(weakref.ref(tensor))
            lasting(dist.broadcast(tensor, 0, async_op=True), group).wait()
            del tensor
        end = time.monotonic() + 10.0
        while alive[0]() is not None and time.monotonic() < end:
            time.sleep(0.01)
        assert alive[0]() is None
        assert alive[1]() is not None
    finally:
        dist.destroy_process_group()


BLOCKING = {"broadcast", "gather", "all_gather", "all_gather_object", "all_reduce", "all_to_all_single"}


def test_no_collective_lets_its_tensors_go():
    """They are begun, and waited for with what ``lasting`` has kept."""
    names = {f"dist.{name}" for name in BLOCKING}
    for file in Path(fxpipe.__file__).parent.rglob("*.py"):
        text = file.read_text()
        calls = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call)] if "dist." in text else []
        for call in calls:
            if ast.unparse(call.func) in names:
                begun = "async_op" in {keyword.arg for keyword in call.keywords}
                assert (begun, "lasting" in text) == (True, True), f"{file}:{call.lineno}"


# -- errors -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def disk_of(size: int):
    """No file can be larger, as on a disk that is full."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.parametrize("before", ["", '{"mess'])
@pytest.mark.parametrize("size", [None, 0, 20])
def test_an_error_is_written_whole_or_not_at_all(tmp_path, monkeypatch, size, before):
    """Also where torch has begun to write it."""
    file = tmp_path / "error.json"
    if before:
        file.write_text(before)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    try:
        raise ValueError("a bad row")
    except ValueError as error:
        with contextlib.nullcontext() if size is None else disk_of(size):
            record(error)
            record(RuntimeError("a later one"))
    if size is not None:
        assert list(tmp_path.iterdir()) == []
        return
    assert list(tmp_path.iterdir()) == [file]
    message = json.loads(file.read_text())["message"]
    assert message["message"] == "ValueError: a bad row"
    assert "test_an_error_is_written" in message["extraInfo"]["py_callstack"]
    assert int(message["extraInfo"]["timestamp"]) > 1e9
