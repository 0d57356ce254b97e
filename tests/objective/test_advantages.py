from __future__ import annotations

import inspect
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from agentrl.config import ObjectiveConfig, Part
from agentrl.errors import PluginError
from agentrl.objective import GroupAdvantages, batch_advantages
from agentrl.objective.advantages import check_advantages, grpo, reinforce_plus_plus, reinforce_plus_plus_baseline, rloo
from agentrl.objective.credit import turn_advantages
from agentrl.records import Blame, Episode, Failure, Group, Score, ScoredEpisode


def _episode(number: int, score: float | None, blame: Blame | None = None) -> ScoredEpisode:
    failures = () if blame is None else (Failure(stage="sandbox", blame=blame, kind="x", message=""),)
    episode = Episode(id=str(number), task_id="t", task_key="k", trajectories=(), failures=failures)
    return ScoredEpisode(episode=episode, score=Score(value=score, reason="" if score is not None else "no verdict"))


def _group(*episodes: ScoredEpisode) -> Group:
    return Group(index=0, task_id="t", task_key="k", episodes=episodes)


def group_advantages(group: Group, *, normalize_std: bool, min_group_size: int) -> GroupAdvantages:
    return batch_advantages([group], ObjectiveConfig(normalize_std=normalize_std), min_group_size=min_group_size)[0]


def test_grpo_equals_its_closed_form() -> None:
    scores = [0.0, 1.0, 0.25, 0.5]
    group = _group(*(_episode(n, score) for n, score in enumerate(scores)))
    result = group_advantages(group, normalize_std=True, min_group_size=2)
    assert not result.drop_reason
    assert result.values == pytest.approx((np.array(scores) - np.mean(scores)) / (np.std(scores, ddof=1) + 1e-4), abs=1e-15)
    plain = group_advantages(group, normalize_std=False, min_group_size=2)
    assert plain.values == pytest.approx(np.array(scores) - np.mean(scores), abs=1e-15)


def test_excluded_episodes_do_not_change_the_baseline() -> None:
    counted = [_episode(0, 0.0), _episode(1, 1.0)]
    alone = group_advantages(_group(*counted), normalize_std=True, min_group_size=2)
    extra = [_episode(2, 1.0, Blame.INFRASTRUCTURE), _episode(3, None), _episode(4, 0.0, Blame.TASK)]
    mixed = group_advantages(_group(*counted, *extra), normalize_std=True, min_group_size=2)
    assert mixed.values == (*alone.values, None, None, None)


def test_a_user_supplied_estimator_gets_counted_scores_and_its_failure_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "theirs.py"
    file.write_text(
        "def longest(groups, *, most):\n"
        "    if len(groups) > most:\n"
        "        raise MemoryError('too many')\n"
        "    return [[float(len(scores)) if score else 0 for score in scores] for scores in groups]\n"
        "def short(groups):\n"
        "    return groups[1:]\n"
    )
    settings = ObjectiveConfig(advantage=Part(f"{file}:longest", options={"most": 1}))
    group = _group(_episode(0, 1.0), _episode(1, 1.0, Blame.INFRASTRUCTURE), _episode(2, None), _episode(3, 0.0))
    (result,) = batch_advantages([group], settings, min_group_size=2)
    assert result.values == (2.0, None, None, 0.0)
    with pytest.raises(PluginError, match=r"objective\.advantage .*:longest. failed on 2 groups: MemoryError: too many .*theirs\.py:3"):
        batch_advantages([group, group], settings, min_group_size=2)
    with pytest.raises(PluginError, match="2 groups need 2 lists, not a list of 1"):
        batch_advantages([group, group], ObjectiveConfig(advantage=f"{file}:short"), min_group_size=2)


def test_a_policy_failure_counts() -> None:
    group = _group(_episode(0, 0.0, Blame.POLICY), _episode(1, 1.0))
    assert None not in group_advantages(group, normalize_std=True, min_group_size=2).values


@pytest.mark.parametrize(
    ("episodes", "minimum", "reason"),
    [
        ([_episode(0, 1.0)], 1, "all_equal"),
        ([_episode(0, 1.0)], 2, "too_few"),
        ([], 1, "too_few"),
        ([_episode(0, 0.5), _episode(1, 0.5)], 2, "all_equal"),
        ([_episode(0, 0.5), _episode(1, 1.0, Blame.INFRASTRUCTURE)], 2, "too_few"),
        ([_episode(0, float("inf")), _episode(1, 1.0)], 2, "non_finite_score"),
    ],
)
def test_groups_without_a_signal_are_dropped_with_a_reason(episodes: list[ScoredEpisode], minimum: int, reason: str) -> None:
    result = group_advantages(_group(*episodes), normalize_std=True, min_group_size=minimum)
    assert result.drop_reason
    assert result.drop_reason.startswith(reason)
    assert set(result.values) <= {None}


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "reinforce++", "reinforce++-baseline"])
def test_scores_far_above_1_have_a_signal(advantage: str) -> None:
    """Credits divided by a standard deviation are near 1, less than the rounding of scores above 1e9."""
    settings = _settings(advantage=advantage, normalize_std=True)
    (result,) = batch_advantages([_group(_episode(0, 1e10), _episode(1, 3e10))], settings, min_group_size=2)
    assert not result.drop_reason and result.values[1] is not None and result.values[1] > 0.7


def _settings(**changes: object) -> ObjectiveConfig:
    return ObjectiveConfig.model_validate(changes)


def test_rloo_equals_the_leave_one_out_sum() -> None:
    scores = [0.0, 1.0, 0.25, 0.5]
    expected = [score - np.mean(scores[:i] + scores[i + 1 :]) for i, score in enumerate(scores)]
    assert rloo([scores], normalize_std=False)[0] == pytest.approx(expected, abs=1e-15)
    assert rloo([scores], normalize_std=True)[0] == pytest.approx(np.array(expected) / (np.std(scores, ddof=1) + 1e-4), abs=1e-14)
    results = batch_advantages([_group(*(_episode(n, s) for n, s in enumerate(scores)))], _settings(advantage="rloo"), min_group_size=2)
    assert results[0].values == pytest.approx(expected, abs=1e-15), "not divided by the std by default"


def test_reinforce_plus_plus_has_one_baseline_for_the_batch() -> None:
    """A group of equal scores, even a group of one, still gets advantages from the comparison with other groups."""
    groups = [_group(_episode(0, 1.0), _episode(1, 1.0)), _group(_episode(2, 0.0)), _group(_episode(3, 0.25), _episode(4, None))]
    results = batch_advantages(groups, _settings(advantage="reinforce++"), min_group_size=1)
    flat = [value for result in results for value in result.values if value is not None]
    scores = np.array([1.0, 1.0, 0.0, 0.25])
    assert flat == pytest.approx((scores - scores.mean()) / (scores.std(ddof=1) + 1e-4), abs=1e-14)
    assert results[2].values[1] is None


def test_reinforce_plus_plus_baseline_centres_by_group_and_scales_by_batch() -> None:
    groups = [
        _group(_episode(0, 1.0), _episode(1, 0.0)),
        _group(_episode(2, 0.1), _episode(3, 0.3)),
        _group(_episode(4, 0.7), _episode(5, 0.7)),
    ]
    results = batch_advantages(groups, _settings(advantage="reinforce++-baseline"), min_group_size=2)
    centred = np.array([0.5, -0.5, -0.1, 0.1, 0.0, 0.0])
    expected = centred / (centred.std(ddof=1) + 1e-4)
    assert [*results[0].values, *results[1].values] == pytest.approx(expected[:4], abs=1e-14)
    assert results[2].drop_reason == "all_equal"


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "reinforce++", "reinforce++-baseline"])
@pytest.mark.parametrize("normalize_std", [True, False])
def test_a_batch_without_preference_is_dropped(advantage: str, normalize_std: bool) -> None:
    """All scores equal to 0.1, whose sums are not exact; a group of one; no group."""
    groups = [_group(*(_episode(n, 0.1) for n in range(3))), _group(_episode(3, 0.1))]
    settings = _settings(advantage=advantage, normalize_std=normalize_std)
    assert [result.drop_reason for result in batch_advantages(groups, settings, min_group_size=1)] == ["all_equal"] * 2
    assert batch_advantages([], settings, min_group_size=1) == []


def test_a_dropped_group_does_not_change_the_baseline() -> None:
    counted = [_group(_episode(0, 1.0), _episode(1, 0.0)), _group(_episode(2, 0.5), _episode(3, 0.2))]
    broken = _group(_episode(4, float("inf")), _episode(5, 9.0))
    settings = _settings(advantage="reinforce++")
    assert batch_advantages([*counted, broken], settings, min_group_size=2)[:2] == batch_advantages(counted, settings, min_group_size=2)


def test_penalties_are_subtracted_from_scores() -> None:
    group = _group(_episode(0, 1.0), _episode(1, 1.0))
    results = batch_advantages([group], _settings(normalize_std=False), min_group_size=2, penalties={"0": 0.5})
    assert results[0].values == pytest.approx((-0.25, 0.25))


def test_turns_are_credited_with_later_rewards() -> None:
    rewards = [[[1.0, 0.0], [0.5]], [[0.0, 0.0, 1.0]]]
    flat = np.array([1.0, 0.0, 0.5, 0.0, 0.0, 1.0])
    z = (flat - flat.mean()) / (flat.std(ddof=1) + 1e-4)
    advantages = turn_advantages(rewards, normalize_std=True)
    assert advantages[0][0] == pytest.approx([z[0] + z[1], z[1]])
    assert advantages[0][1] == pytest.approx([z[2]])
    assert advantages[1][0] == pytest.approx([z[3] + z[4] + z[5], z[4] + z[5], z[5]])
    assert turn_advantages([[[0.1, 0.1]], [[0.1]]], normalize_std=True) == [[[0.0, 0.0]], [[0.0]]]
    assert turn_advantages([], normalize_std=True) == []


@pytest.mark.slow
@pytest.mark.parametrize(("advantage", "normalize_std"), [("grpo", True), ("grpo", False), ("rloo", False)])
def test_advantages_equal_trls(advantage: str, normalize_std: bool) -> None:
    """TRL's own scoring code: runs the unchanged source lines between the rewards and the advantages.

    RLOO with a std has no counterpart: TRL scales those advantages by the batch.
    """
    groups = np.random.default_rng(0).random((5, 4))
    theirs = _trl_advantages(advantage, torch.tensor(groups), "group" if normalize_std else "none")
    episodes = iter(range(20))
    scored_groups = [_group(*(_episode(next(episodes), float(score)) for score in row)) for row in groups]
    ours = batch_advantages(scored_groups, _settings(advantage=advantage, normalize_std=normalize_std), min_group_size=2)
    assert [value for result in ours for value in result.values] == pytest.approx(theirs.tolist(), abs=1e-6)  # TRL's std is float32


def _trl_advantages(advantage: str, rewards: torch.Tensor, scale: str) -> torch.Tensor:
    from trl.trainer import grpo_trainer, rloo_trainer

    module, method, first = {
        "grpo": (grpo_trainer, grpo_trainer.GRPOTrainer._generate_and_score_completions, 'if self.multi_objective_aggregation == "sum'),
        "rloo": (rloo_trainer, rloo_trainer.RLOOTrainer._generate_and_score_completions, "# Apply weights to each reward function"),
    }[advantage]
    source = textwrap.dedent(inspect.getsource(method))
    last = "elif self.multi_objective_aggregation" if advantage == "grpo" else "# Unscorable completions"
    body = source[source.rindex("\n", 0, source.index(first)) + 1 : source.index(last)].rstrip() + "\n"
    owner = SimpleNamespace(
        multi_objective_aggregation="sum_then_normalize",
        reward_weights=torch.ones(1, dtype=torch.float64),
        scale_rewards=scale,
        reward_clip_range=None,
        beta=0.0,
        normalize_advantages=False,
    )
    names = {
        "self": owner,
        "rewards_per_func": rewards.reshape(-1, 1),
        "unscorable_mask": torch.zeros(rewards.numel(), dtype=torch.bool),
        "num_generations": rewards.shape[1],
        "device": "cpu",
    }
    exec(textwrap.dedent(body), vars(module) | names, namespace := {})
    advantages: torch.Tensor = namespace["advantages"]
    return advantages


def test_the_default_scale_of_each_estimator() -> None:
    """GRPO and REINFORCE++ divide by the standard deviation, as their papers do, and RLOO does not."""
    scores = [[0.0, 0.5, 1.0], [0.2, 0.2]]
    for function in (grpo, reinforce_plus_plus, reinforce_plus_plus_baseline):
        assert function(scores) == function(scores, normalize_std=True) != function(scores, normalize_std=False)
    assert rloo(scores) == rloo(scores, normalize_std=False) != rloo(scores, normalize_std=True)


def test_a_score_at_the_mean_keeps_its_groups_preference() -> None:
    advantages = reinforce_plus_plus_baseline([[0.0, 0.5, 1.0], [0.3, 0.3]], normalize_std=False)
    assert advantages == [pytest.approx([-0.5, 0.0, 0.5]), [0.0, 0.0]]


@pytest.mark.parametrize(
    ("result", "error_text"),
    [
        (None, "2 groups need 2 lists, not a value of type NoneType"),
        ([[0.0, 1.0]], "2 groups need 2 lists, not a list of 1"),
        ([[0.0, 1.0], 5], "group 1 of 1 scores needs 1 advantages, not a value of type int"),
        ([[0.0, 1.0], "x"], "group 1 of 1 scores needs 1 advantages, not a str of 1"),
        ([[0.0], [1.0]], "group 0 of 2 scores needs 2 advantages, not a list of 1"),
        ([[0.0, True], [0.0]], "group 0 contains a value of type bool instead of a float"),
        ([[0.0, 1.0], ["1"]], "group 1 contains a str of 1 instead of a float"),
        ([[0.0, 1.0], [None]], "group 1 contains a value of type NoneType instead of a float"),
    ],
)
def test_invalid_results_of_an_estimator_raise(result: object, error_text: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_advantages(result, [[0.5, 0.5], [0.1]])
    assert str(caught.value) == error_text
    assert check_advantages([(1, 0.5), [2.0]], [[0.5, 0.5], [0.1]]) == [[1.0, 0.5], [2.0]]
