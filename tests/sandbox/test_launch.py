"""Programs that the waiting child launches, and attacks on that child."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from agentrl.sandbox import list_open, select_backend
from agentrl.sandbox.lease import lease
from tests.sandbox.building import BOTH, SPEC, inner_pid, lease_of_process, processes_of

MEMORY_ENDS = ("memory", "killed")


@pytest.fixture(params=BOTH)
async def sandbox(request, root):
    backend = select_backend(request.param, run_label="test", root=root)
    if request.param == "bubblewrap" and os.geteuid() != 0:
        pytest.skip("with one user there is no launch")
    await backend.prepare(SPEC)
    sandbox = await backend.open(SPEC)
    yield sandbox
    await sandbox.close()
    await backend.close()
    assert [sandbox for sandbox in list_open() if lease() in sandbox.name] == []


async def shell(sandbox, script, **options):
    return await sandbox.exec(["sh", "-c", script], **{"timeout_s": 20, **options})


async def launcher(sandbox):
    """Pid of the launching child in the sandbox."""
    result = await shell(sandbox, "echo $PPID")
    assert result.ok and int(result.stdout) > 1
    return int(result.stdout)


def outside(sandbox, number):
    """Pid on this machine of process `number` of the exec server's user in the sandbox."""
    (pid,) = (pid for pid in processes_of("exec_server") if lease_of_process(pid) in sandbox.id and inner_pid(pid) == number)
    return pid


async def test_one_child_launches_all_programs(sandbox):
    first = await launcher(sandbox)
    assert [await launcher(sandbox) for _ in range(3)] == [first] * 3
    assert (await sandbox.exec(["no-such-program"], timeout_s=20)).exit_code == 127
    assert (await sandbox.exec(["/etc"], timeout_s=20)).exit_code == 126
    second = await launcher(sandbox)
    assert second != first  # the first one became the program that does not exist
    assert (await sandbox.python("import os; print(os.getpid())", timeout_s=20)).stdout == f"{second}\n"
    assert (await sandbox.python("1", timeout_s=20, session="s")).stdout == "1\n"
    assert (await sandbox.exec(["cat"], stdin=b"in", timeout_s=20)).stdout == "in"
    assert (await sandbox.exec(["cat"], timeout_s=20)).stdout == ""


async def test_launched_program_has_the_properties_of_a_forked_one(sandbox):
    print_properties = (
        "import os, resource, sys\n"
        "status = dict(line.split(':', 1) for line in open('/proc/self/status'))\n"
        "names = ('Uid', 'Gid', 'Groups', 'CapInh', 'CapPrm', 'CapEff', 'CapBnd', 'CapAmb', 'NoNewPrivs', 'Seccomp')\n"
        "names += ('Threads', 'SigBlk', 'SigIgn', 'SigCgt', 'Cpus_allowed_list')\n"
        "status['SigIgn'] = hex(int(status['SigIgn'], 16) & ~(3 << 31))\n"  # the C library's own two, which posix_spawn leaves ignored
        "print([(name, status[name].split()) for name in names])\n"
        "print([(name, resource.getrlimit(getattr(resource, name))) for name in dir(resource) if name.startswith('RLIMIT')])\n"
        "print(os.getresuid(), os.getresgid(), os.getgroups(), os.getcwd(), os.umask(0), os.getpriority(0, 0), os.sched_getscheduler(0))\n"
        "print(sorted(os.listdir('/proc/self/fd')), [os.readlink(f'/proc/self/fd/{n}').split(':')[0] for n in range(3)])\n"
        "print(open('/proc/self/oom_score_adj').read(), os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid())\n"
        "try: print(open('/proc/self/oom_score_adj', 'w').write('0'), flush=True)\n"
        "except OSError as error: print(error)\n"
        "print(sorted(os.environ.items()))\n"
    )
    forked = await sandbox.python(print_properties, timeout_s=20)
    launched = await sandbox.exec(["python3", "-I", "-c", print_properties], timeout_s=20)
    assert forked.ok and launched.stdout.splitlines() == forked.stdout.splitlines()


async def test_program_cannot_reach_its_launcher(sandbox):
    """Not even at the start, when the thread that started it may still have the same ids."""
    before = await launcher(sandbox)
    for _ in range(20):
        assert (await shell(sandbox, "kill -9 -1; echo alive")).stdout == "alive\n"
        result = await shell(sandbox, "kill -STOP $PPID || kill -9 $PPID || echo alive")
        assert (result.exit_code, result.stdout) == (0, "alive\n")
    assert await launcher(sandbox) == before


async def test_parent_death_signal_works(sandbox):
    """The thread that starts a program exists as long as the program."""
    for _ in range(50):
        assert (await sandbox.exec(["setpriv", "--pdeathsig", "KILL", "sleep", "0.01"], timeout_s=20)).exit_code == 0


async def test_leftover_process_cannot_end_the_sandbox(sandbox):
    """It signals single threads of all other processes while programs are launched."""
    signal_everything = (
        "import ctypes, os, signal, time\n"
        "libc = ctypes.CDLL(None)\n"
        "if os.fork() == 0:\n"
        "    while os.getppid() != 1: time.sleep(0.01)\n"
        "    while not os.path.exists('end'):\n"
        "        for pid in [int(name) for name in os.listdir('/proc') if name.isdigit()]:\n"
        "            for number in (signal.SIGKILL, signal.SIGSTOP):\n"
        "                for thread in range(pid, pid + 3):\n"
        "                    if pid != os.getpid(): libc.tgkill(pid, thread, number)\n"
    )
    assert (await sandbox.python(signal_everything, timeout_s=20)).ok
    deadline = time.monotonic() + 3.0
    while time.monotonic() < deadline:
        result = await sandbox.exec(["true"], timeout_s=1.0)
        assert result.ok or result.reason in ("killed", "timeout"), result
    await sandbox.write("end", b"")
    async with asyncio.timeout(30):
        while not (await shell(sandbox, "sleep 0.5")).ok:
            pass
    assert (await sandbox.python("print(1)", timeout_s=20)).stdout == "1\n"


async def test_killed_launcher_ends_its_program(sandbox):
    pid = outside(sandbox, await launcher(sandbox))
    running = asyncio.create_task(shell(sandbox, "sleep 60 & sleep 60", timeout_s=90))
    await program_started(pid)
    os.kill(pid, signal.SIGKILL)
    result = await running
    assert (result.exit_code, result.reason) == (None, "killed")
    count = "import os; print([p for p in os.listdir('/proc') if p.isdigit() and int(p) not in (1, os.getpid())])"
    remaining = await sandbox.python(count, timeout_s=20)
    assert remaining.stdout == "[]\n"
    assert (await shell(sandbox, "cat; echo on", stdin=b"goes ")).stdout == "goes on\n"


async def test_stopped_launcher_makes_its_program_time_out(sandbox):
    pid = outside(sandbox, await launcher(sandbox))
    os.kill(pid, signal.SIGSTOP)
    result = await sandbox.exec(["true"], timeout_s=1.0)
    assert (result.exit_code, result.reason) == (None, "timeout")
    assert await launcher(sandbox) > 1


async def test_launched_program_is_paused_and_timed(sandbox):
    await launcher(sandbox)
    running = asyncio.create_task(shell(sandbox, "sleep 0.5; echo done", timeout_s=2.0))
    await asyncio.sleep(0.2)
    await sandbox.pause()
    await asyncio.sleep(2.5)
    assert not running.done()
    await sandbox.resume()
    assert (await running).stdout == "done\n"
    await sandbox.snapshot()
    before = await launcher(sandbox)
    result = await shell(sandbox, "setsid sleep 60 & echo $PPID; sleep 60", timeout_s=0.5)
    assert (result.reason, result.stdout) == ("timeout", f"{before}\n")
    assert await launcher(sandbox) != before


async def test_without_a_free_process_the_child_becomes_the_program(sandbox):
    fill = "import os, time\ntry:\n    while True:\n        if os.fork() == 0: time.sleep(60)\nexcept OSError: print('full')"
    await launcher(sandbox)
    assert (await sandbox.python(fill, timeout_s=20)).stdout == "full\n"  # except its own slot
    for _ in range(3):
        result = await sandbox.exec(["sh", "-c", "echo $PPID; :"], timeout_s=20)
        assert (result.exit_code, result.stdout) == (0, "1\n")  # a child of process 1, so it was not launched
    result = await sandbox.exec(["python3", "-I", "-c", "import os\nos.fork()"], timeout_s=20)
    assert result.exit_code == 1 and "BlockingIOError" in result.stderr


async def test_launcher_survives_a_program_that_takes_all_memory(sandbox):
    before = await launcher(sandbox)
    one_large_program = f"b = bytearray(b'x') * {4 * SPEC.memory_mb << 20}"
    result = await sandbox.exec(["python3", "-I", "-c", one_large_program], timeout_s=20)
    assert result.reason in MEMORY_ENDS or "MemoryError" in result.stderr
    many_small_programs = (
        "import os, time\n"
        f"for _ in range({SPEC.processes // 2}):\n"
        "    if os.fork() == 0:\n"
        f"        b = bytearray(b'x') * {4 * SPEC.memory_mb // SPEC.processes << 20}\n"
        "        time.sleep(60)\n"
        "for _ in range(2): os.wait()\n"
        "os.kill(-1, 9)\n"
    )
    await sandbox.exec(["python3", "-I", "-c", many_small_programs], timeout_s=20)
    assert await launcher(sandbox) == before


async def program_started(pid):
    """Returns once `pid` has launched a program."""
    async with asyncio.timeout(20):
        while not any(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")):
            await asyncio.sleep(0.01)
