"""Starts the exec server and runs its loop. The server handles one request at a time; while a program runs, it also accepts `pause` and
`resume`.

    python3 -I exec_server.py connect:/agentrl/link | fd:0  '{"agent": 1879048199, "server": 2013265927, ...}'
    python3 -I exec_server.py keep:/agentrl/link            # starts sandboxes that share a container (see `keeper`)

The exec server is process 1 of the sandbox's pid namespace. So `kill(-1)` reaches every program in the sandbox, including daemons, and no
process outside, and no fork escapes it. When the host closes the connection, the server exits and the kernel kills all other processes.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import select
import signal
import socket
import sys
import time

from agentrl.sandbox.inside.child import MAX_SESSIONS, Session, reset_interpreter
from agentrl.sandbox.inside.files import send_file, write_files
from agentrl.sandbox.inside.isolation import isolate_tree
from agentrl.sandbox.inside.keeper import Keeper
from agentrl.sandbox.inside.program import Pause, Program, cannot_start, kernel_status, kill_everything
from agentrl.sandbox.inside.snapshot import restore_snapshot, send_snapshot
from agentrl.sandbox.inside.spawn import Launch, Pipes, WaitingChild, can_launch, work
from agentrl.sandbox.inside.users import CHECK_S, ENVIRONMENT, IDLE_CHECK_S, Watch, become_server, restrict, set_bounds
from agentrl.sandbox.inside.wire import Body, Link, Refused, frame

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from agentrl.sandbox.inside.users import Users
    from agentrl.sandbox.inside.wire import Answer, Request

_DRAIN_S = 0.2  # how long output is read after a program ended, if a process that it left behind keeps the pipe open
_GONE_S = 60.0  # how long killed processes may take to end; then the server exits. The driver waits less
_LONGEST_WAIT_S = 3600.0  # poll(2) counts milliseconds in 31 bits
_EXHAUSTED = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EIO)


class Server:
    """The exec server of one sandbox."""

    def __init__(self, link: Link, users: Users) -> None:
        self.link, self.users = link, users
        self.paused_at: float | None = None
        self.pause: Pause | None = None  # while paused
        self.waiting: WaitingChild | None = None
        self.launcher: WaitingChild | None = None  # launched a program that has ended
        self.likely = "python"
        self.sessions: dict[str, Session] = {}
        self.watch = Watch()
        self.wake, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored for process 1; Python's handler would end it
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self.poll = select.poll()
        self.poll.register(link, select.POLLIN)
        self.poll.register(self.wake, select.POLLIN)

    def run(self) -> None:
        """Handles requests until the host closes the connection."""
        self.link.send({"id": 0, "ok": True, "version": 1})
        left = False
        while True:
            rest_s = self.watch.rest_s if self.pause is None else 0.0
            ready = self.poll.poll(1000 * max(IDLE_CHECK_S, rest_s) if left else None)
            if not ready and self.pause is not None:
                self.pause.look()
            elif not ready and self.watch.over_limit():
                self._kill_all_and_wait()
            for fd, _ in ready:
                if fd == self.link.fileno():
                    self.answer(self.link.request())
                    self._prepare_child()
                elif fd == self.wake:
                    self._reap(None)
            left = self.watch.has_others(self.waiting.pid if self.waiting is not None else 0)

    def answer(self, request: Request) -> None:
        """Executes a request of the host and sends the reply."""
        body = Body(self.link, request["body"])
        data = b""
        try:
            operation = request["op"]
            if self.paused_at is not None and operation not in ("pause", "resume", "snapshot"):
                raise Refused("busy", "it is paused")
            with self.users.as_agent() if operation in _ON_FILES else contextlib.nullcontext():
                fields, data = _OPERATIONS[operation](self, request, body)
            reply = {"id": request["id"], "ok": True, **fields}
        except Exception as error:
            kind, message = "failed", repr(error)  # no memory, or a bug: this call fails and the server continues
            if isinstance(error, Refused):
                kind, message = error.kind, str(error)
            elif isinstance(error, OSError):  # caused by the agent's files, unless memory or descriptors are used up
                kind, message = "refused" if request["op"] in _ON_FILES and error.errno not in _EXHAUSTED else "failed", str(error)
            reply = {"id": request["id"], "ok": False, "error": kind, "message": message[:500]}
        body.drain()
        self.link.send(reply, data if reply["ok"] else b"")

    # Programs ---------------------------------------------------------------------------------------------------------

    def _run(self, request: Request, body: Body) -> Answer:
        data = body.read(body.left)
        if request["op"] == "exec":
            return self._run_program(request, work("exec", (request["argv"], request["env"]), bool(data)), data)
        name = request["session"]
        return self._run_program(request, work("python", data)) if name is None else self._run_in_session(name, request, data)

    def _run_program(self, request: Request, *data: bytes) -> Answer:
        self.likely = request["op"]  # the next call is usually of the same kind
        try:
            child = self._take_child()
        except OSError as error:
            return cannot_start(error)
        program = Program(child.pid, child.pipes, request, *data)
        if request["op"] != "exec" or not can_launch(self.users):
            child.control.close()
            return self._watch_program(program, None)
        launch = Launch(child)
        answer = self._watch_program(program, launch)
        if launch.read_status() is not None:
            self.launcher = child
            return answer
        child.control.close()
        if launch.status is None:  # the child was killed before it reported the program's end
            self._kill_all_and_wait()
        return answer

    def _run_in_session(self, name: str, request: Request, code: bytes) -> Answer:
        """Runs `code` in the session `name`. Starts the session if it does not exist, and restarts it if it has ended."""
        self._reap(None)
        before = self.sessions.get(name)
        if before is None and len(self.sessions) == MAX_SESSIONS:
            raise Refused("refused", f"a sandbox has at most {MAX_SESSIONS} sessions, and has had {', '.join(self.sessions)}")
        try:
            session, program = self._begin_call(before, request, code)
        except OSError as error:
            fields, text = cannot_start(error)
            return {**fields, "restarted": False, "ended": True}, text
        self.sessions[name] = session
        fields, output = self._watch_program(program, session)
        return {**fields, "restarted": before is not None and session is not before, "ended": not session.alive}, output

    def _begin_call(self, session: Session | None, request: Request, code: bytes) -> tuple[Session, Program]:
        if session is not None and session.alive:
            pipes = Pipes()
            begun = session.begin(pipes)
            pipes.close_theirs()
            if begun:
                return session, Program(session.pid, pipes, request, code)
            pipes.close()
        if session is not None:
            session.control.close()
        child = self._take_child()
        return Session(child), Program(child.pid, child.pipes, request, work("session", code))

    def _watch_program(self, program: Program, reporter: Session | Launch | None) -> Answer:
        """Waits for a program to finish and returns the reply. `reporter` reports the status of a call in a session or of a launch."""
        program.feed()
        for fd in program.outputs:
            self.poll.register(fd, select.POLLIN)
        if program.stdin is not None:
            self.poll.register(program.stdin, select.POLLOUT)
        if reporter is not None:
            self.poll.register(reporter.control, select.POLLIN)
        try:
            while self._step(program, reporter):
                pass
        finally:
            for fd in [*program.outputs, *([program.stdin] if program.stdin is not None else [])]:
                self.poll.unregister(fd)
            if reporter is not None:
                with contextlib.suppress(KeyError):  # already unregistered after its report
                    self.poll.unregister(reporter.control)
            program.close()
        if program.timed_out or program.over_limit:  # all processes were killed, including the waiting child, and may take a while to end
            self._kill_all_and_wait()
        fields, output = program.reply()
        if program.never_started:
            reason = output[fields["stdout"] :].decode("utf-8", "replace").strip()
            raise Refused("failed", f"a program was not started: {reason or 'its process ended'}")
        return fields, output

    def _take_child(self) -> WaitingChild:
        """Returns the waiting child, or a new child if none waits, and records that no child waits."""
        self._reap(None)
        child, self.waiting = self.waiting or WaitingChild(self.users, self.likely), None
        return child

    def _prepare_child(self) -> None:
        """Forks the next program's process before it is needed. If the fork fails, the next call retries it."""
        if self.launcher is not None:
            child, self.launcher = self.launcher, None
            with contextlib.suppress(OSError):
                if child.reuse():
                    self.waiting = child
                else:
                    child.close()
        if self.waiting is None and self.paused_at is None:
            with contextlib.suppress(OSError):
                self.waiting = WaitingChild(self.users, self.likely)
                if not self.poll.poll(0):
                    self._rehearse()

    def _rehearse(self) -> None:
        """Performs a call without effect, so that the memory pages that this process shares with the waiting child are copied in
        advance."""
        pipes, poll = Pipes(), self.poll
        pipes.close_theirs()
        request: Request = json.loads('{"argv":["true"],"env":null,"timeout_s":1.0,"output_bytes":1000}')
        program = Program(0, pipes, request, work("exec", (request["argv"], request["env"])))
        program.end(0)
        try:
            self.poll = select.poll()  # requests of the host wait
            fields, output = self._watch_program(program, None)
        finally:
            self.poll = poll
        frame(fields, output)

    def _step(self, program: Program, reporter: Session | Launch | None) -> bool:
        """Waits for events of a program and handles them. Returns False when the program has ended and its output has been read."""
        now = time.monotonic()
        running = program.status is None
        if not running and (not program.outputs or now >= program.ended + _DRAIN_S):
            return False
        if running:
            self._check_limits(program, now)
        ready = self.poll.poll(self._wait_ms(program, now))
        for fd, _ in ready:
            if fd == self.link.fileno():
                self._interrupt(self.link.request(), program)
            elif fd == self.wake:
                self._reap(program)
            elif fd == program.stdin:
                program.feed()
                if program.stdin is None:
                    self.poll.unregister(fd)
            elif fd in program.outputs:
                if program.take(fd):
                    self.poll.unregister(fd)
            elif reporter is not None and fd == reporter.control.fileno():
                self.poll.unregister(fd)  # it reports once per call
                status = reporter.read_status()
                if status is not None:
                    program.end(status)
        # A program that has ended writes no more. Pipes that others hold open are read only while data is available.
        return running or any(fd in program.outputs for fd, _ in ready)

    def _check_limits(self, program: Program, now: float) -> None:
        """Kills a program at its deadline, or if the sandbox is over its limits. During a pause, regularly stops programs that are running
        again."""
        if not program.timed_out and self.paused_at is None and now >= program.deadline:
            program.timed_out = True
            kill_everything(signal.SIGKILL)
        if now >= program.check_at:
            program.check_at = now + CHECK_S
            if self.pause is not None:
                self.pause.look()
                return
            if self.watch.over_limit():
                program.over_limit = True
                kill_everything(signal.SIGKILL)
            program.check_at = max(program.check_at, time.monotonic() + self.watch.rest_s)

    def _wait_ms(self, program: Program, now: float) -> float | None:
        if program.status is not None:
            return 0
        if program.timed_out:
            return 100
        until = program.check_at if self.paused_at is not None else min(program.deadline, program.check_at)
        return 1.0 + 1000.0 * min(_LONGEST_WAIT_S, max(0.0, until - now))

    def _interrupt(self, request: Request, program: Program) -> None:
        """Handles a request that arrives while a program runs. `pause` also suspends the program's time limit."""
        if request["op"] not in ("pause", "resume"):
            Body(self.link, request["body"]).drain()
            self.link.send({"id": request["id"], "ok": False, "error": "busy", "message": "a program is running"})
            return
        before = self.paused_at
        self.answer(request)
        if self.pause is not None:
            program.check_at = min(program.check_at, time.monotonic() + CHECK_S)
        elif before is not None:
            program.deadline += time.monotonic() - before

    def _reap(self, program: Program | None) -> None:
        """Reaps all processes that have exited. All orphaned processes in the sandbox become children of process 1."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake, 4096)
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)
            except ChildProcessError:
                return
            if ended is None:
                return
            pid = ended.si_pid
            if program is not None and pid == program.pid:
                program.end(kernel_status(ended), self.users.is_servers(ended.si_uid))
            for session in self.sessions.values():
                session.alive = session.alive and session.pid != pid
            if self.waiting is not None and pid == self.waiting.pid:
                self.waiting.close()
                self.waiting = None

    def _kill_all_and_wait(self) -> None:
        """Kills all other processes and returns when they are gone. If a process does not exit in time, exits, which stops the sandbox."""
        kill_everything(signal.SIGKILL)
        deadline = time.monotonic() + _GONE_S
        while True:
            self._reap(None)
            try:
                os.kill(-1, 0)
            except ProcessLookupError:
                return
            if time.monotonic() > deadline:
                os._exit(1)
            time.sleep(0.001)

    # Pausing, and files -----------------------------------------------------------------------------------------------

    def _pause(self, request: Request, body: Body) -> Answer:
        if request["op"] == "pause" and self.paused_at is None:
            self.paused_at, self.pause = time.monotonic(), Pause()
        elif request["op"] == "resume" and self.paused_at is not None:
            kill_everything(signal.SIGCONT)
            self.paused_at = self.pause = None
        return {}, b""

    def _snapshot(self, request: Request, body: Body) -> Answer:
        if self.paused_at is None:
            kill_everything(signal.SIGSTOP)
        try:
            return send_snapshot(self.link, request, body)
        finally:
            if self.paused_at is None:
                kill_everything(signal.SIGCONT)


_ON_FILES = ("read", "write", "snapshot", "restore")
_OPERATIONS: dict[str, Callable[[Server, Request, Body], Answer]] = {
    "exec": Server._run,
    "python": Server._run,
    "pause": Server._pause,
    "resume": Server._pause,
    "snapshot": Server._snapshot,
    "read": lambda server, request, body: send_file(server.link, request, body),
    "write": lambda server, request, body: write_files(server.link, request, body),
    "restore": lambda server, request, body: restore_snapshot(server.link, request, body),
}


# Start ----------------------------------------------------------------------------------------------------------------


def _connect(address: str) -> socket.socket:
    kind, _, where = address.partition(":")
    if kind == "fd":
        return socket.socket(fileno=int(where))
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET if kind == "keep" else socket.SOCK_STREAM)
    sock.connect(where)
    return sock


def main() -> None:
    """Starts an exec server or a keeper."""
    sock = _connect(sys.argv[1])
    os.set_inheritable(sock.fileno(), False)
    if sys.argv[1].startswith("keep:"):
        Keeper(sock, serve).run()
    serve(json.loads(sys.argv[2]), sock)


def serve(options: Request, sock: socket.socket) -> None:
    """Turns this process, the first of its sandbox, into the exec server."""
    if os.geteuid() == 0:
        if "shown" in options:
            isolate_tree(options)
        set_bounds(options)
    users = become_server(options)
    restrict(options)
    if os.path.exists("/opt/agentrl/image.json"):  # the variables of the image (see `agentrl.sandbox.layout`)
        with open("/opt/agentrl/image.json", encoding="utf-8") as file:
            ENVIRONMENT.update(json.load(file)["environment"])
    if "network" in options:
        network = options["network"]
        listener = socket.create_server(("127.0.0.1", network["port"]), backlog=network["backlog"])
        with listener, _connect(network["link"]) as link:
            socket.send_fds(link, [b"\0"], [listener.fileno()])
        ENVIRONMENT.update(network["environment"])
    os.umask(0o022)
    reset_interpreter()

    gc.freeze()
    try:
        Server(Link(sock), users).run()
    except BaseException as error:  # the host sees the connection end; the reason goes to the sandbox's log
        sys.stderr.write(f"exec server: {error!r}\n")
        os._exit(1)


if __name__ == "__main__":
    main()
