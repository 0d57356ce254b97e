"""Network namespaces as hosts: each has its own address, and is not reachable through the loopback interface of another.

    with hosts(3, rate_mbit=200) as (driver, server, learner):
        driver.run("ip", "addr")

All hosts are on one bridge. `rate_mbit` limits what each sends and receives (`tc tbf`). `delay_ms` and `loss` go through a wire in user
space, because kernels of virtual machines often lack `tc netem`. It needs root; a machine without namespaces is an error of the
environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import secrets
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agentrl.base.processes import read_stat

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_FRAME = 65536
_BURST = "64kb"
_GATEWAY = "10.77.0.254"


@dataclass
class Host:
    """One namespace."""

    name: str
    address: str
    processes: list[subprocess.Popen[Any]] = field(default_factory=list)

    def command(self, *command: str) -> list[str]:
        """Returns the command that runs another one on this host."""
        return ["ip", "netns", "exec", self.name, *command]

    def run(self, *command: str, **options: Any) -> subprocess.CompletedProcess[Any]:
        """Runs a command on this host and returns its result."""
        return subprocess.run(self.command(*command), check=True, timeout=60, **options)

    def start(self, *command: str, **options: Any) -> subprocess.Popen[Any]:
        """Starts a command on this host. Everything on the host is killed at its end."""
        process = subprocess.Popen(self.command(*command), start_new_session=True, **options)
        self.processes.append(process)
        return process

    def python(self, *arguments: str, **options: Any) -> subprocess.Popen[Any]:
        """Starts Python on this host."""
        return self.start(sys.executable, *arguments, **options)

    def enter(self) -> None:
        """Moves the calling thread, and the threads that it starts, to this host."""
        _enter(f"/run/netns/{self.name}")

    def inside(self, function: Callable[[], T]) -> T:
        """Calls a function on this host and returns its result."""
        results: list[T] = []

        def call() -> None:
            self.enter()
            results.append(function())

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert results, "it raised"
        return results[0]

    def kill(self) -> None:
        """Kills all processes of this host, as the loss of the machine does."""
        while pids := self._pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in self.processes:
                process.poll()
            time.sleep(0.05)

    def _pids(self) -> list[int]:
        """Its processes that have not ended."""
        output = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=False).stdout
        return [pid for pid in map(int, output.split()) if not read_stat(pid).has_ended]

    def disconnect(self) -> None:
        """Cuts this host from the others."""
        self.run("ip", "link", "set", "eth0", "down")

    def reconnect(self) -> None:
        """Ends `disconnect`."""
        self.run("ip", "link", "set", "eth0", "up")


@contextlib.contextmanager
def hosts(count: int, *, rate_mbit: float = 0.0, delay_ms: float = 0.0, loss: float = 0.0) -> Iterator[list[Host]]:
    """Yields connected hosts. `rate_mbit`: of each direction of each host, 0 means no limit. `loss`: share of lost frames."""
    run = f"agt{secrets.token_hex(3)}"
    switch = Host(f"{run}-switch", "")
    all_hosts = [Host(f"{run}-{number}", f"10.77.0.{number + 1}") for number in range(count)]
    wires: list[_Wire] = []
    try:
        _ip("netns", "add", switch.name)
        switch.run("ip", "link", "add", "br0", "type", "bridge")
        switch.run("ip", "link", "set", "br0", "up")
        for number, host in enumerate(all_hosts):
            _ip("netns", "add", host.name)
            if delay_ms or loss:
                wires.append(_Wire(host, switch, f"port{number}", delay_ms / 1000.0, loss))
            else:
                peer = ("peer", "name", f"port{number}", "netns", switch.name)
                _ip("link", "add", "eth0", "netns", host.name, "type", "veth", *peer)
            switch.run("ip", "link", "set", f"port{number}", "master", "br0", "up")
            host.run("ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
            host.run("ip", "link", "set", "lo", "up")
            host.run("ip", "link", "set", "eth0", "up")
            host.run("ip", "route", "add", "default", "via", _GATEWAY)  # no such host; programs find their own address by the route
            for end_host, device in ((host, "eth0"), (switch, f"port{number}")) if rate_mbit else ():
                limit = ("rate", f"{rate_mbit}mbit", "burst", _BURST, "latency", "50ms")
                end_host.run("tc", "qdisc", "add", "dev", device, "root", "tbf", *limit)
        yield all_hosts
    finally:
        for host in all_hosts:
            host.kill()
            for process in host.processes:
                process.wait()
        for wire in wires:
            wire.close()
        for host in (*all_hosts, switch):
            subprocess.run(["ip", "netns", "del", host.name], check=False, capture_output=True)


class _Wire:
    """A wire between two network devices, which it creates: `eth0` of a host and a port of the switch. Delays and drops frames."""

    def __init__(self, host: Host, switch: Host, port: str, delay_s: float, loss: float) -> None:
        self._ends = [host.inside(lambda: _tap("eth0")), switch.inside(lambda: _tap(port))]
        self._delay_s, self._loss = delay_s, loss
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._forward, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Removes the devices."""
        self._closed.set()
        self._thread.join(5)
        for end in self._ends:
            os.close(end)

    def _forward(self) -> None:
        rng, in_flight, numbers = random.Random(0), list[tuple[float, int, int, bytes]](), 0
        other = {self._ends[0]: self._ends[1], self._ends[1]: self._ends[0]}
        while not self._closed.is_set():
            wait_s = max(0.0, in_flight[0][0] - time.monotonic()) if in_flight else 0.2
            for end in select.select(self._ends, [], [], wait_s)[0]:
                with contextlib.suppress(OSError):
                    frame = os.read(end, _FRAME)
                    if rng.random() >= self._loss:
                        numbers += 1
                        heapq.heappush(in_flight, (time.monotonic() + self._delay_s, numbers, other[end], frame))
            while in_flight and in_flight[0][0] <= time.monotonic():
                _, _, end, frame = heapq.heappop(in_flight)
                with contextlib.suppress(OSError):  # the device is down
                    os.write(end, frame)


def _tap(name: str) -> int:
    handle = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(handle, _TUNSETIFF, struct.pack("16sH14x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return handle


def _enter(namespace: str) -> None:
    handle = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(handle, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    finally:
        os.close(handle)


def _ip(*arguments: str) -> None:
    completed = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert completed.returncode == 0, f"this machine cannot create network namespaces (needs root and CAP_NET_ADMIN): {completed.stderr}"
