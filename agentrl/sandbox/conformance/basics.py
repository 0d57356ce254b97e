"""Checks programs, limits, shares of the host's resources, isolation, files, snapshots, pausing and closing."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from agentrl.errors import SandboxError
from agentrl.protocols import Sandbox
from agentrl.sandbox.conformance.bench import (
    MEBIBYTE,
    OTHER_PROCESSES,
    BackendUnderTest,
    expect,
    expect_error,
    expect_everywhere,
    expect_output,
    run_python,
)

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


async def check_exec_result(bench: BackendUnderTest, sandbox: Sandbox) -> None:
    """Checks the output, errors, exit codes, standard input, environment and working directory of a program."""
    script = "cat; echo err >&2; pwd; echo $WORD; exit 3"
    result = await sandbox.exec(["sh", "-c", script], stdin=b"in\n", env={"WORD": "w"}, timeout_s=10)
    expect((result.exit_code, result.stdout, result.stderr) == (3, "in\n/home/agent\nw\n", "err\n") and not result.ok, result)
    result = await sandbox.exec(["no-such-program"], timeout_s=10)
    expect(result.exit_code == 127 and "no-such-program" in result.stderr, result)
    result = await sandbox.exec(["sh", "-c", "kill -9 $$"], timeout_s=10)
    expect(result.exit_code is None and result.reason == "killed", result)
    result = await sandbox.exec(["cat"], stdin=b"x" * MEBIBYTE, timeout_s=10, output_bytes=2 * MEBIBYTE)
    expect(result.stdout == "x" * MEBIBYTE and not result.truncated, (result.exit_code, len(result.stdout)))


async def check_python_like_the_interpreter(bench: BackendUnderTest, sandbox: Sandbox) -> None:
    """Checks that `python(code)` behaves like `python3 -I -c code`, and that each call starts without the names of earlier calls."""
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
        "import sys; print(sys.path, [name for name, module in sys.modules.items() if '/agentrl' in str(getattr(module, '__file__', ''))])",
    ]
    for code in snippets:
        warm = await run_python(sandbox, code)
        cold = await sandbox.exec(["python3", "-I", "-c", code], timeout_s=20)
        both = [(result.exit_code, result.stdout, result.stderr) for result in (warm, cold)]
        expect(both[0] == both[1], f"{code!r}: {both}")
    await run_python(sandbox, "import builtins, json; builtins.leak = 1; json.leak = 1")
    await expect_output(sandbox, "import builtins, json; print(hasattr(builtins, 'leak'), hasattr(json, 'leak'))", "False False")
    first, second = [await run_python(sandbox, "import random; print(random.random())") for _ in range(2)]
    expect(first.stdout != second.stdout, "two calls drew the same random number")


async def check_output_is_cut(bench: BackendUnderTest, sandbox: Sandbox) -> None:
    """Checks that long output keeps its head and tail, and has a mark where the middle was removed."""
    result = await run_python(sandbox, "print('head'); print('x' * 5_000_000); print('tail')", output_bytes=1000)
    expect(result.truncated and result.exit_code == 0 and len(result.stdout) < 1100, len(result.stdout))
    expect(result.stdout.startswith("head\n") and result.stdout.endswith("tail\n") and "bytes cut" in result.stdout, result.stdout)


async def check_timeout_kills_the_tree(bench: BackendUnderTest, sandbox: Sandbox) -> None:
    """Checks that a timeout promptly kills children, including daemons in separate process sessions."""
    daemons = """
import os, time, signal
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True: time.sleep(0.01)
        os._exit(0)
print('started', flush=True)
time.sleep(60)
"""
    start = time.monotonic()
    result = await run_python(sandbox, daemons, timeout_s=1.0)
    expect(result.exit_code is None and result.reason == "timeout" and result.stdout == "started\n", result)
    expect(time.monotonic() - start < 6.0, f"took {time.monotonic() - start:.1f} s")
    await expect_output(sandbox, OTHER_PROCESSES, "[]")


async def check_background_does_not_hold_up(bench: BackendUnderTest, sandbox: Sandbox) -> None:
    """Checks that a call returns even if the program leaves behind a child that keeps its output open."""
    start = time.monotonic()
    result = await sandbox.exec(["sh", "-c", "sleep 30 & echo done"], timeout_s=20)
    expect(result.exit_code == 0 and result.stdout == "done\n" and time.monotonic() - start < 5.0, result)


# Limits ---------------------------------------------------------------------------------------------------------------


async def check_memory_bomb(bench: BackendUnderTest, sandbox: Sandbox) -> None:
    """Checks that a program that far exceeds the memory limit fails, and that the sandbox continues to work."""
    size = 4 * bench.spec.memory_mb * MEBIBYTE
    result = await run_python(sandbox, f"b = bytearray(b'x') * {size}; print(len(b))", timeout_s=60)
    killed = result.exit_code is None and result.reason in ("memory", "killed")
    expect(killed or (result.exit_code == 1 and "MemoryError" in result.stderr), result)
    await expect_output(sandbox, "print(1)", "1")


async def check_fork_bomb(bench: BackendUnderTest, sandbox: Sandbox) -> None:
    """Checks that a fork bomb cannot exceed the process limit, and is killed at its timeout."""
    bomb = "import os\nn = 0\nwhile True:\n    try:\n        if os.fork() == 0:\n            n = 0\n    except OSError:\n        pass\n"
    count = """
import os, time
n = 0
try:
    for _ in range(5000):
        if os.fork() == 0: time.sleep(60)
        n += 1
except OSError: pass
print(n, flush=True)
os.kill(-1, 9)
"""
    result = await run_python(sandbox, bomb, timeout_s=2.0)
    expect(result.reason == "timeout", result)
    result = await run_python(sandbox, count)
    expect(result.stdout.strip().isdigit() and 0 < int(result.stdout) <= bench.spec.processes, result)
    await expect_output(sandbox, "print(1)", "1")


async def check_disk_limit(bench: BackendUnderTest, sandbox: Sandbox) -> None:
    """Checks that the working directory has a limited size."""
    fill = f"""
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    with open('big', 'wb', buffering=0) as file:
        for _ in range({2 * bench.spec.disk_mb}): file.write(b'x' * 1048576)
    print('no limit')
except OSError as error: print(error.errno)
"""
    result = await run_python(sandbox, fill, timeout_s=60)
    limited = result.stdout.strip() in ("27", "28") or result.reason in ("memory", "killed")  # EFBIG, ENOSPC, or no memory
    expect(limited, result)


async def check_open_files_limit(bench: BackendUnderTest, sandbox: Sandbox) -> None:
    """Checks that a program gets no more file descriptors than the limit allows."""
    code = "import os\nn = 0\ntry:\n    while n < 100000:\n        os.dup(1); n += 1\nexcept OSError: pass\nprint(n)"
    result = await run_python(sandbox, code)
    expect(0 < int(result.stdout) <= bench.spec.open_files, result)


# Resources of the host: a share of the CPUs, and the destinations on the allow-list -----------------------------------


async def check_cores(bench: BackendUnderTest, sandbox: Sandbox) -> None:
    """Checks that every way to count cores returns the number of cores that the spec's CPU time can keep busy."""
    count = min(math.ceil(bench.spec.cpus), len(os.sched_getaffinity(0)))
    await expect_everywhere(sandbox, _COUNT_CORES, f"{count} {count} {count}")
    result = await sandbox.exec(["nproc"], timeout_s=10)
    expect(result.stdout == f"{count}\n", result)


async def check_cpu_time(bench: BackendUnderTest, sandbox: Sandbox) -> None:
    """Checks that all programs together get no more CPU time than the spec allows."""
    result = await run_python(sandbox, _SPIN)
    expect(result.exit_code == 0, result)
    spent, wall = map(float, result.stdout.split())
    expect(0 < spent <= _TOLERANCE * bench.spec.cpus * wall, f"{spent:.2f} s of CPU time in {wall:.2f} s with cpus={bench.spec.cpus}")


async def check_allow_list(bench: BackendUnderTest, sandbox: Sandbox) -> None:
    """Checks that the proxy variables lead a program to the destinations on the allow-list, and to nothing else."""
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
    """Yields the port of a server on this machine's loopback that answers every request with `hello`."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


# Isolation ------------------------------------------------------------------------------------------------------------


async def check_no_network(bench: BackendUnderTest, sandbox: Sandbox) -> None:
    """Checks that the only network interface is the sandbox's loopback, and that no server of the host listens on it."""
    code = """
import socket
print(open('/proc/net/route').readlines()[1:])
for address in (('10.0.0.1', 80), ('1.1.1.1', 53), ('169.254.169.254', 80), ('127.0.0.1', 22)):
    try: socket.create_connection(address, timeout=2); print('connected', address)
    except OSError: pass
"""
    await expect_output(sandbox, code, "[]")


async def check_unprivileged(bench: BackendUnderTest, sandbox: Sandbox) -> None:
    """Checks that programs are not root, have a system call filter, and cannot get capabilities, namespaces, mounts or devices."""
    code = """
import os, ctypes
status = dict(line.split(':', 1) for line in open('/proc/self/status'))
value = lambda name: status[name].split()
bad = []
if '0' in value('Uid') + value('Gid') + value('Groups'): bad.append('root')
bad += [name for name in ('CapInh', 'CapPrm', 'CapEff', 'CapAmb', 'CapBnd') if int(value(name)[0], 16)]
if value('NoNewPrivs') != ['1']: bad.append('new privileges')
if value('Seccomp') != ['2']: bad.append('no seccomp')
libc = ctypes.CDLL(None, use_errno=True)
for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000):
    if libc.unshare(flag) == 0: bad.append('unshare %x' % flag)
if libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0: bad.append('mount')
for path in ('/dev/mem', '/dev/vda', '/dev/sda', '/dev/kmsg', '/proc/kcore'):
    try: open(path, 'rb').read(1); bad.append(path)
    except (OSError, ValueError): pass
for path in ('/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger'):
    try: open(path, 'w').close(); bad.append(path)
    except OSError: pass
print(bad)
"""
    await expect_everywhere(sandbox, code, "[]")


async def check_read_only_root(bench: BackendUnderTest, sandbox: Sandbox) -> None:
    """Checks that programs can write only to the working directory, /tmp and shared memory."""
    code = """
import os
wrote = []
for folder, folders, _ in os.walk('/'):
    if folder.startswith(('/proc', '/tmp', '/home/agent', '/dev/shm', '/dev/mqueue')): folders.clear(); continue
    try: open(folder + '/probe', 'w').close(); wrote.append(folder)
    except OSError: pass
print(wrote)
"""
    await expect_output(sandbox, code, "[]")


async def check_server_out_of_reach(bench: BackendUnderTest, sandbox: Sandbox) -> None:
    """Checks that programs cannot read, trace, signal or imitate the exec server, and inherit none of its descriptors."""
    code = """
import os, signal, ctypes, stat
bad = []
for name in ('mem', 'environ', 'maps', 'fd/0', 'fd/3', 'fd/4', 'cwd'):
    try: os.listdir('/proc/1/cwd') if name == 'cwd' else open('/proc/1/' + name, 'rb').read(1); bad.append(name)
    except OSError: pass
libc = ctypes.CDLL(None, use_errno=True)
if libc.ptrace(16, 1, 0, 0) == 0: bad.append('ptrace')
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT):
    try: os.kill(1, number)
    except PermissionError: pass
for fd in range(3, 256):
    try: bad += [fd] if stat.S_ISSOCK(os.fstat(fd).st_mode) else []
    except OSError: pass
print(bad)
"""
    await expect_everywhere(sandbox, code, "[]")
    forged = 'import sys, struct\nsys.stdout.buffer.write(struct.pack(\'!II\', 30, 0) + b\'{"id":1,"ok":true,"exit":0}\' * 3)'
    result = await run_python(sandbox, forged)
    expect(result.exit_code == 0 and result.stdout.count('"ok":true') == 3, result)
    await expect_output(sandbox, "print('still here')", "still here")


async def check_nothing_shared(bench: BackendUnderTest, first: Sandbox) -> None:
    """Checks that sandboxes see neither each other's new files, even if both started with the same files, nor each other's processes."""
    async with bench.sandbox() as second:
        write = "for path in ('/tmp/mark', '/home/agent/mark', '/dev/shm/mark'):\n    open(path, 'w').write('x')"
        expect((await run_python(first, write)).exit_code == 0, "cannot write")
        look = """
import os
marks = [p for p in ('/tmp/mark', '/home/agent/mark', '/dev/shm/mark') if os.path.exists(p)]
print(marks, len([p for p in os.listdir('/proc') if p.isdigit()]))
"""
        await expect_output(second, look, "[] 2")
        async with bench.sandbox(snapshot=await first.snapshot()) as copy:
            await expect_output(copy, look, "['/home/agent/mark'] 2")
            await expect_output(copy, "open('late', 'w').close(); open('mark', 'w').write('y'); print(1)", "1")
            await expect_output(first, "import os; print(os.path.exists('late'), open('mark').read())", "False x")


async def check_killed_sandbox_is_an_error(bench: BackendUnderTest, sandbox: Sandbox) -> None:
    """Checks that a program that attacks its sandbox causes at most a typed error, and that the next sandbox opens."""
    attack = "import os\nfor pid in [1, -1]:\n    try: os.kill(pid, 9)\n    except OSError: pass\n"
    try:
        await run_python(sandbox, attack, timeout_s=5)
        await expect_output(sandbox, "print(1)", "1")
    except SandboxError:
        pass
    async with bench.sandbox() as other:
        await expect_output(other, "print(1)", "1")


# Files, snapshots, pausing --------------------------------------------------------------------------------------------


async def check_files(bench: BackendUnderTest, _: Sandbox) -> None:
    """Checks that files are written and read unchanged, and that missing, oversized and misplaced files raise typed errors."""
    data = bytes(range(256)) * 4096
    async with bench.sandbox(files={"in/deep/data.bin": data, "note.txt": b"hi"}) as sandbox:
        expect(await sandbox.read("in/deep/data.bin", max_bytes=len(data)) == data, "other bytes")
        await sandbox.write("note.txt", b"replaced")
        await expect_output(sandbox, "print(open('note.txt').read())", "replaced")
        await expect_error(FileNotFoundError, sandbox.read("none", max_bytes=10))
        await expect_error(ValueError, sandbox.read("in/deep/data.bin", max_bytes=10))
        for path in ("/etc/passwd", "../x", "a/../../x", "", ".", "a//b"):
            await expect_error(ValueError, sandbox.read(path, max_bytes=10))
            await expect_error(ValueError, sandbox.write(path, b""))


async def check_arguments(bench: BackendUnderTest, sandbox: Sandbox) -> None:
    """Checks that invalid arguments raise typed errors, that every possible file name is accepted, and that the sandbox continues to
    work."""
    for text in ("\ud800", "a\0b", ""):
        await expect_error(ValueError, sandbox.read(text, max_bytes=10))
        await expect_error(ValueError, sandbox.write(text, b""))
        await expect_error(ValueError, sandbox.exec([text], timeout_s=10))
        await expect_error(ValueError, sandbox.exec(["true"], env={text: "x"}, timeout_s=10))
    await expect_error(ValueError, sandbox.exec(["true"], env={"A=B": "x"}, timeout_s=10))
    for timeout_s in (0.0, float("nan"), float("inf")):
        await expect_error(ValueError, sandbox.exec(["true"], timeout_s=timeout_s))
    await sandbox.write("\udcff", b"named")
    result = await sandbox.exec(["cat", "\udcff"], timeout_s=10)
    expect((result.exit_code, result.stdout) == (0, "named"), result)
    result = await run_python(sandbox, "print('\ud800')")
    expect(result.exit_code == 1 and "SyntaxError" in result.stderr, result)


async def check_links_are_not_followed(bench: BackendUnderTest, sandbox: Sandbox) -> None:
    """Checks that the host's reads and writes never follow a link: reads fail, and writes replace the link."""
    plant = """
import os
os.symlink('/etc/passwd', 'link'); os.symlink('/etc', 'folder'); os.mkfifo('pipe'); os.mkdir('dir')
os.symlink('/tmp/target', 'out'); open('/tmp/target', 'w').write('kept')
"""
    expect((await run_python(sandbox, plant)).exit_code == 0, "cannot plant")
    for path in ("link", "folder/passwd", "pipe", "dir"):
        await expect_error(ValueError, sandbox.read(path, max_bytes=100000))
    await expect_error(ValueError, sandbox.write("folder/x", b""))
    await sandbox.write("out", b"new")
    await expect_output(sandbox, "import os; print(open('/tmp/target').read(), os.path.islink('out'))", "kept False")
    await expect_output(sandbox, "print(open('out').read())", "new")


async def check_snapshot_round_trip(bench: BackendUnderTest, sandbox: Sandbox) -> None:
    """Checks that a sandbox opened from a snapshot has the same files, including unreadable files, and that oversized snapshots and
    invalid archives are rejected."""
    fill = """
import os
os.makedirs('a/b'); os.symlink('f', 'a/b/l'); os.mkfifo('pipe')
open('a/b/f', 'wb').write(b'x' * 100000); os.chmod('a/b/f', 0o755)
os.mkdir('c'); open('c/d', 'w').write('closed'); os.chmod('c/d', 0); os.chmod('c', 0)
"""
    look = """
import os
print(len(open('a/b/f').read()), os.readlink('a/b/l'), oct(os.stat('a/b/f').st_mode & 0o777), os.path.exists('pipe'))
print(oct(os.stat('c').st_mode)); os.chmod('c', 0o700); print(oct(os.stat('c/d').st_mode))
"""
    expect((await run_python(sandbox, fill)).exit_code == 0, "cannot fill")
    archive = await sandbox.snapshot()
    sparse = await run_python(sandbox, "print(open('sparse', 'wb').truncate(1 << 40))")
    if sparse.stdout.strip() == str(1 << 40):
        await expect_error(ValueError, sandbox.snapshot())
    async with bench.sandbox(snapshot=archive) as copy:
        await expect_output(copy, look, "100000 f 0o755 False\n0o40000\n0o100000")
    await expect_error((ValueError, SandboxError), bench.backend.open(bench.spec, snapshot=b"not an archive" * 100))


async def check_pause_and_resume(bench: BackendUnderTest, sandbox: Sandbox) -> None:
    """Checks that a paused program makes no progress, that its clock stops, and that it continues when resumed.

    On a busy machine, the program may not have started when the pause begins. In that case, the check retries with a longer wait.
    """
    paused = await _pauses(sandbox, 0.5) or await _pauses(sandbox, 1.5) or await _pauses(sandbox, 4.5)
    expect(paused, "the program had not started within 4.5 s")


async def _pauses(sandbox: Sandbox, wait_s: float) -> bool:
    """Starts a program and pauses it after `wait_s` seconds, for 4 s. Returns False if the program started only after the pause."""
    ticks = round(10 * wait_s) + 10
    count = f"import time\nfor i in range({ticks}):\n    time.sleep(0.1)\n    print(time.monotonic(), flush=True)\n"
    running = asyncio.create_task(run_python(sandbox, count, timeout_s=wait_s + 3.5))
    await asyncio.sleep(wait_s)
    await sandbox.pause()
    await asyncio.sleep(4.0)
    expect(not running.done(), "the program ended while it was paused")
    await sandbox.resume()
    resumed_at = time.monotonic()
    result = await running
    since_s = time.monotonic() - resumed_at
    times = [float(word) for word in result.stdout.split()]
    expect(result.exit_code == 0 and len(times) == ticks, result)
    paused = max(b - a for a, b in itertools.pairwise(times)) > 3.0
    expect(paused or since_s >= times[-1] - times[0], "the program continued while it was paused")
    return paused


async def check_close_is_final(bench: BackendUnderTest, sandbox: Sandbox) -> None:
    """Checks that closing twice is allowed, and that calls on a closed sandbox raise a typed error."""
    await sandbox.close()
    await sandbox.close()
    await expect_error(SandboxError, run_python(sandbox, "print(1)"))
