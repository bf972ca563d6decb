"""The check of a saved pipeline's programs, which needs neither its weights nor processes."""

from __future__ import annotations

from pathlib import Path

from fxpipe.certificate.check import check_artifact
from fxpipe.certificate.problems import Certificate
from fxpipe.plan.artifact import Artifact
from fxpipe.plan.libraries import import_libraries
from fxpipe.plan.saved import files
from fxpipe.runtime.program import lanes as lanes  # registers ops that a captured step may have


def check_saved(directory: Path) -> Certificate:
    """Raises ArtifactError for missing or damaged files, or ops; RunError for those of an earlier version.

    Imports the modules that the plan names for ops of other libraries.
    """
    plan = files.read_plan(directory)
    import_libraries(plan.libraries, str(directory))
    programs = files.read_programs(directory, plan, range(plan.ranks))
    artifact = Artifact(plan, programs, {}, plan.number, captured=files.read_captured(directory))
    return check_artifact(artifact, str(directory / files.CAPTURED))
