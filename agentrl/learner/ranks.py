"""The processes of one learner and their communication: torch.distributed with gloo on CPU and NCCL on CUDA."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.learner.driver_reports import SILENT, ProgressReporter

COLLECTIVE_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """Ranks that share every sequence (`agentrl.learner.ulysses`), and this process's rank among them."""

    rank: int
    size: int
    group: dist.ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process's rank among the learner's processes, and collectives over them."""

    rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup  # gloo on every device
    on_host: int = 1  # ranks per host; the ranks on a host are consecutive
    team: Team | None = None
    report_progress: ProgressReporter = SILENT  # reports each piece of work before it starts; only rank 0 sends

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def is_first_on_host(self) -> bool:
        """Whether this is the first rank on its host."""
        return self.rank % self.on_host == 0

    @property
    def hosts(self) -> int:
        """The number of hosts that the ranks run on."""
        return self.size // self.on_host

    @property
    def data_parallel_size(self) -> int:
        """The number of shards that a batch is divided into: one per rank, or per team."""
        return self.size // self.team.size if self.team else self.size

    @property
    def data_parallel_rank(self) -> int:
        """The index of this rank's shard of a batch."""
        return self.rank // self.team.size if self.team else self.rank

    def sum(self, values: Tensor) -> Tensor:
        """Returns the elementwise sum over the shards of a batch, as a CPU tensor; a team counts once."""
        total = values.detach().cpu().clone()
        if self.team is not None and self.team.rank:
            total.zero_()
        dist.all_reduce(total, group=self.control)
        return total

    def max(self, values: Tensor) -> Tensor:
        """Returns the elementwise maximum over all ranks, as a CPU tensor."""
        total = values.detach().cpu().clone()
        dist.all_reduce(total, op=dist.ReduceOp.MAX, group=self.control)
        return total

    def from_first(self, value: int) -> int:
        """Returns rank 0's value on every rank."""
        tensor = torch.tensor([value])
        dist.broadcast(tensor, src=0, group=self.control)
        return int(tensor.item())

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Returns the `data` of all ranks, in rank order. Every rank receives the same list."""
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self.control)
        longest = max(1, *(int(size.item()) for size in sizes))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else padded[:0]
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self.control)
        return [part[: int(size.item())].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]

    def barrier(self) -> None:
        """Waits until all ranks have called this method."""
        dist.barrier(group=self.control)


def resolve_device(device: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    """Resolves `auto` to cuda if torch has a GPU, else to cpu. Other devices are returned unchanged."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def join(device: Literal["auto", "cpu", "cuda"]) -> Ranks:
    """Joins the launcher's other processes. The launcher sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and, if there are several
    ranks, the rendezvous address."""
    kind = resolve_device(device)
    # Otherwise DeepSpeed guesses its accelerator on import.
    os.environ["DS_ACCELERATOR"] = kind
    if kind == "cpu" and os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())  # otherwise gloo binds to the host name's address
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    import deepspeed

    # DeepSpeed's shared-memory collectives take minutes to compile, and a killed process leaves files in /dev/shm.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    backend = "nccl" if kind == "cuda" else "gloo"
    if os.environ["WORLD_SIZE"] == "1":
        store: Any = vars(dist)["HashStore"]()  # listens nowhere; torch does not declare it as exported
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False, timeout=timeout)
    own = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    control = dist.new_group(backend="gloo", timeout=timeout)
    assert control is not None
    on_host = int(os.environ["LOCAL_WORLD_SIZE"])
    return Ranks(rank=dist.get_rank(), size=dist.get_world_size(), device=own, control=control, on_host=on_host)


def leave() -> None:
    """Leaves the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def loopback() -> str:
    """Returns the name of the loopback network interface, or of the first interface if there is neither `lo` nor `lo0`."""
    names = [name for _, name in socket.if_nameindex()]
    return next(name for name in ("lo", "lo0", names[0]) if name in names)
