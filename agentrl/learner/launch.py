"""`python -m agentrl.learner.launch PARENT_PID ARGS...`: torchrun, tied to the process that started it.

Killing the launcher must leave nothing behind: the launcher dies with its parent, and each worker with the launcher.

torchrun's store, through which the workers find each other, listens on every network interface by default, and its readers
unpickle what it holds. Here it listens on the loopback address only.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import Any

from agentrl.learner.exit_reason import ExitReason, send
from agentrl.processes import die_with_parent, imports_kept


def listen_on_loopback() -> None:
    """Makes every `TCPStore` that this process hosts from now on listen on its own address only."""
    import torch.distributed

    distributed: Any = torch.distributed  # its stores have no type hints

    class BoundStore(distributed.TCPStore):  # type: ignore[misc]
        def __init__(self, host_name: str, port: int, world_size: int | None = None, is_master: bool = False, **options: Any) -> None:
            if is_master:
                listener = socket.create_server((host_name, port))
                port = listener.getsockname()[1]
                options["master_listen_fd"] = listener.detach()
            super().__init__(host_name, port, world_size, is_master, **options)

    distributed.TCPStore = BoundStore


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    with imports_kept():
        listen_on_loopback()
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import main as torchrun

    try:
        torchrun([*sys.argv[2:], "--parent", str(os.getpid())])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:  # killed, so it sent no reason itself
            _tell(rank, -failure.exitcode)
        sys.exit(1)


def _tell(rank: int, number: int) -> None:
    why = " (as the kernel does when memory runs out)" if number == signal.SIGKILL else ""
    message = f"rank {rank} was killed by signal {number}, {signal.Signals(number).name}{why}"
    print(message, file=sys.stderr, flush=True)
    send(sys.argv[sys.argv.index("--mailbox") + 1] if "--mailbox" in sys.argv else None, ExitReason(kind="other", message=message))


if __name__ == "__main__":
    main()
