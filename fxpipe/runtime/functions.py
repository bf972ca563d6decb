"""Functions as text: the names that their code uses, and what messages call them."""

from __future__ import annotations

import dis
import functools
import os
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

_GLOBAL = {"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_NAMED = {op: dis.opname[op] for op in dis.hasname if op < 256}
#: The lowest bits of an op's argument that are no part of the name's number (the documentation of ``dis``).
_FLAGS = {"LOAD_GLOBAL": 1, "LOAD_ATTR": int(sys.version_info >= (3, 12)), "LOAD_SUPER_ATTR": 2}


class CodeNames(NamedTuple):
    """The names in a function and in those that it defines.

    ``attributes``: what it reads, calls, or imports from a module; ``stored``: the attributes that it sets;
    ``texts``: its constants, which may name attributes and keys; ``rebound``: the globals, and the variables
    of functions around it, that it sets; ``modules``: what it imports, without the package of relative names.
    """

    globals: set[str]
    attributes: set[str]
    stored: set[str]
    texts: set[str]
    rebound: set[str]
    modules: set[str]


@functools.lru_cache(4096)
def names_in(code: types.CodeType) -> CodeNames:
    names = CodeNames(set(), set(), set(), set(), set(), set())
    todo = [code]
    while todo:
        code = todo.pop()
        todo += [x for x in code.co_consts if isinstance(x, types.CodeType)]
        for text in (x for x in code.co_consts if isinstance(x, str)):
            parts = text.split(".")  # as for operator.attrgetter
            names.texts.update((text, *parts) if all(map(str.isidentifier, parts)) else (text,))
        for op, name in set(_named(code)) if code.co_names else ():
            kinds = {"STORE_ATTR": names.stored, "IMPORT_NAME": names.modules}
            (names.globals if op in _GLOBAL else kinds.get(op, names.attributes)).add(name)
            if op == "STORE_GLOBAL":
                names.rebound.add(name)
        if code.co_freevars:
            names.rebound.update(x.argval for x in dis.get_instructions(code) if x.opname == "STORE_DEREF")
    if "globals" in names.globals:
        names.globals.update(names.texts)
    return names


def _named(code: types.CodeType) -> Iterator[tuple[str, str]]:
    """The ops with a name.  ``dis.get_instructions`` gives the same, and takes nine times as long."""
    above = 0
    for op, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument = above << 8 | low
        above = argument if op == dis.EXTENDED_ARG else 0
        if op in _NAMED:
            yield _NAMED[op], code.co_names[argument >> _FLAGS.get(_NAMED[op], 0)]


def unwrapped(function: object) -> object:
    """The function to which ``partial`` has bound arguments."""
    while isinstance(function, partial):
        function = function.func
    return function


def function_name(function: object) -> str:
    """``library.module.outer.<locals>.hook``; of an object that can be called, the name of its class."""
    function = unwrapped(function)
    named = function if hasattr(function, "__qualname__") else type(function)
    module = getattr(named, "__module__", None) or type(named).__module__  # a method in C has none
    return f"{module}.{named.__qualname__}"


def name_and_line(function: Callable[..., object]) -> str:
    """``collect (net.py:12)``: a function, and the line where it is defined."""
    name = function_name(function).rpartition("<locals>.")[2].removeprefix("__main__.")
    code = code_of(function)
    if code is None:
        return name
    file = os.path.basename(code.co_filename)  # a Path of it takes ten times as long
    return f"{name} ({file}:{code.co_firstlineno})"


def code_of(function: object) -> Any:
    """A function's code, or that of a callable object's class; None if neither is in Python."""
    target = unwrapped(function)
    # The attribute of the class of functions is a descriptor.
    codes = (getattr(callee, "__code__", None) for callee in (target, type(target).__call__))
    return next((code for code in codes if isinstance(code, types.CodeType)), None)
