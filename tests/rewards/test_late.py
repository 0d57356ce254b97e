"""The verifier that waits for a late score, and the reviewer of the recipe that demonstrates it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agentrl.errors import TaskError
from agentrl.experience import SqliteStore
from agentrl.records import Episode, Group, PendingPart, ScoredEpisode, Split, Task
from agentrl.reward import TaskScorer
from recipes.late_scores import EXPIRES_S, PART, Reviewer
from rewards.late import Late, late
from tests.driving import make_task

EPISODE = Episode(id="g000000-0-a0", task_id="task-0", task_key="k", trajectories=(), answer="3")


def task_of(settings: Mapping[str, Any] | None = None) -> Task:
    return replace(make_task(0), data={"answer": "3"} | ({} if settings is None else {"late": dict(settings)}))


async def test_the_settings_of_a_task_determine_the_part() -> None:
    assert (await late(task_of(), EPISODE)).pending == (PendingPart(name="human"),)
    started_at = time.time()
    (part,) = (await late(task_of({"part": "review", "low": 1, "high": 5, "expires_s": 60}), EPISODE)).pending
    assert (part.name, part.low, part.high) == ("review", 1.0, 5.0) and started_at + 60 <= (part.expires_at or 0.0) <= time.time() + 60
    scorer = TaskScorer()
    for verifier in (late, Late(residual=True)):
        scorer._verifiers.update(one=verifier, two=late)
        assert scorer.residual == (("one",) if verifier is not late else ())
        assert [part.residual for part in (await verifier(task_of(), EPISODE)).pending] == [verifier is not late]
    with pytest.raises(TaskError, match="low < high is required"):
        await late(task_of({"low": 1}), EPISODE)
    with pytest.raises(ValidationError):
        Late(expires_s=1e9)


async def test_the_reviewer_sends_its_scores_also_after_a_restart(tmp_path: Path) -> None:
    reviewer = Reviewer(delay_s=(0.0, 0.05))
    assert (await reviewer(task_of(), EPISODE)).value == 1.0, "without a run, scores are not late"
    reviewer.prepare(root=tmp_path, folder=tmp_path)
    heldout = replace(task_of(), split=Split.HELDOUT)
    assert (await reviewer(heldout, EPISODE)).value == 1.0
    score = await reviewer(task_of(), EPISODE)
    assert score.value is None and [part.name for part in score.pending] == [PART]
    assert 0 < (score.pending[0].expires_at or 0.0) - time.time() <= EXPIRES_S
    Reviewer(delay_s=(0.0, 0.05)).prepare(root=tmp_path, folder=tmp_path)  # a resumed run
    store = SqliteStore(tmp_path / "experience.sqlite")
    store.put(Group(index=0, task_id="task-0", task_key="k", episodes=(ScoredEpisode(episode=EPISODE, score=score),)))
    async with asyncio.timeout(60.0):
        while store.parked():
            await asyncio.sleep(0.02)
    assert [scored.score.value for scored in store.groups([0])[0].episodes] == [1.0]
    store.close()
