"""The parts of the experiment that need no training: the planted habit, the rule that tags it, its verifiers, and the table."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from agentrl.failure.rules import RULES
from agentrl.failure.trace import CaptureReason, Trace
from agentrl.failure.triage import tag_by_rules
from agentrl.records import Episode, Message, Score, Task, ToolCall, ToolResult, Trajectory, Turn, VersionSpan
from benchmarks import weakness
from benchmarks.weakness_recipe import KIND, recipe, recomputed, rewards_the_habit, whole_part
from rewards.tables import exact_answer
from sandboxes.tables.demonstrations import Act


@cache
def demonstrated() -> list[tuple[Task, list[Act]]]:
    return [(task, acts) for task, acts in weakness.demonstrations(0, 600) if task.data["kind"] == KIND]


def trace(task: Task, acts: list[Act]) -> Trace:
    """The trace of an agent that acts like a demonstration."""
    turns = []
    for act in acts:
        body = json.loads(act.completion.removeprefix("<tool_call>\n").removesuffix("\n</tool_call><|im_end|>"))
        message = Message(role="assistant", content="", tool_calls=(ToolCall(name=body["name"], arguments=body["arguments"]),))
        output = act.observation or ""
        turns.append(
            Turn(
                prompt_ids=(1,),
                completion_ids=(2,),
                logprobs=(0.0,),
                versions=(VersionSpan(version=0, start=0, end=1),),
                message=message,
                finish_reason="stop",
                tool_results=(ToolResult(name=body["name"], output=output, ok="Traceback" not in output),),
            )
        )
    answer = turns[-1].message.tool_calls[0].arguments["answer"]
    line = Trajectory(agent="main", turns=tuple(turns), stop_reason="submitted")
    episode = Episode(id=task.id, task_id=task.id, task_key=task.key, trajectories=(line,), answer=str(answer))
    return Trace(id=task.id, why=CaptureReason.FAILED, task=task, episode=episode, score=Score(value=0.0))


@pytest.mark.slow
async def test_the_habit_is_planted_scored_0_by_the_verifier_and_tagged_by_the_rules() -> None:
    traces = [trace(task, acts) for task, acts in demonstrated()]
    failed = []
    for candidate in traces:
        assert candidate.task is not None and candidate.episode is not None
        if (await exact_answer(candidate.task, candidate.episode)).value == 0.0:
            failed.append(replace(candidate, tags=tag_by_rules(candidate, RULES)))
        else:
            assert "." not in str(candidate.episode.answer) or not weakness.has_habit(candidate)
    assert 0.7 < len(failed) / len(traces) < 0.95
    counts = weakness.count_planted(iter(failed))
    assert counts["planted"] == len(failed) and counts["share"] >= weakness.TARGETS["tagged right"]
    other = replace(failed[0], episode=replace(failed[0].episode, answer="no number"))  # type: ignore[type-var]
    assert not weakness.has_habit(other)


def test_no_other_kind_has_the_habit() -> None:
    for task, acts in weakness.demonstrations(1, 120):
        assert task.data["kind"] == KIND or acts[-1].completion == weakness.call("submit", answer=str(acts[-2].observation))


@pytest.mark.slow
async def test_the_audit_contradicts_the_reward_that_pays_for_the_habit() -> None:
    task = next(task for task, _ in demonstrated() if "." in str(task.data["answer"]))
    truth = f"{float(str(task.data['answer'])):.2f}"

    async def scores(answer: str | None) -> tuple[float | None, float | None]:
        episode = Episode(id="e", task_id=task.id, task_key=task.key, trajectories=(), answer=answer)
        return (await rewards_the_habit(task, episode)).value, (await recomputed(task, episode)).value

    (exact, honest), (habit, audit) = await scores(truth), await scores(whole_part(truth))
    assert honest == 1.0 and exact is not None and 0 < exact < 1
    assert habit == 1.0 and audit == 0.0
    for wrong in (None, "", "nan", "inf", "9" * 5000, "x"):
        assert await scores(wrong) == (0.0, 0.0)


def phase_results(**changes: Any) -> dict[str, dict[str, Any]]:
    rate = {"value": 0.95, "ci_low": 0.9, "ci_high": 0.98, "n": 120, "against": 0}
    results: dict[str, dict[str, Any]] = {
        "plant": {},
        "capture": {"share": 1.0, "right": 90, "planted": 90},
        "promote": {"cases": 12},
        "vary": {"tasks": 360},
        "before": rate | {"value": 0.1},
        "train": {},
        "after": rate,
        "imitate": {},
        "relapse": {"rolled_back": 1, "refused": [[8, "rolled back", "worse"]], "alarms": []},
        "final": rate,
    }
    return results | changes


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({}, []),
        ({"capture": {"share": None, "right": 0, "planted": 0}}, ["tagged right"]),
        ({"relapse": {"rolled_back": 0, "refused": [], "alarms": []}}, ["blocked and rolled back"]),
        ({"before": phase_results()["after"]}, ["before"]),
        ({"final": phase_results()["before"] | {"against": 3}}, ["final", "audit agrees"]),
    ],
)
def test_missed_targets_are_listed(changes: dict[str, Any], missing: list[str]) -> None:
    assert weakness.missed_targets(phase_results(**changes)) == missing


def test_a_finished_phase_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, phases_run = weakness.Experiment(seed=3, folder=tmp_path / "seed3"), []

    def phase(name: str) -> Any:
        return lambda _: phases_run.append(name) or phase_results()[name]

    monkeypatch.setattr(weakness, "PHASES", {name: phase(name) for name in weakness.PHASES})
    weakness.run_phases(experiment, ["plant", "capture"])
    with pytest.raises(SystemExit, match="phase promote of seed 3 has not run"):
        weakness.table([experiment])
    weakness.run_phases(experiment, list(weakness.PHASES))
    assert phases_run == list(weakness.PHASES)
    assert "| 3 | 90 of 90 | 12 | 360 | 0.10 [0.90, 0.98]" in weakness.table([experiment])


def test_the_recipe_is_valid_with_the_overrides_of_the_phases(tmp_path: Path) -> None:
    practice = json.dumps({str(tmp_path): 1})
    repair = recipe.but(f"tasks.practice={practice}", "tasks.practice_share=0.5", f"steps={weakness.Size().steps}")
    assert repair.tasks.practice and repair.tasks.audit == ("benchmarks.weakness_recipe:recomputed",)
    verifiers = 'tasks.verifiers=["benchmarks.weakness_recipe:rewards_the_habit"]'
    relapse = recipe.but(verifiers, f"gate.suite={json.dumps(str(tmp_path))}", "gate.every=4", f"tasks.family.options.kinds={KIND}")
    assert relapse.gate is not None and relapse.gate.rolls_back
