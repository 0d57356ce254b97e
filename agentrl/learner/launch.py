"""`python -m agentrl.learner.launch PARENT_PID RANKS MODULE ARGS...` starts the ranks. It dies with its parent, and each rank dies with it.

torchrun starts several ranks. A single rank needs neither torchrun nor a store: without their imports, this process starts a second of
CPU time earlier and takes 40 MB of memory instead of 220.

Several ranks find each other through a store that torchrun hosts. By default it listens on every network interface, and the dynamic
rendezvous unpickles its contents, so anyone who can reach the port could run a program. Here the store listens on the loopback address
only, and the rendezvous is static, which unpickles nothing.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from typing import Any

from agentrl.base.processes import die_with_parent, freeze_imports
from agentrl.learner.driver_reports import ExitReason, send_exit_reason

LOOPBACK = "127.0.0.1"
_SINGLE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


def listen_on_loopback() -> int:
    """Makes the `TCPStore` of this process listen on the loopback address; returns its port."""
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
    """Runs the ranks that this process's arguments describe. Exits with code 1 if one fails."""
    parent, ranks, *worker = sys.argv[1:]
    die_with_parent(int(parent))
    worker += ["--parent", str(os.getpid())]
    if int(ranks) == 1:
        code = subprocess.Popen([sys.executable, "-m", *worker], env={**os.environ, **_SINGLE}).wait()
        if code < 0:
            _report_kill(0, -code)
        sys.exit(code != 0)
    _run_torchrun(ranks, worker)


def _run_torchrun(ranks: str, worker: list[str]) -> None:
    with freeze_imports():
        port = listen_on_loopback()
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import main as torchrun

    try:
        address = ["--rdzv-backend=static", f"--rdzv-endpoint={LOOPBACK}:{port}", f"--local-addr={LOOPBACK}"]
        torchrun([*address, "--nnodes=1", f"--nproc-per-node={ranks}", "-m", *worker])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:  # a killed worker sends no reason
            _report_kill(rank, -failure.exitcode)
        sys.exit(1)


def _report_kill(rank: int, number: int) -> None:
    why = " (as the kernel does when memory runs out)" if number == signal.SIGKILL else ""
    message = f"rank {rank} was killed by signal {number}, {signal.Signals(number).name}{why}"
    print(message, file=sys.stderr, flush=True)
    send_exit_reason(
        sys.argv[sys.argv.index("--mailbox") + 1] if "--mailbox" in sys.argv else None, ExitReason(kind="other", message=message)
    )


if __name__ == "__main__":
    main()
