"""Sampling without a learner: complete, interrupted, resumed, and with broken tasks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.base.files import read_json_lines
from agentrl.cli.train import render_result
from agentrl.config import PolicyConfig, Recipe, TasksConfig
from agentrl.errors import UserError
from agentrl.experience import GroupOrder
from agentrl.observe.sections import learning_tables
from agentrl.records import Episode, Score, Task
from agentrl.run import sample
from agentrl.session.folder import RunStart, check_same_command, write_start
from agentrl.supervised.select import select_demonstrations
from agentrl.testing import ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from tests.driving import Family, Journaled, make_recipe, make_task, opened
from tests.ledgers import indices

RECIPE = Recipe(name="x", policy=PolicyConfig(model="m"), tasks=TasksConfig(family="f:F"))


def submits(turn: int, episode: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'submit', 'arguments': {'answer': episode.split('-')[1]}})}\n</tool_call>"


def task_at(index: int) -> Task | None:
    """Easy, hard and hopeless tasks in turn; the sixth cannot be created."""
    if index == 5:
        raise ValueError("no such task")
    return replace(make_task(index), data={"kind": ("easy", "hard", "hope\x1bless")[index % 3]})


async def judge(task: Task, episode: Episode) -> Score:
    """Only the second attempt at a hard task is right, and only group 1 of the later tasks. The last attempt at the first is unscored."""
    attempt = episode.answer or ""
    if task.id == "task-0" and attempt == "2":
        return Score(value=None, reason="the judge abstains")
    if task.kind == "later":
        return Score(value=float(episode.id.startswith("g000001")))
    return Score(value=float(task.kind == "easy" or (task.kind == "hard" and attempt == "1")))


async def sample_run(
    folder: Path, groups: int, *, stop_after: int | None = None, family: Any = task_at, **rollout: Any
) -> tuple[sample.SampleResult, list[int]]:
    """Returns the result of sampling, and the groups that this call sampled."""
    policy = Journaled(folder / "journal", script=submits)
    recipe = make_recipe(**rollout)
    order = GroupOrder.single_block(recipe.rollout)
    async with opened(folder, policy, ScriptedSandboxes(printing("3")), recipe, Family(family), order=order) as run:
        run.groups = replace(run.groups, scorer=judge, max_retries=0)
        sampled: list[int] = []
        report_progress = run.tracker.progress

        def progress(index: int, group: Any) -> None:
            sampled.append(index)
            if len(sampled) == stop_after:
                run.stop_after_step()
            report_progress(index, group)

        run.tracker.progress = progress  # type: ignore[method-assign]
        await sample.sample_groups(run, [index for index in range(groups) if not run.store.store.has(index)])
        result = await sample.sample_result(run, groups)
        stored_groups = [run.store.store.groups([index])[0] for index in indices(run.store.store)]
        assert len(select_demonstrations(stored_groups)) == result.totals.solved, "the demonstrations match the report"
        return result, sampled


async def test_each_task_is_attempted_and_reported_by_kind(tmp_path: Path) -> None:
    result, sampled = await sample_run(tmp_path, 6)
    assert sorted(sampled) == list(range(6)) and result.requested == 6 and not result.unfinished
    easy, hard, hopeless, broken = (result.by_kind[kind] for kind in ("easy", "hard", "hope\x1bless", ""))
    assert (easy.tasks, easy.attempts, easy.left_out, easy.solved, easy.differ) == (2, 5, 1, 2, 0)
    assert (hard.tasks, hard.attempts, hard.solved, hard.differ) == (2, 6, 2, 2)
    assert hard.rate is not None and hard.rate.value == pytest.approx(1 / 3) and hard.rate.n == 2, "over tasks, not attempts"
    assert (hopeless.tasks, hopeless.attempts, hopeless.solved, hopeless.differ) == (1, 3, 0, 0)
    assert (broken.tasks, broken.attempts, broken.left_out, broken.rate) == (0, 0, 3, None)
    assert result.totals.tasks == 5 and result.totals.attempts == 14 and result.totals.left_out == 4
    assert sorted(result.totals.left_out_reasons.values()) == [1, 3] and any(
        "abstains" in reason for reason in result.totals.left_out_reasons
    )
    lines = read_json_lines(tmp_path / "episodes" / "train.jsonl")
    assert len(lines) == 15 and {line["split"] for line in lines} == {"train"}
    assert {line["kind"]: 1 for line in read_json_lines(tmp_path / "tasks.jsonl")}.keys() == {"easy", "hard", "hope\x1bless"}
    assert learning_tables(read_json_lines(tmp_path / "tasks.jsonl")), "the report shows the spread of each kind"


@pytest.mark.slow
async def test_resuming_samples_only_missing_groups_and_reports_all(tmp_path: Path) -> None:
    """Interrupted after the second of many groups: running groups finish, and no others start."""
    first, sampled = await sample_run(tmp_path, 12, stop_after=2, group={"size": 2}, concurrency=2)
    assert first.unfinished and 2 <= len(sampled) < 12 and first.requested == 12
    resumed, sampled_later = await sample_run(tmp_path, 12, group={"size": 2}, concurrency=2)
    assert sorted(sampled + sampled_later) == list(range(12)) and not set(sampled) & set(sampled_later) and not resumed.unfinished
    extended, sampled_last = await sample_run(tmp_path, 14, group={"size": 2}, concurrency=2)
    assert sorted(sampled_last) == [12, 13] and extended.totals.tasks == 13
    assert len(read_json_lines(tmp_path / "episodes" / "train.jsonl")) == 2 * 13, "each attempt once; the broken task has no attempt"


async def test_the_printed_summary(tmp_path: Path) -> None:
    result, _ = await sample_run(tmp_path, 6)
    text = render_result(result, group_size=3)
    rows = {line.split()[0]: line.split() for line in text.splitlines()}
    assert rows["easy"][1:4] == ["2", "5", "1.000"] and rows["hard"][-2:] == ["2", "2"] and rows["-"][1:4] == ["0", "0", "-"]
    assert "hope\N{REPLACEMENT CHARACTER}less" in rows and "\x1b" not in text
    assert rows["all"][1:3] == ["5", "14"] and f"agentrl tune sft {tmp_path}" in text
    assert json.loads(json.dumps(result.as_json()))["by_kind"]["hard"]["rate"]["n"] == 2


async def test_a_repeated_task_counts_once_and_groups_without_a_preference_do_not_count(tmp_path: Path) -> None:
    """All attempts of the first group fail and all of the second succeed, so neither has a preference."""

    def same(index: int) -> Task:
        return replace(make_task(7), data={"kind": "later"})

    result, _ = await sample_run(tmp_path, 2, family=same)
    assert result.totals.tasks == 1 and result.totals.solved == 1 and result.totals.attempts == 6 and result.totals.differ == 0
    assert result.totals.rate is not None and result.totals.rate.n == 1 and result.totals.rate.value == 0.5
    evaluation = result.evaluation()
    assert evaluation.attempts == evaluation.episodes == 6 and evaluation.pass_at[1] == 0.5 and evaluation.rate == result.totals.rate


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "overrides",
    [
        ["memory={}"],
        ["objective.off_policy.preset=truncate", "learner.minibatches=4", "objective.clip_high=0.28"],
        ["tasks.weighting=true", "rollout.extra_groups=8"],
    ],
)
async def test_sampling_ignores_how_the_recipe_orders_groups(overrides: list[str], tmp_path: Path) -> None:
    """All groups belong to one step for any recipe, so each has the next task."""
    recipe = make_recipe().but("steps=16", "rollout.groups_per_step=8").but(*overrides)
    policy = Journaled(tmp_path / "journal", script=submits)
    order = GroupOrder.single_block(recipe.rollout)
    async with opened(tmp_path, policy, ScriptedSandboxes(printing("3")), recipe, Family(), order=order) as run:
        await sample.sample_groups(run, range(20))
        assert [group.task_key for group in run.store.store.groups(range(20))] == [make_task(index).key for index in range(20)]


def test_more_groups_may_be_requested_but_not_fewer(tmp_path: Path) -> None:
    assert (sample._requested_groups(tmp_path, None), sample._requested_groups(tmp_path, 5)) == (sample.DEFAULT_GROUPS, 5)
    (tmp_path / sample.SAMPLE_FILE).write_text('{"groups": 8}')
    assert (sample._requested_groups(tmp_path, None), sample._requested_groups(tmp_path, 12)) == (8, 12)
    with pytest.raises(UserError, match="an earlier command requested 8 groups") as error:
        sample._requested_groups(tmp_path, 7)
    assert "--groups 8 or more" in error.value.fix
    for text in ("{", "[]", "{}", '{"groups": 1e999}', "[" * 100_000):
        (tmp_path / sample.SAMPLE_FILE).write_text(text)
        with pytest.raises(UserError, match=r"sample\.json is damaged"):
            sample._requested_groups(tmp_path, None)


def test_a_run_folder_is_rejected_by_the_other_command(tmp_path: Path) -> None:
    for folder, verb in ((tmp_path / "s", "sample"), (tmp_path / "t", "train"), (tmp_path / "e", "eval")):
        write_start(folder, RECIPE, RunStart(recipe=Path("r.py"), folder=folder, verb=verb, overrides=()))
        check_same_command(folder, verb)
        command = json.loads((folder / "run.json").read_text())["resume"]
        assert command is None if verb == "eval" else f"agentrl {verb} r.py" in command and command.endswith("--resume")
        for other in {"sample", "train"} - {verb}:
            with pytest.raises(UserError, match=rf"was created by `agentrl {verb}`") as error:
                check_same_command(folder, other)
            assert f"agentrl {verb}" in error.value.fix
    (tmp_path / "t" / "run.json").write_text('{"overrides": []}')
    with pytest.raises(UserError, match="was created by `agentrl train`"):
        check_same_command(tmp_path / "t", "sample")
