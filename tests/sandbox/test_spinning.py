"""Programs that take all CPU time: they time out, no matter which process answers late, and neighbours are not affected."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from dataclasses import replace

import pytest

from agentrl.errors import SandboxError, SandboxTimeout
from agentrl.sandbox import channel, channel_sandbox, processes, select_backend, shared_containers
from agentrl.sandbox.processes import Process, SandboxProcesses
from agentrl.sandbox.shared_containers import KeeperClient
from benchmarks.sandbox_spin import KINDS, SCORED, spun
from tests.sandbox.building import ALONE, SPEC, processes_of
from tests.waiting import until

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can stop another user's exec server")
SPIN = "import os\nos.fork()\nwhile True: pass\n"


async def server_of(sandbox):
    """Host pid of a sandbox's exec server, and the user of its programs."""
    agent = int((await sandbox.python("import os; print(os.getuid())", timeout_s=10)).stdout)
    mark = (await sandbox.python("import os; print(os.readlink('/proc/self/ns/pid'))", timeout_s=10)).stdout.strip()
    pids = [process.pid for process in processes._all() if process.inner_pid == 1 and link_of(process.pid) == mark]
    assert len(pids) == 1
    return pids[0], agent


def link_of(pid):
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def running(user):
    return [process for process in processes._all() if process.user == user and process.state not in processes.DEAD]


# Priorities ------------------------------------------------------------------------------------------------

PRIORITIES = """
import os
tried = []
for what in (
    lambda: os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0)),
    lambda: os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1)),
    lambda: os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) - 1),
):
    try: what()
    except OSError: pass
    else: tried.append(what)
print(os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0), len(tried))
"""


@pytest.mark.parametrize("spec", [SPEC, ALONE], ids=["shared", "alone"])
async def test_programs_have_a_lower_priority_than_their_server(backend, spec):
    if backend.name == "bubblewrap":
        spec = SPEC
    sandbox = await backend.open(spec)
    results = [
        await sandbox.exec(["python3", "-I", "-c", PRIORITIES], timeout_s=20),
        await sandbox.exec(["sh", "-c", f"python3 -I -c '{PRIORITIES}'"], timeout_s=20),
        await sandbox.python(PRIORITIES, timeout_s=20),
        await sandbox.python(PRIORITIES, timeout_s=20, session="main"),
    ]
    grouped = backend.name == "docker" or backend._groups is not None
    test_priority = os.getpriority(os.PRIO_PROCESS, 0)
    base = 0 if backend.name == "docker" else test_priority  # the daemon's priority is not lowered
    expected = f"{os.SCHED_IDLE} {base} 0\n" if grouped else f"{os.SCHED_OTHER} {min(test_priority + 5, 19)} 0\n"
    assert [result.stdout for result in results] == [expected] * 4, results
    if os.geteuid() == 0:
        server, _ = await server_of(sandbox)
        assert os.sched_getscheduler(server) == os.SCHED_OTHER and os.getpriority(os.PRIO_PROCESS, server) <= base


# A server that gets no CPU time, simulated by stopping it -----------------------------------------------------------


@AS_ROOT
@pytest.mark.parametrize("spec", [SPEC, ALONE], ids=["shared", "alone"])
@pytest.mark.parametrize("kind", ["exec", "python", "session"])
async def test_programs_that_block_their_server_time_out(backend, kind, spec, monkeypatch):
    if backend.name == "bubblewrap":
        spec = SPEC
    monkeypatch.setattr(channel_sandbox, "GRACE_S", 0.5)
    sandbox = await backend.open(spec)
    server, agent = await server_of(sandbox)
    calls = {
        "exec": lambda: sandbox.exec(["python3", "-I", "-c", SPIN], timeout_s=1),
        "python": lambda: sandbox.python(SPIN, timeout_s=1),
        "session": lambda: sandbox.python(SPIN, timeout_s=1, session="main"),
    }
    call = asyncio.create_task(calls[kind]())
    await until(lambda: len(running(agent)) >= 2)
    os.kill(server, signal.SIGSTOP)
    try:
        await until(lambda: not running(agent))  # killed by the host
        assert not call.done()
    finally:
        os.kill(server, signal.SIGCONT)
    result = await call
    assert result.reason == "timeout"
    assert (await sandbox.python("print(6 * 7)", timeout_s=10)).stdout == "42\n", "the sandbox continues"


@AS_ROOT
async def test_late_server_without_programs_is_an_infrastructure_fault(backend, monkeypatch):
    monkeypatch.setattr(channel_sandbox, "GRACE_S", 0.5)
    monkeypatch.setattr(channel, "UNRELIEVED_S", 0.5)
    sandbox = await backend.open(SPEC)
    server, _ = await server_of(sandbox)
    os.kill(server, signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(SandboxTimeout, match="no answer to python"):
        await sandbox.python("print(1)", timeout_s=1)
    assert time.monotonic() - start < 30


@AS_ROOT
@pytest.mark.parametrize("call", ["write", "read", "snapshot", "restore"])
async def test_leftover_programs_do_not_block_file_operations(backend, call, monkeypatch):
    monkeypatch.setattr(channel_sandbox, "FILE_S", 0.5)
    sandbox = await backend.open(SPEC)
    await sandbox.write("kept", b"kept")
    archive = await sandbox.snapshot()
    await sandbox.exec(["sh", "-c", "(while :; do :; done) & (while :; do :; done) &"], timeout_s=20)
    server, agent = await server_of(sandbox)
    calls = {
        "write": lambda: sandbox.write("new", b"x"),
        "read": lambda: sandbox.read("kept", max_bytes=10),
        "snapshot": sandbox.snapshot,
        "restore": lambda: sandbox.restore(archive),
    }
    os.kill(server, signal.SIGSTOP)
    try:
        task = asyncio.create_task(calls[call]())
        await until(lambda: not running(agent))
    finally:
        os.kill(server, signal.SIGCONT)
    await task


def test_reused_pid_is_not_signalled():
    """The kernel may reuse a pid after the processes have been listed."""
    process = processes.read_process(os.getpid())
    SandboxProcesses(server=1, agent=2)._kill(replace(process, user=process.user + 1))
    SandboxProcesses(server=1, agent=2)._kill(replace(process, inner_pid=process.inner_pid + 1))
    SandboxProcesses(server=1, agent=2)._kill(Process(pid=2**22 - 1, parent=0, user=0, inner_pid=1, state="R"))


def test_without_a_second_user_programs_are_descendants_of_the_sandbox():
    def proc(pid, parent, inner, state="R", user=1000):
        return Process(pid=pid, parent=parent, user=user, inner_pid=inner, state=state)

    processes = [proc(7, 1, 7), proc(8, 7, 1), proc(9, 8, 2), proc(10, 9, 3), proc(11, 8, 4, "Z"), proc(12, 1, 12), proc(13, 12, 1)]
    members = SandboxProcesses(server=1000, agent=1000, top=7)
    assert [process.pid for process in members._programs(processes)] == [9, 10]
    assert [process.pid for process in members._servers(processes)] == [8]


# Neighbours in a shared container --------------------------------------------------------------------------------------


@AS_ROOT
@pytest.mark.docker
async def test_sandbox_that_ends_slowly_does_not_affect_its_neighbours(root, monkeypatch, caplog):
    """The keeper is stopped, so it cannot report the end of a sandbox. The others in its container continue; it gets no new one."""
    monkeypatch.setattr(shared_containers, "ENDING_S", 0.3)
    backend = select_backend("docker", run_label="test", root=root)
    await backend.prepare(SPEC)
    sandbox, neighbour = await backend.open(SPEC), await backend.open(SPEC)
    (container,) = backend._shared._containers
    (keeper,) = [pid for pid in processes_of("keep:/agentrl/link") if parent_of(await server_of(neighbour)) == pid]
    os.kill(keeper, signal.SIGSTOP)
    try:
        await sandbox.close()
        assert "did not exit" in caplog.text
        assert (await neighbour.python("print(6 * 7)", timeout_s=10)).stdout == "42\n"
        assert not container.has_free_slot
    finally:
        os.kill(keeper, signal.SIGCONT)
    new_sandbox = await backend.open(SPEC)
    assert (await new_sandbox.python("print(6 * 7)", timeout_s=10)).stdout == "42\n"
    assert (await neighbour.python("print(6 * 7)", timeout_s=10)).stdout == "42\n"
    await neighbour.close()
    await backend.close()


async def test_keeper_that_does_not_read_loses_no_sandbox():
    """Its socket is full: requests wait or fail, but the connection and the sandboxes of the container remain."""
    host_end, keeper_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    host_end.setblocking(False)
    keeper = KeeperClient(host_end, "container")
    room = keeper.open({"name": "first"}, {})
    with pytest.raises(SandboxError, match="does not read its requests"):
        for _ in range(100_000):
            keeper.open({"name": "x" * 1000}, {})
    ending = asyncio.create_task(keeper.end(room, 0.0))
    await asyncio.sleep(0.05)
    assert not keeper.gone.is_set() and not ending.done()
    request = {}
    while request.get("op") != "end":
        with contextlib.suppress(BlockingIOError):
            request = json.loads(keeper_end.recv(1 << 17, socket.MSG_DONTWAIT))
        await asyncio.sleep(0)
    keeper_end.send(json.dumps({"id": request["id"], "ended": True}).encode())
    await ending
    assert request["id"] == room.id
    keeper.close()
    keeper_end.close()


def parent_of(server):
    return next(process.parent for process in processes._all() if process.pid == server[0])


# All kinds of programs ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_all_kinds_of_spinning_programs_get_a_result(backend, kind):
    """`python benchmarks/sandbox_spin.py` does this with 128 programs."""
    outcome = await spun(backend, SPEC, kind, count=6, seconds=1.5)
    assert set(outcome.ends) <= SCORED[kind], outcome
    assert outcome.neighbour == "" and outcome.after == {"answers": 6}, outcome
