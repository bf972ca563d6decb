"""The captured step as data, and the check of the programs against it (``fxpipe/certificate/``)."""

from __future__ import annotations

import warnings

from torch import fx

from fxpipe.certificate.check import check
from fxpipe.certificate.problems import Certificate
from fxpipe.compiler.cut import Cut
from fxpipe.errors import ArtifactError, VerifyError
from fxpipe.ir.captured import captured_step
from fxpipe.ir.compat import copy_graph
from fxpipe.plan.artifact import Plan
from fxpipe.plan.captured import CapturedStep
from fxpipe.vocabulary.split import split_vocabulary

MOST_SHOWN = 8


def captured_as_data(graph: fx.Graph, cut: Cut) -> CapturedStep | None:
    """The captured graph as data, with its vocabulary layers split if those of the cut are; None, with a
    warning, where an argument of an op has no form as data."""
    barriers = cut.options.barriers
    if barriers is not None:
        graph = copy_graph(graph)
        split_vocabulary(graph, cut.options.ranks, barriers)
    try:
        return captured_step(graph, split=barriers is not None)
    except TypeError as error:
        warnings.warn(f"The programs cannot be checked against the captured step: {error}.", stacklevel=2)
        return None


def certified(plan: Plan, programs: tuple[str, ...], captured: CapturedStep) -> Certificate | None:
    """The certificate of programs that were just made; None, with a warning, if the step is not understood.

    Raises VerifyError if it does not hold.
    """
    try:
        certificate = check(plan, programs, captured)
    except ArtifactError as error:
        warnings.warn(f"The programs cannot be checked against the captured step: {error}", stacklevel=2)
        return None
    if not certificate.holds:
        lines = "\n".join(f"  {problem}" for problem in certificate.problems[:MOST_SHOWN])
        raise VerifyError(
            "The programs are not the captured step. This is an error of fxpipe: please report it, with the "
            "model (check=False compiles without this check); of a pass of your own, see docs/certificate.md."
            f"\n{lines}"
        )
    return certificate
