"""The server's loop: one request answered at a time; while a program runs, only `pause` and `resume` are taken besides."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import time

from agentrl.sandbox.inside.bounds import LOOK_BETWEEN_S, LOOK_S, Watch
from agentrl.sandbox.inside.files import send_file, take_files
from agentrl.sandbox.inside.launch import Launch, launches
from agentrl.sandbox.inside.program import Program, cannot_start, kernel_status, kill_everything
from agentrl.sandbox.inside.requests import judge
from agentrl.sandbox.inside.session import MAX_SESSIONS, Session
from agentrl.sandbox.inside.snapshot import send_snapshot, take_snapshot
from agentrl.sandbox.inside.spawn import Pipes, Waiting, work
from agentrl.sandbox.inside.stillness import Stillness
from agentrl.sandbox.inside.wire import Body, Refused, frame

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agentrl.sandbox.inside.users import Users
    from agentrl.sandbox.inside.wire import Answer, Link, Request

DRAIN_S = 0.2
"""How long output is still read after a program has ended while something it left behind keeps the pipe open."""
GONE_S = 60.0
"""How long killed processes may take to end when they get little CPU time; then the server ends. The driver waits less."""
LONGEST_WAIT_S = 3600.0
"""`poll` counts milliseconds in 31 bits."""
EXHAUSTED = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EIO)


class Server:
    def __init__(self, link: Link, users: Users) -> None:
        self.link, self.users = link, users
        self.paused_at: float | None = None
        self.stillness: Stillness | None = None  # while paused
        self.waiting: Waiting | None = None
        self.through: Waiting | None = None  # has launched a program, which has ended
        self.likely = "python"
        self.sessions: dict[str, Session] = {}
        self.watch = Watch()
        self.wake, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored for process 1; Python's own handler would end it
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self.poll = select.poll()
        self.poll.register(link, select.POLLIN)
        self.poll.register(self.wake, select.POLLIN)

    def run(self) -> None:
        self.link.send({"id": 0, "ok": True, "version": 1})
        left = False
        while True:
            ready = self.poll.poll(1000 * max(LOOK_BETWEEN_S, self.watch.rest_s) if left else None)
            if not ready and self.stillness is not None:
                self.stillness.look()
            elif not ready and self.watch.overdrawn():
                kill_everything(signal.SIGKILL)
                self.await_gone()
            for fd, _ in ready:
                if fd == self.link.fileno():
                    self.answer(self.link.request())
                    self.have_a_child_wait()
                elif fd == self.wake:
                    self.reap(None)
            left = self.watch.somebody_is_left(self.waiting.pid if self.waiting is not None else 0)

    def answer(self, request: Request) -> None:
        body = Body(self.link, request["body"])
        try:
            judge(request)
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
        except Exception as error:  # want of memory, or a fault of ours: this call has failed, the server goes on
            reply, data = {"id": request["id"], "ok": False, "error": "failed", "message": repr(error)[:500]}, b""
        body.drain()
        self.link.send(reply, data)

    # Programs ------------------------------------------------------------------------------------------------------

    def exec(self, request: Request, body: Body) -> Answer:
        stdin = body.read(body.left)
        return self.run_program(request, work("exec", (request["argv"], request["env"]), bool(stdin)), stdin)

    def python(self, request: Request, body: Body) -> Answer:
        code = body.read(body.left)
        name = request["session"]
        return self.run_program(request, work("python", code)) if name is None else self.run_in_session(name, request, code)

    def run_program(self, request: Request, *data: bytes) -> Answer:
        self.likely = request["op"]  # the next one is as a rule of the same kind
        try:
            child = self.child()
        except OSError as error:
            return cannot_start(error)
        program = Program(child.pid, child.pipes, request, *data)
        if request["op"] == "exec" and launches(self.users):
            return self.see_launched(child, program)
        child.control.close()
        return self.watched(program, None)

    def see_launched(self, child: Waiting, program: Program) -> Answer:
        """Sees a program to its end that `child` launches, or becomes."""
        launch = Launch(child)
        answer = self.watched(program, launch)
        if launch.through() is not None:
            self.through = child
            return answer
        child.control.close()
        if launch.said is None:  # killed, so that nobody heard of the program's end
            kill_everything(signal.SIGKILL)
            self.await_gone()
        return answer

    def run_in_session(self, name: str, request: Request, code: bytes) -> Answer:
        """Runs `code` in the session `name`, which is started, or started anew, where it does not live."""
        self.reap(None)
        before = self.sessions.get(name)
        if before is None and len(self.sessions) == MAX_SESSIONS:
            raise Refused("refused", f"a sandbox has at most {MAX_SESSIONS} sessions, and has had {', '.join(self.sessions)}")
        try:
            session, program = self.begin_call(before, request, code)
        except OSError as error:
            fields, text = cannot_start(error)
            return {**fields, "restarted": False, "ended": True}, text
        self.sessions[name] = session
        fields, output = self.watched(program, session)
        return {**fields, "restarted": before is not None and session is not before, "ended": not session.alive}, output

    def begin_call(self, session: Session | None, request: Request, code: bytes) -> tuple[Session, Program]:
        if session is not None and session.alive:
            pipes = Pipes()
            begun = session.begin(pipes)
            pipes.handed_over()
            if begun:
                return session, Program(session.pid, pipes, request, code)
            pipes.close()
        if session is not None:
            session.control.close()
        child = self.child()
        return Session(child), Program(child.pid, child.pipes, request, work("session", code))

    def watched(self, program: Program, teller: Session | Launch | None) -> Answer:
        """Sees a program to its end, or what `teller` tells the end of: a call in a session, or a program launched."""
        program.feed()
        for fd in program.outputs:
            self.poll.register(fd, select.POLLIN)
        if program.stdin is not None:
            self.poll.register(program.stdin, select.POLLOUT)
        if teller is not None:
            self.poll.register(teller.control, select.POLLIN)
        try:
            while self.step(program, teller):
                pass
        finally:
            for fd in [*program.outputs, *([program.stdin] if program.stdin is not None else [])]:
                self.poll.unregister(fd)
            if teller is not None:
                with contextlib.suppress(KeyError):  # it has said what it had to say
                    self.poll.unregister(teller.control)
            program.close()
        if program.timed_out or program.overdrawn:  # everything is killed, the waiting child too, and may take a while to die
            kill_everything(signal.SIGKILL)
            self.await_gone()
        fields, output = program.reply()
        if program.never_began:
            said = output[fields["stdout"] :].decode("utf-8", "replace").strip()
            raise Refused("failed", f"a program was not started: {said or 'its process ended'}")
        return fields, output

    def child(self) -> Waiting:
        """The waiting child, which is no longer waiting then, or a new one."""
        self.reap(None)
        child, self.waiting = self.waiting or Waiting(self.users, self.likely), None
        return child

    def have_a_child_wait(self) -> None:
        """Forks the next program's process ahead of need; without room for one it is forked, or refused, when it is needed."""
        if self.through is not None:
            child, self.through = self.through, None
            with contextlib.suppress(OSError):
                if child.again():
                    self.waiting = child
                else:
                    child.close()
        if self.waiting is None and self.paused_at is None:
            with contextlib.suppress(OSError):
                self.waiting = Waiting(self.users, self.likely)
                if not self.poll.poll(0):
                    self.rehearse_a_call()

    def rehearse_a_call(self) -> None:
        """Goes through the motions of a call, as the child does of its work: the pages written to are then no longer shared with it."""
        pipes, poll = Pipes(), self.poll
        pipes.handed_over()
        request: Request = json.loads('{"argv":["true"],"env":null,"timeout_s":1.0,"output_bytes":1000}')
        program = Program(0, pipes, request, work("exec", (request["argv"], request["env"])))
        program.end(0)
        try:
            self.poll = select.poll()  # what comes from the host waits
            fields, output = self.watched(program, None)
        finally:
            self.poll = poll
        frame(fields, output)

    def step(self, program: Program, teller: Session | Launch | None) -> bool:
        """Waits for one thing to happen to the program; False when it is over and its output read."""
        now = time.monotonic()
        running = program.status is None
        if not running and (not program.outputs or now >= program.ended + DRAIN_S):
            return False
        if running and not program.timed_out and self.paused_at is None and now >= program.deadline:
            program.timed_out = True
            kill_everything(signal.SIGKILL)
        if running and now >= program.look_at:
            program.look_at = now + LOOK_S
            if self.stillness is not None:
                self.stillness.look()
            elif self.watch.overdrawn():
                program.overdrawn = True
                kill_everything(signal.SIGKILL)
            program.look_at = max(program.look_at, time.monotonic() + self.watch.rest_s)
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
            elif fd in program.outputs:
                if program.take(fd):
                    self.poll.unregister(fd)
            elif teller is not None and fd == teller.control.fileno():
                self.poll.unregister(fd)  # it has one thing to say in a call
                said = teller.through()
                if said is not None:
                    program.end(said)
        # A program that has ended has written all it will; what others hold open is only read while data is there at once.
        return running or any(fd in program.outputs for fd, _ in ready)

    def wait_ms(self, program: Program, now: float) -> float | None:
        if program.status is not None:
            return 0
        if program.timed_out:
            return 100
        until = program.look_at if self.paused_at is not None else min(program.deadline, program.look_at)
        return 1.0 + 1000.0 * min(LONGEST_WAIT_S, max(0.0, until - now))

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
            self.stillness = Stillness()
        return {}, b""

    def resume(self, request: Request, body: Body) -> Answer:
        if self.paused_at is not None:
            kill_everything(signal.SIGCONT)
            self.paused_at = self.stillness = None
        return {}, b""

    # Files ---------------------------------------------------------------------------------------------------------

    def read(self, request: Request, body: Body) -> Answer:
        return send_file(self.link, request, body)

    def write(self, request: Request, body: Body) -> Answer:
        return take_files(self.link, request, body)

    def snapshot(self, request: Request, body: Body) -> Answer:
        if self.paused_at is None:
            kill_everything(signal.SIGSTOP)
        try:
            return send_snapshot(self.link, request, body)
        finally:
            if self.paused_at is None:
                kill_everything(signal.SIGCONT)

    def restore(self, request: Request, body: Body) -> Answer:
        return take_snapshot(self.link, request, body)


ON_FILES = ("read", "write", "snapshot", "restore")
OPERATIONS = {name: getattr(Server, name) for name in ("exec", "python", "pause", "resume", *ON_FILES)}
