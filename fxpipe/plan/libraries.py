"""The ops of programs that other libraries than torch register, and the Python modules that do so.

A plan keeps them as ``{"transformers.grouped_mm_fallback": "transformers.integrations.moe"}``.  A program
imports these modules in its head.  The module is empty where torch does not tell it, and ``__main__`` for
ops of the script that compiled: who loads such a program has to register them before.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from typing import Annotated

import torch

from fxpipe.errors import ArtifactError
from fxpipe.strict import Fits

_NAME = r"[A-Za-z_]\w*"
Op = Annotated[str, Fits(re.compile(rf"{_NAME}\.{_NAME}").fullmatch, "an op such as 'aten.add'")]
Module = Annotated[
    str, Fits(re.compile(rf"(?:{_NAME}(?:\.{_NAME})*)?").fullmatch, "a module such as 'torchvision.ops'")
]
Libraries = dict[Op, Module]
SCRIPT = "__main__"


def imported(libraries: Mapping[str, str]) -> set[str]:
    """The modules that programs import for their ops."""
    return {module for module in libraries.values() if module not in ("", SCRIPT)}


def not_imported(libraries: Mapping[str, str]) -> list[str]:
    """A message for each op that no program can import: which one, and what to do to run it elsewhere."""
    return [
        f"torch.ops.{op}, which {_registrar(module)} registers: {_REMEDY}"
        for op, module in libraries.items()
        if module in ("", SCRIPT)
    ]


def check_libraries(libraries: Mapping[str, str], where: str) -> None:
    """Raise ArtifactError for an op that is not registered, if no program can import what registers it.
    Imports nothing.

    where: the saved pipeline, for messages.
    """
    for op, module in libraries.items():
        package = "" if module == SCRIPT else module.partition(".")[0]
        # Only looked for: to import it here would run its code before the user has asked for a step.
        if not _is_registered(op) and not (package and find_spec(package)):
            remedy = f"there is no {package!r} here: pip install {package}" if package else _REMEDY
            raise ArtifactError(
                f"{where} calls torch.ops.{op}, which {_registrar(module)} registers: {remedy}."
            )


def import_libraries(libraries: Mapping[str, str], where: str) -> None:
    """Import what registers the ops that are not registered, of installed packages alone: a plan is data, and
    must not choose what of other folders runs.  Raises ArtifactError if that fails."""
    check_libraries(libraries, where)
    for op, module in libraries.items():
        if _is_registered(op):
            continue
        text = f"{where} calls torch.ops.{op}"
        # A folder beside the script could have any name that a plan gives.
        if module.partition(".")[0] not in packages_distributions():
            raise ArtifactError(
                f"{text}, which {module} registers, and that belongs to no installed package: import it "
                "before, and ask pipe.check() of the loaded pipeline."
            )
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ArtifactError(
                f"{text}, and {module}, which registers it, cannot be imported: {error}."
            ) from error
        if not _is_registered(op):
            raise ArtifactError(
                f"{text}, which the import of {module} no longer registers: {_REMEDY}, or install the "
                "version that it was compiled with."
            )


_REMEDY = "a process that loads the pipeline has to register it before, by an import of what does"


def _registrar(module: str) -> str:
    return {"": "a module that torch does not tell", SCRIPT: "the script that compiled"}.get(module, module)


def _is_registered(op: str) -> bool:
    namespace, name = op.split(".")
    return hasattr(getattr(torch.ops, namespace), name)
