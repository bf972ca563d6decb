"""The line of the user's code that runs or failed, and the function that it called, as text for messages."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

from fxpipe.errors import FxpipeError

_HERE, _FXPIPE = (str(folder) for folder in Path(__file__).parents[1:3])
#: The code of ``fxpipe run``, which calls fxpipe as a user's does.
_COMMAND = os.path.join(_FXPIPE, "cli", "")
_WRAPPER = os.path.join(os.path.dirname(__file__), "tracebacks.py")  # around public functions
#: Where the code of others lies: Python's, that of installed packages, and fxpipe itself.
_OTHERS = tuple({*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), _FXPIPE})


def place_of_error(error: BaseException) -> str:
    """`` at`` the innermost line of the user's code that an exception went through; empty for one of fxpipe's
    that ``fxpipe run`` has raised, whose lines say nothing."""
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, FxpipeError) and all(file.startswith(_OTHERS) for file, _ in lines):
        return ""
    return f" at {_innermost(lines)}"


def place_of_main_thread() -> str:
    """The innermost line of the user's code that the main thread runs."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    # A frame that runs meanwhile may be between two lines, and then has none.
    stack = [] if frame is None else traceback.walk_stack(frame)
    lines = [(f.f_code.co_filename, line or f.f_code.co_firstlineno) for f, line in stack]
    del frame  # which may be this one: a circle that would keep the values of all callers alive
    return _innermost(reversed(lines))


def called_function() -> str:
    """The function of fxpipe that the user's code, or ``fxpipe run``, has called in this thread."""
    called, frame = None, sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_FXPIPE + os.sep) and not file.startswith((_COMMAND, _WRAPPER)):
            called = frame
        frame = frame.f_back  # type: ignore[assignment]
    if called is None:
        return ""
    of, _, name = called.f_code.co_qualname.rpartition(".")
    # Of a method, by the class of the object, whose base may have it.
    return f"{type(called.f_locals['self']).__name__}.{name}" if of and "self" in called.f_locals else name


def comes_from(error: BaseException, file: str) -> bool:
    """Whether code in a file raised an error, or what it called."""
    return any(frame.f_code.co_filename == file for frame, _ in traceback.walk_tb(error.__traceback__))


def is_of_user(frame: FrameType) -> bool:
    """Whether a frame runs the user's code, and not that of others."""
    return not frame.f_code.co_filename.startswith((*_OTHERS, "<"))


def _innermost(lines: Iterable[tuple[str, int]]) -> str:
    known = [(file, line) for file, line in lines if not file.startswith(("<frozen", "<string>"))]
    users = [(file, line) for file, line in known if not file.startswith(_OTHERS)]
    # ``fxpipe run`` has no code of the user: then what called the runtime.
    callers = [
        (file, line) for file, line in known if file.startswith(_FXPIPE) and not file.startswith(_HERE)
    ]
    if not known:
        return "an unknown place"
    file, line = (users or callers or known)[-1]
    text = linecache.getline(file, line).strip()
    shown = text if len(text) <= 60 else f"{text[:59]}…"
    return f"{Path(file).name}:{line}" + (f" ({shown})" if shown else "")
