"""Checks the resources of the host that a sandbox gets: a share of the CPUs, and the destinations on its allow-list."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from agentrl.protocols import Sandbox
from agentrl.sandbox.conformance.bench import BackendUnderTest, expect, expect_output, run_python

_TOLERANCE = 1.35  # of CPU time, which the kernel assigns in slices of a tenth of a second
_COUNT_CORES = "import os; print(os.cpu_count(), len(os.sched_getaffinity(0)), os.sysconf('SC_NPROCESSORS_ONLN'))"
_SPIN = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        end = time.monotonic() + 1
        while time.monotonic() < end: pass
        os._exit(0)
start = time.monotonic()
for _ in range(4): os.wait()
spent = os.times()
print(spent.children_user + spent.children_system, time.monotonic() - start)
"""
_REQUESTS = """
import os, socket, urllib.error, urllib.request
def ask(url):
    try: return urllib.request.urlopen(url, timeout=10).read().decode()
    except urllib.error.HTTPError as error: return str(error.code)
    except OSError: return 'no'
def direct(*address):
    try: socket.create_connection(address, timeout=2); return 'connected'
    except OSError: return 'no'
"""


async def check_cores(bench: BackendUnderTest, sandbox: Sandbox) -> None:
    """Every way to count cores returns the number that the CPU time can fill."""
    count = min(math.ceil(bench.spec.cpus), len(os.sched_getaffinity(0)))
    await expect_output(sandbox, _COUNT_CORES, f"{count} {count} {count}")
    result = await sandbox.exec(["nproc"], timeout_s=10)
    expect(result.stdout == f"{count}\n", result)
    result = await sandbox.exec(["python3", "-I", "-c", _COUNT_CORES], timeout_s=20)
    expect(result.stdout == f"{count} {count} {count}\n", result)


async def check_cpu_time(bench: BackendUnderTest, sandbox: Sandbox) -> None:
    """All programs together get the CPU time of the spec."""
    result = await run_python(sandbox, _SPIN)
    expect(result.exit_code == 0, result)
    spent, wall = map(float, result.stdout.split())
    expect(0 < spent <= _TOLERANCE * bench.spec.cpus * wall, f"{spent:.2f} s of CPU time in {wall:.2f} s with cpus={bench.spec.cpus}")


async def check_allow_list(bench: BackendUnderTest, sandbox: Sandbox) -> None:
    """With an allow-list, a program reaches the destinations on it through the proxy variables, and nothing else."""
    async with _greeting() as port:
        tests = f"ask('http://127.0.0.1:{port}/'), ask('http://127.0.0.1:{port ^ 1}/'), ask('http://example.com/'), "
        tests += f"direct('127.0.0.1', {port}), direct('example.com', 80), direct('1.1.1.1', 53)"
        connected = BackendUnderTest(bench.backend, replace(bench.spec, network=(f"127.0.0.1:{port}",)))
        async with connected.sandbox() as other:
            await expect_output(other, f"{_REQUESTS}print({tests})", "hello 403 403 no no no")
            killed = await run_python(other, "import time; time.sleep(60)", timeout_s=0.5)
            expect(killed.reason == "timeout", killed)
            result = await other.exec(["python3", "-c", f"{_REQUESTS}print({tests})"], timeout_s=20)  # after all processes were killed
            expect(result.stdout == "hello 403 403 no no no\n", result)
        await expect_output(sandbox, f"{_REQUESTS}print({tests}, os.environ.get('HTTP_PROXY'))", "no no no no no no None")


@asynccontextmanager
async def _greeting() -> AsyncIterator[int]:
    """The port of a server on this machine's loopback that answers every request with `hello`."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]
