"""Starts learner processes without torchrun and without their imports, which take most of the time of a short test.

`python -m tests.learner.preloaded host learners FOLDER PARENT_PID` imports the modules that a learner needs and waits. `command` returns a
command line that replaces torchrun's: the host forks the ranks, which get the environment and the output of the command. As under
torchrun, the exit code is that of the first rank that fails; the other ranks are killed then, and all ranks if the command is killed.

A host of `servers` does the same for inference servers (tests/e2e/forked.py). A host serves any number of commands at a time.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SERVED = ("vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.qwen3")
HEAVY = (
    "agentrl.learner.worker",
    "deepspeed",
    "peft",
    "transformers.models.qwen3.modeling_qwen3",
    "tests.learner.building",
)


def command(address: Path, ranks: int, module: str, *arguments: str) -> list[str]:
    """As `torchrun --nproc-per-node=RANKS -m MODULE ARGUMENTS...`."""
    return [sys.executable, "-S", "-E", __file__, "ask", str(address), str(ranks), module, *arguments]


@contextlib.contextmanager
def hosting(folder: Path, kind: str = "learners", given: Mapping[str, str] | None = None) -> Iterator[Path]:
    """Starts a host and yields its address for `command`. The stem of the address is the host's process id. `given`: environment."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **(given or {}),
    }
    folder.mkdir(exist_ok=True)
    arguments = [sys.executable, "-m", "tests.learner.preloaded", "host", kind, str(folder), str(os.getpid())]
    host = subprocess.Popen(arguments, cwd=ROOT, env=environment)
    address = folder / f"{host.pid}.sock"
    try:
        deadline = time.monotonic() + 300
        while not address.exists():
            assert host.poll() is None and time.monotonic() < deadline, "the host does not start"
            time.sleep(0.05)
        yield address
    finally:
        host.kill()
        host.wait()


def ask(address: str, ranks: str, module: str, *arguments: str) -> int:
    """Requests the ranks from the host, waits for their end and returns the exit code. Dies with its parent, as its ranks then do."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    wanted = {"ranks": int(ranks), "module": module, "arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    wanted["mounts"] = f"/proc/{os.getpid()}/ns/mnt"
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(address)
        descriptors = array.array("i", [1, 2])
        link.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
        link.sendall(json.dumps(wanted).encode())
        link.shutdown(socket.SHUT_WR)
        code = link.recv(16)
    return int(code or b"1")


def host(kind: str, folder: str, parent: str) -> None:
    from agentrl.base.processes import die_with_parent, freeze_imports

    die_with_parent(int(parent))
    with freeze_imports():
        if kind == "servers":
            from agentrl.serving import launch

            launch._trim_cpu_start(threads=1)
        for name in HEAVY if kind == "learners" else (launch._SERVER, *SERVED):
            __import__(name)
    address = f"{folder}/{os.getpid()}.sock"
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(f"{address}.new")
        door.listen()
        os.rename(f"{address}.new", address)
        _serve(door, kind)


@dataclass
class _Command:
    """A command that runs: the connection to it, and its ranks' process ids by descriptor."""

    link: socket.socket
    ranks: dict[int, int] = field(default_factory=dict)
    code: int = 0


def _serve(door: socket.socket, kind: str) -> None:
    """Starts the ranks of each command that connects. Ends them if one fails or the command is gone."""
    commands: list[_Command] = []
    with selectors.DefaultSelector() as selector:
        selector.register(door, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select(timeout=0.2):
                if key.data is None:
                    commands.append(_start(door, kind, [one.link for one in commands]))
                    for descriptor in commands[-1].ranks:
                        selector.register(descriptor, selectors.EVENT_READ, commands[-1])
                else:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    _, status = os.waitpid(key.data.ranks.pop(key.fd), 0)
                    key.data.code = key.data.code or os.waitstatus_to_exitcode(status)
            for command in [*commands]:
                if not command.ranks:
                    with command.link, contextlib.suppress(OSError):
                        command.link.sendall(str(command.code).encode())
                    commands.remove(command)
                elif command.code or _gone(command.link):
                    for pid in command.ranks.values():
                        os.kill(pid, signal.SIGKILL)


def _start(door: socket.socket, kind: str, others: list[socket.socket]) -> _Command:
    """Forks the ranks that a command requests."""
    link, _ = door.accept()
    _, outputs, _, _ = socket.recv_fds(link, 1, 2)
    text = b""
    while data := link.recv(65536):
        text += data
    wanted = json.loads(text)
    command = _Command(link)
    for slot in _slots(wanted["ranks"]) if kind == "learners" else [{}]:
        pid = _fork(wanted, slot, outputs, [door, link, *others])
        command.ranks[os.pidfd_open(pid)] = pid
    for output in outputs:
        os.close(output)
    return command


def _slots(ranks: int) -> list[dict[str, str]]:
    """Returns the environment that torchrun gives to each rank."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    all_of_them = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [{"RANK": str(n), "LOCAL_RANK": str(n), **all_of_them} for n in range(ranks)]


def _gone(link: socket.socket) -> bool:
    """Whether the command has been killed."""
    poll = select.poll()
    poll.register(link, 0)
    return bool(poll.poll(0))


def _fork(wanted: dict, slot: dict[str, str], outputs: list[int], sockets: list[socket.socket]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for one in sockets:  # of the host
            one.close()
        code = _be_rank(wanted, slot, outputs)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _be_rank(wanted: dict, slot: dict[str, str], outputs: list[int]) -> int:
    import runpy
    import traceback

    import torch

    if os.readlink(wanted["mounts"]) != os.readlink("/proc/self/ns/mnt"):  # see the fixture own_mounts
        with open(wanted["mounts"]) as mounts:
            assert ctypes.CDLL(None).setns(mounts.fileno(), 0) == 0
    os.dup2(outputs[0], 1)
    os.dup2(outputs[1], 2)
    os.chdir(wanted["folder"])
    os.environ.clear()
    os.environ.update(wanted["environment"], **slot)
    tempfile.tempdir = None  # as it was for the host
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    sys.argv = [wanted["module"], *wanted["arguments"]]
    try:
        runpy.run_module(wanted["module"], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        sys.exit(ask(*sys.argv[2:]))
    host(*sys.argv[2:])
