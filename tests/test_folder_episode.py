"""A task folder end to end: a scripted agent runs in real sandboxes, and its outputs are graded in others."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.agent import ChatFormat, TurnLoop
from agentrl.records import Split
from agentrl.records.sampling import Sampling
from agentrl.reward import TaskScorer
from agentrl.rollout import EpisodeRunner, GroupRunner
from agentrl.sandbox import WarmPool, list_open, select_backend
from agentrl.sandbox.lease import lease
from agentrl.task import TaskFolders
from agentrl.testing import ScriptedPolicy, byte_tokenizer

ROOT = Path(__file__).resolve().parents[1]
BOTH = [pytest.param("docker", marks=pytest.mark.docker), pytest.param("bubblewrap", marks=pytest.mark.bubblewrap)]
SUBMIT = '<tool_call>\n{"name": "submit", "arguments": {"answer": "done"}}\n</tool_call>'


def act(code: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'python', 'arguments': {'code': code}})}\n</tool_call>"


@pytest.mark.parametrize("backend", BOTH)
async def test_a_group_of_good_bad_and_cheating_agents(backend: str) -> None:
    family = TaskFolders(ROOT / "sandboxes" / "chores", root=ROOT)
    tasks = [family.task(split, index) for split in Split for index in range(family.size(split) or 0)]
    (task,) = [task for task in tasks if task.id == "chores/mend-statistics"]
    programs = [
        family.gold(task),
        "print(open('statistics_lite.py').read())",
        "import os\nos.remove('statistics_lite.py')\nos.symlink('/etc/passwd', 'statistics_lite.py')",
        "open('statistics_lite.py', 'w').write('import os\\nprint(1)\\nos._exit(0)')\nos_fork = __import__('os').fork",
    ]
    tokenizer = byte_tokenizer()
    policy = ScriptedPolicy(tokenizer, lambda turn, name: act(programs[int(name.split("-")[1])]) if turn == 0 else SUBMIT)
    # A pool with fewer slots than episodes and gradings: they wait for each other and must not deadlock.
    sandboxes = WarmPool(select_backend(backend, run_label="test", root=ROOT), warm=1, max_open=2)
    runner = EpisodeRunner(
        policy=policy,
        sandboxes=sandboxes,
        agent=TurnLoop(chat=ChatFormat(tokenizer)),
        sampling=Sampling(),
        max_model_len=100_000,
        request_timeout_s=60.0,
    )
    groups = GroupRunner(
        runner=runner, scorer=TaskScorer(sandboxes=sandboxes), slots=asyncio.Semaphore(8), group_size=len(programs), max_retries=1
    )
    try:
        limits = replace(task.limits, turn_tokens=20_000, episode_tokens=90_000)
        group = await groups.run_group(0, replace(task, limits=limits))
    finally:
        await sandboxes.close()
    assert [scored.score.value for scored in group.episodes] == [1.0, 0.0, 0.0, 0.0], group.episodes
    assert [set(scored.episode.outputs) for scored in group.episodes] == [{"statistics_lite.py"}] * 2 + [set(), {"statistics_lite.py"}]
    assert [failure.kind for failure in group.episodes[2].episode.failures] == ["outputs_refused"]
    assert not any(scored.episode.left_out for scored in group.episodes)
    assert [sandbox for sandbox in list_open() if lease() in sandbox.name] == []
