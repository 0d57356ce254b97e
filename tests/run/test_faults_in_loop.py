"""Faults of single episodes, groups and tasks in the loop: the run continues, or pauses with a reason."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.errors import InfrastructureError, ServingError, StoreError
from agentrl.evaluation.splits import evaluate_split
from agentrl.experience import store
from agentrl.failure.faults import count_quarantined
from agentrl.records import Blame, Episode, Group, PolicyVersion, Score, Split, Task, codec
from agentrl.run import loop
from agentrl.testing import ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from tests.driving import AlwaysServed, Family, Journaled, make_recipe, opened, say
from tests.ledgers import indices


def raising_at(failing_index: int) -> Family:
    def broken(index: int) -> Task | None:
        if index == failing_index:
            raise KeyError("column 7")
        return None

    return Family(broken)


async def test_a_family_that_raises_for_one_task_costs_that_group(tmp_path: Path) -> None:
    recipe = make_recipe(groups_per_step=3, group={"size": 2})
    async with opened(tmp_path, Journaled(tmp_path / "j"), ScriptedSandboxes(printing("3")), recipe, raising_at(1)) as run:
        await loop._roll_out(run)
        groups = run.store.store.groups(range(3))
    assert [len(group.scored) for group in groups] == [2, 0, 2] and count_quarantined(tmp_path) == 1
    fault = groups[1].fault
    assert fault is not None and (fault.blame, fault.kind, "column 7" in fault.message) == (Blame.TASK, "KeyError", True)


async def test_a_family_that_raises_for_one_task_costs_an_evaluation_that_task(tmp_path: Path) -> None:
    async with opened(tmp_path, Journaled(tmp_path / "j"), ScriptedSandboxes(printing("3")), make_recipe(), raising_at(2)) as run:
        result = await evaluate_split(run.groups, run.family, Split.HELDOUT, 4, phase="before", step=0)
    assert (result.episodes, result.excluded, len(result.transcripts)) == (4, 1, 3) and result.rate is not None and result.rate.n == 3
    assert ["KeyError" in reason for reason in result.excluded_reasons] == [True]


@pytest.mark.parametrize(("returned", "message"), [({"id": "1"}, "is a dict, not a Task"), (SystemExit(0), "SystemExit: 0")])
async def test_a_family_without_a_task_costs_that_group_or_evaluated_task(tmp_path: Path, returned: Any, message: str) -> None:
    def broken(index: int) -> Any:
        if index == 1 and isinstance(returned, SystemExit):
            raise returned
        return returned if index == 1 else None

    recipe = make_recipe(groups_per_step=3, group={"size": 2})
    async with opened(tmp_path, Journaled(tmp_path / "j"), ScriptedSandboxes(printing("3")), recipe, Family(broken)) as run:
        await loop._roll_out(run)
        groups = run.store.store.groups(range(3))
        evaluation = await evaluate_split(run.groups, run.family, Split.HELDOUT, 3, phase="before", step=0)
    assert [len(group.scored) for group in groups] == [2, 0, 2] and count_quarantined(tmp_path) == 1
    fault = groups[1].fault
    assert fault is not None and fault.blame is Blame.TASK and message in fault.message
    assert (evaluation.episodes, evaluation.excluded) == (3, 1) and [message in reason for reason in evaluation.excluded_reasons] == [True]


async def test_a_group_that_cannot_be_serialized_is_excluded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No known record does this, but a fault of the encoder must not end the run."""

    async with opened(tmp_path, Journaled(tmp_path / "j"), ScriptedSandboxes(printing("3")), make_recipe(), Family()) as run:
        to_json = codec.to_json

        def encode(record: Any) -> bytes:
            if isinstance(record, Group) and record.index == 1 and record.scored:
                raise ValueError("circular reference")
            return to_json(record)

        monkeypatch.setattr(store.codec, "to_json", encode)
        await loop._roll_out(run)
        groups = run.store.store.groups(range(2))
    assert [len(group.scored) for group in groups] == [3, 0] and all(len(group.episodes) == 3 for group in groups)
    (failure,) = groups[1].episodes[0].episode.failures
    assert (failure.stage, failure.blame, failure.kind) == ("store", Blame.INFRASTRUCTURE, "ValueError")
    assert groups[1].fault is None and count_quarantined(tmp_path) == 0, "nothing is wrong with the task"


async def test_a_score_that_cannot_be_recorded_costs_its_episode(tmp_path: Path) -> None:
    async def score(task: Task, episode: Episode) -> Score:
        unserializable: Any = object()
        return Score(value=1.0, parts={"odd": unserializable} if episode.id.startswith("g000001-0") else {})

    async with opened(tmp_path, Journaled(tmp_path / "j"), ScriptedSandboxes(printing("3")), make_recipe(), Family()) as run:
        run.groups = replace(run.groups, scorer=score, max_retries=0)
        await loop._roll_out(run)
        groups = run.store.store.groups(range(2))
    assert [len(group.scored) for group in groups] == [3, 2]
    (failure,) = groups[1].episodes[0].episode.failures
    assert (failure.stage, failure.blame, failure.kind) == ("score", Blame.INFRASTRUCTURE, "ValueError")


async def test_a_full_disk_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path, Journaled(tmp_path / "j"), ScriptedSandboxes(printing("3")), make_recipe(), Family()) as run:

        def full(groups: object) -> bool:
            raise StoreError("the disk is full")

        monkeypatch.setattr(run.store.store, "put_all", full)
        with pytest.raises(ExceptionGroup) as error:
            await loop._roll_out(run)
    assert error.group_contains(StoreError)


class Registry:
    """A registry with only version 0."""

    def __init__(self) -> None:
        self.version = PolicyVersion(number=0, parent=None, folder="versions/000000", sha256="0")

    def latest(self, *states: object) -> PolicyVersion:
        return self.version

    def get(self, number: int) -> PolicyVersion | None:
        return self.version if number == 0 else None

    def set_state(self, number: int, state: object, *, sha256: str | None = None) -> None: ...

    def set_evals(self, number: int, evals: object) -> None: ...


class Part(AlwaysServed):
    """A server or learner that never ends."""

    sha256 = "0"
    alive, liveness = True, SimpleNamespace(work="waiting for groups")

    async def start(self, *arguments: object, **options: object) -> None: ...

    async def watch(self, **options: object) -> None:
        await asyncio.sleep(3600)

    async def wait(self) -> None:
        await asyncio.sleep(3600)

    async def kill(self) -> None: ...


async def pipeline(folder: Path, script: Any, *, groups: int) -> Any:
    """Runs the loop with a scripted server and a learner that does nothing, until every group is stored."""
    recipe = make_recipe(concurrency=4, groups_per_step=groups, group={"size": 2})
    recipe = recipe.but({"evaluation.heldout": 0, "evaluation.heldout_real": 0})
    policy = Journaled(folder / "j", script=script)
    async with opened(folder, policy, ScriptedSandboxes(printing("3")), recipe, Family()) as run:
        run.registry, run.served, run.learner = Registry(), Part(), Part()  # type: ignore[assignment]
        running = asyncio.create_task(loop._pipeline(run))
        while not running.done() and len(indices(run.store.store)) < groups:
            await asyncio.sleep(0.01)
        running.cancel()
        try:
            await running
        finally:
            stored = indices(run.store.store)
            (folder / "stored").write_text(json.dumps(stored))


def dead(turn: int, episode: str) -> str:
    raise ServingError("connection refused")


async def test_a_run_in_which_everything_fails_pauses_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.rollout.group.RETRY_S", 0.0)
    with pytest.raises(ExceptionGroup) as error:
        await pipeline(tmp_path, dead, groups=200)
    assert error.group_contains(
        InfrastructureError, match=r"the run pauses: \d+ of the newest \d+(.|\n)*generate ServingError: connection refused"
    )
    assert len(json.loads((tmp_path / "stored").read_text())) < 20, "hundreds of groups remain for --resume"


@pytest.mark.slow
async def test_a_run_continues_below_the_fault_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.rollout.group.RETRY_S", 0.0)
    with pytest.raises(asyncio.CancelledError):
        await pipeline(tmp_path, say, groups=20)
    assert len(json.loads((tmp_path / "stored").read_text())) == 20


async def test_the_result_of_a_shorter_run_is_not_that_of_a_longer_one(tmp_path: Path) -> None:
    """A run resumed with more steps and then stopped is not finished, and its summary has no rate of intermediate weights."""
    rate = {"heldout": {"value": 1.0, "ci_low": 1.0, "ci_high": 1.0, "n": 1}}
    (tmp_path / "evaluations.json").write_text(json.dumps({"eval_4": rate, "after": rate}))
    with pytest.raises(asyncio.CancelledError):
        await pipeline(tmp_path, say, groups=2)
    assert json.loads((tmp_path / "evaluations.json").read_text()) == {"eval_4": rate, "before": {}}
