"""The start of the exec server.

    python3 -I exec_server.py connect:/agentrl/link | fd:0  '{"agent": 1879048199, "server": 2013265927, ...}'
    python3 -I exec_server.py keep:/agentrl/link            # starts sandboxes that share a container (see `keeper`)

It is process 1 of the sandbox's pid namespace, so `kill(-1)` reaches every program in the sandbox, daemons included, and nothing
else; the kernel makes that call atomic against forks. When the host hangs up, it ends and the kernel ends everything else.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys

from agentrl.sandbox.inside.bounds import set_bounds
from agentrl.sandbox.inside.child import look_like_an_interpreter
from agentrl.sandbox.inside.keeper import Keeper
from agentrl.sandbox.inside.separate import separate
from agentrl.sandbox.inside.server import Server
from agentrl.sandbox.inside.users import ENVIRONMENT, leave_root, own_user, restrict
from agentrl.sandbox.inside.wire import Link

TYPE_CHECKING = False
if TYPE_CHECKING:  # not at run time: each import costs every sandbox its start-up time
    from agentrl.sandbox.inside.wire import Request


def connect(address: str) -> socket.socket:
    kind, _, where = address.partition(":")
    if kind == "fd":
        return socket.socket(fileno=int(where))
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET if kind == "keep" else socket.SOCK_STREAM)
    sock.connect(where)
    return sock


def hand_over(network: Request) -> None:
    """Opens the listener that the host's proxy answers, and gives it away before any program runs; programs learn where it is."""
    listener = socket.create_server(("127.0.0.1", network["port"]), backlog=network["backlog"])
    with listener, connect(network["link"]) as link:
        socket.send_fds(link, [b"\0"], [listener.fileno()])
    ENVIRONMENT.update(network["environment"])


def heed_image() -> None:
    """Programs get the variables of their image, which no program can change (see `agentrl.sandbox.layout`)."""
    try:
        with open("/opt/agentrl/image.json", encoding="utf-8") as file:
            ENVIRONMENT.update(json.load(file)["environment"])
    except FileNotFoundError:
        return


def main() -> None:
    sock = connect(sys.argv[1])
    os.set_inheritable(sock.fileno(), False)
    if sys.argv[1].startswith("keep:"):
        Keeper(sock, serve).run()
    serve(json.loads(sys.argv[2]), sock)


def serve(options: Request, sock: socket.socket) -> None:
    """Turns this process, the first of its sandbox, into the exec server; returns when that has failed."""
    if os.geteuid() == 0:
        if "shown" in options:
            separate(options)
        set_bounds(options)
    users = leave_root(options) if os.geteuid() == 0 else own_user(options)
    restrict(options)
    heed_image()
    if "network" in options:
        hand_over(options["network"])
    os.umask(0o022)
    look_like_an_interpreter()

    gc.freeze()
    try:
        Server(Link(sock), users).run()
    except BaseException as error:  # the host sees the connection end; why is worth a line in the sandbox's log
        sys.stderr.write(f"exec server: {error!r}\n")
        os._exit(1)


if __name__ == "__main__":
    main()
