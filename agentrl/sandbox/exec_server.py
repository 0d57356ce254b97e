"""The main process inside a sandbox: runs programs and moves files for the host. Standard library only; Python 3.9 or later.

    python3 -I exec_server.py connect:/agentrl/link | fd:0  '{"agent": 1879048199, "server": 2013265927, ...}'

It is process 1 of the sandbox's pid namespace, so `kill(-1)` reaches every program in the sandbox, daemons included, and nothing
else; the kernel makes that call atomic against forks. Started by root it becomes user `server`, keeps the few `rights` it needs,
and gives programs another user, `agent`, and none of them: a program can neither signal it, nor trace it, nor change
its limits. Files are touched as the agent, so the server is no way around permissions. Where only one user is to be had
(bubblewrap without root), process 1 is still out of reach of signals from inside, and not dumpable.

Frames, both ways: `!II` = length of a JSON header and of a body, then both. One request is answered at a time; while a program
runs, only `pause` and `resume` are taken besides. When the host hangs up, the server ends and the kernel ends everything else.
"""

from __future__ import annotations

import collections
import contextlib
import csv
import ctypes
import datetime
import errno
import io
import json
import os
import re
import resource
import select
import signal
import socket
import stat
import struct
import sys
import time
import types

TYPE_CHECKING = False
if TYPE_CHECKING:  # not at run time: each import costs every sandbox its start-up time
    import tarfile
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any, NoReturn, Protocol

    Request = dict[str, Any]
    Answer = tuple[dict[str, Any], bytes]

    class Readable(Protocol):
        def read(self, size: int, /) -> bytes: ...


# Imported here only to be warm in the snippets that are forked from this process.
WARM = (collections, csv, datetime, re)

HOME = "/home/agent"
PREFIX = struct.Struct("!II")
MAX_HEADER = 4 << 20
CHUNK = 65536
READ_BYTES = 1 << 20
MAX_ENTRIES = 20000
MAX_DEPTH = 64
DRAIN_S = 0.2
"""How long output is still read after a program has ended while something it left behind keeps the pipe open."""
OOM_COUNTERS = ("/agentrl/memory", "/sys/fs/cgroup/memory/memory.oom_control", "/sys/fs/cgroup/memory.events")
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": HOME,
    "USER": "agent",
    "LANG": "C.UTF-8",
    "TMPDIR": "/tmp",
}
GONE_S = 5.0
"""How long killed processes may take to disappear; then the server ends, and the kernel ends them."""
SERVER_FILES = 256
CAPABILITY_VERSION_3 = 0x20080522
PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 4, 8, 22, 24, 38
SECCOMP_MODE_FILTER = 2
MS_NOSUID, MS_NODEV, MS_REMOUNT = 2, 4, 32


class Refused(Exception):
    """A request that cannot be done; `kind` is not_found, too_large, refused or busy."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Link:
    """The connection to the host."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def fileno(self) -> int:
        return self.sock.fileno()

    def read(self, size: int) -> bytes:
        """Exactly `size` bytes; ends the process when the host has hung up."""
        parts = []
        while size:
            try:
                data = self.sock.recv(min(size, READ_BYTES))
            except ConnectionError:
                data = b""
            if not data:
                os._exit(0)
            parts.append(data)
            size -= len(data)
        return b"".join(parts)

    def request(self) -> Request:
        """Next header; its body of `header["body"]` bytes is still to be read."""
        header_size, body_size = PREFIX.unpack(self.read(PREFIX.size))
        if header_size > MAX_HEADER:
            os._exit(1)
        header: Request = json.loads(self.read(header_size))
        header["body"] = body_size
        return header

    def send(self, header: dict[str, Any], body: bytes = b"") -> None:
        text = json.dumps(header, separators=(",", ":")).encode()
        try:
            self.sock.sendall(PREFIX.pack(len(text), len(body)) + text + body)
        except OSError:
            os._exit(0)


class Body(io.RawIOBase):
    """A request body read as a stream, never whole: the memory limit of a sandbox may be smaller than what is sent in."""

    def __init__(self, link: Link, size: int) -> None:
        self.link, self.left = link, size

    def read(self, size: int = -1, /) -> bytes:
        data = self.link.read(self.left if size < 0 else min(size, self.left))
        self.left -= len(data)
        return data

    def drain(self) -> None:
        while self.left:
            self.read(READ_BYTES)


class Output:
    """What one stream of a program printed: its first and last `limit / 2` bytes."""

    def __init__(self, limit: int) -> None:
        self.head_limit = limit - limit // 2
        self.tail_limit = limit // 2
        self.head = bytearray()
        self.tail = bytearray()
        self.cut = 0

    def add(self, data: bytes) -> None:
        room = self.head_limit - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        self.tail += data
        if len(self.tail) > self.tail_limit + 4 * CHUNK:
            self._trim()

    def _trim(self) -> None:
        extra = len(self.tail) - self.tail_limit
        if extra > 0:
            self.cut += extra
            del self.tail[:extra]

    def text(self) -> bytes:
        self._trim()
        mark = b"\n[... %d bytes cut ...]\n" % self.cut if self.cut else b""
        return bytes(self.head) + mark + bytes(self.tail)


class Program:
    """A running program: its process, its pipes, its deadline."""

    def __init__(self, pid: int, stdin: int | None, stdout: int, stderr: int, data: bytes, request: Request) -> None:
        self.pid = pid
        self.stdin, self.data = stdin, memoryview(data)
        self.outputs = {stdout: Output(request["output_bytes"]), stderr: Output(request["output_bytes"])}
        self.order = (self.outputs[stdout], self.outputs[stderr])
        self.started = time.monotonic()
        self.deadline: float = self.started + request["timeout_s"]
        self.oom_kills = oom_kills()
        self.status: int | None = None
        self.ended = 0.0
        self.timed_out = False

    def feed(self) -> None:
        """Writes what the program's standard input takes now."""
        assert self.stdin is not None
        try:
            self.data = self.data[os.write(self.stdin, self.data[:CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.data = self.data[:0]
        if not self.data:
            os.close(self.stdin)
            self.stdin = None

    def take(self, fd: int) -> bool:
        """Reads what is there; True when the stream has ended."""
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return False
        if not data:
            os.close(fd)
            del self.outputs[fd]
            return True
        self.order[0 if self.outputs[fd] is self.order[0] else 1].add(data)
        return False

    def close(self) -> None:
        if self.stdin is not None:
            os.close(self.stdin)
        for fd in self.outputs:
            os.close(fd)

    def reply(self) -> Answer:
        """Header fields and body for the host."""
        stdout, stderr = (output.text() for output in self.order)
        code: int | None = None
        reason = "timeout" if self.timed_out else ""
        if not reason:
            assert self.status is not None
            if os.WIFEXITED(self.status):
                code = os.WEXITSTATUS(self.status)
            elif os.WTERMSIG(self.status) == signal.SIGKILL:
                reason = "memory" if oom_kills() > self.oom_kills else "killed"
            else:
                code = 128 + os.WTERMSIG(self.status)
        fields = {
            "exit": code,
            "reason": reason,
            "wall_s": self.ended - self.started,
            "truncated": any(output.cut for output in self.order),
            "stdout": len(stdout),
        }
        return fields, stdout + stderr


class Server:
    def __init__(self, link: Link, users: Users) -> None:
        self.link, self.users = link, users
        self.paused_at: float | None = None
        self.wake, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored for process 1; Python's own handler would end it
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self.poll = select.poll()
        self.poll.register(link, select.POLLIN)
        self.poll.register(self.wake, select.POLLIN)

    def run(self) -> None:
        self.link.send({"id": 0, "ok": True, "version": 1})
        while True:
            for fd, _ in self.poll.poll():
                if fd == self.link.fileno():
                    self.answer(self.link.request())
                elif fd == self.wake:
                    self.reap(None)

    def answer(self, request: Request) -> None:
        body = Body(self.link, request["body"])
        try:
            if self.paused_at is not None and request["op"] not in ("pause", "resume", "snapshot"):
                raise Refused("busy", "it is paused")
            operation = OPERATIONS[request["op"]]
            with self.users.as_agent() if request["op"] in ON_FILES else contextlib.nullcontext():
                fields, data = operation(self, request, body)
            reply = {"id": request["id"], "ok": True, **fields}
        except Refused as error:
            reply, data = {"id": request["id"], "ok": False, "error": error.kind, "message": str(error)[:500]}, b""
        except OSError as error:  # what a program did to its files is its own doing; want of memory or descriptors is ours
            kind = "refused" if request["op"] in ON_FILES and error.errno not in EXHAUSTED else "failed"
            reply, data = {"id": request["id"], "ok": False, "error": kind, "message": str(error)[:500]}, b""
        except MemoryError as error:
            reply, data = {"id": request["id"], "ok": False, "error": "failed", "message": repr(error)[:500]}, b""
        body.drain()
        self.link.send(reply, data)

    # Programs ------------------------------------------------------------------------------------------------------

    def exec(self, request: Request, body: Body) -> Answer:
        return self.run_program(request, body.read(body.left), lambda: run_argv(request))

    def python(self, request: Request, body: Body) -> Answer:
        code = body.read(body.left)
        return self.run_program(request, b"", lambda: run_snippet(code))

    def run_program(self, request: Request, stdin: bytes, child: Callable[[], int]) -> Answer:
        try:
            program = self.spawn(request, stdin, child)
        except OSError as error:  # processes or descriptors used up by programs still running: theirs to answer for, as in a shell
            text = (f"agentrl: cannot start: {error.strerror}\n").encode()
            return {"exit": 126, "reason": "", "wall_s": 0.0, "truncated": False, "stdout": 0}, text
        for fd in program.outputs:
            self.poll.register(fd, select.POLLIN)
        if program.stdin is not None:
            self.poll.register(program.stdin, select.POLLOUT)
        try:
            while self.step(program):
                pass
        finally:
            for fd in [*program.outputs, *([program.stdin] if program.stdin is not None else [])]:
                self.poll.unregister(fd)
            program.close()
        if program.timed_out:
            self.await_gone()
        return program.reply()

    def spawn(self, request: Request, stdin: bytes, child: Callable[[], int]) -> Program:
        pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(3 if stdin else 2)]
        (out_read, out_write), (err_read, err_write) = pipes[:2]
        in_read, in_write = pipes[2] if stdin else (None, None)
        try:
            pid = os.fork()
        except OSError:
            for fd in (fd for pipe in pipes for fd in pipe):
                os.close(fd)
            raise
        if pid == 0:
            become_program(self.users, in_read, out_write, err_write, child)
        for fd in filter(None, (out_write, err_write, in_read)):
            os.close(fd)
        for fd in filter(None, (out_read, err_read, in_write)):
            os.set_blocking(fd, False)
        return Program(pid, in_write, out_read, err_read, stdin, request)

    def step(self, program: Program) -> bool:
        """Waits for one thing to happen to the program; False when it is over and its output read."""
        now = time.monotonic()
        running = program.status is None
        if not running and (not program.outputs or now >= program.ended + DRAIN_S):
            return False
        if running and not program.timed_out and self.paused_at is None and now >= program.deadline:
            program.timed_out = True
            kill_everything(signal.SIGKILL)
        ready = self.poll.poll(self.wait_ms(program, now))
        for fd, _ in ready:
            if fd == self.link.fileno():
                self.interrupt(self.link.request(), program)
            elif fd == self.wake:
                self.reap(program)
            elif fd == program.stdin:
                program.feed()
                if program.stdin is None:
                    self.poll.unregister(fd)
            elif fd in program.outputs and program.take(fd):
                self.poll.unregister(fd)
        # A program that has ended has written all it will; what others hold open is only read while data is there at once.
        return running or any(fd in program.outputs for fd, _ in ready)

    def wait_ms(self, program: Program, now: float) -> float | None:
        if program.status is not None:
            return 0
        if program.timed_out:
            return 100
        if self.paused_at is not None:
            return None
        return 1.0 + 1000.0 * max(0.0, program.deadline - now)

    def interrupt(self, request: Request, program: Program) -> None:
        """A request that came while a program runs: pausing and resuming, which also stop its clock."""
        if request["op"] not in ("pause", "resume"):
            Body(self.link, request["body"]).drain()
            self.link.send({"id": request["id"], "ok": False, "error": "busy", "message": "a program is running"})
            return
        before = self.paused_at
        self.answer(request)
        if before is not None and self.paused_at is None:
            program.deadline += time.monotonic() - before

    def reap(self, program: Program | None) -> None:
        """Collects every ended process; orphans of the whole sandbox come to process 1."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake, 4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if program is not None and pid == program.pid:
                program.status, program.ended = status, time.monotonic()

    def await_gone(self) -> None:
        """Returns once nothing but this process is left; ends the whole sandbox when something does not die."""
        deadline = time.monotonic() + GONE_S
        while True:
            self.reap(None)
            try:
                os.kill(-1, 0)
            except ProcessLookupError:
                return
            if time.monotonic() > deadline:
                os._exit(1)
            time.sleep(0.001)

    # Pausing -------------------------------------------------------------------------------------------------------

    def pause(self, request: Request, body: Body) -> Answer:
        if self.paused_at is None:
            self.paused_at = time.monotonic()
            kill_everything(signal.SIGSTOP)
        return {}, b""

    def resume(self, request: Request, body: Body) -> Answer:
        if self.paused_at is not None:
            kill_everything(signal.SIGCONT)
            self.paused_at = None
        return {}, b""

    # Files ---------------------------------------------------------------------------------------------------------

    def read(self, request: Request, body: Body) -> Answer:
        folder, name = open_parent(request["path"])
        try:
            fd = open_regular(name, folder)
        finally:
            os.close(folder)
        sink = Sink(self.link, request["id"], request["max_bytes"], f"{request['path']} is larger than {request['max_bytes']} bytes")
        with open(fd, "rb", buffering=0) as file:
            sink.room_for(os.fstat(fd).st_size)
            while len(data := file.read(READ_BYTES)) == READ_BYTES:
                sink.write(data)
        sink.room_for(len(data))
        return {"more": False}, data

    def write(self, request: Request, body: Body) -> Answer:
        for path, size in request["files"]:
            folder, name = open_parent(path, create=True)
            try:
                write_file(folder, name, body, size)
            finally:
                os.close(folder)
        return {}, b""

    def snapshot(self, request: Request, body: Body) -> Answer:
        import tarfile

        if self.paused_at is None:
            kill_everything(signal.SIGSTOP)
        try:
            sink = Sink(self.link, request["id"], request["max_bytes"], "the working directory is larger than a snapshot may be")
            with tarfile.open(mode="w|", fileobj=sink, format=tarfile.PAX_FORMAT, bufsize=READ_BYTES) as archive:
                pack(archive, sink)
        finally:
            if self.paused_at is None:
                kill_everything(signal.SIGCONT)
        return {"more": False}, b""

    def restore(self, request: Request, body: Body) -> Answer:
        import tarfile

        try:
            with tarfile.open(mode="r|", fileobj=body, bufsize=READ_BYTES) as archive:
                unpack(archive)
        except (tarfile.TarError, ValueError, OverflowError, EOFError, struct.error) as error:
            raise Refused("refused", f"not an archive: {error}") from None
        return {}, b""


EXHAUSTED = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EIO)
ON_FILES = ("read", "write", "snapshot", "restore")
OPERATIONS = {name: getattr(Server, name) for name in ("exec", "python", "pause", "resume", "read", "write", "snapshot", "restore")}


class Sink(io.RawIOBase):
    """File object that sends what is written to it to the host, a frame at a time, up to a limit."""

    def __init__(self, link: Link, number: int, limit: int, too_large: str) -> None:
        self.link, self.number, self.left, self.too_large = link, number, limit, too_large

    def room_for(self, size: int) -> None:
        if size > self.left:
            raise Refused("too_large", self.too_large)

    def write(self, data: Any, /) -> int:
        self.room_for(len(data))
        self.left -= len(data)
        if data:
            self.link.send({"id": self.number, "ok": True, "more": True}, bytes(data))
        return len(data)


def kill_everything(number: int) -> None:
    """Signals every process of the sandbox but this one, however it detached itself."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, number)


def oom_kills() -> int:
    """How often the kernel has killed for memory here, as far as the sandbox's own control group shows it."""
    for path in OOM_COUNTERS:
        try:
            with open(path) as file:
                for line in file:
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
        except (OSError, ValueError):
            continue
    return 0


# In the child, between fork and exec ---------------------------------------------------------------------------------


def become_program(users: Users, stdin: int | None, stdout: int, stderr: int, child: Callable[[], int]) -> NoReturn:
    """Turns a forked child into the leader of a session of its own with its own pipes, and never returns."""
    status = 70
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        os.dup2(stdin if stdin is not None else os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.closerange(3, SERVER_FILES)
        users.become_agent()
        os.chdir(HOME)
        status = child()
    except OSError as error:
        os.write(2, (f"agentrl: {error}\n").encode())
    finally:
        os._exit(status)


def run_argv(request: Request) -> int:
    argv = request["argv"]
    environment = {**ENVIRONMENT, **(request["env"] or {})}
    try:
        os.execvpe(argv[0], argv, environment)
    except OSError as error:
        os.write(2, (f"agentrl: {argv[0]}: {error.strerror}\n").encode("utf-8", "replace"))
        return 126 if error.errno == errno.EACCES else 127


def run_snippet(code: bytes) -> int:
    """What `python3 -I -c` does with `code`, in this forked interpreter; gives the exit status."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(ENVIRONMENT)
    sys.argv = ["-c"]
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=__builtins__, __annotations__={})
    sys.modules["__main__"] = main
    status = 0
    try:
        exec(compile(code, "<string>", "exec", dont_inherit=True), main.__dict__)
    except SystemExit as stop:
        status = exit_status(stop)
    except BaseException as error:
        status = 1
        report(error)
    return finish(status)


def report(error: BaseException) -> None:
    """Prints an uncaught exception as the interpreter does, without this file's own frame."""
    trace = error.__traceback__ and error.__traceback__.tb_next
    try:
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    except BaseException:
        sys.__excepthook__(type(error), error, trace)


def exit_status(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    print(stop.code, file=sys.stderr)
    return 1


def finish(status: int) -> int:
    """The end of an interpreter: waits for threads, runs exit handlers, flushes."""
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        import atexit

        atexit._run_exitfuncs()
    except BaseException as error:
        sys.__excepthook__(type(error), error, error.__traceback__)
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            status = status or 120
    return status


# Files: every step of a path is opened without following links --------------------------------------------------------

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_parent(path: str, create: bool = False) -> tuple[int, str]:
    """(descriptor of the folder that holds `path`, last name), walking from the working directory without following links."""
    *folders, name = path.split("/")
    if len(folders) > MAX_DEPTH or any(part in ("", ".", "..") for part in (*folders, name)):
        raise Refused("refused", f"path {path!r} is not a plain relative path")
    fd = os.open(HOME, FOLDER)
    for part in folders:
        try:
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=fd)
            deeper = os.open(part, FOLDER, dir_fd=fd)
        except FileNotFoundError:
            raise Refused("not_found", path) from None
        except OSError as error:
            raise Refused("refused", f"{part!r} in {path!r}: {error.strerror}") from None
        finally:
            os.close(fd)
        fd = deeper
    return fd, name


def open_regular(name: str, folder: int) -> int:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        raise Refused("not_found", name) from None
    except OSError as error:
        raise Refused("refused", f"{name!r} is not a readable regular file: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise Refused("refused", f"{name!r} is not a regular file")
    return fd


def write_file(folder: int, name: str, body: Readable, size: int, mode: int = 0o644) -> None:
    """Replaces whatever is at `name` (a link is removed, not followed) by a new file with the next `size` bytes of `body`."""
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise Refused("refused", f"{name!r} cannot be replaced: {error.strerror}") from None
    try:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=folder)
        with open(fd, "wb") as file:
            while size:
                data = body.read(min(size, READ_BYTES))
                if not data:
                    raise Refused("refused", f"{name!r} ends early")
                size -= len(data)
                file.write(data)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise Refused("too_large", f"no room for {name!r}") from None
        raise


def pack(archive: tarfile.TarFile, sink: Sink) -> None:
    """Adds the working directory (regular files, folders, links as links) to `archive`; anything else is left out."""
    import tarfile

    count = 0
    todo = [""]
    while todo:
        folder = todo.pop()
        if folder.count("/") >= MAX_DEPTH:
            raise Refused("too_large", f"the working directory is nested more than {MAX_DEPTH} deep")
        with os.scandir(HOME + "/" + folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                count += 1
                if count > MAX_ENTRIES:
                    raise Refused("too_large", f"the working directory holds more than {MAX_ENTRIES} entries")
                path = folder + entry.name
                member = tarfile.TarInfo(path)
                if entry.is_symlink():
                    member.type, member.linkname = tarfile.SYMTYPE, os.readlink(entry.path)
                    archive.addfile(member)
                elif entry.is_dir(follow_symlinks=False):
                    member.type, member.mode = tarfile.DIRTYPE, 0o755
                    archive.addfile(member)
                    todo.append(path + "/")
                elif entry.is_file(follow_symlinks=False):
                    pack_file(archive, member, entry.path, sink)


def pack_file(archive: tarfile.TarFile, member: tarfile.TarInfo, path: str, sink: Sink) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        info = os.fstat(fd)
        sink.room_for(info.st_size)
        member.size, member.mode, member.mtime = info.st_size, info.st_mode & 0o777, int(info.st_mtime)
        archive.addfile(member, file)


def unpack(archive: tarfile.TarFile) -> None:
    for count, member in enumerate(archive):
        if count >= MAX_ENTRIES:
            raise Refused("too_large", f"the archive holds more than {MAX_ENTRIES} entries")
        folder, name = open_parent(member.name.rstrip("/"), create=True)
        try:
            if member.isdir():
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o755, dir_fd=folder)
            elif member.issym():
                os.symlink(member.linkname, name, dir_fd=folder)
            elif member.isreg() and (content := archive.extractfile(member)) is not None:
                write_file(folder, name, content, member.size, member.mode & 0o777)
        finally:
            os.close(folder)


# Users, rights and limits ---------------------------------------------------------------------------------------------

LIBC = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    if LIBC.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def set_capabilities(numbers: Sequence[int]) -> None:
    """Makes `numbers` the permitted and effective rights of this process, with nothing inheritable."""
    mask = sum(1 << number for number in numbers)
    if LIBC.capset(struct.pack("=Ii", CAPABILITY_VERSION_3, 0), struct.pack("=6I", mask, mask, 0, 0, 0, 0)) != 0:
        raise OSError(ctypes.get_errno(), "capset")


class Users:
    """Who the server is and who its programs are; the same where no second user is to be had."""

    def __init__(self, server: int, agent: int, open_files: int) -> None:
        self.server, self.agent, self.open_files = server, agent, open_files

    @contextlib.contextmanager
    def as_agent(self) -> Iterator[None]:
        """Files are opened and made with the agent's rights, while signals, tracing and limits still see the server."""
        if self.server == self.agent:
            yield
            return
        LIBC.setfsgid(self.agent)
        LIBC.setfsuid(self.agent)
        try:
            yield
        finally:
            LIBC.setfsuid(self.server)
            LIBC.setfsgid(self.server)

    def become_agent(self) -> None:
        """Turns this process, a forked child, into the agent's, for good."""
        resource.setrlimit(resource.RLIMIT_NOFILE, (self.open_files, self.open_files))
        prctl(PR_SET_DUMPABLE, 1)  # its /proc/self is its own again; the channel is closed by now
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # without memory a program goes, not the server; with SYS_RESOURCE it cannot be taken back
        if self.server != self.agent:
            os.setresgid(self.agent, self.agent, self.agent)
            os.setresuid(self.agent, self.agent, self.agent)
            set_capabilities(())
            prctl(PR_SET_DUMPABLE, 1)  # a change of user took it away


def mapped(user: int) -> bool:
    """Whether this user namespace knows `user`; one of a rootless engine knows only the first thousands."""
    with open("/proc/self/uid_map") as file:
        ranges = [line.split() for line in file]
    return any(int(first) <= user < int(first) + int(count) for first, _, count in ranges)


def leave_root(options: Request) -> Users:
    """Gives up root for good, keeping `rights`; gives the users from here on."""
    for path, limit in options.get("tmpfs", {}).items():
        if LIBC.mount(b"tmpfs", path.encode(), None, MS_REMOUNT | MS_NOSUID | MS_NODEV, limit.encode()) != 0:
            raise OSError(ctypes.get_errno(), f"remount {path}")
    agent, server = options["agent"], options["server"]
    if not (mapped(agent) and mapped(server)):
        agent, server = 65534, 65533
    for capability in range(64):
        if LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break  # past the last capability of this kernel
    os.setgroups([])
    prctl(PR_SET_KEEPCAPS, 1)
    os.setresgid(server, server, server)
    os.setresuid(server, server, server)
    set_capabilities(options["rights"])
    return Users(server, agent, options["open_files"])


class FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def restrict(options: Request) -> None:
    """What holds for this process and all that come from it: limits, cores, and a filter of system calls."""
    for name, value in options["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    resource.setrlimit(resource.RLIMIT_NOFILE, (SERVER_FILES, max(SERVER_FILES, options["open_files"])))
    usable = os.sched_getaffinity(0).intersection(options["cores"])
    if usable:  # an engine may have cores of its own for containers
        os.sched_setaffinity(0, usable)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_DUMPABLE, 0)
    code = bytes.fromhex(options["filter"])
    if code and LIBC.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(FilterProgram(len(code) // 8, code)), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the system call filter")


# Start ----------------------------------------------------------------------------------------------------------------


def connect(address: str) -> socket.socket:
    kind, _, where = address.partition(":")
    if kind == "fd":
        return socket.socket(fileno=int(where))
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(where)
    return sock


def hand_over(network: Request) -> None:
    """Opens the listener that the host's proxy answers, and gives it away before any program runs; programs learn where it is."""
    listener = socket.create_server(("127.0.0.1", network["port"]), backlog=network["backlog"])
    with listener, connect("connect:" + network["link"]) as link:
        socket.send_fds(link, [b"\0"], [listener.fileno()])
    ENVIRONMENT.update(network["environment"])


def main() -> None:
    options = json.loads(sys.argv[2])
    sock = connect(sys.argv[1])
    os.set_inheritable(sock.fileno(), False)
    users = leave_root(options) if os.geteuid() == 0 else Users(os.geteuid(), os.geteuid(), options["open_files"])
    restrict(options)
    if "network" in options:
        hand_over(options["network"])
    os.umask(0o022)
    import gc

    gc.freeze()
    try:
        Server(Link(sock), users).run()
    except BaseException as error:  # the host sees the connection end; why is worth a line in the sandbox's log
        sys.stderr.write(f"exec server: {error!r}\n")
        os._exit(1)


if __name__ == "__main__":
    main()
