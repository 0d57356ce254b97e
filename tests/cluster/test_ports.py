from __future__ import annotations

import socket
from pathlib import Path

import pytest

from agentrl.cluster import process_host as module
from agentrl.cluster.process_host import ReservedPort, free_port
from agentrl.errors import LaunchError

LOOPBACK = "127.0.0.1"


def test_two_concurrent_starts_get_different_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is starting does not listen yet, so that its port looks free."""
    first = ReservedPort(LOOPBACK)
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not low <= first.number <= high, "no connection gets it while the server starts"
    numbers = iter((first.number, first.number, first.number + 1))
    monkeypatch.setattr(module, "free_port", lambda host: next(numbers))
    second = ReservedPort(LOOPBACK)
    assert second.number == first.number + 1
    first.release()
    second.release()
    monkeypatch.setattr(module, "free_port", lambda host: first.number)
    third = ReservedPort(LOOPBACK)
    assert third.number == first.number, "a released port can be reserved again"
    with pytest.raises(LaunchError, match=r"no free port on 127\.0\.0\.1 after \d+ tries\n  fix: "):
        ReservedPort(LOOPBACK)
    third.release()


def test_a_port_in_use_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(module, "_unassigned_ports", lambda: [port])
        assert free_port(LOOPBACK) != port
