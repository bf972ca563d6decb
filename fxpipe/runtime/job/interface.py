"""The network interface by which gloo connects ranks: nccl's, where the user has named one for nccl alone.

By default gloo takes the address of the machine's own name, which on many machines no other can reach.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from fxpipe.errors import RunError

_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux: the IPv4 address of an interface
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def set_interface(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set gloo's interface from nccl's, unless it is set."""
    asked = environment.get(NCCL, "")
    if asked and not environment.get(GLOO):
        interface = matching(asked, [name for _, name in socket.if_nameindex() if _has_address(name)])
        if interface is not None:
            environment[GLOO] = interface


def _has_address(name: str) -> bool:
    """Whether an interface has an address, as those have by which ranks can connect.  On Linux."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            fcntl.ioctl(any_socket, _GET_ADDRESS, struct.pack("256s", name.encode()))
        except OSError:
            table = Path("/proc/net/if_inet6")
            return table.exists() and any(line.split()[-1] == name for line in table.read_text().splitlines())
    return True


def matching(asked: str, names: Sequence[str]) -> str | None:
    """The first interface that a value of NCCL_SOCKET_IFNAME names: beginnings of names, by "=" whole names,
    by "^" those not to take."""
    without = asked.startswith("^")
    text = asked.removeprefix("^")
    whole = text.startswith("=")
    wanted = [part.partition(":")[0] for part in text.removeprefix("=").split(",") if part]

    def fits(name: str) -> bool:
        named = name in wanted if whole else name.startswith((*wanted,))
        return named != without and not (without and name == "lo")

    return next(filter(fits, names), None)


@contextmanager
def connecting() -> Iterator[None]:
    """Name the interface in errors of gloo's connections, from a block that makes a process group."""
    try:
        yield
    except RuntimeError as error:  # torch's, also where the store has failed
        if "gloo" not in str(error).lower():
            raise
        now = os.environ.get(GLOO)
        raise RunError(
            f"gloo could not connect the ranks: {error}. Set {GLOO} on each machine to the network interface "
            f"by which the others reach it (it is {now or 'not set'}; `ip address` lists them)."
        ) from error
