"""What a sandbox with an allow-list (`SandboxSpec.network`) may reach, and how: through a proxy of the host, and in no other way.

The sandbox's network namespace stays as empty as without one: a loopback of its own, no route, no name server. Before it runs
anybody's program the exec server opens a listener on that loopback and hands it to the host, which alone keeps it. A program
that connects there, as the proxy variables of its environment say, talks to the host's proxy; nothing between the two runs in
the sandbox, so nothing there can be taken over, killed or stopped. A program that ignores the variables reaches nothing.

`door` takes the listener and accepts, `heads` reads what programs ask for, `addresses` decides and connects, `proxy` carries.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl.destinations import Destination, parse_all
from agentrl.records import SandboxSpec
from agentrl.sandbox.egress.door import LINK, Door
from agentrl.sandbox.egress.proxy import Bounds

__all__ = ["PORT", "Bounds", "Door", "environment", "server_options", "shown"]

PORT = 3128
"""Where the proxy answers, on the loopback of every sandbox that has one."""
BACKLOG = 64
_INSIDE = f"/agentrl/{LINK}"
_OWN = ("localhost", "127.0.0.1", "::1")


def server_options(spec: SandboxSpec) -> dict[str, Any]:
    """What the exec server is told besides (see `allowance.server_options`): nothing for a sandbox without an allow-list."""
    if not spec.network:
        return {}
    return {"network": {"port": PORT, "backlog": BACKLOG, "link": _INSIDE, "environment": environment(parse_all(spec.network))}}


def shown(folder: Path, spec: SandboxSpec) -> dict[str, Path]:
    """Where in the sandbox its exec server finds the socket over which it hands its listener to the host."""
    return {_INSIDE: folder / LINK} if spec.network else {}


def environment(network: tuple[Destination, ...]) -> dict[str, str]:
    """The proxy variables of programs. Their own loopback is theirs, unless an entry gives that address to the host."""
    given = {destination.host for destination in network}
    proxy, own = f"http://127.0.0.1:{PORT}", ",".join(name for name in _OWN if name not in given)
    pairs = {"http_proxy": proxy, "https_proxy": proxy, "no_proxy": own}
    return pairs | {name.upper(): value for name, value in pairs.items()}
