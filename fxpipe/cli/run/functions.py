"""Python functions that a command line names, as ``module:function``."""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module

from fxpipe.errors import FxpipeError, suggested
from fxpipe.runtime.job.tracebacks import users_part
from fxpipe.strict import shown


def called(
    where: str,
    returns: str,
    error: type[FxpipeError],
    arguments: Mapping[str, object],
    within: AbstractContextManager[object] | None = None,
) -> object:
    """What a function returns that is written in Python, and can be called with these arguments alone.

    returns: what it must return, as text.  within: entered for the call.
    Raises ``error``, also for what the function raises, with its lines.
    """
    module, _, name = where.partition(":")
    if not (module and name):
        raise error(f"{shown(where)} is no function: write module:function, such as models:large.")
    if module.endswith(".py"):
        as_module = os.path.normpath(module.removesuffix(".py")).replace(os.sep, ".").strip(".")
        raise error(f"{shown(where)} names a file: write the module, {as_module}:{name}.")
    if os.getcwd() not in sys.path:  # as ``python -m`` puts it there, and the command fxpipe does not
        sys.path.insert(0, os.getcwd())
    try:
        imported = import_module(module)
    except (ImportError, ValueError, TypeError) as cause:
        raise error(f"There is no function {where}: {cause}.") from cause
    except Exception as cause:  # the module may raise anything
        raise error(_failed(module, cause)) from cause
    function = getattr(imported, name, None)
    if function is None:
        raise error(f"There is no function {where}.{suggested(name, dir(imported))}")
    how = f"with the arguments {' and '.join(arguments)}" if arguments else "without arguments"
    wanted = f"It must be a Python function, {how}, that returns {returns}"
    if not callable(function) or inspect.isbuiltin(function):
        raise error(f"{where} is {shown(function)}. {wanted}")
    try:
        inspect.signature(function).bind(**arguments)
    except (TypeError, ValueError) as cause:
        raise error(f"{where} cannot be called {how}: {cause}. {wanted}") from cause
    try:
        with within or nullcontext():
            return function(**arguments)
    except FxpipeError:
        raise
    except Exception as cause:  # so may the function
        raise error(_failed(where, cause)) from cause


def _failed(what: str, cause: Exception) -> str:
    lines = traceback.format_tb(users_part(cause.__traceback__))
    return f"{what} failed:\n{''.join(lines)}{type(cause).__name__}: {cause}"
