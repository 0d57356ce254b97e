"""Episodes of a running loop that people and programs score over HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.records import Episode, PendingPart, Score, Task
from agentrl.run import loop
from agentrl.testing import ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from tests.driving import Family, Journaled, make_recipe, opened
from tests.late import opened_store
from tests.session.test_score_server import served

pytestmark = pytest.mark.slow


async def score_late(task: Task, episode: Episode) -> Score:
    """The groups of two tasks wait for a person."""
    if task.id in ("task-0", "task-2"):
        return Score(value=None, pending=(PendingPart(name="human"),))
    return Score(value=float(episode.id.endswith("-0-a0")))


async def test_a_live_run_shows_its_parked_episodes_and_trains_them_when_they_are_scored(tmp_path: Path) -> None:
    recipe = make_recipe(group={"size": 2}, groups_per_step=2).but({"steps": 2, "max_staleness": 1, "learner.keep_versions": 3})
    sandboxes = ScriptedSandboxes(printing("3"))
    async with opened(tmp_path, Journaled(tmp_path / "journal.jsonl"), sandboxes, recipe, Family(), scorer=score_late) as run:
        await loop._roll_out(run)
        assert transcripts(tmp_path) == ["000000.json", "000002.json"]
        assert run.order.select(0, run.store.store.entries()) == (1, 3), "the step does not wait for people"
        with opened_store(tmp_path) as other_process:
            async with served(tmp_path, other_process) as client:
                pending = (await client.get("/pending")).json()["pending"]
                of_first = [item for item in pending if item["group"] == 0]
                others = [item["episode_id"] for item in pending if item["group"] != 0]
                page = (await client.post("/episode", json={"skipped": others})).text
                assert "task-0" in page and run.group_tasks.task(0).prompt[-1].content in page and "submit" in page
                scores = [{**{name: item[name] for name in ("episode_id", "part")}, "value": item["attempt"]} for item in of_first]
                assert (await client.post("/scores", json={"scores": scores})).json()["results"][1]["remaining"] == 0
        await run.late.update()
        assert run.order.select(0, run.store.store.entries()) == (0, 1)
        assert transcripts(tmp_path) == ["000002.json"]


def transcripts(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "pending").iterdir())
