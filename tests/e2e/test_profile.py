"""`agentrl profile` of a small run with a real server, learner and sandboxes."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from .conftest import agentrl

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.deepspeed, pytest.mark.bubblewrap]


@pytest.mark.usefixtures("nothing_left")
def test_a_profile_of_two_steps_adds_up_and_leaves_no_folder(forked: tuple[str, ...]) -> None:
    small = ("rollout.group.size=4", "rollout.groups_per_step=4", "rollout.concurrency=16")
    options = ("--sandbox", "bubblewrap", "--json")
    with tempfile.TemporaryDirectory(prefix="p-") as temporary:  # a short path: vLLM puts sockets there
        code, output = agentrl("profile", "recipes/quickstart.py", *small, *options, env={"TMPDIR": temporary}, by=forked)
        assert code == 0, output
        assert not list(Path(temporary).glob("agentrl-profile-*"))
    data = json.loads(output.splitlines()[-1])
    assert (data["first_step"], data["steps"]) == (2, 2) and data["wall_s"] > 0
    for table in (data["busy_at_once"], *data["parts"].values()):
        assert sum(table.values()) == pytest.approx(data["wall_s"], rel=0.02), "within 2%"
    assert sum(data["learner"].values()) == pytest.approx(data["wall_s"], rel=0.02, abs=0.5), (
        "its own clock starts and ends with its reports"
    )
    assert sum(data["cpu_s"].values()) == pytest.approx(data["cpus"] * data["wall_s"], rel=0.1)
    assert data["learner"]["computing a micro-batch"] > 0 and data["cpu_s"]["driver"] > 0
