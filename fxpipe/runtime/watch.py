"""A thread that shows the other ranks what this one does, warns of long waits, and ends it if one failed."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch.distributed as dist

from fxpipe.errors import RunError
from fxpipe.runtime.comm import NoAnswer, answered
from fxpipe.runtime.failure import BEAT, Failures, record
from fxpipe.runtime.place import place_of_error, place_of_main_thread

if TYPE_CHECKING:
    from fxpipe.runtime.rank import Runtime

#: Seconds of waiting after which a rank says so, and again after twice as many.
SLOW = 30.0
#: Seconds that a rank has to raise its own error after another one has failed.
GRACE = 3.0
#: Seconds that a rank may wait for others without a store: the machine that had it is gone.
ALONE = 5.0
#: Most ranks of a kind that a message tells of beside its own.
MOST_OTHERS = 8

ENDED = "has ended"  # the last thing that a rank does

log = logging.getLogger("fxpipe")


class Watch:
    """Knows what this rank does: a step of a pipeline, a collective outside of one, or the user's own code.

    A rank whose neighbor has ended raises by itself; a rank that computes, or waits for one that still runs,
    would not notice a failure.  A program pays nothing for it: the thread looks at the runtime now and then.

    ``connections``: functions that give the error of a connection, or None.  On an accelerator a message that
    fails raises nothing in the host, which waits for the device then.  ``compared``: gives the difference
    between the calls that ranks make, once all of them have made one.
    """

    def __init__(self, failures: Failures) -> None:
        self.failures = failures
        self.has_failed = False
        self.connections: list[Callable[[], NoAnswer | None]] = []
        self.compared: Callable[[], str | None] | None = None
        self._runtime: Runtime | None = None
        self._trained: Runtime | None = None
        self._name = ""
        self._following: dict[str, str] = {}  # op -> the op after it in the program
        self._in_step = self._in_collective = False
        self._over = threading.Event()
        self._beat, self._since, self._said, self._before = 0, time.monotonic(), SLOW, ""
        self._thread = threading.Thread(target=self._run, name="fxpipe-watch", daemon=True)
        self._show()
        self._thread.start()
        atexit.register(self._stop)
        _report_uncaught(self)

    # -- what the rank does -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self, runtime: Runtime, ops: Sequence[str], name: str, *, trains: bool) -> Iterator[None]:
        """A step of a program with these ops in order.  name: of the step, as text."""
        self._name = name
        if trains:
            self._trained = runtime
        if self._runtime is not runtime:
            self._runtime, self._following = runtime, dict(pairwise(("", *ops)))
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    @contextlib.contextmanager
    def collective(self) -> Iterator[None]:
        """A collective outside of a step.  Raises RunError as ``lost`` does if it gets no answer."""
        self._in_collective = True
        try:
            with answered():
                yield
        except NoAnswer as error:
            raise self.lost(error) from None
        finally:
            self._in_collective = False

    @property
    def waits(self) -> bool:
        """Whether the rank waits for another one."""
        runtime = self._runtime
        return self._in_collective or (self._in_step and runtime is not None and runtime.waiting is not None)

    def doing(self) -> str:
        """What the rank does or waits for, as text: it continues "rank 3 …"."""
        runtime = self._runtime
        if self._in_collective:
            return f"waits for the other ranks at {place_of_main_thread()}"
        if not self._in_step or runtime is None:
            return f"runs {place_of_main_thread()}, {self.progress()}"
        op, step = runtime.current_op, self._name
        if runtime.waiting is None:
            return f"runs {_described(op)} of {step}" if op else f"begins {step}"
        following = self._following.get(op)
        wanted = f"to run {_described(following)} of {step}" if following else f"at the end of {step}"
        return f"waits for {runtime.waiting}, {wanted}"

    def progress(self) -> str:
        """The steps that this rank has run, as text."""
        if self._trained is None:
            return "before the first step"
        return f"after {self._trained.step_number} steps"

    # -- what becomes of it -------------------------------------------------------------------------------

    def report(self, error: BaseException) -> None:
        """Tell the other ranks, and torchrun's summary, of an error that ends this process."""
        self.has_failed = True
        self.failures.leave(
            f"Rank {self.failures.rank} failed at {place_of_error(error)}, {self.progress()}: "
            f"{type(error).__name__}: {error}"
        )
        record(error)

    def lost(self, error: NoAnswer, show: Callable[[], None] | None = None) -> RunError:
        """The error to raise on a rank that gets no answer: the first failure of a rank, as far as known.

        show: as for ``Failures.survey``.
        """
        doing, rank = self.doing(), self.failures.rank
        try:
            first = self.failures.find()
            if first is None:
                # At once: torchrun ends this process as soon as it notices that another one has ended.
                log.warning("rank %d %s, and got no answer: %s", rank, doing, error)
                gone, rest = _others(self.failures.survey(show), rank)
                own = f"{gone}Rank {rank} {doing}, and got no answer: {error}.{rest}"
                first = self.failures.find() or self.failures.leave(own)
                if first == own:
                    return RunError(own)
        except dist.DistError:  # the store is gone as well
            return RunError(f"Rank {rank} {doing}, and got no answer: {error}.")
        return RunError(f"{first} (Rank {rank} {doing}.)")

    def _run(self) -> None:
        try:
            while not self._over.wait(BEAT):
                if message := self.failures.find():
                    self._end(self._elsewhere(message), GRACE)
                if self._in_step and (compared := self.compared) and (message := compared()):
                    self._end(self._elsewhere(self.failures.leave(message)), GRACE)
                for failure in filter(None, (error() for error in self.connections)):
                    self._end(self.lost(failure, self._show), GRACE)
                self._show()
                self._complain()
        except dist.DistError as error:
            # The run is over, or a rank waits for others that are gone with the store.
            doing = self.doing()
            if not self._over.wait(ALONE) and self.waits and self.doing() == doing:
                self._end(self._elsewhere(f"The store that the ranks share is gone: {error}"), 0.0)

    def _show(self) -> None:
        self._beat += 1
        self.failures.show(self._beat, self.doing())

    def _complain(self) -> None:
        """Say so if the rank has been waiting for the same thing for long."""
        doing, now = self.doing(), time.monotonic()
        if not self.waits or doing != self._before:
            self._since, self._said, self._before = now, SLOW, doing
            return
        if now - self._since >= self._said:
            self._said *= 2
            gone, rest = _others(self.failures.survey(self._show), self.failures.rank)
            text = "%srank %d %s, for %.0f s now.%s"
            log.warning(text, gone, self.failures.rank, doing, now - self._since, rest)

    def _elsewhere(self, message: str) -> RunError:
        """A failure that is not this rank's, with what this rank does."""
        return RunError(f"{message} (Rank {self.failures.rank} {self.doing()}.)")

    def _end(self, error: RunError, grace: float) -> None:
        """End this process, unless it ends by itself."""
        if self._over.wait(grace):
            return
        try:
            print(f"fxpipe: rank {self.failures.rank} ends: {error}", file=sys.stderr, flush=True)
            record(error)
            sys.stdout.flush()
            time.sleep(2 * BEAT)  # torchrun ends all ranks with the first: each is to say why before
        finally:
            os._exit(1)

    def _stop(self) -> None:
        """End the thread: inside torch when the interpreter ends, it would abort the process."""
        self._over.set()
        self._thread.join(GRACE)
        with contextlib.suppress(dist.DistError):
            self.failures.show(self._beat + 1, f"{ENDED}, {self.progress()}")


def _report_uncaught(watch: Watch) -> None:
    """Tell the other ranks of an exception that ends this process, wherever it comes from."""
    before, process = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: object) -> None:
        if os.getpid() == process:
            watch.report(error)
        before(kind, error, trace)  # type: ignore[arg-type]

    sys.excepthook = hook


def _described(op: str) -> str:
    """An op with its stage and microbatch, if it has a name as in schedules."""
    match = re.fullmatch(r"[A-Z]+(\d+)\.(\d+)", op)
    return f"{op} (stage {match[1]}, microbatch {match[2]})" if match else op


def _others(survey: Sequence[tuple[bool, str]], rank: int) -> tuple[str, str]:
    """What is known of other ranks that are gone, and of the rest, as sentences of a message."""
    gone, rest = [], []
    for other, (alive, doing) in enumerate(survey):
        if other == rank:
            continue
        if alive:
            rest.append(f" Rank {other} {doing}.")
        elif doing.startswith(ENDED):
            gone.append(f"Rank {other} {doing}. ")
        else:
            gone.append(
                f"Rank {other} gives no sign of life any more (killed, out of memory, or stopped); the last "
                f"was that it {doing}. "
            )
    return "".join(gone[:MOST_OTHERS]), "".join(rest[:MOST_OTHERS])
