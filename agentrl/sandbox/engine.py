"""Where the local Docker daemon is, and whether it answers."""

from __future__ import annotations

import os
import socket

from agentrl.errors import SandboxUnavailable

DEFAULT = "unix:///var/run/docker.sock"


def address() -> str:
    """The local daemon's socket: `$DOCKER_HOST` where it names one, else the usual place. Raises `SandboxUnavailable`.

    A daemon on another machine cannot be used: sandboxes talk to the driver through a mounted socket.
    """
    named = os.environ.get("DOCKER_HOST", "") or DEFAULT
    if not named.startswith("unix://"):
        raise SandboxUnavailable(f"DOCKER_HOST={named} is not a daemon on this machine", fix="unset DOCKER_HOST, or use bubblewrap")
    return named


def answers(timeout_s: float = 2.0) -> bool:
    """True when a Docker daemon answers a ping on its local socket within `timeout_s` seconds."""
    try:
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(timeout_s)
            link.connect(address().removeprefix("unix://"))
            link.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
            return b" 200 " in link.recv(64)
    except OSError:
        return False
