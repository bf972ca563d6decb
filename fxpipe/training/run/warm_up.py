"""Runs of a rank's program alone, before it runs with the others: they compile its kernels, and settle the
memory of steps where messages wait on the device."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fxpipe.runtime.program.inductor import compiled_functions
from fxpipe.runtime.program.load_program import Program
from fxpipe.runtime.program.rank import Runtime
from fxpipe.runtime.ranks.distributed import DistributedComm
from fxpipe.runtime.ranks.dry_run import dry_run
from fxpipe.runtime.ranks.send_buffers import SentOnStreams
from fxpipe.runtime.ranks.send_release import Releases, as_bytes, events_from, releases
from fxpipe.runtime.ranks.step_memory import step_memory
from fxpipe.training.model.accumulators import zero_gradients
from fxpipe.training.model.model_state import ModelState

log = logging.getLogger("fxpipe")

RUN_ALONE = "run its program alone"
#: The most runs until the memory of steps is settled; each but the last finds that it needs more.
MOST_RUNS = 8


@dataclass(eq=False)
class WarmUp:
    """The runs of one pipeline's program alone, on this rank."""

    state: ModelState
    _is_over: bool = False
    _releases: Releases | None = None  # None if messages do not wait on the device
    _program: Program | None = None  # of which these are
    _settled_at: int = -1  # when the memory of steps had grown so often
    _has_said_grown: bool = False

    def run(self, rt: Runtime, program: Program, batch: object, before: Callable[[], object]) -> None:
        """Run the program alone before its first step, if Inductor compiles it on some rank, or messages wait
        on the device; there also until it asks for no memory.

        before: code of the step outside of its program, whose kernels are loaded too.
        """
        process, device = self.state.process, self.state.device
        if self._is_over or process is None:
            return
        compiles = any(process.gather(b"some" if compiled_functions(program.step) else b""))
        on_streams = process.backend(device) != "gloo"
        if compiles or on_streams:
            self.state.follow_model()
            rt.params, rt.buffers = self.state.params_and_buffers(rt.rank)
            with process.agreed(RUN_ALONE), process.unhurried():
                before()
                grads = zero_gradients(self.state, rt.rank)
                rt.params |= self.state.stand_ins(rt.rank)
                with step_memory(device).use() if on_streams else contextlib.nullcontext():
                    events = dry_run(rt, program.step, batch, grads)
                del grads
                rt.params = {}
        if on_streams:
            ranks = [events_from(data) for data in process.gather_in_replica(as_bytes(events))]
            known = [each for each in ranks if each is not None]
            self._releases = releases(known)[rt.rank] if len(known) == len(ranks) else ()
            self._program = program
            assert isinstance(rt.comm, DistributedComm)
            rt.comm.sent = SentOnStreams(self._releases)
            with process.agreed(RUN_ALONE), process.unhurried():
                self.settle(rt, program, batch)
        self._is_over = True

    def settle(self, rt: Runtime, program: Program, batch: object) -> None:
        """Run the program alone, where steps need a settled memory, until it asks for none."""
        if self._releases is None:
            return
        memory = step_memory(self.state.device)
        if self._settled_at == memory.grown:
            return
        grads = zero_gradients(self.state, rt.rank)
        rt.params, _ = self.state.params_and_buffers(rt.rank)
        rt.params |= self.state.stand_ins(rt.rank)
        for _ in range(MOST_RUNS):
            before = memory.grown
            with memory.use():
                dry_run(rt, program.step, batch, grads, self._releases)
            if memory.grown == before:
                break
        self._settled_at = memory.grown
        rt.params, _ = self.state.params_and_buffers(rt.rank)

    def follow(self, rt: Runtime, program: Program) -> None:
        """Let what the program sends go as it proves to be taken: of another order than that of the first
        step no proof is known, and it keeps all until the end of the step."""
        if self._releases is not None:
            assert isinstance(rt.comm, DistributedComm)
            assert isinstance(rt.comm.sent, SentOnStreams)
            rt.comm.sent.releases = self._releases if program is self._program else ()

    @contextlib.contextmanager
    def memory(self, number: int) -> Iterator[None]:
        """The tensors of step ``number`` are in the memory of steps; says once that it did not suffice."""
        if self._releases is None:
            yield
            return
        memory = step_memory(self.state.device)
        before = memory.grown
        with memory.use():
            yield
        if memory.grown > before and not self._has_said_grown:
            self._has_said_grown = True
            log.warning(
                f"{self.state.device} was asked for memory {memory.grown - before} times inside step "
                f"{number}. Where its memory is nearly full, such a call waits for messages under way, and "
                "ranks can wait for each other for ever. Leave more of it free: a lower memory_limit=, a "
                "smaller microbatch, or recompute=."
            )
