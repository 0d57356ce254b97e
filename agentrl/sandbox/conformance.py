"""What every sandbox backend must do, as checks that ship with the product: run them on your machine, or on your own backend.

Each check opens what it needs through the public protocol and acts as a hostile program would. `check` runs all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from agentrl.errors import AgentRLError, SandboxError
from agentrl.protocols import Sandbox, SandboxBackend
from agentrl.records import ExecResult, SandboxSpec

CHECK_S = 120.0
MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """How one check went: `CheckResult(name="no_network", ok=True, detail="", wall_s=0.2)`."""

    name: str
    ok: bool
    detail: str  # what was seen instead, empty when ok
    wall_s: float


class Unmet(Exception):
    """A backend does not do what it must; the message says what was seen."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What a check works with."""

    backend: SandboxBackend
    spec: SandboxSpec

    @asynccontextmanager
    async def sandbox(self, *, files: Mapping[str, bytes] | None = None, snapshot: bytes | None = None) -> AsyncIterator[Sandbox]:
        sandbox = await self.backend.open(self.spec, files=files, snapshot=snapshot)
        try:
            yield sandbox
        finally:
            await sandbox.close()


Check = Callable[[Bench], Awaitable[None]]
CHECKS: dict[str, Check] = {}


async def check(backend: SandboxBackend, spec: SandboxSpec, *, only: str = "") -> list[CheckResult]:
    """Runs the checks (those whose name contains `only`) one after the other; a check that raises or takes too long has failed."""
    await backend.prepare(spec)
    return [await _run(name, work, Bench(backend, spec)) for name, work in CHECKS.items() if only in name]


async def _run(name: str, work: Check, bench: Bench) -> CheckResult:
    start = time.monotonic()
    detail = ""
    try:
        async with asyncio.timeout(CHECK_S):
            await work(bench)
    except (Unmet, AgentRLError, ValueError, OSError) as error:
        detail = f"{type(error).__name__}: {error}"
    return CheckResult(name=name, ok=not detail, detail=detail, wall_s=time.monotonic() - start)


def _check(work: Check) -> Check:
    CHECKS[work.__name__.removeprefix("_")] = work
    return work


def _expect(condition: bool, seen: object) -> None:
    if not condition:
        raise Unmet(str(seen)[:1000])


async def _python(sandbox: Sandbox, code: str, *, timeout_s: float = 20.0, output_bytes: int = 65536) -> ExecResult:
    return await sandbox.python(code, timeout_s=timeout_s, output_bytes=output_bytes)


async def _says(sandbox: Sandbox, code: str, *wanted: str) -> None:
    """`code` ends well and prints exactly one of `wanted`."""
    result = await _python(sandbox, code)
    _expect(result.exit_code == 0 and result.stdout.strip() in wanted, result)


# Programs -------------------------------------------------------------------------------------------------------------


@_check
async def _exec_result(bench: Bench) -> None:
    """Output, errors, exit codes, standard input, environment and working directory of a program."""
    async with bench.sandbox() as sandbox:
        result = await sandbox.exec(
            ["sh", "-c", "cat; echo err >&2; pwd; echo $WORD; exit 3"], stdin=b"in\n", env={"WORD": "w"}, timeout_s=10
        )
        _expect((result.exit_code, result.stdout, result.stderr) == (3, "in\n/home/agent\nw\n", "err\n") and not result.ok, result)
        result = await sandbox.exec(["no-such-program"], timeout_s=10)
        _expect(result.exit_code == 127 and "no-such-program" in result.stderr, result)
        result = await sandbox.exec(["sh", "-c", "kill -9 $$"], timeout_s=10)
        _expect(result.exit_code is None and result.reason == "killed", result)
        result = await sandbox.exec(["cat"], stdin=b"x" * MEBIBYTE, timeout_s=10, output_bytes=2 * MEBIBYTE)
        _expect(result.stdout == "x" * MEBIBYTE and not result.truncated, (result.exit_code, len(result.stdout)))


@_check
async def _python_like_the_interpreter(bench: Bench) -> None:
    """`python(code)` gives what `python3 -I -c code` gives, and each call starts afresh."""
    snippets = [
        "print('hello'); import sys; sys.stderr.write('e')",
        "1/0",
        "x = = 1",
        "def f():\n    raise KeyError('k')\ntry:\n    f()\nexcept KeyError as error:\n    raise ValueError('v') from error",
        "import sys; sys.exit(7)",
        "raise SystemExit('bye')",
        "import sys, os; print(sys.argv, __name__, os.getcwd(), sys.flags.isolated, sorted(globals()))",
        "import atexit, threading\natexit.register(print, 'last')\nthreading.Timer(0.1, print, ['timer']).start()",
        "import os; os._exit(5)",
        "import sys; print(sys.stdin.read(), os) if False else print(repr(sys.stdin.read()))",
        "print('\\u00e9\\U0001f600')",
    ]
    async with bench.sandbox() as sandbox:
        for code in snippets:
            warm = await _python(sandbox, code)
            cold = await sandbox.exec(["python3", "-I", "-c", code], timeout_s=20)
            seen = [(result.exit_code, result.stdout, result.stderr) for result in (warm, cold)]
            _expect(seen[0] == seen[1], f"{code!r}: {seen}")
        await _python(sandbox, "import builtins, json; builtins.leak = 1; json.leak = 1")
        await _says(sandbox, "import builtins, json; print(hasattr(builtins, 'leak'), hasattr(json, 'leak'))", "False False")
        first, second = [await _python(sandbox, "import random; print(random.random())") for _ in range(2)]
        _expect(first.stdout != second.stdout, "two calls drew the same random number")


@_check
async def _output_is_cut(bench: Bench) -> None:
    """Head and tail of long output are kept, the cut is marked, and the rest costs no memory."""
    async with bench.sandbox() as sandbox:
        result = await _python(sandbox, "print('head'); print('x' * 5_000_000); print('tail')", output_bytes=1000)
        _expect(result.truncated and result.exit_code == 0 and len(result.stdout) < 1100, len(result.stdout))
        _expect(result.stdout.startswith("head\n") and result.stdout.endswith("tail\n") and "bytes cut" in result.stdout, result.stdout)


@_check
async def _timeout_kills_the_tree(bench: Bench) -> None:
    """A timeout ends children, daemons in their own session and stopped processes, promptly."""
    daemons = (
        "import os, time, signal\n"
        "for _ in range(3):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        if os.fork() == 0:\n"
        "            signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "            while True: time.sleep(0.01)\n"
        "        os._exit(0)\n"
        "print('started', flush=True)\n"
        "time.sleep(60)\n"
    )
    async with bench.sandbox() as sandbox:
        start = time.monotonic()
        result = await _python(sandbox, daemons, timeout_s=1.0)
        _expect(result.exit_code is None and result.reason == "timeout" and result.stdout == "started\n", result)
        _expect(time.monotonic() - start < 6.0, f"took {time.monotonic() - start:.1f} s")
        count = "import os; print([p for p in os.listdir('/proc') if p.isdigit() and int(p) not in (1, os.getpid())])"
        await _says(sandbox, count, "[]")


@_check
async def _background_does_not_hold_up(bench: Bench) -> None:
    """A program that leaves a child holding its output ends all the same."""
    async with bench.sandbox() as sandbox:
        start = time.monotonic()
        result = await sandbox.exec(["sh", "-c", "sleep 30 & echo done"], timeout_s=20)
        _expect(result.exit_code == 0 and result.stdout == "done\n" and time.monotonic() - start < 5.0, result)


# Limits ---------------------------------------------------------------------------------------------------------------


@_check
async def _memory_bomb(bench: Bench) -> None:
    """Taking far more than the memory limit ends the program, not the sandbox."""
    async with bench.sandbox() as sandbox:
        size = 4 * bench.spec.memory_mb * MEBIBYTE
        result = await _python(sandbox, f"b = bytearray(b'x') * {size}; print(len(b))", timeout_s=60)
        killed = result.exit_code is None and result.reason in ("memory", "killed")
        _expect(killed or (result.exit_code == 1 and "MemoryError" in result.stderr), result)
        await _says(sandbox, "print(1)", "1")


@_check
async def _fork_bomb(bench: Bench) -> None:
    """A fork bomb meets the process limit and goes with the timeout."""
    bomb = "import os\nn = 0\nwhile True:\n    try:\n        if os.fork() == 0:\n            n = 0\n    except OSError:\n        pass\n"
    count = (
        "import os, time\n"
        "n = 0\n"
        "try:\n"
        "    for _ in range(5000):\n"
        "        if os.fork() == 0: time.sleep(60)\n"
        "        n += 1\n"
        "except OSError: pass\n"
        "print(n, flush=True)\n"
        "os.kill(-1, 9)\n"
    )
    async with bench.sandbox() as sandbox:
        result = await _python(sandbox, bomb, timeout_s=2.0)
        _expect(result.reason == "timeout", result)
        result = await _python(sandbox, count)
        _expect(result.stdout.strip().isdigit() and 0 < int(result.stdout) <= bench.spec.processes, result)
        await _says(sandbox, "print(1)", "1")


@_check
async def _disk_limit(bench: Bench) -> None:
    """The working directory and /tmp are of limited size."""
    fill = (
        "import os\n"
        "def fill(path, size):\n"
        "    with open(path, 'wb', buffering=0) as file:\n"
        "        for _ in range(size): file.write(b'x' * 1048576)\n"
        "try:\n"
        f"    fill('big', {2 * bench.spec.disk_mb}); print('no limit')\n"
        "except OSError as error: print(error.errno)\n"
        "os.unlink('big')\n"
    )
    async with bench.sandbox() as sandbox:
        result = await _python(sandbox, "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n" + fill, timeout_s=60)
        limited = result.stdout.strip() in ("27", "28") or result.reason in ("memory", "killed")  # EFBIG, ENOSPC, or its memory is full
        _expect(limited, result)


@_check
async def _open_files_limit(bench: Bench) -> None:
    """A program gets no more file descriptors than the limit."""
    code = "import os\nn = 0\ntry:\n    while n < 100000:\n        os.dup(1); n += 1\nexcept OSError: pass\nprint(n)"
    async with bench.sandbox() as sandbox:
        result = await _python(sandbox, code)
        _expect(0 < int(result.stdout) <= bench.spec.open_files, result)


# Isolation ------------------------------------------------------------------------------------------------------------


@_check
async def _no_network(bench: Bench) -> None:
    """No interface but a loopback of its own, and nothing of the host behind it."""
    code = (
        "import socket\n"
        "print([line for line in open('/proc/net/route').readlines()[1:]])\n"
        "for address in (('10.0.0.1', 80), ('1.1.1.1', 53), ('169.254.169.254', 80), ('127.0.0.1', 22)):\n"
        "    try:\n"
        "        socket.create_connection(address, timeout=2); print('connected', address)\n"
        "    except OSError: pass\n"
    )
    async with bench.sandbox() as sandbox:
        await _says(sandbox, code, "[]")


@_check
async def _allow_list(bench: Bench) -> None:
    """With an allow-list a program reaches what is on it, by the proxy variables of its environment, and nothing else in any way."""
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
        wide = Bench(bench.backend, replace(bench.spec, network=(f"127.0.0.1:{port}",)))
        async with wide.sandbox() as sandbox:
            await _says(sandbox, f"{ask}print({tests})", "hello 403 403 no no no")
            killed = await _python(sandbox, "import time; time.sleep(60)", timeout_s=0.5)
            _expect(killed.reason == "timeout", killed)
            result = await sandbox.exec(["python3", "-c", f"{ask}print({tests})"], timeout_s=20)  # after every process was killed
            _expect(result.stdout == "hello 403 403 no no no\n", result)
        async with bench.sandbox() as sandbox:
            await _says(sandbox, f"{ask}print({tests}, os.environ.get('HTTP_PROXY'))", "no no no no no no None")


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


@_check
async def _unprivileged(bench: Bench) -> None:
    """Not root, no capability, no way to gain one, a system call filter, no new namespaces, no mounts, no devices."""
    code = (
        "import os, ctypes\n"
        "status = dict(line.split(':', 1) for line in open('/proc/self/status'))\n"
        "value = lambda name: status[name].split()\n"
        "bad = []\n"
        "if '0' in value('Uid') + value('Gid') + value('Groups'): bad.append('root')\n"
        "bad += [name for name in ('CapInh', 'CapPrm', 'CapEff', 'CapAmb', 'CapBnd') if int(value(name)[0], 16)]\n"
        "if value('NoNewPrivs') != ['1']: bad.append('new privileges')\n"
        "if value('Seccomp') != ['2']: bad.append('no seccomp')\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000):\n"
        "    if libc.unshare(flag) == 0: bad.append('unshare %x' % flag)\n"
        "if libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0: bad.append('mount')\n"
        "for path in ('/dev/mem', '/dev/vda', '/dev/sda', '/dev/kmsg', '/proc/kcore'):\n"
        "    try: open(path, 'rb').read(1); bad.append(path)\n"
        "    except OSError: pass\n"
        "    except ValueError: pass\n"
        "for path in ('/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger'):\n"
        "    try: open(path, 'w').close(); bad.append(path)\n"
        "    except OSError: pass\n"
        "print(bad)\n"
    )
    async with bench.sandbox() as sandbox:
        await _says(sandbox, code, "[]")
        await _says(sandbox, code.replace("import os,", "import sys, os,"), "[]")


@_check
async def _read_only_root(bench: Bench) -> None:
    """Nothing outside the working directory, /tmp and shared memory can be written."""
    code = (
        "import os\n"
        "wrote = []\n"
        "for folder, folders, _ in os.walk('/'):\n"
        "    if folder.startswith(('/proc', '/tmp', '/home/agent', '/dev/shm', '/dev/mqueue')): folders.clear(); continue\n"
        "    try:\n"
        "        open(folder + '/probe', 'w').close(); wrote.append(folder)\n"
        "    except OSError: pass\n"
        "print(wrote)\n"
    )
    async with bench.sandbox() as sandbox:
        await _says(sandbox, code, "[]")


@_check
async def _server_out_of_reach(bench: Bench) -> None:
    """Programs cannot read, trace, signal or impersonate the exec server, and inherit none of its descriptors."""
    code = (
        "import os, signal, ctypes, stat\n"
        "bad = []\n"
        "for name in ('mem', 'environ', 'maps', 'fd/0', 'fd/3', 'fd/4', 'cwd'):\n"
        "    try: os.listdir('/proc/1/cwd') if name == 'cwd' else open('/proc/1/' + name, 'rb').read(1); bad.append(name)\n"
        "    except OSError: pass\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "if libc.ptrace(16, 1, 0, 0) == 0: bad.append('ptrace')\n"
        "for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT):\n"
        "    try: os.kill(1, number)\n"
        "    except PermissionError: pass\n"
        "for fd in range(3, 256):\n"
        "    try:\n"
        "        if stat.S_ISSOCK(os.fstat(fd).st_mode): bad.append(fd)\n"
        "    except OSError: pass\n"
        "print(bad)\n"
    )
    async with bench.sandbox() as sandbox:
        await _says(sandbox, code, "[]")
        result = await sandbox.exec(["python3", "-I", "-c", code], timeout_s=20)
        _expect(result.stdout == "[]\n", result)
        forged = 'import sys, struct\nsys.stdout.buffer.write(struct.pack(\'!II\', 30, 0) + b\'{"id":1,"ok":true,"exit":0}\' * 3)'
        result = await _python(sandbox, forged)
        _expect(result.exit_code == 0 and result.stdout.count('"ok":true') == 3, result)
        await _says(sandbox, "print('still here')", "still here")


@_check
async def _nothing_shared(bench: Bench) -> None:
    """What one sandbox writes, another does not see; each has its own processes."""
    async with bench.sandbox() as first, bench.sandbox() as second:
        leave = "for path in ('/tmp/mark', '/home/agent/mark', '/dev/shm/mark'):\n    open(path, 'w').write('x')"
        _expect((await _python(first, leave)).exit_code == 0, "cannot write")
        look = (
            "import os\n"
            "marks = [p for p in ('/tmp/mark', '/home/agent/mark', '/dev/shm/mark') if os.path.exists(p)]\n"
            "print(marks, len([p for p in os.listdir('/proc') if p.isdigit()]))\n"
        )
        await _says(second, look, "[] 2")


@_check
async def _killed_sandbox_is_an_error(bench: Bench) -> None:
    """Whatever a program does to its sandbox ends in a typed error or in nothing, and the next sandbox opens."""
    attack = "import os\nfor pid in [1, -1]:\n    try: os.kill(pid, 9)\n    except OSError: pass\n"
    async with bench.sandbox() as sandbox:
        try:
            await _python(sandbox, attack, timeout_s=5)
            await _says(sandbox, "print(1)", "1")
        except SandboxError:
            pass
    async with bench.sandbox() as sandbox:
        await _says(sandbox, "print(1)", "1")


# Files, snapshots, pausing --------------------------------------------------------------------------------------------


@_check
async def _files(bench: Bench) -> None:
    """Files go in and come out whole; missing, oversized and misplaced ones are typed errors."""
    data = bytes(range(256)) * 4096
    async with bench.sandbox(files={"in/deep/data.bin": data, "note.txt": b"hi"}) as sandbox:
        _expect(await sandbox.read("in/deep/data.bin", max_bytes=len(data)) == data, "other bytes")
        await sandbox.write("note.txt", b"replaced")
        await _says(sandbox, "print(open('note.txt').read())", "replaced")
        await _raises(FileNotFoundError, sandbox.read("none", max_bytes=10))
        await _raises(ValueError, sandbox.read("in/deep/data.bin", max_bytes=10))
        for path in ("/etc/passwd", "../x", "a/../../x", "", ".", "a//b"):
            await _raises(ValueError, sandbox.read(path, max_bytes=10))
            await _raises(ValueError, sandbox.write(path, b""))


@_check
async def _links_are_not_followed(bench: Bench) -> None:
    """A link, pipe or folder where the host reads or writes is refused or replaced, never followed."""
    plant = (
        "import os\n"
        "os.symlink('/etc/passwd', 'link'); os.symlink('/etc', 'folder'); os.mkfifo('pipe'); os.mkdir('dir')\n"
        "os.symlink('/tmp/target', 'out'); open('/tmp/target', 'w').write('kept')\n"
    )
    async with bench.sandbox() as sandbox:
        _expect((await _python(sandbox, plant)).exit_code == 0, "cannot plant")
        for path in ("link", "folder/passwd", "pipe", "dir"):
            await _raises(ValueError, sandbox.read(path, max_bytes=100000))
        await _raises(ValueError, sandbox.write("folder/x", b""))
        await sandbox.write("out", b"new")
        await _says(sandbox, "import os; print(open('/tmp/target').read(), os.path.islink('out'), open('out').read())", "kept False new")


@_check
async def _snapshot_round_trip(bench: Bench) -> None:
    """A snapshot opens into a sandbox with the same files; an oversized working directory is refused."""
    fill = (
        "import os\n"
        "os.makedirs('a/b'); os.symlink('f', 'a/b/l'); os.mkfifo('pipe')\n"
        "open('a/b/f', 'wb').write(b'x' * 100000); os.chmod('a/b/f', 0o755)\n"
    )
    async with bench.sandbox() as sandbox:
        _expect((await _python(sandbox, fill)).exit_code == 0, "cannot fill")
        archive = await sandbox.snapshot()
        _expect((await _python(sandbox, "open('sparse', 'wb').truncate(1 << 40)")).exit_code in (0, 1, None), "cannot make a sparse file")
        if (await _python(sandbox, "import os; print(os.path.getsize('sparse'))")).stdout.strip() == str(1 << 40):
            await _raises(ValueError, sandbox.snapshot())
    async with bench.sandbox(snapshot=archive) as sandbox:
        look = (
            "import os\n"
            "print(len(open('a/b/f').read()), os.readlink('a/b/l'), oct(os.stat('a/b/f').st_mode & 0o777), os.path.exists('pipe'))\n"
        )
        await _says(sandbox, look, "100000 f 0o755 False")
    await _raises((ValueError, SandboxError), bench.backend.open(bench.spec, snapshot=b"not an archive" * 100))


@_check
async def _pause_and_resume(bench: Bench) -> None:
    """While paused a program makes no progress and its clock stands still; afterwards it goes on."""
    count = "import time\nfor i in range(15):\n    time.sleep(0.1)\n    print(time.monotonic(), flush=True)\n"
    async with bench.sandbox() as sandbox:
        running = asyncio.create_task(_python(sandbox, count, timeout_s=4.0))
        await asyncio.sleep(0.5)
        await sandbox.pause()
        await asyncio.sleep(4.0)
        _expect(not running.done(), "the program ended while it was paused")
        await sandbox.resume()
        result = await running
        _expect(result.exit_code == 0 and len(result.stdout.split()) == 15, result)
        times = [float(word) for word in result.stdout.split()]
        _expect(max(b - a for a, b in itertools.pairwise(times)) > 3.0, "the program went on while it was paused")


@_check
async def _close_is_final(bench: Bench) -> None:
    """Closing twice is fine, and a closed sandbox gives a typed error."""
    sandbox = await bench.backend.open(bench.spec)
    await sandbox.close()
    await sandbox.close()
    await _raises(SandboxError, _python(sandbox, "print(1)"))


async def _raises(kinds: type[Exception] | tuple[type[Exception], ...], work: Awaitable[object]) -> None:
    try:
        result = await work
    except kinds:
        return
    raise Unmet(f"expected {kinds}, got {result!r}")
