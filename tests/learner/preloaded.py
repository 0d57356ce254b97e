"""Learner processes without torchrun and without the seconds of imports before them, which are most of what a short one takes.

`python -m tests.learner.preloaded host learners FOLDER PARENT_PID` imports what a learner needs and waits. `command` gives a command line
that stands where torchrun would: the host forks its ranks, each a process of its own with the environment and the output of the command.
As under torchrun the exit code is that of the first rank to fail, the others are killed then, and all of them when the command is.

A host of `servers` does the same for inference servers (tests/e2e/forked.py). Each host serves one command at a time.
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
    """A host in a process of its own; gives the address for `command`, whose stem is the host's process id. `given`: environment."""
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
    """In place of torchrun: has the ranks forked and waits for them."""
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
        while True:
            link, _ = door.accept()
            with link:
                code = _serve(link, kind)
                with contextlib.suppress(OSError):
                    link.sendall(str(code).encode())


def _serve(link: socket.socket, kind: str) -> int:
    """Forks what one command asks for, and waits until it has ended or the command has."""
    _, outputs, _, _ = socket.recv_fds(link, 1, 2)
    text = b""
    while data := link.recv(65536):
        text += data
    wanted = json.loads(text)
    places = _places(wanted["ranks"]) if kind == "learners" else [{}]
    ranks = [_fork(wanted, place, outputs) for place in places]
    for output in outputs:
        os.close(output)
    return _wait(link, ranks)


def _places(ranks: int) -> list[dict[str, str]]:
    """What torchrun tells each rank in its environment."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    all_of_them = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [{"RANK": str(n), "LOCAL_RANK": str(n), **all_of_them} for n in range(ranks)]


def _wait(link: socket.socket, ranks: list[int]) -> int:
    code = 0
    with selectors.DefaultSelector() as selector:
        for pid in ranks:
            selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
        while selector.get_map():
            for key, _ in selector.select(timeout=0.2):
                selector.unregister(key.fileobj)
                os.close(int(key.fd))
                status = os.waitstatus_to_exitcode(os.waitpid(key.data, 0)[1])
                code = code or status
            if code or _gone(link):
                for key in list(selector.get_map().values()):
                    os.kill(key.data, signal.SIGKILL)
    return code


def _gone(link: socket.socket) -> bool:
    """Whether the command has been killed: then nobody is there to read an answer."""
    poll = select.poll()
    poll.register(link, 0)
    return bool(poll.poll(0))


def _fork(wanted: dict, place: dict[str, str], outputs: list[int]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        code = _be_rank(wanted, place, outputs)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _be_rank(wanted: dict, place: dict[str, str], outputs: list[int]) -> int:
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
    os.environ.update(wanted["environment"], **place)
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
