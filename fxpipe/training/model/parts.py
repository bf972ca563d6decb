"""Gives each rank its part of the artifacts that rank 0 compiled, or of the plans that it read.

What a rank receives and holds does not grow with ranks times microbatches, as the programs and the orders of
all ranks do.  Whole plans stay in the store that the ranks share, for a rank that asks for them.
"""

from __future__ import annotations

import json
import uuid
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes

from fxpipe.errors import RunError
from fxpipe.plan.artifact import Artifact, Plan
from fxpipe.plan.meshes import Mesh
from fxpipe.plan.saved import files
from fxpipe.plan.saved.check import plan_of
from fxpipe.runtime.job.failure import in_short
from fxpipe.runtime.job.process import Process
from fxpipe.strict import structure, unstructure

T = TypeVar("T")


def share_plans(plans: Sequence[Plan], process: Process) -> list[Artifact]:
    """Give all ranks the plans of rank 0; those of the others are not looked at.

    Returns artifacts without programs and constants.
    """
    if not process.leads:
        return _received_plans(process)
    artifacts = [Artifact(plan, (), {}, plan.number) for plan in plans]
    _send_plans(artifacts, process)
    return artifacts


def _send_plans(artifacts: Sequence[Artifact], process: Process) -> None:
    plans = []
    for artifact in artifacts:
        plan, key = artifact.plan, f"plan/{uuid.uuid4().hex}"
        process.keep(key, plan.to_json())
        # Not the orders, nor the edges, of which a split vocabulary has one for every two ranks.
        costs = replace(plan.costs, edges=())
        common = replace(plan, order=(), transfers=(), tried=(), meshes=(), costs=costs)
        plans.append({"plan": unstructure(common), "number": artifact.number, "key": key})
    process.broadcast_bytes(_packed({"plans": plans}))


def made_first(make: Callable[[], T], process: Process) -> T:
    """Make on rank 0 what it sends then; the others call ``wait_for_first`` and receive it.

    They raise RunError with the error that this raises.
    """
    try:
        made = make()
    except Exception as error:  # the model's own code may raise anything
        process.first_is_ready()  # before the broadcast: a wait for it has a time limit, compilation has none
        process.broadcast_bytes(_packed({"error": in_short(error)}))
        raise
    process.first_is_ready()
    return made


def _packed(data: object) -> bytes:
    """Data as compressed JSON: the names of all ranks' tensors are alike, and shrink to a tenth."""
    return zlib.compress(json.dumps(data).encode())


def _received(process: Process) -> Any:
    data = json.loads(zlib.decompress(process.broadcast_bytes(None)))
    if "error" in data:
        raise RunError(f"Rank 0 could not compile the model: {data['error']}")
    return data


def send_mesh(mesh: Mesh, process: Process) -> None:
    """Tell the other ranks, which call ``received_mesh``, what rank 0 chose."""
    process.broadcast_bytes(_packed({"mesh": unstructure(mesh)}))


def received_mesh(process: Process) -> Mesh:
    """Raises RunError if rank 0 found none."""
    return structure(_received(process)["mesh"], Mesh)


def _received_plans(process: Process) -> list[Artifact]:
    artifacts = []
    for entry in _received(process)["plans"]:
        plan, ask = structure(entry["plan"], Plan), partial(_ask, process, entry["key"])
        artifacts.append(Artifact(plan, (), {}, entry["number"], ask))
    return artifacts


def send_artifacts(artifacts: Sequence[Artifact], process: Process) -> None:
    """Give each rank its part of artifacts, on rank 0; the others call ``received_artifacts``."""
    _send_plans(artifacts, process)
    for artifact in artifacts:
        programs = (zlib.compress(program.encode()) for program in artifact.programs)
        process.scatter(process.of_each(tuple(programs)))
        each = process.of_each(artifact.plan.tensors)
        constants = ({str(n): artifact.constants[n] for n in rank.constants} for rank in each)
        process.scatter(tensors_to_bytes(files.apart(tensors)) for tensors in constants)


def received_artifacts(process: Process) -> list[Artifact]:
    """The artifacts that rank 0 sends.  Raises RunError if it could not compile the model."""
    artifacts = []
    for artifact in _received_plans(process):
        program = zlib.decompress(process.scatter(None)).decode()
        constants = tensors_from_bytes(process.scatter(None))
        programs = tuple(program if rank == process.rank else "" for rank in range(process.ranks))
        laid_out = files.laid_out(constants, artifact.plan)
        artifacts.append(replace(artifact, programs=programs, constants=laid_out))
    return artifacts


def _ask(process: Process, key: str) -> Plan:
    return plan_of(process.kept(key), "rank 0's plan")
