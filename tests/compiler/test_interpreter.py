"""What compilation asks of Python and of the terminal beside its work."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import resource
import sys

import pytest

from fxpipe.compiler.interpreter import for_graphs
from fxpipe.compiler.progress import Phases, terminal


def test_calls_at_no_depth_map_memory() -> None:
    """Else each call of a loop does where its frame begins a new piece of those that Python has frames in."""

    def call(depth: int) -> None:
        if depth:
            return call(depth - 1)
        for _ in range(50):
            abs_of(depth)

    def abs_of(number: int) -> int:
        return abs(number)

    def all_depths() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for depth in range(300):
            call(depth)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    with_room = for_graphs(all_depths)
    with_room()
    assert with_room() < 100  # without it some 600


@pytest.mark.parametrize("closed", [True, False])
def test_no_terminal_shows_nothing(monkeypatch: pytest.MonkeyPatch, closed: bool) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("TTY_COMPATIBLE", raising=False)
    text = io.StringIO()
    monkeypatch.setattr(sys, "stderr", text)
    if closed:
        text.close()
    assert terminal() is None
    phases = Phases("a model")
    phases.expect(1)
    with phases("capture"):
        pass
    assert [*phases.seconds] == ["capture"]
    assert closed or not text.getvalue()


def test_a_terminal_shows_the_last_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        monkeypatch.setenv("TERM", "xterm")
        phases = Phases("a model")
        phases.expect(1)
        with phases("capture"):
            pass
    shown = b""
    with contextlib.suppress(OSError):  # that is a terminal's end; one read may have a part of the text alone
        while part := os.read(ours, 1 << 16):
            shown += part
    os.close(ours)
    assert b"a model" in shown
    assert b"compiled in" in shown
