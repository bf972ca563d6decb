"""Stands in for Python where pytest-xdist starts a worker: the worker is forked, with all imports.

``python forked_worker.py -u -c CODE`` is ``python -u -c CODE`` in a process of the server that
``fork_server`` has offered.  This process waits for it, and ends as it does.
"""

import multiprocessing
import os
import sys
from multiprocessing.connection import Connection

import fork_server


def main() -> None:
    fork_server.serve()
    # The pipes by which pytest-xdist talks with its worker, as connections: a forked process can get these.
    pipes = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    worker = multiprocessing.get_context("forkserver").Process(
        target=fork_server.run_code, args=(sys.argv[-1], *pipes, dict(os.environ))
    )
    worker.start()
    worker.join()
    sys.exit(worker.exitcode)


if __name__ == "__main__":
    main()
