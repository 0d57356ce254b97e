"""A training run continues no matter what the policy generates: every episode is scored, without a fault."""

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
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    count = STEPS * GROUPS_PER_STEP
    assert count * (GROUP_SIZE - 1) >= len(SCRIPTS), "every script ran"
    store = SqliteStore(run / "experience.sqlite")
    try:
        groups = store.groups(range(count))
    finally:
        store.close()
    unscored = {}
    for group in groups:
        for scored in group.episodes:
            name, turns = script_of(scored.episode.id)
            if scored.score.value is None:
                unscored[name] = scored.score.reason
            elif turns[-1] == RIGHT[-1]:
                assert scored.score.value == 1.0, (name, scored.score.evidence, scored.episode.trajectories[0].turns[-2:])
    assert unscored == {}
    result = summary(run)
    assert result["finished"] and (result["steps"], result["weight_swaps"], result["episodes_left_out"]) == (STEPS, STEPS, 0)
    assert result["tokens_trained"] > 0
