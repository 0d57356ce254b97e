"""Programs, limits, isolation, files, snapshots, pausing, closing."""

from __future__ import annotations

import asyncio
import itertools
import time

from agentrl.errors import SandboxError
from agentrl.sandbox.conformance.bench import MEBIBYTE, BackendUnderTest
from agentrl.sandbox.conformance.bench import conformance_check as _check
from agentrl.sandbox.conformance.bench import expect as _expect
from agentrl.sandbox.conformance.bench import expect_error as _raises
from agentrl.sandbox.conformance.bench import expect_output as _says
from agentrl.sandbox.conformance.bench import run_python as _python

# Programs -------------------------------------------------------------------------------------------------------------


@_check
async def _exec_result(bench: BackendUnderTest) -> None:
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
async def _python_like_the_interpreter(bench: BackendUnderTest) -> None:
    """`python(code)` behaves like `python3 -I -c code`, and each call starts fresh."""
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
async def _output_is_cut(bench: BackendUnderTest) -> None:
    """Long output keeps its head and tail, marks the cut, and takes no memory for the rest."""
    async with bench.sandbox() as sandbox:
        result = await _python(sandbox, "print('head'); print('x' * 5_000_000); print('tail')", output_bytes=1000)
        _expect(result.truncated and result.exit_code == 0 and len(result.stdout) < 1100, len(result.stdout))
        _expect(result.stdout.startswith("head\n") and result.stdout.endswith("tail\n") and "bytes cut" in result.stdout, result.stdout)


@_check
async def _timeout_kills_the_tree(bench: BackendUnderTest) -> None:
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
async def _background_does_not_hold_up(bench: BackendUnderTest) -> None:
    """A program ends even if it leaves a child that holds its output."""
    async with bench.sandbox() as sandbox:
        start = time.monotonic()
        result = await sandbox.exec(["sh", "-c", "sleep 30 & echo done"], timeout_s=20)
        _expect(result.exit_code == 0 and result.stdout == "done\n" and time.monotonic() - start < 5.0, result)


# Limits ---------------------------------------------------------------------------------------------------------------


@_check
async def _memory_bomb(bench: BackendUnderTest) -> None:
    """Exceeding the memory limit by far ends the program, not the sandbox."""
    async with bench.sandbox() as sandbox:
        size = 4 * bench.spec.memory_mb * MEBIBYTE
        result = await _python(sandbox, f"b = bytearray(b'x') * {size}; print(len(b))", timeout_s=60)
        killed = result.exit_code is None and result.reason in ("memory", "killed")
        _expect(killed or (result.exit_code == 1 and "MemoryError" in result.stderr), result)
        await _says(sandbox, "print(1)", "1")


@_check
async def _fork_bomb(bench: BackendUnderTest) -> None:
    """A fork bomb hits the process limit and ends with the timeout."""
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
async def _disk_limit(bench: BackendUnderTest) -> None:
    """The working directory and /tmp have limited size."""
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
async def _open_files_limit(bench: BackendUnderTest) -> None:
    """A program gets no more file descriptors than the limit."""
    code = "import os\nn = 0\ntry:\n    while n < 100000:\n        os.dup(1); n += 1\nexcept OSError: pass\nprint(n)"
    async with bench.sandbox() as sandbox:
        result = await _python(sandbox, code)
        _expect(0 < int(result.stdout) <= bench.spec.open_files, result)


# Isolation ------------------------------------------------------------------------------------------------------------


@_check
async def _no_network(bench: BackendUnderTest) -> None:
    """The only network interface is the sandbox's own loopback, with nothing of the host on it."""
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
async def _unprivileged(bench: BackendUnderTest) -> None:
    """Programs are not root, have no capabilities and no way to gain any; no new namespaces, mounts or devices; a system call filter."""
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
async def _read_only_root(bench: BackendUnderTest) -> None:
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
async def _server_out_of_reach(bench: BackendUnderTest) -> None:
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
async def _nothing_shared(bench: BackendUnderTest) -> None:
    """No sandbox sees what another writes, one that began with its files neither; each has its own processes."""
    async with bench.sandbox() as first, bench.sandbox() as second:
        leave = "for path in ('/tmp/mark', '/home/agent/mark', '/dev/shm/mark'):\n    open(path, 'w').write('x')"
        _expect((await _python(first, leave)).exit_code == 0, "cannot write")
        look = (
            "import os\n"
            "marks = [p for p in ('/tmp/mark', '/home/agent/mark', '/dev/shm/mark') if os.path.exists(p)]\n"
            "print(marks, len([p for p in os.listdir('/proc') if p.isdigit()]))\n"
        )
        await _says(second, look, "[] 2")
        async with bench.sandbox(snapshot=await first.snapshot()) as copy:
            await _says(copy, look, "['/home/agent/mark'] 2")
            await _says(copy, "open('late', 'w').close(); open('mark', 'w').write('y'); print(1)", "1")
            await _says(first, "import os; print(os.path.exists('late'), open('mark').read())", "False x")


@_check
async def _killed_sandbox_is_an_error(bench: BackendUnderTest) -> None:
    """Whatever a program does to its sandbox, the outcome is a typed error or none, and the next sandbox opens."""
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
async def _files(bench: BackendUnderTest) -> None:
    """Files are written and read unchanged; missing, oversized and misplaced ones are typed errors."""
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
async def _words_of_an_agent(bench: BackendUnderTest) -> None:
    """An invalid argument is a typed error of that call, every possible file name is accepted, and the sandbox goes on."""
    async with bench.sandbox() as sandbox:
        for text in ("\ud800", "a\0b", ""):
            await _raises(ValueError, sandbox.read(text, max_bytes=10))
            await _raises(ValueError, sandbox.write(text, b""))
            await _raises(ValueError, sandbox.exec([text], timeout_s=10))
            await _raises(ValueError, sandbox.exec(["true"], env={text: "x"}, timeout_s=10))
        await _raises(ValueError, sandbox.exec(["true"], env={"A=B": "x"}, timeout_s=10))
        for timeout_s in (0.0, float("nan"), float("inf")):
            await _raises(ValueError, sandbox.exec(["true"], timeout_s=timeout_s))
        await sandbox.write("\udcff", b"named")
        result = await sandbox.exec(["cat", "\udcff"], timeout_s=10)
        _expect((result.exit_code, result.stdout) == (0, "named"), result)
        result = await _python(sandbox, "print('\ud800')")
        _expect(result.exit_code == 1 and "SyntaxError" in result.stderr, result)


@_check
async def _links_are_not_followed(bench: BackendUnderTest) -> None:
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
async def _snapshot_round_trip(bench: BackendUnderTest) -> None:
    """A snapshot opens as a sandbox with the same files, also unreadable ones; an oversized working directory is refused."""
    fill = (
        "import os\n"
        "os.makedirs('a/b'); os.symlink('f', 'a/b/l'); os.mkfifo('pipe')\n"
        "open('a/b/f', 'wb').write(b'x' * 100000); os.chmod('a/b/f', 0o755)\n"
        "os.mkdir('c'); open('c/d', 'w').write('closed'); os.chmod('c/d', 0); os.chmod('c', 0)\n"
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
        closed = "import os\nprint(oct(os.stat('c').st_mode)); os.chmod('c', 0o700); print(oct(os.stat('c/d').st_mode))"
        await _says(sandbox, closed, "0o40000\n0o100000")
    await _raises((ValueError, SandboxError), bench.backend.open(bench.spec, snapshot=b"not an archive" * 100))


@_check
async def _pause_and_resume(bench: BackendUnderTest) -> None:
    """A paused program makes no progress and its clock stands still; once resumed it goes on."""
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
async def _close_is_final(bench: BackendUnderTest) -> None:
    """Closing twice is allowed, and calls on a closed sandbox raise a typed error."""
    sandbox = await bench.backend.open(bench.spec)
    await sandbox.close()
    await sandbox.close()
    await _raises(SandboxError, _python(sandbox, "print(1)"))
