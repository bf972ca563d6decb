"""A thread that shows the other ranks what this one does, warns of long waits, and ends it if one failed."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import islice, pairwise
from typing import TYPE_CHECKING

import torch.distributed as dist

from fxpipe.errors import FxpipeError, RunError, number_of
from fxpipe.runtime.job.failure import BEAT, ENDED, FIRST, WATCHED, Failures, Heartbeat, in_short, record
from fxpipe.runtime.job.heartbeat_survey import shared_survey, with_others
from fxpipe.runtime.job.user_line import comes_from, place_of_error, place_of_main_thread
from fxpipe.runtime.program.comm import NoAnswer, answered
from fxpipe.runtime.torch_private import OF_COLLECTIVES

if TYPE_CHECKING:
    from fxpipe.runtime.job.numbering import Numbering
    from fxpipe.runtime.program.comm import Wait
    from fxpipe.runtime.program.rank import Runtime

#: Seconds of waiting after which a rank says so, and again after twice as many.
SLOW = 30.0
#: Seconds that a rank has to raise its own error after another one has failed.
GRACE = 3.0
#: Seconds that a rank may wait for others without a store, as the machine that had it is gone, or for one
#: whose script is over, even if its process is not, or that has shown nothing yet.
ALONE = 5.0
#: Seconds that a rank waits for one whose process is gone; an error of the connection mostly comes before.
GONE = 1.0
#: Part of the time limit that it waits for one without heartbeats whose process cannot be seen from here.
UNSEEN = 0.1
#: What is left of Ctrl-C for the other ranks.
INTERRUPTED = "was interrupted"

log = logging.getLogger("fxpipe")


class Watch:
    """Knows what this rank does: a step of a pipeline, a collective outside of one, or the user's own code.

    A rank whose neighbor has ended raises by itself; a rank that computes, or waits for one that still runs,
    would not notice a failure.  A program pays nothing for it: the thread looks at the runtime now and then.

    ``connections``: functions that give the error of a connection, or None.  On an accelerator a message that
    fails raises nothing in the host, which waits for the device then.  ``comparisons``: each gives the
    difference between the calls that ranks make, once all of them have made one.
    """

    def __init__(self, failures: Failures, timeout: timedelta) -> None:
        """timeout: the longest time that a rank waits for another one."""
        self.failures, self._unseen = failures, UNSEEN * timeout.total_seconds()
        self.has_failed = False
        self.connections: list[Callable[[], NoAnswer | None]] = []
        self.comparisons: list[Callable[[], str | None]] = []
        self._runtime: Runtime | None = None
        self._numbering: Numbering | None = None
        self._trained: Runtime | None = None
        self._name = ""
        self._ops: Sequence[str] = ()  # of the program, in order
        self._in_step = self._in_collective = False
        self._over = threading.Event()
        self._beat = FIRST - 1
        # What the rank does, the number of its own beats for which it waits for it, since when, and the time
        # after which it says so.
        self._doing, self._waited, self._since, self._said = "", 0, 0.0, SLOW
        self._quiet: dict[int, tuple[str, int]] = {}  # rank -> its last beat, own beats without another one
        self._thread = threading.Thread(target=self._run, name="fxpipe-watch", daemon=True)
        self._show()
        self._thread.start()
        atexit.register(self._stop)
        self._reports = False
        self.report_uncaught()

    # -- what the rank does -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(
        self, runtime: Runtime, numbering: Numbering, ops: Sequence[str], name: str, *, trains: bool
    ) -> Iterator[None]:
        """A step of a program with these ops in order.  numbering: of its pipeline's processes.  name: of the
        step, as text."""
        self._name, self._numbering = name, numbering
        if trains:
            self._trained = runtime
        self._runtime, self._ops, self._in_step = runtime, ops, True
        try:
            yield
        finally:
            self._in_step = False

    @contextlib.contextmanager
    def collective(self) -> Iterator[None]:
        """A wait of the main thread for the other ranks outside of a step.  Raises RunError as ``lost`` does
        if it gets no answer."""
        within, self._in_collective = self._in_collective, True
        try:
            with answered():
                yield
        except NoAnswer as error:
            raise self.lost(error) from None
        finally:
            self._in_collective = within

    @property
    def waits(self) -> bool:
        """Whether the rank waits for another one."""
        return self._in_collective or self._wait_in_step() is not None

    def doing(self) -> str:
        """Describe what the rank does or waits for, in text that continues "rank 3 …"."""
        runtime = self._runtime
        if self._in_collective:
            return f"waits for the other ranks at {place_of_main_thread()}"
        if not self._in_step or runtime is None:
            return f"runs {place_of_main_thread()}, {self.progress()}"
        op, step = runtime.current_op, self._name
        wait = self._wait_in_step()
        if wait is None or self._numbering is None:
            return f"runs {_described(op)} of {step}" if op else f"begins {step}"
        following = dict(pairwise(("", *self._ops))).get(op)
        wanted = f"to run {_described(following)} of {step}" if following else f"at the end of {step}"
        return f"waits for {self._numbering.described(wait)}, {wanted}"

    def _wait_in_step(self) -> Wait | None:
        return self._runtime.waiting if self._in_step and self._runtime is not None else None

    def progress(self) -> str:
        """The steps that this rank has run, as text."""
        if self._trained is None:
            return "before the first step"
        return f"after {number_of(self._trained.step_number, 'step')}"

    def check(self) -> None:
        """Raise RunError where this rank has told or heard of a failure, also if its script goes on."""
        if self.failures.are_known:
            raise RunError(f"{self.failures.find()} The run has failed: no step can follow.")

    # -- what becomes of it -------------------------------------------------------------------------------

    def report(self, error: BaseException) -> str:
        """Tell the other ranks of an error that ends this process, and torchrun's summary of the first of all
        ranks: torchrun takes that of the rank whose end it sees first, which may be another one.

        Returns the first of all ranks, as text.
        """
        self.has_failed = True
        self.failures.hurry()
        what = f"failed{place_of_error(error)}, {self.progress()}: {type(error).__name__}: {error}"
        if isinstance(error, KeyboardInterrupt):
            what = f"{INTERRUPTED}, {self.progress()}"
        first = self.failures.leave(f"Rank {self.failures.rank} {what}")
        record(error if self.failures.began_here else RunError(first))
        return first

    def ended(self, error: BaseException, show: Callable[[], None]) -> None:
        """Report an error that nobody caught, and show it: whole if it is the first of all ranks, and else in
        a line, as the others follow from the first; where it is the same, not at all.  Ctrl-C reaches all
        ranks, and one of them says so."""
        if not isinstance(error, FxpipeError) and comes_from(error, OF_COLLECTIVES):
            self._add_what_others_do(error)
        first = self.report(error)
        is_first = self.failures.began_here
        if isinstance(error, KeyboardInterrupt):
            if is_first:
                print(f"fxpipe: interrupted, {self.progress()}", file=sys.stderr, flush=True)
        elif is_first:
            show()
        else:
            if not str(error) or str(error) not in first:
                text = f"fxpipe: rank {self.failures.rank} ends: {in_short(error)}"
                print(text, file=sys.stderr, flush=True)
            self._over.set()
            _await_torchrun()

    def _add_what_others_do(self, error: BaseException) -> None:
        """Say of an error of a collective of the script's that the other ranks may not have called it."""
        with contextlib.suppress(dist.DistError):
            heartbeats = ((rank, self.failures.seen(rank)) for rank in self.failures.others())
            what = (
                "What communicates with all processes waits for all of them: call it on every rank, between "
                "the same steps."
            )
            error.add_note(with_others(heartbeats, self.failures.rank, what))

    def report_uncaught(self) -> None:
        """Tell the other ranks of an exception that ends this process, wherever it comes from.

        Again where a process group was made: torch wraps the hook that is there then, keeps what that prints,
        and shows it once it returns, which may be too late.
        """
        before, process = sys.excepthook, os.getpid()

        def hook(kind: type[BaseException], error: BaseException, trace: object) -> None:
            def show() -> None:
                before(kind, error, trace)  # type: ignore[arg-type]

            if os.getpid() != process or self._reports:  # the hook of before is inside of torch's
                show()
                return
            self._reports = True
            self.ended(error, show)

        sys.excepthook = hook

    def lost(self, error: NoAnswer, show: Callable[[], None] | None = None) -> RunError:
        """The error to raise on a rank that gets no answer: the first failure of a rank, as far as known.

        show: as for ``Failures.survey``.
        """
        doing, rank = self.doing(), self.failures.rank
        what = f"Rank {rank} {doing}, and got no answer: {error}."
        self.failures.hurry()  # a store that is gone as well must not hold up the error
        try:
            first = self.failures.find()
            if first is None:
                # At once: torchrun ends this process as soon as it notices that another one has ended.
                log.warning("rank %d %s, and got no answer: %s", rank, doing, error)
                survey = shared_survey(self.failures, "no answer", show)
                message = with_others(enumerate(survey), rank, what)
                first = self.failures.find() or self.failures.leave(message)
                if first == message:
                    return RunError(message)
        except dist.DistError as no_store:
            told = with_others(self.failures.missing().items(), rank, what)
            return RunError(f"{told} The store that the ranks share is gone: {no_store}.")
        return RunError(f"{first} (Rank {rank} {doing}.)")

    def _run(self) -> None:
        try:
            while not self._over.wait(BEAT):
                # A failure first: all that follows from it on this rank would be told in its place.
                if message := self.failures.find():
                    self._end(self._elsewhere(message), GRACE / 2 if self.waits else GRACE)
                for compared in [*self.comparisons] if self._in_step else ():
                    if message := compared():
                        self._end(self._elsewhere(self.failures.leave(message)), GRACE)
                for failure in filter(None, (error() for error in self.connections)):
                    self._end(self.lost(failure, self._show), GRACE)
                self._show()
                self._count()
                self._complain()
                self._check_awaited()
        except dist.DistError as error:
            self._run_alone(error)

    def _run_alone(self, error: Exception) -> None:
        """Watch without the store: the run is over, or a rank will wait for others that are gone with it, or
        for the one that has it."""
        self._doing, self._waited = "", 0
        while not self._over.wait(BEAT):
            self._count()
            heartbeats, missing = self.failures.remembered(), self.failures.missing()
            awaited = {0, *self._awaited(heartbeats.__getitem__)}
            if self._waited * BEAT >= ALONE and any(r in missing or not heartbeats[r].runs for r in awaited):
                what = f"The store that the ranks share is gone: {error}."
                told = with_others(missing.items(), self.failures.rank, what)
                self._end(self._elsewhere(told), 0.0)

    def _show(self) -> None:
        self._beat += 1
        self.failures.show(self._beat, self.doing())
        self.failures.look()

    def _count(self) -> None:
        """Count the beats of a wait for one thing: where the machine is busy, they come late as well."""
        doing = self.doing()
        if self.waits and doing == self._doing:
            self._waited += 1
            return
        self._doing, self._waited, self._since, self._said = doing, 0, time.monotonic(), SLOW

    def _complain(self) -> None:
        """Say so if the rank has been waiting for the same thing for long."""
        seconds = time.monotonic() - self._since
        if self._waited and seconds >= self._said:
            self._said *= 2
            survey = shared_survey(self.failures, "a long wait", self._show)
            what = f"rank {self.failures.rank} {self._doing}, for {seconds:.0f} s now."
            log.warning("%s", with_others(enumerate(survey), self.failures.rank, what))

    def _awaited(self, seen: Callable[[int], Heartbeat]) -> dict[int, Heartbeat]:
        """The rank that this one waits for.  Of several the next ones that have not ended: others watch the
        rest, and the store is not asked ranks² times."""
        others, wait = self.failures.others(), None if self._in_collective else self._wait_in_step()
        if wait is not None and self._numbering is not None:
            awaited = self._numbering.awaited(wait)
            others = [rank for rank in others if rank in awaited]
        # Lazily: no more are asked than WATCHED that live, and those that ended before them.
        heartbeats = ((rank, seen(rank)) for rank in others)
        living = dict(islice(((rank, h) for rank, h in heartbeats if not h.has_ended), WATCHED))
        return living or {rank: seen(rank) for rank in others[:1]}

    def _check_awaited(self) -> None:
        """End this process if it waits for one that is gone: an error of the connection may be lost."""
        if not self._waited:
            self._quiet.clear()
            return
        for rank, heartbeat in self._awaited(self.failures.seen).items():
            beat, quiet = self._quiet.get(rank, ("", 0))
            quiet = quiet + 1 if heartbeat.beat == beat else 0
            self._quiet[rank] = heartbeat.beat, quiet
            was_killed = heartbeat.runs is False and not heartbeat.has_ended
            is_silent = heartbeat.has_ended or not heartbeat.beat
            patience = GONE if was_killed else ALONE if is_silent else self._unseen
            if (heartbeat.has_ended or not heartbeat.runs) and quiet * BEAT >= patience:
                self._end(self.lost(NoAnswer("the connection reports no error"), self._show), 0.0)

    def _elsewhere(self, message: str) -> RunError:
        """A failure that is not this rank's, with what this rank does."""
        return RunError(f"{message} (Rank {self.failures.rank} {self.doing()}.)")

    def _end(self, error: RunError, grace: float) -> None:
        """End this process, unless it ends by itself."""
        if self._over.wait(grace):
            return
        try:
            if INTERRUPTED not in str(error):  # the first one says so
                print(f"fxpipe: rank {self.failures.rank} ends: {error}", file=sys.stderr, flush=True)
            record(error)
            sys.stdout.flush()  # os._exit flushes nothing
            time.sleep(2 * BEAT)  # torchrun ends all ranks with the first: each is to say why before
            self._keep_store()
        finally:
            os._exit(1)  # the main thread may hang inside of a backend, where no exception reaches it

    def _stop(self) -> None:
        """End the thread: inside torch when the interpreter ends, it would abort the process.  A store that
        was busy for longer than ``GRACE`` has answered the thread, too, once it answers this one."""
        self._over.set()
        self._thread.join(GRACE)  # before the last word, which its next beat would overwrite
        with contextlib.suppress(dist.DistError):
            self.failures.show(self._beat + 1, f"{ENDED}, {self.progress()}")
        self._thread.join(GRACE)  # once more: the store that this word has waited for answers the thread now
        if self.has_failed or self.failures.are_known:
            self._keep_store()
            _failed.append(self)

    def _keep_store(self) -> None:
        """Let the other ranks read why the run fails, where the store ends with this process."""
        end = time.monotonic() + GRACE
        hosts = self.failures.host == self.failures.rank
        while hosts and time.monotonic() < end and not self.failures.have_ended():
            time.sleep(0.05)


#: Those of runs that failed, when the process ends.
_failed: list[Watch] = []


def _limit_end() -> None:
    """End the process within seconds if its run has failed.

    The destructor of a process group waits for its messages, which another rank, that waits here as well, may
    never send.  No thread of Python runs then.
    """
    if _failed:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        faulthandler.dump_traceback_later(GRACE / 2, exit=True, file=nowhere)


atexit.register(_limit_end)  # as early as possible: it comes after what other libraries do at the end


def _await_torchrun() -> None:
    """Wait for torchrun to end this process, as it does when it notices the first failure.  Its summary lists
    every rank that does not end with 0, and so the first alone."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        time.sleep(GRACE)


def ends_before_others(error: Exception) -> None:
    """Tell torchrun's summary of an error that ends this process before it has joined the others, and mostly
    them as well: rank 0 shows it."""
    record(error)
    if os.environ.get("RANK", "0") != "0":
        _await_torchrun()


def _described(op: str) -> str:
    """An op with its stage and microbatch, if it has a name as in schedules."""
    match = re.fullmatch(r"[A-Z]+(\d+)\.(\d+)", op)
    return f"{op} (stage {match[1]}, microbatch {match[2]})" if match else op
