"""The network of a sandbox that has an allow-list."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from agentrl.sandbox.conformance.bench import BackendUnderTest, conformance_check, expect, expect_output, run_python


@conformance_check
async def _allow_list(bench: BackendUnderTest) -> None:
    """With an allow-list a program reaches what is on it, through its proxy variables, and nothing else."""
    ask = (
        "import os, socket, urllib.error, urllib.request\n"
        "def ask(url):\n"
        "    try: return urllib.request.urlopen(url, timeout=10).read().decode()\n"
        "    except urllib.error.HTTPError as error: return str(error.code)\n"
        "    except OSError: return 'no'\n"
        "def direct(*address):\n"
        "    try: socket.create_connection(address, timeout=2); return 'connected'\n"
        "    except OSError: return 'no'\n"
    )
    async with _greeting() as port:
        tests = f"ask('http://127.0.0.1:{port}/'), ask('http://127.0.0.1:{port ^ 1}/'), ask('http://example.com/'), "
        tests += f"direct('127.0.0.1', {port}), direct('example.com', 80), direct('1.1.1.1', 53)"
        wide = BackendUnderTest(bench.backend, replace(bench.spec, network=(f"127.0.0.1:{port}",)))
        async with wide.sandbox() as sandbox:
            await expect_output(sandbox, f"{ask}print({tests})", "hello 403 403 no no no")
            killed = await run_python(sandbox, "import time; time.sleep(60)", timeout_s=0.5)
            expect(killed.reason == "timeout", killed)
            result = await sandbox.exec(["python3", "-c", f"{ask}print({tests})"], timeout_s=20)  # after every process was killed
            expect(result.stdout == "hello 403 403 no no no\n", result)
        async with bench.sandbox() as sandbox:
            await expect_output(sandbox, f"{ask}print({tests}, os.environ.get('HTTP_PROXY'))", "no no no no no no None")


@asynccontextmanager
async def _greeting() -> AsyncIterator[int]:
    """The port of a server on this machine's loopback that greets everyone."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]
