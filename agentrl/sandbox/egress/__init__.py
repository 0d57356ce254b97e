"""Network access for a sandbox with an allow-list (`SandboxSpec.network`), only through a proxy on the host.

The sandbox's network namespace has only a loopback interface: no route and no name server. Before any program runs, the exec server opens a
listener on that loopback and hands it to the host, which keeps the only copy. Variables such as `https_proxy` in the environment of
programs direct them to this listener, and thus to the host's proxy. No part of the proxy runs in the sandbox, where it could be taken over,
killed or stopped. A program that ignores the variables cannot reach any server outside the sandbox.

`listener` receives the listener and accepts connections. `requests` parses requests, checks them and connects to the destinations. `proxy`
forwards data.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl.records import SandboxSpec
from agentrl.records.destinations import parse_destinations
from agentrl.sandbox.egress.listener import LINK, EgressListener, Listener, Server
from agentrl.sandbox.egress.proxy import Bounds, Proxy

__all__ = [
    "LINK",
    "PORT",
    "Bounds",
    "EgressListener",
    "Listener",
    "Proxy",
    "Server",
    "server_options",
    "socket_mounts",
]

PORT = 3128
"""The proxy's port on the loopback of every sandbox with an allow-list."""
_BACKLOG = 64
_LINK_INSIDE = f"/agentrl/{LINK}"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def server_options(spec: SandboxSpec) -> dict[str, Any]:
    """Returns the additional options for the exec server (see `limits.server_options`). Empty if there is no allow-list.

    Programs reach loopback addresses without the proxy, unless the allow-list contains them.
    """
    if not spec.network:
        return {}
    listed = {destination.host for destination in parse_destinations(spec.network)}
    proxy, direct = f"http://127.0.0.1:{PORT}", ",".join(name for name in _LOOPBACK if name not in listed)
    variables = {"http_proxy": proxy, "https_proxy": proxy, "no_proxy": direct}
    variables |= {name.upper(): value for name, value in variables.items()}
    return {"network": {"port": PORT, "backlog": _BACKLOG, "link": f"connect:{_LINK_INSIDE}", "environment": variables}}


def socket_mounts(folder: Path, spec: SandboxSpec) -> dict[str, Path]:
    """Returns a mapping path in the sandbox -> path on the host for the socket through which the exec server hands over its listener. Empty
    if there is no allow-list."""
    return {_LINK_INSIDE: folder / LINK} if spec.network else {}
