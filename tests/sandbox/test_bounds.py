"""Kernel resources that no control group charges: the exec server counts and limits them, without effect on usual programs."""

import asyncio
import fcntl
import os
import socket
import struct
import textwrap
import time
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from agentrl.records import SandboxSpec
from agentrl.sandbox import limits, select_backend, server_code
from agentrl.sandbox.inside.users import MAX_LOCKS, MAX_REST_S, MAX_SOCKETS, REST_FACTOR, Watch, sockets_in
from agentrl.sandbox.limits import MEBIBYTE
from tests.sandbox.building import BOTH, SPEC

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="bubblewrap without root does not promise this")
LOCK = f"import fcntl, os, struct\nfile = os.open('locked', os.O_RDWR | os.O_CREAT)\nfor at in range(0, {2 * MAX_LOCKS + 200}, 2):\n"
LOCK += "    fcntl.fcntl(file, fcntl.F_SETLK, struct.pack('hhqqi', fcntl.F_WRLCK, 0, at, 1, 0))\n"
OTHERS = "import os; print([p for p in os.listdir('/proc') if p.isdigit() and int(p) not in (1, os.getpid())])"


@pytest.fixture(params=BOTH)
async def sandbox(request, root):
    backend = select_backend(request.param, run_label="test", root=root)
    sandbox = await backend.open(SPEC)
    yield sandbox
    await sandbox.close()
    await backend.close()


@pytest.mark.slow
def test_locks_of_processes_are_counted_and_those_of_open_files_are_not(tmp_path):
    watch = Watch()
    assert not watch.over_limit()
    with open(tmp_path / "file", "w") as file, open(tmp_path / "other", "w") as other_file:
        for at in range(0, 2 * MAX_LOCKS + 10, 2):
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi", fcntl.F_WRLCK, 0, at, 1, 0))
        assert not watch.too_many_locks()  # all processes of the machine see these
        for at in range(0, 2 * MAX_LOCKS + 10, 2):
            fcntl.fcntl(other_file, fcntl.F_SETLK, struct.pack("hhqqi", fcntl.F_WRLCK, 0, at, 1, 0))
        assert watch.too_many_locks() and watch.over_limit()
    assert not watch.too_many_locks()


def test_slow_checks_run_less_often(monkeypatch):
    watch = Watch()
    assert not watch.over_limit() and watch.rest_s < MAX_REST_S
    monkeypatch.setattr(watch, "too_many_locks", lambda: time.sleep(0.03))
    watch.over_limit()
    assert REST_FACTOR * 0.03 <= watch.rest_s <= MAX_REST_S
    monkeypatch.setattr(watch, "too_many_locks", lambda: time.sleep(0.2))
    watch.over_limit()
    assert watch.rest_s == MAX_REST_S


def test_sockets_are_counted():
    with open("/proc/net/sockstat", "rb") as file:
        before = sockets_in(file.read())
    datagrams = socket.socket(type=socket.SOCK_DGRAM)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()), datagrams:
        datagrams.bind(("127.0.0.1", 0))
        with open("/proc/net/sockstat", "rb") as file:
            assert sockets_in(file.read()) >= before + 3  # including the end that is not accepted
    text = b"sockets: used 992\nTCP: inuse 990 orphan 0 tw 7 alloc 991 mem 8795\nUDP: inuse 5 mem 241\nUDPLITE: inuse 1\nRAW: inuse 9\n"
    assert sockets_in(text) == 996 < MAX_SOCKETS and sockets_in(b"") == 0


async def test_too_many_locks_count_as_memory(sandbox):
    result = await sandbox.python(LOCK + "import time; time.sleep(20)", timeout_s=30)
    assert (result.exit_code, result.reason) == (None, "memory")
    result = await sandbox.exec(["python3", "-I", "-c", LOCK + "import time; time.sleep(20)"], timeout_s=30)
    assert (result.exit_code, result.reason) == (None, "memory")
    assert (await sandbox.python("6 * 7", timeout_s=20, session="s")).stdout == "42\n"
    result = await sandbox.python(LOCK + "import time; time.sleep(20)", timeout_s=30, session="s")
    assert result.reason == "memory" and result.session_ended
    result = await sandbox.exec(["echo", "on"], timeout_s=20)
    assert result.stdout == "on\n", result


@pytest.mark.parametrize("kind", BOTH)
async def test_waiting_child_that_is_being_killed_gets_no_program(kind, root, tmp_path):
    """The child that waits for the next program is killed with all other processes, and may end late."""
    at_once = "program.over_limit = True\n                kill_everything(signal.SIGKILL)\n"
    slowly = "program.over_limit = True\n                os.kill(program.pid, 9)\n"
    slowly += "                import threading; threading.Timer(1.0, os.kill, (self.waiting.pid, 9)).start()\n"
    source = server_code.source()
    assert source.count(at_once) == 1
    server = tmp_path / "exec_server.py"
    server.write_text(source.replace(at_once, slowly))
    backend = select_backend(kind, run_label="test", root=root)
    sandbox = await backend.open(SPEC, server=server)
    assert (await sandbox.python("6 * 7", timeout_s=20, session="s")).stdout == "42\n"
    assert (await sandbox.python(LOCK + "import time; time.sleep(20)", timeout_s=30, session="s")).reason == "memory"
    result = await sandbox.python("import time; time.sleep(2); print(6 * 7)", timeout_s=20)
    assert (result.reason, result.stdout) == ("", "42\n")
    await sandbox.close()
    await backend.close()


async def test_leftover_processes_are_checked_while_no_program_runs(sandbox):
    daemon = "import os, time\nif os.fork() == 0:\n" + textwrap.indent(f"time.sleep(0.7)\n{LOCK}time.sleep(60)\n", "    ")
    assert (await sandbox.python(daemon, timeout_s=20)).ok
    assert (await sandbox.python(OTHERS, timeout_s=20)).stdout != "[]\n"
    await asyncio.sleep(6)  # without any request
    assert (await sandbox.python(OTHERS, timeout_s=20)).stdout == "[]\n"
    assert (await sandbox.python("print(1)", timeout_s=20)).stdout == "1\n"


@as_root
async def test_terminals_are_limited_and_work(sandbox):
    code = (
        "import os, pty\n"
        "kept = []\n"
        "try:\n"
        "    while True: kept.append(os.openpty())\n"
        "except OSError as error: print(len(kept), error.strerror)\n"
        "for ends in kept:\n"
        "    for end in ends: os.close(end)\n"
        "pid, terminal = pty.fork()\n"
        "if pid == 0: os.execvp('sh', ['sh', '-c', 'test -t 0 && stty size'])\n"
        "print(open(terminal, 'rb', buffering=0).readline())\n"  # the line may arrive in pieces
    )
    result = await sandbox.python(code, timeout_s=20)
    assert result.stdout == f"{limits.MAX_TERMINALS} No space left on device\nb'0 0\\r\\n'\n", result.stderr


@pytest.mark.docker
@pytest.mark.parametrize("runtime", ["runc", ""])
async def test_limits_apply_to_all_runtimes_that_share_the_kernel(runtime, root):
    backend = select_backend("docker", run_label="test", root=root)
    try:
        sandbox = await backend.open(replace(SPEC, runtime=runtime))
        code = "import os\nkept = []\ntry:\n    while True: kept.append(os.openpty())\nexcept OSError: print(len(kept))\n"
        assert (await sandbox.python(code, timeout_s=20)).stdout == f"{limits.MAX_TERMINALS}\n"
        settings = await sandbox.exec(["cat", "/proc/sys/net/ipv4/tcp_rmem"], timeout_s=20)
        assert settings.stdout.split() == limits.NETWORK_SETTINGS["net.ipv4.tcp_rmem"].split()
        await sandbox.write("file", b"x")
        await sandbox.close()
    finally:
        await backend.close()


@as_root
async def test_sockets_have_the_settings_of_the_sandbox_and_cannot_change_them(sandbox):
    for name, value in limits.NETWORK_SETTINGS.items():
        path = f"/proc/sys/{name.replace('.', '/')}"
        result = await sandbox.exec(["sh", "-c", f"cat {path}; echo 1 > {path}"], timeout_s=20)
        assert result.stdout.split() == value.split() and result.exit_code != 0
    code = (
        "import socket\n"
        "end = socket.socket()\n"
        "before = end.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)\n"
        "end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)\n"
        "print(before, end.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == before)\n"
    )
    assert (await sandbox.python(code, timeout_s=20)).stdout == "16384 True\n"


async def test_usual_programs_are_not_affected(sandbox):
    code = (
        "import asyncio, multiprocessing, os, shutil, sqlite3, subprocess, tarfile, threading, urllib.request, http.server\n"
        "os.makedirs('a/b'); open('a/b/f', 'w').write('x' * 200_000)\n"
        "shutil.copytree('a', 'c'); shutil.copy2('a/b/f', 'd'); tarfile.open('t.tgz', 'w:gz').add('a')\n"
        "base = sqlite3.connect('base'); base.execute('create table t (x)'); base.execute('insert into t values (1)'); base.commit()\n"
        "with multiprocessing.get_context('fork').Pool(2) as pool: print(pool.map(abs, [-1, 2]))\n"
        "server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), http.server.SimpleHTTPRequestHandler)\n"
        "threading.Thread(target=server.serve_forever, daemon=True).start()\n"
        "for _ in range(20): size = len(urllib.request.urlopen(f'http://127.0.0.1:{server.server_port}/a/b/f').read())\n"
        "print(size, asyncio.run(asyncio.sleep(0, 5)))\n"
        "script = 'cp -a a e && sed -i s/x/y/ e/b/f && tar xzf t.tgz -C e && sync && echo fine'\n"
        "print(subprocess.run(script, shell=True, capture_output=True, text=True))\n"
    )
    result = await sandbox.python(code, timeout_s=60)
    assert result.ok and "[1, 2]\n200000 5\n" in result.stdout and "stdout='fine\\n', stderr=''" in result.stdout, result


# Kernel limits of a spec.
specs = st.builds(
    SandboxSpec,
    image=st.just("image"),
    memory_mb=st.integers(16, 65536),
    processes=st.integers(1, 4096),
    cpus=st.floats(0.1, 64),
    disk_mb=st.integers(1, 65536),
    open_files=st.integers(1, 65536),
)


@given(specs)
def test_full_disks_leave_memory_for_the_server(spec):
    files = 2 * limits.disk_bytes(spec) + limits.shared_memory_bytes(spec)
    empty_files = len(limits.WRITABLE_FOLDERS) * limits.max_inodes(spec) * limits.INODE_BYTES
    assert 0 < limits.disk_bytes(spec) <= spec.disk_mb * MEBIBYTE
    assume(spec.memory_mb >= 80)  # with less memory, the minimum disk may exceed it
    assert files + empty_files + limits.RESERVED_BYTES <= spec.memory_mb * MEBIBYTE


@given(specs)
def test_number_of_cores_matches_the_cpu_time(spec):
    cores = limits.cores(spec)
    usable = os.sched_getaffinity(0)
    assert set(cores) <= usable and len(set(cores)) == len(cores)
    assert len(cores) == min(len(usable), -(-spec.cpus // 1))


def test_sandboxes_rotate_through_the_cores():
    spec = SandboxSpec(image="image", cpus=1.0)
    usable = os.sched_getaffinity(0)
    assert {core for _ in range(2 * len(usable)) for core in limits.cores(spec)} == usable


@given(st.text(max_size=40), st.text(max_size=40))
def test_each_sandbox_has_its_own_users(name, other):
    spec = SandboxSpec(image="image")
    first, second = [limits.server_options(text, spec) for text in (name, other)]
    assert 0x70000000 <= first["agent"] < 0x78000000 <= first["server"] < 0x80000000
    assert (name == other) == (first["agent"] == second["agent"]) == (first["server"] == second["server"])


def test_system_files_describe_the_sandbox(tmp_path):
    options = limits.server_options("sandbox", SandboxSpec(image="image", cpus=1.0))
    system_files = limits.write_system_files(tmp_path, options)
    assert f"agent:x:{options['agent']}:" in system_files["/etc/passwd"].read_text()
    assert system_files[limits.CORES_FILE].read_text() == f"{options['cores'][0]}\n"
