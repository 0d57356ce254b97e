from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config import Recipe, build
from agentrl.errors import RecipeError
from agentrl.objective import assemble, counted_samples
from agentrl.objective.branches import captured_tokens
from agentrl.records import Blame, Episode, Failure, Group, Message, Score, ScoredEpisode, Trajectory, Turn, VersionSpan

RECIPE: Recipe = build({"name": "t", "policy": {"model": "m"}, "tasks": {"family": "a:b"}})


def _turn(prompt: list[int], completion: list[int], *, logprob: float = -1.0, version: int = 0) -> Turn:
    return Turn(
        prompt_ids=tuple(prompt),
        completion_ids=tuple(completion),
        logprobs=(logprob,) * len(completion),
        versions=(VersionSpan(version=version, start=0, end=len(completion)),) if completion else (),
        message=Message(role="assistant", content=""),
        finish_reason="stop",
    )


def _scored(name: str, score: float, *trajectory_turns: list[Turn], failures: tuple[Failure, ...] = ()) -> ScoredEpisode:
    trajectories = tuple(Trajectory(agent=f"a{n}", turns=tuple(turns)) for n, turns in enumerate(trajectory_turns))
    episode = Episode(id=name, task_id="t", task_key="k", trajectories=trajectories, failures=failures)
    return ScoredEpisode(episode=episode, score=Score(value=score))


def _group(index: int, *episodes: ScoredEpisode) -> Group:
    return Group(index=index, task_id="t", task_key="k", episodes=episodes)


_ids = st.lists(st.integers(0, 9), max_size=5)
_first = st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=5), _ids)
_turns = st.builds(lambda first, rest: [first, *rest], _first, st.lists(st.tuples(_ids, _ids), max_size=3))


@given(st.lists(st.lists(_turns, min_size=1, max_size=2), min_size=2, max_size=4))
def test_every_sampled_token_is_trained_once_and_no_other(episodes: list[list[list[tuple[list[int], list[int]]]]]) -> None:
    """Completion tokens get distinct ids from 100 and their negated id as logprob, so that any mix-up is detected."""
    fresh = iter(range(100, 10_000))
    scored: list[ScoredEpisode] = []
    sampled: set[int] = set()
    for number, shapes in enumerate(episodes):
        trajectories = []
        for turn_shapes in shapes:
            turns = []
            for prompt, completion_shape in turn_shapes:
                completion = [next(fresh) for _ in completion_shape]
                sampled.update(completion)
                spans = tuple(VersionSpan(version=token, start=at, end=at + 1) for at, token in enumerate(completion))
                turns.append(
                    Turn(
                        prompt_ids=tuple(prompt),
                        completion_ids=tuple(completion),
                        logprobs=tuple(-float(token) for token in completion),
                        versions=spans,
                        message=Message(role="assistant", content=""),
                        finish_reason="stop",
                    )
                )
            trajectories.append(turns)
        scored.append(_scored(f"e{number}", float(number), *trajectories))
    batch = assemble(3, [_group(0, *scored)], RECIPE).batch
    trained = [token for sample in batch.samples for token, on in zip(sample.token_ids, sample.loss_mask, strict=True) if on]
    assert sorted(trained) == sorted(sampled)
    assert batch.denominator == captured_tokens([_group(0, *scored)], ()) == len(sampled)
    for sample in batch.samples:
        for token, on, logprob, advantage, version in zip(
            sample.token_ids, sample.loss_mask, sample.logprobs, sample.advantages, sample.versions, strict=True
        ):
            assert on == (token >= 100)
            assert (logprob, version) == ((-float(token), token) if on else (0.0, -1))
            assert on or advantage == 0.0


def test_tokens_are_the_turns_end_to_end_and_the_advantage_is_broadcast() -> None:
    good = _scored("good", 1.0, [_turn([1, 2], [3]), _turn([4], [5, 6], version=2)], [_turn([7], [8])])
    bad = _scored("bad", 0.0, [_turn([1], [9])])
    first, helper, last = assemble(0, [_group(5, good, bad)], RECIPE).batch.samples
    assert first.token_ids == (1, 2, 3, 4, 5, 6)
    assert first.loss_mask == (False, False, True, False, True, True)
    assert first.versions == (-1, -1, 0, -1, 2, 2)
    assert first.advantages[2] == first.advantages[5] == helper.advantages[1] == -last.advantages[1] > 0
    assert (first.group_index, first.episode_id) == (5, "good")


def test_groups_without_a_sample_are_consumed() -> None:
    fault = Failure(stage="sandbox", blame=Blame.INFRASTRUCTURE, kind="gone", message="")
    groups = [
        _group(0, _scored("a", 1.0, [_turn([1], [2])]), _scored("b", 1.0, [_turn([1], [2])])),
        _group(1, _scored("a", 1.0, [_turn([1], [2])])),
        _group(2, _scored("a", 1.0, [_turn([1], [2], logprob=math.nan)]), _scored("b", 0.0, [_turn([1], [2])])),
        _group(3, _scored("a", math.inf, [_turn([1], [2])]), _scored("b", 0.0, [_turn([1], [2])])),
        _group(4, _scored("a", 1.0, [_turn([], [2])]), _scored("b", 0.0, [_turn([1], [2])])),
        _group(5, _scored("a", 1.0, [_turn([1], [])]), _scored("b", 0.0, [_turn([1], [])])),
        _group(6, _scored("a", 1.0, [_turn([1], [2])]), _scored("b", 0.0, [_turn([1], [2])], failures=(fault,))),
    ]
    assembled = assemble(0, groups, RECIPE)
    assert assembled.batch.samples == ()
    assert assembled.batch.denominator == 0
    assert assembled.batch.group_indices == tuple(range(7))
    names = [assembled.drop_reasons[index].split(":")[0].split(" ")[0] for index in range(7)]
    assert names == ["all_equal", "too_few", "non_finite_logprob", "non_finite_score", "no_prompt", "no_sampled_token", "too_few"]


def test_a_bad_logprob_in_an_excluded_episode_is_ignored() -> None:
    fault = Failure(stage="sandbox", blame=Blame.INFRASTRUCTURE, kind="gone", message="")
    broken = _scored("c", 1.0, [_turn([1], [2], logprob=math.nan)], failures=(fault,))
    group = _group(0, _scored("a", 1.0, [_turn([1], [2])]), _scored("b", 0.0, [_turn([1], [2])]), broken)
    assert [sample.episode_id for sample in assemble(0, [group], RECIPE).batch.samples] == ["a", "b"]


def test_a_one_token_completion_is_a_sample() -> None:
    group = _group(0, _scored("a", 1.0, [_turn([1], [2])]), _scored("b", 0.0, [_turn([1], [3])]))
    assert [sample.loss_mask for sample in assemble(0, [group], RECIPE).batch.samples] == [(False, True)] * 2


def test_an_episode_above_the_context_excludes_its_group() -> None:
    longest = RECIPE.policy.max_model_len
    fits = _scored("a", 1.0, [_turn([1] * (longest - 1), [2])])
    too_long = _scored("b", 0.0, [_turn([1], [2])], [_turn([1] * (longest - 1), [2]), _turn([], [3])])
    groups = [_group(0, fits, _scored("b", 0.0, [_turn([1], [2])])), _group(1, fits, too_long)]
    assembled = assemble(0, groups, RECIPE)
    assert {sample.group_index for sample in assembled.batch.samples} == {0}
    assert assembled.drop_reasons == {1: "too_long in episode b"}
    assert assembled.batch.group_indices == (0, 1)
    assert len(counted_samples(groups)) == 5
    assert len(counted_samples(groups, longest=longest)) == 2


def _with(**objective: object) -> Recipe:
    return build({"name": "t", "policy": {"model": "m"}, "tasks": {"family": "a:b"}, "objective": objective})


def _rewarded(scored: ScoredEpisode, *rewards: tuple[float, ...]) -> ScoredEpisode:
    return replace(scored, score=replace(scored.score, turn_rewards=rewards))


def test_turn_rewards_are_added_to_the_turns_they_belong_to() -> None:
    """Equal scores give no advantages; different turn rewards do."""
    good = _rewarded(_scored("good", 1.0, [_turn([1], [2]), _turn([3], [4])]), (1.0, 0.0))
    bad = _rewarded(_scored("bad", 1.0, [_turn([1], [5, 6])]), (0.5,))
    recipe = _with(turn_coef=2.0, normalize_std=False)
    first, second = assemble(0, [_group(0, good, bad)], recipe).batch.samples
    assert first.advantages == pytest.approx((0.0, 0.0, 0.0, -1.0))  # rewards to come: (1 - 0.5) + (0 - 0.5), then 0 - 0.5
    assert second.advantages == (0.0, 0.0, 0.0)
    different = [replace(good, score=replace(good.score, value=0.0)), bad]
    first, second = assemble(0, [_group(0, *different)], recipe).batch.samples
    assert first.advantages == pytest.approx((0.0, -0.5, 0.0, -1.5))
    assert second.advantages == pytest.approx((0.0, 0.5, 0.5))


def test_missing_turn_rewards_raise_and_equal_or_infinite_ones_exclude_the_group() -> None:
    plain = _group(0, _scored("a", 1.0, [_turn([1], [2])]), _scored("b", 0.0, [_turn([1], [2])]))
    with pytest.raises(RecipeError, match=r"episode a has no turn rewards.*\n.*fix: "):
        assemble(0, [plain], _with(turn_coef=1.0))
    same = [_rewarded(_scored(name, 0.5, [_turn([1], [2])]), (0.1,)) for name in "abc"]
    assert assemble(0, [_group(0, *same)], _with(turn_coef=1.0)).drop_reasons == {0: "all_equal"}
    broken = _group(0, _rewarded(_scored("a", 1.0, [_turn([1], [2])]), (math.inf,)), *same)
    assert assemble(0, [broken], _with(turn_coef=1.0)).drop_reasons == {0: "non_finite_score"}


def test_penalties_are_subtracted_before_the_baseline() -> None:
    group = _group(0, _scored("a", 1.0, [_turn([1], [2])]), _scored("b", 1.0, [_turn([1], [3])]))
    batch = assemble(0, [group], _with(normalize_std=False), penalties={"a": 1.0}).batch
    assert [sample.advantages[1] for sample in batch.samples] == [-0.5, 0.5]


def test_penalties_are_computed_from_every_episode_that_counts_and_no_other() -> None:
    fault = Failure(stage="sandbox", blame=Blame.INFRASTRUCTURE, kind="gone", message="")
    lost = _scored("c", 1.0, [_turn([1], [2])], failures=(fault,))
    equal = _group(0, _scored("a", 1.0, [_turn([1], [2])], [_turn([1], [])]), _scored("b", 1.0, [_turn([1], [3])]), lost)
    broken = _group(1, _scored("d", 1.0, [_turn([1], [2], logprob=math.nan)]), _scored("e", 1.0, [_turn([1], [3])]))
    samples = counted_samples([equal, broken])
    assert [sample.episode_id for sample in samples] == ["a", "b"]
    assert [(sample.advantages, sample.rewards) for sample in samples] == [((0.0, 0.0), ())] * 2
    cut = _group(0, _scored("a", 1.0, [_turn([1], [2]), _turn([3], [])]), _scored("b", 1.0, [_turn([1], [3])]))
    assert [sample.token_ids for sample in counted_samples([cut])] == [(1, 2, 3), (1, 3)], "the last turn has no token"


def test_an_empty_step_is_an_empty_batch() -> None:
    batch = assemble(0, [], RECIPE).batch
    assert (batch.samples, batch.denominator, batch.group_indices) == ((), 0, ())
    assert counted_samples([]) == ()


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "reinforce++", "reinforce++-baseline", "gae"])
@pytest.mark.parametrize("scores", [(1e300, -1e300), (1.7e308, 1.6e308), (1e39, 0.0)])
def test_overflowing_advantages_exclude_the_group(advantage: str, scores: tuple[float, float]) -> None:
    """1e300 cannot be squared, 1.7e308 cannot be summed, and 1e39 is a valid score but not a float32."""
    changes = {"critic": {}} if advantage == "gae" else {}
    recipe = build({**RECIPE.model_dump(mode="json"), "objective": {"advantage": advantage, "normalize_std": False}, **changes})
    group = _group(0, *(_scored(name, score, [_turn([1], [2])]) for name, score in zip("ab", scores, strict=True)))
    assembled = assemble(0, [group], recipe)
    assert assembled.drop_reasons == {0: "non_finite_advantage"} and assembled.batch.samples == ()
    assert assembled.batch.group_indices == (0,)


def test_overflowing_turn_rewards_exclude_the_group() -> None:
    huge = [_rewarded(_scored(name, 1.0, [_turn([1], [2])]), (reward,)) for name, reward in (("a", 1e300), ("b", -1e300))]
    assert assemble(0, [_group(0, *huge)], _with(turn_coef=1.0)).drop_reasons == {0: "non_finite_advantage"}


def test_advantages_beyond_float32_exclude_the_group() -> None:
    """On both sides of zero. The largest float32 itself is valid."""
    largest = 3.4028234663852886e38

    def dropped(*scores: float) -> dict[int, str]:
        group = _group(0, *(_scored(str(n), score, [_turn([1], [2])]) for n, score in enumerate(scores)))
        return dict(assemble(0, [group], _with(normalize_std=False)).drop_reasons)

    assert dropped(2 * largest, 0.0) == {}, "half the difference, exactly"
    assert dropped(0.0, 0.0, -1e39) == {0: "non_finite_advantage"}, "2/3 of it below the mean, 1/3 above"
    assert dropped(0.0, 0.0, 1e39) == {0: "non_finite_advantage"}


def test_a_group_without_a_counted_episode_has_too_few() -> None:
    fault = Failure(stage="sandbox", blame=Blame.INFRASTRUCTURE, kind="gone", message="")
    group = _group(0, *(_scored(name, 1.0, [_turn([1], [2])], failures=(fault,)) for name in "ab"))
    assert assemble(0, [group], RECIPE).drop_reasons[0].startswith("too_few: 0 scored episodes")


def test_samples_carry_their_rollouts_token_count() -> None:
    two = _scored("two", 1.0, [_turn([1], [2, 3])], [_turn([1], [4])])
    samples = assemble(0, [_group(0, two, _scored("one", 0.0, [_turn([1], [5])]))], RECIPE).batch.samples
    assert [sample.rollout_tokens for sample in samples] == [3, 3, None]


@pytest.mark.parametrize("critic", [False, True])
def test_forced_tokens_are_context(critic: bool) -> None:
    """For example the end-of-thinking tokens between thinking and answer."""
    turn = replace(_turn([1], [2, 3, 4, 5]), forced=(1, 2), logprobs=(-1.0, -7.0, -7.0, -1.0))
    group = _group(0, _scored("a", 1.0, [turn]), _scored("b", 0.0, [_turn([1], [6])]))
    changes = {"critic": {}, "objective": {"advantage": "gae"}} if critic else {"objective": {"normalize_std": False}}
    sample = assemble(0, [group], build({**RECIPE.model_dump(mode="json"), **changes})).batch.samples[0]
    assert sample.token_ids == (1, 2, 3, 4, 5)
    assert sample.loss_mask == (False, True, False, False, True)
    assert sample.logprobs == (0.0, -1.0, 0.0, 0.0, -1.0)
    assert sample.versions == (-1, 0, -1, -1, 0)
    assert sample.rewards == ((0.0, 0.0, 0.0, 0.0, 1.0) if critic else ())
    assert sample.advantages == (() if critic else (0.0, 0.5, 0.0, 0.0, 0.5))
