"""The address of a run's server: a file in the run folder while the server runs, for a learner that uses NCCL."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from agentrl.base.files import write_atomically

NAME = "server.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """Address and key of a running server; `start` identifies its start."""

    url: str
    key: str
    start: int


def announce_server(run_dir: Path, url: str, *, key: str) -> None:
    """Records that a new server answers at `url` to requests with `key`. Only the run's user can read the file."""
    write_atomically(run_dir / NAME, json.dumps({"url": url, "key": key, "start": time.time_ns()}), private=True)


def withdraw_server(run_dir: Path) -> None:
    """Records that no server runs."""
    (run_dir / NAME).unlink(missing_ok=True)


def announced_server(run_dir: Path) -> ServerAddress | None:
    """Returns the current server, or None."""
    try:
        record = json.loads((run_dir / NAME).read_text())
    except FileNotFoundError:
        return None
    return ServerAddress(url=str(record["url"]), key=str(record["key"]), start=int(record["start"]))
