"""The process that ranks are forked from: it has imported torch and fxpipe, which takes seconds.

It has one thread: a fork of a process of pytest, whose other threads hold locks, can hang.  All workers of
pytest-xdist share the one that its own process offers, and are forked from it themselves.  That process never
needs torch: it is not imported here.
"""

from __future__ import annotations

import ast
import functools
import multiprocessing
import os
import shlex
import sys
import time
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

#: What a rank imports to compile, train and end, and what files of tests import beside that, such as parts of
#: transformers that it loads on first use; the last one compiles, trains and writes as ranks do.  Lightning
#: is not among them: it reads its rank as it is imported.
PRELOADED = [
    "fxpipe.compiler.compile",
    "fxpipe.api.checkpointer",
    "torch._dynamo",
    "torch.distributed.elastic.multiprocessing.api",
    "models",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "torchmetrics",
    "graphviz",
    "hypothesis",
    "first_step",
]
ENDED = "the fork server of the tests ended"
#: This process's own part of a server, and what others need to know of it.
_SERVER, _KNOWN = forkserver._forkserver, ("_forkserver_address", "_forkserver_authkey")
_OFFERED = "FXPIPE_TESTS_FORK_SERVER"


def paths() -> str:
    """Where other interpreters find the helpers of the tests."""
    return os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))


def offer() -> None:
    """Start a server for the processes that this one will start.  It ends with this one."""
    _start()
    os.environ[_OFFERED] = repr({name: getattr(_SERVER, name) for name in _KNOWN if hasattr(_SERVER, name)})


def forking_python() -> str:
    """The command that stands in for Python where a worker of pytest-xdist starts."""
    return shlex.join((sys.executable, str(Path(__file__).with_name("forked_worker.py"))))


def run_code(code: str, stdin: Connection, stdout: Connection, environment: dict[str, str]) -> None:
    """What ``python -u -c CODE`` does, in a forked process: with these pipes and this environment."""
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(stdin.fileno(), 0)
    os.dup2(stdout.fileno(), 1)
    stdin.close()
    stdout.close()
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115 - for good
    exec(code, vars(sys.modules["__main__"]))


def serve() -> None:
    """Wait until the server has forked: one that has ended, as it imported or later, is started again, once.

    All that it tells who asks it for a process is EOFError, or that nobody listens.  Torch's agent might have
    started some of its ranks by then.
    """
    _begin()
    try:
        _fork_once()
    except (EOFError, OSError):
        time.sleep(1.0)  # it may not be over
        _leave()
        _start()
        try:
            _fork_once()
        except (EOFError, OSError) as error:
            raise RuntimeError(f"{ENDED} twice before it forked; stderr says why") from error


@functools.cache
def _begin() -> None:
    offered = os.environ.get(_OFFERED)
    if offered is None:
        _start()
    else:
        _take(ast.literal_eval(offered))


def _start() -> None:
    multiprocessing.set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ, PYTHONPATH=paths()):
        forkserver.ensure_running()


def _take(known: dict[str, object]) -> None:
    """The server of another process, which sees to it that it runs."""
    vars(_SERVER).update(known, ensure_running=resource_tracker.ensure_running)
    # Each process that is forked is given the end of a pipe by which the server sees that it is needed.
    _SERVER._forkserver_alive_fd = os.open(os.devnull, os.O_WRONLY)


def _leave() -> None:
    """From now on, have one of its own."""
    if vars(_SERVER).pop("ensure_running", None) is not None:
        os.close(_SERVER._forkserver_alive_fd)


def _fork_once() -> None:
    process = multiprocessing.get_context("forkserver").Process(target=int)
    process.start()
    process.join()
