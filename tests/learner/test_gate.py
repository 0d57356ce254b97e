"""The learner rolls back when the gate requests it: with real checkpoints, and after a kill in the middle."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.config import Recipe
from agentrl.config.gate import GATE
from agentrl.experience import SqliteStore
from agentrl.experience.audit import verify
from agentrl.learner import LearnerProcess
from agentrl.learner.driver_reports import UpdateFailureLog
from agentrl.records import Group, VersionState
from agentrl.session.version_changes import request_rollback, set_pinned
from agentrl.version import FolderRegistry, rollback
from tests.learner import preloaded
from tests.learner.building import build_recipe, random_group, write_run
from tests.ledgers import consumed
from tests.waiting import until

MakeLearner = Callable[[Path, Recipe], LearnerProcess]


def gated_recipe(steps: int, *, gate: bool) -> Recipe:
    plain = build_recipe(learner={"warmup_steps": 3, "keep_checkpoints": 1}).but(steps=steps)
    return plain.but({"gate.suite": "evals/x", "gate.every": 1}) if gate else plain


async def learn(make_learner: MakeLearner, run_dir: Path, recipe: Recipe) -> None:
    learner = make_learner(run_dir, recipe)
    await learner.start()
    try:
        await learner.wait(timeout_s=600)
    finally:
        await learner.kill()


@pytest.mark.deepspeed
async def test_the_learner_rolls_back_on_request_even_after_a_crash(tmp_path: Path, host: Path, make_learner: MakeLearner) -> None:
    """The gate rejects version 2 while the learner waits for step 2. Step 2 then restores version 1, and step 3 continues from there,
    bitwise equal to a run without steps 1 and 2. The groups of step 2 were sampled by the rejected version, and stay consumed."""
    groups = [random_group(index) for index in range(12)]
    run_dir = tmp_path / "run"
    write_run(run_dir, gated_recipe(4, gate=True), groups[:6])
    registry, store = FolderRegistry(run_dir / "versions"), SqliteStore(run_dir / "experience.sqlite")
    registry.set_state(0, VersionState.PROMOTED)
    command = preloaded.command(host, 1, "tests.learner.crash", "publish-3", "--run-dir", str(run_dir))
    killed = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        await until(lambda: registry.get(2) is not None, patience_s=300)
        first, second = registry.get(1), registry.get(2)
        assert first is not None and second is not None
        registry.set_state(1, VersionState.PROMOTED)
        registry.set_evals(1, {GATE: 1.0})
        request = rollback.RollbackRequest(version=2, sha256=second.sha256, to=1, to_sha256=first.sha256, reason="case c03")
        rollback.request_rollback(run_dir / "versions", request)
        for group in groups[6:]:
            store.put(group)
        assert await asyncio.to_thread(killed.wait, 300) != 0
    finally:
        killed.kill()
    assert registry.get(3) is None and rollback.pending_request(run_dir / "versions", registry) == request, (
        "the request stays pending until version 3 exists"
    )
    await learn(make_learner, run_dir, gated_recipe(4, gate=True))

    calm = tmp_path / "calm"
    shifted = [Group(index=3 + n, task_id=old.task_id, task_key=old.task_key, episodes=old.episodes) for n, old in enumerate(groups[9:])]
    write_run(calm, gated_recipe(2, gate=False), [*groups[:3], *shifted])
    await learn(make_learner, calm, gated_recipe(2, gate=False))

    versions = registry.versions()
    assert [(version.number, version.parent) for version in versions] == [(0, None), (1, 0), (2, 1), (3, 1), (4, 3)]
    assert [version.number for version in versions if version.state is VersionState.ROLLED_BACK] == [2]
    assert versions[3].sha256 == versions[1].sha256 != versions[2].sha256
    assert versions[4].sha256 == FolderRegistry(calm / "versions").versions()[2].sha256
    assert rollback.pending_request(run_dir / "versions", registry) is None
    (setback,) = UpdateFailureLog(run_dir).read()
    assert (setback.step, setback.action, setback.what, setback.groups) == (2, "rollback", "gate", (6, 7, 8))
    assert setback.reasons == ("the gate rejected version 2: case c03",) and len(setback.episodes) == 12
    assert consumed(store) == {index: index // 3 for index in range(12)}
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir() if path.name.isdecimal()) == ["000001", "000003", "000004"]

    # A user rolls the stopped run back to version 1, without a gate, which no longer protects its checkpoint.
    set_pinned(run_dir, 1, pinned=True)
    assert request_rollback(run_dir, 1).undone == (3, 4)
    for index in (12, 13, 14):
        store.put(random_group(index))
    for n, old in enumerate(groups[9:]):
        store.put(Group(index=15 + n, task_id=old.task_id, task_key=old.task_key, episodes=old.episodes))
    (run_dir / "recipe.json").write_text(gated_recipe(6, gate=False).model_dump_json())
    await learn(make_learner, run_dir, gated_recipe(6, gate=False))
    fifth, sixth = registry.versions()[5:]
    assert (fifth.parent, fifth.sha256, sixth.parent, sixth.sha256) == (1, versions[1].sha256, 5, versions[4].sha256)
    assert [version.number for version in registry.versions() if version.state is VersionState.ROLLED_BACK] == [2, 3, 4]
    assert UpdateFailureLog(run_dir).read()[1].reasons == ("a user rejected version 4: agentrl versions rollback",)
    assert consumed(store) == {index: index // 3 for index in range(18)} and list(verify(run_dir, store)) == []
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir() if path.name.isdecimal()) == ["000001", "000006"]
    store.close()


@pytest.mark.deepspeed
async def test_no_step_replays_groups_of_a_rolled_back_step(tmp_path: Path, make_learner: MakeLearner) -> None:
    """Step 1 replays the groups of step 0. Step 2 restores version 1 and trains none of its groups, so step 3 replays none of them: its
    weights are bitwise equal to those of a run without step 1. Step 4 replays the groups of step 3."""
    groups = [random_group(index) for index in range(15)]
    run_dir, replaying = (
        tmp_path / "run",
        gated_recipe(2, gate=False).but({"order": "replay", "learner.keep_checkpoints": 9, "learner.keep_versions": 9}),
    )
    write_run(run_dir, replaying, groups[:6])
    await learn(make_learner, run_dir, replaying)
    assert request_rollback(run_dir, 1).undone == (2,)
    store = SqliteStore(run_dir / "experience.sqlite")
    for group in groups[6:]:
        store.put(group)
    longer = replaying.but(steps=5)
    (run_dir / "recipe.json").write_text(longer.model_dump_json())
    await learn(make_learner, run_dir, longer)

    calm, plain = tmp_path / "calm", gated_recipe(2, gate=False).but({"order": "oldest_first"})
    shifted = [Group(index=3 + n, task_id=old.task_id, task_key=old.task_key, episodes=old.episodes) for n, old in enumerate(groups[9:12])]
    write_run(calm, plain, [*groups[:3], *shifted])
    await learn(make_learner, calm, plain)

    versions = FolderRegistry(run_dir / "versions").versions()
    assert [version.parent for version in versions] == [None, 0, 1, 1, 3, 4] and versions[2].state is VersionState.ROLLED_BACK
    assert versions[3].sha256 == versions[1].sha256 and versions[4].sha256 == FolderRegistry(calm / "versions").versions()[2].sha256
    assert [update_metrics(run_dir, number).get("groups_replayed", 0) for number in (1, 2, 4, 5)] == [0, 3, 0, 3]
    assert consumed(store) == {index: index // 3 for index in range(15)} and list(verify(run_dir, store)) == []
    assert [entry.index for entry in store.entries() if entry.use is not None and entry.use.reason == "rolled_back"] == [6, 7, 8]
    store.close()


def update_metrics(run_dir: Path, number: int) -> dict[str, float]:
    metrics: dict[str, float] = json.loads((run_dir / "versions" / f"{number:06d}" / "update.json").read_text())
    return metrics
