"""Network access of a sandbox with an allow-list (`SandboxSpec.network`): through the host's proxy, and no other way.

The sandbox's network namespace stays empty: its own loopback, no route, no name server. Before any program runs, the exec
server opens a listener on that loopback and hands it to the host, which keeps the only copy. A program that connects there,
as the proxy variables in its environment say, talks to the host's proxy. Nothing between the two runs in the sandbox, so
nothing there can be taken over, killed or stopped. A program that ignores the variables reaches nothing.

`listener` takes the listener and accepts, `heads` parses requests, `addresses` decides and connects, `proxy` forwards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl.records import SandboxSpec
from agentrl.records.destinations import Destination, parse_destinations
from agentrl.sandbox.egress.listener import LINK, EgressListener
from agentrl.sandbox.egress.proxy import Bounds

__all__ = ["LINK", "PORT", "Bounds", "EgressListener", "proxy_environment", "server_options", "socket_mounts"]

PORT = 3128
"""The proxy's port on the loopback of every sandbox that has an allow-list."""
BACKLOG = 64
_INSIDE = f"/agentrl/{LINK}"
_ADDRESS = f"connect:{_INSIDE}"
_OWN = ("localhost", "127.0.0.1", "::1")


def server_options(spec: SandboxSpec) -> dict[str, Any]:
    """Additional options of the exec server (see `allowance.server_options`); none for a sandbox without an allow-list."""
    if not spec.network:
        return {}
    return {
        "network": {"port": PORT, "backlog": BACKLOG, "link": _ADDRESS, "environment": proxy_environment(parse_destinations(spec.network))}
    }


def socket_mounts(folder: Path, spec: SandboxSpec) -> dict[str, Path]:
    """Path in the sandbox, and on the host, of the socket over which the exec server hands its listener to the host."""
    return {_INSIDE: folder / LINK} if spec.network else {}


def proxy_environment(network: tuple[Destination, ...]) -> dict[str, str]:
    """The proxy variables of programs. Loopback addresses bypass the proxy unless the allow-list names them."""
    listed = {destination.host for destination in network}
    proxy, own = f"http://127.0.0.1:{PORT}", ",".join(name for name in _OWN if name not in listed)
    pairs = {"http_proxy": proxy, "https_proxy": proxy, "no_proxy": own}
    return pairs | {name.upper(): value for name, value in pairs.items()}
