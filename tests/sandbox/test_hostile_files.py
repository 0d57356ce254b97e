"""Files and processes with which an agent tries to prevent a snapshot or to end its sandbox: each call gives a result or a typed error."""

import asyncio
import os
import time

import pytest
from hypothesis import HealthCheck, given, settings

from agentrl.errors import SandboxError
from agentrl.records import ExecResult
from agentrl.sandbox import server_code
from agentrl.sandbox.inside.users import CHECK_S
from agentrl.task.outputs import collect_outputs
from tests.sandbox.building import SPEC, holds_open, processes_of
from tests.sandbox.test_arguments import CALL, TYPED, start_call
from tests.waiting import until

SOON_S = 20.0
LOOK = (
    "import os, stat\n"
    "for folder, folders, names in os.walk('.'):\n"
    "    for name in sorted(folders + names):\n"
    "        path = os.path.join(folder, name)\n"
    "        info = os.lstat(path)\n"
    "        if stat.S_ISLNK(info.st_mode): print(ascii(path), ascii(os.readlink(path)))\n"
    "        elif stat.S_ISDIR(info.st_mode): print(ascii(path), oct(info.st_mode), int(info.st_mtime))\n"
    "        elif stat.S_ISREG(info.st_mode): print(ascii(path), oct(info.st_mode), int(info.st_mtime), info.st_nlink, info.st_size)\n"
    "    folders.sort()\n"
    "    for name in folders: os.chmod(os.path.join(folder, name), 0o700)\n"
)
LEFT_FILES = {
    "closed files and folders": (
        "import os\n"
        "os.makedirs('d/e'); open('d/e/f', 'w').write('x'); open('g', 'w').write('y')\n"
        "for path, mode in (('d/e/f', 0), ('d/e', 0o100), ('d', 0o400), ('g', 0o077)): os.utime(path, (1e9, 1e9)); os.chmod(path, mode)\n"
    ),
    "names of any bytes": (
        "import os\n"
        "os.makedirs(b'\\xff/' + b'\\xfe' * 255); open(b'\\xff/\\n', 'w').write('x')\n"
        "os.symlink(b'\\xfa', b'\\xfb'); os.mkdir('\\x1b[2J')\n"
    ),
    "long names far down": "import os\nfor _ in range(63): os.mkdir('d' * 255); os.chdir('d' * 255)\nopen('f' * 255, 'w').write('x')\n",
    "many names of one file": "import os\nopen('0', 'wb').write(bytes(1 << 20))\nfor n in range(1, 200): os.link('0', str(n))\n",
    "no plain files": (
        "import os, socket\nos.mkfifo('p'); s = socket.socket(1); s.bind('s'); os.mknod('w', 0o20666, 0)\nopen('f', 'w').write('x')\n"
    ),
    "modes of all kinds": "import os\nfor n in range(512): open(str(n), 'w').close(); os.chmod(str(n), n)\n",
}
LEASE = (
    "import fcntl, os, signal, socket, sys, time\n"
    "open('f', 'w').write('leased')\n"
    "if os.fork() == 0:\n"
    "    os.setsid(); os.close(1); os.close(2)\n"
    "    for number in range(1, 65):\n"
    "        try: signal.signal(number, signal.SIG_IGN)\n"
    "        except (OSError, ValueError): pass\n"
    "    fd = os.open('f', os.O_RDWR)\n"
    "    try: fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)\n"
    "    except OSError: open('refused', 'w').close()\n"
    "    one, other = socket.socketpair()\n"
    "    socket.send_fds(one, [b'x'], [fd, one.fileno(), other.fileno()])\n"  # keeps the file and itself open
    "    open('ready', 'w').close()\n"
    "    time.sleep(600)\n"
    "while not os.path.exists('ready'): time.sleep(0.01)\n"
)


async def in_time(awaitable):
    start = time.monotonic()
    try:
        return await awaitable
    finally:
        assert time.monotonic() - start < SOON_S


async def check_responds(sandbox):
    assert (await sandbox.python("print(6 * 7)", timeout_s=20)).stdout == "42\n"
    assert (await sandbox.exec(["echo", "on"], timeout_s=20)).stdout == "on\n"


async def run_in_sandbox(backend, program):
    sandbox = await backend.open(SPEC)
    result = await sandbox.python(program, timeout_s=30)
    assert result.ok, result
    return sandbox


@pytest.mark.parametrize("kind", LEFT_FILES)
async def test_any_files_can_be_captured_and_restored(backend, kind):
    sandbox = await run_in_sandbox(backend, LEFT_FILES[kind])
    archive = await in_time(sandbox.snapshot())
    copy = await in_time(backend.open(SPEC, snapshot=archive))
    assert await copy.snapshot() == archive
    before, after = [(await opened.python(LOOK, timeout_s=20)).stdout for opened in (sandbox, copy)]
    assert before and before == after
    await check_responds(sandbox)
    await check_responds(copy)


async def test_leases_do_not_prevent_a_snapshot(backend):
    sandbox = await run_in_sandbox(backend, LEASE)
    archive = await in_time(sandbox.snapshot())
    copy = await backend.open(SPEC, snapshot=archive)
    assert await copy.read("f", max_bytes=10) == b"leased"
    await check_responds(sandbox)


@pytest.mark.parametrize(
    "program",
    [
        "import os\nfor _ in range(5000): os.mkdir('d' * 100); os.chdir('d' * 100)\n",
        "import os\nfor _ in range(65): os.mkdir('d'); os.chdir('d')\n",
        "open('f', 'w').truncate(1 << 40)\n",
    ],
)
async def test_oversized_tree_is_refused_in_time(backend, program):
    sandbox = await run_in_sandbox(backend, program)
    with pytest.raises(ValueError, match=r"the working directory is (nested|larger)"):
        await in_time(sandbox.snapshot())
    await in_time(collect_outputs(sandbox, ["**", "f"]))
    await check_responds(sandbox)
    await in_time(sandbox.close())


async def test_running_processes_are_killed_before_outputs_are_collected(backend):
    """Otherwise they could remove files while they are read, until collecting the outputs becomes an infrastructure fault."""
    busy = (
        "import os\n"
        "for n in range(1000): open(f'{n:04}', 'w').close()\n"
        "for n in range(8):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid(); os.close(1); os.close(2)\n"
        "        while True: pass\n"
    )
    sandbox = await run_in_sandbox(backend, busy)
    collected = await in_time(collect_outputs(sandbox, ["*"]))
    assert len(collected.files) == 256
    count = (  # on a busy machine a killed process takes a while to end
        "import os, time\nbegan = time.monotonic()\n"
        "others = lambda: [p for p in os.listdir('/proc') if p.isdigit() and int(p) not in (1, os.getpid())]\n"
        "while others() and time.monotonic() < began + 10: time.sleep(0.05)\n"
        "print(others())\n"
    )
    assert (await sandbox.python(count, timeout_s=20)).stdout == "[]\n"


async def test_outputs_with_odd_names_are_reported(backend):
    sandbox = await run_in_sandbox(backend, "open(b'\\xff', 'w').write('x'); open('a', 'w').write('y')")
    collected = await collect_outputs(sandbox, ["*"])
    assert collected.files == {"a": b"y"} and list(collected.refused) == ["\\udcff"]
    assert await sandbox.read("\udcff", max_bytes=10) == b"x"
    await sandbox.write("\udcfe/\udcfd", b"z")
    assert (await sandbox.exec(["cat", "\udcfe/\udcfd"], timeout_s=20)).stdout == "z"


@pytest.mark.parametrize("text", ["\ud800", "x" * 5000, "../" * 2000 + "etc/passwd", "a\0b", "", "/etc/passwd", "\udfff/\udfff"])
async def test_no_file_name_ends_the_sandbox(backend, text):
    sandbox = await backend.open(SPEC)
    for work in (sandbox.read(text, max_bytes=10), sandbox.write(text, b""), sandbox.write_all({"a": b"", text: b""})):
        with pytest.raises(ValueError, match="path"):
            await work
    await check_responds(sandbox)


async def test_oversized_arguments_are_blamed_on_the_program(backend):
    sandbox = await backend.open(SPEC)
    for argv, env in ((["true", *["x" * 1000] * 3000], None), (["true"], {f"A{n}": "x" * 100 for n in range(20_000)})):
        result = await sandbox.exec(argv, env=env, timeout_s=20)
        assert result.exit_code == 127 and "Argument list too long" in result.stderr
    with pytest.raises(ValueError, match="larger than"):
        await sandbox.exec(["true", *["x" * 1000] * 5000], timeout_s=20)
    assert (await sandbox.exec(["sh", "-c", "exit 70"], timeout_s=20)).exit_code == 70
    assert (await sandbox.python("raise SystemExit(70)", timeout_s=20)).exit_code == 70
    assert (await sandbox.python("raise SystemExit(70)", timeout_s=20, session="s")).exit_code == 70
    await check_responds(sandbox)


async def test_any_call_gives_a_result_or_a_typed_error(backend):
    sandbox = await backend.open(SPEC)
    loop = asyncio.get_running_loop()

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(CALL)
    def check_call(call):
        asyncio.run_coroutine_threadsafe(run_call(call), loop).result(60)

    async def run_call(call):
        try:
            result = await start_call(sandbox, call)
        except (*TYPED, FileNotFoundError) as error:
            str(error).encode()
        else:
            assert result is None or isinstance(result, ExecResult | bytes)

    await asyncio.to_thread(check_call)
    await check_responds(sandbox)


CALLS = {
    "exec": lambda sandbox: sandbox.exec(["true"], timeout_s=20),
    "python": lambda sandbox: sandbox.python("1", timeout_s=20),
    "session": lambda sandbox: sandbox.python("1", timeout_s=20, session="s"),
}
NO_ROOM = "        raise OSError(28, 'no room')\n"
BROKEN = {
    "before it has work": ("        rehearse(likely)\n", NO_ROOM, ("exec", "python", "session")),
    "before it is the agent's": ("        users.become_agent()\n        status", NO_ROOM + "        status", ("python", "session")),
    "as a thread takes the agent's ids": (".get(os.uname().machine, ())", " and (9999, 9999)", ("exec",)),
}


@pytest.mark.parametrize("where", BROKEN)
async def test_program_that_does_not_start_has_no_exit_code(backend, where, tmp_path):
    if backend.name == "bubblewrap" and os.geteuid() != 0:
        pytest.skip("with one user, a failed child cannot be distinguished from its program")
    old, new, kinds = BROKEN[where]
    source = server_code.source()
    assert source.count(old) == 1
    server = tmp_path / "exec_server.py"
    server.write_text(source.replace(old, new))
    sandbox = await backend.open(SPEC, server=server)
    for kind in kinds:
        with pytest.raises(SandboxError, match="was not started"):
            await CALLS[kind](sandbox)


WOKEN = (
    "import ctypes, signal, struct, threading, time\n"
    "libc = ctypes.CDLL(None)\n"
    "libc.timer_settime.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p]\n"
    "signal.signal(signal.SIGCONT, lambda *_: None)\n"
    "event = ctypes.create_string_buffer(struct.pack('=Qii', 0, signal.SIGCONT, 0), 64)\n"
    "for number in range(1, 200):\n"
    "    timer, at = ctypes.c_void_p(), 50_000_000 * number\n"
    "    assert libc.timer_create(1, event, ctypes.byref(timer)) == 0\n"
    "    assert libc.timer_settime(timer, 0, struct.pack('=qqqq', 0, 0, at // 10**9, at % 10**9), None) == 0\n"
)
SLOW_CHECK = {"": "", "after a slow check": "        self.rest_s = MAX_REST_S\n        return over\n"}


@pytest.mark.parametrize("rest", SLOW_CHECK)
async def test_program_with_timers_is_killed_in_a_pause(backend, rest, tmp_path):
    """A slow check of resources delays the next one, which must not delay the checks of paused programs."""
    source, original = server_code.source(), "        return over\n"
    assert source.count(original) == 1
    server = tmp_path / "exec_server.py"
    server.write_text(source.replace(original, SLOW_CHECK[rest] or original))
    sandbox = await backend.open(SPEC, server=server)
    name = f"at{os.getpid()}{tmp_path.name}"
    count = f"import os\nfile = open('{name}', 'w')\nwhile True: os.pwrite(file.fileno(), b'%18.3f' % time.monotonic(), 0)\n"
    running = asyncio.create_task(sandbox.exec(["python3", "-c", WOKEN + count], timeout_s=20))
    await until(lambda: any(holds_open(pid, f"/{name}") for pid in processes_of(name)))  # its timers are set
    await asyncio.sleep(3 * CHECK_S)  # so that a check of resources precedes the pause
    await sandbox.pause()
    paused = time.monotonic()
    await until(lambda: not processes_of(f"open('{name}'"))
    await sandbox.resume()
    result = await running
    assert result.reason == "killed" and float(await sandbox.read(name, max_bytes=100)) < paused + 20 * CHECK_S
    assert (await sandbox.exec(["true"], timeout_s=10)).ok
    await sandbox.close()


async def test_snapshot_succeeds_while_a_program_changes_modes(backend):
    sandbox = await backend.open(SPEC)
    race = (
        "import os\nif os.fork(): os._exit(0)\nos.setsid(); os.close(1); os.close(2)\n"
        "for number in range(400): open('%03d' % number, 'w').close()\n"
        + WOKEN
        + "open('ready', 'w').close()\nend = time.monotonic() + 10\n"
        "while time.monotonic() < end:\n    for number in range(400): os.chmod('%03d' % number, 0)\n"
    )
    assert (await sandbox.exec(["python3", "-c", race], timeout_s=10)).ok
    while "ready" not in (await sandbox.exec(["ls"], timeout_s=10)).stdout:
        await asyncio.sleep(0.1)
    for _ in range(40):
        assert await in_time(sandbox.snapshot())
    await sandbox.close()


async def test_sparse_file_larger_than_the_disk_can_be_restored(backend):
    sandbox = await backend.open(SPEC)
    sparse = "import os\nf = open('f', 'wb'); f.truncate(30 << 20)\nfor at in (5, 9 << 20, (30 << 20) - 1): f.seek(at); f.write(b'x')\n"
    assert (await sandbox.exec(["python3", "-c", sparse], timeout_s=10)).ok
    archive = await in_time(sandbox.snapshot())
    await sandbox.close()
    copy = await in_time(backend.open(SPEC, snapshot=archive))
    assert await copy.snapshot() == archive
    await copy.close()
