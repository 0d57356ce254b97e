"""What a Dockerfile says that holds in a sandbox, before any daemon is asked."""

from __future__ import annotations

import pytest

from agentrl.sandbox import layout
from agentrl.sandbox.inside.users import ENVIRONMENT

OURS = ENVIRONMENT["PATH"]


def test_variables_reach_programs_but_not_those_that_start_code_or_say_who_one_is() -> None:
    said = ["MODE=a=b", "EMPTY=", "LANG=de_DE.UTF-8", "HOME=/root", "USER=root", "LD_PRELOAD=/app/x.so", "BASH_ENV=/app/x", "nothing"]
    assert layout.environment(said, "/app") == {"MODE": "a=b", "EMPTY": "", "LANG": "de_DE.UTF-8"}
    for many in ([f"V{number}=" for number in range(129)], [f"V={'x' * 17_000}"]):
        with pytest.raises(ValueError, match="128 variables or 16384 characters"):
            layout.environment(many, "/app")


@pytest.mark.parametrize(
    ("said", "path"),
    [
        ("/opt/conda/bin:/usr/bin", f"/opt/conda/bin:/usr/bin:{OURS.replace('/usr/bin:', '')}"),
        ("/app/.venv/bin:/app/../app/x:/home/agent/bin:/tmp/bin:bin::.", OURS),
        ("/application/bin", f"/application/bin:{OURS}"),
    ],
)
def test_programs_are_not_looked_for_where_an_agent_can_write(said: str, path: str) -> None:
    assert layout.environment([f"PATH={said}"], "/app") == {"PATH": path}


def test_a_working_directory_is_one_that_can_be_moved() -> None:
    assert [layout.working_directory(said) for said in ("", "/", "/app", "/app/", "/root", "/home/agent", "/usr/src/app")] == [
        "/app",
        "/app",
        "/app",
        "/app",
        "/root",
        "/home/agent",
        "/usr/src/app",
    ]
    for said in ("/usr", "/etc", "/tmp", "/tmp/x", "/home", "/home/agent/x", "/tests", "/opt/agentrl/x", "/dev/shm"):
        with pytest.raises(ValueError, match=f"WORKDIR {said} cannot be"):
            layout.working_directory(said)
