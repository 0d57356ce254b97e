"""Starts learner processes without torchrun and without repeating their imports, which take most of the time of a short test.

`python -m tests.learner.preloaded host learners FOLDER PARENT_PID` imports the modules that a learner needs and waits. `command` returns a
command line that replaces torchrun's: the host forks the ranks, which get the environment and the output of the command. As under
torchrun, the exit code is that of the first rank that fails; the other ranks are killed then, and all ranks if the command is killed.

A host of `servers` does the same for inference servers (tests/e2e/forked.py). A host serves any number of commands at once.
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
SERVER_IMPORTS = ("vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.qwen3")
LEARNER_IMPORTS = (
    "agentrl.learner.worker",
    "deepspeed",
    "peft",
    "transformers.models.qwen3.modeling_qwen3",
    "tests.learner.building",
)


def command(address: Path, ranks: int, module: str, *arguments: str) -> list[str]:
    """Returns a command line that replaces `torchrun --nproc-per-node=RANKS -m MODULE ARGUMENTS...`."""
    return [sys.executable, "-S", "-E", __file__, "ask", str(address), str(ranks), module, *arguments]


@contextlib.contextmanager
def hosting(folder: Path, kind: str = "learners", extra: Mapping[str, str] | None = None) -> Iterator[Path]:
    """Starts a host and yields its address for `command`. Its stem is the host's process id. `extra` is added to the environment."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **(extra or {}),
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


def request_ranks(address: str, ranks: str, module: str, *arguments: str) -> int:
    """Requests the ranks from the host, waits for their end and returns the exit code. This process and its ranks die with its parent."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    request = {"ranks": int(ranks), "module": module, "arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    request["mounts"] = f"/proc/{os.getpid()}/ns/mnt"
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(address)
        descriptors = array.array("i", [1, 2])
        link.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
        link.sendall(json.dumps(request).encode())
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
        for name in LEARNER_IMPORTS if kind == "learners" else (launch._SERVER, *SERVER_IMPORTS):
            __import__(name)
    address = f"{folder}/{os.getpid()}.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{address}.new")
        listener.listen()
        os.rename(f"{address}.new", address)
        _serve(listener, kind)


@dataclass
class _Command:
    """A running command: the connection to it, and its ranks' process ids by descriptor."""

    link: socket.socket
    ranks: dict[int, int] = field(default_factory=dict)
    code: int = 0


def _serve(listener: socket.socket, kind: str) -> None:
    """Starts the ranks of each command that connects. Kills them if one fails or the command ended."""
    commands: list[_Command] = []
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select(timeout=0.2):
                if key.data is None:
                    commands.append(_start(listener, kind, [command.link for command in commands]))
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
                elif command.code or _is_closed(command.link):
                    for pid in command.ranks.values():
                        os.kill(pid, signal.SIGKILL)


def _start(listener: socket.socket, kind: str, others: list[socket.socket]) -> _Command:
    """Forks the ranks that a command requests."""
    link, _ = listener.accept()
    _, outputs, _, _ = socket.recv_fds(link, 1, 2)
    text = b""
    while data := link.recv(65536):
        text += data
    request = json.loads(text)
    command = _Command(link)
    for slot in _slots(request["ranks"]) if kind == "learners" else [{}]:
        pid = _fork(request, slot, outputs, [listener, link, *others])
        command.ranks[os.pidfd_open(pid)] = pid
    for output in outputs:
        os.close(output)
    return command


def _slots(ranks: int) -> list[dict[str, str]]:
    """Returns the environment that torchrun gives to each rank."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [{"RANK": str(n), "LOCAL_RANK": str(n), **common} for n in range(ranks)]


def _is_closed(link: socket.socket) -> bool:
    """Whether the command has ended and closed its connection."""
    poll = select.poll()
    poll.register(link, 0)
    return bool(poll.poll(0))


def _fork(request: dict, slot: dict[str, str], outputs: list[int], sockets: list[socket.socket]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for host_socket in sockets:
            host_socket.close()
        code = _run_rank(request, slot, outputs)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_rank(request: dict, slot: dict[str, str], outputs: list[int]) -> int:
    import runpy
    import traceback

    import torch

    if os.readlink(request["mounts"]) != os.readlink("/proc/self/ns/mnt"):  # see the fixture own_mounts
        with open(request["mounts"]) as mounts:
            assert ctypes.CDLL(None).setns(mounts.fileno(), 0) == 0
    os.dup2(outputs[0], 1)
    os.dup2(outputs[1], 2)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"], **slot)
    tempfile.tempdir = None  # set again from the new environment
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    sys.argv = [request["module"], *request["arguments"]]
    try:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        sys.exit(request_ranks(*sys.argv[2:]))
    host(*sys.argv[2:])
