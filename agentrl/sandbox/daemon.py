"""Starts, stops and checks the local Docker daemon, for set-up (`python -m agentrl.sandbox.daemon start|stop|status`).

The library never starts a daemon. If the machine has systemd, `start` starts the distribution's service. Otherwise (containers, small
virtual machines) `dockerd` runs in a new process session, without iptables rules and bridges, because sandboxes have no network. `stop`
stops only a `dockerd` that `start` started in a new process session.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from agentrl.base.files import tail_bytes
from agentrl.errors import SandboxError, SandboxUnavailable
from agentrl.sandbox import docker_client

_STATE = Path("/var/run/agentrl-docker")
_PIDFILE, _LOG = _STATE / "dockerd.pid", _STATE / "dockerd.log"
_SYSTEMD = Path("/run/systemd/system")  # exists if systemd started this machine
_POLL_S = 0.1
_TAIL_BYTES = 1500  # how much of the log an error quotes


def start(*, timeout_s: float) -> None:
    """Starts a daemon if none responds. Raises `SandboxUnavailable`, which says what to install or run, or `SandboxError` if the daemon
    exits or does not respond within `timeout_s`."""
    if docker_client.daemon_answers():
        return
    if shutil.which("dockerd") is None:
        raise SandboxUnavailable("dockerd is not installed", fix="apt-get install docker.io crun  (as root)")
    if os.geteuid() != 0:
        raise SandboxUnavailable(
            "no Docker daemon answers, and only root can start one", fix=f"sudo {sys.executable} -m agentrl.sandbox.daemon start"
        )
    process = None
    if _SYSTEMD.exists():
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(["systemctl", "start", "docker"], check=False, timeout=timeout_s)
    else:
        _STATE.mkdir(parents=True, exist_ok=True)
        with open(_LOG, "ab") as log:
            process = subprocess.Popen(
                _command(), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, cwd="/"
            )
    deadline = time.monotonic() + timeout_s
    while not docker_client.daemon_answers():
        if process is not None and process.poll() is not None:
            raise SandboxError(f"dockerd exited with status {process.returncode}:\n{tail_bytes(_LOG, most=_TAIL_BYTES)}")
        if time.monotonic() > deadline:
            if process is not None:
                process.terminate()
            hint = "see `journalctl -u docker`" if process is None else f"its log ends with:\n{tail_bytes(_LOG, most=_TAIL_BYTES)}"
            raise SandboxError(f"dockerd did not answer within {timeout_s:.0f} s; {hint}")
        time.sleep(_POLL_S)


def stop(*, timeout_s: float) -> bool:
    """Stops the daemon that `start` started, and its containers. Returns False if no such daemon is running. Raises `SandboxUnavailable` if
    this user may not stop the daemon, and `SandboxError` if it does not stop within `timeout_s`."""
    pid = _own_pid()
    if pid is None:
        return False
    try:
        os.kill(pid, signal.SIGTERM)
    except PermissionError:
        raise SandboxUnavailable(
            f"only root can stop dockerd (pid {pid})", fix=f"sudo {sys.executable} -m agentrl.sandbox.daemon stop"
        ) from None
    deadline = time.monotonic() + timeout_s
    while _own_pid() is not None:
        if time.monotonic() > deadline:
            raise SandboxError(f"dockerd (pid {pid}) did not stop within {timeout_s:.0f} s; see {_LOG}")
        time.sleep(_POLL_S)
    return True


def _command() -> list[str]:
    command = ["dockerd", f"--host={docker_client.DEFAULT}", f"--pidfile={_PIDFILE}", "--iptables=false", "--ip6tables=false"]
    command += ["--bridge=none", "--userland-proxy=false", "--log-driver=none", "--log-level=warn"]
    crun = shutil.which("crun")
    if crun is not None:  # uses a third of runc's CPU time for each container
        command += [f"--add-runtime=crun={crun}", "--default-runtime=crun"]
    controllers = Path("/sys/fs/cgroup/unified/cgroup.controllers")
    if controllers.exists() and controllers.read_text().split():
        # crun refuses a hybrid cgroup layout whose version 2 tree owns controllers. Hide that tree from the daemon only.
        script = 'umount /sys/fs/cgroup/unified && exec "$@"'
        return ["unshare", "--mount", "--propagation", "slave", "sh", "-c", script, "sh", *command]
    return command


def _own_pid() -> int | None:
    """Returns the pid of the daemon that `start` started, or None if that daemon is not running. Checks the process's arguments, because
    pids are reused, even by other Docker daemons."""
    try:
        pid = int(_PIDFILE.read_text())
        arguments = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")  # empty for a zombie
    except (OSError, ValueError):
        return None
    return pid if f"--pidfile={_PIDFILE}" in arguments else None


def main(argv: list[str] | None = None) -> int:
    """Runs the command-line interface. Returns the exit status.

    0 means success (for `status`: a daemon responds), 1 means failure, 2 means that something must be installed or changed.
    """
    parser = argparse.ArgumentParser(prog="python -m agentrl.sandbox.daemon", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("action", choices=["start", "stop", "status"])
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS")
    arguments = parser.parse_args(argv)
    try:
        if arguments.action == "stop":
            print("stopped" if stop(timeout_s=arguments.timeout) else "no daemon started by this command is running")
            return 0
        if arguments.action == "start":
            start(timeout_s=arguments.timeout)
        answers, pid = docker_client.daemon_answers(), _own_pid()
    except (SandboxUnavailable, SandboxError) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, SandboxUnavailable) else 1
    origin = f"pid {pid}, log {_LOG}" if pid else "started elsewhere"
    print(f"a Docker daemon answers ({origin})" if answers else "no Docker daemon answers")
    return 0 if answers else 1


if __name__ == "__main__":
    raise SystemExit(main())
