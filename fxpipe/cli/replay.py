"""``fxpipe replay``: runs one op of a recorded step alone, in a debugger if asked."""

from __future__ import annotations

import argparse
import json
import operator
import pdb
from collections.abc import Callable
from typing import Any

from fxpipe.errors import RunError
from fxpipe.runtime.debug.recording import ResultDigest
from fxpipe.runtime.debug.replay import Replayed, read_recorded, replay
from fxpipe.strict import unstructure


def replay_op(options: argparse.Namespace) -> None:
    recorded, tensors = read_recorded(options.directory, options.op, options.rank)
    calls = replay(options.directory, recorded, tensors, _debugged if options.pdb else operator.call)
    if options.json:
        functions = [_as_json(call) for call in calls]
        differ = sum(not result["same"] for function in functions for result in function["results"])
        record = {"op": recorded.op, "rank": recorded.rank, "step": recorded.step, "functions": functions}
        print(json.dumps(record))
    else:
        print(f"{recorded.op} of rank {recorded.rank} in step {recorded.step}")
        differ = sum(map(_show, calls))
    if differ:
        raise RunError(
            f"{differ} of the results above differ from the step's: the program was edited since, or this "
            "machine computes otherwise."
        )


def _debugged(function: Callable[..., object], *args: object) -> object:
    """A function that Inductor compiles runs op by op."""
    debugger = _Debugger()
    result = debugger.runcall(getattr(function, "function", function), *args)
    if debugger.was_quit:
        raise KeyboardInterrupt("the op was left before its results were known")
    return result


class _Debugger(pdb.Pdb):
    """``runcall`` returns None where its function was quit, as a function may that was not."""

    was_quit = False

    def set_quit(self) -> None:
        self.was_quit = True
        super().set_quit()


def _show(call: Replayed) -> int:
    """Print a call; return the number of results that differ from the step's."""
    print(f"{call.function} ({call.line})")
    compared = _compared(call)
    width = max((len(result.name) for result, _ in compared), default=0)
    for result, same in compared:
        told = "as in the step" if same else "DIFFERS"
        print(f"  {result.name:<{width}}  {_text(result):<28} {told}")
    return sum(not same for _, same in compared)


def _as_json(call: Replayed) -> dict[str, Any]:
    results = [{**unstructure(result), "same": same} for result, same in _compared(call)]
    return {"function": call.function, "line": call.line, "results": results}


def _compared(call: Replayed) -> list[tuple[ResultDigest, bool]]:
    """Each result, and whether it is the step's."""
    before = {result.name: result for result in call.recorded}
    now = {result.name: result for result in call.results}
    # By the names of both: what one of them lacks differs.
    same = {name: now.get(name) == before.get(name) for name in [*now, *before]}
    return [(now.get(name) or before[name], same[name]) for name in same]


def _text(result: ResultDigest) -> str:
    shape = ", ".join(map(str, result.shape))
    return f"{result.dtype.removeprefix('torch.')}[{shape}] {result.sha256[:12]}"
