"""The view's masks and advantages of every token are equal to those of the training step, with every estimator."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.experience import SqliteStore
from agentrl.experience.token_records import TokenRecord, write_records
from agentrl.objective import assemble
from agentrl.records import GroupUse
from agentrl.view.episode_data import MAX_TOKENS, Budget, episode_tree, tokens_data
from agentrl.view.group_data import group_data, step_data
from agentrl.view.source import RunSource
from agentrl.view.training import OF_THE_BATCH, sample_of, train_group
from tests.view.runs import FALL, recipe_of


def source_of(runs: Path, folder: Path, **objective: object) -> RunSource:
    """Returns a run with the groups of `demo` in one step, with another objective."""
    store = SqliteStore(runs / "demo" / "experience.sqlite")
    groups = store.groups(range(6))
    store.close()
    copy = SqliteStore(folder / "experience.sqlite")
    copy.put_all([replace(group, episodes=group.episodes[:3]) if group.index == 5 else group for group in groups])
    copy.assign(0, range(6))
    copy.close()
    (folder / "recipe.json").write_text(recipe_of(5, objective=objective).model_dump_json())
    return RunSource(folder, run_id="copy", name="copy")


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "reinforce++", "reinforce++-baseline"])
def test_masks_and_advantages_are_equal_to_those_of_the_step(runs: Path, tmp_path: Path, advantage: str) -> None:
    source = source_of(runs, tmp_path, advantage=advantage)
    recipe, _ = source.recipe()
    assert recipe is not None
    groups = source.store().groups(range(6))
    step = assemble(0, groups, recipe)
    compared = 0
    for group in groups:
        entry = source.store().entry(group.index)
        assert entry is not None
        training = train_group(source, entry, group)
        expected = [sample for sample in step.batch.samples if sample.group_index == group.index]
        assert [sample for samples in training.samples.values() for sample in samples] == expected and training.notes == ()
        assert training.reason == step.drop_reasons.get(group.index, "")
        for scored in group.episodes:
            for trajectory in scored.episode.trajectories:
                sample = sample_of(training, scored.episode.id, trajectory, scored.episode.trajectories)
                assert (sample is None) == (group.index in step.drop_reasons)
                compared += sample is not None
    assert compared > 0
    alone = [sample.advantages for sample in assemble(0, groups[:1], recipe).batch.samples]
    together = [sample.advantages for sample in step.batch.samples if sample.group_index == 0]
    assert (alone != together) == (advantage in OF_THE_BATCH), "batch estimators need the other groups"


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ({"advantage": "evil.module:estimator"}, "The view does not run user-supplied code"),
        ({"kl": "k1_reward", "kl_coef": 0.1}, "is not recorded"),
        ({"credit": "counterfactual"}, ""),
    ],
)
def test_a_note_explains_missing_values_and_no_code_of_the_run_is_imported(
    runs: Path, tmp_path: Path, objective: dict[str, object], message: str
) -> None:
    source = source_of(runs, tmp_path, **objective)
    data = group_data(source, 1)
    assert any(message in note for note in data["notes"])
    if "evil" in str(objective):
        assert data["advantages"] == [None] * 4 and tokens_data(source, 1, 0, 0, 0)["mask"] is None


def test_a_run_with_a_recipe_of_another_version_is_still_readable(runs: Path, tmp_path: Path) -> None:
    source = source_of(runs, tmp_path)
    (tmp_path / "recipe.json").write_text('{"name": "old", "rollout": {"group_size": 8}}')
    data = tokens_data(source, 1, 0, 0, 0)
    assert data["logprobs"][0] == -0.5 and data["advantages"] is None
    assert any("a different version of agentrl" in note for note in data["notes"])


def test_values_from_the_learner_are_shown_with_their_tokens(runs: Path, tmp_path: Path) -> None:
    """Logprobs of the learner, entropies, weights and clips of trained tokens; by turn and by page."""
    source = source_of(runs, tmp_path)
    recipe, _ = source.recipe()
    assert recipe is not None
    store = SqliteStore(tmp_path / "experience.sqlite")
    samples = assemble(0, store.groups(range(6)), recipe).batch.samples
    store.commit(0, {index: GroupUse(tokens_trained=1) for index in range(6)}, "c")
    store.close()
    records, first = [], 0
    for sample in samples:
        size = sum(sample.loss_mask)
        values = [float(first + number) for number in range(size)]
        record = TokenRecord(
            group=sample.group_index,
            episode_id=sample.episode_id,
            part=0,
            logprobs=values,
            entropies=values,
            weights=values,
            clipped=[number % 2 == 0 for number in range(size)],
        )
        records.append(record)
        first += 1000
    write_records(tmp_path, 1, 0, records)
    trained = next(sample for sample in samples if sample.episode_id == "g000001-0-a0")
    start = records[samples.index(trained)].logprobs[0]
    first_turn, second_turn = (tokens_data(source, 1, 0, 0, turn) for turn in (0, 1))
    logprobs = [*first_turn["new_logprobs"], *second_turn["new_logprobs"]]
    assert logprobs == [start + number for number in range(len(logprobs))] and len(logprobs) == sum(trained.loss_mask)
    assert second_turn["clipped"][0] == (len(first_turn["clipped"]) % 2 == 0) and second_turn["entropies"] == second_turn["new_logprobs"]
    second_page = tokens_data(source, 1, 0, 0, 1, offset=3)
    assert second_page["new_logprobs"] == second_turn["new_logprobs"][3:] and second_page["total"] == second_turn["total"] <= MAX_TOKENS
    (tmp_path / "updates" / "000001.0.tokens").write_bytes(b"damaged")
    data = tokens_data(source, 1, 0, 0, 0)
    assert data["new_logprobs"] is None and any("cannot be read" in note for note in data["notes"])


def test_a_step_shows_regressed_kinds_and_why_groups_have_no_signal(runs: Path) -> None:
    source = RunSource(runs / "demo", run_id="demo", name="demo")
    data = step_data(source, FALL)
    assert data["kinds"][0] == {"kind": "join", "now": 0.0, "groups": 1, "before": 0.5}
    join, count = data["groups"]
    assert [score["value"] for score in join["scores"]] == [0.0] * 4 and "same score" in join["explanation"]
    assert count["advantages"] == pytest.approx([0.49990002] * 3 + [-1.49970006]) and count["explanation"] == ""
    source.close()


def test_rewards_of_actions_are_shown_with_their_turns(runs: Path) -> None:
    """Environments give such rewards, tools do not."""
    source = RunSource(runs / "demo", run_id="demo", name="demo")
    episode = source.group(4).episodes[3].episode
    trajectory = episode.trajectories[0]
    first, second = trajectory.turns
    rewarded = replace(first, tool_results=tuple(replace(result, reward=0.5) for result in first.tool_results))
    (shown_trajectory,) = episode_tree(replace(episode, trajectories=(replace(trajectory, turns=(rewarded, second)),)), Budget(9999), None)
    assert [turn["reward"] for turn in shown_trajectory["turns"]] == [0.5, None]
    assert shown_trajectory["turns"][0]["results"][0]["reward"] == 0.5
    source.close()


def test_a_damaged_group_of_the_step_is_a_note(runs: Path, tmp_path: Path) -> None:
    source = source_of(runs, tmp_path, advantage="reinforce++")
    with sqlite3.connect(tmp_path / "experience.sqlite") as db:
        db.execute("UPDATE groups SET body = x'00' WHERE idx = 3")
    entry, (group,) = source.store().entry(1), source.store().groups((1,))
    assert entry is not None
    training = train_group(source, entry, group)
    assert training.advantages == (None,) * 4 and "cannot be computed" in training.notes[0]
