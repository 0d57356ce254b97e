from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.errors import TaskError
from agentrl.failure import Quarantine
from agentrl.failure.faults import count_quarantined
from agentrl.records import Blame, Episode, Failure, Group, Score, ScoredEpisode


def group(index: int, task: str, blame: Blame = Blame.TASK) -> Group:
    failure = Failure(stage="task", blame=blame, kind="TaskError", message=f"{task} has no tool\n  fix: name one")
    episode = Episode(id="e", task_id=task, task_key=f"key of {task}", trajectories=(), failures=(failure,))
    scored = ScoredEpisode(episode=episode, score=Score(value=None, reason="left out"))
    return Group(index=index, task_id=task, task_key=f"key of {task}", episodes=(scored,))


def test_a_broken_task_stays_quarantined_after_a_restart(tmp_path: Path) -> None:
    first = Quarantine(tmp_path)
    first.add(group(0, "good", Blame.INFRASTRUCTURE))
    first.add(group(1, "bad"))
    first.add(group(2, "bad"))
    assert (len(first), count_quarantined(tmp_path)) == (1, 1)
    with (tmp_path / "quarantine.jsonl").open("a") as file:
        file.write('{"task_id": "ba')  # the process died here
    reopened = Quarantine(tmp_path)
    fault = reopened.known_fault("key of bad")
    assert fault is not None and (fault.blame, fault.message) == (Blame.TASK, "bad has no tool\n  fix: name one")
    assert reopened.known_fault("key of good") is None and reopened.known_fault("key of bad, repaired") is None
    reopened.add(group(3, "worse"))
    assert count_quarantined(tmp_path) == 2 and count_quarantined(tmp_path / "none") == 0


def test_too_many_broken_tasks_stop_the_run_with_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.failure.faults.MAX_QUARANTINED", 2)
    tasks = Quarantine(tmp_path)
    tasks.add(group(0, "a"))
    tasks.add(group(1, "b"))
    with pytest.raises(TaskError, match=r"3 tasks are broken, but only 2 are allowed[^$]*a: a has no tool\n  b: b has no tool\n  c: c"):
        tasks.add(group(2, "c"))
    assert count_quarantined(tmp_path) == 3, "the third is recorded as well"
    Quarantine(tmp_path).add(group(3, "d"))


def test_rare_broken_tasks_never_stop_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.failure.faults.MAX_QUARANTINED", 2)
    monkeypatch.setattr("agentrl.failure.faults.QUARANTINE_GROUPS", 9)
    tasks = Quarantine(tmp_path)
    for index in range(100):  # every fifth group: two within nine
        tasks.add(group(index, f"t{index}", Blame.INFRASTRUCTURE if index % 5 else Blame.TASK))
    assert len(tasks) == 20
    with pytest.raises(TaskError, match="3 tasks are broken, but only 2 are allowed within 9 groups"):
        for index in range(100, 103):
            tasks.add(group(index, f"t{index}"))
