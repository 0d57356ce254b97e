"""ENV and WORKDIR of a Dockerfile in a sandbox, without a daemon."""

from __future__ import annotations

import pytest

from agentrl.sandbox import layout
from agentrl.sandbox.inside.users import ENVIRONMENT

OURS = ENVIRONMENT["PATH"]


def test_variables_reach_programs_except_reserved_ones() -> None:
    declared = ["MODE=a=b", "EMPTY=", "LANG=de_DE.UTF-8", "HOME=/root", "USER=root", "LD_PRELOAD=/app/x.so", "BASH_ENV=/app/x", "nothing"]
    assert layout.environment(declared, "/app") == {"MODE": "a=b", "EMPTY": "", "LANG": "de_DE.UTF-8"}
    for many in ([f"V{number}=" for number in range(129)], [f"V={'x' * 17_000}"]):
        with pytest.raises(ValueError, match="128 variables or 16384 characters"):
            layout.environment(many, "/app")


@pytest.mark.parametrize(
    ("declared", "path"),
    [
        ("/opt/conda/bin:/usr/bin", f"/opt/conda/bin:/usr/bin:{OURS.replace('/usr/bin:', '')}"),
        ("/app/.venv/bin:/app/../app/x:/home/agent/bin:/tmp/bin:bin::.", OURS),
        ("/application/bin", f"/application/bin:{OURS}"),
    ],
)
def test_path_excludes_folders_that_an_agent_can_write_to(declared: str, path: str) -> None:
    assert layout.environment([f"PATH={declared}"], "/app") == {"PATH": path}


def test_system_folders_cannot_be_the_working_directory() -> None:
    assert [layout.working_directory(declared) for declared in ("", "/", "/app", "/app/", "/root", "/home/agent", "/usr/src/app")] == [
        "/app",
        "/app",
        "/app",
        "/app",
        "/root",
        "/home/agent",
        "/usr/src/app",
    ]
    for declared in ("/usr", "/etc", "/tmp", "/tmp/x", "/home", "/home/agent/x", "/tests", "/opt/agentrl/x", "/dev/shm"):
        with pytest.raises(ValueError, match=f"WORKDIR {declared} cannot be"):
            layout.working_directory(declared)
