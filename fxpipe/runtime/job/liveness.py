"""Whether the process of another rank still runs, as far as that can be seen from this machine.

The system knows it however busy the machine is.  A process that is stopped, or in a long call that holds
Python's lock, gives no heartbeat, and runs.
"""

from __future__ import annotations

import os
from pathlib import Path


def own_process() -> str:
    """A name that no other process has or will have; "unknown" where the system gives none."""
    try:
        return f"{_machine()}/{os.getpid()}/{_begun(os.getpid())}"
    except OSError:
        return "unknown"


def runs(process: str) -> bool | None:
    """Whether the process of this name still runs; None for one of another machine, or without a name."""
    machine, _, rest = process.partition("/")
    number, _, begun = rest.partition("/")
    try:
        if not begun or machine != _machine():
            return None
        return _begun(int(number)) == begun
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return None


def _machine() -> str:
    """The machine since its start, and the processes on it that can be seen from here."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _begun(number: int) -> str:
    """The time when a process began, in ticks of the system; "ended" for one that only waits to be reaped."""
    # Before them stands the program's name in parentheses, which may hold anything.
    fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    state, begun = fields[0], fields[19]
    return "ended" if state in "ZX" else begun
