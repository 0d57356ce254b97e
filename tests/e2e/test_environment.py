"""A user's environment of a few lines trains with real servers, and a killed run continues its episodes without duplicates."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from agentrl.experience import SqliteStore

ROOT = Path(__file__).resolve().parents[2]
MODULE = """
import random
import time

from agentrl.environment import Environment


class Climb(Environment):
    actions = ("l", "h")

    def reset(self, seed):
        self.up, self.height, self.steps = random.Random(seed).choice(self.actions), 0, 0
        return "+0"

    def step(self, action):
        time.sleep(0.03)
        self.height += 1 if action == self.up else -1
        self.steps += 1
        return f"{self.height:+d}", float(action == self.up), False, self.steps == 12
"""
RECIPE = f"""
from agentrl.config import *

recipe = Recipe(
    name="climb",
    steps=3,
    policy=PolicyConfig(model={str(ROOT / "recipes/models/tables-base")!r}, dtype="float32", max_model_len=512),
    tasks=TasksConfig(family="mine:Climb"),
    rollout=RolloutConfig(group=GroupConfig(size=4), groups_per_step=2, concurrency=8, checkpoint_turns=True),
    evaluation=EvalConfig(heldout=0),
    serving=ServingConfig(max_num_seqs=8, kv_cache_gb=0.2, threads=1),
    objective=ObjectiveConfig(advantage="gae"),
    critic=CriticConfig(),
    learner=LearnerConfig(lr=1e-4, ranks=1, threads=1),
)
"""


def command(run: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "agentrl", "train", "recipe.py", "--run-dir", str(run), *arguments]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.deepspeed
@pytest.mark.e2e
def test_a_small_environment_trains_and_a_killed_run_continues_its_episodes(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "recipe.py").write_text(RECIPE)
    (tmp_path / "pyproject.toml").write_text("")
    run, running = tmp_path / "run", tmp_path / "run" / "running"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    options = {"cwd": tmp_path, "env": environment}
    first = subprocess.Popen(command(run), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options)  # type: ignore[call-overload]
    try:
        deadline = time.monotonic() + 600
        while not [path for path in running.rglob("*") if path.is_file()]:
            assert time.monotonic() < deadline and first.poll() is None, "no episode was saved"
            time.sleep(0.05)
        time.sleep(0.3)
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    saved = [path for path in running.rglob("*") if path.is_file()]
    resumed = subprocess.run(command(run, "--resume"), capture_output=True, text=True, timeout=900, check=False, **options)  # type: ignore[call-overload]
    assert resumed.returncode == 0, resumed.stdout[-2000:] + resumed.stderr[-4000:]
    assert saved and not [path for path in running.rglob("*") if path.is_file()]
    with closing(SqliteStore(run / "experience.sqlite")) as store:
        episodes = [scored for group in store.groups(range(6)) for scored in group.episodes]
    assert len({scored.episode.id for scored in episodes}) == len(episodes) == 24
    for scored in episodes:
        assert scored.episode.stop_reason == "truncated" and not scored.episode.failures
        (trajectory,) = scored.episode.trajectories
        rewards = [turn.tool_results[0].reward or 0.0 for turn in trajectory.turns]
        assert len(rewards) == 12 and sum(rewards) == scored.score.value
        assert trajectory.last_state[: len(trajectory.turns[0].prompt_ids)] == trajectory.turns[0].prompt_ids
