"""Tracebacks of fxpipe's errors without the frames of fxpipe and torch.

An error of fxpipe says what, where and what to do; hundreds of lines of torch's tracer before it hide the two
lines of the user's code that matter.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import FunctionType, TracebackType
from typing import ParamSpec, TypeVar

from fxpipe.errors import FxpipeError, OptionError, VerifyError, suggested

P = ParamSpec("P")
T = TypeVar("T")

_FXPIPE = f"{Path(__file__).parents[2]}{os.sep}"
#: With this variable set, errors keep all frames.
WHOLE = "FXPIPE_TRACEBACKS"
#: Options that a message lists.
_FEW = 8


def brief(function: Callable[P, T]) -> Callable[P, T]:
    """Errors of fxpipe, and Ctrl-C, leave the function with the frames of the user's code alone.

    So do those for an option that it does not have, and for arguments that must have a name.
    """
    names = inspect.signature(function).parameters
    kinds = [each.kind for each in names.values()]
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds
    places = [name for name, kind in zip(names, kinds, strict=True) if kind <= kind.POSITIONAL_OR_KEYWORD]
    most = sys.maxsize if inspect.Parameter.VAR_POSITIONAL in kinds else len(places)

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            for name in kwargs.keys() - names.keys() if kwargs and not takes_any else ():
                raise OptionError(f"{_name(function, args)} has no option {name!r}.{suggested(name, names)}")
            if len(args) > most:
                first = ", ".join(name for name in places if name != "self")
                takes = f"{first} in this order" if first else "nothing by position"
                options = [f"{name}=" for name, each in names.items() if each.kind is each.KEYWORD_ONLY]
                listed = f" ({', '.join(options)})" if len(options) <= _FEW else ""
                raise OptionError(
                    f"{_name(function, args)} takes {takes}, and options by name{listed}. Write the name of "
                    f"{_shown(args[most])}."
                )
            return function(*args, **kwargs)
        except (FxpipeError, KeyboardInterrupt) as error:
            if os.environ.get(WHOLE) or isinstance(error, VerifyError):  # a bug of fxpipe
                raise
            shorten(error)
            # Raised anew: its trace begins here, without the frames below.
            raise error.with_traceback(None) from error.__cause__

    return called


def _name(function: Callable[..., object], args: Sequence[object]) -> str:
    """Name a method by the class of the object, whose base may have it."""
    of, _, name = function.__qualname__.removesuffix(".__init__").rpartition(".")
    if function.__name__ == "__init__" or not of:
        return name
    return f"{type(args[0]).__name__}.{name}"


def _shown(argument: object) -> str:
    """An argument in few words, whatever it is."""
    name = getattr(argument, "__name__", None)
    return name if isinstance(name, str) else f"the {type(argument).__name__}"


def brief_methods(cls: type[T]) -> type[T]:
    """Make public methods and the constructor of a class ``brief``."""
    for name, method in list(vars(cls).items()):
        if isinstance(method, FunctionType) and (name == "__init__" or not name.startswith("_")):
            setattr(cls, name, brief(method))
    return cls


def shorten(error: BaseException) -> None:
    """Leave in the errors that led to this one the frames of the user's code.

    Errors without any are left out, and those of fxpipe, whose messages are in this one's.
    """
    chain, link, seen = [error], _before(error), {id(error)}
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        trace = users_part(link.__traceback__)
        if trace is not None and not isinstance(link, FxpipeError):
            chain.append(link.with_traceback(trace))
        link = _before(link)
    for after, before in pairwise([*chain, None]):
        assert after is not None
        after.__cause__, after.__context__ = before, None


def _before(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def users_part(trace: TracebackType | None) -> TracebackType | None:
    """The frames of the user's code."""
    frames = []
    while trace is not None:
        if _is_users(trace.tb_frame.f_code.co_filename):
            frames.append(trace)
        trace = trace.tb_next
    users: TracebackType | None = None
    for frame in reversed(frames):
        users = TracebackType(users, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return users


def _is_users(file: str) -> bool:
    """Programs are the user's as well: ``<fxpipe GPT rank0.py>`` where they are not saved."""
    torch = sys.modules.get("torch")
    library = () if torch is None or torch.__file__ is None else (f"{Path(torch.__file__).parent}{os.sep}",)
    return not file.startswith((_FXPIPE, "<string>", "<frozen", *library))
