"""`python -m agentrl.learner.launch PARENT_PID ARGS...`: torchrun, tied to the process that started it.

Killing the launcher must leave nothing behind: the launcher dies with its parent, and each worker with the launcher.

The workers find each other through a store that torchrun hosts. By default it listens on every network interface, and torchrun's dynamic
rendezvous unpickles its contents, so anyone who can reach the port could run a program. Here the store listens on the loopback address
only, and the rendezvous is static, which unpickles nothing.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import Any

from agentrl.base.processes import die_with_parent, freeze_imports
from agentrl.learner.driver_reports import ExitReason, send_exit_reason

LOOPBACK = "127.0.0.1"


def listen_on_loopback() -> int:
    """Gives the `TCPStore` that this process will host a listener on the loopback address, and returns its port."""
    import torch.distributed

    distributed: Any = torch.distributed  # its stores have no type hints
    listener = socket.create_server((LOOPBACK, 0))

    class BoundStore(distributed.TCPStore):  # type: ignore[misc]
        def __init__(
            self, host_name: str, port: int, world_size: int | None = None, is_master: bool = False, *rest: Any, **options: Any
        ) -> None:
            if is_master:
                options["master_listen_fd"] = listener.detach()
            super().__init__(host_name, port, world_size, is_master, *rest, **options)

    distributed.TCPStore = BoundStore
    return int(listener.getsockname()[1])


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    with freeze_imports():
        port = listen_on_loopback()
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import main as torchrun

    try:
        address = ["--rdzv-backend=static", f"--rdzv-endpoint={LOOPBACK}:{port}", f"--local-addr={LOOPBACK}"]
        torchrun([*address, *sys.argv[2:], "--parent", str(os.getpid())])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:  # killed, so it sent no reason itself
            _tell(rank, -failure.exitcode)
        sys.exit(1)


def _tell(rank: int, number: int) -> None:
    why = " (as the kernel does when memory runs out)" if number == signal.SIGKILL else ""
    message = f"rank {rank} was killed by signal {number}, {signal.Signals(number).name}{why}"
    print(message, file=sys.stderr, flush=True)
    send_exit_reason(
        sys.argv[sys.argv.index("--mailbox") + 1] if "--mailbox" in sys.argv else None, ExitReason(kind="other", message=message)
    )


if __name__ == "__main__":
    main()
