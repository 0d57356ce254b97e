"""Where the local Docker daemon is, and whether it answers."""

from __future__ import annotations

import os
import socket
from typing import Literal

import requests
import urllib3

from agentrl.errors import SandboxError, SandboxTimeout, SandboxUnavailable

DEFAULT = "unix:///var/run/docker.sock"
ANSWER_S = 2.0
API_VERSION = "1.41"  # Docker Engine 20.10
LABEL_RUN, LABEL_LEASE, LABEL_SHARED = "agentrl.run", "agentrl.lease", "agentrl.shared"
"""Of containers: whose run they belong to, which driver's, and that several sandboxes share one."""

State = Literal["answers", "silent", "absent"]


def daemon_address() -> str:
    """The local daemon's socket: `$DOCKER_HOST` where it names one, else the usual place. Raises `SandboxUnavailable`.

    A daemon on another machine cannot be used: sandboxes talk to the driver through a mounted socket.
    """
    named = os.environ.get("DOCKER_HOST", "") or DEFAULT
    if not named.startswith("unix://"):
        raise SandboxUnavailable(f"DOCKER_HOST={named} is not a daemon on this machine", fix="unset DOCKER_HOST, or use bubblewrap")
    return named


def daemon_state(timeout_s: float = ANSWER_S) -> State:
    """What a ping on the local daemon's socket gives within `timeout_s` seconds; `absent` when nobody listens there."""
    try:
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(timeout_s)
            link.connect(daemon_address().removeprefix("unix://"))
            link.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
            return "answers" if b" 200 " in link.recv(64) else "silent"
    except TimeoutError:
        return "silent"
    except OSError:
        return "absent"


def daemon_answers(timeout_s: float = ANSWER_S) -> bool:
    """True when a Docker daemon answers a ping on its local socket within `timeout_s` seconds."""
    return daemon_state(timeout_s) == "answers"


def silent_daemon_error() -> SandboxTimeout:
    """The error for a daemon that is there and does not answer."""
    return SandboxTimeout(f"the Docker daemon at {daemon_address()} takes connections and gives no answer; it must be restarted")


def daemon_error(error: Exception) -> SandboxError:
    """What went wrong between us and the daemon, as an error of ours."""
    if isinstance(error, (requests.Timeout, urllib3.exceptions.TimeoutError)):
        return SandboxTimeout(f"the Docker daemon at {daemon_address()} gave no answer in time: {error}")
    return SandboxError(f"Docker daemon: {error}")
