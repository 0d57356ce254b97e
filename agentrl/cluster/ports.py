"""Reserves ports for servers that take up to minutes to listen."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from pathlib import Path

from agentrl.errors import LaunchError

_TRIES = 64  # another run may choose the same free port at the same time


class ReservedPort:
    """A port that no other server of agentrl on this machine uses, until `release`.

    A server takes seconds until it listens; meanwhile the port looks free, and a second run could take the first one's server for its own.
    So each run binds a name for the port in the abstract socket namespace, which is per network namespace, and which the kernel frees when
    the process ends.
    """

    def __init__(self, host: str) -> None:
        """`host`: the address to which the server binds. Raises `LaunchError` if other runs have reserved every port that it tried."""
        for _ in range(_TRIES):
            self.number = free_port(host)
            self._name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                self._name.bind(f"\0agentrl server at port {self.number}")
                return
            except OSError as error:
                self._name.close()
                if error.errno != errno.EADDRINUSE:
                    raise
        raise LaunchError(f"no free port on {host} after {_TRIES} tries\n  fix: stop programs that hold ports; `ss -tan` lists them")

    def release(self) -> None:
        """Releases the port of a server that has ended. Idempotent."""
        self._name.close()


def free_port(host: str) -> int:
    """Returns a port of an address of this machine that is free now.

    Prefers ports that the kernel does not assign to connections, because a server takes up to minutes to listen. Raises `LaunchError`.
    """
    for port in (*_unassigned_ports(), 0):  # 0: any port that the kernel has
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return int(probe.getsockname()[1])
    raise LaunchError(f"{host} has no free port\n  fix: stop programs that hold ports; `ss -tan` lists them")


def _unassigned_ports() -> list[int]:
    """Returns some ports, in random order, outside the range from which the kernel assigns ports."""
    try:
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        return []
    others = [*range(10_000, low), *range(high + 1, 1 << 16)]
    return random.sample(others, min(len(others), _TRIES))
