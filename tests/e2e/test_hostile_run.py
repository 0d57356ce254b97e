"""A training run continues whatever the policy says: every episode is scored, without a fault."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.experience import SqliteStore
from agentrl.testing.hostile import RIGHT, SCRIPTS

from .conftest import ROOT, summary
from .hostile_run import GROUP_SIZE, GROUPS_PER_STEP, STEPS, script_of, write_project

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.deepspeed, pytest.mark.bubblewrap]


@pytest.mark.usefixtures("nothing_left")
def test_every_episode_of_a_hostile_policy_is_scored(tmp_path: Path, hosts: tuple[Path, Path], forked: tuple[str, ...]) -> None:
    write_project(tmp_path, ROOT / "sandboxes" / "tables" / "image.toml")
    run = tmp_path / "run"
    command = [sys.executable, "-m", "tests.e2e.hostile_run", *map(str, hosts), str(tmp_path), str(run), "bubblewrap"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    count = STEPS * GROUPS_PER_STEP
    assert count * (GROUP_SIZE - 1) >= len(SCRIPTS), "every script ran"
    store = SqliteStore(run / "experience.sqlite")
    try:
        groups = store.groups(range(count))
    finally:
        store.close()
    unscored = {}
    for group in groups:
        for one in group.episodes:
            name, turns = script_of(one.episode.id)
            if one.score.value is None:
                unscored[name] = one.score.reason
            elif turns[-1] == RIGHT[-1]:
                assert one.score.value == 1.0, (name, one.score.evidence, one.episode.trajectories[0].turns[-2:])
    assert unscored == {}
    found = summary(run)
    assert found["finished"] and (found["steps"], found["weight_swaps"], found["episodes_left_out"]) == (STEPS, STEPS, 0)
    assert found["tokens_trained"] > 0
