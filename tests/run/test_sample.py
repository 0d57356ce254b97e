"""Sampling without a learner: what is made, kept and told of a policy's attempts, whole, interrupted, resumed, and with broken tasks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.sample import told
from agentrl.errors import RecipeError, UserError
from agentrl.files import read_json_lines
from agentrl.observe.taught import taught_tables
from agentrl.recipe import PolicyConfig, Recipe, TasksConfig, apply_overrides
from agentrl.records import Episode, Score, Task
from agentrl.run import sample
from agentrl.run.folder import Start, check_same, check_verb, write_start
from agentrl.supervised.select import demonstrations
from agentrl.testing import ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from tests.driving import Family, Journaled, make_recipe, make_task, opened

RECIPE = Recipe(name="x", policy=PolicyConfig(model="m"), tasks=TasksConfig(family="f:F"))


def submits(turn: int, episode: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'submit', 'arguments': {'answer': episode.split('-')[1]}})}\n</tool_call>"


def asked(index: int) -> Task | None:
    """Of easy, hard and hopeless tasks in turn; the sixth cannot be made."""
    if index == 5:
        raise ValueError("no such task")
    return replace(make_task(index), data={"kind": ("easy", "hard", "hope\x1bless")[index % 3]})


async def judge(task: Task, episode: Episode) -> Score:
    """Of hard tasks the second attempt alone is right; the last attempt at the first task has no score."""
    attempt = episode.answer or ""
    if task.id == "task-0" and attempt == "2":
        return Score(value=None, reason="the judge abstains")
    return Score(value=float(task.kind == "easy" or (task.kind == "hard" and attempt == "1")))


def recipe_of(groups: int, **rollout: Any) -> Recipe:
    plain = make_recipe(max_retries=0, **rollout)
    return apply_overrides(plain, list(sample.overrides(plain, groups)))


async def played(folder: Path, groups: int, *, stop_after: int | None = None, **rollout: Any) -> tuple[sample.Sampled, list[int]]:
    """What there is after sampling, and which groups this call has made."""
    policy = Journaled(folder / "journal", script=submits)
    async with opened(folder, policy, ScriptedSandboxes(printing("3")), recipe_of(groups, **rollout), Family(asked)) as run:
        run.groups = replace(run.groups, score=judge)
        made: list[int] = []
        told_of = run.tracker.progress

        def progress(index: int, group: Any) -> None:
            made.append(index)
            if len(made) == stop_after:
                run.stop_after_step()
            told_of(index, group)

        run.tracker.progress = progress  # type: ignore[method-assign]
        await sample.make_groups(run, [index for index in run.step_groups.indices(0) if not run.store.has(index)])
        found = sample.sampled(run)
        groups_kept = [run.store.groups([index])[0] for index in run.store.indices()]
        assert len(demonstrations(groups_kept)) == found.whole.solved, "what can be imitated is what was told"
        return found, made


async def test_each_task_is_attempted_and_told_by_kind(tmp_path: Path) -> None:
    found, made = await played(tmp_path, 6)
    assert sorted(made) == list(range(6)) and found.asked == 6 and not found.interrupted
    easy, hard, hopeless, broken = (found.by_kind[kind] for kind in ("easy", "hard", "hope\x1bless", ""))
    assert (easy.tasks, easy.attempts, easy.left_out, easy.solved, easy.differ) == (2, 5, 1, 2, 0)
    assert (hard.tasks, hard.attempts, hard.solved, hard.differ) == (2, 6, 2, 2)
    assert hard.rate is not None and hard.rate.value == pytest.approx(1 / 3) and hard.rate.n == 2, "over tasks, not attempts"
    assert (hopeless.tasks, hopeless.attempts, hopeless.solved, hopeless.differ) == (1, 3, 0, 0)
    assert (broken.tasks, broken.attempts, broken.left_out, broken.rate) == (1, 0, 3, None)
    assert found.whole.tasks == 6 and found.whole.attempts == 14 and found.whole.left_out == 4
    assert sorted(found.left_out_reasons.values()) == [1, 3] and any("abstains" in reason for reason in found.left_out_reasons)
    lines = read_json_lines(tmp_path / "episodes" / "train.jsonl")
    assert len(lines) == 15 and {line["split"] for line in lines} == {"train"}
    assert {line["kind"]: 1 for line in read_json_lines(tmp_path / "tasks.jsonl")}.keys() == {"easy", "hard", "hope\x1bless"}
    assert taught_tables(read_json_lines(tmp_path / "tasks.jsonl")), "the report shows what each kind would teach"


async def test_a_resumed_one_makes_only_what_is_missing_and_tells_all(tmp_path: Path) -> None:
    """Interrupted after the second group of many: those in hand are finished, no others are begun."""
    first, made = await played(tmp_path, 12, stop_after=2, group_size=2, concurrency=2)
    assert first.interrupted and 2 <= len(made) < 12 and first.asked == 12
    again, then = await played(tmp_path, 12, group_size=2, concurrency=2)
    assert sorted(made + then) == list(range(12)) and not set(made) & set(then) and not again.interrupted
    further, more = await played(tmp_path, 14, group_size=2, concurrency=2)
    assert sorted(more) == [12, 13] and further.whole.tasks == 14
    assert len(read_json_lines(tmp_path / "episodes" / "train.jsonl")) == 2 * 13, "each attempt once; the broken task has none"


async def test_what_a_person_is_told(tmp_path: Path) -> None:
    found, _ = await played(tmp_path, 6)
    text = told(found, group_size=3)
    rows = {line.split()[0]: line.split() for line in text.splitlines()}
    assert rows["easy"][1:4] == ["2", "5", "1.000"] and rows["hard"][-2:] == ["2", "2"] and rows["-"][1:4] == ["1", "0", "-"]
    assert "hope\N{REPLACEMENT CHARACTER}less" in rows and "\x1b" not in text
    assert rows["all"][1:3] == ["6", "14"] and f"agentrl tune sft {tmp_path}" in text
    assert json.loads(json.dumps(found.as_json()))["by_kind"]["hard"]["rate"]["n"] == 2


def test_a_recipe_that_takes_several_updates_a_step_samples_a_single_group() -> None:
    gae = ["objective.advantage=gae", 'critic={"minibatches": 2}', "learner.minibatches=4"]
    several = apply_overrides(RECIPE, [*gae, "rollout.groups_per_step=8"])
    made = apply_overrides(several, list(sample.overrides(several, 1)))
    assert made.steps == 1 and made.rollout.groups_per_step == 1
    weighted = RECIPE.but({"tasks.weighting": {}, "rollout.extra_groups": 4})
    assert apply_overrides(weighted, list(sample.overrides(weighted, 3))).tasks.weighting is None


def test_a_folder_goes_on_as_what_it_is(tmp_path: Path) -> None:
    """More groups may be asked for; nothing else may differ, and neither command goes on with what the other has made."""
    sampled = apply_overrides(RECIPE, list(sample.overrides(RECIPE, 4)))
    write_start(tmp_path, sampled, Start(recipe=Path("r.py"), folder=tmp_path, verb="sample", overrides=sample.overrides(RECIPE, 4)))
    assert "agentrl sample r.py" in json.loads((tmp_path / "run.json").read_text())["resume"]
    further = sampled.but("rollout.groups_per_step=8")
    assert check_same(tmp_path, further, but=("groups_per_step",)) == ["rollout.groups_per_step 4 -> 8"]
    with pytest.raises(RecipeError, match=r"rollout\.groups_per_step 4 -> 8"):
        check_same(tmp_path, further)
    with pytest.raises(RecipeError, match=r"rollout\.group_size 8 -> 2"):
        check_same(tmp_path, further.but("rollout.group_size=2"), but=("groups_per_step",))
    check_verb(tmp_path, "sample")
    with pytest.raises(UserError, match=r"holds what `agentrl sample` made") as error:
        check_verb(tmp_path, "train")
    assert "agentrl sample" in error.value.fix
    check_verb(tmp_path / "none", "train")
