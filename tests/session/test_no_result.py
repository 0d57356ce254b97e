"""Runs without scores or learning signal: the real loop, groups, verifiers and batches with a scripted policy."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from agentrl.errors import InfrastructureError, SandboxError
from agentrl.evaluation import held_out
from agentrl.objective import assemble
from agentrl.observe import Summary
from agentrl.observe.summary import read_sessions, record_start
from agentrl.protocols import SandboxBackend
from agentrl.records import Episode, Score, Task
from agentrl.reward import TaskScorer
from agentrl.run import loop
from agentrl.session import measure
from agentrl.session.folder import RunStart
from agentrl.testing import ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from tests.driving import Family, Journaled, make_recipe, make_task, opened


async def textual(task: Task, episode: Episode) -> str:
    return "looks right to me"


async def same_for_all(task: Task, episode: Episode) -> Score:
    return Score(value=1.0)


async def raises_for_all(task: Task, episode: Episode) -> Score:
    raise ZeroDivisionError("no rows")


class Dead(ScriptedSandboxes):
    async def open(self, *arguments: Any, **options: Any) -> Any:
        raise SandboxError("the daemon is gone")


def judged_by(verifier: Callable[..., Any], **changes: Any) -> Family:
    reference = f"tests.session.test_no_result:{verifier.__name__}"
    return Family(lambda index: replace(make_task(index), verifiers=(reference,), **changes))


async def run_one_step(folder: Path, family: Family, sandboxes: SandboxBackend) -> Summary:
    """Runs one step of two groups with the metrics of the learner's batch, and returns the summary of the run."""
    recipe = make_recipe(checkpoint_turns=False)
    async with opened(folder, Journaled(folder / "journal.jsonl"), sandboxes, recipe, family) as run:
        run.groups = replace(run.groups, scorer=TaskScorer(), max_retries=0)
        await loop._roll_out(run)
        groups = run.store.store.groups(range(2))
        assembled = assemble(0, groups, recipe)
        dropped = Counter(f"groups_{reason.partition(':')[0]}" for reason in assembled.drop_reasons.values())
        changed = float(bool(assembled.batch.samples))
        update = {"tokens_trained": assembled.batch.denominator, "weights_changed": changed, "updates_left_out": 0.0, **dropped}
        (folder / "update.json").write_text(json.dumps(update))
        metrics = measure.step_metrics(groups, folder, None, step=0, wall_s=1.0)
        measure.record_excluded(folder, 1, groups)
        run.tracker.log(1, metrics)
    return measure.summarize(folder, recipe, {}, backend="scripted", interrupted=False)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("family", "dead", "left_out", "problem"),
    [
        (
            judged_by(textual),
            False,
            {"tests.session.test_no_result:textual: verifier returned str, not a Score (policy-reachable)": 6},
            "nothing was scored: all 6 episodes of 1 step were excluded (6 x tests.session.test_no_result:textual: verifier returned str",
        ),
        (
            judged_by(raises_for_all),
            False,
            {"tests.session.test_no_result:raises_for_all: verifier raised ZeroDivisionError: no rows (policy-reachable)": 6},
            "nothing was scored: all 6 episodes of 1 step were excluded (6 x tests.session.test_no_result:raises_for_all: verifier raised",
        ),
        (
            judged_by(same_for_all),
            False,
            {},
            "nothing was learned: no token was trained in 1 step (2 groups: all attempts have equal scores, so there is no learning signal;"
            " mean reward 1.000)",
        ),
        (
            judged_by(same_for_all, tools=("pyhton",)),
            False,
            {
                "task: TaskError: unknown tool 'pyhton' fix: use python, python_session, shell, submit, view, create, replace, insert,"
                " search, or a reference such as mytools:search": 6
            },
            "nothing was scored: all 6 episodes of 1 step were excluded (6 x task: TaskError: unknown tool 'pyhton'",
        ),
        (
            judged_by(same_for_all),
            True,
            {"infrastructure: SandboxError: the daemon is gone (policy-reachable)": 6},
            "nothing was scored: all 6 episodes of 1 step were excluded (6 x infrastructure: SandboxError: the daemon is gone",
        ),
    ],
    ids=["verifier returns text", "verifier raises", "groups never differ", "all quarantined", "no sandbox opens"],
)
async def test_a_run_without_a_result_reports_why(
    tmp_path: Path, family: Family, dead: bool, left_out: dict[str, int], problem: str
) -> None:
    summary = await run_one_step(tmp_path, family, Dead(printing("3")) if dead else ScriptedSandboxes(printing("3")))
    (line,) = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert line.get("reward_mean") == (None if left_out else 1.0), "a missing score is not zero"
    assert summary.left_out_reasons == left_out and summary.episodes_left_out == sum(left_out.values())
    (reported,) = summary.problems
    assert reported.startswith(problem) and not measure.weights_changed(tmp_path)
    if left_out:
        (record,) = [json.loads(text) for text in (tmp_path / "failures" / "left_out.jsonl").read_text().splitlines()]
        assert record["step"] == 1 and [len(ids) for ids in record["left_out"].values()] == [6]


async def test_a_repeated_step_is_counted_once(tmp_path: Path) -> None:
    await run_one_step(tmp_path, judged_by(textual), ScriptedSandboxes(printing("3")))
    (tmp_path / "experience.sqlite").unlink()
    summary = await run_one_step(tmp_path, judged_by(raises_for_all), ScriptedSandboxes(printing("3")))
    assert list(summary.left_out_reasons.values()) == [6] and "ZeroDivisionError" in next(iter(summary.left_out_reasons))


@pytest.mark.parametrize("phase", ["before", "after"])
async def test_an_evaluation_without_a_score_has_no_rate(tmp_path: Path, phase: str) -> None:
    """Before training, it ends the run. Later, it is reported and the run continues, so that the training is not lost."""
    recipe = make_recipe().but({"evaluation.heldout": 3, "evaluation.heldout_real": 0})
    async with opened(tmp_path, Journaled(tmp_path / "j"), ScriptedSandboxes(printing("3")), recipe, judged_by(textual)) as run:
        run.groups = replace(run.groups, scorer=TaskScorer(), max_retries=0)
        run.registry = Registry()  # type: ignore[assignment]
        message = "evaluation .*: excluded 3 of 3 episodes on heldout: 3 x tests.session.test_no_result:textual: verifier returned str"
        if phase == "before":
            with pytest.raises(InfrastructureError, match=message):
                await held_out.HeldOutEvaluation.of(run).evaluate(phase, step=0)
        else:
            assert await held_out.HeldOutEvaluation.of(run).evaluate(phase, step=0) == {}
    saved = json.loads((tmp_path / "evaluations.json").read_text())[phase]["heldout"]
    assert "value" not in saved and saved["left_out"] == 3 and list(saved["left_out_reasons"].values()) == [3]
    assert len((tmp_path / "episodes" / f"{phase}.jsonl").read_text().splitlines()) == 3, "the transcripts are stored"
    summary = measure.summarize(tmp_path, recipe, {}, backend="scripted", interrupted=False)
    assert summary.heldout_before is None and summary.heldout_after is None
    (problem,) = summary.problems
    assert problem.startswith(f"evaluation {phase}: none of 3 episodes on heldout tasks was scored (3 x ")


class Registry:
    def set_evals(self, number: int, evals: dict[str, float]) -> None:
        assert evals == {}


@pytest.mark.slow
async def test_a_completed_evaluation_is_not_repeated(tmp_path: Path) -> None:
    """A stop in the first step does not repeat the evaluation before training, if weights and settings are the same."""
    recipe = make_recipe().but({"steps": 4, "evaluation.heldout": 3, "evaluation.heldout_real": 0})

    async def evaluated(**changes: Any) -> int:
        policy = Journaled(tmp_path / "j")
        now = recipe.but({name: value for name, value in changes.items() if "." in name})
        async with opened(tmp_path, policy, ScriptedSandboxes(printing("3")), now, judged_by(same_for_all)) as run:
            run.groups = replace(run.groups, scorer=TaskScorer(), max_retries=0)
            run.registry = Rates()  # type: ignore[assignment]
            run.served.sha256 = changes.get("sha256", "a" * 64)  # type: ignore[misc]
            before = len((tmp_path / "j").read_text().splitlines()) if (tmp_path / "j").exists() else 0
            assert await held_out.HeldOutEvaluation.of(run).evaluate_once("before", step=0) == {"heldout": 1.0}
            assert run.registry.rates == {"heldout": 1.0}  # type: ignore[attr-defined]
        return len((tmp_path / "j").read_text().splitlines()) - before

    assert await evaluated() > 0
    assert await evaluated() == 0
    assert await evaluated(**{"evaluation.every": 2}) == 0, "a setting that does not affect it"
    assert await evaluated(sha256="b" * 64) > 0, "other weights"
    assert await evaluated(**{"sha256": "b" * 64, "evaluation.heldout": 4}) > 0, "other settings"


class Rates:
    rates: dict[str, float] | None = None

    def set_evals(self, number: int, evals: dict[str, float]) -> None:
        self.rates = evals


@pytest.mark.slow
async def test_a_fatal_fault_is_in_the_summary_and_unfinished_groups_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.rollout.group.RETRY_S", 0.0)
    recipe = make_recipe()

    @asynccontextmanager
    async def fake(*_: Any, **__: Any) -> AsyncIterator[Any]:
        record_start(tmp_path)
        async with opened(tmp_path, Journaled(tmp_path / "j"), Dead(printing("3")), recipe, judged_by(same_for_all)) as run:
            yield run

    async def pipeline(run: Any) -> None:
        await loop._roll_out(run)
        raise ExceptionGroup("parts", [InfrastructureError("the run pauses: too many faults")])

    monkeypatch.setattr(loop, "open_run", fake)
    monkeypatch.setattr(loop, "_pipeline", pipeline)
    start = RunStart(recipe=Path("r.py"), folder=tmp_path, overrides=())
    with pytest.raises(ExceptionGroup):
        await loop.train(recipe, start, cast(Any, None), root=tmp_path, console=False)
    summary = Summary.read(tmp_path)
    assert summary.interrupted and not summary.finished
    assert summary.problems[0] == "the run ended early: InfrastructureError: the run pauses: too many faults"
    assert (summary.steps, summary.episodes, summary.episodes_left_out, summary.attempts_failed) == (0, 6, 6, 18)
    assert [session.ended for session in summary.sessions] == ["failed"]

    async def finish_at_once(run: Any) -> None:
        return None

    monkeypatch.setattr(loop, "_pipeline", finish_at_once)
    summary = await loop.train(recipe, start, cast(Any, None), root=tmp_path, console=False)
    assert [session.ended for session in summary.sessions] == ["failed", "finished"] and not summary.interrupted
    assert not any("ended early" in problem for problem in summary.problems)


async def test_a_failed_start_does_not_change_the_record_of_the_earlier_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise InfrastructureError("no sandboxes")

    record_start(tmp_path)  # killed
    monkeypatch.setattr(loop, "open_run", fails)
    start = RunStart(recipe=Path("r.py"), folder=tmp_path, overrides=())
    with pytest.raises(InfrastructureError):
        await loop.train(make_recipe(), start, cast(Any, None), root=tmp_path, console=False)
    assert [session.ended for session in read_sessions(tmp_path)] == ["killed"]
