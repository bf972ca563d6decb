"""The last work of each process group, whose tensors live until the next one begins, or to the end.

A thread of gloo has the tensors of a work for a moment longer than who waits for it.  If it is the last to
have them, it needs Python to let them go; and while the interpreter ends, Python ends a thread that asks for
it, inside of C++, which aborts the process: "terminate called without an active exception".
"""

from __future__ import annotations

import ctypes

import torch.distributed as dist

_last: dict[str, dist.Work] = {}  # by the group's name: the groups themselves go at the end
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_last))  # not even the end of the interpreter lets them go


def lasting(work: dist.Work | None, group: dist.ProcessGroup) -> dist.Work:
    """The same work, of this process's part in a collective, which was begun with ``async_op=True``."""
    assert work is not None, "the process is one of the group"
    if dist.get_backend(group) == "gloo":
        _last[group.group_name] = work
    return work


def destroy(group: dist.ProcessGroup) -> None:
    """Destroy a group, whose last work would keep its threads and sockets."""
    _last.pop(group.group_name, None)
    dist.destroy_process_group(group)
