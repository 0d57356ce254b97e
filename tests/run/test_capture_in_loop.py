"""Capture in the real loop: training groups and evaluations of a scripted policy, down to the report and to a suite."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.base.files import read_json_lines
from agentrl.evaluation.held_out import HeldOutEvaluation
from agentrl.experience.episode_index import EpisodeIndex
from agentrl.experience.episode_query import EpisodeQuery
from agentrl.failure import Capture
from agentrl.failure.case import load_suite
from agentrl.failure.collection import Collection, TraceFilter
from agentrl.failure.digest import write_digest
from agentrl.failure.promote import promote
from agentrl.observe import write_report
from agentrl.records import Episode, Group, Score, ScoredEpisode, Task
from agentrl.run import loop
from agentrl.session import measure
from agentrl.testing import ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from tests.driving import Family, Journaled, make_recipe, make_task, opened


def script(turn: int, episode: str) -> str:
    """Member 0 solves its task, 1 misreads it and 2 calls a missing tool. In an evaluation all misread."""
    member = episode.split("-")[1] if episode.startswith("g") else "1"
    call: tuple[str, dict[str, Any]] = ("python", {"code": "print(3)"})
    if turn == 0 and member == "2":
        call = ("search", {"query": "3"})
    elif turn == 1:
        call = ("submit", {"answer": {"0": "3", "1": "5", "2": "7"}[member]})
    return f"<tool_call>\n{json.dumps({'name': call[0], 'arguments': call[1]})}\n</tool_call>"


async def judge(task: Task, episode: Episode) -> Score:
    if episode.answer is None:
        raise RuntimeError("no answer to judge")
    return Score(value=float(episode.answer == task.data["answer"]))


def task_at(index: int) -> Task:
    return replace(make_task(index), data={"answer": "3", "kind": "three"})


class Registry:
    def set_evals(self, number: int, rates: object) -> None: ...


async def run_loop(folder: Path, **capture: Any) -> Any:
    changes = {f"capture.{key}": value for key, value in capture.items()}
    recipe = make_recipe().but({"evaluation.heldout": 4, "evaluation.heldout_real": 0, **changes})
    async with opened(folder, Journaled(folder / "j", script=script), ScriptedSandboxes(printing("3")), recipe, Family(task_at)) as run:
        run.groups = replace(run.groups, scorer=judge, max_retries=0)
        run.registry = Registry()  # type: ignore[assignment]
        await HeldOutEvaluation.of(run).evaluate("before", step=0)
        await loop._roll_out(run)
        await HeldOutEvaluation.of(run).evaluate("after", step=1)
        return SimpleNamespace(lost=run.capture.lost, spent_s=run.capture.spent_s, recipe=recipe)


async def test_a_repeated_evaluation_replaces_the_earlier_one(tmp_path: Path) -> None:
    recipe = make_recipe().but({"evaluation.heldout": 4, "evaluation.heldout_real": 0})
    async with opened(tmp_path, Journaled(tmp_path / "j", script=script), ScriptedSandboxes(printing("3")), recipe, Family(task_at)) as run:
        run.groups = replace(run.groups, scorer=judge, max_retries=0)
        run.registry = Registry()  # type: ignore[assignment]
        for phase in ("before", "before", "after"):
            await HeldOutEvaluation.of(run).evaluate(phase, step=0)
    line_counts = {path.stem: len(read_json_lines(path)) for path in (tmp_path / "episodes").iterdir()}
    assert line_counts == {"before": 4, "after": 4}
    with EpisodeIndex(tmp_path) as index:
        records = list(index.records(index.numbers(EpisodeQuery())))
    assert Counter((record.row.phase, record.row.state, record.row.split, record.row.kind, record.row.outcome) for record in records) == {
        (phase, "evaluated", "train", "three", "failed"): 4 for phase in ("before", "after")
    }
    assert all(record.scored.episode.trajectories[0].turns and record.group.prompt for record in records), "all tokens are stored"


async def test_failures_of_training_and_evaluation_are_captured_tagged_reported_and_promoted(tmp_path: Path) -> None:
    run = await run_loop(tmp_path)
    assert run.lost == 0
    with Collection(tmp_path) as collection:
        assert collection.counts("phase", "tag") == {
            ("after", "misread_output"): 4,
            ("before", "misread_output"): 4,
            ("train", ""): 2,
            ("train", "misread_output"): 2,
            ("train", "wrong_tool"): 2,
        }
        trace = collection.get("g000001-2-a0")
        assert trace is not None and trace.task == task_at(1) and trace.tags[0].turn == 0 and trace.versions == (0,)
        assert trace.origin["run"] == tmp_path.name
        promoted = promote(list(collection.traces(TraceFilter(phase="train"))), tmp_path / "suite")
    assert [result.path is not None for result in promoted] == [True, False, True, False], "two failures at each of two tasks"
    assert {case.task.key for case in load_suite(tmp_path / "suite").cases} == {task_at(0).key, task_at(1).key}
    write_digest(tmp_path)
    summary = measure.summarize(tmp_path, run.recipe, {}, backend="scripted", interrupted=False)
    assert summary.failures == {"misread_output": 10, "wrong_tool": 2}
    page = write_report(tmp_path).read_text()
    assert "misread output, turn 2" in page and "12 training and evaluation episodes failed" in page


async def test_a_capture_that_cannot_write_does_not_affect_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("agentrl.failure.collection.Collection.add", full)
    assert (await run_loop(tmp_path)).lost > 0
    assert measure.read_evaluation(tmp_path, "after")["heldout"]["n"] == 4


async def test_a_rule_of_the_recipe_is_applied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.failure.capture.KEPT", 3)
    (tmp_path / "mine.py").write_text(
        "from agentrl.failure.trace import Tag\ndef mine(trace):\n    return Tag(name='mine', by='me', turn=0)\n"
    )
    await run_loop(tmp_path, rules=[f"{tmp_path}/mine.py:mine"])
    with Collection(tmp_path) as collection:
        assert collection.counts("tag") == {("",): 2, ("mine",): 12} and collection.dropped() == {"before": 1, "train": 1, "after": 1}


@pytest.mark.slow
async def test_capture_takes_under_20_ms_per_failed_episode(tmp_path: Path) -> None:
    """Milliseconds of CPU per failed episode, which took seconds. Most of them encode its tokens as JSON."""
    run = await run_loop(tmp_path)
    capture = Capture(tmp_path / "more", run.recipe.capture, origin={})
    with Collection(tmp_path) as collection:
        failed = [case for row in collection.rows() if (case := collection.get(row.id)) is not None and case.task is not None]
    started = time.process_time()
    for number in range(20):
        for case in failed:
            assert case.task is not None and case.episode is not None and case.score is not None
            episode = ScoredEpisode(episode=replace(case.episode, id=f"{case.id}-{number}"), score=case.score)
            capture.capture_group(case.task, Group(index=number, task_id="t", task_key=case.episode.task_key, episodes=(episode,)), step=0)
    spent = (time.process_time() - started) / (20 * len(failed))
    capture.close()
    assert capture.lost == 0 and spent < 0.02, f"{1000 * spent:.2f} ms an episode"
