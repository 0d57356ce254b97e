"""Learner processes without torchrun and without the seconds of imports before them, which are most of what a short one takes.

`python -m tests.learner.preloaded host SOCKET PARENT_PID` imports what a learner needs and waits. `command` gives a command line that
stands where torchrun would: the host forks its ranks, each a process of its own with the environment and the output of the command.
As under torchrun the exit code is that of the first rank to fail, the others are killed then, and all of them when the command is.
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
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
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
def hosting(folder: Path) -> Iterator[Path]:
    """A host in a process of its own; gives the address for `command`."""
    address = folder / "host.sock"
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    arguments = [sys.executable, "-m", "tests.learner.preloaded", "host", str(address), str(os.getpid())]
    host = subprocess.Popen(arguments, cwd=ROOT, env=environment)
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


def host(address: str, parent: str) -> None:
    from agentrl.processes import die_with_parent, imports_kept

    die_with_parent(int(parent))
    with imports_kept():
        for name in HEAVY:
            __import__(name)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(f"{address}.new")
        door.listen()
        os.rename(f"{address}.new", address)
        while True:
            link, _ = door.accept()
            with link:
                code = _serve(link)
                with contextlib.suppress(OSError):
                    link.sendall(str(code).encode())


def _serve(link: socket.socket) -> int:
    """Forks what one command asks for, and waits until it has ended or the command has."""
    _, outputs, _, _ = socket.recv_fds(link, 1, 2)
    text = b""
    while data := link.recv(65536):
        text += data
    wanted = json.loads(text)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    places = [{"RANK": str(n), "LOCAL_RANK": str(n), "MASTER_PORT": str(port)} for n in range(wanted["ranks"])]
    ranks = [_fork(wanted, place, outputs) for place in places]
    for output in outputs:
        os.close(output)
    return _wait(link, ranks)


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
    size = str(wanted["ranks"])
    os.environ.clear()
    os.environ.update(wanted["environment"], WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, MASTER_ADDR="127.0.0.1", **place)
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
