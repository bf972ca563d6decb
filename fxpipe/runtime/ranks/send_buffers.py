"""Keeps tensors alive until their messages are sent."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from fxpipe.runtime.program.comm import answered
from fxpipe.runtime.ranks.send_release import Releases
from fxpipe.runtime.ranks.side_stream import Begun, beside


class Sent:
    """Keeps tensors until their messages are sent."""

    def add(self, work: object, tensors: Sequence[torch.Tensor]) -> None:
        """Keep the tensors of a message whose send has begun; ``work``: the handle of its process group."""
        raise NotImplementedError

    def join(self) -> None:
        """Let later ops overwrite what was sent: wait for all messages."""
        raise NotImplementedError

    def start(self) -> None:
        """Begin a step."""

    def arrived(self) -> None:
        """Let the tensors of messages go that are taken by now, as the rank has waited for a message or for
        all."""


class SentOnStreams(Sent):
    """Keeps tensors for backends that send on streams of their own, where nothing blocks the host.

    A wait makes the stream of the computation wait: inside a step it would stop all that comes after a send
    until the other rank receives.  So a message is waited for where another one that has arrived proves that
    it is taken.  That is the same place in every step, so each step takes and returns memory in one order.

    ``releases``: by wait of this rank; messages that it does not name are waited for at the end of the step.
    """

    def __init__(self, releases: Releases = ()) -> None:
        self.releases = releases
        self._sent: dict[int, tuple[Any, Sequence[torch.Tensor]]] = {}
        self._left: list[tuple[object, Sequence[torch.Tensor]]] = []
        self._messages = self._waits = 0

    def start(self) -> None:
        self._left += self._sent.values()  # of a step that failed: they may still be read
        self._sent, self._messages, self._waits = {}, 0, 0

    def add(self, work: object, tensors: Sequence[torch.Tensor]) -> None:
        self._sent[self._messages] = work, tensors
        self._messages += 1

    def arrived(self) -> None:
        for number in self.releases[self._waits] if self._waits < len(self.releases) else ():
            if number in self._sent:
                self._wait_for(number)
        self._waits += 1

    def join(self) -> None:
        for number in [*self._sent]:
            self._wait_for(number)

    def _wait_for(self, number: int) -> None:
        work, _ = self._sent.pop(number)
        with answered():
            work.wait()


class SentByThread(Sent):
    """Keeps tensors for gloo, whose sends cannot be asked whether they are over: a thread waits for them.

    The thread is woken once ``ENOUGH`` bytes have accumulated, since waking it for every small message would
    cost more than the memory is worth.
    """

    ENOUGH = 1 << 20

    def __init__(self) -> None:
        self._thread = beside(torch.device("cpu"), "sends")
        self._begun: list[Begun] = []
        self._sent: list[tuple[object, Sequence[torch.Tensor]]] = []
        self._bytes = 0

    def add(self, work: object, tensors: Sequence[torch.Tensor]) -> None:
        self._sent.append((work, tensors))
        self._bytes += sum(tensor.nbytes for tensor in tensors)
        if self._bytes >= self.ENOUGH:
            self._hand_over()

    def join(self) -> None:
        self._hand_over()
        begun, self._begun = self._begun, []
        for work in begun:
            with answered():
                work.wait()

    def _hand_over(self) -> None:
        self._begun.append(self._thread.run(partial(_wait_for_all, self._sent)))
        self._sent, self._bytes = [], 0


def _wait_for_all(sent: list[tuple[Any, Sequence[torch.Tensor]]]) -> None:
    while sent:
        sent[0][0].wait()
        del sent[0]  # frees its tensors while the next one is still on its way
