"""The address of a run's server, in a file in the run folder while there is a server; read by a learner that uses NCCL."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from agentrl.base.files import write_atomically

NAME = "server.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """A running server: its address, its key, and which of the run's servers it is."""

    url: str
    key: str
    start: int


def announce_server(run_dir: Path, url: str, *, key: str) -> None:
    """Records that a new server answers at `url` to requests with `key`. Only the run's user can read the file."""
    write_atomically(run_dir / NAME, json.dumps({"url": url, "key": key, "start": time.time_ns()}), private=True)


def withdraw_server(run_dir: Path) -> None:
    """Records that there is no server."""
    (run_dir / NAME).unlink(missing_ok=True)


def announced_server(run_dir: Path) -> ServerAddress | None:
    """The current server, or None."""
    try:
        record = json.loads((run_dir / NAME).read_text())
    except FileNotFoundError:
        return None
    return ServerAddress(url=str(record["url"]), key=str(record["key"]), start=int(record["start"]))
