"""Starts, stops and looks at the local Docker daemon, for set-up: `python -m agentrl.sandbox.daemon start|stop|status`.

The library itself never starts a daemon: a run that finds none says so. Where systemd runs, the distribution's service is
started; elsewhere (containers, small virtual machines) `dockerd` is started here in its own process session, without
iptables rules and bridges, because sandboxes have no network. `stop` only stops a daemon that `start` started.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import SandboxError, SandboxUnavailable
from agentrl.sandbox import docker_client

STATE = Path("/var/run/agentrl-docker")
POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonStatus:
    """Whether a daemon answers, and whether it is one that `start` started: `DaemonStatus(answers=True, pid=4711, log="...")`."""

    answers: bool
    pid: int | None  # of the daemon started by `start`, None when someone else started it
    log: str  # path of that daemon's log


def status() -> DaemonStatus:
    """What is running now; starts nothing."""
    return DaemonStatus(answers=docker_client.daemon_answers(), pid=_own_pid(), log=str(_log()))


def start(*, timeout_s: float = 60.0) -> DaemonStatus:
    """Makes sure a daemon answers. Raises `SandboxUnavailable` (what to install or run) or `SandboxError` (it does not come up)."""
    if docker_client.daemon_answers():
        return status()
    if shutil.which("dockerd") is None:
        raise SandboxUnavailable("dockerd is not installed", fix="apt-get install docker.io crun  (as root)")
    if os.geteuid() != 0:
        raise SandboxUnavailable(
            "no Docker daemon answers, and only root can start one", fix=f"sudo {sys.executable} -m agentrl.sandbox.daemon start"
        )
    if Path("/run/systemd/system").exists():
        subprocess.run(["systemctl", "start", "docker"], check=False, timeout=timeout_s)
        return _await_ready(None, timeout_s)
    return _await_ready(_spawn(), timeout_s)


def stop(*, timeout_s: float = 30.0) -> bool:
    """Stops the daemon that `start` started; False when there is none. Containers still open are ended with it."""
    pid = _own_pid()
    if pid is None:
        return False
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while _own_pid() is not None:
        if time.monotonic() > deadline:
            raise SandboxError(f"dockerd (pid {pid}) has not stopped after {timeout_s:.0f} s; see {_log()}")
        time.sleep(POLL_S)
    return True


def _spawn() -> subprocess.Popen[bytes]:
    STATE.mkdir(parents=True, exist_ok=True)
    with open(_log(), "ab") as log:
        return subprocess.Popen(
            _in_legacy_cgroup_view(_command()),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd="/",
        )


def _command() -> list[str]:
    command = [
        "dockerd",
        f"--host={docker_client.DEFAULT}",
        f"--pidfile={_pidfile()}",
        "--iptables=false",
        "--ip6tables=false",
        "--bridge=none",
        "--userland-proxy=false",
        "--log-driver=none",
        "--log-level=warn",
    ]
    crun = shutil.which("crun")
    if crun is not None:  # a third of runc's CPU time for each container
        command += [f"--add-runtime=crun={crun}", "--default-runtime=crun"]
    return command


def _in_legacy_cgroup_view(command: list[str]) -> list[str]:
    """Hides a half-used cgroup v2 tree from the daemon: crun refuses a "hybrid" layout whose v2 root owns controllers.

    The mount is taken away in a mount namespace of the daemon's own, so the machine keeps its layout.
    """
    controllers = Path("/sys/fs/cgroup/unified/cgroup.controllers")
    if not controllers.exists() or not controllers.read_text().split():
        return command
    script = 'umount /sys/fs/cgroup/unified && exec "$@"'
    return ["unshare", "--mount", "--propagation", "slave", "sh", "-c", script, "sh", *command]


def _await_ready(process: subprocess.Popen[bytes] | None, timeout_s: float) -> DaemonStatus:
    deadline = time.monotonic() + timeout_s
    while not docker_client.daemon_answers():
        if process is not None and process.poll() is not None:
            raise SandboxError(f"dockerd ended with status {process.returncode}:\n{_log_tail()}")
        if time.monotonic() > deadline:
            if process is not None:
                process.terminate()
            raise SandboxError(f"dockerd does not answer after {timeout_s:.0f} s:\n{_log_tail()}")
        time.sleep(POLL_S)
    return status()


def _own_pid() -> int | None:
    """Pid in our pid file when that process is alive and a dockerd, so that a reused pid is never signalled."""
    try:
        pid = int(_pidfile().read_text())
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, ValueError):
        return None
    return pid if name == "dockerd" and state != "Z" else None


def _pidfile() -> Path:
    return STATE / "dockerd.pid"


def _log() -> Path:
    return STATE / "dockerd.log"


def _log_tail(lines: int = 12) -> str:
    try:
        return "\n".join(_log().read_text(errors="replace").splitlines()[-lines:])
    except OSError as error:
        return f"(no log: {error})"


def main(argv: list[str] | None = None) -> int:
    """Command line: exits 0 when done (status: when a daemon answers), 1 when not, 2 when something must be installed or changed."""
    parser = argparse.ArgumentParser(prog="python -m agentrl.sandbox.daemon", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("action", choices=["start", "stop", "status"])
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS")
    arguments = parser.parse_args(argv)
    try:
        if arguments.action == "stop":
            print("stopped" if stop(timeout_s=arguments.timeout) else "no daemon of ours is running")
            return 0
        now = start(timeout_s=arguments.timeout) if arguments.action == "start" else status()
    except (SandboxUnavailable, SandboxError) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, SandboxUnavailable) else 1
    origin = f"pid {now.pid}, log {now.log}" if now.pid else "started elsewhere"
    print(f"docker daemon answers ({origin})" if now.answers else "no docker daemon answers")
    return 0 if now.answers else 1


if __name__ == "__main__":
    raise SystemExit(main())
