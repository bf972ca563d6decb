"""Python functions that a command line names, as ``module:function``."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from fxpipe.errors import FxpipeError
from fxpipe.strict import shown


def python_function(
    where: str, returns: str, error: type[FxpipeError], arguments: Mapping[str, int]
) -> Callable[..., Any]:
    """A function that is written in Python, and can be called with these arguments alone.

    returns: what it must return, as text.  Raises ``error``, before the function is called.
    """
    module, _, name = where.partition(":")
    if not (module and name):
        raise error(f"{shown(where)} is no function: write module:function, such as models:large.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError, TypeError) as cause:
        raise error(f"There is no function {where}: {cause}.") from cause
    given = f"with the arguments {' and '.join(arguments)}" if arguments else "without arguments"
    wanted = f"It must be a Python function, {given}, that returns {returns}"
    if not callable(found) or inspect.isbuiltin(found):
        raise error(f"{where} is {shown(found)}. {wanted}")
    try:
        inspect.signature(found).bind(**arguments)
    except (TypeError, ValueError) as cause:
        raise error(f"{where} cannot be called {given}: {cause}. {wanted}") from cause
    function: Callable[..., Any] = found
    return function
