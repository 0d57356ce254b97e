"""The command that starts and stops the Docker daemon: every failure is an error that says what to do."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from agentrl.errors import SandboxError
from agentrl.sandbox import daemon


@pytest.fixture
def absent(tmp_path, monkeypatch):
    """No daemon listens, and none was started."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    monkeypatch.setattr(daemon, "_PIDFILE", tmp_path / "dockerd.pid")


def test_status_without_a_daemon(absent, capsys):
    assert daemon.main(["status"]) == 1 and capsys.readouterr().out == "no Docker daemon answers\n"
    assert daemon.main(["stop"]) == 0


@pytest.mark.parametrize("action", ["start", "status"])
def test_remote_daemon_is_a_typed_error(absent, action, monkeypatch, capsys):
    monkeypatch.setenv("DOCKER_HOST", "tcp://192.0.2.1:2375")
    assert daemon.main([action]) == 2 and "fix: unset DOCKER_HOST" in capsys.readouterr().err


def test_stopping_without_rights_names_the_command(absent, monkeypatch, capsys):
    def refuse(pid, number):
        raise PermissionError

    monkeypatch.setattr(daemon, "_own_pid", lambda: 4711)
    monkeypatch.setattr(os, "kill", refuse)
    assert daemon.main(["stop"]) == 2
    assert "fix: sudo " in capsys.readouterr().err


def test_pid_of_another_program_is_not_the_daemon(absent):
    daemon._PIDFILE.write_text(str(os.getpid()))
    assert daemon._own_pid() is None


@pytest.mark.parametrize("is_own", [True, False])
def test_another_docker_daemon_with_the_recorded_pid_is_not_stopped(absent, is_own, tmp_path):
    (tmp_path / "dockerd").write_text("#!/bin/sh\nread line\n")
    (tmp_path / "dockerd").chmod(0o755)
    file = daemon._PIDFILE if is_own else tmp_path / "docker.pid"
    with subprocess.Popen([tmp_path / "dockerd", f"--pidfile={file}"], stdin=subprocess.PIPE) as process:
        daemon._PIDFILE.write_text(str(process.pid))
        while Path(f"/proc/{process.pid}/comm").read_text() != "dockerd\n":
            time.sleep(0.01)
        assert daemon._own_pid() == (process.pid if is_own else None)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert daemon._own_pid() is None, "a zombie has ended"


def test_service_that_does_not_start_in_time(absent, tmp_path, monkeypatch):
    for name in ("systemctl", "dockerd"):
        (tmp_path / name).write_text("#!/bin/sh\nexec sleep 30\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(daemon, "_SYSTEMD", tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(SandboxError, match=r"dockerd did not answer within 0 s; see `journalctl -u docker`"):
        daemon.start(timeout_s=0.2)
