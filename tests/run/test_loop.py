"""Rollouts of the real loop across a death of the driver, and with broken tasks."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zstandard

from agentrl.cli.running import load_recipe
from agentrl.errors import TaskError
from agentrl.experience import SqliteStore
from agentrl.failure.faults import count_quarantined
from agentrl.learner import LearnerProcess
from agentrl.objective import assemble
from agentrl.records import Blame, EpisodeState, Failure, Group, Limits, SwapReport, Task, codec
from agentrl.rollout import excluded_group
from agentrl.run import loop
from agentrl.session import measure, opening
from agentrl.session.folder import RunStart
from agentrl.session.preflight import run_preflight
from agentrl.testing import ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from tests.driving import ROOT, Family, Journaled, make_recipe, make_task, opened
from tests.ledgers import indices


def start(run: Path, backend: str, stall: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.driving", str(run), backend, str(stall)]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, stderr=subprocess.PIPE)


def kill_when(process: subprocess.Popen[str], ready: Any, *, timeout_s: float = 400.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=120)


def finish(run: Path, backend: str) -> tuple[Group, ...]:
    process = start(run, backend, -1)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    store = SqliteStore(run / "experience.sqlite")
    groups = store.groups(indices(store))
    store.close()
    return groups


def journal(run: Path) -> list[dict[str, Any]]:
    path = run / "journal.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")] if path.exists() else []


def stored_turns(run: Path) -> list[int]:
    """Returns the finished turns of every episode with a checkpoint. Files are replaced atomically, so reading needs no lock."""
    bodies = [path.read_bytes() for path in (run / "running").glob("*/*.state")]
    return [codec.from_json(EpisodeState, zstandard.ZstdDecompressor().decompress(body)).turn_count for body in bodies]


BACKENDS = [
    pytest.param("scripted", marks=pytest.mark.slow),
    pytest.param("bubblewrap", marks=[pytest.mark.bubblewrap, pytest.mark.slow]),
    pytest.param("docker", marks=[pytest.mark.docker, pytest.mark.slow]),
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_killed_driver_loses_no_finished_turn(tmp_path: Path, backend: str) -> None:
    """The driver is killed when each episode waits for its third turn, with two notes in its sandbox. The notes, their order and all tokens
    are unchanged, although the process, its sandboxes and all memory were lost."""
    first = start(tmp_path, backend, 2)
    kill_when(first, lambda: stored_turns(tmp_path) == [2] * 6)
    before = {line["request"]: line for line in journal(tmp_path) if "request" in line}

    groups = finish(tmp_path, backend)
    requests = Counter(line["request"] for line in journal(tmp_path) if "request" in line)
    assert len(groups) == 2 and len(requests) == 2 * 3 * 4 and set(requests.values()) == {1}, "no turn was sampled twice"
    if backend == "scripted":
        assert sum("ran" in line for line in journal(tmp_path)) == 2 * 3 * 3, "no tool call was repeated"
    for episode in (scored.episode for group in groups for scored in group.scored):
        (trajectory,) = episode.trajectories
        assert (len(trajectory.turns), trajectory.inherited, episode.answer, episode.attempt) == (4, (), "done", 0)
        for number, turn in enumerate(trajectory.turns[:2]):
            sampled = before[f"{episode.id}-{number}"]
            assert (list(turn.completion_ids), list(turn.logprobs)) == (sampled["ids"], sampled["logprobs"])
        if backend != "scripted":
            notes = [turn.tool_results[0].output for turn in trajectory.turns[:2]]
            assert trajectory.turns[2].tool_results[0].output.split() == notes, "each program ran once, and its file is there"
    assert list((tmp_path / "running").iterdir()) == [], "stored groups have no checkpoints"


@pytest.mark.slow
def test_a_driver_killed_at_any_moment_resumes_to_complete_episodes(tmp_path: Path) -> None:
    """The driver is killed repeatedly. Every stored turn was sampled once under its episode's name."""
    for answers in (1, 5, 9, 14, 19):
        kill_when(start(tmp_path, "scripted", -1), lambda answers=answers: len(journal(tmp_path)) >= answers)  # type: ignore[misc]
    groups = finish(tmp_path, "scripted")
    sampled: dict[tuple[int, ...], str] = {tuple(line["ids"]): line["request"] for line in journal(tmp_path) if "request" in line}
    episodes = [scored.episode for group in groups for scored in group.scored]
    assert len(episodes) == 6
    for episode in episodes:
        names = [sampled[turn.completion_ids] for turn in episode.trajectories[0].turns]
        assert names == [f"{episode.id}-{number}" for number in range(4)]
    assert list((tmp_path / "running").iterdir()) == []


@pytest.mark.slow
def test_a_damaged_state_costs_its_episode_and_no_other(tmp_path: Path) -> None:
    first = start(tmp_path, "scripted", 2)
    kill_when(first, lambda: stored_turns(tmp_path) == [2] * 6)
    damaged = tmp_path / "running" / "000001" / "2.state"
    damaged.write_bytes(damaged.read_bytes()[:100])
    groups = finish(tmp_path, "scripted")
    requests = Counter(line["request"] for line in journal(tmp_path) if "request" in line)
    assert {name for name, times in requests.items() if times > 1} == {"g000001-2-a0-0", "g000001-2-a0-1"}
    assert [len(group.scored) for group in groups] == [3, 3]
    assert [path.name for path in (tmp_path / "running").iterdir()] == ["damaged-000001-2.state"]


async def test_without_checkpoints_no_state_is_stored(tmp_path: Path) -> None:
    recipe, policy = make_recipe(checkpoint_turns=False), Journaled(tmp_path / "journal.jsonl")
    async with opened(tmp_path, policy, ScriptedSandboxes(printing("3")), recipe, Family()) as run:
        await loop._roll_out(run)
        assert indices(run.store.store) == (0, 1)
    assert not (tmp_path / "running").exists()


def broken(index: int) -> Task | None:
    """Tasks 1 and 3 are the same broken task, and task 2 cannot be created."""
    if index == 2:
        raise TaskError("task 2 has no file", fix="write it")
    return replace(make_task(1), tools=("pyhton",)) if index in (1, 3) else None


async def test_broken_tasks_are_excluded_and_the_run_continues(tmp_path: Path) -> None:
    recipe, policy = make_recipe(groups_per_step=5, group={"size": 2}), Journaled(tmp_path / "journal.jsonl")
    async with opened(tmp_path, policy, ScriptedSandboxes(printing("3")), recipe, Family(broken)) as run:
        await loop._roll_out(run)
        groups = run.store.store.groups(range(5))
    (tmp_path / "update.json").write_text("{}")
    swap = SwapReport(version=1, stall_ms=1.0, total_ms=1.0, probe_max_abs_diff=0.0)
    assert measure.step_metrics(groups, tmp_path, swap, step=0, wall_s=1.0)["groups_quarantined"] == 3
    assert measure.summarize(tmp_path, recipe, {}, backend="scripted", interrupted=False).tasks_quarantined == 2
    faults = [None if group.fault is None else group.fault.blame for group in groups]
    assert faults == [None, Blame.TASK, Blame.TASK, Blame.TASK, None]
    assert [len(group.scored) for group in groups] == [2, 0, 0, 0, 2] and all(len(group.episodes) == 2 for group in groups)
    assert len(policy.prompts) == 4 * 4, "nothing is sampled for a broken task"
    assert count_quarantined(tmp_path) == 2
    quarantine = (tmp_path / "quarantine.jsonl").read_text()
    assert "unknown tool 'pyhton'" in quarantine and "fix: write it" in quarantine and '"task_id": "task-1"' in quarantine
    dropped = assemble(0, groups, recipe).drop_reasons
    assert {index: reason for index, reason in dropped.items() if index in (1, 2, 3)} == dict.fromkeys((1, 2, 3), "broken_task")


async def test_groups_with_equal_scores_get_extra_groups_that_a_resumed_run_does_not_repeat(tmp_path: Path) -> None:
    recipe, policy = make_recipe(groups_per_step=2, extra_groups=3, group={"size": 2}), Journaled(tmp_path / "journal.jsonl")
    for _ in range(2):
        async with opened(tmp_path, policy, ScriptedSandboxes(printing("3")), recipe, Family()) as run:
            await loop._roll_out(run)
            assert indices(run.store.store) == (0, 1, 2, 3, 4), "every attempt scores 1"
            tasks = [group.task_id for group in run.store.store.groups(range(5))]
            assert run.order.select(0, run.store.store.entries()) == tuple(range(5))
        assert tasks[:2] == ["task-0", "task-1"] and len(set(tasks)) == 5
        assert len(policy.prompts) == 4 * 10


async def test_cancelled_attempts_are_counted_and_leave_no_state(tmp_path: Path) -> None:
    """All scores are equal: of five attempts three start, two decide, and the third is cancelled or too late."""
    recipe, policy = make_recipe(group={"size": 4, "spare_attempts": 1, "stop_equal_after": 2}), Journaled(tmp_path / "journal.jsonl")
    for _ in range(2):
        async with opened(tmp_path, policy, ScriptedSandboxes(printing("3")), recipe, Family()) as run:
            await loop._roll_out(run)
            groups = run.store.store.groups(range(2))
            async with asyncio.timeout(20.0):
                while run.checkpoints.groups():  # a thread may still write an obsolete state
                    await asyncio.sleep(0.01)
    assert [(len(group.scored), len(group.episodes), len(group.cancelled)) for group in groups] == [(2, 2, 3)] * 2
    (tmp_path / "update.json").write_text("{}")
    metrics = measure.step_metrics(groups, tmp_path, None, step=0, wall_s=1.0)
    names = ("episodes", "episodes_left_out", "attempts_cancelled", "attempts_not_begun", "groups_stopped", "groups_without_signal")
    assert [metrics[name] for name in names] == [4, 0, 2, 4, 2, 2]
    assert not (tmp_path / "failures").exists() or not list((tmp_path / "failures").glob("*.jsonl"))


async def test_too_many_broken_tasks_stop_the_run_with_their_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.failure.faults.MAX_QUARANTINED", 2)
    family = Family(lambda index: replace(make_task(index), limits=Limits(episode_tokens=3)))
    recipe = make_recipe(groups_per_step=6)
    async with opened(tmp_path, Journaled(tmp_path / "j"), ScriptedSandboxes(printing("")), recipe, family) as run:
        with pytest.raises(ExceptionGroup) as error:
            await loop._roll_out(run)
        assert error.group_contains(TaskError, match=r"3 tasks are broken, but only 2 are allowed(.|\n)*task-\d: (.|\n)*--resume")
        for index in indices(run.store.store):
            assert run.store.store.groups([index])[0].fault is not None, "the result is stored"


async def test_a_run_stopped_in_its_last_evaluation_resumes_without_a_learner(tmp_path: Path) -> None:
    """The driver died after the last step, so there is nothing to wait for."""
    async with opened(tmp_path, Journaled(tmp_path / "j"), ScriptedSandboxes(printing("")), make_recipe(), Family()) as run:
        run.served = SimpleNamespace(version=run.recipe.steps)  # type: ignore[assignment]
        run.learner = LearnerProcess(tmp_path, run.recipe)
        await loop._learn(run, None)
        assert run.learner.returncode is None and not run.progress.learning


@pytest.mark.bubblewrap
async def test_a_resumed_run_keeps_checkpoints_of_running_groups_only(tmp_path: Path) -> None:
    """The driver died after storing group 0, before removing its checkpoints; group 1 was still running."""
    _, recipe = load_recipe(ROOT / "recipes" / "quickstart.py", ["rollout.checkpoint_turns=true", "rollout.group.branches=2"])
    recipe = recipe.model_copy(update={"sandbox": recipe.sandbox.model_copy(update={"backend": "bubblewrap"})})
    start = RunStart(recipe=ROOT / "recipes" / "quickstart.py", folder=tmp_path / "run", overrides=())
    checked = run_preflight(recipe, tmp_path, root=ROOT)
    for resume, remaining in ((False, ()), (True, (1,))):
        async with opening.open_run(recipe, start, checked, root=ROOT, console=False) as run:
            assert run.checkpoints.groups() == remaining
            assert run.groups.checkpoints is run.checkpoints and run.groups.branches == 2
            if not resume:
                group = excluded_group(0, "t", "k", Failure(stage="s", blame=Blame.TASK, kind="k", message=""), size=1)
                run.store.store.put(group)
                for index in (0, 1):
                    await run.checkpoints.save_scored(index, 0, group.episodes[0])
    plain = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"checkpoint_turns": False})})
    async with opening.open_run(plain, start, checked, root=ROOT, console=False) as run:
        assert run.groups.checkpoints is None
