"""`python -m agentrl.learner.launch PARENT_PID RANKS MODULE ARGS...` starts the ranks. The process dies with its parent, and
each rank dies with the process.

If there are several hosts, `RANKS` is `RANKS/NODE/NODES@HOST:PORT` on each: the number of ranks on this host, the host's index, the
number of hosts, and the address at which host 0 listens.

If there are several ranks, torchrun starts them. A single rank needs neither torchrun nor a store. Not importing torchrun saves this
process a second of CPU time at startup and reduces its memory use from 220 MB to 40 MB.

Several ranks find each other through a store that torchrun hosts. By default, the store listens on every network interface, and the dynamic
rendezvous unpickles its contents, so any process that can reach the port could run a program. Here, the store listens on one address, which
is the loopback address if there is one host, and the rendezvous is static and unpickles nothing. The network between several hosts must be
private.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from agentrl.base.processes import die_with_parent, freeze_imports
from agentrl.learner.driver_reports import ExitReason, send_exit_reason

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
_SINGLE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The share of the learner's ranks that runs on this host."""

    ranks: int
    node: int = 0
    nodes: int = 1
    host: str = LOOPBACK  # address of host 0
    port: int = 0  # 0 means any free port

    @classmethod
    def parse(cls, text: str) -> Placement:
        """Reads `RANKS` or `RANKS/NODE/NODES@HOST:PORT`. Raises `ValueError` if a number is missing or malformed."""
        counts, _, address = text.partition("@")
        if "/" not in counts:
            return cls(ranks=int(counts))
        ranks, node, nodes = map(int, counts.split("/"))
        host, _, port = address.rpartition(":")
        return cls(ranks=ranks, node=node, nodes=nodes, host=host, port=int(port))


def listen_at(host: str, port: int = 0) -> int:
    """Makes the `TCPStore` of this process listen at `host`, an address of this host. Returns the port; `port` 0 chooses a free one. Raises
    `OSError` if the address is not available."""
    import torch.distributed

    distributed: Any = torch.distributed  # its stores have no type hints
    listener = socket.create_server((host, port))

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
    """Runs the ranks that this process's arguments describe. Exits with code 1 if a rank fails."""
    parent, placed, *worker = sys.argv[1:]
    die_with_parent(int(parent))
    worker += ["--parent", str(os.getpid())]
    placement = Placement.parse(placed)
    if placement.ranks * placement.nodes == 1:
        code = subprocess.Popen([sys.executable, "-m", *worker], env={**os.environ, **_SINGLE}).wait()
        if code < 0:
            _report_kill(0, -code)
        sys.exit(code != 0)
    _run_torchrun(placement, worker)


def _run_torchrun(placement: Placement, worker: list[str]) -> None:
    with freeze_imports():
        port = listen_at(placement.host, placement.port) if placement.node == 0 else placement.port
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import main as torchrun

    try:
        own = LOOPBACK
        if placement.nodes > 1:
            own = address_towards(placement.host)
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface_of(own)
        address = ["--rdzv-backend=static", f"--rdzv-endpoint={placement.host}:{port}", f"--local-addr={own}"]
        nodes = [f"--nnodes={placement.nodes}", f"--node-rank={placement.node}", f"--nproc-per-node={placement.ranks}"]
        torchrun([*address, *nodes, f"--log-dir={os.devnull}", "-m", *worker])  # a folder would remain in the temporary folder
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:  # a killed worker sends no reason
            _report_kill(rank, -failure.exitcode)
        sys.exit(1)


def address_towards(host: str) -> str:
    """Returns the local IPv4 address from which packets to `host` are sent. Raises `OSError` if `host` is unknown or no route leads to
    `host`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """Returns the name of the network interface with the given IPv4 address. Raises `OSError` if no interface has this address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # the interface has no address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    raise OSError(f"no network interface has the address {address}")


def _report_kill(rank: int, number: int) -> None:
    why = " (the kernel sends it if memory runs out)" if number == signal.SIGKILL else ""
    message = f"rank {rank} was killed by signal {number}, {signal.Signals(number).name}{why}"
    print(message, file=sys.stderr, flush=True)
    send_exit_reason(
        sys.argv[sys.argv.index("--mailbox") + 1] if "--mailbox" in sys.argv else None, ExitReason(kind="other", message=message)
    )


if __name__ == "__main__":
    main()
