"""The start of the exec server.

    python3 -I exec_server.py connect:/agentrl/link | fd:0  '{"agent": 1879048199, "server": 2013265927, ...}'
    python3 -I exec_server.py keep:/agentrl/link            # starts sandboxes that share a container (see `keeper`)

It is process 1 of the sandbox's pid namespace, so `kill(-1)` reaches every program in the sandbox, daemons included, and nothing else,
atomically against forks. When the host closes the connection it exits, and the kernel ends everything else.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys

from agentrl.sandbox.inside.bounds import set_bounds
from agentrl.sandbox.inside.child import reset_interpreter
from agentrl.sandbox.inside.isolation import isolate_tree
from agentrl.sandbox.inside.keeper import Keeper
from agentrl.sandbox.inside.server import Server
from agentrl.sandbox.inside.users import ENVIRONMENT, become_server, restrict
from agentrl.sandbox.inside.wire import Link

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agentrl.sandbox.inside.wire import Request


def _connect(address: str) -> socket.socket:
    kind, _, where = address.partition(":")
    if kind == "fd":
        return socket.socket(fileno=int(where))
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET if kind == "keep" else socket.SOCK_STREAM)
    sock.connect(where)
    return sock


def main() -> None:
    """Starts an exec server or a keeper."""
    sock = _connect(sys.argv[1])
    os.set_inheritable(sock.fileno(), False)
    if sys.argv[1].startswith("keep:"):
        Keeper(sock, serve).run()
    serve(json.loads(sys.argv[2]), sock)


def serve(options: Request, sock: socket.socket) -> None:
    """Turns this process, the first of its sandbox, into the exec server."""
    if os.geteuid() == 0:
        if "shown" in options:
            isolate_tree(options)
        set_bounds(options)
    users = become_server(options)
    restrict(options)
    if os.path.exists("/opt/agentrl/image.json"):  # the variables of the image (see `agentrl.sandbox.layout`)
        with open("/opt/agentrl/image.json", encoding="utf-8") as file:
            ENVIRONMENT.update(json.load(file)["environment"])
    if "network" in options:
        network = options["network"]
        listener = socket.create_server(("127.0.0.1", network["port"]), backlog=network["backlog"])
        with listener, _connect(network["link"]) as link:
            socket.send_fds(link, [b"\0"], [listener.fileno()])
        ENVIRONMENT.update(network["environment"])
    os.umask(0o022)
    reset_interpreter()

    gc.freeze()
    try:
        Server(Link(sock), users).run()
    except BaseException as error:  # the host sees the connection end; the reason goes to the sandbox's log
        sys.stderr.write(f"exec server: {error!r}\n")
        os._exit(1)


if __name__ == "__main__":
    main()
